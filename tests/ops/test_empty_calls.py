"""Operators refuse a call without tokens, in every form."""

from __future__ import annotations

import pytest
from support import cases, laws

OPERATORS = [cases.CEMA, *cases.TIMESTEP_NORMS, *cases.ATTENTIONS, *cases.MEMORIES]


@pytest.mark.parametrize("form", ["fast", "reference"])
@pytest.mark.parametrize("documents", ["one", "packed"])
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_a_call_without_tokens_is_refused(operator, documents, form):
    given = cases.problem(operator, cases.Case(3, documents, (5,)))
    with pytest.raises(ValueError, match="at least one token per row; got 0"):
        laws._call(getattr(operator, form), given, [0, 0])
