"""Tensor and model files are written completely or not at all, and loaded only if no byte has changed."""

import dataclasses
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import cases
from support.cases import SMALL, tokens

import gecko
from gecko.io.files import whole_file
from gecko.io.model_folder import load_tensors, save_tensors


def content() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "float": torch.randn(5, 3, generator=generator),
        "double": torch.randn(2, 2, generator=generator).double(),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "whole": torch.tensor([1, -(2**40)]),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    save_tensors(path, content(), {"format": "test", "note": 'λ\n"quoted"'})
    return path


def test_round_trip(file):
    tensors, metadata = load_tensors(file)
    assert metadata == {"format": "test", "note": 'λ\n"quoted"'}
    assert tensors.keys() == content().keys()
    for name, tensor in content().items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])


def test_views_and_shared_memory_are_saved_as_they_look(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    save_tensors(tmp_path / "views", {"turned": base.t(), "part": base[1:, ::2], "same": base}, {})
    tensors, _ = load_tensors(tmp_path / "views")
    assert torch.equal(tensors["turned"], base.t()) and torch.equal(tensors["part"], base[1:, ::2])


@settings(max_examples=150)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), front=st.booleans())
@example(place=0.0, bit=7, front=True)
def test_any_flipped_bit_is_found(file, place, bit, front):
    """Half of the flips are in the first 600 bytes, which contain the header."""
    data = bytearray(file.read_bytes())
    data[int(place * (min(600, len(data)) if front else len(data)))] ^= 1 << bit
    damaged = file.with_name("damaged")
    damaged.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        load_tensors(damaged)


@settings(max_examples=40)
@given(place=st.floats(0, 1, exclude_max=True))
@example(place=0.0)
def test_any_truncation_is_found_and_what_is_appended(file, place):
    data = file.read_bytes()
    damaged = file.with_name("other")
    for content in (data[: int(place * len(data))], data + b"more"):
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match="other must be a complete safetensors file; it is not"):
            load_tensors(damaged)


def test_foreign_files(tmp_path):
    (tmp_path / "text").write_text("It was the best of times. " * 50)
    with pytest.raises(ValueError, match="text must be a complete safetensors file"):
        load_tensors(tmp_path / "text")
    save_file({"x": torch.zeros(3)}, tmp_path / "other", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="other must have been written by gecko; it carries no sha256"):
        load_tensors(tmp_path / "other")
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"must be a file written by gecko; (there is none|it is a folder)"):
            load_tensors(missing)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "folder" / "file"
    with whole_file(path) as temporary:
        temporary.write_text("old")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(error)), whole_file(path) as temporary:
            temporary.write_text("new")
            raise error
        assert path.read_text() == "old"
        assert os.listdir(path.parent) == ["file"]
    told = r"^\[Errno 5\] could not write .* \(the library failed\); what was there before is unchanged"
    with pytest.raises(OSError, match=told), whole_file(path):
        raise OSError("the library failed")  # without a number


def test_a_pipe_or_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("folder", "pipe", "link"):
        with pytest.raises(FileExistsError, match=f"{name} must be a file, or the name of a new one; it is a folder, "):
            save_tensors(tmp_path / name, content(), {})
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]


def test_a_link_stays_one_and_its_file_is_written(tmp_path):
    (tmp_path / "far").mkdir()
    for name in ("old", "new"):
        (tmp_path / name).symlink_to(Path("far") / name)
    (tmp_path / "far" / "old").write_text("before")
    for name in ("old", "new"):
        save_tensors(tmp_path / name, content(), {"name": name})
        assert (tmp_path / name).is_symlink()
        assert load_tensors(tmp_path / "far" / name)[1] == {"name": name}


def test_a_file_keeps_its_mode_and_a_new_one_has_that_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        save_tensors(tmp_path / "new", content(), {})
        for wanted in (0o600, 0o444, 0o666):
            (tmp_path / "old").touch()
            (tmp_path / "old").chmod(wanted)
            save_tensors(tmp_path / "old", content(), {})
            assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == wanted
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


FULL_DISK = """
import resource, sys, torch
import gecko
model = gecko.load(sys.argv[1])
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(1)
    _, state = model(torch.ones(1, 5, dtype=torch.int64))
for limit in (0, 1000, 9000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for save, path in ((model.save, sys.argv[1]), (state.save, sys.argv[2])):
        try:
            save(path)
        except OSError as error:
            print(error)
        else:
            print("wrote")
"""


def test_a_full_disk_keeps_what_was_there(tmp_path):
    model, text = cases.model("gecko", torch.float32), tokens(1, 20)
    with torch.no_grad():
        model.save(tmp_path / "model")
        logits, state = model(text)
    state.save(tmp_path / "state")
    environment = {**os.environ, "PYTHONPATH": str(Path(gecko.__file__).parents[1])}
    arguments = [sys.executable, "-c", FULL_DISK, tmp_path / "model", tmp_path / "state"]
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    for line, what in zip(ran.stdout.splitlines(), 3 * ("model.safetensors", "state"), strict=True):
        assert f"could not write {tmp_path}" in line and what in line
        assert "what was there before is unchanged. Free some space" in line
    with torch.no_grad():
        assert torch.equal(gecko.load(tmp_path / "model")(text)[0], logits)
    assert gecko.GeckoState.load(tmp_path / "state").position == [20]
    left = sorted(p.name for p in tmp_path.rglob("*"))
    assert left == ["config.json", "model", "model.safetensors", "state"]


# Models


@pytest.mark.parametrize("variant", cases.VARIANTS)
@torch.no_grad()
def test_model_round_trip(variant, tmp_path):
    """Weights keep their dtype, here float64, and a tied head stays tied."""
    model = cases.model(variant)
    model.save(tmp_path / "model")
    loaded, text = gecko.load(tmp_path / "model"), tokens(2, 20)
    assert loaded.config == model.config and loaded.embedding.weight.dtype == torch.float64
    assert (loaded.head.weight is loaded.embedding.weight) is model.config.tie_embedding
    assert torch.equal(loaded(text)[0], model(text)[0])
    assert sorted(os.listdir(tmp_path / "model")) == ["config.json", "model.safetensors"]


def flipped(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])


OTHER = dataclasses.replace(SMALL, norm_eps=1e-3, chunk_size=16)
DAMAGES = [
    (lambda f: (f / "config.json").unlink(), r"must be a model's folder with config.json and model.safetensors"),
    (lambda f: (f / "model.safetensors").unlink(), r"model.safetensors must be a file written by gecko"),
    (lambda f: OTHER.save(f / "config.json"), r"must describe one model; they differ in \['chunk_size', 'norm_eps'\]"),
    (lambda f: gecko.load(f).empty_state().save(f / "model.safetensors"), r"must hold a model's weights"),
    (lambda f: save_tensors(f / "model.safetensors", content(), {"format": "test"}), r"gecko-model-1\); it holds test"),
    (lambda f: flipped(f / "model.safetensors"), r"does not match its sha256 checksum. Restore it"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_folders_that_hold_no_model(damage, message, tmp_path):
    cases.model("gecko", torch.float32).save(tmp_path)
    damage(tmp_path)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        gecko.load(tmp_path)
