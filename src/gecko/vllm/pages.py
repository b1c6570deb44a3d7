"""States in the pages of vLLM's cache: one page per block and sequence, and which pages a step uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from gecko.runtime.tensors import map_tensors, tensors_of
from gecko.segments import Clock
from gecko.state import GeckoState

BACKEND = "GECKO"
ALIGNMENT = 64
"""Every tensor starts at a multiple of these bytes in its page, and pages are multiples of them."""


@dataclass(frozen=True)
class StepMetadata:
    """The sequences of one step, in the order of their tokens."""

    pages: Tensor
    """Page of each sequence, the same in all blocks, (rows,) on the device; the host does not know them."""
    lengths: list[int]
    """Tokens of each sequence in this step."""
    read: list[int]
    """Tokens that each sequence has read before."""


class StepMetadataBuilder(AttentionMetadataBuilder):
    """Builds ``StepMetadata`` from what vLLM's runner knows about a step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepMetadata:
        common = common_attn_metadata
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table = mamba_get_block_table_tensor(common.block_table_tensor, common.seq_lens, self.kv_cache_spec, mode)
        lengths = common.query_start_loc_cpu.diff()
        read = common.seq_lens_cpu_upper_bound - lengths  # exact, as there is no speculative decoding
        return StepMetadata(table[: len(lengths), 0], lengths.tolist(), read.tolist())


class StateBackend(AttentionBackend):
    """Names the builder of the metadata."""

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_builder_cls() -> type[StepMetadataBuilder]:
        return StepMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


def register_pages() -> None:
    """Register the metadata with vLLM; a second call has no effect."""
    if not hasattr(MambaAttentionBackendEnum, BACKEND):
        MambaAttentionBackendEnum.register(BACKEND, f"{__name__}.{StateBackend.__name__}")


class PageLayout:
    """Places of a block's tensors in a page.

    Args:
        tensors: the tensors of one sequence, (1, …); they may be on the device ``meta``.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places: list[tuple[int, tuple[int, ...], torch.dtype]] = []
        self.num_bytes = 0
        for tensor in tensors:
            self._places.append((self.num_bytes, tuple(tensor.shape[1:]), tensor.dtype))
            self.num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def views(self, pages: Tensor) -> list[Tensor]:
        """Return the tensors of all pages (N, num_bytes), as views (N, …)."""
        found = []
        for offset, shape, dtype in self._places:
            content = pages[:, offset : offset + prod(shape) * dtype.itemsize].view(dtype)
            found.append(content.unflatten(1, shape) if shape else content[:, 0])
        return found


class BlockPages(MambaBase):
    """The pages of one block, as a layer of vLLM: it asks for memory and gets it before the first step."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.kv_cache: Any = ()

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the memory, (pages, 1, 1, bytes)."""
        self.kv_cache = (kv_cache.squeeze((1, 2)),)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self._num_bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    @property
    def mamba_type(self) -> Any:
        return getattr(MambaAttentionBackendEnum, BACKEND)


class StatePages:
    """The states of all sequences in the memory that vLLM gives.

    The pages of all blocks have one size, so that vLLM gives a sequence the same page number in every block. Each has
    room for the state of the final norm, which only the last one uses.

    Args:
        blank: the initial state of one sequence; it may be on the device ``meta``.
        prefix: name of the model's blocks.
        layers: vLLM's table of layers, to which the pages are added.
    """

    def __init__(self, blank: GeckoState, prefix: str, layers: dict[str, Any]) -> None:
        self._blank = blank
        self._layout = PageLayout([*blank.mixers[0].tensors().values(), *tensors_of(blank.final_norm)])
        self._blocks = [BlockPages(self._layout.num_bytes) for _ in blank.mixers]
        self.names = [f"{prefix}.{i}.state" for i in range(len(self._blocks))]
        layers.update(zip(self.names, self._blocks, strict=True))
        self._memory: list[Any] = []
        self._state: GeckoState | None = None

    def state(self) -> GeckoState:
        """Return all pages as one state, whose rows are the pages and whose tensors are views; its clock has no
        meaning. The same object is returned until vLLM gives other memory."""
        memory = [block.kv_cache for block in self._blocks]
        if self._state is None or any(new is not old for new, old in zip(memory, self._memory, strict=True)):
            views = [self._layout.views(pages) for (pages,) in memory]
            blank, norm = self._blank, iter(views[-1][len(self._blank.mixers[-1].tensors()) :])
            mixers = []
            for mixer, found in zip(blank.mixers, map(iter, views), strict=True):
                mixers.append(mixer.map(lambda _, found=found: next(found)))  # type: ignore[misc]
            self._state = replace(
                blank, mixers=tuple(mixers), final_norm=map_tensors(blank.final_norm, lambda _: next(norm))
            )
            self._memory = memory
        return self._state

    def gather(self, pages: Tensor, read: Sequence[int]) -> GeckoState:
        """Return copies of the states in ``pages`` of sequences that have read ``read`` tokens, of one document each.

        The pages are not read by the host.
        """
        state, start = self.state(), Clock.start(len(read))
        return replace(
            state, clock=replace(start, position=torch.tensor(read, device="cpu")),
            mixers=tuple(mixer.map(lambda x: x[pages]) for mixer in state.mixers),
            final_norm=map_tensors(state.final_norm, lambda x: x[pages]),
        )  # fmt: skip

    def write(self, pages: Tensor, after: GeckoState) -> None:
        """Write the rows of ``after`` to ``pages``."""
        for page, row in zip(_tensors(self.state()), _tensors(after), strict=True):
            page.index_copy_(0, pages.long(), row)


def _tensors(state: GeckoState) -> list[Tensor]:
    """Return the tensors of a state without its clock, in an order of their own."""
    return tensors_of((*state.mixers, state.final_norm))
