"""State of a run: what a checkpoint holds, how it is written and read, and its copies in the memory of nodes.

A copy is a file in ``checkpoint.memory_folder``, which is in memory (tmpfs), so it outlives the process of its rank,
but not its node. All replicas (HSDP) have the same shards. When torchrun has restarted the ranks, each takes its shards
from its own node, or receives them from a node of another replica. The job continues after the newest step of which
every shard is found, or from its last checkpoint if that is newer.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from gecko.data.tokenizers import TEMPLATE, ByteTokenizer, copy_tokenizer, holds_tokenizer, write_byte_tokenizer
from gecko.io.checkpoints import SHARDS
from gecko.io.files import parse_json, parse_object, whole_file
from gecko.io.model_folder import CONFIG, FLOATS, REMEDY, check_finite, check_layout, reading, stored_prefix
from gecko.models import LanguageModel
from gecko.parallel.mesh import Ranks, launched
from gecko.parallel.sharding import local
from gecko.records import CountFromZero, NotNegative, build, check
from gecko.train.metrics import DataRecord
from gecko.train.model import check_base, has_adapters, merged, save_adapters
from gecko.train.optimizer import named_parameters, optimizer_tensors
from gecko.train.run import RECIPE, Run
from gecko.train.step import CarriedState

_OPTIMIZER, _RANDOM, _TRAINER = "optimizer.safetensors", "random.safetensors", "trainer.json"
_LANES = "lanes.safetensors"


@dataclass(frozen=True)
class TrainerState:
    """Progress of a run, saved in each checkpoint."""

    step: CountFromZero = 0
    """Number of finished steps, including skipped ones; also the index of the next batch."""
    seconds: NotNegative = 0.0
    """Time spent in steps and evaluations so far, over all sessions."""
    elapsed: float = 0.0
    """Time of all sessions until this step, with everything that they did; 0 if an early version wrote it."""
    skipped: CountFromZero = 0
    """Number of skipped steps."""
    consecutive_skips: CountFromZero = 0
    """Number of steps skipped since the last step that was not skipped."""
    recent_losses: tuple[float, ...] = ()
    """Losses of the last finite steps, from which ``SpikeRule`` computes mean and deviation."""
    recent_grad_norms: tuple[float, ...] = ()
    """Gradient norms of the same steps."""

    def __post_init__(self) -> None:
        check(self)
        if not all(map(math.isfinite, (*self.recent_losses, *self.recent_grad_norms))):
            raise ValueError(
                "recent losses and gradient norms must be finite; they are those of steps that were taken."
            )


def write_recipe(run: Run) -> None:
    """Write ``run`` to its folder, whole or not at all."""
    with whole_file(run.folder / RECIPE) as temporary:
        run.save(temporary)


def write_whole(
    folder: Path, run: Run, model: LanguageModel, optimizer: torch.optim.Optimizer, position: TrainerState,
    data: DataRecord, carried: CarriedState | None = None,
) -> None:  # fmt: skip
    """Write all files of a checkpoint from one process that holds the whole model."""
    if carried is not None:
        save_file(carried.tensors(), folder / _LANES)
    if has_adapters(model):
        merged(model).save(folder)
        save_adapters(model, folder)
    else:
        model.save(folder)
    save_file(optimizer_tensors(model, optimizer), folder / _OPTIMIZER)
    write_small_files(folder, run, position, random_state(), data)


def write_small_files(
    folder: Path, run: Run, position: TrainerState, random: Mapping[str, Tensor], data: DataRecord
) -> None:
    """Write the files that are not sharded: random and trainer state, data record, config, recipe and tokenizer."""
    data.save(folder)
    save_file(dict(random), folder / _RANDOM)
    (folder / _TRAINER).write_text(json.dumps(asdict(position), indent=2) + "\n", encoding="utf-8")
    run.model.save(folder / CONFIG)
    run.save(folder / RECIPE)
    write_tokenizer(run, folder)


def write_tokenizer(run: Run, folder: Path) -> None:
    """Write the files of the run's tokenizer and its chat template; those of bytes are for transformers."""
    own, template = run.tokenizer_folder, run.tokenizer_folder / TEMPLATE
    if holds_tokenizer(own):
        copy_tokenizer(str(own), folder)
        return
    if template.is_file():
        shutil.copyfile(template, folder / TEMPLATE)
    if run.data.tokenizer == ByteTokenizer.name:
        write_byte_tokenizer(folder, chat=template.is_file())


