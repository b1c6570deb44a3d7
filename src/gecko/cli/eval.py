"""``gecko eval``: evaluations of a model, one command each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gecko.cli.command import EVALUATION, LoadsModel, TakesDevice, WritesFile, command_line, echo
from gecko.records import argument, build, option, unknown_name
from gecko.runtime.process import flushed_denormals, keep_freed_memory, require
from gecko.runtime.terminal import Terminal, visible

if TYPE_CHECKING:
    import torch

    from gecko.eval import GeckoModel, LlamaModel, Results
    from gecko.eval.results import Report

    Scored = GeckoModel | LlamaModel
    Measure = Callable[[Scored, Report], Results]


class ReportedEvaluation(TakesDevice, WritesFile):
    """An evaluation, whose results are printed as a table and written to a file."""

    out: str | None = option(None, "--out", "-o", metavar="F")
    """JSON file for the results."""

    def run(self) -> None:
        from gecko.train.throughput import describe_hardware

        require("scipy.stats", "eval")
        path = None if self.out is None else self.output_file(self.out, EVALUATION)
        with flushed_denormals():
            results, model, device = self.evaluate()
        if path is not None:  # before anything is printed, which may fail
            results.save(path, model, command_line(), describe_hardware(device))
        print_results(results, model["name"])
        if path is not None:
            echo(f"written to {self.out}", err=True)

    def evaluate(self) -> tuple[Results, Mapping[str, Any], torch.device]:
        """Return the results, what the file says about the model, and the device."""
        raise NotImplementedError


class ModelEvaluation(ReportedEvaluation, LoadsModel):
    """An evaluation of a trained model."""

    shows_progress: ClassVar[bool] = True

    def evaluate(self) -> tuple[Results, Mapping[str, Any], torch.device]:
        measure = self.prepare()
        model = self.scored_model()
        with progress(self.shows_progress) as report:
            results = self.measured(measure, model, report)
        results = dataclasses.replace(results, notes=[*results.notes, *model.notes])
        return results, model.describe(), next(model.model.parameters()).device

    def measured(self, measure: Measure, model: Scored, report: Report) -> Results:
        return measure(model, report)

    def prepare(self) -> Measure:
        """Check the options, before the model is loaded, and return the function that measures it."""
        raise NotImplementedError

    def scored_model(self) -> Scored:
        from gecko.cli.arguments import RECIPE, find_model, load_any_model
        from gecko.eval import GeckoModel, LlamaModel
        from gecko.models import Llama
        from gecko.train import Run

        model, tokenizer = load_any_model(self.model, self.tokenizer, self.device, self.dtype)
        keep_freed_memory()
        if not isinstance(model, Llama):
            return GeckoModel(model, tokenizer, self.model)
        recipe = find_model(self.model) / RECIPE
        trained_length = Run.load(recipe).sequence_length if recipe.is_file() else None
        return LlamaModel(model, tokenizer, self.model, trained_length)


class SeededEvaluation(ModelEvaluation):
    """An evaluation that draws random numbers."""

    seed: int = 0
    """Seed for samples, shots and bootstrap intervals."""


class TextEvaluation(ModelEvaluation):
    """An evaluation of the losses of texts."""

    texts: list[str] = argument("TEXT...", reads=True)
    """Files of any length; .gz and .zst too."""
    joined: bool = False
    """Read all files as one text, in order."""
    renewed_norms: bool = False
    """Also evaluate with norm statistics of the last 6 chunks, as Megalodon's evaluator does."""

    def measured(self, measure: Measure, model: Scored, report: Report) -> Results:
        from gecko.eval import GeckoModel, LlamaModel

        if not self.renewed_norms:
            return measure(model, report)
        if isinstance(model, LlamaModel):
            raise ValueError("--renewed-norms is for models whose norms have a state; a Llama has none. Leave it out.")
        renewed = GeckoModel(model.model, model.tokenizer, self.model, renew_norms=True)
        kinds = {"all that was read": measure(model, report), "last 6 chunks": measure(renewed, report)}
        scores = [
            dataclasses.replace(score, where={"norm statistics of": kind, **score.where})
            for kind, results in kinds.items() for score in results.scores
        ]  # fmt: skip
        details = {kind: dict(results.details) for kind, results in kinds.items()}
        return dataclasses.replace(kinds["all that was read"], scores=scores, details=details)


class Perplexity(TextEvaluation, SeededEvaluation):
    """Measure perplexity by context length, on the same tokens cut into segments of each length.

    **Example**

        gecko eval perplexity runs/demo book.txt --lengths 1K,16K,256K --out perplexity.json
    """

    lengths: str | None = option(metavar="L,...", show_default="1K to 4M, as the texts allow")
    """Context lengths: 1K,4K,1M."""

    def prepare(self) -> Measure:
        from gecko.eval.perplexity import perplexity
        from gecko.eval.scored_model import open_texts

        texts = open_texts(self.texts, joined=self.joined)
        lengths = None if self.lengths is None else _sizes("--lengths", self.lengths)
        return lambda model, report: perplexity(model, texts, lengths, seed=self.seed, report=report)


