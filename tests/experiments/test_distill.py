"""``gecko distill``: the student is the Llama in its window, learns beyond it, and changes nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llamas import random_model
from torch import Tensor
from typer.testing import CliRunner

import gecko
from gecko.cli import app
from gecko.convert import convert_model
from gecko.data import ByteTokenizer
from gecko.eval.scored_model import open_texts
from gecko.experiments import distill as module
from gecko.experiments.distill import Distillation, distill, full_attention, student_of
from gecko.models.gecko import Gecko, sharing_parameters

CHUNK = 8
SETTINGS = Distillation(tokens=8192, length=512, batch=1, needles=0.25, learning_rate=1e-2, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a converted Llama in ``model``, and texts."""
    folder = tmp_path_factory.mktemp("distill")
    source = random_model("Llama", {"vocab_size": 264, "head_dim": 8}).float()
    source.save_pretrained(folder / "source")
    (folder / "source" / "LICENSE").write_text("free\n")
    convert_model(str(folder / "source"), folder / "model", chunk_size=CHUNK)
    for name in "abcd":
        (folder / f"{name}.txt").write_text(" ".join(f"{name}{i * i % 97}" for i in range(900)))
    return folder


@pytest.fixture
def llama(folder: Path) -> Gecko:
    return gecko.load(folder / "model")


def texts(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("*.txt"))]


def distilled(model: Gecko, given: list[str], settings: Distillation = SETTINGS) -> tuple[Gecko, Any]:
    return distill(model, ByteTokenizer(), open_texts(given, joined=False), settings)


@pytest.fixture(scope="module")
def taught(folder: Path) -> tuple[Gecko, Gecko, Any]:
    """Return the teacher, the student, and the results."""
    teacher = gecko.load(folder / "model")
    return teacher, *distilled(teacher, texts(folder))


