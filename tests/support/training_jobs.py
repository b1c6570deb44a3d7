"""Functions that ranks run in the tests of parallel training; processes import them by name."""

import contextlib
import errno
import gc
import os
import resource
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support.corpora import random_batch, write_tokenizer
from support.whole_runs import plain_report, stop_after
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gecko.data import Batch, TokenizedCorpus, Tokenizer, load_tokenizer, packing
from gecko.data.packing import CorpusShare
from gecko.io import checkpoints
from gecko.models import LanguageModel, build_model, meta_model
from gecko.parallel.mesh import MeshSizes, Ranks, connected, launched
from gecko.parallel.sharding import empty_sharded_model, fill, whole
from gecko.train import Run, train
from gecko.train.capture import CapturedGradients
from gecko.train.checkpoints import CachedPlanner, Checkpointer
from gecko.train.data import Prefetcher, whole_corpus
from gecko.train.evaluate import HeldOut, evaluate
from gecko.train.optimizer import build_optimizer
from gecko.train.step import Step, compute_gradients, split_batch
from gecko.train.trainer import Trainer

CPU = torch.device("cpu")


def train_run(run: Run, resume: bool = False, report: Callable[..., Path] = plain_report) -> dict[str, Any]:
    """Run training with this report and return its result as plain values."""
    with warnings.catch_warnings(record=True) as caught, mock.patch("gecko.train.finish.write_report", report):
        warnings.simplefilter("always")
        result = train(run, resume=resume)
    said = [str(warning.message) for warning in caught]
    return {
        "step": result.step,
        "evaluation": None if result.evaluation is None else asdict(result.evaluation),
        "checkpoint": result.checkpoint,
        "warnings": said,
    }


def rows_seen(run: Run, steps: int) -> list[tuple[int, list[Any]]]:
    """Return this rank's index among the data ranks, and the tokens that it gets in the first ``steps`` steps."""

    from gecko.train.data import load_data

    with ranks_of(run) as ranks:
        batches = Prefetcher(run, load_data(run, ranks).rows, ranks)
        return [(ranks.data_rank, batches.batch(step).tokens.tolist()) for step in range(steps)]


def corpus_of_shares(
    texts_of_ranks: list[list[str]], merges_of_ranks: list[list[tuple[str, str]]]
) -> tuple[TokenizedCorpus, int]:
    """Return the corpus that this rank has after all have tokenized their shares, and how many texts it tokenized.

    Batches are small, so that every rank has several.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Counting(load_tokenizer(write_tokenizer(Path(folder) / "tokenizer", merges_of_ranks[_rank()])))
    with (
        mock.patch.object(packing, "BATCH_CHARACTERS", 40),
        connected(MeshSizes.of(launched()[1], 1, None, 1), CPU, None) as ranks,
    ):
        share = CorpusShare.build(texts_of_ranks[ranks.rank], tokenizer, ranks.rank, ranks.world)
        return whole_corpus("texts", share, ranks), tokenizer.texts


class Counting:
    """Tokenizer that counts texts. Blanks have no tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.texts = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch(self, texts: list[str]) -> list[Any]:
        self.texts += len(texts)
        encoded = self._tokenizer.encode_batch(texts)
        return [ids if text.strip() else ids[:0] for text, ids in zip(texts, encoded, strict=True)]


@contextlib.contextmanager
def ranks_of(run: Run) -> Iterator[Ranks]:
    settings = run.parallel
    sizes = MeshSizes.of(launched()[1], settings.replicate, settings.shard, settings.context)
    with connected(sizes, CPU, None) as ranks:
        yield ranks


def time_limits(run: Run, seconds: int) -> list[float]:
    """Return the timeouts, in seconds, of all process groups of a job with two replicas of two shards."""
    with (
        connected(MeshSizes(2, 2, 1), CPU, timedelta(seconds=seconds)) as ranks,
        Checkpointer(run, ranks, Mock(), Mock()),
    ):
        assert ranks.sharding_mesh.ndim == 2
        groups = dist.distributed_c10d._world.pg_map
        return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def whole_batch(run: Run, seed: int) -> Batch:
    """Return random rows with very unequal numbers of targets."""
    ignored = torch.rand(run.batch_size, 1, generator=torch.Generator().manual_seed(seed + 1000))
    return random_batch(seed, run.batch_size, run.sequence_length, ignored)


