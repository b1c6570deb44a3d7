"""Settings of vLLM that a Gecko needs, and checks of those that it cannot have."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import MambaModelConfig

from gecko.parallel.tensor import check_divisible


class GeckoSettings(MambaModelConfig):
    """Hook of vLLM that changes the settings of an engine before it starts; the cache is that of Mamba models."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Set the size of a cached block and the cache mode.

        Raises:
            ValueError: the fields of the model's config contradict each other, the ranks of tensor parallelism cannot
                divide its heads, or speculative decoding is on.
        """
        config = vllm_config.model_config.hf_config.architecture()
        check_divisible(config, vllm_config.parallel_config.tensor_parallel_size)
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "speculative decoding must be off: a Gecko's state cannot go back to an earlier token, as it must when "
                "a draft token is refused."
            )
        super().verify_and_update_config(vllm_config)
