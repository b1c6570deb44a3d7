"""No stored file ends a process, holds it up, or gives a traceback: it is refused by a message, or means what it says.

Tensors of every stored form are forged, with their checksums made anew: counts in every way, each other tensor in a
third of the ways, in turn.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.forged import Opener
from torch import Tensor

from gecko.io.checkpoints import sha256
from gecko.io.model_folder import save_tensors
from gecko.train.checkpoints import all_files, flushed_entries, write_manifest

FILES = Path(__file__).parent / "files/1e93cc4"
Change = Callable[[Tensor], Tensor]


def _longer(x: Tensor, dim: int) -> Tensor:
    return torch.cat([x, x.narrow(dim, 0, 1)], dim)


FORGERIES: dict[str, Change] = {
    "more dimensions": lambda x: x[None],
    "fewer dimensions": lambda x: x.flatten() if x.dim() > 1 else x.sum(dtype=x.dtype),
    "another order": lambda x: x.mT.contiguous() if x.dim() > 1 else x[None],
    "one row more": lambda x: _longer(x, 0),
    "one row less": lambda x: x[:-1],
    "one row": lambda x: x[:1] if len(x) > 1 else x.repeat(2, *[1] * (x.dim() - 1)),
    "one column more": lambda x: _longer(x, -1),
    "one column less": lambda x: x[..., :-1],
    "empty": lambda x: x[:0],
    "floats for integers": lambda x: x.float() if not x.is_floating_point() else x.to(torch.int8),
    "integers of another size": lambda x: x.to(torch.int64 if x.dtype != torch.int64 else torch.int32),
    "complex": lambda x: x.to(torch.complex64),
    "8 bits": lambda x: x.float().to(torch.float8_e4m3fn),
    "NaN": lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else x.float() * torch.nan,
    "infinite": lambda x: torch.full_like(x, torch.inf) if x.is_floating_point() else x.float() + torch.inf,
}
"""Changes of one tensor that no file may have."""
COUNTS: dict[str, Change] = {
    "negative": lambda x: x - 2**40,
    "smallest": lambda x: torch.full_like(x, -(2**63)),
    "largest": lambda x: torch.full_like(x, 2**63 - 1),
    "later": lambda x: x + 1,
}
"""Changes of a count of tokens."""


@pytest.fixture(autouse=True)
def without_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files need not survive a power failure."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    opener = Opener()
    yield opener
    opener.close()


def forge(
    path: Path, write: Callable[[dict[str, Tensor]], None], parts: tuple[str, ...] = ("",)
) -> Iterator[tuple[str, str]]:
    """Write each forgery of a file of tensors in turn; yield the names of the tensor and of the forgery.

    Args:
        parts: only tensors are forged whose names contain one of these.
    """
    tensors = tensors_of(path)
    for number, name in enumerate(name for name in tensors if any(part in name for part in parts)):
        tensor = tensors[name]
        changes = list((FORGERIES | (COUNTS if tensor.dtype == torch.int64 and "segment" not in name else {})).items())
        for forgery, change in changes if tensor.dtype == torch.int64 else changes[number % 3 :: 3]:
            forged = change(tensor if tensor.dim() else tensor[None])
            same = forged.shape == tensor.shape and forged.dtype == tensor.dtype
            if not same or not ("order" in forgery or torch.equal(forged, tensor)):
                write({**tensors, name: forged})
                yield name, forgery
        write({other: x for other, x in tensors.items() if other != name})
        yield name, "missing"
        write({**tensors, f"{name}.more": tensor.clone()})
        yield f"{name}.more", "unknown"
    write({})
    yield "every tensor", "missing"


def tensors_of(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return {name: text for name, text in file.metadata().items() if name != "sha256"}


def faults(opener: Opener, door: str, place: Path, cases: Iterator[tuple[str, str]], right: str = "") -> list[str]:
    """Return the answers to forged files other than a refusal, which names the tensor, or the answer ``right``."""
    found = []
    for name, forgery in cases:
        answer = opener.open(door, place)
        last = name.removesuffix(".more").rpartition(".")[2]
        about_all = name.startswith(("clock.", "every")) or forgery in COUNTS
        about_all |= "the tensors of this model and its optimizer" in answer
        refused = answer.startswith("refused") and (last in answer or about_all)
        if not refused and not (right and answer == right):
            found.append(f"{name}, {forgery}: {answer[-1500:]}")
    return found


def unrefused(answers: dict[str, str]) -> dict[str, str]:
    return {case: answer for case, answer in answers.items() if not answer.startswith("refused")}


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        ("tied", ("",)), ("bfloat16", ("embedding", "to_shared")), ("llama", ("embed_tokens", "layers.0.mlp", "norm")),
        ("quantized", ("0.mixer.to_shared", "1.feed_forward.fc2")), ("int4", ("to_value", "fc1", "embedding")),
    ],
)  # fmt: skip
def test_no_forged_weight_is_read(opener: Opener, tmp_path: Path, form: str, parts: tuple[str, ...]) -> None:
    source = FILES / form if form != "llama" else FILES / "llama/checkpoints/step-00000004"
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    (folder / "manifest.json").unlink(missing_ok=True)
    file = folder / "model.safetensors"
    about = metadata(file)
    door = "llama" if form == "llama" else "model"
    assert opener.open(door, folder).startswith("opened")
    assert not faults(opener, door, folder, forge(file, lambda tensors: save_tensors(file, tensors, about), parts))


@pytest.fixture
def state_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the copy of a state beside its model."""
    shutil.copytree(FILES / "model", tmp_path / "model")
    return Path(shutil.copy(FILES / request.param, tmp_path))