def mine(batch: Batch, ranks: Ranks) -> Batch:
    """Return this rank's rows."""
    here = slice(ranks.data_rank, None, ranks.data_ranks)
    return Batch(batch.tokens[here], batch.targets[here], batch.segment_ids[here])


def model_of(run: Run, ranks: Ranks, *, dtype: torch.dtype) -> LanguageModel:
    torch.manual_seed(run.seed)
    full = build_model(run.model).to(dtype)
    if ranks.world == 1:
        model = full
    else:
        model = meta_model(run.model).to(dtype)
        bfloat16 = run.precision == "bfloat16"
        model = empty_sharded_model(model, ranks.sharding_mesh, CPU, bfloat16=bfloat16)
        fill(model, dict(full.named_parameters()) if ranks.is_main else None)
    model.activation_checkpointing = run.activation_checkpointing
    return model


def exact_steps(runs: list[Run], steps: int) -> list[dict[str, Any]]:
    """Return losses, gradient norms and parameters of ``steps`` optimizer steps of each run, in float64."""
    with ranks_of(runs[0]) as ranks:
        return [_exact_steps(run, steps, ranks) for run in runs]


def steps_of_replicas_that_round(runs: list[Run]) -> list[dict[str, Any]]:
    """Return ``exact_steps`` of two steps, in which the second replica computes another gradient norm."""
    norm = torch.nn.utils.get_total_norm

    def rounded(*arguments: Any) -> Any:
        return norm(*arguments) * (1 if _rank() < 2 else 1.01)

    with (
        mock.patch("torch.nn.utils.get_total_norm", rounded),
        mock.patch("torch.nn.utils.clip_grad._get_total_norm", rounded),
    ):
        return exact_steps(runs, 2)


def captured_steps(runs: list[Run], steps: int) -> list[list[dict[str, Any]]]:
    """Return the ``exact_steps`` of each run without documents, plain and captured; a graph's replay is made again."""
    with ranks_of(runs[0]) as ranks, mock.patch("gecko.train.capture.Recorder", Repeated):
        ways = False, True
        return [[_exact_steps(run, steps, ranks, documents=False, capture=way) for way in ways] for run in runs]


class Repeated:
    """Computes again in the place of a graph's replay."""

    def __init__(self, _: torch.device) -> None:
        pass

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        return compute(), compute


def _exact_steps(
    run: Run, steps: int, ranks: Ranks, *, documents: bool = True, capture: bool = False
) -> dict[str, Any]:
    model = model_of(run, ranks, dtype=torch.float64)
    captured = CapturedGradients(model, run.precision, ranks) if capture else None
    optimizer = build_optimizer(model, run.optimizer)
    training_step = Step(model, optimizer, 1.0, run.precision, ranks=ranks, captured=captured)
    curve = []
    for step in range(steps):
        batch = mine(whole_batch(run, step), ranks)
        batch = batch if documents else Batch(batch.tokens, batch.targets, torch.zeros_like(batch.segment_ids))
        parts = split_batch(batch, run.gradient_accumulation_steps, CPU, ranks)
        result = training_step.start(parts, 1e-2).wait()
        curve.append((result.loss, result.grad_norm))
    return {"curve": curve, "parameters": {n: whole(p).detach().numpy() for n, p in model.named_parameters()}}


def gathered_dtypes(run: Run) -> dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]]:
    """Return three dtypes per parameter: while its module runs, as stored, and of its gradient."""
    seen: dict[str, torch.dtype] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, *_: Any) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                seen[f"{name}.{key}".removeprefix(".")] = parameter.dtype

        return hook

    with ranks_of(run) as ranks:
        model = model_of(run, ranks, dtype=torch.float32)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(look(name))
        parts = split_batch(mine(whole_batch(run, 0), ranks), 1, CPU, ranks)
        compute_gradients(model, parts, run.precision, ranks)
        return {
            name: (seen.get(name, parameter.dtype), parameter.dtype, gradient(parameter).dtype)
            for name, parameter in model.named_parameters()
        }


