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


def texts(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("*.txt"))]


@pytest.fixture(scope="module")
def taught(folder: Path) -> tuple[Gecko, Gecko, Any]:
    """Return the teacher, the student, and the results."""
    teacher = gecko.load(folder / "model")
    return teacher, *distill(teacher, ByteTokenizer(), open_texts(texts(folder), joined=False), SETTINGS)


def tokens(rows: int = 2, length: int = 10 * CHUNK) -> Tensor:
    return torch.randint(264, (rows, length), generator=torch.Generator().manual_seed(3))


def logits(model: Gecko, given: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(given, **options)[0]
    return found


def test_the_first_two_chunks_stay_the_llamas_to_the_bit(folder: Path, taught: tuple[Gecko, Gecko, Any]) -> None:
    teacher, given = gecko.load(folder / "model"), tokens()
    documents = (torch.arange(given.shape[1]) >= 5 * CHUNK).long().expand_as(given)
    for student in (student_of(gecko.load(folder / "model")), taught[1]):
        ours, theirs = logits(student, given), logits(teacher, given)
        assert torch.equal(ours[:, : 2 * CHUNK], theirs[:, : 2 * CHUNK])
        assert not torch.equal(ours[:, 2 * CHUNK :], theirs[:, 2 * CHUNK :])
        ours, theirs = logits(student, given, segment_ids=documents), logits(teacher, given, segment_ids=documents)
        assert torch.equal(ours[:, 5 * CHUNK : 7 * CHUNK], theirs[:, 5 * CHUNK : 7 * CHUNK])


def test_without_its_memory_the_student_is_the_llama(folder: Path, taught: tuple[Gecko, Gecko, Any]) -> None:
    off = sharing_parameters(taught[1], memory="none", memory_gate_channels=0)
    assert off.config == gecko.load(folder / "model").config
    assert torch.equal(logits(off, tokens()), logits(gecko.load(folder / "model"), tokens()))


def test_full_attention_is_a_window_that_holds_the_row(folder: Path) -> None:
    teacher = gecko.load(folder / "model")
    given = tokens(length=30)
    full, wide = full_attention(teacher, 30), sharing_parameters(teacher, chunk_size=64, bfloat16_window=False)
    assert torch.allclose(logits(full, given), logits(wide, given), atol=1e-5)


def test_only_the_gates_of_the_memory_move(folder: Path, taught: tuple[Gecko, Gecko, Any]) -> None:
    before, after = student_of(gecko.load(folder / "model")).state_dict(), taught[1].state_dict()
    moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert moved == {name for name in before if ".to_memory_gate." in name}
    assert len(moved) == 2 * taught[1].config.num_layers


@pytest.mark.parametrize("stage", ["layer_losses", "logit_loss"])
def test_both_losses_fall(folder: Path, taught: tuple[Gecko, Gecko, Any], stage: str) -> None:
    text = "".join(Path(name).read_text() for name in texts(folder))
    batch = torch.tensor([*text[:256].encode()])[None]
    teacher = gecko.load(folder / "model")
    losses = [
        float(getattr(module, stage)(full_attention(teacher, 256), student, batch, 2 * CHUNK))
        for student in (student_of(teacher), taught[1])
    ]
    assert losses[1] < losses[0]


def test_the_loss_of_layers_is_0_for_the_teacher_itself(folder: Path) -> None:
    full, batch = full_attention(gecko.load(folder / "model"), 64), tokens(1, 64)
    gated = student_of(gecko.load(folder / "model"))
    same = sharing_parameters(gated, chunk_size=32, sinks=0, bfloat16_window=False)
    assert float(module.layer_losses(full, same, batch, 16)) == 0
    assert float(module.logit_loss(full, same, batch, 16)) == 0
    assert float(module.layer_losses(full, gated, batch, 16)) > 0


def test_scores_are_of_tokens_beyond_the_window(taught: tuple[Gecko, Gecko, Any]) -> None:
    teacher, student, results = taught
    assert results.settings["texts"] != results.settings["held_out"] and len(results.settings["held_out"]) == 2
    first = {score.name: score for score in results.scores[:4]}
    assert first["memory on"].where == {"tokens before": f"{2 * CHUNK} .. 510"}
    rows = [torch.tensor([*Path(name).read_bytes()]).split(512) for name in results.settings["held_out"]]
    given = [torch.stack(found[: min(4, len(found) - 1)]) for found in rows]
    for name, model in (("memory off", teacher), ("memory on", student)):
        means = [
            float(model.token_losses(x[:, :-1], x[:, 1:])[0][:, 2 * CHUNK :].double().mean()) for x in given
        ]  # fmt: skip
        assert first[name].value == pytest.approx(sum(means) / 2, abs=1e-6)
    difference = first["memory on"].value - first["memory off"].value
    assert first["memory on less off"].value == pytest.approx(difference)


def test_the_command_writes_a_model_that_generates(folder: Path) -> None:
    out, words = folder / "out", ["--tokens", "1024", "--length", "512", "--tokenizer", "bytes"]
    result = CliRunner().invoke(app, ["distill", str(folder / "model"), str(out), *texts(folder), *words])
    assert result.exit_code == 0, result.stderr
    assert "memory on less" in result.stdout
    record = json.loads((out / "distill.json").read_text())
    assert record["evaluation"] == "distill" and record["settings"]["length"] == 512
    assert [len(losses) for losses in record["details"]["losses"].values()] == [1, 1]
    assert (out / "LICENSE").read_text() == "free\n"
    assert "trained a memory and its gates on 1,024 tokens" in (out / "README.md").read_text()
    model = gecko.load(out)
    assert model.config.memory == "adaptive" and model.config.bfloat16_window
    written = gecko.generate(model, tokens(1, 40)[0], max_new_tokens=20, temperature=0).tokens[0]
    read = torch.cat([tokens(1, 40)[0], torch.tensor(written)])
    assert logits(model, read[None, :-1])[0, 39:].argmax(-1).tolist() == written


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
def test_bad_settings_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    settings = dataclasses.replace(SETTINGS, **changes)
    with pytest.raises(ValueError, match=message):
        distill(gecko.load(folder / "model"), ByteTokenizer(), open_texts(texts(folder), joined=False), settings)


def test_a_text_is_not_both_learned_and_held_out(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.txt").write_bytes(Path(texts(folder)[0]).read_bytes())
    given = open_texts([*texts(folder), str(tmp_path / "copy.txt")], joined=False)
    with pytest.raises(ValueError, match=r"copy\.txt begins as .*Name one\."):
        distill(gecko.load(folder / "model"), ByteTokenizer(), given, SETTINGS)


def test_what_somebody_wrote_into_the_folder_meanwhile_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, train = folder / "busy", module.taught

    def write(*given: Any) -> Any:
        out.mkdir()
        (out / "model.safetensors").write_text("mine")
        return train(*given)

    monkeypatch.setattr(module, "taught", write)
    words = ["--tokens", "1024", "--length", "512", "--tokenizer", "bytes"]
    result = CliRunner().invoke(app, ["distill", str(folder / "model"), str(out), *texts(folder), *words])
    assert result.exit_code == 0, result.stderr
    assert [path.name for path in out.iterdir()] == ["model.safetensors"] and (
        out / "model.safetensors"
    ).read_text() == "mine"
    (beside,) = folder.glob("busy-*")
    assert beside.name in result.stdout and gecko.load(beside).config.memory == "adaptive"


def test_a_model_that_is_no_converted_llama_is_refused(folder: Path, taught: tuple[Gecko, Gecko, Any]) -> None:
    for model in (Gecko(gecko.GeckoConfig.preset("tiny")), taught[1]):
        with pytest.raises(ValueError, match="MODEL must be a Llama of gecko convert, which has "):
            distill(model, ByteTokenizer(), open_texts(texts(folder), joined=False), SETTINGS)