@pytest.mark.parametrize("state_file", ["book.state"], indirect=True)
def test_no_forged_state_is_continued(opener: Opener, state_file: Path) -> None:
    """Nor a state of another dtype."""
    about, tensors, file = metadata(state_file), tensors_of(state_file), state_file
    right, answers = opener.open("state", file), {}
    assert not faults(opener, "state", file, forge(file, lambda tensors: save_tensors(file, tensors, about)))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        save_tensors(file, {n: x.to(dtype) if x.is_floating_point() else x for n, x in tensors.items()}, about)
        answers[str(dtype)] = opener.open("state", file)
    assert right.startswith("opened")
    assert answers["torch.float64"].startswith("refused") and "must be torch.float32" in answers["torch.float64"]
    assert all(answer.startswith(("opened", "refused")) for answer in answers.values()), answers


@pytest.mark.parametrize("state_file", ["compact.state"], indirect=True)
def test_no_forged_compact_state_is_continued(opener: Opener, state_file: Path) -> None:
    """The metadata of a file are forged too."""
    about, tensors = metadata(state_file), tensors_of(state_file)
    rounded = json.loads(about["rounded"])
    first = next(iter(rounded))
    cases = {
        "rounded is a list": {"rounded": "[]"},
        "rounded is no JSON": {"rounded": "{"},
        "rounded is nested": {"rounded": "[" * 100_000},
        "rounded tensor is absent": {"rounded": json.dumps({**rounded, "no": "float32"})},
        "rounded dtype is unknown": {"rounded": json.dumps({**rounded, first: "nn"})},
        "rounded dtype is a list": {"rounded": json.dumps({**rounded, first: []})},
        "config is nested": {"config": "[" * 100_000},
        "config is a list": {"config": "[1]"},
        "config is a number": {"config": "7"},
        "config is absent": {"config": None},
        "config of another width": {"config": about["config"].replace('"model_dim": 16', '"model_dim": 32')},
        "config of a huge width": {"config": about["config"].replace('"model_dim": 16', f'"model_dim": {10**24}')},
        "config of a huge chunk": {"config": about["config"].replace('"chunk_size": 16', f'"chunk_size": {2**24}')},
        "config of infinity": {"config": about["config"].replace('"chunk_size": 16', '"chunk_size": 1e999')},
        "format is absent": {"format": None},
        "format of later": {"format": "gecko-state-2"},
        "model of other weights": {"model": "0123456789abcdef"},
    }
    answers = {}
    for case, changes in cases.items():
        forged = {name: text for name, text in {**about, **changes}.items() if text is not None}
        save_tensors(state_file, tensors, forged)
        answers[case] = opener.open("state", state_file)
    assert not unrefused(answers)


