"""This process, and models on the device ``meta``."""

import mmap
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gecko.config import GeckoConfig
from gecko.models.gecko import Gecko
from gecko.runtime.process import __version__, code_name, code_version, flushed_denormals, git_commit, prefer_huge_pages
from gecko.runtime.tensors import meta_device

# ---- This process: collections, denormals, huge pages, and the commit of the version.

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


PROGRAM = """
import torch
from gecko.runtime.process import flushed_denormals
torch.set_num_threads(3)
assert (torch.full((1,), 1.0e-30) * 1.0e-9).any()
with flushed_denormals():
    small = torch.full((1 << 20,), 1.0e-30)
    assert not (small * 1.0e-9).any()
    small.requires_grad_(True)
    (small * 1.0e-9).sum().backward(torch.tensor(1.0e-30))
    assert not small.grad.any()
"""


def small() -> float:
    return (torch.tensor(1e-30) * 1e-9).item()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 only")
def test_denormals_are_flushed_within_the_context_only_and_by_all_threads_that_start_meanwhile() -> None:
    assert small()
    with pytest.raises(KeyError), flushed_denormals():
        assert not small()
        with flushed_denormals():
            assert not small()
        assert not small()
        raise KeyError
    assert small()
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


MEGABYTES = 1 << 20


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


@pytest.mark.skipif(
    platform.system() != "Linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux only"
)
def test_the_inside_of_a_large_block_is_marked_and_keeps_its_content() -> None:
    block = torch.arange(4 * MEGABYTES, dtype=torch.int32)
    assert prefer_huge_pages(block.data_ptr(), block.nbytes)
    assert "hg" in flags_at(block.data_ptr() + 8 * MEGABYTES)
    assert torch.equal(block, torch.arange(4 * MEGABYTES, dtype=torch.int32))
    # A mapping of its own: the heap may hold memory that was marked for another block.
    small = torch.frombuffer(mmap.mmap(-1, MEGABYTES), dtype=torch.uint8)
    assert not prefer_huge_pages(small.data_ptr(), small.nbytes)
    assert "hg" not in flags_at(small.data_ptr())


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_of_a_tracked_file(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A copy inside of another checkout has none."""
    (tmp_path / "tracked.py").write_text("1")
    for arguments in (("init", "-q"), ("add", "tracked.py"), ("commit", "-q", "-m", "one")):
        settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *settings, *arguments], cwd=tmp_path, check=True)
    commit = git_commit(tmp_path / "tracked.py")
    assert commit is not None and len(commit) == 40
    (tmp_path / "tracked.py").write_text("2")
    assert git_commit(tmp_path / "tracked.py") == f"{commit}-dirty"
    (tmp_path / "installed.py").write_text("1")
    assert git_commit(tmp_path / "installed.py") is None
    assert git_commit(tmp_path_factory.mktemp("elsewhere") / "no.py") is None


def test_names_of_versions() -> None:
    assert code_version()["version"] == __version__
    assert code_name({"version": "1.2", "commit": None}) == "1.2, not from a checkout"
    assert code_name({"version": "1.2", "commit": "abc"}) == "1.2, commit abc"


# ---- Models on the device ``meta`` have the shapes of real ones, and draw no random numbers.


@pytest.mark.parametrize("preset", ["tiny", "megalodon-tiny"])
def test_shapes_are_those_of_a_real_model(preset: str) -> None:
    config = GeckoConfig.preset(preset)
    with meta_device():
        model = Gecko(config)
    found = {name: (x.shape, x.dtype, x.device.type) for name, x in model.state_dict().items()}
    assert found == {name: (x.shape, x.dtype, "meta") for name, x in Gecko(config).state_dict().items()}


@pytest.mark.parametrize("fill", ["normal_", "uniform_", "kaiming_uniform_", "trunc_normal_", "zeros_"])
def test_initialisation_returns_the_tensor(fill: str) -> None:
    """Real tensors are initialised after it."""
    with meta_device():
        x = torch.empty(3, 2)
        assert getattr(torch.nn.init, fill)(x) is x
    assert torch.nn.init.normal_(torch.zeros(100)).count_nonzero() == 100
