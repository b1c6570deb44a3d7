"""The reading state of a text: all that Gecko remembers of it, constant in size."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.files import load_tensors, save_tensors
from gecko.layers.gated_attention import MixerState
from gecko.ops.chunk_attention import AttentionState
from gecko.ops.timestep_norm import TimestepNormState
from gecko.ops.working_memory import WorkingMemoryState
from gecko.records import TensorRecord
from gecko.segments import Clock

FORMAT = "gecko-state-1"
ROUNDED = "rounded"
"""Metadata: the tensors that a compact file holds in bfloat16, with the dtype they had."""


@dataclass(frozen=True)
class GeckoState(TensorRecord):
    """A value: calls return a new one, and the old one stays what it was.

    ``model`` names the weights that read the text; "" where gradients were wanted.
    """

    config: GeckoConfig
    model: str
    clock: Clock
    mixers: tuple[MixerState, ...]
    final_norm: TimestepNormState
    exclusive: bool = field(default=False, compare=False)
    """No other value has these tensors, nor one of them another's place: ``Gecko.step`` may write into them."""

    @classmethod
    def empty(
        cls, config: GeckoConfig, batch: int = 1, *, model: str = "",
        dtype: torch.dtype = torch.float32, value_dtype: torch.dtype | None = None, device: torch.device | str = "cpu",
    ) -> GeckoState:  # fmt: skip
        """Nothing read yet; ``value_dtype`` is of the values in attention's window, and None is ``dtype``."""
        mixer = _empty_mixer(config, batch, dtype, value_dtype or dtype, device)
        norm = TimestepNormState.empty(batch, config.timestep_groups, dtype, device)
        return cls(config, model, Clock.start(batch), (mixer,) * config.num_layers, norm)

    @property
    def batch_size(self) -> int:
        return len(self.clock.position)

    @property
    def position(self) -> list[int]:
        """Tokens read so far, by row."""
        return self.clock.position.tolist()

    @property
    def num_bytes(self) -> int:
        """Size in memory; it does not depend on how much was read."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def rows(self, index: Sequence[int]) -> GeckoState:
        """Some rows, in the order asked for; a row may be taken more than once."""
        return self.map(lambda x: x.index_select(0, torch.tensor(list(index), device=x.device)))

    @staticmethod
    def stack(states: Sequence[GeckoState]) -> GeckoState:
        """Rows of several states as one batch; they may stand at different positions.

        Raises:
            ValueError: the states are of different models.
        """
        for state in states[1:]:
            if (state.config, state.model) != (states[0].config, states[0].model):
                raise ValueError("states that become one batch must be of one model; got states of different ones.")
        parts = [iter(state.tensors().values()) for state in states]
        return states[0].map(lambda _: torch.cat([next(part) for part in parts]))

    def map(self, function: Callable[[Tensor], Tensor]) -> GeckoState:
        """A copy with ``function`` applied to every tensor; not ``exclusive``, for whoever asked may keep it."""
        return replace(super().map(function), exclusive=False)

    def own(self) -> GeckoState:
        """A copy that is ``exclusive``."""
        return replace(self.map(torch.clone), exclusive=True)

    def save(self, path: str | Path, *, compact: bool = False) -> None:
        """Write to one file, whole or not at all.

        ``compact`` rounds the window, the moving average and the memory's matrices to bfloat16 on the way, which
        halves the file. Clocks, counts, norm statistics and log sums stay exact. ``load`` widens them again.
        """
        tensors = self.tensors()
        rounded = {name: x for name, x in tensors.items() if compact and _may_round(name) and x.itemsize > 2}
        metadata = {
            "format": FORMAT, "config": json.dumps(self.config.to_dict()), "model": self.model,
            ROUNDED: json.dumps({name: str(x.dtype).removeprefix("torch.") for name, x in rounded.items()}),
        }  # fmt: skip
        save_tensors(path, tensors | {name: x.bfloat16() for name, x in rounded.items()}, metadata)

    @classmethod
    def load(cls, path: str | Path) -> GeckoState:
        """Read a file written by ``save``.

        Raises:
            FileNotFoundError, ValueError: there is none, it is damaged, or it holds something else.
        """
        tensors, metadata = load_tensors(path)
        if metadata.get("format") != FORMAT:
            found = metadata.get("gecko", metadata.get("format", "another file"))
            raise ValueError(f"{path} must hold a reading state ({FORMAT}); it holds {found}.")
        config = GeckoConfig.from_dict(json.loads(metadata["config"]))
        blank = cls.empty(config, model=metadata["model"])
        if blank.tensors().keys() != tensors.keys():
            raise ValueError(f"{path} must hold the tensors of a state of its config; another version wrote it.")
        for name, dtype in json.loads(metadata.get(ROUNDED, "{}")).items():
            tensors[name] = tensors[name].to(getattr(torch, dtype))
        filled = (tensors[name] for name in blank.tensors())
        return blank.map(lambda _: next(filled))

    def to(self, device: torch.device | str) -> GeckoState:
        """On a device; the clock stays on the host. What the next step overwrites is copied even where it is there."""
        moved = self.map(lambda x: x.to(device, copy=self.exclusive))
        return replace(moved, clock=self.clock)


def _may_round(name: str) -> bool:
    """Whether an error of 2⁻⁹ in this tensor stays one of 2⁻⁹ in what is computed from it.

    Not so for a log sum, where it is an error of the exponent, nor for counts. Norm statistics are few.
    """
    return name.split(".")[-1] in ("cema", "keys", "values", "memory", "key_sum", "value_sum")


def _empty_mixer(
    config: GeckoConfig, batch: int, dtype: torch.dtype, value_dtype: torch.dtype, device: torch.device | str
) -> MixerState:
    heads, key_dim, value_dim = config.num_heads, config.key_head_dim, config.value_head_dim
    window = AttentionState.empty(batch, heads, config.chunk_size, key_dim, value_dim, dtype, device)
    memory = None
    if config.memory != "none":
        memory = WorkingMemoryState.empty(config.memory, batch, heads, key_dim, value_dim, dtype, device)
    return MixerState(
        TimestepNormState.empty(batch, config.timestep_groups, dtype, device),
        torch.zeros(batch, config.model_dim, config.cema_modes, 2, dtype=dtype, device=device),
        replace(window, values=window.values.to(value_dtype)),
        memory,
    )
