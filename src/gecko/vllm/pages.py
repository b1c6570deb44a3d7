"""The settings of a Gecko and the pages of its states, which vLLM needs before it loads the model.

A state takes one page of vLLM's cache per block and sequence; the metadata of a step names the pages that it uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.config import MambaModelConfig
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from gecko.parallel.sharding import check_divisible
from gecko.runtime.tensors import map_tensors, tensors_of
from gecko.segments import Clock
from gecko.state import GeckoState

BACKEND = "GECKO"
CLASSIFIER = "GeckoForSequenceClassification"
ALIGNMENT = 64
"""Every tensor starts at a multiple of these bytes in its page, and pages are multiples of them."""


class GeckoSettings(MambaModelConfig):
    """Hook of vLLM that changes the settings of an engine before it starts; the cache is that of Mamba models."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Set vLLM's cache mode, and its block size unless given. Switch off the compiler and CUDA graphs, to profile
        which vLLM would allocate pages for up to 512 sequences. Raise ValueError if the fields of the model's config
        contradict each other, ranks cannot divide its heads, or an option is set that a Gecko cannot have."""
        config = vllm_config.model_config.hf_config.architecture()
        check_divisible(config, vllm_config.parallel_config.tensor_parallel_size)
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "speculative decoding must be off: a Gecko's state cannot go back to an earlier token, as it must when "
                "a draft token is refused."
            )
        wrong = [f"{option} must be {value}: {reason}" for option, value, reason in _refused(vllm_config)]
        if wrong:
            raise ValueError(" ".join(wrong))
        super().verify_and_update_config(vllm_config)
        compilation = vllm_config.compilation_config
        compilation.mode, compilation.cudagraph_mode = CompilationMode.NONE, CUDAGraphMode.NONE
        cache, budget = vllm_config.cache_config, vllm_config.scheduler_config.max_num_batched_tokens
        if cache.enable_prefix_caching and (cache.block_size or 0) > budget:
            raise ValueError(
                f"with prefix caching, max_num_batched_tokens must be at least block_size={cache.block_size}, or no "
                f"step reaches the end of a block; got {budget}. Set max_num_batched_tokens or a smaller block_size."
            )


def _refused(vllm_config: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the options that are set and would be ignored or fail later, what each must be, and why."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if CLASSIFIER in (model.hf_config.architectures or ()) or model.convert_type not in ("none", "embed"):
        head = "vLLM would answer from a classifier's head that it does not load"
        yield "runner", "generate", f"{head}. Open classifiers with AutoModelForSequenceClassification of transformers."
    if model.enable_prompt_embeds:
        yield "enable_prompt_embeds", "off", "a Gecko in vLLM reads tokens or text."
    if vllm_config.kv_transfer_config is not None:
        yield "kv_transfer_config", "unset", "a connector would send keys and values, of which a Gecko has none."
    if vllm_config.lora_config is not None:
        yield "enable_lora", "off", "merge an adapter into the model's folder instead."
    if model.quantization is not None:
        yield "quantization", "unset", "no layer would be quantised; use a folder of gecko quantize."
    for option in ("cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype"):
        if getattr(cache, option) not in ("auto", None):
            yield option, "auto", "states have the dtype of the model, and parts of them float32."


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
    room for the state of the final norm, which only the last one uses. ``blank`` is the initial state of one sequence,
    which may be on the device ``meta``. The pages are added to ``layers``, vLLM's table, under names with ``prefix``.
    """

    def __init__(self, blank: GeckoState, prefix: str, layers: dict[str, Any]) -> None:
        self._blank, size = blank, 0
        self._places: list[tuple[int, tuple[int, ...], torch.dtype]] = []
        """Offset in a page, shape and dtype of each tensor of a block."""
        for tensor in tensors_of((blank.mixers[0], blank.final_norm)):
            self._places.append((size, tuple(tensor.shape[1:]), tensor.dtype))
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._blocks = [BlockPages(size) for _ in blank.mixers]
        self.names = [f"{prefix}.{i}.state" for i in range(len(self._blocks))]
        layers.update(zip(self.names, self._blocks, strict=True))
        self._memory: list[Any] = []
        self._state: GeckoState | None = None

    def state(self) -> GeckoState:
        """Return all pages as one state, whose rows are the pages and whose tensors are views; its clock has no
        meaning. The same object is returned until vLLM gives other memory."""
        memory = [block.kv_cache for block in self._blocks]
        if self._state is None or any(new is not old for new, old in zip(memory, self._memory, strict=True)):
            blank, mixers = self._blank, []
            for mixer, (pages,) in zip(blank.mixers, memory, strict=True):
                views = self._views(pages)
                mixers.append(mixer.map(lambda _, views=views: next(views)))  # type: ignore[misc]
            # The views of the last block go on with those of the final norm.
            norm = map_tensors(blank.final_norm, lambda _: next(views))
            self._state, self._memory = replace(blank, mixers=tuple(mixers), final_norm=norm), memory
        return self._state

    def _views(self, pages: Tensor) -> Iterator[Tensor]:
        """Yield the tensors of a block in all pages (N, bytes), as views (N, …)."""
        for offset, shape, dtype in self._places:
            content = pages[:, offset : offset + prod(shape) * dtype.itemsize].view(dtype)
            yield content.unflatten(1, shape) if shape else content[:, 0]

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
        own, new = (tensors_of((*state.mixers, state.final_norm)) for state in (self.state(), after))
        for page, row in zip(own, new, strict=True):
            page.index_copy_(0, pages.long(), row)
