"""The parts of a run: settings that belong together, each checked alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gecko.train.checks import check_counts, check_fractions, check_limits, check_not_negative, check_positive


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
    """How many of the newest checkpoints stay."""
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
