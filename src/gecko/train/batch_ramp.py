"""Growth of batches at the start of a run, as a function of the step: more rows, or longer ones.

A value doubles from its first to its last one, at equal distances. So there are few shapes of batches, and every number
of ranks and of accumulated parts that divides the first batch divides all.
"""

from __future__ import annotations

from gecko.train.settings import ScheduleSettings


def rows_before(schedule: ScheduleSettings, batch_size: int, step: int) -> int:
    """Return the rows of all batches before that of ``step``, counted from 0; ``batch_size`` is the final size."""
    first, over = schedule.initial_batch_size, schedule.batch_size_steps
    if first is None or over == 0 or first == batch_size:
        return step * batch_size
    doublings = _doublings(first, batch_size)
    begins = [-(-stage * over // doublings) for stage in range(doublings)]
    stages = zip(begins, [*begins[1:], over], strict=True)
    grown = sum((first << stage) * max(0, min(step, end) - begin) for stage, (begin, end) in enumerate(stages))
    return grown + max(0, step - over) * batch_size


def length_at(schedule: ScheduleSettings, sequence_length: int, step: int) -> int:
    """Return the tokens of a row in ``step``, counted from 0; ``sequence_length`` is the final length."""
    first, over = schedule.initial_sequence_length, schedule.sequence_length_steps
    if first is None or step >= over:
        return sequence_length
    return first << step * _doublings(first, sequence_length) // over


def first_full_step(schedule: ScheduleSettings) -> int:
    """Return the first step, counted from 0, whose batch has its final shape."""
    rows = 0 if schedule.initial_batch_size is None else schedule.batch_size_steps
    length = 0 if schedule.initial_sequence_length is None else schedule.sequence_length_steps
    return max(rows, length)


def _doublings(first: int, last: int) -> int:
    return (last // first).bit_length() - 1


def check_doubles(name: str, first: int | None, last: int) -> None:
    """Raise ValueError unless ``last`` is ``first`` times a power of two; ``first`` may be None."""
    if first is None or (last % first == 0 and (last // first).bit_count() == 1):
        return
    raise ValueError(
        f"schedule.initial_{name} must be {name} divided by a power of two, because it doubles until it is {name}; got "
        f"{first} and {last}. Try schedule.initial_{name}={_halved(last, first)}."
    )


def _halved(last: int, first: int) -> int:
    """Return ``last``, halved until it is odd or at most ``first``."""
    while last > first and last % 2 == 0:
        last //= 2
    return last
