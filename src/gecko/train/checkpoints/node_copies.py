"""Copies of the training state in the memory of the nodes, from which a job continues after it lost some of them.

Every ``checkpoint.memory_every`` steps each rank copies its shards to host memory, and a thread writes them to a file
in ``checkpoint.memory_folder``. That folder is in memory (tmpfs), so a file outlives the process of its rank, but not
its node. All replicas (HSDP) have the same shards. When torchrun has restarted the ranks, each takes its shards from
its own node, or receives them from a node of another replica. The job continues after the newest step of which every
shard is found, or from its last checkpoint if that is newer.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from gecko.io.files import parse_json
from gecko.models import LanguageModel
from gecko.parallel.mesh import Ranks, launched
from gecko.records import build
from gecko.train.checkpoints.checkpointer import host_stager
from gecko.train.checkpoints.content import TrainerState, random_state, set_random_state, training_tensors
from gecko.train.run import Run

_KEPT = 2
"""Copies that a rank keeps: when a node is lost, another rank may not have written the newest one yet."""
_RANDOM = "random/"
"""Start of the names of random states in a copy."""
_ABOUT = "gecko"
"""Name of the file's metadata: the identity of the run, step, shard and the trainer's state, as JSON."""


Key = tuple[int, int]
"""Step, and index of the shard: of the rank among those that share a replica."""


class NodeCopies:
    """Context that saves and restores the copies of one run.

    All ranks have one and call it together. Copies are read only if they have the same ``identity``: a text that is the
    same for sessions of the same run.
    """

    def __init__(self, run: Run, ranks: Ranks, identity: str) -> None:
        self._ranks, sizes = ranks, ranks.sizes
        self._shards = range(sizes.shard * sizes.context)
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

    @property
    def _shard(self) -> int:
        return self._ranks.rank % len(self._shards)

    def save(self, model: LanguageModel, optimizer: torch.optim.Optimizer, position: TrainerState) -> None:
        """Start to write this rank's shards. If that fails, say so and make no more copies on this rank."""
        self._wait()
        if self._failed:
            return
        staged = self._stager.stage(_tensors(model, optimizer))
        assert isinstance(staged, dict)
        self._writing = self._executor.submit(self._write, staged, position)

    def _write(self, tensors: dict[str, Tensor], position: TrainerState) -> None:
        about = {"identity": self._identity, "step": position.step, "shard": self._shard, "position": asdict(position)}
        path = self._folder / f"{self._name}step-{position.step:08d}.safetensors"
        partial = self._folder / f".partial-{path.name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, partial, metadata={_ABOUT: json.dumps(about)})
            partial.rename(path)
            self._kept = [*self._kept, path][-_KEPT:]
            self._remove_others()
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
        """Load the newest step in ``after`` + 1 .. ``until`` of which the nodes hold every shard.

        Return the state of the trainer; None if there is no such step, and then model and optimizer are unchanged.
        """
        held = self._held()
        nodes = self._ranks.gather({key: position for key, (_, position) in held.items()})
        steps = {step for here in nodes for step, _ in here if after < step <= until}
        whole = [step for step in steps if all(any((step, shard) in here for here in nodes) for shard in self._shards)]
        if not whole:
            return None
        step = max(whole)
        paths = {key: path for key, (path, _) in held.items()}
        self._kept = [path for key, path in paths.items() if key[0] == step and path.name.startswith(self._name)]
        values = self._values(step, paths, [set(here) for here in nodes], _tensors(model, optimizer))
        _load(values, model, optimizer)
        return build(TrainerState, next(fields for here in nodes for key, fields in here.items() if key[0] == step))

    def _values(
        self, step: int, paths: Mapping[Key, Path], nodes: Sequence[set[Key]], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return this rank's tensors of ``step``, from its node or from the first rank whose node has them."""
        for rank in range(self._ranks.world):
            key = step, rank % len(self._shards)
            if key in nodes[rank]:
                continue
            source = next(other for other, here in enumerate(nodes) if key in here)
            if self._ranks.rank == source:
                for _, tensor in sorted(load_file(paths[key]).items()):
                    if tensor.numel():  # the last ranks have no rows of a small tensor
                        dist.send(tensor, rank, group=self._ranks.control)
            if self._ranks.rank == rank:
                received = {name: torch.empty_like(like[name], device="cpu") for name in sorted(like)}
                for tensor in received.values():
                    if tensor.numel():
                        dist.recv(tensor, source, group=self._ranks.control)
        own = paths.get((step, self._shard))
        return received if own is None else load_file(own)

    def _held(self) -> dict[Key, tuple[Path, dict[str, Any]]]:
        """Return path and fields of the ``TrainerState`` of each sound copy of this run on this rank's node."""
        found = {}
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
        self._kept = []
        self._remove_others()

    def _remove_others(self) -> None:
        for path in set(self._folder.glob(f"*{self._name}*")) - set(self._kept):
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
    tensors = {**training_tensors(model, optimizer), **{_RANDOM + name: x for name, x in random_state().items()}}
    return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in tensors.items()}


@torch.no_grad()
def _load(values: Mapping[str, Tensor], model: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
    for name, tensor in _tensors(model, optimizer).items():
        tensor.copy_(values[name])
    random = {name.removeprefix(_RANDOM): x for name, x in values.items() if name.startswith(_RANDOM)}
    set_random_state(random, "a copy in the memory of the nodes")
