"""Estimates of a training run's memory, FLOPs, communication and time, made without starting it."""

from gecko.plan.estimate import GPU, GPUS, Assumptions, Plan, find_gpu, make_plan

__all__ = ["GPU", "GPUS", "Assumptions", "Plan", "find_gpu", "make_plan"]
