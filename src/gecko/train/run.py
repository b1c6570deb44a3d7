"""Settings of a training run, as one frozen value that decides what is trained and where it is written.

Settings that belong together form a dataclass that checks them. Error messages name fields as overrides do.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gecko.io.json_files import parse_object
from gecko.models.gecko import ActivationCheckpointing
from gecko.models.registry import ModelConfig, model_type
from gecko.train.overrides import build, current_fields, current_override


def check_counts(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is below 1."""
    _check(settings, names, prefix, lambda value: value >= 1, "must be at least 1")


def check_positive(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is not above 0 and finite."""
    _check(settings, names, prefix, lambda value: 0 < value < math.inf, "must be above 0 and finite")


def check_limits(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """The same of attributes that may be left out, as None."""
    _check(settings, names, prefix, lambda value: 0 < value < math.inf, "must be above 0 and finite, or none")


def check_not_negative(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is below 0 or not finite."""
    _check(settings, names, prefix, lambda value: 0 <= value < math.inf, "must be 0 or above, and finite")


def check_fractions(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is not in 0..1."""
    _check(settings, names, prefix, lambda value: 0 <= value <= 1, "is a fraction and must lie in 0..1")


def _check(settings: object, names: Sequence[str], prefix: str, holds: Callable[[float], bool], rule: str) -> None:
    """None is no number; fields that may not be None are refused before, by their type."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not holds(value):
            raise ValueError(f"{prefix}{name} {rule}; got {value}.")


@dataclass(frozen=True)
class DataSettings:
    source: str = "stdlib"
    """A folder of token shards (``gecko tokenize``), or texts: ``stdlib``, a file, a folder, a glob, a data set.
    Texts are what ``gecko.data.load_documents`` takes; they are tokenized and held in memory."""
    sources: tuple[str, ...] = ()
    """``SOURCE=WEIGHT`` each: a mixture of sources in place of ``source``; weights are parts of the rows."""
    field: str = "text"
    """Field of JSON Lines, Parquet and data sets that holds the text. Shards were made of one field."""
    tokenizer: str = "bytes"
    """``bytes``, a ``tokenizer.json``, its folder, a SentencePiece ``.model``, or a name on the Hugging Face hub."""
    validation: str | None = None
    """Held-out texts with a source of their own. None: ``validation_fraction`` of the documents.
    It takes anything that ``source`` takes; all of ``source`` or ``sources`` is then trained on, and a file that is in
    both is refused."""
    validation_fraction: float = 0.05
    """Part of the documents held out, where ``validation`` is None."""

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"data.validation_fraction must lie between 0 and 1; got {self.validation_fraction}.")


@dataclass(frozen=True)
class OptimizerSettings:
    learning_rate: float = 3e-3
    """Peak rate; the schedule multiplies it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decays of AdamW's running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the root of the mean square, by which AdamW divides."""
    weight_decay: float = 0.1
    """Part of a parameter that each step takes away from it, times the learning rate."""
    decay: Literal["all", "matrices"] = "all"
    """Which parameters decay. Norm weights are offsets from 1, so decaying ``all`` pulls them to the identity."""
    clip: float = 1.0
    """Largest gradient norm; a larger gradient is scaled down to it."""

    def __post_init__(self) -> None:
        check_positive(self, ("learning_rate", "eps"), "optimizer.")
        check_not_negative(self, ("weight_decay",), "optimizer.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two decays in [0, 1), as 0.9,0.95; got {self.betas}.")
        if not self.clip > 0:
            raise ValueError(f"optimizer.clip must be above 0, and is inf for none; got {self.clip}.")


@dataclass(frozen=True)
class ScheduleSettings:
    """Learning rate over the run. Lengths are fractions of all steps."""

    kind: Literal["cosine", "wsd"] = "cosine"
    """``cosine``: warm-up, then a cosine. ``wsd``: warm-up, stable, then a straight line down."""
    warmup: float = 0.02
    """Part of the run in which the rate climbs to its peak."""
    decay: float = 0.2
    """Part of the run that the ``wsd`` schedule decays in."""
    final: float = 0.0
    """What is left of the peak rate at the end."""

    def __post_init__(self) -> None:
        check_fractions(self, ("warmup", "decay", "final"), "schedule.")
        if self.kind == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(
                f"schedule.warmup and schedule.decay are parts of one run, so their sum must be at most 1; "
                f"got {self.warmup} + {self.decay}."
            )


@dataclass(frozen=True)
class EvaluationSettings:
    every: int = 100
    """Steps between two held-out losses."""
    rows: int = 64
    """Held-out rows for each of them: always the same ones, spread over the rows of the final loss."""
    final_rows: int = 1024
    """Held-out rows, at most, for the loss of the finished model."""

    def __post_init__(self) -> None:
        check_counts(self, ("every", "rows", "final_rows"), "evaluation.")


@dataclass(frozen=True)
class CheckpointSettings:
    every: int = 500
    """Steps between two checkpoints; one more is written at the end."""
    keep: int = 2
    """Number of newest checkpoints to keep; the one with the lowest training loss is kept besides them."""
    keep_every: int | None = None
    """Besides those, checkpoints of steps that this divides stay for good."""

    def __post_init__(self) -> None:
        check_counts(self, ("every", "keep", "keep_every"), "checkpoint.")


@dataclass(frozen=True)
class ParallelSettings:
    """How the processes that ``torchrun`` starts share the work: ``replicate · shard · context`` is their number.

    They split a batch into ``replicate · shard`` groups of rows and each row into ``context`` runs of tokens.
    """

    replicate: int = 1
    """Copies of the model (HSDP). Each is kept by ``shard · context`` ranks, best those of one fast network."""
    shard: int | None = None
    """Ranks among which parameters, gradients and optimizer state are divided, with those of ``context`` (FSDP2).
    None: as many as ``replicate`` and ``context`` leave."""
    context: int = 1
    """Ranks that hold consecutive parts of each row, whole attention chunks."""

    def __post_init__(self) -> None:
        check_counts(self, ("replicate", "shard", "context"), "parallel.")


@dataclass(frozen=True)
class SkipSettings:
    """Which steps are spikes, and skipped: by the rolling mean and standard deviation of loss and gradient norm."""

    deviations: float | None = 6.0
    """A step whose loss or gradient norm is more than so many standard deviations above their mean is skipped.
    Both are of the steps before it. None: only steps that are not finite are skipped."""
    window: int = 128
    """So many steps before it; nothing is skipped before half of them are there."""

    def __post_init__(self) -> None:
        check_counts(self, ("window",), "skip.")
        check_limits(self, ("deviations",), "skip.")


@dataclass(frozen=True)
class SampleSettings:
    """The text written at the end of a run."""

    prompt: str = "The "
    """What the text begins with."""
    tokens: int = 600
    """How many are written after the prompt."""
    temperature: float = 0.7
    """Logits are divided by it; 0 takes the most probable token each time."""

    def __post_init__(self) -> None:
        check_not_negative(self, ("tokens", "temperature"), "sample.")


Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Run:
    """A complete training run. Recipes return one; ``key=value`` overrides change one."""

    model: ModelConfig
    output: str
    """Folder of the checkpoints, the metrics and the report."""
    data: DataSettings = field(default_factory=DataSettings)
    batch_size: int = 8
    """Rows of one optimizer step."""
    sequence_length: int = 1024
    """Tokens of a row."""
    gradient_accumulation_steps: int = 1
    """Number of equal parts of a batch, computed one after the other. Saves memory; results differ by rounding."""
    steps: int | None = None
    """Optimizer steps. None: as many as fit into ``minutes``, measured once when the run starts."""
    minutes: float | None = None
    """Time until the command ends, with evaluations, checkpoints and report; used only where ``steps`` is None."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    precision: Precision = "float32"
    """``bfloat16``: products in bf16 under autocast; parameters, optimizer and statistics stay float32.
    ``auto``: that where the device multiplies bf16 natively, chosen once when the run starts."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """``full``: recompute each block in the backward pass instead of keeping its activations.
    ``selective``: keep the outputs of its linear layers and recompute the rest."""
    compile: bool = False
    """Compile each block with ``torch.compile``; with activation checkpointing ``none`` or ``full``."""
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    init_from: str | None = None
    """A model's folder, or a checkpoint of another run, to start from with a new optimizer (fine-tuning)."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)
    skip: SkipSettings = field(default_factory=SkipSettings)
    max_skips: int = 10
    """Steps in a row that may be skipped before the run gives up."""
    hang_minutes: float | None = 30.0
    """With several ranks: one that makes no progress for so long writes its stack to ``stacks/`` and exits.
    So ``torchrun --max-restarts`` starts the job again. None: no stacks, and ranks wait half an hour for each other."""
    profile: tuple[int, int] | None = None
    """First and last step of which each rank writes a trace to ``profile/``, for chrome://tracing or Perfetto."""
    wandb: str | None = None
    """Project on Weights & Biases to send the metrics to; needs the extra ``wandb``."""
    seed: int = 0
    """Decides the first weights, the documents held out, and the order of rows."""
    device: str = "auto"
    """``auto`` (CUDA where there is one), ``cpu``, ``cuda``, ``cuda:1``."""
    threads: int | None = None
    """CPU threads; None leaves PyTorch's choice."""
    recipe: str = ""
    """Where this run came from: the recipe's name, and the overrides applied to it."""
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_parallel()
        self._check_length()
        self._check_profile()

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def rows_per_rank(self, data_ranks: int) -> int:
        """Rows of a batch for each of ``data_ranks`` groups of ranks; ValueError where they do not come out even."""
        accumulated = self.gradient_accumulation_steps
        parts = data_ranks * accumulated
        if self.batch_size % parts:
            raise ValueError(
                "batch_size must be a multiple of the ranks that share its rows times gradient_accumulation_steps, "
                f"{data_ranks} × {accumulated}; got {self.batch_size}. "
                f"Try batch_size={-(-self.batch_size // parts) * parts}."
            )
        return self.batch_size // data_ranks

    @property
    def folder(self) -> Path:
        return Path(self.output).expanduser()

    def command(self) -> str:
        """The command that trains this run again."""
        source = self.recipe or str(self.folder / "recipe.json")
        return shlex.join(["gecko", "train", source, *self.overrides])

    def with_steps(self, steps: int) -> Run:
        """The run with its number of steps fixed, also in its command."""
        return dataclasses.replace(self, steps=steps, overrides=(*self.overrides, f"steps={steps}"))

    def with_precision(self, precision: Precision) -> Run:
        """The run with its precision fixed, also in its command."""
        return dataclasses.replace(self, precision=precision, overrides=(*self.overrides, f"precision={precision}"))

    def to_dict(self) -> dict[str, Any]:
        """All fields; the model's begin with ``model_type``, which says whose config it is."""
        values = dataclasses.asdict(self)
        return {**values, "model": {"model_type": model_type(self.model), **values["model"]}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Run:
        """Build a run from the values of ``to_dict``, also under field names of earlier versions."""
        values = current_fields(values)
        overrides = tuple(map(current_override, values.get("overrides") or ()))
        return build(cls, {**values, "overrides": overrides})

    def save(self, path: str | Path) -> None:
        """Write the run as JSON, with the command to run it again."""
        content = {"command": self.command(), **self.to_dict()}
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Read what ``save`` wrote. ValueError that names the file if it is damaged or a field does not fit."""

        def parse(values: dict[str, Any]) -> Run:
            return cls.from_dict({name: value for name, value in values.items() if name != "command"})

        return parse_object(path, "a recipe", parse)

    def _check_counts(self) -> None:
        check_counts(self, ("batch_size", "sequence_length", "gradient_accumulation_steps", "max_skips", "threads"))
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"gradient_accumulation_steps must divide batch_size; got {self.gradient_accumulation_steps} and "
                f"{self.batch_size}. "
                f"Try gradient_accumulation_steps={self.batch_size}, one row at a time."
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be a whole number of 64 bits, from 0 to 2**64 - 1; got {self.seed}.")

    def _check_parallel(self) -> None:
        if self.compile and self.activation_checkpointing == "selective":
            raise ValueError(
                "compile=true takes activation_checkpointing=none or full: PyTorch cannot recompute parts of a block "
                "that it compiled in pieces; got selective."
            )
        if self.parallel.context > 1:
            self._check_context(self.parallel.context)
        if self.parallel.shard is not None:
            self.rows_per_rank(self.parallel.replicate * self.parallel.shard)

    def _check_context(self, ranks: int) -> None:
        if self.model.chunk_size is None:
            raise ValueError(
                "parallel.context must be 1 for a Llama: a token's attention needs the keys of its whole row; "
                f"got {ranks}. Try parallel.shard in its place."
            )
        share = ranks * self.model.chunk_size
        if self.sequence_length % share:
            raise ValueError(
                f"with parallel.context={ranks} a rank holds whole chunks of {self.model.chunk_size} tokens, so "
                f"sequence_length must be a multiple of {share}; got {self.sequence_length}. "
                f"Try sequence_length={max(1, round(self.sequence_length / share)) * share}."
            )

    def _check_length(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("a run needs an end: set steps, for example steps=1000, or minutes=5.")
        check_positive(self, ("steps", "minutes"))
        check_limits(self, ("hang_minutes",))

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        first, last = self.profile
        if not 1 <= first <= last:
            raise ValueError(
                f"profile must be the first and the last step, from 1, as profile=10,12; got {self.profile}."
            )
        if self.steps is not None and first > self.steps:
            raise ValueError(
                f"profile must begin within the run's {self.steps} steps; got {self.profile}. "
                f"Try profile={self.steps},{self.steps}, or profile=none."
            )
