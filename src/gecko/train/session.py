"""``train(run)``: from a recipe to a trained model, its metrics and its report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from gecko.data import PackedLoader, TokenizedCorpus, Tokenizer, check_vocabulary, load_documents, load_tokenizer
from gecko.generation import generate
from gecko.model import Gecko, load
from gecko.train.allocator import keep_freed_memory
from gecko.train.budget import steps_in_budget
from gecko.train.checkpoint import latest_checkpoint, list_checkpoints
from gecko.train.evaluate import Evaluation, HeldOut, evaluate
from gecko.train.fields import flatten
from gecko.train.hardware import describe_hardware
from gecko.train.loop import Trainer
from gecko.train.metrics import MetricsWriter
from gecko.train.optimizer import build_optimizer
from gecko.train.progress import TrainingProgress
from gecko.train.report import RunFacts, write_report
from gecko.train.run import Run
from gecko.train.signals import StopSignal
from gecko.train.snapshot import RECIPE, Position, checkpoints_folder, restore_snapshot

_SAME_ON_RESUME = ("model", "data", "batch_size", "sequence_length", "seed")


@dataclass(frozen=True)
class TrainResult:
    run: Run
    """As it was trained: with its number of steps."""
    checkpoint: Path
    """The newest checkpoint, a folder for ``gecko.load``."""
    step: int
    evaluation: Evaluation | None
    """Of the finished model; None where the run was stopped early, by Ctrl-C or SIGTERM."""
    report: Path | None
    """The HTML report of a finished run; None where matplotlib is not installed."""

    @property
    def finished(self) -> bool:
        return self.evaluation is not None


@dataclass(frozen=True)
class _Data:
    tokenizer: Tokenizer
    training: PackedLoader
    held_out: HeldOut
    final: HeldOut


def train(run: Run, resume: bool = False) -> TrainResult:
    """Train ``run`` to its end, or until Ctrl-C or SIGTERM, which save a checkpoint and return.

    ``resume`` continues from the newest sound checkpoint in ``run.output``, and starts where there is
    none. Raises FileExistsError where the folder holds a run and ``resume`` is not set, ValueError where
    it holds another run than this, NonFiniteError after too many skipped steps, OSError where a
    checkpoint cannot be written; the last checkpoint stays in each case.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    checkpoint = _starting_checkpoint(run, resume)
    if checkpoint is not None:
        run = _resumed_run(run, checkpoint)
    device = select_device(run.device)
    if run.precision == "auto":
        run = run.with_precision("bfloat16" if multiplies_bfloat16(device) else "float32")
    _set_up(run)
    data = _load_data(run, console)
    model = (Gecko(run.model) if checkpoint is None else load(checkpoint)).to(device)
    model.checkpoint_blocks = run.activation_checkpointing
    with StopSignal() as stop:
        if run.steps is None:
            console.print(f"measuring how many steps fit into {run.minutes:g} minutes")
            run = run.with_steps(steps_in_budget(run, model, data.training, data.held_out))
        position = _fit(run, model, data, checkpoint, stop, console)
        newest = list_checkpoints(checkpoints_folder(run))[0]
        if position.step == run.steps:
            return _finish(run, model, data, newest, console)
    console.print(
        f"{stop.requested}: saved after step {position.step} of {run.steps}. Continue with:\n  {run.command()} --resume"
    )
    return TrainResult(run, newest, position.step, None, None)


