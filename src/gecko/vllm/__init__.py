"""Plug-in for vLLM, which finds it by the entry point ``vllm.general_plugins``: it runs model folders of ``gecko.hf``.

The state of a block is a page of vLLM's cache: vLLM's scheduler gives every sequence a page per block, copies pages of
shared prefixes, and takes them back when it preempts a sequence.
"""

from __future__ import annotations

ARCHITECTURE = "GeckoForCausalLM"


def register() -> None:
    """Register the config, the model and the metadata of its states with vLLM; a second call has no effect."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import gecko.hf  # noqa: F401 (registers the config with transformers)
    from gecko.vllm.pages import CLASSIFIER, GeckoSettings, register_pages

    register_pages()
    for name in (ARCHITECTURE, CLASSIFIER):  # the settings refuse a classifier
        MODELS_CONFIG_MAP[name] = GeckoSettings
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"gecko.vllm.model:{ARCHITECTURE}")
