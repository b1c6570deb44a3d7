"""``gecko export`` writes models that transformers and ONNX Runtime run, with the tokens of ``gecko.generate``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.conftest import write_run
from safetensors.numpy import load_file

import gecko
from gecko.data import load_tokenizer
from gecko.models.onnx import GRAPH, LOGITS, NEXT, POSITION, START, TOKEN, initial_state

Command = Callable[..., Any]
PROMPT = [256, *b"abc"]


def greedy(run_folder: Path, new: int = 20) -> list[int]:
    return gecko.generate(gecko.load(run_folder), PROMPT, max_new_tokens=new, temperature=0).tokens[0]


def test_transformers_continues_a_text(command: Command, run_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    result = command("export", run_folder, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer("abc", return_tensors="pt")
    assert inputs.input_ids.tolist() == [PROMPT]
    found = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, len(PROMPT) :]
    assert found.tolist() == greedy(run_folder)


@pytest.mark.parametrize("template", [None, "{{ bos_token }}{{ messages[0].content }}"])
def test_the_tokenizer_and_its_template_go_along(command: Command, tmp_path: Path, template: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    run = write_run(tmp_path / "run") / "checkpoints" / "step-00000001"
    write_tokenizer(run)
    if template is not None:
        (run / "chat_template.jinja").write_text(template)
    assert command("export", run, tmp_path / "out").exit_code == 0
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
    result = command("export", run_folder, tmp_path / "out", "--format", "onnx")
    assert result.exit_code == 0, result.stderr
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
    assert tokens[len(PROMPT) :] == greedy(run_folder)


def test_weights_in_16_bits_are_widened_for_onnx(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gecko.load(run_folder).to(torch.bfloat16)
    model.save(tmp_path / "narrow")
    (tmp_path / "narrow" / "tokenizer.json").write_text(json.dumps({}))
    written: list[gecko.Gecko] = []
    monkeypatch.setattr("gecko.models.onnx.export_onnx", lambda model, path: written.append(model))
    assert command("export", tmp_path / "narrow", tmp_path / "out", "--format", "onnx").exit_code == 0
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
    result = command("export", run, tmp_path / "out")
    assert result.exit_code == 2 and "is a SentencePiece model" in result.stderr
    assert not (tmp_path / "out").exists()