class Positions(TextEvaluation):
    """Measure loss by position, and test whether it is higher after chunk borders.

    **Example**

        gecko eval positions runs/demo *.txt --length 8K --out positions.json
    """

    length: str = "32K"
    """Tokens per segment."""
    chunk: int | None = option(min=2, show_default="the model's own")
    """Tokens per chunk."""
    first: int | None = option(min=1, show_default="chunk / 16")
    """Tokens after a chunk border that are tested."""
    segments: int | None = option(min=1, show_default="all")
    """Largest number of segments."""

    def prepare(self) -> Measure:
        from gecko.eval.perplexity import PositionGrid, positions
        from gecko.eval.scored_model import open_texts

        (length,), texts = _sizes("--length", self.length, one=True), open_texts(self.texts, joined=self.joined)

        def measure(model: Scored, report: Report) -> Results:
            chunk = model.chunk_size if self.chunk is None else self.chunk
            if chunk is None:
                raise ValueError(
                    "this model's attention has no chunks; give the distance between the borders to test, such as "
                    "--chunk 512."
                )
            grid = PositionGrid.of(length, chunk)
            grid = grid if self.first is None else dataclasses.replace(grid, first=self.first)
            return positions(model, texts, grid, segments=self.segments, report=report)

        return measure


class Retrieval(SeededEvaluation):
    """Measure what the model finds in a long text, by length and depth: a passkey, and RULER's thirteen tasks.

    **Examples**

        gecko eval retrieval runs/demo passkey --lengths 1K,4K

        gecko eval retrieval runs/demo niah_multikey_1 books/*.txt --samples 500

        gecko eval retrieval runs/demo qa_1 dev-v2.0.json
    """

    task: str = argument("TASK")
    """Task: passkey, niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue, niah_multiquery, vt, cwe, fwe, qa_1
    or qa_2."""
    texts: list[str] = argument("TEXT...", [], reads=True)
    """Texts for the haystack, or a file of questions: SQuAD's form for qa_1, HotpotQA's for qa_2."""
    lengths: str = option("4K,8K,16K,32K", metavar="L,...")
    """Context lengths in tokens, including the answer."""
    depths: str | None = option(metavar="D,...", show_default="0,0.25,0.5,0.75,1 for one needle")
    """Needle depths as fractions of the haystack, or random as in RULER."""
    samples: int = option(20, min=1)
    """Samples per length and depth."""

    def prepare(self) -> Measure:
        from gecko.eval.results import check_task
        from gecko.eval.retrieval import DEPTHS, RANDOM, TASKS, WITH_DEPTH, NeedleGrid, retrieval
        from gecko.eval.ruler import READERS
        from gecko.eval.scored_model import open_files, open_texts

        depths: Sequence[float] | None = None
        lengths = _sizes("--lengths", self.lengths)
        check_task(self.task, TASKS)
        if self.depths is None:
            depths = DEPTHS if self.task in WITH_DEPTH else None
        elif self.depths != RANDOM:
            depths = list(map(_depth, self.depths.split(",")))
        grid = NeedleGrid(lengths, depths, self.samples)
        texts = open_files(self.texts) if self.task in READERS else open_texts(self.texts, joined=False)
        return lambda model, report: retrieval(model, self.task, grid, texts=texts, seed=self.seed, report=report)


