"""``gecko eval``: evaluations of a model, one command each."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gecko.cli.common import EVALUATION, Device, Dtype, Force, Model, TokenizerSpec, echo, output_file

if TYPE_CHECKING:
    from gecko.eval import GeckoModel, LlamaModel, Results
    from gecko.eval.results import Report

app = typer.Typer(
    no_args_is_help=True, help="Evaluate a model. Every number is reported with its sample size and a 95 % interval."
)


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Register an evaluation, which runs with denormal numbers flushed to zero."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> None:
        from gecko.runtime.process import flushed_denormals

        with flushed_denormals():
            function(*arguments, **options)

    return app.command()(run)


Texts = Annotated[list[str], typer.Argument(metavar="TEXT...", help="Files of any length; .gz and .zst too.")]
Out = Annotated[str | None, typer.Option("--out", "-o", metavar="F", help="JSON file for the results.")]
Seed = Annotated[int, typer.Option(help="Seed for samples, shots and bootstrap intervals.")]
Joined = Annotated[bool, typer.Option("--joined", help="Read all files as one text, in order.")]
Renewed = Annotated[
    bool,
    typer.Option(
        "--renewed-norms",
        help="Also evaluate with norm statistics of the last 6 chunks, as Megalodon's evaluator does.",
    ),
]


@_command
def perplexity(
    model: Model,
    texts: Texts,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="L,...", help="Context lengths: 1K,4K,1M.", show_default="1K to 4M, as the texts allow"),
    ] = None,
    joined: Joined = False,
    renewed_norms: Renewed = False,
    out: Out = None,
    seed: Seed = 0,
    tokenizer: TokenizerSpec = None,
    device: Device = "auto",
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Measure perplexity by context length, on the same tokens cut into segments of each length.

    **Example**

        gecko eval perplexity runs/demo book.txt --lengths 1K,16K,256K --out perplexity.json
    """
    from gecko.eval.perplexity import perplexity as measure
    from gecko.eval.scored_model import open_texts

    _check_output(out, force, model, *texts, tokenizer)
    files, chosen = open_texts(texts, joined=joined), None if lengths is None else _sizes("--lengths", lengths)
    models = _models(model, tokenizer, device, dtype, renewed_norms)
    with _progress() as report:
        results = _by_norms(models, lambda network: measure(network, files, chosen, seed=seed, report=report))
    _finish(results, models[0], out)


