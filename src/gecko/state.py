"""State of a Gecko after reading text. It has a constant size and can be saved to one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.io.files import fitting, parse_json
from gecko.io.model_folder import FLOATS, fitted, float_dtype, load_tensors, save_tensors, stored_config
from gecko.layers.gated_attention import MixerState
from gecko.ops.chunk_attention import AttentionState
from gecko.ops.timestep_norm import TimestepNormState
from gecko.ops.working_memory import WorkingMemoryState
from gecko.runtime.tensors import TensorRecord, to_device
from gecko.segments import Clock

FORMAT = "gecko-state-1"
ROUNDED = "rounded"
"""Metadata key: the tensors that a compact file stores in bfloat16, with their original dtypes."""
_MAY_ROUND = ("cema", "keys", "values", "memory", "key_sum", "value_sum", "convolution")
"""Tensors that change results by about 2⁻⁹ if they are rounded by 2⁻⁹. Not so log sums, where the error is in the
exponent, or counts. Norm statistics are small."""
_LONGEST = 2**53
"""Most tokens of a text, so that counts are exact in float64."""


@dataclass(frozen=True)
class GeckoState(TensorRecord):
    """State of a batch of texts. It is a value: calls of the model return a new state and do not change the old one.

    ``model`` is the fingerprint of the weights that read the text; it is "" if gradients were enabled.
    """

    config: GeckoConfig
    model: str
    clock: Clock
    mixers: tuple[MixerState, ...]
    final_norm: TimestepNormState | None

    @classmethod
    def empty(
        cls, config: GeckoConfig, batch: int = 1, *, model: str = "",
        dtype: torch.dtype = torch.float32, value_dtype: torch.dtype | None = None, device: torch.device | str = "cpu",
    ) -> GeckoState:  # fmt: skip
        """Return the initial state. The values in the attention window have ``value_dtype``, by default ``dtype``."""
        heads, key_dim, value_dim = config.num_key_value_heads, config.key_head_dim, config.value_head_dim
        sizes = heads, config.chunk_size, key_dim, value_dim
        window = AttentionState.empty(batch, *sizes, dtype, device, sinks=config.sinks)
        window = window.to(*cls.window_dtypes(config, dtype, value_dtype))
        norm = final_norm = average = memory = convolution = None
        if config.norm == "timestep":
            norm, final_norm = (TimestepNormState.empty(batch, config.timestep_groups, dtype, device) for _ in range(2))
        if config.local_mixing == "cema":
            average = torch.zeros(batch, config.model_dim, config.cema_modes, 2, dtype=dtype, device=device)
        if config.memory != "none":
            memory = WorkingMemoryState.empty(config.memory, batch, heads, key_dim, value_dim, dtype, device)
        if config.convolution_width:
            channels = config.key_dim + heads * (key_dim + value_dim)
            convolution = torch.zeros(batch, config.convolution_width - 1, channels, dtype=dtype, device=device)
        mixer = MixerState(norm, average, window, memory, convolution)
        return cls(config, model, Clock.start(batch), (mixer,) * config.num_layers, final_norm)

    @staticmethod
    def window_dtypes(
        config: GeckoConfig, dtype: torch.dtype, value_dtype: torch.dtype | None
    ) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of keys and values in the attention window of ``empty``."""
        return (torch.bfloat16, torch.bfloat16) if config.bfloat16_window else (dtype, value_dtype or dtype)

    @property
    def batch_size(self) -> int:
        return len(self.clock.position)

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype in which the model computed the state; None if the state does not tell."""
        if self.final_norm is not None:
            return self.final_norm.mean.dtype
        return None if self.config.bfloat16_window else self.mixers[0].attention.keys.dtype

    def __repr__(self) -> str:
        return f"GeckoState(position={self.position}, {self.num_bytes:,} bytes, model={self.model[:12]!r})"

    @property
    def position(self) -> list[int]:
        """Number of tokens read, per row."""
        return self.clock.position.tolist()

    @property
    def num_bytes(self) -> int:
        """Size in memory; it does not depend on the number of tokens read."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def rows(self, index: Sequence[int]) -> GeckoState:
        """Return the rows of ``index`` in that order; a row may occur more than once."""
        chosen = torch.tensor(list(index), dtype=torch.int64, device="cpu")
        return self.map(lambda x: x.index_select(0, to_device(chosen, x.device)))

    @staticmethod
    def stack(states: Sequence[GeckoState]) -> GeckoState:
        """Concatenate the rows of several states, which may be at different positions. Raise ValueError if they are of
        different models, or there are none."""
        if not states:
            raise ValueError("states that become one batch must be at least one; got none.")
        for state in states[1:]:
            if (state.config, state.model) != (states[0].config, states[0].model):
                raise ValueError("states that become one batch must be of one model; got states of different ones.")
        parts = [iter(state.tensors().values()) for state in states]
        return states[0].map(lambda _: torch.cat([next(part) for part in parts]))

    def save(self, path: str | Path, *, compact: bool = False) -> None:
        """Write the state to one file atomically; a file at ``path`` is replaced, as by ``torch.save``.

        ``compact`` rounds the attention window, the CEMA state and the memory matrices to bfloat16, which halves the
        file. Clocks, counts, norm statistics and log sums stay exact. ``load`` restores the original dtypes.
        """
        tensors = self.tensors()
        rounded = {
            name: x for name, x in tensors.items() if compact and name.split(".")[-1] in _MAY_ROUND and x.itemsize > 2
        }
        metadata = {
            "format": FORMAT, "config": json.dumps(self.config.to_dict()), "model": self.model,
            ROUNDED: json.dumps({name: _name(x.dtype) for name, x in rounded.items()}),
        }  # fmt: skip
        save_tensors(path, tensors | {name: x.bfloat16() for name, x in rounded.items()}, metadata)

    @classmethod
    def load(cls, path: str | Path) -> GeckoState:
        """Read a file written by ``save``. Raise FileNotFoundError or ValueError if it does not exist, is damaged, or
        has other content."""
        tensors, metadata = load_tensors(path)
        if metadata.get("format") != FORMAT:
            found = metadata.get("gecko", metadata.get("format", "another file"))
            raise ValueError(f"{path} must hold a reading state ({FORMAT}); it holds {found}.")
        config = stored_config(Path(path), metadata, GeckoConfig)
        known = {_name(dtype): dtype for dtype in FLOATS}

        def restored() -> dict[str, Tensor]:
            return {name: tensors[name].to(known[x]) for name, x in parse_json(metadata.get(ROUNDED, "{}")).items()}

        tensors |= fitting(path, "a reading state", restored)
        # All layers have the dtypes of the first one.
        rows = tensors.get("clock.position", torch.empty(1, dtype=torch.int64, device="cpu")).numel()
        keys, values = (float_dtype(tensors.get(f"mixers.0.attention.{name}")) for name in ("keys", "values"))
        wide = keys if config.norm == "rms" else float_dtype(tensors.get("final_norm.mean"))
        wide = torch.promote_types(wide, torch.float32)
        blank = cls.empty(config, max(1, rows), model=metadata.get("model", ""), dtype=wide, device="meta")
        if not config.bfloat16_window:
            blank = blank.with_window(keys, values)
        filled = iter(fitted(path, tensors, blank.tensors()).values())
        state = blank.map(lambda _: next(filled))
        state.check_counts(path)
        return state

    def check_counts(self, source: object) -> None:
        """Raise ValueError, which names ``source``, unless the token counts can be those of a text: decoders find slots
        of the attention window by them."""
        position, start = self.clock.position, self.clock.document_start
        norms = [norm for norm in (self.final_norm, *(mixer.norm for mixer in self.mixers)) if norm is not None]
        counts = torch.stack([position - start, *(norm.count.to(position.device) for norm in norms)])
        if bool(((start < 0) | (start > position) | (position > _LONGEST) | (counts != position - start)).any()):
            raise ValueError(
                f"{source} must hold counts of tokens: 0 ≤ document start ≤ position ≤ {_LONGEST:,}, and in every norm "
                f"position − document start; got {start.tolist()}, {position.tolist()} and {counts.tolist()}."
            )

    def with_window(self, keys: torch.dtype, values: torch.dtype) -> GeckoState:
        """Return the state with the keys and values of the attention window in these dtypes."""
        mixers = (replace(mixer, attention=mixer.attention.to(keys, values)) for mixer in self.mixers)
        return replace(self, mixers=tuple(mixers))

    def to(self, device: torch.device | str) -> GeckoState:
        """Move the state to a device, except the clock."""
        return replace(self.map(lambda x: x.to(device)), clock=self.clock)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
