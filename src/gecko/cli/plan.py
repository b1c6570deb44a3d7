"""``gecko plan``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gecko.cli.info import readable

if TYPE_CHECKING:
    from gecko.plan import Plan

MEMORY_WORDS = {
    "parameters": "float32, divided among {divided} GPUs",
    "gradients": "float32, divided likewise",
    "optimizer": "two moments of AdamW in float32, divided likewise",
    "activations kept": "of {rows} × {length:,} tokens at once, with activation_checkpointing={checkpointing}",
    "block in hand": "what one block keeps while it is differentiated, and its gradients",
    "logits and loss": "a block of logits, the gradients of hidden states and head",
    "communication buffers": "gathered weights, gradients not yet reduced, what context ranks hand over",
    "reserve": "assumed: 4 GB for CUDA and NCCL, and 5 % that the allocator cannot use",
}
FLOPS_WORDS = {
    "linear": "projections and feed-forward: 6 for each number in them",
    "attention": "{keys}; scores once more in backward",
    "memory": "summaries of chunks, their chain, one read",
    "CEMA": "Toeplitz products within 64 tokens, and the modes across",
    "norms": "running statistics of groups",
    "head": "logits and their gradients",
}
TRAFFIC_WORDS = {
    "gather weights": "blocks twice, embedding and head once; of {accumulation} accumulated parts each",
    "reduce gradients": "float32, once a step, over {divided} GPUs",
    "sum over replicas": "float32, over {replicate} copies",
    "context exchange": "{layer} a layer and row forward, again if recomputed, as much backward",
}


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or the recipe.json of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs, 8 to a node.")] = 8,
    gpu: Annotated[str, typer.Option(help="a100, h100, h200 or b200.")] = "h100",
    efficiency: Annotated[float, typer.Option(help="Assumed: part of the peak that products reach.")] = 0.5,
    overlap: Annotated[float, typer.Option(help="Assumed: part of computing that hides communication.")] = 0.8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what a training run takes before it is started: memory, work, traffic, time.

    Parameters, gradients and optimizer state are exact, FLOPs are those of the code, activations are good to 15 %.
    Times rest on the two assumptions.

    **Examples**

        gecko plan gecko_7b --gpus 256 --gpu h100

        gecko plan gecko_1b parallel.replicate=1 parallel.shard=none batch_size=8 --gpus 8
    """
    from gecko.plan import Assumptions, find_gpu, make_plan
    from gecko.recipes import apply_overrides, get_recipe

    run = apply_overrides(get_recipe(recipe), overrides or [])
    made = make_plan(run, gpus, find_gpu(gpu), Assumptions(efficiency, overlap))
    if as_json:
        typer.echo(json.dumps(facts(made), indent=2))
    else:
        _print(recipe, made)


def facts(plan: Plan) -> dict[str, Any]:
    """All numbers that the command shows; bytes, seconds, FLOPs a token."""
    return {
        "gpus": plan.gpus, "gpu": plan.gpu.name, "parallel": dataclasses.asdict(plan.sizes),
        "memory_bytes": {**plan.memory, "total": sum(plan.memory.values())},
        "fits": plan.fits,
        "flops_per_token": {name: part.total for name, part in plan.flops.items()} | {"recomputed": plan.recomputed},
        "bytes_sent_per_step": {name: kind.size for name, kind in plan.traffic.items()},
        "assumptions": dataclasses.asdict(plan.assumptions),
        "seconds": {"computing": plan.computing, "communicating": plan.communicating, "step": plan.step_seconds},
        "mfu": plan.utilisation, "tokens_per_second": plan.run.tokens_per_step / plan.step_seconds,
        "steps": plan.run.steps, "days": plan.days,
    }  # fmt: skip


def _print(recipe: str, plan: Plan) -> None:
    console = Console(highlight=False, width=max(100, Console().width))
    run, sizes = plan.run, plan.sizes
    console.print(
        f"[bold]{recipe}[/bold] on {plan.gpus} × {plan.gpu.name}: {sizes.replicate} × {sizes.shard} groups of rows "
        f"(replicate × shard), {sizes.context} GPUs to a row (context); a step of {run.tokens_per_step:,} tokens, "
        f"{plan.tokens:,.0f} on each GPU\n"
    )
    _table(console, "Memory of one GPU", plan.memory, readable, _words(MEMORY_WORDS, plan.memory, plan))
    total = sum(plan.memory.values())
    verdict = "fits" if plan.fits else "does not fit; try more GPUs, activation_checkpointing=full or accumulation"
    console.print(f"{readable(total)} of {readable(plan.gpu.memory)}: [bold]{verdict}[/bold]\n")
    work = {name: part.total for name, part in plan.flops.items()} | {"recomputed": plan.recomputed}
    words = [
        *_words(FLOPS_WORDS, plan.flops, plan),
        f"forward again, with activation_checkpointing={run.activation_checkpointing}",
    ]
    _table(console, "Computing, GFLOPs a token", work, lambda flops: f"{flops / 1e9:,.3f}", words)
    sent = {name: kind.size for name, kind in plan.traffic.items()}
    _table(console, "Bytes that one GPU sends in a step", sent, readable, _words(TRAFFIC_WORDS, sent, plan))
    _print_time(console, plan)


def _print_time(console: Console, plan: Plan) -> None:
    peak, assumed = plan.gpu.peak / 1e12, plan.assumptions
    console.print("[bold]Time of a step[/bold]")
    console.print(
        f"computing      {plan.computing:8.3f} s   at {assumed.efficiency:.0%} of {peak:,.0f} TFLOP/s (assumed)"
    )
    console.print(f"communicating  {plan.communicating:8.3f} s   if nothing hid it")
    console.print(
        f"together       {plan.step_seconds:8.3f} s   up to {assumed.overlap:.0%} of computing hides communication "
        f"(assumed); {plan.run.tokens_per_step / plan.step_seconds:,.0f} tokens/s, MFU {plan.utilisation:.0%}"
    )
    if plan.days is not None and plan.run.steps is not None:
        tokens = plan.run.steps * plan.run.tokens_per_step
        console.print(
            f"[bold]{plan.days:,.1f} days[/bold] for {plan.run.steps:,} steps, {tokens:,} tokens; "
            f"{plan.days * 24 * plan.gpus:,.0f} GPU hours. Evaluations and checkpoints come on top."
        )


def _words(words: dict[str, str], parts: Iterable[str], plan: Plan) -> list[str]:
    """The explanation of each part, with the plan's numbers in it."""
    from gecko.plan.counts import counts_of

    run, counts = plan.run, counts_of(plan.run.model)
    values = {
        "divided": plan.share.divided, "rows": plan.share.rows, "length": plan.share.length,
        "checkpointing": run.activation_checkpointing, "accumulation": run.accumulation,
        "keys": counts.keys(run.sequence_length), "replicate": plan.sizes.replicate,
        "layer": readable(counts.context_bytes(plan.share.itemsize, plan.sizes.context)),
    }  # fmt: skip
    return [words[part].format(**values) for part in parts]


def _table(console: Console, title: str, parts: dict[str, Any], write: Any, words: list[str]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for (name, value), line in zip(parts.items(), words, strict=True):
        table.add_row(name, write(value), line)
    table.add_section()
    table.add_row("total", write(sum(parts.values())), "")
    console.print(table)
