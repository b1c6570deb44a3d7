"""Large memory that was not touched yet is marked for pages of 2 MB, and memory around it is not."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import pytest
import torch

from gecko.runtime.process import prefer_huge_pages

MEGABYTES = 1 << 20

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux only"
)


def flags_at(address: int) -> list[str]:
    """Return the flags of the mapping that contains an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest
    raise AssertionError("an address of this process is in a mapping")


def test_the_inside_of_a_large_block_is_marked() -> None:
    block = torch.empty(16 * MEGABYTES, dtype=torch.uint8)
    assert prefer_huge_pages(block.data_ptr(), block.nbytes)
    assert "hg" in flags_at(block.data_ptr() + 8 * MEGABYTES)


def test_a_block_without_a_whole_huge_page_is_not_marked() -> None:
    # A mapping of its own: the heap may hold memory that was marked for another block.
    block = torch.frombuffer(mmap.mmap(-1, MEGABYTES), dtype=torch.uint8)
    assert not prefer_huge_pages(block.data_ptr(), block.nbytes)
    assert "hg" not in flags_at(block.data_ptr())


def test_marked_memory_keeps_its_content() -> None:
    block = torch.arange(4 * MEGABYTES, dtype=torch.int32)
    assert prefer_huge_pages(block.data_ptr(), block.nbytes)
    assert torch.equal(block, torch.arange(4 * MEGABYTES, dtype=torch.int32))
