"""Training on several ranks equals training on one, and all ranks refuse an invalid mesh."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import compile_jobs
from support import training_jobs as work
from support.corpora import BYTE_MODEL, as_lines, words
from support.jobs import Exact, Jobs
from support.whole_runs import losses, saved_steps

from gecko.models import LlamaConfig, ModelConfig, load_any
from gecko.parallel.mesh import MeshSizes
from gecko.train import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    OptimizerSettings,
    ParallelSettings,
    Run,
    train,
)
from gecko.train.checkpoints import latest_checkpoint, write_model

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "shard-2": (2, {}), "replicate-2": (2, {"replicate": 2}), "context-2": (2, {"context": 2}), "shard-4": (4, {}),
    "replicate-2-shard-2": (4, {"replicate": 2}), "shard-2-context-2": (4, {"context": 2}),
    "replicate-2-context-2": (4, {"replicate": 2, "context": 2}),
}  # fmt: skip
SETTINGS: dict[int, list[dict[str, Any]]] = {
    2: [{"gradient_accumulation_steps": 2}, {"activation_checkpointing": "full"}],
    4: [{"gradient_accumulation_steps": 2},
        {"activation_checkpointing": "selective", "gradient_accumulation_steps": 2}],
}  # fmt: skip
"""Settings by the number of ranks. Each setting meets every way of dividing the work."""

LLAMA = LlamaConfig(vocab_size=257, num_layers=2, model_dim=32, num_heads=4, ffn_dim=48, key_value_heads=2)
MODELS: dict[str, ModelConfig] = {"gecko": BYTE_MODEL, "llama": LLAMA}
CASES = [*(("gecko", mesh) for mesh in MESHES), ("llama", "replicate-2"), ("llama", "shard-4")]


BRIEF: dict[str, Any] = {"evaluation": EvaluationSettings(50, 2, 2)}
"""Short runs look at few held-out rows."""


def model_of(name: str) -> ModelConfig:
    if name == "llama":
        pytest.importorskip("transformers", reason="pip install 'gecko-lm[hf]'")
    return MODELS[name]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_steps_on_ranks_are_steps_on_one(
    jobs: Jobs, run_in: Callable[..., Run], exact: Exact, name: str, mesh: str
) -> None:
    """Compare loss, gradient norm and, after three steps of AdamW, every parameter, in float64 on every rank."""
    ranks, sizes = MESHES[mesh]
    model = replace(model_of(name), tie_embedding=mesh == "shard-4")
    expected = exact(run_in("one", model=model))
    runs = [run_in("many", model=model, **sizes, **settings) for settings in SETTINGS[ranks]]
    for per_rank in jobs.run(ranks, work.exact_steps, runs, 3):
        for got, settings in zip(per_rank, SETTINGS[ranks], strict=True):
            assert_same_steps(got, expected, str(settings))


def assert_same_steps(got: dict[str, Any], expected: dict[str, Any], what: str = "") -> None:
    np.testing.assert_allclose(got["curve"], expected["curve"], rtol=1e-9, err_msg=what)
    for name, value in expected["parameters"].items():
        np.testing.assert_allclose(got["parameters"][name], value, rtol=1e-6, atol=1e-8, err_msg=f"{name} {what}")


@pytest.mark.parametrize("mesh", ["shard-4", "replicate-2", "replicate-2-shard-2"])
def test_captured_steps_on_ranks_are_plain_ones(jobs: Jobs, run_in: Callable[..., Run], mesh: str) -> None:
    """A graph's gradients are summed over the ranks, and its weights are those after each step. Of nine rows, the last
    of four shards has none."""
    ranks, sizes = MESHES[mesh]
    model = replace(BYTE_MODEL, tie_embedding=mesh == "shard-4", vocab_size=259, ffn_dim=9)
    runs = [run_in("x", model=model, gradient_accumulation_steps=parts, **sizes) for parts in (1, 2)]
    for found in jobs.run(ranks, work.captured_steps, runs, 4):
        for plain, captured in found:
            assert_same_steps(captured, plain)


@pytest.mark.parametrize(("name", "blocks", "others"), [
    ("gecko", "blocks.", ("norm", "cema")), ("llama", "model.layers.", ("norm",)),
])  # fmt: skip
def test_bfloat16_is_gathered_for_matrices_only_and_kept_nowhere(
    jobs: Jobs, run_in: Callable[..., Run], name: str, blocks: str, others: tuple[str, ...]
) -> None:
    dtypes = jobs.run(2, work.gathered_dtypes, run_in("x", model=model_of(name), precision="bfloat16"))[1]
    for key, (gathered, kept, gradient) in dtypes.items():
        assert (kept, gradient) == (torch.float32, torch.float32), key
        matrix = key.startswith(blocks) and not any(other in key for other in others)
        assert gathered == (torch.bfloat16 if matrix else torch.float32), key
    assert sum(gathered == torch.bfloat16 for gathered, _, _ in dtypes.values()) >= (14 if name == "llama" else 11)


@pytest.mark.parametrize("precision", ["bfloat16", "float8_emulated"])
def test_half_precision_on_ranks_learns_as_on_one(jobs: Jobs, run_in: Callable[..., Run], precision: str) -> None:
    """Ranks gather matrices in bfloat16 before they are rounded to float8; a single device rounds once."""
    one, many = (run_in(name, precision=precision, steps=6, **BRIEF) for name in ("one", "many"))
    jobs.run(1, work.train_run, one)
    jobs.run(2, work.train_run, many)
    np.testing.assert_allclose(losses(many), losses(one), rtol=5e-3)


@pytest.mark.parametrize(("ranks", "replicate"), [(2, 1), (4, 2)])
def test_accumulated_gradients_are_shards(jobs: Jobs, run_in: Callable[..., Run], ranks: int, replicate: int) -> None:
    """Gradients are divided among the shards after each part, and summed over the replicas after the last one."""
    parts = 4 // (ranks // 2)
    run = run_in("x", gradient_accumulation_steps=parts, replicate=replicate)
    groups = run.model.num_layers + 1
    for found in jobs.run(ranks, work.accumulated_gradients, run):
        assert found["reduce_scatters"] == groups * parts
        assert found["all_reduces"] == (groups if replicate > 1 else 0)
        # Ranks cannot divide every dimension evenly.
        shard = pytest.approx(found["bytes of the model"] * replicate / ranks, rel=0.1)
        assert found["bytes after each part"] == [shard] * parts


def test_held_out_loss_is_that_of_one_process(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """Also if the rows do not divide evenly, or are fewer than the ranks."""
    cases = [(1, 2), (5, 2), (8, 1)]
    (expected,) = jobs.run(1, work.evaluations, run_in("x"), cases)
    for mesh in ("context-2", "shard-4", "shard-2-context-2"):
        ranks, sizes = MESHES[mesh]
        for found in jobs.run(ranks, work.evaluations, run_in("x", **sizes), cases):
            for got, wanted in zip(found, expected, strict=True):
                assert got["tokens"] == wanted["tokens"], mesh
                assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-9), mesh
                for kept in ("loss_by_position", "row_losses", "row_targets"):
                    values = (np.array(one[kept], dtype=float) for one in (got, wanted))
                    np.testing.assert_allclose(*values, rtol=1e-9, err_msg=mesh)


@pytest.mark.parametrize("mesh", ["replicate-2-shard-2", "shard-2-context-2"])
def test_muon_on_ranks_is_muon_on_one(jobs: Jobs, run_in: Callable[..., Run], exact: Exact, mesh: str) -> None:
    """Each rank orthogonalises its part of the matrices; the other ranks receive them."""
    ranks, sizes = MESHES[mesh]
    muon = OptimizerSettings(name="muon", learning_rate=1e-2)
    expected = exact(run_in("one", optimizer=muon))
    for (got,) in jobs.run(ranks, work.exact_steps, [run_in("many", optimizer=muon, **sizes)], 3):
        assert_same_steps(got, expected)


@given(st.integers(1, 64), st.integers(1, 8), st.one_of(st.none(), st.integers(1, 8)), st.integers(1, 8))
def test_mesh_sizes_multiply_to_the_world_or_are_refused(
    world: int, replicate: int, shard: int | None, context: int
) -> None:
    if world % (replicate * context) == 0 and shard in (None, world // (replicate * context)):
        sizes = MeshSizes.of(world, replicate, shard, context)
        assert math.prod((sizes.replicate, sizes.shard, sizes.context)) == world
    else:
        with pytest.raises(ValueError, match=rf"the number of ranks, {world}; got {replicate} × .* × {context}"):
            MeshSizes.of(world, replicate, shard, context)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicate": 3}, "ValueError: parallel.replicate × parallel.shard × parallel.context must be the number of "
                           "ranks, 2; got 3 × what is left × 1"),
        ({"batch_size": 3}, "ValueError: batch_size must be a multiple of the ranks that share its rows"),
        ({"sequence_length": 100_000}, "ValueError: a row takes sequence_length + 1 = 100001 tokens"),
        ({"init_from": "nowhere"}, "FileNotFoundError: nowhere must be a model's folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_does_not_fit_is_said_by_the_first_rank_and_ends_all(
    jobs: Jobs, run_in: Callable[..., Run], changes: dict[str, Any], message: str
) -> None:
    first, second = jobs.answers(2, work.train_run, run_in("x", **changes))
    assert first.error is not None and first.error.startswith(message)
    assert second.error == "SystemExit: 2"
    assert second.output == ""


def test_replicas_stay_the_same_where_their_sums_round_otherwise(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """With its own norm each replica would clip by its own factor, and the replicas would diverge."""
    first, *others = (found for (found,) in jobs.run(4, work.steps_of_replicas_that_round, [run_in("x", replicate=2)]))
    for other in others:
        assert other["curve"] == first["curve"]
        assert all(np.array_equal(value, first["parameters"][name]) for name, value in other["parameters"].items())


@pytest.mark.parametrize("rank", [0, 5])
def test_each_rank_says_what_its_device_lacks(
    run_in: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """With fewer GPUs than ranks, the first rank has its GPU and cannot report the error for the others."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: rank)
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 8)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=f"with {rank} CUDA devices; got 'cuda:{rank}'.*fewer processes"):
        train(run_in("x", device="cuda"))


