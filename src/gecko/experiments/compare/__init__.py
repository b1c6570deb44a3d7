"""Training of several recipes on the same data and comparison of their losses: ``gecko compare``."""

from gecko.experiments.compare.comparison import Outcome, compare
from gecko.experiments.compare.plan import Plan, Tuning

__all__ = ["Outcome", "Plan", "Tuning", "compare"]
