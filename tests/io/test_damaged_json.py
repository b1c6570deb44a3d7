"""Readers of JSON files name the file that is damaged, instead of failing with a traceback."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.corpora import BYTE_MODEL, as_lines, as_shards

from gecko.cli.generate import _read_key
from gecko.data.chat import find_format
from gecko.data.shards import Manifest
from gecko.data.tokenize import TokenizingPlan, read_record
from gecko.data.tokenizers import ByteTokenizer, load_tokenizer
from gecko.eval.scrolls import load_questions
from gecko.experiments.compare.plan import evaluation_of
from gecko.experiments.inputs import gather
from gecko.io.checkpoints import read_manifest
from gecko.models import load_config
from gecko.train import Run
from gecko.train.metrics import DataRecord, read_metrics, read_sessions
from gecko.train.state import read_trainer_state

RUN = Run(BYTE_MODEL, "run", steps=1)
READERS: dict[str, Callable[[Path], Any]] = {
    "recipe.json": Run.load,
    "config.json": load_config,
    "trainer.json": lambda path: read_trainer_state(path.parent),
    "data.json": lambda path: DataRecord.load(path.parent),
    "manifest.json": lambda path: read_manifest(path.parent),
    "manifest.json of shards": lambda path: Manifest.load(path.parent),
    "tokenize.json": lambda path: TokenizingPlan.load(path.parent),
    "results.json": lambda path: evaluation_of(replace(RUN, output=str(path.parent))),
    "comparison.json": lambda path: gather([path.parent]),
    "evaluation.json": lambda path: gather([path]),
    "metrics.jsonl": read_metrics,
    "sessions.jsonl": lambda path: read_sessions(path.parent),
    "questions.jsonl": lambda path: load_questions(str(path), "qasper", "validation"),
}
"""Each reads the file that the first word of its name names."""
DAMAGES: dict[str, bytes] = {
    "no text": b"\xff\xfe\x00{\n",
    "torn": b'{"loss": 1.0, "st\n',
    "zeros": bytes(64) + b"\n",
    "a list": b"[1, 2]\n",
    "a number": b"7\n",
    "null": b"null\n",
    "other fields": b'{"model": 1, "step": [], "digest": {}, "files": 3, "tasks": 1}\n',
    "of a comparison": b'{"format": "gecko-comparison-1"}\n',
    "nested lists": b"[" * 100_000 + b"\n",
    "nested objects": b'{"format":' * 100_000 + b"\n",
    "a huge number": b"9" * 10_000 + b"\n",
    "of a meeting": b'{"meeting_transcripts": [{"speaker": "A"}]}\n',
}
"""None of the files above may be accepted with this content."""


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    file = name.split()[0]
    path = tmp_path / file
    path.write_bytes(DAMAGES[damage])
    if name == "sessions.jsonl" and damage in ("other fields", "of a comparison", "of a meeting"):
        pytest.skip("a session may have any fields")
    with pytest.raises(ValueError, match=file):
        READERS[name](path)


def test_a_damaged_record_of_a_shard_is_written_again_and_a_damaged_plan_is_not(tmp_path: Path) -> None:
    shards = Path(as_shards(["one text", "another"], tmp_path))
    plan = TokenizingPlan.load(shards)
    other = TokenizingPlan.make([as_lines(["text"], tmp_path)], load_tokenizer("bytes"), tmp_path / "other")
    other.folder.mkdir()
    for content in DAMAGES.values():
        (shards / "00000.json").write_bytes(content)
        assert read_record(plan, plan.tasks[0]) is None
        (other.folder / "tokenize.json").write_bytes(content)
        with pytest.raises(FileExistsError, match="other"):
            other.start()
        assert (other.folder / "tokenize.json").read_bytes() == content


@pytest.mark.parametrize(
    "name, content",
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"chat_template": "x", "added_tokens_decoder": {"1": {}}}'),
        ("tokenizer_config.json", b'{"chat_template": "x", "added_tokens_decoder": [1]}'),
    ],
)
def test_a_damaged_chat_template_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=str(tmp_path)):
        find_format(ByteTokenizer(), tmp_path)


def test_a_key_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"{tmp_path}/key must hold the key"):
        _read_key(tmp_path / "key")
