"""Reference cycles are collected at set steps."""

from __future__ import annotations

import gc
import weakref

from gecko.runtime.process import COLLECT_EVERY, SteadyCollection


class Cycle:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_collected_at_set_steps_only() -> None:
    with SteadyCollection() as collection:
        cycle = weakref.ref(Cycle())
        for step in range(1, COLLECT_EVERY):
            collection.step(step)
            assert not gc.isenabled() and cycle() is not None
        collection.step(COLLECT_EVERY)
        assert cycle() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0