@pytest.mark.parametrize("form", ["carried", "ranks", "adapters"])
def test_no_forged_checkpoint_is_resumed(opener: Opener, tmp_path: Path, form: str) -> None:
    (found,) = (FILES / form / "checkpoints").iterdir()
    (tmp_path / "run").mkdir()
    folder = tmp_path / "run" / found.name
    shutil.copytree(found, folder)
    base = tmp_path / "base"
    shutil.copytree(FILES / "tied", base)
    recipe = folder / "recipe.json"
    recipe.write_text(recipe.read_text().replace('"init_from": "tied"', f'"init_from": "{base}"'))
    signed(folder)
    right = opener.open("checkpoint", folder)
    assert right.startswith("opened"), right
    parts = "final_norm.weight", "cpu", "lanes/clock.position", "lanes/mixers.0.norm.count", "lanes/mixers.0.cema"
    if form == "adapters":
        parts = "fc1.lora_A.default.weight", "cpu"  # training resumes from the adapters, not from the merged model
    wrong = []
    for path in sorted(folder.rglob("*.safetensors")):
        if form == "adapters" and path.name == "model.safetensors":
            continue
        before = path.read_bytes()
        with safe_open(path, "pt") as file:
            about = file.metadata()

        def write(tensors: dict[str, Tensor], path: Path = path, about: dict[str, str] | None = about) -> None:
            save_file({name: x.contiguous() for name, x in tensors.items()}, path, about)
            signed(folder)

        wrong += faults(opener, "checkpoint", folder, forge(path, write, parts), right)
        path.write_bytes(before)
        signed(folder)
    assert not wrong


def signed(folder: Path) -> None:
    write_manifest(folder, flushed_entries(folder, all_files(folder)))