def training_tensors(model: LanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return parameters by name and optimizer state by ``parameter name/state name``; sharded if the model is."""
    parameters = {name: parameter.detach() for name, parameter in named_parameters(model)}
    return {**parameters, **optimizer_tensors(model, optimizer)}


def restore_snapshot(
    path: Path, model: LanguageModel, optimizer: torch.optim.Optimizer, carried: CarriedState | None = None
) -> TrainerState:
    """Load model, optimizer, carried states and random state of a verified checkpoint. All ranks call it together."""
    if has_adapters(model):
        check_base(model, path)
    read_tensors(path, training_tensors(model, optimizer))
    if carried is not None:
        carried.restore(partial(read_tensors, path))
    with reading(path / _RANDOM):
        set_random_state(load_file(path / _RANDOM), path / _RANDOM)
    return read_trainer_state(path)


def read_tensors(path: Path, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """Fill ``tensors``, which may be sharded in any way, from a checkpoint. All ranks call it together, or one with
    ``alone``. ValueError: a tensor is missing, differs in shape or kind of dtype, or is not finite."""
    shards = path / SHARDS
    if shards.is_dir():
        path = shards
    else:  # names of optimizer state, which have no prefix, contain a slash
        prefix = stored_prefix(path)
        tensors = {name if "/" in name else prefix + name: tensor for name, tensor in tensors.items()}
    reader = HuggingFaceStorageReader(str(path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        try:
            check_layout(path, _stored(reader.read_metadata(), tensors), tensors)
            load_distributed(tensors, storage_reader=reader, no_dist=alone)
        except (CheckpointException, SafetensorError, LookupError, TypeError, RuntimeError) as failure:
            cause = next(iter(getattr(failure, "failures", {}).values()), (failure, None))[0]
            raise ValueError(f"{path} must hold the tensors of this model and its optimizer; {cause}") from failure
    check_finite(path, {name: local(x) for name, x in tensors.items()})


def _stored(metadata: Any, names: Collection[str]) -> dict[str, Tensor]:
    """Return tensors on ``meta`` like those that a checkpoint holds, of the dtype of the first part, or of one that is
    not floating; a tensor whose parts do not add up to it has one dimension."""
    parts: dict[str, list[Any]] = {}
    for index, part in metadata.storage_data.items():
        parts.setdefault(index.fqn, []).append(part)
    found = {}
    for name in parts.keys() & names:
        size = metadata.state_dict_metadata[name].size
        elements = sum(part.shape.numel() for part in parts[name])
        dtype = next((part.dtype for part in parts[name] if part.dtype not in FLOATS), parts[name][0].dtype)
        found[name] = torch.empty(size if elements == size.numel() else (elements,), dtype=dtype, device="meta")
    return found


def read_trainer_state(path: Path) -> TrainerState:
    return parse_object(path / _TRAINER, "a trainer's state", partial(build, TrainerState))


def random_state() -> dict[str, Tensor]:
    on_gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **on_gpu}


def set_random_state(state: Mapping[str, Tensor], source: object) -> None:
    """Restore PyTorch's CPU generator and, if saved, the current GPU's; ValueError names ``source`` if that fails."""
    try:
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available() and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{source} must hold the state of PyTorch's random numbers as cpu; {error}. {REMEDY}"
        ) from error


def host_stager(device: str) -> DefaultStager:
    """Return a stager, which copies tensors of a kind of device to host memory that it keeps for the next copy."""
    pinned = device == "cuda" and torch.cuda.is_available()  # a GPU copies to pinned memory several times as fast
    # The host waits for the copy: the next step of the optimizer changes the tensors.
    shared = {"use_shared_memory": False, "use_async_staging": False}
    return DefaultStager(StagingOptions(pinned, **shared, use_non_blocking_copy=pinned))


_KEPT = 2
"""Copies that a rank keeps: when a node is lost, another rank may not have written the newest one yet."""
_RANDOM_PREFIX = "random/"
"""Start of the names of random states in a copy."""
_ABOUT = "gecko"
"""Name of the file's metadata: the identity of the run, step, shard and the trainer's state, as JSON."""

Held = dict[tuple[int, int], tuple[Path, dict[str, Any]]]
"""File and fields of ``TrainerState`` by step and index of the shard: of the rank among those that share a replica."""


class NodeCopies:
    """Context that saves the state of a run in the memory of nodes, and restores it. All ranks call it together.

    Copies are read only if they have the same ``identity``: a text that is the same for sessions of the same run.
    """

    def __init__(self, run: Run, ranks: Ranks, identity: str) -> None:
        self._ranks, sizes = ranks, ranks.sizes
        self._shards = sizes.shard * sizes.context
        self._shard = ranks.rank % self._shards
        self._identity = hashlib.sha256(f"{identity} {sizes}".encode()).hexdigest()
        place = hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:16]
        self._folder = Path(run.checkpoint.memory_folder) / f"gecko-{place}"
        self._name = f"local-{launched()[2]}-"
        """Start of this rank's file names. The number of a rank may change in a restart, that on its node does not."""
        self._kept: list[Path] = []
        self._stager = host_stager("cpu" if ranks.mesh is None else ranks.mesh.device_type)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._writing: Future[None] | None = None
        self._failed = False

    def save(self, model: LanguageModel, optimizer: torch.optim.Optimizer, position: TrainerState) -> None:
        """Start to write this rank's shards. If that fails, say so and make no more copies on this rank."""
        self._wait()
        if not self._failed:
            staged = self._stager.stage(_tensors(model, optimizer))
            self._writing = self._executor.submit(self._write, staged, position)

    def _write(self, tensors: Any, position: TrainerState) -> None:
        about = {"identity": self._identity, "step": position.step, "shard": self._shard, "position": asdict(position)}
        path = self._folder / f"{self._name}step-{position.step:08d}.safetensors"
        partial = self._folder / f".partial-{path.name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, partial, metadata={_ABOUT: json.dumps(about)})
            partial.rename(path)
            self._keep([*self._kept, path][-_KEPT:])
        except (OSError, SafetensorError) as error:
            self._failed = True
            print(
                f"rank {self._ranks.rank}: the copy of step {position.step} could not be written to {self._folder} "
                f"({error}), and no more are made. Free memory there, or set checkpoint.memory_every=none.",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def restore(
        self, model: LanguageModel, optimizer: torch.optim.Optimizer, after: int, until: int
    ) -> TrainerState | None:
        """Load the newest step in ``after`` + 1 .. ``until`` of which the nodes hold every shard, and return the state
        of the trainer; None if there is no such step, and nothing has changed."""
        held = self._held()
        nodes = self._ranks.gather(held)
        everywhere = {key: position for here in nodes for key, (_, position) in here.items()}
        steps = {step for step, _ in everywhere if after < step <= until}
        whole = [step for step in steps if all((step, shard) in everywhere for shard in range(self._shards))]
        if not whole:
            return None
        step = max(whole)
        self._kept = [path for (of, _), (path, _) in held.items() if of == step and path.name.startswith(self._name)]
        like = _tensors(model, optimizer)
        values = self._values(step, held, nodes, like)
        with torch.no_grad():
            for name, tensor in like.items():
                tensor.copy_(values[name])
        random = {name.removeprefix(_RANDOM_PREFIX): x for name, x in values.items() if name.startswith(_RANDOM_PREFIX)}
        set_random_state(random, "a copy in the memory of the nodes")
        return build(TrainerState, everywhere[step, 0])

    def _values(self, step: int, held: Held, nodes: Sequence[Held], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's tensors of ``step``, from its node or from the first rank whose node has them."""
        for rank in range(self._ranks.world):
            key = step, rank % self._shards
            if key in nodes[rank]:
                continue
            source = next(other for other, here in enumerate(nodes) if key in here)
            if self._ranks.rank == source:
                for _, tensor in sorted(load_file(held[key][0]).items()):
                    if tensor.numel():  # the last ranks have no rows of a small tensor
                        dist.send(tensor, rank, group=self._ranks.control)
            if self._ranks.rank == rank:
                received = {name: torch.empty_like(like[name], device="cpu") for name in sorted(like)}
                for tensor in received.values():
                    if tensor.numel():
                        dist.recv(tensor, source, group=self._ranks.control)
        own = held.get((step, self._shard))
        return received if own is None else load_file(own[0])

    def _held(self) -> Held:
        """Return the sound copies of this run on this rank's node."""
        found: Held = {}
        for path in sorted(self._folder.glob("local-*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    about = parse_json((file.metadata() or {}).get(_ABOUT, "{}"))
            except (OSError, SafetensorError, ValueError):
                continue  # another rank's, which is just being removed
            if about.get("identity") == self._identity:
                found[about["step"], about["shard"]] = path, about["position"]
        return found

    def clear(self) -> None:
        """Remove this rank's copies: their state is in a checkpoint, or must not be used again."""
        self._wait()
        self._keep([])

    def _keep(self, paths: list[Path]) -> None:
        """Remove all of this rank's copies but those in ``paths``."""
        self._kept = paths
        for path in set(self._folder.glob(f"*{self._name}*")) - set(paths):
            path.unlink(missing_ok=True)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def __enter__(self) -> NodeCopies:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()
        self._stager.close()


def _tensors(model: LanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return this rank's shards of parameters and optimizer state, and its random state."""
    tensors = {**training_tensors(model, optimizer), **{_RANDOM_PREFIX + name: x for name, x in random_state().items()}}
    return {name: local(x) for name, x in tensors.items()}