@_command
def positions(
    model: Model,
    texts: Texts,
    length: Annotated[str, typer.Option(help="Tokens per segment.")] = "32K",
    chunk: Annotated[int | None, typer.Option(min=2, help="Tokens per chunk.", show_default="the model's own")] = None,
    first: Annotated[
        int | None, typer.Option(min=1, help="Tokens after a chunk border that are tested.", show_default="chunk / 16")
    ] = None,
    segments: Annotated[int | None, typer.Option(min=1, help="Largest number of segments.", show_default="all")] = None,
    joined: Joined = False,
    renewed_norms: Renewed = False,
    out: Out = None,
    tokenizer: TokenizerSpec = None,
    device: Device = "auto",
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Measure loss by position, and test whether it is higher after chunk borders.

    **Example**

        gecko eval positions runs/demo *.txt --length 8K --out positions.json
    """
    from gecko.eval.perplexity import Grid
    from gecko.eval.perplexity import positions as measure
    from gecko.eval.scored_model import open_texts

    _check_output(out, force, model, *texts, tokenizer)
    size = _one_size("--length", length)
    files, models = open_texts(texts, joined=joined), _models(model, tokenizer, device, dtype, renewed_norms)
    border = chunk if chunk is not None else models[0].chunk_size
    if border is None:
        raise ValueError(
            "this model's attention has no chunks; give the distance between the borders to test, such as --chunk 512."
        )
    grid = Grid.of(size, border)
    grid = grid if first is None else dataclasses.replace(grid, first=first)
    with _progress() as report:
        results = _by_norms(models, lambda network: measure(network, files, grid, segments=segments, report=report))
    _finish(results, models[0], out)


@_command
def retrieval(
    model: Model,
    task: Annotated[str, typer.Argument(metavar="TASK", help="Task: passkey, niah_single_1 or niah_single_2.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT...", help="Texts for the haystack of niah_single_2.", show_default=False),
    ] = None,
    lengths: Annotated[
        str, typer.Option(metavar="L,...", help="Context lengths in tokens, including the answer.")
    ] = "4K,8K,16K,32K",
    depths: Annotated[
        str, typer.Option(metavar="D,...", help="Needle depths as fractions of the haystack, or random as in RULER.")
    ] = "0,0.25,0.5,0.75,1",
    samples: Annotated[int, typer.Option(min=1, help="Samples per length and depth.")] = 20,
    out: Out = None,
    seed: Seed = 0,
    tokenizer: TokenizerSpec = None,
    device: Device = "auto",
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Measure how often the model finds one number in a long text, by length and depth.

    **Examples**

        gecko eval retrieval runs/demo passkey --lengths 1K,4K

        gecko eval retrieval runs/demo niah_single_2 books/*.txt --depths random --samples 500
    """
    from gecko.eval.retrieval import RANDOM, Grid
    from gecko.eval.retrieval import retrieval as measure
    from gecko.eval.scored_model import open_texts

    _check_output(out, force, model, *(texts or []), tokenizer)
    places = None if depths == RANDOM else [_number("--depths", part) for part in depths.split(",")]
    grid = Grid(_sizes("--lengths", lengths), places, samples)
    files = open_texts(texts or [], joined=False)
    (network,) = _models(model, tokenizer, device, dtype, False)
    with _progress() as report:
        results = measure(network, task, grid, texts=files, seed=seed, report=report)
    _finish(results, network, out)


@_command
def diagnose(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Task: mqar, selective_copying or induction_heads.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Settings, such as steps=800 size.items=16 model.memory=none."),
    ] = None,
    out: Out = None,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Train a small model on a synthetic task from scratch, and measure its accuracy by distance in chunks.

    **Example**

        gecko eval diagnose mqar size.length=256 model.chunk_size=32 model.memory=none steps=400
    """
    from gecko.eval.synthetic import Diagnosis
    from gecko.eval.synthetic import diagnose as measure
    from gecko.runtime.process import keep_freed_memory
    from gecko.train.throughput import describe_hardware, select_device

    _check_output(out, force)
    place, diagnosis = select_device(device), _overridden(Diagnosis(), overrides or [])
    keep_freed_memory()
    with _progress() as report:
        results = measure(task, diagnosis, place, report=report)
    described = {"name": f"from scratch, {task}", "config": diagnosis.model.to_dict(), "device": str(place)}
    _report(results, described, out, describe_hardware(place))


@_command
def academic(
    model: Model,
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="TASK...", help="Tasks, such as mmlu or piqa; all if none is given.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of files such as piqa_val.arrow.", show_default="the hub"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N items of each task.", show_default="all")
    ] = None,
    out: Out = None,
    seed: Seed = 0,
    tokenizer: TokenizerSpec = None,
    device: Device = "auto",
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Evaluate the short tasks of the paper's Table 1 with lm-evaluation-harness.

    **Example**

        gecko eval academic runs/demo piqa arc_easy --data data/academic --limit 100
    """
    from gecko.eval.academic import academic as measure

    _check_output(out, force, model, data, tokenizer)
    folder = None if data is None else Path(data).expanduser()
    (network,) = _models(model, tokenizer, device, dtype, False)
    _finish(measure(network, tasks or [], data=folder, limit=limit, seed=seed), network, out)


@_command
def scrolls(
    model: Model,
    task: Annotated[str, typer.Argument(metavar="TASK", help="Task: narrative_qa, qasper or qmsum.")],
    data: Annotated[
        str, typer.Option(metavar="D", help="JSON Lines file, or name of a data set on the hub.")
    ] = "tau/scrolls",
    shots_data: Annotated[
        str | None, typer.Option(metavar="D", help="Data for the shots.", show_default="other documents of --data")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N questions.", show_default="all")
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Largest number of tokens per answer.", show_default="64, 128, 256 by task"),
    ] = None,
    out: Out = None,
    seed: Seed = 0,
    tokenizer: TokenizerSpec = None,
    device: Device = "auto",
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Answer questions about long documents: F1 for NarrativeQA and Qasper, ROUGE for QMSum.

    **Example**

        gecko eval scrolls runs/demo qmsum --data qmsum_val.jsonl --limit 10
    """
    from gecko.eval.scrolls import check_task, load_questions
    from gecko.eval.scrolls import scrolls as measure

    _check_output(out, force, model, data, shots_data, tokenizer)
    check_task(task)  # before data is downloaded
    questions = load_questions(data, task, "validation")
    shots = None if shots_data is None else load_questions(shots_data, task, "train")
    (network,) = _models(model, tokenizer, device, dtype, False)
    with _progress() as report:
        results = measure(
            network, task, questions, shots=shots, limit=limit, new_tokens=new_tokens, seed=seed, report=report
        )
    _finish(results, network, out)


def _check_output(out: str | None, force: bool, *inputs: str | None) -> None:
    """Check ``--out`` and the package for intervals before the work starts."""
    from gecko.runtime.process import require

    require("scipy.stats", "eval")
    if out is not None:
        output_file(out, EVALUATION, inputs=inputs, force=force)


def _models(
    name: str, tokenizer: str | None, device: str, dtype: str | None, renewed: bool
) -> Sequence[GeckoModel | LlamaModel]:
    """Return the model, and with ``renewed`` also the model that evaluates with renewed norms."""
    from gecko.cli.arguments import load_any_model, trained_length
    from gecko.eval import GeckoModel, LlamaModel
    from gecko.models import Llama
    from gecko.runtime.process import keep_freed_memory

    network, vocabulary = load_any_model(name, tokenizer, device, dtype)
    keep_freed_memory()
    if isinstance(network, Llama):
        if renewed:
            raise ValueError("--renewed-norms is for models whose norms have a state; a Llama has none. Leave it out.")
        return [LlamaModel(network, vocabulary, name, trained_length(name))]
    return [GeckoModel(network, vocabulary, name, renew_norms=renew) for renew in (False, True)[: 1 + renewed]]


@contextmanager
def _progress() -> Iterator[Report]:
    """Show the progress of an evaluation on a terminal."""
    from rich.text import Text

    from gecko.runtime.terminal import Terminal, visible

    console = Terminal(stderr=True)
    with console.status("reading") as status:
        yield lambda text: status.update(Text(visible(text)))


def _by_norms(
    models: Sequence[GeckoModel | LlamaModel], measure: Callable[[GeckoModel | LlamaModel], Results]
) -> Results:
    """Measure each model and merge the results; with several models, the scores name their norm statistics."""
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


def _finish(results: Results, model: GeckoModel | LlamaModel, out: str | None) -> None:
    from gecko.train.throughput import describe_hardware

    hardware = describe_hardware(next(model.model.parameters()).device)
    results = dataclasses.replace(results, notes=[*results.notes, *model.notes])
    _report(results, model.describe(), out, hardware)


def _report(results: Results, model: Mapping[str, Any], out: str | None, hardware: Mapping[str, str]) -> None:
    from gecko.runtime.terminal import Terminal

    console = Terminal()
    console.print(results.table(f"{results.evaluation}: {model['name']}"))
    if results.methods():
        console.print(f"intervals: {results.methods()}; seed {results.seed}")
    for note in results.notes:
        console.print(f"note: {note}")
    if out is not None:
        results.save(Path(out).expanduser(), model, shlex.join(["gecko", *sys.argv[1:]]), hardware)
        echo(f"written to {out}", err=True)


def _sizes(option: str, given: str) -> list[int]:
    """Parse numbers of tokens such as ``1K,4K,1M``."""
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
    from gecko.records import build
    from gecko.train.overrides import set_fields

    values = dataclasses.asdict(default)
    set_fields(values, overrides)
    return build(type(default), values, texts=True)
