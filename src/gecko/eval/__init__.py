"""What a model can do, measured: every evaluation gives one ``Results``, with n, intervals, seed and hardware."""

from gecko.eval.llama_model import LlamaModel
from gecko.eval.results import Results, Score
from gecko.eval.scored_model import GeckoModel, ScoredModel

__all__ = ["GeckoModel", "LlamaModel", "Results", "Score", "ScoredModel"]
