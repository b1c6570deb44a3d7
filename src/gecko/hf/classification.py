"""The name under which PEFT finds the classifier of adapters saved before it moved to ``modeling``."""

from gecko.hf.modeling import GeckoForSequenceClassification as GeckoForSequenceClassification
