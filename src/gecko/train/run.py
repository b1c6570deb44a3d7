"""Settings of a training run: the frozen dataclass :class:`Run` determines what is trained and where it is saved.

Each group of settings is a dataclass that validates its fields. Error messages name a field as overrides do.
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

from gecko.io.files import parse_object
from gecko.models import ModelConfig, model_type
from gecko.models.gecko import ActivationCheckpointing
from gecko.train.overrides import build, current_fields, current_override


def check_counts(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """Raise ValueError if a named attribute is below 1."""
    _check(settings, names, prefix, lambda value: value >= 1, "must be at least 1")


def check_positive(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """Raise ValueError if a named attribute is not above 0 and finite."""
    _check(settings, names, prefix, lambda value: 0 < value < math.inf, "must be above 0 and finite")


def check_limits(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """Raise ValueError if a named attribute is neither None nor above 0 and finite."""
    _check(settings, names, prefix, lambda value: 0 < value < math.inf, "must be above 0 and finite, or none")


def check_not_negative(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """Raise ValueError if a named attribute is below 0 or not finite."""
    _check(settings, names, prefix, lambda value: 0 <= value < math.inf, "must be 0 or above, and finite")


def check_fractions(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """Raise ValueError if a named attribute is not in 0..1."""
    _check(settings, names, prefix, lambda value: 0 <= value <= 1, "is a fraction and must lie in 0..1")


def _check(settings: object, names: Sequence[str], prefix: str, holds: Callable[[float], bool], rule: str) -> None:
    """Raise ValueError if a named attribute breaks the rule. None passes; where it is invalid, its type is refused."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not holds(value):
            raise ValueError(f"{prefix}{name} {rule}; got {value}.")


@dataclass(frozen=True)
class DataSettings:
    source: str = "stdlib"
    """A folder of token shards (``gecko tokenize``), or texts: ``stdlib``, a file, a folder, a glob, a data set.
    ``gecko.data.load_documents`` reads texts; they are tokenized and held in memory."""
    sources: tuple[str, ...] = ()
    """A mixture in place of ``source``: ``SOURCE=WEIGHT`` for each. Weights are the proportions of rows."""
    field: str = "text"
    """Field of JSON Lines, Parquet and data sets that holds the text. It does not apply to token shards."""
    tokenizer: str = "bytes"
    """``bytes``, a ``tokenizer.json``, its folder, a SentencePiece ``.model``, or a name on the Hugging Face hub."""
    validation: str | None = None
    """Source of the held-out texts. None: ``validation_fraction`` of the documents.
    It takes anything that ``source`` takes; all of ``source`` or ``sources`` is then trained on, and a file that is in
    both is refused."""
    validation_fraction: float = 0.05
    """Fraction of the documents that is held out if ``validation`` is None."""

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"data.validation_fraction must lie between 0 and 1; got {self.validation_fraction}.")


@dataclass(frozen=True)
class OptimizerSettings:
    learning_rate: float = 3e-3
    """Peak rate; the schedule multiplies it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay factors of AdamW's running means of the gradient and of its square."""
    eps: float = 1e-8
    """AdamW's epsilon, added to the root of the mean square by which it divides."""
    weight_decay: float = 0.1
    """AdamW's weight decay: each step subtracts learning rate × weight decay × parameter."""
    decay: Literal["all", "matrices"] = "all"
    """Which parameters decay. Norm weights are offsets from 1, so decaying ``all`` pulls them to the identity."""
    clip: float = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""

    def __post_init__(self) -> None:
        check_positive(self, ("learning_rate", "eps"), "optimizer.")
        check_not_negative(self, ("weight_decay",), "optimizer.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two decays in [0, 1), as 0.9,0.95; got {self.betas}.")
        if not self.clip > 0:
            raise ValueError(f"optimizer.clip must be above 0, and is inf for none; got {self.clip}.")


@dataclass(frozen=True)
class ScheduleSettings:
    """Learning-rate schedule. Lengths are fractions of all steps."""

    kind: Literal["cosine", "wsd"] = "cosine"
    """``cosine``: warm-up, then cosine decay. ``wsd``: warm-up, constant, then linear decay."""
    warmup: float = 0.02
    """Fraction of the run in which the rate rises to its peak."""
    decay: float = 0.2
    """Fraction of the run, at its end, in which the ``wsd`` schedule decays."""
    final: float = 0.0
    """Learning rate at the end, as a fraction of the peak rate."""

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
    """Steps between two evaluations of the held-out loss."""
    rows: int = 64
    """Number of rows of each evaluation; always the same rows, evenly spaced among ``final_rows``."""
    final_rows: int = 1024
    """Maximum number of held-out rows for the loss of the finished model."""

    def __post_init__(self) -> None:
        check_counts(self, ("every", "rows", "final_rows"), "evaluation.")


