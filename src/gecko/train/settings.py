"""Groups of a run's settings, their overrides ``key=value`` with names of earlier versions, and the help for each.

Each group is a frozen dataclass that validates its fields. Error messages name a field as overrides do.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal

from gecko.config import Epsilon
from gecko.records import (
    Count,
    CountFromZero,
    Fraction,
    NotNegative,
    Positive,
    PositiveOrNone,
    Range,
    check,
    docstrings,
    unknown_name,
)


class Role(Flag):
    """Metadata of a setting, or of a group: what it means where runs are resumed, compared or told apart."""

    FIXED = auto()
    """All sessions of a run have the same value."""
    FREE = auto()
    """Runs that are compared may have different values."""
    NEUTRAL = auto()
    """The trained model does not depend on it, except by rounding."""


ASIDE = Role.FREE | Role.NEUTRAL
"""Where, for how long and with which output a run is trained."""


class Group:
    """Group of settings. Its name in overrides and messages is that of its class, as "data" of ``DataSettings``."""

    def __post_init__(self) -> None:
        check(self, f"{type(self).__name__.removesuffix('Settings').lower()}.")


@dataclass(frozen=True)
class DataSettings(Group):
    source: str = "stdlib"
    """A folder of token shards (``gecko tokenize``), or texts: ``stdlib``, a file, a folder, a glob, a data set.
    ``gecko.data.load_documents`` reads texts; they are tokenized and held in memory."""
    sources: tuple[str, ...] = ()
    """A mixture in place of ``source``: ``SOURCE=WEIGHT`` for each. Weights are the proportions of rows."""
    format: Literal["text", "chat"] = "text"
    """``chat``: the source is JSON Lines of chats (``messages``), and the loss is on the assistant's answers only."""
    field: str = "text"
    """Field of JSON Lines, Parquet and data sets that holds the text. It does not apply to token shards."""
    tokenizer: str = "bytes"
    """``bytes``, a ``tokenizer.json``, its folder, a SentencePiece ``.model``, or a name on the Hugging Face hub."""
    allow_loss: bool = False
    """Train with a tokenizer that loses more than 0.1 % of the characters of the texts."""
    validation: str | None = None
    """Source of the held-out texts. None: ``validation_fraction`` of ``source``.
    It takes anything that ``source`` takes; all of ``source`` or ``sources`` is then trained on, and a file that is in
    both is refused."""
    validation_fraction: Annotated[float, Range("must lie between 0 and 1", above=0, below=1)] = 0.05
    """Largest fraction of the tokens that is held out if ``validation`` is None.
    Whole documents are held out, or, if they are few or long, the end of one."""
    carry_state: bool = False
    """Carry the state from step to step: truncated backpropagation through time.
    Each row of a batch goes on where that of the step before ended, and gradients end at the row's start. Rows are then
    not shuffled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "chat" and self.carry_state:
            raise ValueError(
                "data.carry_state=true reads documents over several rows, and with data.format=chat a row holds whole "
                "chats. Set data.carry_state=false."
            )
        if self.format == "chat" and self.sources:
            raise ValueError(
                "data.format=chat takes one source, a file, folder or glob; got data.sources. Name them by a glob."
            )


@dataclass(frozen=True)
class OptimizerSettings(Group):
    name: Annotated[Literal["adamw", "muon"], Role.FIXED | Role.FREE] = "adamw"
    """``muon``: Muon for the matrices of blocks, at the rate and weight decay of AdamW, which updates the rest."""
    learning_rate: Annotated[Positive, Role.FREE] = 3e-3
    """Peak rate; the schedule multiplies it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay factors of AdamW's running means of the gradient and of its square."""
    eps: Epsilon = 1e-8
    """AdamW's epsilon, added to the root of the mean square by which it divides."""
    weight_decay: NotNegative = 0.1
    """AdamW's weight decay: each step subtracts learning rate × weight decay × parameter."""
    decay: Literal["all", "matrices"] = "all"
    """Which parameters decay. Norm weights are offsets from 1, so decaying ``all`` pulls them to the identity.
    Those of ``norm="rms"`` are factors, which never decay."""
    base_width: Count | None = None
    """Width (``model_dim``) of the model for which the learning rate was found. None: one rate for all parameters.
    The rates of matrices in blocks and of the head are scaled for this model's width, see ``docs/pretraining.md``."""
    clip: float = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two decays in [0, 1), as 0.9,0.95; got {self.betas}.")
        if not self.clip > 0:
            raise ValueError(f"optimizer.clip must be above 0, and is inf for none; got {self.clip}.")


