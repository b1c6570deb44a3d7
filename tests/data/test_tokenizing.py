"""Corpora to shards, on any executor and after any interruption."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Condition
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gecko.data import ShardFolder, TokenizedCorpus, Tokenizer, load_documents, load_tokenizer
from gecko.data.shards import SUFFIXES
from gecko.data.tokenize import TokenizingPlan, run_here, run_on_ray, run_on_slurm, run_share, run_task
from gecko.data.tokenizers import ByteTokenizer, TokenIds

BYTES = load_tokenizer("bytes")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gecko.data.tokenize.SHARD_BYTES", (1, 1 << 30))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    for number in range(12):
        records = [{"text": f"document {number}.{index} é " * (1 + index % 5)} for index in range(20)]
        (folder / f"{number:02d}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def corpus(written: Path) -> list[str]:
    """Return twelve files, each of which becomes a shard; no test may change them."""
    return [str(written)]


@pytest.fixture
def own(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the corpus that a test may change."""
    return shutil.copytree(written, tmp_path / "texts")


@pytest.fixture(scope="module")
def shards(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "shards"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gecko.data.tokenize.SHARD_BYTES", (1, 1 << 30))
        make([str(written)], folder)
    return folder


@pytest.fixture
def whole(shards: Path) -> dict[str, str]:
    """Return the contents of the corpus's shards."""
    return contents(shards)


def plan_of(corpus: list[str], folder: Path, tokenizer: str = "bytes") -> TokenizingPlan:
    plan = TokenizingPlan.make(corpus, load_tokenizer(tokenizer), folder)
    plan.start()
    return plan


def contents(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Return names and hashes of the files that matter in a folder of shards."""
    files = [path for path in sorted(folder.glob(pattern)) if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def finished(plan: TokenizingPlan, workers: int = 1, tokenizer: Tokenizer = BYTES) -> list[str]:
    """Write the missing shards, and return their names."""
    names = [record.name for record in run_here(plan, tokenizer, workers)]
    assert plan.finish() is not None
    return names


def make(corpus: list[str], folder: Path, workers: int = 1) -> dict[str, str]:
    plan = plan_of(corpus, folder)
    assert len(finished(plan, workers)) == len(plan.tasks)
    return contents(folder)


def test_shards_hold_the_corpus_for_every_tokenizer(
    corpus: list[str], tmp_path: Path, bpe_folder: Path, sentencepiece_file: Path
) -> None:
    for number, name in enumerate(["bytes", str(bpe_folder), str(sentencepiece_file)]):
        tokenizer: Tokenizer = load_tokenizer(name)
        plan = plan_of(corpus, tmp_path / f"shards{number}", name)
        assert len(finished(plan, 2, tokenizer)) == len(plan.tasks) == 12
        expected = TokenizedCorpus.build(load_documents(corpus), tokenizer)
        folder = ShardFolder.open(plan.folder)
        folder.verify()
        assert np.concatenate([shard.tokens for shard in folder.shards]).tolist() == expected.tokens.tolist()
        lengths = [np.diff(shard.ends, prepend=np.uint64(0)) for shard in folder.shards]
        assert np.concatenate(lengths).tolist() == expected.lengths.tolist()
        sizes = np.concatenate([shard.text_bytes for shard in folder.shards]).tolist()
        assert sizes == [len(text.encode()) for text in load_documents(corpus)]
        assert (folder.documents, folder.tokens) == (len(expected), expected.num_tokens)


def test_neighbours_share_a_shard_and_sources_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gecko.data.tokenize.SHARD_BYTES", (100, 200))
    sizes = [40, 40, 40, 150, 10, 10, 300, 10]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_text("x" * size)
    plan = TokenizingPlan.make([f"{tmp_path}/0.txt", f"{tmp_path}/*.txt"], BYTES, tmp_path / "out")
    groups = [[int(Path(part.name).stem) for part in task.parts] for task in plan.tasks]
    assert groups == [[0], [1, 2], [3], [4, 5], [6], [7]]


def test_a_data_set_is_cut_into_its_files(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for number in range(3):
        (tmp_path / "set" / f"{number}.jsonl").write_text(json.dumps({"text": f"file {number}"}) + "\n")
    plan = plan_of([f"hf:{tmp_path / 'set'}"], tmp_path / "shards")
    assert [(task.parts[0].piece, task.parts[0].pieces) for task in plan.tasks] == [(0, 3), (1, 3), (2, 3)]
    texts = [text for task in plan.tasks for part in task.parts for text in part.read()]
    assert texts == [f"file {number}" for number in range(3)]


def test_any_number_of_workers_writes_the_same(
    corpus: list[str], whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make(corpus, tmp_path / "three", workers=3) == whole
    # Above this number of threads, processes are used.
    monkeypatch.setattr("gecko.data.tokenize.MOST_THREADS", 1)
    assert make(corpus, tmp_path / "processes", workers=2) == whole


class WatchedTokenizer(ByteTokenizer):
    """Counts its calls, and the largest number of concurrent calls."""

    def __init__(self) -> None:
        self.calls, self.inside, self.most = 0, 0, 0
        self.changed = Condition()

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        with self.changed:
            self.calls, self.inside = self.calls + 1, self.inside + 1
            self.most = max(self.most, self.inside)
            self.changed.notify_all()
        time.sleep(0.002)
        ids = super().encode_batch(texts)
        with self.changed:
            self.inside -= 1
        return ids


@pytest.mark.parametrize("workers", [1, 3])
def test_others_are_encoded_while_a_shard_waits_for_the_disk(
    corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    plan, tokenizer, flush = plan_of(corpus, tmp_path / "shards"), WatchedTokenizer(), os.fsync

    def slow_disk(file: int) -> None:
        with tokenizer.changed:
            assert tokenizer.changed.wait_for(lambda: tokenizer.calls > workers, timeout=20)
        flush(file)

    monkeypatch.setattr(os, "fsync", slow_disk)
    assert len(list(run_here(plan, tokenizer, workers))) == 12
    assert tokenizer.calls == 12 and tokenizer.most <= workers


def test_datatrove_writes_the_same_and_the_last_rank_finishes(
    corpus: list[str], whole: dict[str, str], tmp_path: Path
) -> None:
    from datatrove.executor import LocalPipelineExecutor

    plan = plan_of(corpus, tmp_path / "trove")

    def run(logs: str) -> None:
        steps = [partial(run_share, plan.folder)]
        LocalPipelineExecutor(steps, tasks=5, workers=1, logging_dir=str(tmp_path / logs)).run()

    run("logs")
    assert contents(tmp_path / "trove") == whole
    written = {path.name: path.stat().st_mtime_ns for path in plan.folder.glob("*.ds*")}
    run("other logs")
    assert {path.name: path.stat().st_mtime_ns for path in plan.folder.glob("*.ds*")} == written


def test_slurm_jobs_write_the_same(corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands are replaced by scripts; sbatch runs the one job of the array."""
    corpus = [f"{corpus[0]}/00.jsonl"]
    one = make(corpus, tmp_path / "one")
    commands = {
        # The second script merges statistics, which are not read.
        "sbatch": "script=${@: -1}; echo Submitted batch job 4711; grep -q array=0-0 $script || exit 0\n"
        "SLURM_ARRAY_TASK_ID=0 RUN_OFFSET=0 SLURM_NODELIST=here bash $script >>$LOG 2>&1",
        "srun": 'while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done; exec "$@"',
        "scontrol": "echo here",
    }
    for name, script in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    plan, found = plan_of(corpus, tmp_path / "slurm"), os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="need the command sbatch"):
        run_on_slurm(plan, 2, partition="cpu", hours=1)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{found}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    assert run_on_slurm(plan, 2, partition="cpu", hours=1) == "4711"
    assert contents(tmp_path / "slurm") == one, (tmp_path / "log").read_text()[-2000:]


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_tasks_find_relative_sources_from_any_folder(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.chdir(written.parent)
    plan = plan_of([f"{prefix}texts"], tmp_path / "shards")
    monkeypatch.chdir("/")
    assert len(finished(TokenizingPlan.load(plan.folder))) == 12


class RayStandIn:
    """Runs here what Ray's workers would run; like datatrove's executor it does not raise the errors of tasks."""

    def __init__(self, pipeline: list[Callable], *, tasks: int, workers: int, **_: object) -> None:
        self.step, self.tasks = pipeline[0], tasks

    def run(self) -> None:
        for rank in range(self.tasks):
            with contextlib.suppress(ValueError):
                self.step(None, rank, self.tasks)


def test_ray_tasks_write_the_same_and_one_that_fails_is_told(
    own: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor is replaced, because it needs Ray."""
    monkeypatch.setattr("gecko.data.tokenize.require", lambda *_: SimpleNamespace(RayPipelineExecutor=RayStandIn))
    plan, broken = plan_of([str(own)], tmp_path / "ray"), own / "05.jsonl"
    content = broken.read_text()
    broken.write_text("x" * len(content))
    with pytest.raises(OSError, match=r"1 of 12 shards could not be written; .*ray/executor/logs has the reason"):
        run_on_ray(plan, 2)
    broken.write_text(content)
    run_on_ray(plan, 2)
    assert contents(tmp_path / "ray", "*.ds*") == contents(shards, "*.ds*")


# Interruption and continuation.

WORK = """
import os, signal, sys, time
from pathlib import Path
from gecko.data import load_tokenizer
from gecko.data.tokenize import TokenizingPlan, run_here
plan = TokenizingPlan.load(Path(sys.argv[1]))
for wait in (0.001, 0.004, 0.016):
    child = os.fork()
    if child == 0:
        list(run_here(plan, load_tokenizer("bytes"), 2))
        os._exit(0)
    time.sleep(wait)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_killed_anywhere_it_goes_on_to_the_same_shards(
    corpus: list[str], whole: dict[str, str], tmp_path: Path
) -> None:
    plan = plan_of(corpus, tmp_path / "killed")
    subprocess.run([sys.executable, "-c", WORK, str(plan.folder)], check=True)
    (plan.folder / ".00003.ds.abcdefgh").write_bytes(b"of a killed process")
    before = {record.name: (plan.folder / f"{record.name}.ds").stat().st_mtime_ns for record in plan.done()}
    assert not set(finished(plan, 2)) & set(before)
    assert all((plan.folder / f"{name}.ds").stat().st_mtime_ns == at for name, at in before.items())
    assert contents(plan.folder) == whole


def test_a_shard_is_there_only_with_all_its_files(shards: Path, whole: dict[str, str], tmp_path: Path) -> None:
    plan = TokenizingPlan.load(shutil.copytree(shards, tmp_path / "shards"))
    for suffix in (*SUFFIXES, ".json"):
        (plan.folder / f"00004{suffix}").unlink()
        assert len(plan.done()) == 11 and plan.finish() is None
        assert finished(plan) == ["00004"] and contents(plan.folder) == whole


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_whole_shards(corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(corpus, tmp_path / "shards")
    run_task(plan.folder, 0)
    full, write = Path("/dev/full"), Path.open

    def on_full_disk(path: Path, mode: str = "r", **options: object) -> object:
        return write(full if ".00001.ds." in path.name and mode == "wb" else path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", on_full_disk)
        with pytest.raises(OSError, match=r"could not write .*00001\.ds \(No space left.*Free some space"):
            run_task(plan.folder, 1)
    assert {path.name for path in plan.folder.iterdir()} == {"tokenize.json", "00000.json"} | {
        f"00000{suffix}" for suffix in SUFFIXES
    }
    assert len(list(run_here(plan, BYTES, 1))) == 11


def test_nothing_is_overwritten(corpus: list[str], shards: Path, bpe_folder: Path) -> None:
    plan_of(corpus, shards)
    with pytest.raises(FileExistsError, match="shards of other sources, another tokenizer"):
        plan_of(corpus, shards, str(bpe_folder))
    with pytest.raises(FileExistsError, match="must be a new or an empty folder"):
        plan_of([f"{corpus[0]}/*.jsonl"], Path(corpus[0]))
    with pytest.raises(ValueError, match=r"must lie outside the sources; .*would be read as text"):
        plan_of(corpus, Path(corpus[0], "shards"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "more"}', r"02\.jsonl must not change while it is tokenized"),
        ("not JSON", r"02\.jsonl, line 21, must hold one JSON object"),
    ],
)
def test_a_file_that_changes_or_is_broken(own: Path, tmp_path: Path, line: str, message: str) -> None:
    late, source = line.startswith("{"), own / "02.jsonl"
    plan = plan_of([str(own)], tmp_path / "shards") if late else None
    source.write_text(f"{source.read_text()}{line}\n")
    plan = plan or plan_of([str(own)], tmp_path / "shards")
    with pytest.raises(ValueError, match=message):
        list(run_here(plan, BYTES, 2))
    assert plan.finish() is None
    if late:
        with pytest.raises(FileExistsError):
            plan_of([str(own)], tmp_path / "shards")


def test_a_file_that_has_changed_and_has_its_size_is_not_taken_for_the_old_one(own: Path, tmp_path: Path) -> None:
    plan_of([str(own)], tmp_path / "shards")
    source, later = own / "02.jsonl", time.time() + 10
    source.write_text(source.read_text().swapcase())
    os.utime(source, (later, later))
    with pytest.raises(FileExistsError, match="files that have changed since"):
        plan_of([str(own)], tmp_path / "shards")


@pytest.mark.parametrize("deleted", [True, False])
def test_a_source_that_cannot_be_read_is_not_taken_for_a_full_disk(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    plan, source, reading = plan_of([str(own)], tmp_path / "shards"), own / "02.jsonl", Path.open

    def refused(path: Path, mode: str = "r", **options: Any) -> object:
        if path == source:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return reading(path, mode, **options)

    with monkeypatch.context() as patch:
        if deleted:
            source.rename(tmp_path / "moved.jsonl")
        else:
            patch.setattr(Path, "open", refused)
        with pytest.raises(ValueError, match=r"02\.jsonl must be readable .*; got: (No such file|Permission denied)"):
            run_task(plan.folder, 2)
    if deleted:
        (tmp_path / "moved.jsonl").rename(source)
    assert len(finished(plan)) == 12


def test_a_tokenizer_that_changes_meanwhile(
    corpus: list[str], tmp_path: Path, write_config: Callable[[object], Path]
) -> None:
    path = write_config({"eos_token": "<|endoftext|>"}) / "tokenizer.json"
    plan = plan_of(corpus, tmp_path / "shards", str(path))
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ValueError, match="must be the one that the folder was started with"):
        run_task(plan.folder, 0)


def test_a_source_without_text(tmp_path: Path, corpus: list[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    plan = plan_of([*corpus, str(tmp_path / "empty.txt")], tmp_path / "shards")
    with pytest.raises(ValueError, match=r"at least one document with text; got .*empty\.txt"):
        finished(plan)


def test_what_killed_processes_left_goes(corpus: list[str], tmp_path: Path) -> None:
    """Except a manifest, which another process may be writing. One was killed while it wrote the plan."""
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / ".tokenize.json.abcd1234").write_text("{")
    plan = plan_of(corpus, tmp_path / "shards")
    names = ["tokenize.json", "00003.ds", "00003.ds.index", "00003.ds.bytes", "00003.json", "manifest.json"]
    for name in names:
        (plan.folder / f".{name}.0123abcd").write_bytes(b"of a killed process")
    os.utime(plan.folder / ".manifest.json.0123abcd", (0, 0))
    fresh = plan.folder / ".manifest.json.abcd0123"
    fresh.write_bytes(b"of another one")
    assert len(finished(plan)) == 12
    assert [path for path in plan.folder.iterdir() if path.name.startswith(".")] == [fresh]
