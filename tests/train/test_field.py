"""Records whose text is in another field than ``text``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.corpora import as_shards, words

from gecko.recipes import apply_overrides
from gecko.train import Run, train

TEXTS = [words(60, number) for number in range(20)]


def write_records(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"id": 1, "content": text, "title": text[:9]}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def records(small_run: Run, tmp_path: Path) -> Run:
    source = write_records(tmp_path / "records.jsonl", TEXTS)
    return replace(small_run, steps=1, data=replace(small_run.data, source=source))


def test_the_field_is_named_in_the_run(records: Run) -> None:
    with pytest.raises(ValueError, match=r"the field 'text'.* got the fields \['content', 'id', .*data\.field=NAME"):
        train(records)
    assert train(apply_overrides(records, ["data.field=content"])).finished
    with pytest.raises(ValueError, match=r"data\.field must be what the checkpoint was trained with, 'content'"):
        train(apply_overrides(records, ["data.field=title"]), resume=True)


def test_the_field_is_that_of_all_sources(records: Run, tmp_path: Path) -> None:
    """Except for shards, which were made from one field."""
    held_out = write_records(tmp_path / "held_out.jsonl", TEXTS[:4])
    (tmp_path / "other").mkdir()
    mixture = f"{records.data.source}=1,{as_shards(TEXTS, tmp_path / 'other')}=1"
    changes = [
        "evaluation.final_rows=1000",
        "data.field=content",
        f"data.sources={mixture}",
        f"data.validation={held_out}",
    ]
    result = train(apply_overrides(records, changes))
    assert result.evaluation is not None and result.evaluation.tokens == sum(len(text) + 1 for text in TEXTS[:4])
