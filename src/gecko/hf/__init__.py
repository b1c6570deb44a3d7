"""Gecko for transformers. Importing this package registers ``model_type`` gecko with the ``Auto`` classes."""

from gecko.runtime.process import require, without_log_warnings

require("transformers", "hf")
with without_log_warnings():  # of torchao, which transformers imports
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    from gecko.hf.batch import GeckoCache
    from gecko.hf.configuration import GeckoConfig
    from gecko.hf.export import byte_tokenizer, chat_tokenizer, export
    from gecko.hf.modeling import GeckoForCausalLM, GeckoForSequenceClassification, GeckoModel

PROJECTIONS = ("to_shared", "to_value", "to_gate", "to_hidden", "to_output", "fc1", "fc2", "fc3")
"""Names of the linear layers in blocks, for ``target_modules`` of PEFT."""

AutoConfig.register(GeckoConfig.model_type, GeckoConfig, exist_ok=True)
AutoModel.register(GeckoConfig, GeckoModel, exist_ok=True)
AutoModelForCausalLM.register(GeckoConfig, GeckoForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(GeckoConfig, GeckoForSequenceClassification, exist_ok=True)

__all__ = [
    "PROJECTIONS", "GeckoCache", "GeckoConfig", "GeckoForCausalLM", "GeckoForSequenceClassification", "GeckoModel",
    "byte_tokenizer", "chat_tokenizer", "export",
]  # fmt: skip
