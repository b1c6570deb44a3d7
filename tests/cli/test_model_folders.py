"""Folders of models: what is saved to them, quantised and exported from them, and which tokenizer they have."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.conftest import NEWEST, Command, greedy, write_run
from safetensors.numpy import load_file

import gecko
from gecko.data import load_tokenizer
from gecko.io.files import whole_file
from gecko.models.onnx import GRAPH, LOGITS, NEXT, POSITION, START, TOKEN, initial_state

# ---- Models are saved to their own folders, never into a training run or over its checkpoints.


def _save_for_transformers(model: gecko.Gecko, folder: Path) -> None:
    pytest.importorskip("transformers")
    from gecko.hf import export

    export(model, folder)


@pytest.mark.parametrize("save", [gecko.Gecko.save, _save_for_transformers], ids=["save", "export"])
def test_neither_a_run_nor_a_checkpoint_is_saved_over(
    save: Callable[..., None], run_folder: Path, tmp_path: Path
) -> None:
    """A model of its own folder is."""
    model = gecko.load(run_folder / NEWEST)
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    for folder in (run_folder, run_folder / NEWEST):
        with pytest.raises(FileExistsError, match=r"a model must be saved to a folder for itself.* Choose another"):
            save(model, folder)
    assert {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()} == before
    for _ in range(2):
        model.save(tmp_path / "model")
    assert gecko.load(tmp_path / "model").config == model.config


@pytest.mark.parametrize("files", [0, 1])
@pytest.mark.parametrize(
    "words",
    [
        "quantize {run} {out}", "export {run} {out}", "export {run} {empty}", "consolidate {run} --out {out}",
        "average {run} --last 2 --out {out}",
    ],
)  # fmt: skip
def test_a_killed_command_leaves_nothing_in_the_way_of_the_same_command(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, files: int
) -> None:
    """The process ends after some files, and removes nothing."""
    out, existing = tmp_path / "models" / "out", "{empty}" in words
    (out if existing else out.parent).mkdir(parents=True)
    arguments = words.format(run=run_folder, out=out, empty=out).split()
    written: list[Path] = []

    @contextmanager
    def killed_after_some(path: Path) -> Iterator[Path]:
        if len(written) == files:
            raise KeyboardInterrupt
        written.append(path)
        with whole_file(path) as temporary:
            yield temporary

    with monkeypatch.context() as patch:
        patch.setattr("gecko.io.model_folder.whole_file", killed_after_some)
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        assert command(*arguments).exit_code != 0
    assert len(written) == files
    assert list(out.iterdir()) == [] if existing else not out.exists()
    command(*arguments, code=0)
    assert list(out.parent.iterdir()) == [out]
    assert gecko.load(out).config == gecko.load(run_folder).config


def test_a_run_with_a_second_model_is_refused(command: Command, run_folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run")
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(run / NEWEST / name, run / name)
    result = command("generate", run, "-p", "a", "-n", 1, code=2)
    assert f"{run} must hold one model" in result.stderr and "Move config.json and model.safetensors" in result.stderr
    with pytest.raises(ValueError, match="must hold one model"):
        gecko.load(run)


# ---- ``gecko quantize``.


@pytest.mark.parametrize("bits", [8, 4])
def test_the_copy_works_like_the_original(command: Command, run_folder: Path, tmp_path: Path, bits: int) -> None:
    """The tokenizer and the chat template are copied too."""
    pytest.importorskip("torchao")
    source, out = shutil.copytree(run_folder / NEWEST, tmp_path / "model"), tmp_path / "out"
    along = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
    for name in along:
        (source / name).write_text("{}")
    result = command("quantize", source, out, "--bits", bits, code=0)
    assert {path.name for path in out.iterdir()} == {*along, "recipe.json", "config.json", "model.safetensors"}
    assert all((out / name).read_text() == "{}" for name in along)
    size, original = ((path / "model.safetensors").stat().st_size for path in (out, source))
    assert f"{size:,} bytes of weights" in result.stdout and f"of the {original:,} in {source}" in result.stdout
    assert size < 0.8 * original
    options, state = ("-n", 9, "--temperature", 0, "--tokenizer", "bytes"), tmp_path / "s"
    written = command("generate", out, "-p", "abc", *options, "--save-state", state, code=0)
    assert written.stdout == greedy(out, b"abc", 9)
    command("generate", out, "--state", state, "-p", "d", *options, code=0)
    refused = command("generate", source, "--state", state, "-p", "d", *options, code=2)
    assert "other weights" in refused.stderr


# ---- The tokenizer of a command: the given one, else the one beside the model, else the one that its recipe names.


def test_files_beside_the_model_come_before_the_recipe(command: Command, run_folder: Path, tmp_path: Path) -> None:
    """A recipe may name what is not here. What export writes generates the same."""
    hf, folder = pytest.importorskip("gecko.hf"), shutil.copytree(run_folder / NEWEST, tmp_path / "model")
    recipe = json.loads((folder / "recipe.json").read_text())
    recipe["data"]["tokenizer"] = "tok.json"
    (folder / "recipe.json").write_text(json.dumps(recipe))
    generate = ("generate", folder, "--prompt", "hi", "-n", 8, "--temperature", 0)
    result = command(*generate, code=2)
    for part in (f"{folder / 'recipe.json'} names", "'tok.json'", "--tokenizer bytes"):
        assert part in result.stderr
    expected = command(*generate, "--tokenizer", "bytes", code=0).stdout
    hf.byte_tokenizer().save_pretrained(folder)
    assert command(*generate, code=0).stdout == expected
    hf.export(gecko.load(folder), tmp_path / "exported", hf.byte_tokenizer())
    assert command("generate", tmp_path / "exported", *generate[2:], code=0).stdout == expected


# ---- ``gecko export`` writes models that transformers and ONNX Runtime run, with the tokens of ``gecko.generate``.

PROMPT = [256, *b"abc"]


def test_transformers_continues_a_text(command: Command, run_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    command("export", run_folder, tmp_path / "out", code=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer("abc", return_tensors="pt")
    assert inputs.input_ids.tolist() == [PROMPT]
    found = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, len(PROMPT) :]
    assert bytes(found.tolist()).decode() == greedy(run_folder, b"abc", 20)


@pytest.mark.parametrize("template", [None, "{{ bos_token }}{{ messages[0].content }}"])
def test_the_tokenizer_and_its_template_go_along(command: Command, tmp_path: Path, template: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    run = write_run(tmp_path / "run") / "checkpoints" / "step-00000001"
    write_tokenizer(run)
    if template is not None:
        (run / "chat_template.jinja").write_text(template)
    command("export", run, tmp_path / "out", code=0)
    ours, theirs = load_tokenizer(str(run)), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("ab ba", "a<s>b</s>" if template is None else "ab"):
        assert theirs(text).input_ids == [ours.document_start, *ours.encode(text)]
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.document_end, None)
    assert theirs.chat_template == template
    if template is not None:
        chat = theirs.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
        assert theirs(chat, add_special_tokens=False).input_ids == [ours.document_start, *ours.encode("ab")]


def write_tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, " ": 2, "<": 3, ">": 4, "/": 5, "s": 6}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_onnx_continues_a_text(command: Command, run_folder: Path, tmp_path: Path) -> None:
    """Without this package: the graph, and the state before the first token."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    command("export", run_folder, tmp_path / "out", "--format", "onnx", code=0)
    session = runtime.InferenceSession(str(tmp_path / "out" / GRAPH), providers=["CPUExecutionProvider"])
    inputs, outputs = ([x.name for x in part] for part in (session.get_inputs(), session.get_outputs()))
    state, tokens = load_file(tmp_path / "out" / START), list(PROMPT)
    empty = initial_state(gecko.load(run_folder))
    assert all(np.array_equal(state[name], x.numpy()) for name, x in empty.items())
    for position in range(len(PROMPT) + 19):
        values = {TOKEN: np.array([tokens[position]]), POSITION: np.array([position]), **state}
        found = dict(zip(outputs, session.run(None, {name: values[name] for name in inputs}), strict=True))
        state = {name: found[NEXT + name] for name in state}
        if position + 1 == len(tokens):
            tokens.append(int(found[LOGITS].argmax()))
    assert bytes(tokens[len(PROMPT) :]).decode() == greedy(run_folder, b"abc", 20)