def select_device(name: str) -> torch.device:
    """The device ``name`` stands for; ValueError where this machine lacks it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}.") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device must be on this machine, with {count} CUDA devices; got {name!r}. Try device=cpu.")
    return device


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` has bf16 products of its own; without them they are slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _starting_checkpoint(run: Run, resume: bool) -> Path | None:
    folder = checkpoints_folder(run)
    if resume:
        return latest_checkpoint(folder)
    if list_checkpoints(folder):
        raise FileExistsError(
            f"{run.folder} already holds a run, and nothing there is overwritten. Continue it with --resume, "
            "or choose another folder with output=."
        )
    return None


def _resumed_run(run: Run, checkpoint: Path) -> Run:
    """``run`` with the steps its checkpoint fixed; ValueError where the two are different runs."""
    saved = Run.load(checkpoint / RECIPE)
    given = flatten(run.to_dict())
    for name, value in flatten(saved.to_dict()).items():
        if name.partition(".")[0] in _SAME_ON_RESUME and value != given[name]:
            raise ValueError(
                f"{name} must be what the checkpoint was trained with, {value!r}; got {given[name]!r}. "
                "Leave it as it was, or start a new run with another output=."
            )
    if run.precision == "auto":
        run = run.with_precision(saved.precision)
    if run.steps is None and saved.steps is not None:
        run = run.with_steps(saved.steps)
    return run


def _set_up(run: Run) -> None:
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    torch.manual_seed(run.seed)
    keep_freed_memory()


def _load_data(run: Run, console: Console) -> _Data:
    tokenizer = load_tokenizer(run.data.tokenizer)
    check_vocabulary(tokenizer, run.model.vocab_size)
    with console.status(f"reading {run.data.source}"):
        corpus = TokenizedCorpus.build(load_documents(run.data.source), tokenizer)
    training, rest = corpus.split(run.data.validation_fraction, run.seed)
    console.print(f"training: {len(training):,} documents, {training.num_tokens:,} tokens of {run.data.source}")
    console.print(f"held out: {len(rest):,} documents, {rest.num_tokens:,} tokens")
    loader = PackedLoader(training, run.batch_size, run.sequence_length, run.seed)
    final = HeldOut.of(rest, run.evaluation.final_rows, run.sequence_length, run.rows_at_once)
    return _Data(tokenizer, loader, final.spread(run.evaluation.rows), final)


def _fit(run: Run, model: Gecko, data: _Data, checkpoint: Path | None, stop: StopSignal, console: Console) -> Position:
    optimizer = build_optimizer(model, run.optimizer)
    position = Position() if checkpoint is None else restore_snapshot(checkpoint, model, optimizer)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.save(run.folder / RECIPE)
    assert run.steps is not None
    with (
        MetricsWriter(run.folder, None if checkpoint is None else position.step) as metrics,
        TrainingProgress(console, position.step, run.steps) as display,
    ):
        trainer = Trainer(
            run, model, optimizer, data.training, data.held_out, position, metrics=metrics, display=display
        )
        trainer.fit(stop)
    return trainer.position


def _finish(run: Run, model: Gecko, data: _Data, checkpoint: Path, console: Console) -> TrainResult:
    """Final loss, sample and report."""
    with console.status("final held-out loss, sample and report"):
        result = evaluate(model, data.final, run.precision)
        (run.folder / "results.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        sample = _sample(run, model, data.tokenizer)
        (run.folder / "sample.txt").write_text(run.sample.prompt + sample, encoding="utf-8")
    console.print(
        f"final held-out loss over {result.tokens:,} tokens: "
        f"{result.nats_per_byte:.4f} nats a byte, {result.loss:.4f} a token"
    )
    facts = RunFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        evaluation=result,
        sample=sample,
        hardware=describe_hardware(next(model.parameters()).device),
    )
    return TrainResult(run, checkpoint, run.steps or 0, result, _report(run, facts, console))


def _sample(run: Run, model: Gecko, tokenizer: Tokenizer) -> str:
    """The model's continuation of the run's prompt, as text."""
    prompt = torch.tensor([tokenizer.document_start, *tokenizer.encode(run.sample.prompt)])
    made = generate(
        model,
        prompt,
        max_new_tokens=run.sample.tokens,
        temperature=run.sample.temperature,
        seed=run.seed,
        stop_tokens={tokenizer.document_end},
    )
    return tokenizer.decode(made.tokens[0])


def _report(run: Run, facts: RunFacts, console: Console) -> Path | None:
    try:
        path = write_report(run, facts)
    except ImportError as error:
        console.print(f"no report: {error}")
        return None
    console.print(f"report: {path}")
    return path
