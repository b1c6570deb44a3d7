"""Several recipes trained alike, and what came of each: ``gecko compare``."""

from gecko.compare.comparison import Outcome, compare
from gecko.compare.plan import Plan, Tuning

__all__ = ["Outcome", "Plan", "Tuning", "compare"]
