"""One training run as one frozen value: everything that decides what is trained, and where it is written."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gecko.baselines.models import ModelConfig, model_type
from gecko.json_file import read_object
from gecko.recomputation import ActivationCheckpointing
from gecko.train.checks import check_counts, check_limits, check_positive
from gecko.train.fields import build
from gecko.train.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    OptimizerSettings,
    ParallelSettings,
    SampleSettings,
    ScheduleSettings,
    SkipSettings,
)

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
    accumulation: int = 1
    """Equal parts a batch is computed in, one after the other; saves memory and changes no number but rounding."""
    steps: int | None = None
    """Optimizer steps. None: as many as fit into ``minutes``, measured once when the run starts."""
    minutes: float | None = None
    """Time for training with its evaluations; used only where ``steps`` is None."""
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
        parts = data_ranks * self.accumulation
        if self.batch_size % parts:
            raise ValueError(
                f"batch_size must be a multiple of the ranks that share its rows times accumulation, {data_ranks} × "
                f"{self.accumulation}; got {self.batch_size}. Try batch_size={-(-self.batch_size // parts) * parts}."
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
        return build(cls, values)

    def save(self, path: str | Path) -> None:
        """Write the run as JSON, with the command to run it again."""
        content = {"command": self.command(), **self.to_dict()}
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Run:
        values = read_object(path, "a recipe")
        values.pop("command", None)
        return cls.from_dict(values)

    def _check_counts(self) -> None:
        check_counts(self, ("batch_size", "sequence_length", "accumulation", "max_skips", "threads"))
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"accumulation must divide batch_size; got {self.accumulation} and {self.batch_size}. "
                f"Try accumulation={self.batch_size}, one row at a time."
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
