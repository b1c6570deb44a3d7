"""Tensors of a checkpoint: reading them in any form, and writing shards while training continues.

All saves share memory and a plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from gecko.io.checkpoints import SHARDS
from gecko.io.model_folder import stored_prefix
from gecko.io.tensors import FLOATS, check_finite, check_layout


def read_tensors(path: Path, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """Fill ``tensors``, which may be sharded in any way, from a checkpoint.

    All ranks call it together, or one rank with ``alone``. Raise ValueError if a tensor is missing, differs in shape or
    kind of dtype, or is not finite.
    """
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
    check_finite(path, {name: x.to_local() if isinstance(x, DTensor) else x for name, x in tensors.items()})


def _stored(metadata: Any, names: Collection[str]) -> dict[str, Tensor]:
    """Return tensors on ``meta`` like those that a checkpoint holds, of the first part's dtype or another part's.

    A tensor whose parts do not add up to it has one dimension.
    """
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


def host_stager(device: str) -> DefaultStager:
    """Return a stager, which copies tensors of a kind of device to host memory that it keeps for the next copy.

    For CUDA the memory is pinned, because a GPU copies to it several times as fast. The host waits for the copy: the
    next step of the optimizer changes the tensors.
    """
    on_gpu = device == "cuda" and torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
    )


class CachedPlanner(DefaultSavePlanner):
    """Planner of one run's saves, which have one plan: who writes which part of which tensor.

    The first save gathers and divides the ranks' plans. Later ones compare their own part with it and exchange nothing
    if it is the same.
    """

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        # PyTorch caches plans by the class. Another run in this process has other tensors or other ranks.
        self._cached_plans_key = f"{type(self).__name__}-{id(self)}"

    def forget(self) -> None:
        """Remove the plan from PyTorch's caches, which outlive this planner."""
        for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
            getattr(self, f"_cached_{name}", {}).pop(self._cached_plans_key, None)


class ShardWriter:
    """Writes the shards of all ranks of ``group``, one save at a time."""

    def __init__(self, device: str, group: dist.ProcessGroup) -> None:
        self._group, self._stager, self._planner = group, host_stager(device), CachedPlanner()

    def start(self, checkpoint: Path, tensors: dict[str, Tensor]) -> Future[Any]:
        """Copy ``tensors`` to host memory and start to write them to ``checkpoint``. All ranks call it together.

        The memory is that of the last save, which must have ended.
        """
        writer = HuggingFaceStorageWriter(str(checkpoint / SHARDS), save_distributed=True)
        written = async_save(
            tensors, storage_writer=writer, planner=self._planner, process_group=self._group, async_stager=self._stager
        )
        assert isinstance(written, Future)
        return written

    def close(self) -> None:
        """Free the memory; the last save must have ended."""
        self._stager.close()
        self._planner.forget()
