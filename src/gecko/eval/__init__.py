"""Evaluations of a model. Each returns one ``Results`` with sample sizes, intervals, seed and hardware."""

from gecko.eval.results import Results, Score
from gecko.eval.scored_model import GeckoModel, LlamaModel, ScoredModel

__all__ = ["GeckoModel", "LlamaModel", "Results", "Score", "ScoredModel"]