def test_every_group_has_the_limit_of_the_run(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """PyTorch's default, 10 minutes for NCCL, would end a run before its watchdog writes stacks."""
    for limits in jobs.run(4, work.time_limits, run_in("x"), 77):
        assert len(limits) >= 5 and set(limits) == {77}


def test_settings_that_do_not_fit_are_refused(run_in: Callable[..., Run]) -> None:
    with pytest.raises(ValueError, match=r"number of ranks, 1; got 1 × 4 × 1.*torchrun"):
        train(run_in("x", shard=4))
    with pytest.raises(ValueError, match=r"multiple of 16; got 40. Try sequence_length=32"):
        run_in("x", context=2, sequence_length=40)
    with pytest.raises(ValueError, match="none or full"):
        run_in("x", compile=True, activation_checkpointing="selective")


def test_compiled_steps_on_context_ranks_are_those_of_plain_ones(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """Compare loss, gradient norm and every parameter after two steps, in float64, on both ranks."""
    model = replace(run_in("x").model, num_layers=1)
    plain = run_in("plain", context=2, model=model)
    runs = [replace(plain, activation_checkpointing="full")]
    expected = jobs.run(2, work.exact_steps, [plain], 2)
    for (want,), (got,) in zip(expected, jobs.run(2, compile_jobs.compiled_steps, runs, 2), strict=True):
        assert_same_steps(got, want)


def train_in_sessions(
    jobs: Jobs, one: Run, changing: Run, sessions: list[tuple[int, int | None, dict[str, int]]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train ``one`` on one rank, and ``changing`` in sessions of so many ranks, until a step, in a mesh.

    Return the results of both; their losses are equal but for rounding.
    """
    (expected,) = jobs.run(1, work.train_run, one)
    for ranks, end, parallel in sessions:
        run = replace(changing, parallel=ParallelSettings(**parallel))
        results = jobs.run(ranks, work.resumed_run, run, ranks - 1, end)
        assert {result["step"] for result in results} == {end or one.steps}
    np.testing.assert_allclose(losses(changing), losses(one), rtol=1e-5)
    found, wanted = results[-1]["evaluation"], expected["evaluation"]
    assert found["tokens"] == wanted["tokens"] and found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    return expected, results[0]


def test_one_rank_then_four_then_two(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """SIGTERM ends each session; the schedule is that of the whole run.

    Lanes are rows of the whole batch, so each session holds its part of those that the one before saved.
    """
    small = run_in("one", checkpoint=CheckpointSettings(every=7, keep=9))
    one = replace(small, data=replace(small.data, carry_state=True), gradient_accumulation_steps=2)
    changing = replace(one, output=str(one.folder.parent / "changing"))
    sessions = [(1, 4, {}), (4, 9, {"context": 2}), (2, 14, {"context": 2}), (4, None, {"replicate": 2})]
    train_in_sessions(jobs, one, changing, sessions)
    assert saved_steps(changing) == [4, 7, 9, 14, 20]


def test_a_llama_on_two_ranks_then_one_then_four(jobs: Jobs, run_in: Callable[..., Run], tmp_path: Path) -> None:
    """Other numbers of ranks resume from sharded checkpoints, and the joined model is the trained one."""
    model, checkpoint = model_of("llama"), CheckpointSettings(every=7, keep=9)
    one, changing = run_in("one", model=model, steps=12), run_in("many", model=model, steps=12, checkpoint=checkpoint)
    sessions = [(2, 5, {"replicate": 2}), (1, 8, {}), (4, None, {"shard": 2, "replicate": 2})]
    expected, _ = train_in_sessions(jobs, one, changing, sessions)
    assert (changing.folder / "sample.txt").is_file()
    newest = latest_checkpoint(changing.checkpoints_folder)
    assert newest is not None
    write_model(newest, tmp_path / "joined")
    tokens = torch.arange(24).reshape(2, 12)
    folders = tmp_path / "joined", newest, Path(expected["checkpoint"])
    joined, at_end, alone = (load_any(folder)(tokens) for folder in folders)
    assert torch.equal(joined, at_end)
    torch.testing.assert_close(joined, alone, rtol=1e-3, atol=1e-3)


MERGES = [("r", "e"), ("re", "d"), ("o", "v")]


def some_texts(count: int) -> list[str]:
    """Return texts of very unequal lengths; some have no tokens, and one fills several batches."""
    choose = random.Random(count)
    texts = [words(choose.randrange(1, 30), number) for number in range(count)]
    for number in range(0, count, 5):
        texts[number] = "  "
    texts[1] = words(200)
    return texts


@pytest.mark.parametrize(("ranks", "count"), [(2, 7), (3, 2), (4, 60)])
def test_the_corpus_is_that_of_a_single_process(jobs: Jobs, ranks: int, count: int) -> None:
    """With two texts, some ranks have no share. Every text is tokenized once."""
    texts = some_texts(count)
    ((expected, all_texts),) = jobs.run(1, work.corpus_of_shares, [texts], [MERGES])
    results = jobs.run(ranks, work.corpus_of_shares, [texts] * ranks, [MERGES] * ranks)
    for got, _ in results:
        assert got.digest() == expected.digest() and got.tokens.dtype == expected.tokens.dtype
        for name in ("offsets", "lengths"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    assert all_texts == count == sum(tokenized for _, tokenized in results)


def test_ranks_that_read_other_texts_are_refused(jobs: Jobs) -> None:
    """The second rank's texts have the same lengths. Texts without tokens are refused too."""
    texts, merges = some_texts(7), [MERGES, MERGES]
    same, blank = "all ranks must read the same texts", "must hold at least one document with text; got none"
    for second, its_merges, said in (
        ([*texts[:-1], texts[-1].swapcase()], merges, same), (texts, [MERGES, MERGES[:2]], same), ([], merges, blank)
    ):  # fmt: skip
        given = [texts, second] if second else [["  ", " "]] * 2
        first, other = jobs.answers(2, work.corpus_of_shares, given, its_merges)
        assert first.error is not None and first.error.startswith("ValueError: ") and said in first.error
        assert other.error == "SystemExit: 2"


def test_a_mixture_with_held_out_texts_has_the_rows_of_a_single_process(
    jobs: Jobs, run_in: Callable[..., Run], tmp_path: Path
) -> None:
    sources = []
    for number, name in enumerate(("a", "b", "held-out")):
        (tmp_path / name).mkdir()
        sources.append(as_lines([words(60, 100 * number + text) for text in range(30)], tmp_path / name))
    data = DataSettings(sources=(f"{sources[0]}=0.7", f"{sources[1]}=0.3"), validation=sources[2])
    run = run_in("x", data=data)
    (whole,) = jobs.run(1, work.rows_seen, run, 4)
    seen = jobs.run(2, work.rows_seen, run, 4)
    for step, (_, rows) in enumerate(whole):
        parts = [steps[step] for steps in seen]
        assert sorted(rows) == sorted(row for _, part in parts for row in part)
