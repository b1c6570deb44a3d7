"""Settings of a training run: the frozen dataclass ``Run`` determines what is trained and where it is saved."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from gecko.io.checkpoints import CHECKPOINTS
from gecko.io.files import parse_object
from gecko.models import ModelConfig, model_type, parse_config
from gecko.models.gecko import ActivationCheckpointing
from gecko.records import LIMIT, MOST, Count, NotNegative, Parsed, Range, build, check, field_types
from gecko.train.settings import (
    ASIDE,
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    OptimizerSettings,
    ParallelSettings,
    Role,
    SampleSettings,
    ScheduleSettings,
    SkipSettings,
    check_doubles,
    current_fields,
    current_override,
    set_fields,
)

RECIPE = "recipe.json"
"""File of a run in its folder and in each checkpoint."""
NOT_SETTINGS = ("recipe", "overrides", "model.model_type")
"""Fields that no override sets."""

_ABOVE_0 = Range("must be above 0 and finite", above=0, most=MOST, limit=LIMIT)
_ABOVE_0_OR_NONE = dataclasses.replace(_ABOVE_0, rule=f"{_ABOVE_0.rule}, or none")

Precision = Literal["auto", "float32", "bfloat16", "float8", "float8_emulated"]


def is_half(precision: Precision) -> bool:
    """Return whether a run uses autocast to bfloat16. With float8, the other operations compute in bfloat16."""
    return precision not in ("auto", "float32")


@dataclass(frozen=True)
class Run:
    """A complete training run. Recipes return one; ``key=value`` overrides change one."""

    model: Annotated[ModelConfig, Parsed(parse_config), Role.FIXED | Role.FREE]
    output: Annotated[str, ASIDE]
    """Folder for checkpoints, metrics and report."""
    data: Annotated[DataSettings, Role.FIXED] = field(default_factory=DataSettings)
    batch_size: Annotated[Count, Role.FIXED] = 8
    """Rows of one optimizer step."""
    sequence_length: Annotated[Count, Role.FIXED] = 1024
    """Tokens of a row."""
    gradient_accumulation_steps: Annotated[Count, Role.NEUTRAL] = 1
    """Number of equal parts of a batch, computed one after the other. Saves memory; results differ by rounding."""
    steps: Annotated[int, _ABOVE_0] | None = None
    """Optimizer steps. None: as many as fit into ``minutes``, fixed when ``schedule.kind`` says."""
    minutes: Annotated[Annotated[float, _ABOVE_0] | None, ASIDE] = None
    """Time until the command ends, with evaluations, checkpoints and report; used only if ``steps`` is None."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    z_loss: NotNegative = 0.0
    """Coefficient of the squared log-sum-exp of the logits, which is added to the training loss and keeps logits small.
    Held-out losses are without it. A common value is 1e-4."""
    precision: Precision = "float32"
    """``bfloat16``: matrix products in bf16 under autocast; parameters, optimizer and statistics stay float32.
    ``auto``: bfloat16 if the device has bf16 instructions, else float32; chosen once when the run starts.
    ``float8``: as bfloat16, with the products of the blocks' linear layers in float8; needs the extra ``quantize`` and
    a GPU that multiplies float8. ``float8_emulated`` rounds alike on any device, and is slow."""
    activation_checkpointing: Annotated[ActivationCheckpointing, ASIDE] = "none"
    """``full``: recompute each block in the backward pass instead of keeping its activations.
    ``selective``: keep the outputs of its linear layers and recompute the rest."""
    compile: Annotated[bool, Role.NEUTRAL] = False
    """Compile each block with ``torch.compile``; requires activation checkpointing ``none`` or ``full``."""
    capture: Annotated[bool, Role.NEUTRAL] = False
    """Capture loss and gradients of each shape of a batch as a CUDA graph, and repeat it in later steps.
    For a Gecko on GPUs. Numbers stay the same; short steps wait less for the host, and need more memory: each of
    several GPUs holds all weights and gradients."""
    parallel: Annotated[ParallelSettings, Role.NEUTRAL] = field(default_factory=ParallelSettings)
    init_from: str | None = None
    """Model folder, run or checkpoint whose weights the run starts from, with a new optimizer (fine-tuning)."""
    lora_rank: Annotated[Count | None, Role.FIXED] = None
    """Rank of adapters (LoRA) that are trained in place of all parameters of ``init_from``. None: train all."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: Annotated[CheckpointSettings, ASIDE] = field(default_factory=CheckpointSettings)
    sample: Annotated[SampleSettings, ASIDE] = field(default_factory=SampleSettings)
    skip: SkipSettings = field(default_factory=SkipSettings)
    max_skips: Annotated[Count, Role.NEUTRAL] = 10
    """Number of consecutive skipped steps at which the run stops with an error."""
    hang_minutes: Annotated[Annotated[float, _ABOVE_0_OR_NONE] | None, ASIDE] = 30.0
    """With several ranks: minutes without progress after which a rank writes its stack to ``stacks/`` and exits.
    ``torchrun --max-restarts`` then restarts the job. None: no stacks, and collectives time out after half an hour."""
    profile: Annotated[tuple[int, int] | None, ASIDE] = None
    """First and last step that each rank traces into ``profile/``, for chrome://tracing or Perfetto."""
    wandb: Annotated[str | None, ASIDE] = None
    """Project on Weights & Biases that receives the metrics; needs the extra ``wandb``."""
    seed: Annotated[int, Role.FIXED | ASIDE] = 0
    """Determines the initial weights, the held-out documents and the order of rows."""
    device: Annotated[str, Role.NEUTRAL] = "auto"
    """``auto`` (CUDA if available, else CPU), ``cpu``, ``cuda``, ``cuda:1``."""
    threads: Annotated[Count | None, Role.NEUTRAL] = None
    """Number of CPU threads. None: PyTorch's default."""
    recipe: Annotated[str, ASIDE] = ""
    """Name of the recipe that this run was made from; ``overrides`` were applied to it."""
    overrides: Annotated[tuple[str, ...], ASIDE] = ()

    def __post_init__(self) -> None:
        check(self)
        self._check_shapes()
        self._check_way()
        if self.steps is None and self.minutes is None:
            raise ValueError("a run needs an end: set steps, for example steps=1000, or minutes=5.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a batch of its final size."""
        return self.batch_size * self.sequence_length

    def rows_before(self, step: int) -> int:
        """Return the rows of ``sequence_length`` tokens of all batches before that of ``step``, counted from 0."""
        return self.schedule.rows_before(self.batch_size, step)

    def tokens_before(self, step: int) -> int:
        """Return the tokens of all batches before that of ``step``, counted from 0."""
        return self.rows_before(step) * self.sequence_length

    def length_at(self, step: int) -> int:
        """Return the tokens of a row in ``step``, counted from 0."""
        return self.schedule.length_at(self.sequence_length, step)

    def rows_per_rank(self, data_ranks: int) -> int:
        """Return the rows of a batch per data rank. Raise ValueError if the batch cannot be divided evenly."""
        accumulated = self.gradient_accumulation_steps
        parts = data_ranks * accumulated
        first = self.schedule.initial_batch_size
        for name, rows in (("batch_size", self.batch_size), ("schedule.initial_batch_size", first)):
            if rows is not None and rows % parts:
                raise ValueError(
                    f"{name} must be a multiple of the ranks that share its rows times gradient_accumulation_steps, "
                    f"{data_ranks} × {accumulated}; got {rows}. Try {name}={-(-rows // parts) * parts}."
                )
        return self.batch_size // data_ranks

    @property
    def follows_clock(self) -> bool:
        """Whether the number of steps is fixed during the run, when the time for decay and end has come."""
        return self.steps is None and self.schedule.kind != "cosine" and self.schedule.decay < 1

    @property
    def folder(self) -> Path:
        return Path(self.output).expanduser()

    @property
    def checkpoints_folder(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def tokenizer_folder(self) -> Path:
        """Folder with the run's copy of the tokenizer, which is copied into every checkpoint."""
        return self.folder / "tokenizer"

    def command(self) -> str:
        """Return the command that trains this run again."""
        source = self.recipe or str(self.folder / "recipe.json")
        return shlex.join(["gecko", "train", source, *self.overrides])

    def with_settings(self, *overrides: str) -> Run:
        """Return the run with each ``key=value``, also in its command. Raise ValueError for an unknown or unfit one.

        All changes apply together, so fields that must agree can change in any order; of equal keys the last applies.
        """
        values = self.to_dict()
        set_fields(values, overrides, NOT_SETTINGS)
        latest = {override.partition("=")[0]: override for override in (*self.overrides, *overrides)}
        changed = build(Run, values, texts=True)
        return dataclasses.replace(changed, overrides=tuple(latest.values()))

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
        return parse_object(
            path, "a recipe", lambda found: cls.from_dict({name: found[name] for name in found if name != "command"})
        )

    def _check_shapes(self) -> None:
        """Check what must agree for batches, their growth, and their parts on ranks."""
        chunk, ranks, carry = self.model.chunk_size, self.parallel.context, self.data.carry_state
        first_rows, first_length = self.schedule.initial_batch_size, self.schedule.initial_sequence_length
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"gradient_accumulation_steps must divide batch_size; got {self.gradient_accumulation_steps} and "
                f"{self.batch_size}. Try gradient_accumulation_steps={self.batch_size}, one row at a time."
            )
        if ranks > 1 and chunk is None:
            raise ValueError(
                "parallel.context must be 1 for a Llama: a token's attention needs the keys of its whole row; "
                f"got {ranks}. Try parallel.shard in its place."
            )
        share = ranks * (chunk or 1) if ranks > 1 else 1
        lengths = {"sequence_length": self.sequence_length, "schedule.initial_sequence_length": first_length}
        for name, length in lengths.items():
            if length is not None and length % share:
                raise ValueError(
                    f"with parallel.context={ranks} a rank holds whole chunks of {chunk} tokens, so {name} must be a "
                    f"multiple of {share}; got {length}. Try {name}={max(1, round(length / share)) * share}."
                )
        if self.parallel.shard is not None:
            self.rows_per_rank(self.parallel.replicate * self.parallel.shard)
        check_doubles("batch_size", first_rows, self.batch_size)
        check_doubles("sequence_length", first_length, self.sequence_length)
        if carry and (first_rows is not None or first_length is not None):
            raise ValueError(
                "data.carry_state=true keeps the state of each row of a batch, so all batches must have one shape; got "
                "schedule.initial_batch_size or schedule.initial_sequence_length. Set these to none."
            )
        if carry and chunk is None:
            raise ValueError(
                "data.carry_state must be false for a Llama, which has no state of constant size; got true."
            )
        if carry and self.checkpoint.memory_every is not None:
            raise ValueError(
                "checkpoint.memory_every copies what replicas share, and with data.carry_state=true each rank has "
                f"lanes that no other rank has; got {self.checkpoint.memory_every}. Set checkpoint.memory_every=none."
            )

    def _check_way(self) -> None:
        """Check what must agree for the way in which the model is computed, and single settings."""
        if not self.output:
            raise ValueError("output must name the folder of the run; got ''. Try runs/mine.")
        if self.threads is not None and self.threads > 1024:
            raise ValueError(f"threads must be at most 1024; got {self.threads}. Leave it out for all cores.")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be a whole number of 64 bits, from 0 to 2**64 - 1; got {self.seed}.")
        unfit = {
            "compile=false": self.compile, "precision=bfloat16": self.precision.startswith("float8"),
            "parallel.context=1": self.parallel.context > 1, "data.carry_state=false": self.data.carry_state,
            "profile=none": self.profile is not None, "a model that is a Gecko": self.model.chunk_size is None,
        }  # fmt: skip
        if self.capture and any(unfit.values()):
            needed = " and ".join(setting for setting, is_unfit in unfit.items() if is_unfit)
            raise ValueError(
                f"capture=true repeats the launches of one step in others, and takes {needed}. Try that, or "
                "capture=false."
            )
        if self.compile and self.activation_checkpointing == "selective":
            raise ValueError(
                "compile=true takes activation_checkpointing=none or full: PyTorch cannot recompute parts of a block "
                "that it compiled in pieces; got selective."
            )
        if self.profile is not None:
            self._check_profile(*self.profile)
        if self.lora_rank is not None:
            self._check_adapters(self.lora_rank)

    def _check_adapters(self, rank: int) -> None:
        if self.init_from is None or self.compile:
            raise ValueError(
                "lora_rank trains adapters of a trained model without compilation: set init_from and compile=false, "
                "or lora_rank=none."
            )
        if rank > (width := self.model.model_dim):
            raise ValueError(f"lora_rank must be at most the model's width, {width}; got {rank}. Try {min(16, width)}.")
        if self.precision.startswith("float8"):
            raise ValueError(
                "precision must be float32 or bfloat16 for adapters, which replace the linear layers that float8 would "
                f"replace; got {self.precision}. Try precision=bfloat16, or lora_rank=none."
            )

    def _check_profile(self, first: int, last: int) -> None:
        if not 1 <= first <= last:
            raise ValueError(
                f"profile must be the first and the last step, from 1, as profile=10,12; got {first, last}."
            )
        if self.steps is not None and first > self.steps:
            raise ValueError(
                f"profile must begin within the run's {self.steps} steps; got {first, last}. Try "
                f"profile={self.steps},{self.steps}, or profile=none."
            )


def has_role(setting: str, role: Role) -> bool:
    """Return whether a setting, given by its dotted name, or its whole group is marked with ``role``."""
    return bool({setting, setting.partition(".")[0]} & _with_role(Run, role))


@lru_cache
def _with_role(kind: Any, role: Role, prefix: str = "") -> frozenset[str]:
    """Return the dotted names of the fields, and of those of groups, that are marked with ``role``."""
    found = set()
    for name, hint in field_types(kind).items():
        if any(isinstance(mark, Role) and role in mark for mark in getattr(hint, "__metadata__", ())):
            found.add(prefix + name)
        elif dataclasses.is_dataclass(hint):
            found |= _with_role(hint, role, f"{prefix}{name}.")  # type: ignore[arg-type]
    return frozenset(found)