def tokens(rows: int = 2, length: int = 10 * CHUNK) -> Tensor:
    return torch.randint(264, (rows, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: Gecko, given: Tensor, **options: Any) -> Tensor:
    return model(given, **options)[0]


def test_the_first_two_chunks_stay_the_llamas_to_the_bit(
    folder: Path, llama: Gecko, taught: tuple[Gecko, Gecko, Any]
) -> None:
    """And all of them without the memory; only the gates of the memory have moved."""
    given, untaught = tokens(), student_of(gecko.load(folder / "model"))
    documents = (torch.arange(given.shape[1]) >= 5 * CHUNK).long().expand_as(given)
    for student in (untaught, taught[1]):
        ours, theirs = logits(student, given), logits(llama, given)
        assert torch.equal(ours[:, : 2 * CHUNK], theirs[:, : 2 * CHUNK])
        assert not torch.equal(ours[:, 2 * CHUNK :], theirs[:, 2 * CHUNK :])
        ours, theirs = logits(student, given, segment_ids=documents), logits(llama, given, segment_ids=documents)
        assert torch.equal(ours[:, 5 * CHUNK : 7 * CHUNK], theirs[:, 5 * CHUNK : 7 * CHUNK])
    off = sharing_parameters(taught[1], memory="none", memory_gate_channels=0)
    assert off.config == llama.config and torch.equal(logits(off, given), logits(llama, given))
    before, after = untaught.state_dict(), taught[1].state_dict()
    moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert moved == {name for name in before if ".to_memory_gate." in name}
    assert len(moved) == 2 * llama.config.num_layers


def test_full_attention_is_a_window_that_holds_the_row(llama: Gecko) -> None:
    wide, given = sharing_parameters(llama, chunk_size=64, bfloat16_window=False), tokens(length=30)
    assert torch.allclose(logits(full_attention(llama, 30), given), logits(wide, given), atol=1e-5)


@pytest.mark.parametrize("loss_of", [module.layer_losses, module.logit_loss])
def test_losses_fall_and_are_0_for_the_teacher_itself(
    folder: Path, llama: Gecko, taught: tuple[Gecko, Gecko, Any], loss_of: Any
) -> None:
    text = "".join(Path(name).read_text() for name in texts(folder))
    batch, untaught = torch.tensor([*text[:256].encode()])[None], student_of(llama)
    before, after = (float(loss_of(full_attention(llama, 256), x, batch, 2 * CHUNK)) for x in (untaught, taught[1]))
    assert 0 < after < before
    same = sharing_parameters(untaught, chunk_size=32, sinks=0, bfloat16_window=False)
    assert float(loss_of(full_attention(llama, 64), same, tokens(1, 64), 16)) == 0


def test_scores_are_of_tokens_beyond_the_window(taught: tuple[Gecko, Gecko, Any]) -> None:
    teacher, student, results = taught
    assert results.settings["texts"] != results.settings["held_out"] and len(results.settings["held_out"]) == 2
    first = {score.name: score for score in results.scores[:4]}
    assert first["memory on"].where == {"tokens before": f"{2 * CHUNK} .. 510"}
    rows = [torch.tensor([*Path(name).read_bytes()]).split(512) for name in results.settings["held_out"]]
    given = [torch.stack(found[: min(4, len(found) - 1)]) for found in rows]
    for name, model in (("memory off", teacher), ("memory on", student)):
        means = [float(model.token_losses(x[:, :-1], x[:, 1:])[0][:, 2 * CHUNK :].double().mean()) for x in given]
        assert first[name].value == pytest.approx(sum(means) / 2, abs=1e-6)
    difference = first["memory on"].value - first["memory off"].value
    assert first["memory on less off"].value == pytest.approx(difference)


def test_the_command_writes_a_model_that_generates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody wrote into the folder meanwhile is kept."""
    command = ["distill", str(folder / "model"), str(folder / "out"), *texts(folder), "--tokens", "1024", "--length",
               "512", "--tokenizer", "bytes"]  # fmt: skip
    result = CliRunner().invoke(app, command)
    out, train = folder / "out", module.taught
    assert result.exit_code == 0 and "memory on less" in result.stdout, result.stderr
    record = json.loads((out / "distill.json").read_text())
    assert record["evaluation"] == "distill" and record["settings"]["length"] == 512
    assert [len(losses) for losses in record["details"]["losses"].values()] == [1, 1]
    assert (out / "LICENSE").read_text() == "free\n"
    assert "trained a memory and its gates on 1,024 tokens" in (out / "README.md").read_text()
    model, given = gecko.load(out), tokens(1, 40)[0]
    assert model.config.memory == "adaptive" and model.config.bfloat16_window
    written = gecko.generate(model, given, max_new_tokens=20, temperature=0).tokens[0]
    read = torch.cat([given, torch.tensor(written)])
    assert logits(model, read[None, :-1])[0, 39:].argmax(-1).tolist() == written

    def write(*given: Any) -> Any:
        (folder / "busy").mkdir()
        (folder / "busy" / "model.safetensors").write_text("mine")
        return train(*given)

    monkeypatch.setattr(module, "taught", write)
    result = CliRunner().invoke(app, [*command[:2], str(folder / "busy"), *command[3:]])
    assert result.exit_code == 0, result.stderr
    (kept,) = (folder / "busy").iterdir()
    assert kept.name == "model.safetensors" and kept.read_text() == "mine"
    (beside,) = folder.glob("busy-*")
    assert beside.name in result.stdout and gecko.load(beside).config.memory == "adaptive"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 18}, "--length must be at least three tokens above the window of 16 tokens"),
        ({"length": 19}, "Or leave pass keys out with --needles 0."),
        ({"tokens": 600}, "--tokens must hold two steps"),
        ({"needles": 2.0}, "--needles must be a share in 0..1"),
        ({"learning_rate": 0.0}, "--learning-rate positive"),
        ({"length": 4096}, "TEXT must be at least 3 files of 4,096 tokens each"),
    ],
)
def test_bad_settings_are_refused(folder: Path, llama: Gecko, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distilled(llama, texts(folder), dataclasses.replace(SETTINGS, **changes))


def test_other_models_and_texts_are_refused(folder: Path, llama: Gecko, taught: Any, tmp_path: Path) -> None:
    (tmp_path / "copy.txt").write_bytes(Path(texts(folder)[0]).read_bytes())
    with pytest.raises(ValueError, match=r"copy\.txt begins as .*Name one\."):
        distilled(llama, [*texts(folder), str(tmp_path / "copy.txt")])
    for model in (Gecko(gecko.GeckoConfig.preset("tiny")), taught[1]):
        with pytest.raises(ValueError, match="MODEL must be a Llama of gecko convert, which has "):
            distilled(model, texts(folder))
