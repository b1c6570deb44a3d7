"""Gecko for transformers. Importing this package registers ``model_type`` gecko with the ``Auto`` classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from gecko.hf.cache import GeckoCache
from gecko.hf.configuration import GeckoConfig
from gecko.hf.export import byte_tokenizer, export
from gecko.hf.modeling import GeckoForCausalLM, GeckoModel
from gecko.runtime.process import require

require("transformers", "hf")

PROJECTIONS = ("to_shared", "to_value", "to_gate", "to_hidden", "to_output", "fc1", "fc2", "fc3")
"""Names of the linear layers in blocks, for ``target_modules`` of PEFT."""

AutoConfig.register(GeckoConfig.model_type, GeckoConfig, exist_ok=True)
AutoModel.register(GeckoConfig, GeckoModel, exist_ok=True)
AutoModelForCausalLM.register(GeckoConfig, GeckoForCausalLM, exist_ok=True)

__all__ = ["PROJECTIONS", "GeckoCache", "GeckoConfig", "GeckoForCausalLM", "GeckoModel", "byte_tokenizer", "export"]
