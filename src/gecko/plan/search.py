"""Settings with which a run fits its GPUs: the mesh, activation checkpointing and gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import product
from typing import get_args

from gecko.models.gecko import ActivationCheckpointing
from gecko.plan import GPU, Assumptions, Plan, make_plan
from gecko.plan.dry_run.device import GRADIENTS, KEPT, LOSS, OPTIMIZER, PARAMETERS, WORK
from gecko.train.run import Run

MODES = get_args(ActivationCheckpointing)
"""Ways of checkpointing, from the most memory to the least."""


def find_plan(
    run: Run, gpus: int, gpu: GPU, assumptions: Assumptions, kept: Collection[str], measure: Callable[[Plan], object]
) -> Plan:
    """Return the plan of ``run`` if it fits, else the fastest one with other settings that fits.

    A dry run takes seconds, so few are made: for each way of checkpointing, the settings that need the least memory,
    and then those that should fit by what these need. Without Triton the settings that need the least are returned.
    Raise ValueError if the batch and its rows cannot be divided among the GPUs.

    Args:
        kept: names of settings that stay as they are.
        measure: called with each plan before its memory is used.

    Returns:
        If none fits, the plan that needs the least memory.
    """
    try:
        own = make_plan(run, gpus, gpu, assumptions)
    except ValueError:
        own = None
    if own is not None:
        measure(own)
        if own.fits is not False:
            return own
    plans = list(_plans(run, gpus, gpu, assumptions, kept))
    if not plans:
        return make_plan(run, gpus, gpu, assumptions)
    lightest = {_mode(plan): plan for plan in sorted(plans, key=_need, reverse=True)}
    if not plans[0].measured:
        return min(plans, key=_need)
    near: dict[str, Plan] = {}
    for plan in sorted(plans, key=lambda plan: (plan.step_seconds, plan.communicating)):
        if (mode := _mode(plan)) not in near:
            measure(lightest[mode])
            near[mode] = lightest[mode]
        if _at_least(plan, near[mode]) <= gpu.memory:
            measure(plan)
            if plan.fits:
                return plan
            near[mode] = plan
    return min(lightest.values(), key=lambda plan: plan.total)


def _plans(run: Run, gpus: int, gpu: GPU, assumptions: Assumptions, kept: Collection[str]) -> Iterator[Plan]:
    """Yield the plans of all settings that ``run`` can be trained with."""
    ranks = _divisors(gpus)
    for replicate, context, mode, parts in product(ranks, ranks, MODES, _divisors(run.batch_size)):
        mesh, shard = run.parallel, gpus // (replicate * context)
        settings = {
            "parallel.replicate": (mesh.replicate, replicate), "parallel.shard": (mesh.shard or shard, shard),
            "parallel.context": (mesh.context, context),
            "activation_checkpointing": (run.activation_checkpointing, mode),
            "gradient_accumulation_steps": (run.gradient_accumulation_steps, parts),
        }  # fmt: skip
        changes = {name: new for name, (old, new) in settings.items() if new != old}
        if replicate * shard * context == gpus and not changes.keys() & kept:
            try:
                changed = run.with_settings(*(f"{name}={new}" for name, new in changes.items()))
                yield make_plan(changed, gpus, gpu, assumptions)
            except ValueError:  # the run cannot be divided so
                continue


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _mode(plan: Plan) -> str:
    return plan.run.activation_checkpointing


def _tokens(plan: Plan) -> float:
    """Return the tokens that a GPU computes at once."""
    return plan.tokens / plan.run.gradient_accumulation_steps


def _need(plan: Plan) -> tuple[float, ...]:
    """Return what orders plans by their need of memory, without measuring it."""
    return -MODES.index(_mode(plan)), _tokens(plan), -plan.divided


def _at_least(plan: Plan, known: Plan) -> float:
    """Return about the fewest bytes of ``plan``, from the memory of one with the same checkpointing."""
    shares, tokens = known.divided / plan.divided, _tokens(plan) / _tokens(known)
    accumulates = plan.run.gradient_accumulation_steps > 1 or known.run.gradient_accumulation_steps == 1
    growth = {PARAMETERS: shares, OPTIMIZER: shares, GRADIENTS: shares * accumulates, KEPT: tokens}
    growth |= dict.fromkeys((WORK, LOSS), min(1.0, tokens))
    return sum(size * growth.get(part, 1.0) for part, size in known.memory.items())