def _depth(part: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise ValueError(f"--depths takes numbers in 0..1 separated by commas, or random; got {part!r}.") from None


class Diagnose(ReportedEvaluation):
    """Train a small model on a synthetic task from scratch, and measure its accuracy by distance in chunks.

    **Examples**

        gecko eval diagnose mqar size.length=256 model.chunk_size=32 model.memory=none steps=400

        gecko eval diagnose parity --architecture llama steps=400
    """

    task: str = argument("TASK")
    """Task: mqar, selective_copying, induction_heads, recall, noisy_recall, fuzzy_recall, memorization, parity,
    counting or permutations."""
    overrides: list[str] = argument("KEY=VALUE...", [])
    """Settings, such as steps=800 size.items=16 model.memory=none."""
    architecture: str = "gecko"
    """gecko or llama."""

    def evaluate(self) -> tuple[Results, Mapping[str, Any], torch.device]:
        from gecko.eval.diagnose import SMALL, Diagnosis, diagnose
        from gecko.train.settings import set_fields
        from gecko.train.throughput import select_device

        if self.architecture not in SMALL:
            raise ValueError(unknown_name("--architecture", self.architecture, SMALL))
        device, values = select_device(self.device), dataclasses.asdict(Diagnosis(model=SMALL[self.architecture]))
        set_fields(values, self.overrides)
        values["model"]["model_type"] = self.architecture
        diagnosis = build(Diagnosis, values, texts=True)
        keep_freed_memory()
        with progress() as report:
            results = diagnose(self.task, diagnosis, device, report=report)
        described = {"config": diagnosis.model.to_dict(), "device": str(device)}
        return results, {"name": f"from scratch, {self.task}", **described}, device


class Speed(ModelEvaluation):
    """Measure speed and memory by the length of a text: reading it, the first new token and further ones.

    **Example**

        gecko eval speed runs/demo --lengths 1K,16K,256K --out speed.json
    """

    lengths: str = option("1K,4K,16K", metavar="L,...")
    """Lengths in tokens."""
    repeats: int = option(5, min=1)
    """Measurements per length, after one for a warm start."""

    def prepare(self) -> Measure:
        from gecko.eval.speed import speed

        lengths = _sizes("--lengths", self.lengths)
        return lambda model, report: speed(model, lengths, self.repeats, report)


class Academic(SeededEvaluation):
    """Evaluate the short tasks of the paper's Table 1 with lm-evaluation-harness.

    **Example**

        gecko eval academic runs/demo piqa arc_easy --data data/academic --limit 100
    """

    tasks: list[str] = argument("TASK...", [])
    """Tasks, such as mmlu or piqa; all if none is given."""
    data: str | None = option(metavar="FOLDER", show_default="the hub", reads=True)
    """Folder of files such as piqa_val.arrow."""
    limit: int | None = option(min=1, show_default="all")
    """Use only the first N items of each task."""

    shows_progress: ClassVar[bool] = False
    """The harness shows its own."""

    def prepare(self) -> Measure:
        from gecko.eval.academic import academic

        data = None if self.data is None else Path(self.data).expanduser()
        return lambda model, _: academic(model, self.tasks, data=data, limit=self.limit, seed=self.seed)


class Scrolls(SeededEvaluation):
    """Answer questions about long documents: F1 for NarrativeQA and Qasper, ROUGE for QMSum.

    **Example**

        gecko eval scrolls runs/demo qmsum --data qmsum_val.jsonl --limit 10
    """

    task: str = argument("TASK")
    """Task: narrative_qa, qasper or qmsum."""
    data: str = option("tau/scrolls", metavar="D", reads=True)
    """JSON Lines file, or name of a data set on the hub."""
    shots_data: str | None = option(metavar="D", show_default="other documents of --data", reads=True)
    """Data for the shots."""
    limit: int | None = option(min=1, show_default="all")
    """Use only the first N questions."""
    new_tokens: int | None = option(min=1, show_default="64, 128, 256 by task")
    """Largest number of tokens per answer."""

    def prepare(self) -> Measure:
        from gecko.eval.results import check_task
        from gecko.eval.scrolls import TASKS, load_questions, scrolls

        check_task(self.task, TASKS)  # before data is downloaded
        data = load_questions(self.data, self.task, "validation")
        shots = None if self.shots_data is None else load_questions(self.shots_data, self.task, "train")
        return lambda model, report: scrolls(
            model, self.task, data, shots=shots, limit=self.limit, new_tokens=self.new_tokens, seed=self.seed,
            report=report,
        )  # fmt: skip


@contextmanager
def progress(shown: bool = True) -> Iterator[Report]:
    """Show the progress of an evaluation on a terminal."""
    from rich.text import Text

    status = Terminal(stderr=True).status("reading")
    with status if shown else nullcontext():
        yield lambda text: status.update(Text(visible(text)))


def print_results(results: Results, model: str) -> None:
    console = Terminal()
    console.print(results.table(f"{results.evaluation}: {model}"))
    if results.methods():
        console.print(f"intervals: {results.methods()}; seed {results.seed}")
    for note in results.notes:
        console.print(f"note: {note}")


def _sizes(option: str, given: str, *, one: bool = False) -> list[int]:
    """Parse numbers of tokens such as ``1K,4K,1M``, or only ``one``."""
    sizes = []
    for part in map(str.strip, given.split(",")):
        number = re.fullmatch(r"(\d+)([KM]?)", part, re.IGNORECASE)
        if number is None or int(number[1]) < 1:
            raise ValueError(f"{option} takes whole numbers of tokens, such as 1024, 16K or 1M; got {part!r}.")
        sizes.append(int(number[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[number[2].upper()])
    if one and len(sizes) > 1:
        raise ValueError(f"{option} takes one number of tokens, such as 16K; got {given!r}. Measure each by itself.")
    return sizes
