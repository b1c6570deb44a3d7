"""C kernels whose allocation fails raise MemoryError and free everything; the same call then succeeds."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support import cases
from support.native_agreement import needs_compiler, on_two_threads
from torch import Tensor

import gecko
from gecko.ops.backends import cpu as native
from gecko.ops.backends import cpu_library
from gecko.ops.backends import dispatch as kernels
from gecko.ops.feed_forward import swiglu
from gecko.ops.norms import group_rms_norm

pytestmark = needs_compiler

SOURCES = sorted(Path(native.__file__).parents[1].glob("*/cpu*.c"))


class Rooms:
    """Counters of ``refusing.h``: allocations requested, and allocations held."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._asked, self._held, self._refused = (
            ctypes.c_int64.in_dll(library, name) for name in ("rooms_asked", "rooms_held", "refused_room")
        )

    @property
    def asked(self) -> int:
        return self._asked.value

    @property
    def held(self) -> int:
        return self._held.value

    def refuse(self, number: int) -> None:
        """Refuse the allocation with this number from now on; -1: none."""
        self._asked.value, self._refused.value = 0, number


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rooms]:
    """Return the library, built so that it refuses allocations on demand, and without most optimisations."""
    header = Path(__file__).with_name("refusing.h")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        flags = ("-O0" if flag == "-O3" else flag for flag in cpu_library._FLAGS)
        patch.setattr(cpu_library, "_FLAGS", (*flags, "-include", str(header)))
        patch.setattr(native, "_functions", {})
        patch.setattr(native, "_FEWEST_TOKENS", 1)
        _forget()
        library = native.library()
        assert library is not None
        yield Rooms(library)
    _forget()


def _forget() -> None:
    native._loaded.cache_clear()
    cpu_library._folder.cache_clear()
    kernels._cpu_kernels_installed.cache_clear()


def _step(rounds: bool) -> list[Tensor]:
    """Return the loss of a small model and all its gradients."""
    torch.manual_seed(0)
    model, text = gecko.Gecko(gecko.GeckoConfig.preset("tiny", num_layers=1)), cases.tokens(1, 70)
    with torch.autocast("cpu", torch.bfloat16) if rounds else nullcontext():
        loss = model.loss(text[:, :-1], text[:, 1:])
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def _refused(rooms: Rooms, call: Callable[[], list[Tensor]]) -> set[str]:
    """Refuse each allocation of ``call`` in turn; return the names of the kernels that requested one."""
    rooms.refuse(-1)
    expected = call()
    kernels_named: set[str] = set()
    for number in range(rooms.asked):
        rooms.refuse(number)
        with pytest.raises(MemoryError, match=r"needs [\d,]+ bytes to work in; the system refused") as caught:
            call()
        assert rooms.held == 0, "a kernel that was refused memory keeps none"
        kernels_named.add(str(caught.value).split()[2])
        rooms.refuse(-1)
    assert all(map(torch.equal, call(), expected))
    assert rooms.held == 0
    return kernels_named


def test_a_step_that_is_refused_memory_can_be_taken_again(rooms: Rooms) -> None:
    assert on_two_threads(lambda: _refused(rooms, lambda: _step(False))) == _kernels_that_ask()


@pytest.mark.skipif(not native.multiplies_bfloat16(), reason="no bfloat16 products in this processor")
def test_a_rounded_step_that_is_refused_memory_can_be_taken_again(rooms: Rooms) -> None:
    assert _refused(rooms, lambda: _step(True)) == _kernels_that_ask()


def _kernels_that_ask() -> set[str]:
    """Return the entry points whose C source can return a refused allocation."""
    found = re.compile(r"^int64_t (\w+)\((?:(?!^}).)*?return refused;", re.MULTILINE | re.DOTALL)
    return {name for path in SOURCES for name in found.findall(path.read_text(encoding="utf-8"))}


def test_sizes_beyond_any_address_are_refused(rooms: Rooms) -> None:
    rooms.refuse(-1)
    x = torch.zeros(96, 16)
    with pytest.raises(MemoryError, match="projections_forward"):
        native.call("projections_forward", x, x, None, None, x, 0, 0, 1 << 40, 1 << 20)
    assert rooms.held == 0


def test_every_kernel_returns_what_it_was_refused() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    assert len(texts) >= 11
    assert not [text for text in texts if re.search(r"^void ", text, re.MULTILINE)]
    assert not [text for text in texts if re.search(r"\b(abort|exit|malloc)\(", text)]


def test_no_numbers_need_no_memory(rooms: Rooms) -> None:
    """Empty tensors have a null address."""
    rooms.refuse(-1)
    assert group_rms_norm(torch.zeros(0, 70, 32), None, 2, 1e-5).shape == (0, 70, 32)
    assert swiglu(torch.zeros(0), torch.zeros(0)).shape == (0,)
    assert rooms.held == 0
