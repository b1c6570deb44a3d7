"""The faults of ``faults.toml`` match the code and name existing tests; ``make faults`` plants them."""

from __future__ import annotations

import pytest
from faults.plant import ROOT, SIMULATED, Fault, read_faults


@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: fault.name)
def test_a_fault_replaces_code_that_is_there_and_names_tests_that_are_there(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    for test in set(fault.tests) - {SIMULATED}:
        file, *names = test.split("::")
        content = (ROOT / file).read_text(encoding="utf-8")
        assert all(f"def {name}(" in content for name in names)
