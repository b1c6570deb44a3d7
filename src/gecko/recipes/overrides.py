"""``key=value`` changes to a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gecko.train import Run
from gecko.train.fields import set_fields

_FIXED = ("recipe", "overrides", "model.model_type")


def apply_overrides(run: Run, overrides: Sequence[str]) -> Run:
    """``run`` with each ``key=value`` applied, as ``optimizer.learning_rate=3e-3``; the last of two wins.

    Values are read as the field's annotation asks. The changes apply together, so that fields which must
    agree can change in any order. ValueError for an unknown key (with the nearest) or a value that does not fit.
    """
    values = run.to_dict()
    set_fields(values, overrides, _FIXED)
    changed = Run.from_dict(values)
    # Of two values for a key the command needs the last one only.
    latest = {override.partition("=")[0]: override for override in (*run.overrides, *overrides)}
    return dataclasses.replace(changed, overrides=tuple(latest.values()))
