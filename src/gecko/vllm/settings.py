"""Settings of vLLM that a Gecko needs, and checks of those that it cannot have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode
from vllm.model_executor.models.config import MambaModelConfig

from gecko.parallel.sharding import check_divisible

CLASSIFIER = "GeckoForSequenceClassification"


class GeckoSettings(MambaModelConfig):
    """Hook of vLLM that changes the settings of an engine before it starts; the cache is that of Mamba models."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Set vLLM's cache mode, and its block size unless given; switch off CUDA graphs and the compiler.

        Otherwise vLLM would allocate, before it learns that the model has no graphs, a cache page for each of up to
        512 sequences to profile graphs.

        Raises:
            ValueError: the fields of the model's config contradict each other, the ranks of tensor parallelism cannot
                divide its heads, or an option is set that a Gecko cannot have.
        """
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
        yield (
            "runner",
            "generate",
            (
                "vLLM would answer from a classifier's head that it does not load. Open classifiers with "
                "AutoModelForSequenceClassification of transformers."
            ),
        )
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
