"""What a training run takes before it is started: memory by kind, FLOPs, bytes sent, time."""

from gecko.plan.cluster import GPU, GPUS, find_gpu
from gecko.plan.estimate import Assumptions, Plan, make_plan

__all__ = ["GPU", "GPUS", "Assumptions", "Plan", "find_gpu", "make_plan"]
