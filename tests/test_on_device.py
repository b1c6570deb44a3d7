"""The tests on a GPU can fail: their operators satisfy the laws on the CPU, and a wrong operator is found."""

import dataclasses

import pytest
import torch
from support import cases, laws
from support.on_device import on_device

CPU = torch.device("cpu")
CASES = [case for case in cases.COMMON if str(case) in ("B2-T40-packed-after13", "B2-T1-one-after5+22")]


@pytest.mark.parametrize("operator", [cases.CEMA, cases.ATTENTIONS[0], cases.MEMORIES[0]], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws_hold(operator, case):
    laws.check_all(on_device(operator, CPU), case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wrong_operator_is_found(case):
    def forgets(parameters, inputs, state, segments):
        return cases.CEMA.fast(parameters, inputs, state * 0.99, segments)

    wrong = dataclasses.replace(cases.CEMA, fast=forgets)
    with pytest.raises(AssertionError):
        laws.fast_is_reference(on_device(wrong, CPU), case)
