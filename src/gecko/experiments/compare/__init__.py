"""Training of several recipes on the same data and comparison of their losses: ``gecko compare``."""

from gecko.experiments.compare.plan import ComparisonPlan, Tuning
from gecko.experiments.compare.runs import Outcome, compare
from gecko.experiments.figures import check_packages

__all__ = ["ComparisonPlan", "Outcome", "Tuning", "check_packages", "compare"]
