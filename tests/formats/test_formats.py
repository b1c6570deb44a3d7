"""Files written by earlier code load with the same meaning. ``make.sh`` says how each generation of files was made."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import gecko
from gecko.cli import app
from gecko.data import DataRequest, load_tokenizer, open_training_data

FILES = Path(__file__).parent / "files"
FIRST, SECOND = "d317867", "1e93cc4"
RESULTS = ("perplexity", "positions", "retrieval")
every_generation = pytest.mark.parametrize("generation", [FIRST, SECOND])
first_only = pytest.mark.parametrize("generation", [FIRST])
second_only = pytest.mark.parametrize("generation", [SECOND])


@pytest.fixture
def files(generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the files of a generation to the current folder: runs name their texts relative to it."""
    shutil.copytree(FILES / generation, tmp_path / "files")
    monkeypatch.chdir(tmp_path / "files")
    return tmp_path / "files"


def run(*arguments: object) -> bytes:
    """Run ``gecko ARGUMENTS`` in this process; return its standard output."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout_bytes


def losses(metrics: Path) -> dict[tuple[str, int], float]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {(record["kind"], record["step"]): record["loss"] for record in records}


@first_only
def test_an_interrupted_run_resumes_to_the_losses_of_the_finished_one(files: Path) -> None:
    shutil.copytree("interrupted", "run")
    run("train", "run/recipe.json", "--resume")
    assert losses(Path("run/metrics.jsonl")) == pytest.approx(losses(Path("finished/metrics.jsonl")), abs=1e-4)
    expected = json.loads(Path("finished/results.json").read_text())["loss"]
    assert json.loads(Path("run/results.json").read_text())["loss"] == pytest.approx(expected, abs=1e-4)


@second_only
@pytest.mark.parametrize("name", ["carried", "ranks", "adapters"])
def test_a_run_with_states_shards_or_adapters_resumes_to_the_losses_of_the_finished_one(files: Path, name: str) -> None:
    run("train", f"{name}/recipe.json", "--resume")
    assert losses(Path(name, "metrics.jsonl")) == pytest.approx(losses(Path(f"{name}.jsonl")), abs=1e-4)


FORMS = ("tied", "bfloat16", "float16", "int4", "sharded")


@second_only
@pytest.mark.parametrize("form", [*FORMS, "classifier"])
def test_every_stored_form_of_the_weights_gives_the_same_logits(files: Path, form: str) -> None:
    tokens = torch.arange(97, 137)[None]
    if form == "classifier":
        from gecko.hf import GeckoForSequenceClassification

        found = GeckoForSequenceClassification.from_pretrained(form)(tokens).logits[0]
    else:
        found = gecko.load(form)(tokens)[0][0, -1].float()
    expected = load_file("logits.safetensors")[form]
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 if form not in ("bfloat16", "float16") else 2e-2)


@pytest.mark.parametrize(("generation", "folder"), [(FIRST, "model"), (FIRST, "exported"), (SECOND, "model")])
def test_a_model_folder_opens_and_continues_a_text_as_before(files: Path, folder: str) -> None:
    written = run("generate", folder, "--tokenizer", "bytes", "--prompt", "text 1", "--temperature", 0, "-n", 24)
    assert written == Path("greedy.txt").read_bytes()


@first_only
def test_an_export_opens_in_transformers_with_the_same_weights(files: Path) -> None:
    from gecko.hf import GeckoForCausalLM

    opened = GeckoForCausalLM.from_pretrained("exported").eval()
    tokens = torch.arange(40)[None]
    expected, _ = gecko.load("model").eval()(tokens)
    assert torch.equal(opened(input_ids=tokens).logits, expected)


@every_generation
def test_a_quantized_model_continues_a_text_as_before(files: Path) -> None:
    written = run("generate", "quantized", "--prompt", "text 1", "--temperature", 0, "-n", 24)
    assert written == Path("quantized.txt").read_bytes()


@every_generation
def test_a_reading_state_is_continued_as_before(files: Path) -> None:
    options = ("--tokenizer", "bytes", "--prompt", " In short", "--temperature", 0, "-n", 24)
    assert run("generate", "model", "--state", "book.state", *options) == Path("continued.txt").read_bytes()
    run("generate", "model", "--state", "compact.state", *options)


@every_generation
def test_reading_states_hold_what_reading_again_gives(files: Path) -> None:
    run("read", "model", "texts/1.txt", "texts/2.txt", "--tokenizer", "bytes", "--out", "again.state")
    model = gecko.load("model").eval()
    before, again = (gecko.GeckoState.load(name) for name in ("book.state", "again.state"))
    tokens = torch.arange(30)[None]
    expected, _ = model(tokens, state=again)
    assert torch.allclose(model(tokens, state=before)[0], expected, atol=1e-5)


@every_generation
def test_shards_give_the_documents_of_the_texts(files: Path) -> None:
    run("tokenize", "texts/*.txt", "--tokenizer", "bytes", "--out", "again")
    assert Path("again/00000.ds").read_bytes() == Path("shards/00000.ds").read_bytes()
    tokenizer, request = load_tokenizer("bytes"), DataRequest(sequence_length=64, validation_fraction=0.3, seed=0)
    before, again = (open_training_data(folder, (), tokenizer, request) for folder in ("shards", "again"))
    assert before.held_out(10**6).digest() == again.held_out(10**6).digest() and before.digest == again.digest
    for index in range(before.rows.rows_per_epoch):
        assert all(map(np.array_equal, before.rows.row(index), again.rows.row(index)))
    run("train", "finished/recipe.json", "steps=2", "data.source=shards", "--out", "trained")


@every_generation
def test_results_and_comparisons_stand_in_a_report(files: Path) -> None:
    given = [f"results/{name}.json" for name in RESULTS]
    run("report", "finished", "llama", "compared", *given, "--out", "report.html")
    page = Path("report.html").read_text()
    for words in ("Perplexity", "compare_no_memory", "passkey"):
        assert words in page


@every_generation
def test_a_comparison_is_called_again_and_gives_the_same(files: Path) -> None:
    before = json.loads(Path("compared/comparison.json").read_text())
    run(*shlex.split(before["command"])[1:])
    after = json.loads(Path("compared/comparison.json").read_text())
    assert [after[name] for name in ("format", "recipes", "runs")] == [
        before[name] for name in ("format", "recipes", "runs")
    ]


@every_generation
def test_a_llama_of_a_run_is_evaluated_as_before(files: Path) -> None:
    text = run("eval", "perplexity", "llama", "texts/1.txt", "--lengths", "16,64", "--out", "llama.json")
    assert b"perplexity" in text
