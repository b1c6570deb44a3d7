"""The faults of ``faults.toml`` match the code and name existing tests; ``make faults`` plants them. ``make masks``
finds each mask and barrier of the kernels, and removes it alone."""

from __future__ import annotations

import ast
import re

import pytest
from faults.masks import Guard, guards_of, kernel_files, known_reasons
from faults.plant import ROOT, SIMULATED, Fault, read_faults


@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: fault.name)
def test_a_fault_replaces_code_that_is_there_and_names_tests_that_are_there(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    for test in set(fault.tests) - {SIMULATED}:
        file, *names = test.split("::")
        content = (ROOT / file).read_text(encoding="utf-8")
        assert all(f"def {name}(" in content for name in names)


GUARDS = [guard for file in kernel_files() for guard in guards_of(file)]


@pytest.mark.parametrize("file", kernel_files())
def test_every_mask_and_barrier_of_a_kernel_is_a_guard(file: str) -> None:
    content = (ROOT / file).read_text(encoding="utf-8")
    found = [guard for guard in GUARDS if guard.file == file]
    assert len(found) == len(re.findall(r"\bmask=|debug_barrier\(\)", content))


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.file}:{guard.begin}")
def test_a_removed_guard_changes_only_itself(guard: Guard) -> None:
    content = (ROOT / guard.file).read_bytes()
    removed = guard.removed_from(content)
    ast.parse(removed)
    assert removed[: guard.begin] == content[: guard.begin]
    assert removed[guard.begin + len(guard.new.encode()) :] == content[guard.end :]
    assert all((ROOT / test).is_file() for test in guard.tests if test.endswith(".py"))


def test_the_guards_that_nothing_notices_exist() -> None:
    assert set(known_reasons()) <= {(guard.file, guard.call) for guard in GUARDS}