def test_weights_in_16_bits_are_widened_for_onnx(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gecko.load(run_folder).to(torch.bfloat16)
    model.save(tmp_path / "narrow")
    (tmp_path / "narrow" / "tokenizer.json").write_text(json.dumps({}))
    written: list[gecko.Gecko] = []
    monkeypatch.setattr("gecko.models.onnx.export_onnx", lambda model, path: written.append(model))
    command("export", tmp_path / "narrow", tmp_path / "out", "--format", "onnx", code=0)
    (widened,) = written
    for ours, theirs in zip(model.parameters(), widened.parameters(), strict=True):
        assert theirs.dtype == torch.float32 and torch.equal(ours.float(), theirs)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [START, "tokenizer.json"]


def test_a_sentencepiece_tokenizer_is_refused(command: Command, tmp_path: Path) -> None:
    pieces = pytest.importorskip("sentencepiece")
    run = write_run(tmp_path / "run") / "checkpoints" / "step-00000001"
    pieces.SentencePieceTrainer.train(
        sentence_iterator=iter(["red green blue"] * 9), model_prefix=str(run / "tokenizer"), vocab_size=20,
        hard_vocab_limit=False,
        minloglevel=9,
    )  # fmt: skip
    result = command("export", run, tmp_path / "out", code=2)
    assert "is a SentencePiece model" in result.stderr
    assert not (tmp_path / "out").exists()
