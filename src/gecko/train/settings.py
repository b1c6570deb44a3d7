"""Settings of the optimizer, of its learning rate over a run, and of the growth of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gecko.train.overrides import check_counts, check_fractions, check_not_negative, check_positive


@dataclass(frozen=True)
class OptimizerSettings:
    name: Literal["adamw", "muon"] = "adamw"
    """``muon``: Muon for the matrices of blocks, at the rate and weight decay of AdamW, which updates the rest."""
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
    base_width: int | None = None
    """Width (``model_dim``) of the model for which the learning rate was found. None: one rate for all parameters.
    The rates of matrices in blocks and of the head are scaled for this model's width, see ``docs/pretraining.md``."""
    clip: float = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""

    def __post_init__(self) -> None:
        check_positive(self, ("learning_rate", "eps"), "optimizer.")
        check_not_negative(self, ("weight_decay",), "optimizer.")
        check_counts(self, ("base_width",), "optimizer.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two decays in [0, 1), as 0.9,0.95; got {self.betas}.")
        if not self.clip > 0:
            raise ValueError(f"optimizer.clip must be above 0, and is inf for none; got {self.clip}.")


@dataclass(frozen=True)
class ScheduleSettings:
    """Learning-rate schedule, and growth of the batches. Lengths are fractions of all steps if they are not counts."""

    kind: Literal["cosine", "wsd"] = "cosine"
    """``cosine``: warm-up, then cosine decay. ``wsd``: warm-up, constant, then linear decay."""
    warmup: float = 0.02
    """Fraction of the run in which the rate rises to its peak."""
    decay: float = 0.2
    """Fraction of the run, at its end, in which the ``wsd`` schedule decays."""
    final: float = 0.0
    """Learning rate at the end, as a fraction of the peak rate."""
    initial_batch_size: int | None = None
    """Rows of the first batches. None: all batches have ``batch_size`` rows.
    Within ``batch_size_steps`` steps they double, at equal distances, until they are ``batch_size``."""
    batch_size_steps: int = 0
    """Steps before the first batch with ``batch_size`` rows."""
    initial_sequence_length: int | None = None
    """Tokens of the first rows. None: all rows have ``sequence_length`` tokens.
    They double like ``initial_batch_size``. The batches have the same tokens as without this setting: their rows are
    cut into shorter ones."""
    sequence_length_steps: int = 0
    """Steps before the first rows of ``sequence_length`` tokens."""

    def __post_init__(self) -> None:
        check_fractions(self, ("warmup", "decay", "final"), "schedule.")
        check_not_negative(self, ("batch_size_steps", "sequence_length_steps"), "schedule.")
        check_counts(self, ("initial_batch_size", "initial_sequence_length"), "schedule.")
        if self.kind == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(
                f"schedule.warmup and schedule.decay are parts of one run, so their sum must be at most 1; "
                f"got {self.warmup} + {self.decay}."
            )
