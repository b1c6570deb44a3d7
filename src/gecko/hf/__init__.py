"""Gecko in transformers: importing this package makes ``AutoModelForCausalLM`` know ``model_type`` gecko."""

from gecko.extras import require

require("transformers", "hf")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from gecko.hf.cache import GeckoCache  # noqa: E402
from gecko.hf.configuration import GeckoConfig  # noqa: E402
from gecko.hf.export import export  # noqa: E402
from gecko.hf.modeling import GeckoForCausalLM, GeckoModel  # noqa: E402
from gecko.hf.tokenizer import byte_tokenizer  # noqa: E402

PROJECTIONS = ("to_shared", "to_value", "to_gate", "to_hidden", "to_output", "fc1", "fc2", "fc3")
"""Names of the linear layers inside blocks, for ``target_modules`` of PEFT."""

AutoConfig.register(GeckoConfig.model_type, GeckoConfig, exist_ok=True)
AutoModel.register(GeckoConfig, GeckoModel, exist_ok=True)
AutoModelForCausalLM.register(GeckoConfig, GeckoForCausalLM, exist_ok=True)

__all__ = ["PROJECTIONS", "GeckoCache", "GeckoConfig", "GeckoForCausalLM", "GeckoModel", "byte_tokenizer", "export"]