@dataclass(frozen=True)
class ScheduleSettings(Group):
    """Learning-rate schedule, and growth of the batches. Lengths are fractions of all steps if they are not counts.

    Batches grow by doubling their rows, or the length of these, at equal distances. So there are few shapes, and every
    number of ranks and of accumulated parts that divides the first batch divides all.
    """

    kind: Literal["auto", "cosine", "wsd"] = "auto"
    """``cosine``: warm-up, then cosine decay. ``wsd``: warm-up, constant, then linear decay.
    ``auto``: ``wsd`` if a run has ``minutes`` and no ``steps``, else ``cosine``. With ``minutes``, ``wsd`` follows the
    clock: its decay begins when the time left is what decay and end need. ``cosine`` fixes the steps at the start."""
    warmup: Fraction = 0.02
    """Fraction of the run in which the rate rises to its peak."""
    decay: Fraction = 0.2
    """Fraction of the run, at its end, in which the ``wsd`` schedule decays."""
    warmup_steps: CountFromZero | None = None
    """Steps of the warm-up. None: the fraction ``warmup`` of the run."""
    decay_steps: Count | None = None
    """Steps of the decay of ``wsd``, at most all. None: the fraction ``decay`` of the run."""
    final: Fraction = 0.0
    """Learning rate at the end, as a fraction of the peak rate."""
    initial_batch_size: Annotated[Count | None, Role.FIXED] = None
    """Rows of the first batches. None: all batches have ``batch_size`` rows.
    Within ``batch_size_steps`` steps they double, at equal distances, until they are ``batch_size``."""
    batch_size_steps: Annotated[CountFromZero, Role.FIXED] = 0
    """Steps before the first batch with ``batch_size`` rows."""
    initial_sequence_length: Annotated[Count | None, Role.FIXED] = None
    """Tokens of the first rows. None: all rows have ``sequence_length`` tokens.
    They double like ``initial_batch_size``. The batches have the same tokens as without this setting: their rows are
    cut into shorter ones."""
    sequence_length_steps: Annotated[CountFromZero, Role.FIXED] = 0
    """Steps before the first rows of ``sequence_length`` tokens."""

    def decay_after(self, steps: int) -> int:
        """Return the steps of the decay that follows ``steps`` steps, at least 1."""
        return self.decay_steps or max(1, round(steps * self.decay / (1 - self.decay)))

    def rows_before(self, batch_size: int, step: int) -> int:
        """Return the rows of all batches before that of ``step``, counted from 0; ``batch_size`` is the final size."""
        first, over = self.initial_batch_size, self.batch_size_steps
        if first is None or over == 0 or first == batch_size:
            return step * batch_size
        doublings = _doublings(first, batch_size)
        begins = [-(-stage * over // doublings) for stage in range(doublings)]
        stages = zip(begins, [*begins[1:], over], strict=True)
        grown = sum((first << stage) * max(0, min(step, end) - begin) for stage, (begin, end) in enumerate(stages))
        return grown + max(0, step - over) * batch_size

    def length_at(self, sequence_length: int, step: int) -> int:
        """Return the tokens of a row in ``step``, counted from 0; ``sequence_length`` is the final length."""
        first, over = self.initial_sequence_length, self.sequence_length_steps
        if first is None or step >= over:
            return sequence_length
        return first << step * _doublings(first, sequence_length) // over

    @property
    def first_full_step(self) -> int:
        """The first step, counted from 0, whose batch has its final shape."""
        rows = 0 if self.initial_batch_size is None else self.batch_size_steps
        length = 0 if self.initial_sequence_length is None else self.sequence_length_steps
        return max(rows, length)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(
                f"schedule.warmup and schedule.decay are parts of one run, so their sum must be at most 1; "
                f"got {self.warmup} + {self.decay}."
            )


@dataclass(frozen=True)
class EvaluationSettings(Group):
    every: Annotated[Count, Role.NEUTRAL] = 100
    """Steps between two evaluations of the held-out loss."""
    rows: Count = 64
    """Number of rows of each evaluation; always the same rows, evenly spaced among ``final_rows``."""
    final_rows: Count = 1024
    """Maximum number of held-out rows for the loss of the finished model."""


@dataclass(frozen=True)
class CheckpointSettings(Group):
    every: Count = 500
    """Steps between two checkpoints; one more is written at the end."""
    keep: Count = 2
    """Number of newest checkpoints to keep; the one with the lowest training loss is kept too."""
    keep_every: Count | None = None
    """Also keep all checkpoints whose step is a multiple of this number."""
    memory_every: Count | None = None
    """Steps between two copies of the state in the memory of the nodes, from which ``--resume`` continues. None: none.
    With replicas (``parallel.replicate``) the ranks of a lost node receive theirs from another one."""
    memory_folder: str = "/dev/shm"
    """Folder of these copies on each node; it is in memory, and only the ranks of its node need to see it."""


@dataclass(frozen=True)
class ParallelSettings(Group):
    """Device mesh of the processes that ``torchrun`` starts; their number is ``replicate · shard · context``.

    A batch is divided into ``replicate · shard`` groups of rows, and each row into ``context`` parts.
    """

    replicate: Count = 1
    """Copies of the model (HSDP), each sharded over ``shard · context`` ranks, which need the fastest links."""
    shard: Count | None = None
    """Ranks that shard parameters, gradients and optimizer state (FSDP2), together with those of ``context``.
    None: the number of processes divided by ``replicate · context``."""
    context: Count = 1
    """Ranks that hold consecutive parts of each row; a part consists of whole attention chunks."""


@dataclass(frozen=True)
class SkipSettings(Group):
    """Rule that skips spikes, by the rolling mean and standard deviation of loss and gradient norm."""

    deviations: PositiveOrNone = 6.0
    """Skip a step whose loss or gradient norm is more than this many standard deviations above the mean.
    Both are of the last ``window`` steps. None: skip only steps with non-finite values."""
    window: Count = 128
    """Number of previous steps in mean and deviation; no spike is skipped before half of them are done."""


@dataclass(frozen=True)
class SampleSettings(Group):
    """Text that the finished model generates at the end of a run."""

    prompt: str | None = None
    """Prompt of the generated text. None: the first words of the held-out text."""
    tokens: CountFromZero = 600
    """Maximum number of tokens generated after the prompt."""
    temperature: NotNegative = 0.7
    """Sampling temperature; 0 takes the most probable token each time."""


def _doublings(first: int, last: int) -> int:
    return (last // first).bit_length() - 1


def check_doubles(name: str, first: int | None, last: int) -> None:
    """Raise ValueError unless ``last`` is ``first`` times a power of two; ``first`` may be None."""
    if first is not None and (last % first or (last // first).bit_count() != 1):
        halved = last
        while halved > first and halved % 2 == 0:
            halved //= 2
        raise ValueError(
            f"schedule.initial_{name} must be {name} divided by a power of two, because it doubles until it is {name}; "
            f"got {first} and {last}. Try schedule.initial_{name}={halved}."
        )


OLD_NAMES = {"accumulation": "gradient_accumulation_steps"}
"""Field names of earlier versions and their current names. Recipes and overrides accept both."""


def current_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {OLD_NAMES.get(name, name): value for name, value in values.items()}


def current_override(override: str) -> str:
    key, separator, value = override.partition("=")
    return OLD_NAMES.get(key, key) + separator + value


def set_fields(values: dict[str, Any], overrides: Iterable[str], fixed: Collection[str] = ()) -> None:
    """Set each ``key=value``, with a dotted key, in the nested ``values``; the value stays text. ValueError: a key is
    unknown, or one of ``fixed``."""
    known = [name for name in flatten(values) if name not in fixed]
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            hint = f" To train on it: data.source={override}" if Path(override).exists() else ""
            raise ValueError(f"an override must read key=value, for example steps=100; got {override!r}.{hint}")
        if key not in known:
            problem = unknown_name("override", key, known)
            if (meant := ELSEWHERE.get(key.lower())) in known:
                problem = f"override must be a setting of the recipe; got {key!r}. Did you mean {meant!r}?"
            raise ValueError(f"{problem} gecko train RECIPE --show lists all.")
        *path, name = key.split(".")
        reduce(getitem, path, values)[name] = value


ELSEWHERE = {
    "lr": "optimizer.learning_rate", "wd": "optimizer.weight_decay", "grad_clip": "optimizer.clip",
    "max_steps": "steps", "max_iters": "steps", "num_iterations": "steps", "epochs": "steps", "dtype": "precision",
    "block_size": "sequence_length", "context_length": "sequence_length", "max_seq_length": "sequence_length",
    "vocab": "model.vocab_size", "n_layer": "model.num_layers", "n_embd": "model.model_dim", "out": "output",
}  # fmt: skip
"""Names that other training programs give to settings."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def settings_help(settings: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield for each field, also of groups, its dotted name, its value as an override takes it, and the first line of
    its docstring, which is the string below it in the source."""
    meanings = docstrings(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings_help(value, f"{prefix}{field.name}.")
        else:
            meaning = meanings.get(field.name, "").partition("\n")[0].replace("``", "")
            yield prefix + field.name, shlex.quote(_as_text(value)), meaning


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_as_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
