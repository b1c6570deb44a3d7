"""Reference cycles are collected at set steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CHILD = """
import gc, sys, weakref
from gecko.runtime.process import COLLECT_EVERY, SteadyCollection, keep_existing_objects

class Cycle:
    def __init__(self):
        self.itself = self

if sys.argv[1] == "kept":
    keep_existing_objects()
kept, older = gc.get_freeze_count(), Cycle()
with SteadyCollection() as collection:
    assert gc.get_freeze_count() == kept or not kept
    cycle = weakref.ref(Cycle())
    for step in range(1, COLLECT_EVERY):
        collection.step(step)
        assert not gc.isenabled() and cycle() is not None
    collection.step(COLLECT_EVERY)
    assert cycle() is None
assert gc.isenabled() and gc.get_freeze_count() == kept
found = weakref.ref(older)
del older
gc.collect()
assert found() is None
"""


@pytest.mark.parametrize("objects", ["of no server", "kept"])
def test_cycles_are_collected_at_set_steps_only(objects: str) -> None:
    subprocess.run([sys.executable, "-c", _CHILD, objects], check=True)