def test_no_forged_shards_are_trained_on(opener: Opener, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(FILES / "shards", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (shard,) = manifest["shards"]
    ids, ends, sizes = ((folder / f"00000.ds{suffix}").read_bytes() for suffix in ("", ".index", ".bytes"))
    counts = np.frombuffer(ends, "<u8")
    assert opener.open("shards", folder).startswith("opened")
    cases: dict[str, dict[str, object]] = {
        "an id beyond the vocabulary": {"": np.uint16(257).tobytes() + ids[2:]},
        "the largest id": {"": ids[:-2] + b"\xff\xff"},
        "one id more": {"": ids + b"\0\0", "tokens": shard["tokens"] + 1},
        "one id less": {"": ids[:-2], "tokens": shard["tokens"] - 1},
        "no ids": {"": b"", "tokens": 0},
        "an end beyond the tokens": {".index": (counts + 1).tobytes()},
        "a huge end": {".index": ends[:-8] + b"\xff" * 8},
        "ends in another order": {".index": counts[::-1].tobytes()},
        "an empty document": {".index": np.concatenate([counts[:1], counts[:1], counts[2:]]).tobytes()},
        "one document more": {".index": ends + ends[-8:], ".bytes": sizes + sizes[-8:], "documents": len(counts) + 1},
        "one document less": {".index": ends[:-8], ".bytes": sizes[:-8], "documents": len(counts) - 1},
        "no documents": {".index": b"", ".bytes": b"", "documents": 0},
        "other sizes of texts": {".bytes": b"\xff" * len(sizes)},
        "a negative number of tokens": {"tokens": -1},
        "a huge number of documents": {"documents": 10**30},
        "a fraction of documents": {"documents": 5.5},
        "documents as text": {"documents": "6"},
        "a name outside": {"name": "../shards/00000"},
        "an absolute name": {"name": str(folder / "00000")},
        "a name that is a number": {"name": 7},
        "no checksums": {"sha256": []},
        "checksums that are a number": {"sha256": 7},
    }
    fields: dict[str, dict[str, object]] = {
        "a vocabulary of nothing": {"vocab_size": 0},
        "a huge vocabulary": {"vocab_size": 10**30},
        "a vocabulary as text": {"vocab_size": "257"},
        "an infinite vocabulary": {"vocab_size": float("inf")},
        "a start beyond the vocabulary": {"document_start": 257},
        "a negative end": {"document_end": -1},
    }
    answers = {}
    for case, changes in {**cases, **fields}.items():
        shutil.rmtree(folder)
        shutil.copytree(FILES / "shards", folder)
        for suffix in ("", ".index", ".bytes"):
            if suffix in changes:
                (folder / f"00000.ds{suffix}").write_bytes(changes[suffix])  # type: ignore[arg-type]
        digests = [sha256(folder / f"00000.ds{suffix}") for suffix in ("", ".index", ".bytes")]
        changed = {name: x for name, x in changes.items() if name in shard}
        record = {**shard, "sha256": digests, **(changed if case in cases else {})}
        tokenizer = {**manifest["tokenizer"], **(changes if case in fields else {})}
        (folder / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": tokenizer, "shards": [record]}))
        answers[case] = opener.open("shards", folder)
    assert not unrefused(answers)


def test_files_name_no_files_outside_of_their_folder(opener: Opener, tmp_path: Path) -> None:
    shutil.copytree(FILES / "sharded", tmp_path / "model")
    index = tmp_path / "model/model.safetensors.index.json"
    content = json.loads(index.read_text())
    assert opener.open("model", tmp_path / "model").startswith("opened")
    first, place = next(iter(content["weight_map"].items()))
    shutil.copy(tmp_path / "model" / place, tmp_path / place)
    names = ["../" + place, str(tmp_path / place), f"sub/../{place}", "/dev/zero", "", None, 7, [], {}, "a\0b"]
    answers = {}
    for name in names:
        index.write_text(json.dumps({"weight_map": {**content["weight_map"], first: name}}))
        answers[str(name)] = opener.open("model", tmp_path / "model")
    (found,) = (FILES / "carried/checkpoints").iterdir()
    folder = tmp_path / found.name
    shutil.copytree(found, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("../model/config.json", "/dev/zero", "", str(folder / "config.json")):
        entry = {"bytes": 0, "sha256": ""}
        (folder / "manifest.json").write_text(json.dumps({"files": {**manifest["files"], name: entry}}))
        answers[f"manifest {name}"] = opener.open("checkpoint", folder)
    for value in (float("inf"), 10**400, "x", None, []):
        (folder / "manifest.json").write_text(json.dumps({"files": {"config.json": {"bytes": value, "sha256": ""}}}))
        answers[f"manifest bytes {value}"[:99]] = opener.open("checkpoint", folder)
    assert not unrefused(answers)


@pytest.mark.parametrize(
    ("door", "name"),
    [
        ("model", "tied/config.json"), ("model", "sharded/model.safetensors.index.json"),
        ("llama", "llama/checkpoints/step-00000004/config.json"), ("shards", "shards/manifest.json"),
        *(
            ("checkpoint", f"carried/checkpoints/step-00000004/{name}.json")
            for name in ("manifest", "trainer", "data", "recipe")
        ),
    ],
)  # fmt: skip
def test_json_that_is_nested_too_deep_is_refused(opener: Opener, tmp_path: Path, door: str, name: str) -> None:
    folder = tmp_path / Path(name).parent.name
    shutil.copytree(FILES / Path(name).parent, folder)
    for opening in ("[", '{"a":'):
        (folder / Path(name).name).write_text(opening * 100_000)
        if door == "checkpoint" and "manifest" not in name:
            signed(folder)
        answer = opener.open(door, folder)
        assert answer.startswith("refused") and Path(name).name in answer
