"""``gecko plan``: an estimate of what a training run needs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gecko.cli.command import FAILED, Command, echo
from gecko.records import argument, option
from gecko.runtime.terminal import Terminal

if TYPE_CHECKING:
    from gecko.plan import Plan
    from gecko.plan.dry_run import Verification


WORDS = {
    "parameters": "float32, divided among {divided} GPUs",
    "gradients": "float32, divided in the same way; those that exist at the peak",
    "optimizer": "two moments of AdamW in float32 (Muon: one), divided in the same way",
    "activations kept": "for {rows} × {length:,} tokens, with activation_checkpointing={checkpointing}",
    "block in progress": "activations and gradients of the block that is differentiated",
    "logits and loss": "blocks of logits, gradients of hidden states and head, states; 0 if freed at the peak",
    "communication buffers": "gathered weights, gradients not yet reduced, the context exchange",
    "other": "work of the optimizer, counters",
    "carried states": "float32, of all rows of this GPU, before and after a step",
    "reserve": "assumed: 4 GB for CUDA and NCCL, and 5 % lost to fragmentation",
    "linear": "projections and feed-forward: 6 per parameter",
    "attention": "{keys}; scores are recomputed in backward",
    "memory": "chunk summaries, their recurrence, one read",
    "CEMA": "Toeplitz products within 64 tokens, the modes across",
    "norms": "running statistics of groups",
    "head": "logits and their gradients",
    "recomputed": "forward once more, with activation_checkpointing={checkpointing}",
    "gather weights": "blocks twice, embedding and head once; for each of {accumulation} accumulated parts",
    "reduce gradients": "float32, once per part, over {divided} GPUs",
    "sum over replicas": "float32, over {replicate} copies",
    "context exchange": "{layer} per layer and row forward, the same backward",
}
"""What each part of memory, FLOPs and traffic is, with numbers of the plan."""
CAPTURED = {
    "parameters": "float32, divided among {divided} GPUs, and whole for captured steps",
    "gradients": "float32, whole for captured steps",
    "gather weights": "float32, once a step",
    "reduce gradients": "float32, once a step, over {divided} GPUs",
}
"""The same of ``capture=true`` on several GPUs."""


class PlanTraining(Command):
    """Estimate the memory, FLOPs, communication and time of a training run without starting it.

    Memory is measured: the step's code runs on tensors without numbers, with a few blocks, which takes seconds. It
    needs the extra ``kernels``; without it the memory of parameters, gradients and optimizer is shown, which is exact.
    FLOPs are those of the code. Times depend on the two assumptions.

    With ``--gpus``, a recipe that does not fit gets another mesh, activation checkpointing and accumulation: the
    fastest that fit. What KEY=VALUE sets stays. The rows that a GPU can serve and the command to train come last.

    ``--verify`` runs whole steps, for ranks at the corners of the mesh: it checks that the ranks' communication fits
    together. It fails if the plan's memory is off by more than 1 %.

    **Examples**

        gecko plan gecko_7b --gpus 256 --gpu h100

        gecko plan gecko_7b --gpus 8 --price 2.5

        gecko plan gecko_7b --verify

        gecko plan gecko_1b parallel.replicate=1 parallel.shard=none batch_size=8 --gpus 8
    """

    recipe: str = argument("RECIPE")
    """Name of a recipe, or path of a run's recipe.json."""
    overrides: list[str] = argument("KEY=VALUE...", [])
    """Changes to the recipe's fields."""
    gpus: int | None = option(min=1, show_default="as the recipe")
    """Number of GPUs, 8 per node."""
    gpu: str = "h100"
    """Kind of GPU: a100, h100, h200 or b200."""
    price: float | None = option(min=0, metavar="DOLLARS")
    """Price of a GPU for an hour, for the cost of the run."""
    efficiency: float = 0.5
    """Assumed fraction of peak FLOP/s."""
    overlap: float = 0.8
    """Assumed fraction of compute time that hides communication."""
    verify: bool = False
    """Also run one step of some ranks without GPUs, and compare the memory."""
    as_json: bool = option(False, "--json")
    """Print JSON instead of tables."""

    def run(self) -> None:
        from gecko.plan import Assumptions, find_gpu, find_plan, make_plan
        from gecko.plan.dry_run import verify
        from gecko.recipes import apply_overrides, get_recipe
        from gecko.train.settings import current_override

        run, gpu = apply_overrides(get_recipe(self.recipe), self.overrides), find_gpu(self.gpu)
        assumed, mesh = Assumptions(self.efficiency, self.overlap), run.parallel
        if self.gpus is not None:
            kept = {current_override(override).partition("=")[0] for override in self.overrides}
            plan = find_plan(run, self.gpus, gpu, assumed, kept, _measure)
        else:  # a mesh of any number gets as many of 8 as divide its batches
            any_number = math.gcd(8, run.batch_size // run.gradient_accumulation_steps)
            gpus = any_number if mesh.shard is None else mesh.replicate * mesh.shard * mesh.context
            _measure(plan := make_plan(run, gpus, gpu, assumed))
        known = facts(plan, self.price)
        dry_run = verify(plan.run, plan.sizes, plan.memory) if self.verify else None
        if self.as_json:
            if dry_run is not None:
                known["dry_run"] = {
                    "ranks": dry_run.ranks, "memory_bytes": with_total(dry_run.peak.uses),
                    "peak_in": dry_run.peak.moment, "planned_bytes": dry_run.planned, "difference": dry_run.difference,
                    "agreement": dry_run.agreement._asdict(), "graphs_by_depth": dry_run.graphs,
                    "passed": dry_run.passed, "seconds": dry_run.seconds, "host_bytes": dry_run.host_bytes,
                }  # fmt: skip
            echo(json.dumps(known, indent=2))
        else:
            _print(self.recipe, plan, known)
            if dry_run is not None:
                _print_dry_run(plan, dry_run)
        if dry_run is not None and not dry_run.passed:
            raise typer.Exit(FAILED)


def _measure(plan: Plan) -> None:
    """Measure the memory of a plan, and say of which one, because it takes seconds."""
    sizes, console = plan.sizes, Terminal(stderr=True)
    tried = (
        f"replicate {sizes.replicate}, shard {sizes.shard}, context {sizes.context}, "
        f"activation_checkpointing={plan.mode}, gradient_accumulation_steps={plan.run.gradient_accumulation_steps}"
    )
    with console.status(f"Running a step of a few blocks without numbers: {tried} …"):
        total = readable(plan.total)
    if plan.fits is False:
        console.print(f"{total} of {readable(plan.gpu.memory)}: {tried} does not fit", style="dim", soft_wrap=True)


def facts(plan: Plan, price: float | None = None) -> dict[str, Any]:
    """Return all numbers of the plan: bytes, seconds, and FLOPs per token."""
    from gecko.plan.counts import serving

    return {
        "gpus": plan.gpus, "gpu": plan.gpu.name, "parallel": dataclasses.asdict(plan.sizes),
        "memory_bytes": with_total(plan.memory),
        "peak_in": plan.peak[1], "measured": plan.measured, "fits": plan.fits,
        "flops_per_token": {name: part.total for name, part in plan.flops.items()} | {"recomputed": plan.recomputed},
        "bytes_sent_per_step": {name: kind.size for name, kind in plan.traffic.items()},
        "assumptions": dataclasses.asdict(plan.assumptions),
        "seconds": {"computing": plan.computing, "communicating": plan.communicating, "step": plan.step_seconds},
        "mfu": plan.utilisation, "tokens_per_second": plan.run.tokens_per_step / plan.step_seconds,
        "steps": plan.run.steps, "days": plan.days, "gpu_hours": plan.gpu_hours,
        "dollars": None if price is None or plan.gpu_hours is None else price * plan.gpu_hours,
        "settings": {
            "activation_checkpointing": plan.mode,
            "gradient_accumulation_steps": plan.run.gradient_accumulation_steps,
        },
        "command": None if plan.fits is False else plan.command, "serving": serving(plan.run.model, plan.gpu.memory),
    }  # fmt: skip


def _print(recipe: str, plan: Plan, known: Mapping[str, Any]) -> None:
    from gecko.plan.counts import VLLM_MEMORY, counts_of

    run, sizes, assumed, counts = plan.run, plan.sizes, plan.assumptions, counts_of(plan.run.model)
    console, dollars, served = Terminal(markup=True), known["dollars"], known["serving"]
    values = {
        "divided": plan.divided, "rows": plan.rows, "length": run.sequence_length // sizes.context,
        "checkpointing": plan.mode, "accumulation": run.gradient_accumulation_steps, "replicate": sizes.replicate,
        "keys": counts.keys(run.sequence_length),
        "layer": readable(counts.context_bytes(plan.itemsize, sizes.context)),
    }  # fmt: skip
    captured = CAPTURED if run.capture and plan.gpus > 1 else {}
    notes = {part: words.format(**values) for part, words in {**WORDS, **captured}.items()}
    console.print(
        f"[bold]{escape(recipe)}[/bold] on {plan.gpus} × {plan.gpu.name}: {sizes.replicate} × {sizes.shard} groups of "
        f"rows (replicate × shard), {sizes.context} GPUs per row (context); {run.tokens_per_step:,} tokens per "
        f"step, {plan.tokens:,.0f} on each GPU\n"
    )
    title = f"Memory of one GPU at the peak, in {plan.peak[1]}"
    print_parts(console, title, known["memory_bytes"], readable, notes)
    console.print(f"{readable(plan.total)} of {readable(plan.gpu.memory)}: [bold]{_verdict(plan)}[/bold]\n")
    flops, sent = (with_total(known[name]) for name in ("flops_per_token", "bytes_sent_per_step"))
    print_parts(console, "Compute, GFLOPs per token", flops, lambda count: f"{count / 1e9:,.3f}", notes)
    print_parts(console, "Bytes that one GPU sends per step", sent, readable, notes)
    console.print(
        "[bold]Time of a step[/bold]\n"
        f"compute        {plan.computing:8.3f} s   at {assumed.efficiency:.0%} of {plan.gpu.peak / 1e12:,.0f} TFLOP/s "
        "(assumed)\n"
        f"communication  {plan.communicating:8.3f} s   before overlap\n"
        f"step           {plan.step_seconds:8.3f} s   up to {plan.overlap:.0%} of compute hides communication "
        f"(assumed); {known['tokens_per_second']:,.0f} tokens/s, MFU {plan.utilisation:.0%}"
    )
    if plan.days is not None and run.steps is not None:
        cost = "" if dollars is None else f", [bold]${dollars:,.0f}[/bold]"
        console.print(
            f"[bold]{plan.days:,.1f} days[/bold] for {run.steps:,} steps, {run.tokens_before(run.steps):,} tokens; "
            f"{plan.gpu_hours:,.0f} GPU hours{cost}. Evaluations and checkpoints are not included."
        )
    else:
        console.print("The run ends by the clock, so it has no days and no cost: set steps=, for example steps=1000.")
    if served is not None:
        console.print(
            f"\n[bold]Served by one {plan.gpu.name}[/bold], with --dtype bfloat16\n"
            f"memory         {readable(served['weights_bytes'])} of weights, {readable(served['row_bytes'])} per row, "
            "whatever it has read\n"
            f"gecko serve    at most --rows {served['gecko_serve_rows']:,}\n"
            f"vLLM           at most --max-num-seqs {served['vllm_rows']:,}, with --gpu-memory-utilization "
            f"{VLLM_MEMORY}"
        )
    if known["command"] is not None:
        console.print("\n[bold]Command[/bold]")
        console.print(Text(known["command"]), soft_wrap=True)


def _verdict(plan: Plan) -> str:
    from gecko.plan import GPUS

    if plan.fits is None:
        return "exact, but without activations, loss and buffers, which need Triton: pip install 'gecko-lm[kernels]'"
    short = readable(plan.total - plan.gpu.memory)
    remedies = ["more GPUs", *[f"--gpu {name}" for name, gpu in GPUS.items() if gpu.memory >= plan.total][:1]]
    remedies += [] if plan.mode == "full" else ["activation_checkpointing=full"]
    remedies += ["a larger gradient_accumulation_steps"] if plan.rows > 1 else []
    return "fits" if plan.fits else f"does not fit, {short} short; try {' or '.join(remedies)}"


def _print_dry_run(plan: Plan, dry_run: Verification) -> None:
    console, peak, agreement = Terminal(markup=True), dry_run.peak, dry_run.agreement
    planned = {name: f"planned {readable(size)}" for name, size in plan.memory.items()}
    title = f"Dry run of {len(dry_run.ranks)} of {plan.gpus} ranks: memory at the peak, in {peak.moment}"
    print_parts(console, title, with_total(peak.uses), readable, planned)
    console.print(
        f"The plan, {readable(dry_run.planned)} without the reserve, is off by {dry_run.difference:+.1%}.\n"
        f"Collectives: {agreement.collectives:,} per rank, equal in the {agreement.groups} process groups of which "
        f"several ranks were run; {agreement.messages:,} sends, each with its receive."
    )
    if dry_run.graphs:
        counts = ", ".join(f"{count} with {depth} blocks" for depth, count in dry_run.graphs.items())
        console.print(f"Compiled graphs, of a narrow model on the CPU: {counts}.")
    verdict = "passed" if dry_run.passed else "failed"
    console.print(
        f"[bold]{verdict}[/bold] in {dry_run.seconds:.0f} s with {readable(dry_run.host_bytes)} of host memory"
    )


def with_total(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {**parts, "total": sum(parts.values())}


def print_parts(
    console: Console, title: str, parts: Mapping[str, Any], write: Callable[[Any], str], notes: Mapping[str, str] = {}
) -> None:
    """Print the parts and their total, each with its note, or without notes with its share."""
    total = parts["total"]
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, min_width=52)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="left" if notes else "right", style="dim")
    for name, value in parts.items():
        if name == "total":
            table.add_section()
        share = f"{value / total:.1%}" if total else ""
        table.add_row(name, write(value), notes.get(name, "") if notes else share)
    console.print(table)


def readable(size: int) -> str:
    """Format a number of bytes with a unit, such as ``1.5 GB``."""
    value = float(size)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
