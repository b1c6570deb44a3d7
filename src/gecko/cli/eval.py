"""``gecko eval``: what a model can do, measured."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gecko.allocator import keep_freed_memory
from gecko.baselines import Llama
from gecko.cli.models import Dtype, load_any_model, trained_length
from gecko.cli.output import output_file
from gecko.denormals import flushed_denormals
from gecko.eval import GeckoModel, LlamaModel, Results
from gecko.eval.results import Report
from gecko.eval.texts import open_texts
from gecko.extras import require

Scored = GeckoModel | LlamaModel

app = typer.Typer(no_args_is_help=True, help="Measure what a model can do: every number with n and interval.")


@app.callback()
def _measuring(context: typer.Context) -> None:
    context.with_resource(flushed_denormals())


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or a run's: its newest checkpoint.")]
Texts = Annotated[list[str], typer.Argument(metavar="TEXT...", help="Files of any length, .gz and .zst too.")]
Out = Annotated[str | None, typer.Option("--out", "-o", metavar="F", help="Write everything to this JSON file.")]
Seed = Annotated[int, typer.Option(help="Of samples, shots and resampled intervals.")]
TokenizerSpec = Annotated[
    str | None, typer.Option("--tokenizer", metavar="SPEC", help="bytes or a path.", show_default="the model's own")
]
Device = Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu, cuda, cuda:1.")]
Joined = Annotated[bool, typer.Option("--joined", help="Read all files as one text, in order.")]
Renewed = Annotated[
    bool,
    typer.Option("--renewed-norms", help="Also as Megalodon's released evaluator does: norms of the last 6 chunks."),
]


@app.command()
def perplexity(
    model: Model, texts: Texts,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="L,...", help="Context lengths: 1K,4K,1M.", show_default="1K to 4M, as the texts allow"),
    ] = None,
    joined: Joined = False, renewed_norms: Renewed = False,
    out: Out = None, seed: Seed = 0, tokenizer: TokenizerSpec = None, device: Device = "auto",
    dtype: Dtype = None,
) -> None:  # fmt: skip
    """Perplexity against context length: the same tokens, cut into segments of each length.

    **Example**

        gecko eval perplexity runs/demo book.txt --lengths 1K,16K,256K --out perplexity.json
    """
    from gecko.eval.perplexity import perplexity as measure

    _check_output(out)
    files, chosen = open_texts(texts, joined=joined), None if lengths is None else _sizes("--lengths", lengths)
    models = _models(model, tokenizer, device, dtype, renewed_norms)
    with _progress() as report:
        results = _by_norms(models, lambda network: measure(network, files, chosen, seed=seed, report=report))
    _finish(results, models[0], out)


@app.command()
def positions(
    model: Model, texts: Texts,
    length: Annotated[str, typer.Option(help="Tokens of a segment.")] = "32K",
    chunk: Annotated[
        int | None, typer.Option(min=2, help="Tokens between borders.", show_default="the model's own")
    ] = None,
    first: Annotated[
        int | None, typer.Option(min=1, help="Tokens after a border to test.", show_default="chunk / 16")
    ] = None,
    segments: Annotated[int | None, typer.Option(min=1, help="At most so many.", show_default="all")] = None,
    joined: Joined = False, renewed_norms: Renewed = False,
    out: Out = None, tokenizer: TokenizerSpec = None, device: Device = "auto",
    dtype: Dtype = None,
) -> None:  # fmt: skip
    """Loss by position, mean and standard error, and a test whether it is higher after chunk borders.

    **Example**

        gecko eval positions runs/demo *.txt --length 8K --out positions.json
    """
    from gecko.eval.positions import Grid
    from gecko.eval.positions import positions as measure

    _check_output(out)
    size = _one_size("--length", length)
    files, models = open_texts(texts, joined=joined), _models(model, tokenizer, device, dtype, renewed_norms)
    border = chunk if chunk is not None else models[0].chunk_size
    if border is None:
        raise ValueError("this model's attention has no chunks: say where borders shall be looked for, by --chunk 512.")
    grid = Grid.of(size, border)
    grid = grid if first is None else dataclasses.replace(grid, first=first)
    with _progress() as report:
        results = _by_norms(models, lambda network: measure(network, files, grid, segments=segments, report=report))
    _finish(results, models[0], out)


@app.command()
def retrieval(
    model: Model,
    task: Annotated[str, typer.Argument(metavar="TASK", help="passkey, niah_single_1 or niah_single_2.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT...", help="The haystack of niah_single_2.", show_default=False)
    ] = None,
    lengths: Annotated[str, typer.Option(metavar="L,...", help="In tokens, the answer included.")] = "4K,8K,16K,32K",
    depths: Annotated[
        str, typer.Option(metavar="D,...", help="Shares of the haystack before the needle, or random, as RULER draws.")
    ] = "0,0.25,0.5,0.75,1",
    samples: Annotated[int, typer.Option(min=1, help="For each length and depth.")] = 20,
    out: Out = None, seed: Seed = 0, tokenizer: TokenizerSpec = None, device: Device = "auto",
    dtype: Dtype = None,
) -> None:  # fmt: skip
    """Find one number in a long text, over a grid of lengths and depths.

    **Examples**

        gecko eval retrieval runs/demo passkey --lengths 1K,4K

        gecko eval retrieval runs/demo niah_single_2 books/*.txt --depths random --samples 500
    """
    from gecko.eval.retrieval import RANDOM, Grid
    from gecko.eval.retrieval import retrieval as measure

    _check_output(out)
    places = None if depths == RANDOM else [_number("--depths", part) for part in depths.split(",")]
    grid = Grid(_sizes("--lengths", lengths), places, samples)
    files = open_texts(texts or [], joined=False)
    (network,) = _models(model, tokenizer, device, dtype, False)
    with _progress() as report:
        results = measure(network, task, grid, texts=files, seed=seed, report=report)
    _finish(results, network, out)


@app.command()
def diagnose(
    task: Annotated[str, typer.Argument(metavar="TASK", help="mqar, selective_copying or induction_heads.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="steps=800, size.items=16, model.memory=none.")
    ] = None,
    out: Out = None, device: Device = "auto",
) -> None:  # fmt: skip
    """Train a small model from scratch on a synthetic task, and test it by distance in chunks.

    **Example**

        gecko eval diagnose mqar size.length=256 model.chunk_size=32 model.memory=none steps=400
    """
    from gecko.eval.diagnosis import Diagnosis
    from gecko.eval.diagnosis import diagnose as measure
    from gecko.train.hardware import describe_hardware, select_device

    _check_output(out)
    place, diagnosis = select_device(device), _overridden(Diagnosis(), overrides or [])
    keep_freed_memory()
    with _progress() as report:
        results = measure(task, diagnosis, place, report=report)
    described = {"name": f"from scratch, {task}", "config": diagnosis.model.to_dict(), "device": str(place)}
    _report(results, described, out, describe_hardware(place))


@app.command()
def academic(
    model: Model,
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="TASK...", help="mmlu, piqa, ...: all if none is named.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Files such as piqa_val.arrow.", show_default="the hub")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first items of each.", show_default="all")] = None,
    out: Out = None, seed: Seed = 0, tokenizer: TokenizerSpec = None, device: Device = "auto",
    dtype: Dtype = None,
) -> None:  # fmt: skip
    """The short tasks of the paper's Table 1, its shots and metrics, by lm-evaluation-harness.

    **Example**

        gecko eval academic runs/demo piqa arc_easy --data data/academic --limit 100
    """
    from gecko.eval.academic import academic as measure

    _check_output(out)
    folder = None if data is None else Path(data).expanduser()
    (network,) = _models(model, tokenizer, device, dtype, False)
    _finish(measure(network, tasks or [], data=folder, limit=limit, seed=seed), network, out)


@app.command()
def scrolls(
    model: Model,
    task: Annotated[str, typer.Argument(metavar="TASK", help="narrative_qa, qasper or qmsum.")],
    data: Annotated[str, typer.Option(metavar="D", help="JSON Lines, or a name on the hub.")] = "tau/scrolls",
    shots_data: Annotated[
        str | None, typer.Option(metavar="D", help="Where shots are from.", show_default="other documents of --data")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first questions.", show_default="all")] = None,
    new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most of an answer.", show_default="64, 128, 256 by task")
    ] = None,
    out: Out = None, seed: Seed = 0, tokenizer: TokenizerSpec = None, device: Device = "auto",
    dtype: Dtype = None,
) -> None:  # fmt: skip
    """Questions about long documents: F1 for NarrativeQA and Qasper, ROUGE for QMSum.

    **Example**

        gecko eval scrolls runs/demo qmsum --data qmsum_val.jsonl --limit 10
    """
    from gecko.eval.scrolls import check_task
    from gecko.eval.scrolls import scrolls as measure
    from gecko.eval.scrolls_data import load_questions

    _check_output(out)
    check_task(task)  # before anything is fetched
    questions = load_questions(data, task, "validation")
    shots = None if shots_data is None else load_questions(shots_data, task, "train")
    (network,) = _models(model, tokenizer, device, dtype, False)
    with _progress() as report:
        results = measure(
            network, task, questions, shots=shots, limit=limit, new_tokens=new_tokens, seed=seed, report=report
        )
    _finish(results, network, out)


def _check_output(out: str | None) -> None:
    """Before hours of reading, not after them."""
    require("scipy.stats", "eval")
    if out is not None:
        output_file(out)


def _models(name: str, tokenizer: str | None, device: str, dtype: str | None, renewed: bool) -> Sequence[Scored]:
    """The model, and if asked for once more with renewed norms."""
    network, vocabulary = load_any_model(name, tokenizer, device, dtype)
    keep_freed_memory()
    if isinstance(network, Llama):
        if renewed:
            raise ValueError("--renewed-norms is for models whose norms remember; a Llama's do not. Leave it out.")
        return [LlamaModel(network, vocabulary, name, trained_length(name))]
    return [GeckoModel(network, vocabulary, name, renew_norms=renew) for renew in (False, True)[: 1 + renewed]]


@contextmanager
def _progress() -> Iterator[Report]:
    """Shows on a terminal how far an evaluation is."""
    console = Console(stderr=True)
    with console.status("reading") as status:
        yield status.update


def _by_norms(models: Sequence[Scored], measure: Callable[[Scored], Results]) -> Results:
    """One result of all; with several models, scores say which norm statistics they are with."""
    first, *others = [measure(model) for model in models]
    if not others:
        return first
    every = dict(zip(("all that was read", "last 6 chunks"), (first, *others), strict=True))
    scores = [
        dataclasses.replace(score, where={"norm statistics of": kind, **score.where})
        for kind, results in every.items() for score in results.scores
    ]  # fmt: skip
    details = {kind: dict(results.details) for kind, results in every.items()}
    return dataclasses.replace(first, scores=scores, details=details)


def _finish(results: Results, model: Scored, out: str | None) -> None:
    from gecko.train.hardware import describe_hardware

    hardware = describe_hardware(next(model.model.parameters()).device)
    results = dataclasses.replace(results, notes=[*results.notes, *model.notes])
    _report(results, model.describe(), out, hardware)


def _report(results: Results, model: Mapping[str, Any], out: str | None, hardware: Mapping[str, str]) -> None:
    console = Console(highlight=False)
    console.print(results.table(f"{results.evaluation}: {model['name']}"))
    if results.methods():
        console.print(f"intervals: {results.methods()}; seed {results.seed}")
    for note in results.notes:
        console.print(f"note: {note}", markup=False)
    if out is not None:
        results.save(output_file(out), model, shlex.join(["gecko", *sys.argv[1:]]), hardware)
        typer.echo(f"written to {out}", err=True)


def _sizes(option: str, given: str) -> list[int]:
    """``1K,4K,1M`` as numbers of tokens."""
    return [_size(option, part.strip()) for part in given.split(",")]


def _one_size(option: str, given: str) -> int:
    sizes = _sizes(option, given)
    if len(sizes) > 1:
        raise ValueError(f"{option} takes one number of tokens, such as 16K; got {given!r}. Measure each by itself.")
    return sizes[0]


def _size(option: str, part: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20}.get(part[-1:].upper(), 1)
    digits = part[:-1] if unit > 1 else part
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"{option} takes whole numbers of tokens, such as 1024, 16K or 1M; got {part!r}.")
    return int(digits) * unit


def _number(option: str, part: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise ValueError(f"{option} takes numbers in 0..1 separated by commas, or random; got {part!r}.") from None


def _overridden(default: Any, overrides: Sequence[str]) -> Any:
    from gecko.train.fields import build, set_fields

    values = dataclasses.asdict(default)
    set_fields(values, overrides)
    return build(type(default), values)
