"""``gecko tokenize``, and training on its shards."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Command
from tokenizers import Tokenizer, decoders, models

import gecko.data.tokenize as tokenizing


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        lines = (json.dumps({"body": f"line {index} of {number}"}) for index in range(30))
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_shards_are_written_verified_and_found_again(command: Command, corpus: Path, tmp_path: Path) -> None:
    arguments = ("tokenize", corpus, "--tokenizer", "bytes", "--field", "body", "--out", tmp_path / "shards")
    result = command(*arguments, "--verify", code=0)
    # Small neighbouring files share one shard.
    assert "1 shards, 90 documents, 1,230 tokens of uint16" in result.stdout
    assert "every byte is as it was written" in result.stdout
    assert f"data.source={tmp_path / 'shards'} data.tokenizer=bytes" in result.stdout
    shard = tmp_path / "shards" / "00000.ds"
    before = shard.stat().st_mtime_ns
    command(*arguments, code=0)
    assert before == shard.stat().st_mtime_ns
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    assert "00000.ds is damaged" in command(*arguments, "--verify", code=2).stderr


def test_nothing_that_exists_is_written_over(command: Command, corpus: Path, tmp_path: Path) -> None:
    """Not the sources, the tokenizer, nor a folder with other files, even if their names are those of shards."""
    taken = tmp_path / "taken"
    taken.mkdir()
    for name in ("tokenize.json", "manifest.json", "00000.ds"):
        (taken / name).write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for out in (corpus, corpus / "shards", corpus / "0.jsonl", taken, taken / "tokenize.json"):
        for source in (corpus, corpus / "0.jsonl"):
            result = command("tokenize", source, "--tokenizer", "bytes", "--field", "body", "--out", out)
            if source != corpus and out == corpus / "shards":
                # The output is a new folder beside the one source.
                assert result.exit_code == 0
                shutil.rmtree(out)
                continue
            assert result.exit_code == 2 and str(out) in result.stderr, (out, source, result.output)
            assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_corrected_command_may_use_the_folder_of_a_failed_one(command: Command, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    arguments = ("tokenize", "--tokenizer", "bytes", "--out", out)
    (tmp_path / "empty.txt").touch()
    for wrong in ((corpus, "--field", "text"), (tmp_path / "empty.txt",)):
        command(*arguments, *wrong, code=2)
        assert list(out.iterdir()) == []
    command(*arguments, corpus, "--field", "body", code=0)


def test_a_failed_command_keeps_finished_shards_and_other_files(
    command: Command, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest file is the first shard; a file of another process keeps the plan, too."""
    monkeypatch.setattr("gecko.data.tokenize.SHARD_BYTES", (1, 1))
    (corpus / "3.jsonl").write_text("{}\n")
    arguments = ("tokenize", corpus, "--tokenizer", "bytes", "--field", "body", "--workers", 1, "--out")
    command(*arguments, tmp_path / "shards", code=2)
    assert {"tokenize.json", "00000.ds"} <= {path.name for path in (tmp_path / "shards").iterdir()}
    write_shard = tokenizing.write_shard

    def beside_another(plan: Any, task: Any, *rest: Any) -> Any:
        (plan.folder / ".00000.ds.abcdef01").touch()
        return write_shard(plan, plan.tasks[3], *rest)

    monkeypatch.setattr("gecko.data.tokenize.write_shard", beside_another)
    command(*arguments, tmp_path / "again", code=2)
    assert (tmp_path / "again" / "tokenize.json").is_file()


def test_slurm_jobs_are_not_submitted_twice(
    command: Command, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's commands are replaced by scripts; a submitted job does nothing."""
    # Imported here because its logger keeps the standard error that it finds.
    pytest.importorskip("datatrove.executor")
    submitted, queue = tmp_path / "submitted", tmp_path / "queue"
    # The second script that is submitted merges statistics.
    write_command(
        tmp_path, "sbatch", f"echo Submitted batch job 47; grep -q merge_stats ${{@: -1}} || echo >>{submitted}"
    )
    write_command(tmp_path, "squeue", f'[[ "$*" == "-h -j 47" && -f {queue} ]] || exit 1; cat {queue}')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    options = ("--tokenizer", "bytes", "--field", "body", "--executor", "slurm", "--partition", "cpu")
    arguments = ("tokenize", corpus, *options, "--out", tmp_path / "shards")
    first = command(*arguments, code=0)
    assert "submitted as Slurm job 47" in first.stdout, first.output
    queue.write_text("47_0 cpu RUNNING\n")
    again = command(*arguments, code=0)
    assert "Slurm job 47 has not ended" in again.stdout, again.output
    assert "0 of 1 shards are there" in again.stdout
    assert submitted.read_text() == "\n"
    # The job has ended: squeue first still lists it, then no longer; the missing shards are submitted again.
    queue.write_text("")
    assert "submitted as Slurm job 47" in command(*arguments).stdout
    queue.unlink()
    assert "submitted as Slurm job 47" in command(*arguments).stdout


def write_command(folder: Path, name: str, script: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def test_training_on_shards_and_mixtures(command: Command, corpus: Path, tmp_path: Path) -> None:
    command("tokenize", corpus, "--tokenizer", "bytes", "--field", "body", "--out", tmp_path / "shards")
    text = tmp_path / "more.jsonl"
    text.write_text('{"text": "something else"}\n' * 20)
    small = ("steps=2", "batch_size=2", "sequence_length=16", "model.num_layers=1", "sample.tokens=2", "threads=1")
    data = f"data.sources={tmp_path / 'shards'}=3,{text}=1"
    assert "(768/1024)" in command("train", "tiny", *small, data, "--out", tmp_path / "run", code=0).stdout


def test_a_tokenizer_that_loses_text_is_refused(command: Command, tmp_path: Path) -> None:
    """By training, of texts and of chats, and by gecko tokenize, unless that is allowed."""
    path = tmp_path / "tokenizer.json"
    library = Tokenizer(models.BPE({letter: place for place, letter in enumerate(["</s>", *"ab cd"])}, []))
    library.decoder = decoders.Fuse()
    library.save(str(path))
    (tmp_path / "texts.jsonl").write_text('{"text": "a bad cab dab"}\n' * 40 + '{"text": "a café"}\n')
    turns = [{"role": "user", "content": "cab"}, {"role": "assistant", "content": "dab é"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    small = ("steps=1", "batch_size=1", "sequence_length=8", "sample.tokens=2", "sample.prompt=a", "threads=1")
    train = ("train", "tiny", *small, f"data.tokenizer={path}", "model.vocab_size=8", "--out", tmp_path / "run")
    shards = ("tokenize", tmp_path / "texts.jsonl", "--tokenizer", path, "--out", tmp_path / "shards")
    texts, chats = (f"data.source={tmp_path / name}.jsonl" for name in ("texts", "chats"))
    for arguments in ((*train, texts), shards, (*train, chats, "data.format=chat")):
        result = command(*arguments, code=2)
        assert "of the characters, most often " in result.stderr, result.stderr
        assert "--allow-loss" in result.stderr
    for arguments in ((*train, texts, "data.allow_loss=true"), (*shards, "--allow-loss")):
        result = command(*arguments, code=0)
        assert "loses 0.380% of the characters" in result.stdout