@dataclass(frozen=True)
class CheckpointSettings:
    every: int = 500
    """Steps between two checkpoints; one more is written at the end."""
    keep: int = 2
    """Number of newest checkpoints to keep; the one with the lowest training loss is kept too."""
    keep_every: int | None = None
    """Also keep all checkpoints whose step is a multiple of this number."""

    def __post_init__(self) -> None:
        check_counts(self, ("every", "keep", "keep_every"), "checkpoint.")


@dataclass(frozen=True)
class ParallelSettings:
    """Device mesh of the processes that ``torchrun`` starts; their number is ``replicate · shard · context``.

    A batch is divided into ``replicate · shard`` groups of rows, and each row into ``context`` parts.
    """

    replicate: int = 1
    """Copies of the model (HSDP), each sharded over ``shard · context`` ranks, which need the fastest links."""
    shard: int | None = None
    """Ranks that shard parameters, gradients and optimizer state (FSDP2), together with those of ``context``.
    None: the number of processes divided by ``replicate · context``."""
    context: int = 1
    """Ranks that hold consecutive parts of each row; a part consists of whole attention chunks."""

    def __post_init__(self) -> None:
        check_counts(self, ("replicate", "shard", "context"), "parallel.")


@dataclass(frozen=True)
class SkipSettings:
    """Rule that skips spikes, by the rolling mean and standard deviation of loss and gradient norm."""

    deviations: float | None = 6.0
    """Skip a step whose loss or gradient norm is more than this many standard deviations above the mean.
    Both are of the last ``window`` steps. None: skip only steps with non-finite values."""
    window: int = 128
    """Number of previous steps in mean and deviation; no spike is skipped before half of them are done."""

    def __post_init__(self) -> None:
        check_counts(self, ("window",), "skip.")
        check_limits(self, ("deviations",), "skip.")


@dataclass(frozen=True)
class SampleSettings:
    """Text that the finished model generates at the end of a run."""

    prompt: str = "The "
    """Prompt of the generated text."""
    tokens: int = 600
    """Maximum number of tokens generated after the prompt."""
    temperature: float = 0.7
    """Sampling temperature; 0 takes the most probable token each time."""

    def __post_init__(self) -> None:
        check_not_negative(self, ("tokens", "temperature"), "sample.")


Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Run:
    """A complete training run. Recipes return one; ``key=value`` overrides change one."""

    model: ModelConfig
    output: str
    """Folder for checkpoints, metrics and report."""
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
    """Time until the command ends, with evaluations, checkpoints and report; used only if ``steps`` is None."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    precision: Precision = "float32"
    """``bfloat16``: matrix products in bf16 under autocast; parameters, optimizer and statistics stay float32.
    ``auto``: bfloat16 if the device has bf16 instructions, else float32; chosen once when the run starts."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """``full``: recompute each block in the backward pass instead of keeping its activations.
    ``selective``: keep the outputs of its linear layers and recompute the rest."""
    compile: bool = False
    """Compile each block with ``torch.compile``; requires activation checkpointing ``none`` or ``full``."""
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    init_from: str | None = None
    """Model folder or checkpoint whose weights the run starts from, with a new optimizer (fine-tuning)."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)
    skip: SkipSettings = field(default_factory=SkipSettings)
    max_skips: int = 10
    """Number of consecutive skipped steps at which the run stops with an error."""
    hang_minutes: float | None = 30.0
    """With several ranks: minutes without progress after which a rank writes its stack to ``stacks/`` and exits.
    ``torchrun --max-restarts`` then restarts the job. None: no stacks, and collectives time out after half an hour."""
    profile: tuple[int, int] | None = None
    """First and last step that each rank traces into ``profile/``, for chrome://tracing or Perfetto."""
    wandb: str | None = None
    """Project on Weights & Biases that receives the metrics; needs the extra ``wandb``."""
    seed: int = 0
    """Determines the initial weights, the held-out documents and the order of rows."""
    device: str = "auto"
    """``auto`` (CUDA if available, else CPU), ``cpu``, ``cuda``, ``cuda:1``."""
    threads: int | None = None
    """Number of CPU threads. None: PyTorch's default."""
    recipe: str = ""
    """Name of the recipe that this run was made from; ``overrides`` were applied to it."""
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
        """Return the rows of a batch per data rank. Raise ValueError if the batch cannot be divided evenly."""
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
        """Return the command that trains this run again."""
        source = self.recipe or str(self.folder / "recipe.json")
        return shlex.join(["gecko", "train", source, *self.overrides])

    def with_steps(self, steps: int) -> Run:
        """Return the run with a fixed number of steps, also in its command."""
        return dataclasses.replace(self, steps=steps, overrides=(*self.overrides, f"steps={steps}"))

    def with_precision(self, precision: Precision) -> Run:
        """Return the run with a fixed precision, also in its command."""
        return dataclasses.replace(self, precision=precision, overrides=(*self.overrides, f"precision={precision}"))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as nested dictionaries. The model's first field is ``model_type``, its architecture."""
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
        """Read a run that ``save`` wrote. Raise ValueError that names the file if it is damaged or a field invalid."""

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