def gradient(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def accumulated_gradients(run: Run) -> dict[str, Any]:
    """Return the bytes of gradients that this rank holds after each part of a step, and the number of exchanges."""
    held: list[int] = []
    backward = torch.autograd.backward
    with ranks_of(run) as ranks:
        model = model_of(run, ranks, dtype=torch.float32)
        parts = split_batch(mine(whole_batch(run, 0), ranks), run.gradient_accumulation_steps, CPU, ranks)

        def measured(loss: Tensor) -> None:
            backward(loss)
            held.append(_gradient_bytes(model))

        with (
            mock.patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as scatters,
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
            mock.patch("torch.autograd.backward", measured),
        ):
            compute_gradients(model, parts, run.precision, ranks)
    return {
        "reduce_scatters": scatters.call_count,
        "all_reduces": sum("group" in call.kwargs for call in sums.call_args_list),
        "bytes after each part": held,
        "bytes of the model": sum(parameter.numel() * 4 for parameter in model.parameters()),
    }


def _gradient_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of gradients in parameters and in FSDP's accumulators."""
    found = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    for module in model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            found += [p.unsharded_accumulated_grad for p in group.fsdp_params]
            found.append(group._partial_reduce_output)
    return sum(x.nbytes for x in found if x is not None)


def bytes_in_cycles(run: Run) -> int:
    """Return the bytes of tensors that steps leave in reference cycles, which are collected every 50 steps only."""
    with ranks_of(run) as ranks:
        model = model_of(run, ranks, dtype=torch.float32)
        training_step = Step(model, build_optimizer(model, run.optimizer), 1.0, run.precision, ranks=ranks)

        def step() -> None:
            parts = split_batch(mine(whole_batch(run, 0), ranks), run.gradient_accumulation_steps, CPU, ranks)
            training_step.start(parts, 1e-2).wait()

        step()  # what is made once is not counted
        gc.collect()
        gc.disable()
        try:
            step()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            return sum(x.nbytes for x in gc.garbage if isinstance(x, Tensor))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


def evaluations(run: Run, cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the held-out loss of a new model in float64 for each case (number of rows, rows at once)."""
    with ranks_of(run) as ranks:
        batch = whole_batch(run, 1)
        model = model_of(run, ranks, dtype=torch.float64)
        found = []
        for rows, at_once in cases:
            kept = Batch(batch.tokens[:rows], batch.targets[:rows], batch.segment_ids[:rows])
            found.append(asdict(evaluate(model, HeldOut(kept, at_once, torch.ones(rows)), "float32", ranks)))
        return found


def poisoned_run(run: Run, module: str, rank: int, steps: Container[int], factor: float) -> dict[str, Any]:
    """Run training with the output of a module multiplied by ``factor`` on one rank in some steps."""
    original = Trainer._step

    def multiply(_: torch.nn.Module, __: Any, out: Any) -> Any:
        return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

    def stepping(self: Trainer) -> None:
        hook = self.model.get_submodule(module).register_forward_hook(multiply)
        if self.next_step not in steps or _rank() != rank:
            hook.remove()
        original(self)
        hook.remove()

    with mock.patch.object(Trainer, "_step", stepping):
        return train_run(run)


@contextlib.contextmanager
def _slow_disk() -> Iterator[None]:
    """Make the first rank take 2 seconds to write its part of a checkpoint."""
    write = HuggingFaceStorageWriter.write_data

    def slowly(self: Any, *arguments: Any) -> Any:
        time.sleep(2 if _rank() == 0 else 0)
        return write(self, *arguments)

    with mock.patch.object(HuggingFaceStorageWriter, "write_data", slowly):
        yield


def poisoned_run_on_a_slow_disk(*arguments: Any) -> dict[str, Any]:
    with _slow_disk():
        return poisoned_run(*arguments)


def failing_run_on_a_slow_disk(run: Run, rank: int, step: int) -> dict[str, Any]:
    """Run training that fails on one rank, whose process then exits."""

    def fail() -> None:
        if _rank() == rank:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with _slow_disk(), _before_step(step, fail):
        try:
            return train_run(run)
        finally:
            if _rank() == rank:
                os._exit(3)


def run_on_a_full_disk(run: Run, rank: int, step: int) -> dict[str, Any]:
    """Run training in which one rank cannot write files larger than 10,000 bytes from the save of ``step`` on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    original = Checkpointer.save

    def saving(self: Checkpointer, model: Any, optimizer: Any, position: Any) -> None:
        if position.step == step and _rank() == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        original(self, model, optimizer, position)

    try:
        with mock.patch.object(Checkpointer, "save", saving):
            return train_run(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_with_an_unreadable_checkpoint(run: Run, rank: int, name: str) -> dict[str, Any]:
    """Resume a run whose checkpoint ``name`` cannot be read by one rank."""
    digest = checkpoints.sha256

    def reading(path: Path) -> str:
        if path.parts[-3:-1] == (name, "shards") and _rank() == rank:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return digest(path)

    with mock.patch.object(checkpoints, "sha256", reading):
        return train_run(run, resume=True)


@contextlib.contextmanager
def _before_step(step: int, action: Callable[[], None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(step, patch, action)
        yield


def _rank() -> int:
    return int(os.environ["RANK"])


def file_of(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def resumed_run(run: Run, rank: int, end: int | None) -> dict[str, Any]:
    """Resume a run; one rank gets SIGTERM, after which the run ends with step ``end``.

    A single process ends with the step in which the signal arrives, several with the step after it.
    """
    if end is None:
        return train_run(run, resume=True)
    with _before_step(
        end - (launched()[1] > 1), lambda: signal.raise_signal(signal.SIGTERM) if _rank() == rank else None
    ):
        return train_run(run, resume=True)


def logits_of_checkpoint(run: Run, checkpoint: Path, tokens: Tensor) -> Tensor:
    """Return the logits of a checkpoint, loaded into a model that is sharded over the ranks."""
    from gecko.train.state import read_tensors

    with ranks_of(run) as ranks:
        model = model_of(run, ranks, dtype=torch.float32)
        read_tensors(checkpoint, {name: parameter.detach() for name, parameter in model.named_parameters()})
        with torch.no_grad():
            logits: Tensor = model(tokens)[0]
            return logits.clone()


def run_with_a_lost_folder(run: Run, rank: int, method: str, name: str) -> dict[str, Any]:
    """Resume a run in which a method of Path fails on one rank for paths of this name."""
    original = getattr(Path, method)

    def looking(self: Path, *arguments: Any, **settings: Any) -> Any:
        if self.name == name and _rank() == rank:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))
        return original(self, *arguments, **settings)

    with mock.patch.object(Path, method, looking):
        return train_run(run, resume=True)


def resume_with_another_seed(run: Run, rank: int) -> dict[str, Any]:
    """Resume a run with another seed on one rank."""
    return train_run(replace(run, seed=7) if _rank() == rank else run, resume=True)


def run_on_nodes(run: Run, memories: list[Path], failed: int | None = None, resume: bool = False) -> dict[str, Any]:
    """Run training with one rank per node, whose memory is a folder; all ranks fail before step ``failed``."""
    checkpoint = replace(run.checkpoint, memory_folder=str(memories[_rank()]))

    def fail() -> None:
        raise RuntimeError("a node is lost")

    with mock.patch.dict(os.environ, LOCAL_RANK="0"), contextlib.ExitStack() as stack:
        if failed is not None:
            stack.enter_context(_before_step(failed, fail))
        return train_run(replace(run, checkpoint=checkpoint), resume)


def plans_of_saves(run: Run) -> tuple[list[bool], list[dict[str, int]]]:
    """Return, for each save of a run, whether this rank sent a plan, and the addresses of its copies."""
    sent: list[bool] = []
    memory: list[dict[str, int]] = []
    original = CachedPlanner.create_local_plan

    def planning(self: CachedPlanner) -> Any:
        plan = original(self)
        sent.append(plan.usable)
        local = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in self.state_dict.items()}
        memory.append({name: x.data_ptr() for name, x in local.items()})
        return plan

    with mock.patch.object(CachedPlanner, "create_local_plan", planning):
        train_run(run)
    return sent, memory
