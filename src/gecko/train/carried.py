"""State that is carried from each step to the next: truncated backpropagation through time.

Lane i is row i of every batch. Its rows are consecutive in a text (``gecko.data.lanes``), so the state after a row is
the state before the lane's next row; gradients end at the row's start. A rank holds the states of the lanes whose rows
it reads. Ranks that share rows hold the same states.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from gecko.models import LanguageModel
from gecko.models.gecko import Gecko
from gecko.parallel.context import SharedRows
from gecko.parallel.mesh import Ranks
from gecko.state import GeckoState
from gecko.train.run import Run

_PREFIX = "lanes/"
"""Start of the names of states in a checkpoint. Names of parameters have no slash."""


class CarriedState:
    """States of this rank's lanes, for each accumulated part of a step.

    A skipped step empties them: what made the step bad may be in them. All tensors keep the dtypes of the empty state,
    so that a resumed run continues with the same numbers.
    """

    def __init__(self, run: Run, model: Gecko, ranks: Ranks) -> None:
        self._model, self._ranks, self._parts = model, ranks, run.gradient_accumulation_steps
        self._lanes = run.rows_per_rank(ranks.data_ranks)
        weight = model.embedding.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._empty = GeckoState.empty(model.config, self._lanes, dtype=dtype, device=weight.device)
        self.before = self._divided(self._empty)
        """States before the next step, for each part."""
        self._after: dict[int, GeckoState] = {}

    def loss(
        self, part: int, tokens: Tensor, targets: Tensor, segment_ids: Tensor, context: SharedRows | None = None
    ) -> Tensor:
        """Return the mean loss of the rows of a part, read after the states of its lanes; keep the states after it.

        ``segment_ids`` are on the CPU; ``context`` are the ranks that share the rows.
        """
        before = self.before[part]
        loss, state = self._model.loss_and_state(tokens, targets, segment_ids, before, context)
        state = state.map(torch.Tensor.detach)
        if context is not None:
            state = context.last_state(state, before.clock)
        dtypes = iter(x.dtype for x in self._empty.tensors().values())
        # A copy: the state may be a view of activations, which would stay in memory.
        self._after[part] = state.map(lambda x: x.to(next(dtypes), copy=True))
        return loss

    def advance(self) -> None:
        """Take the states after the last step as those before the next one."""
        self.before, self._after = [self._after[part] for part in range(self._parts)], {}

    def clear(self) -> None:
        """Take empty states as those before the next step, after a skipped one."""
        self.before, self._after = self._divided(self._empty), {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the states of all lanes by name, (lanes of the batch, ...); sharded if there are several ranks."""
        return {_PREFIX + name: self._shared(x) for name, x in GeckoState.stack(self.before).tensors().items()}

    def restore(self, read: Callable[[dict[str, Tensor]], None]) -> None:
        """Replace the states by those of a checkpoint, which ``read`` copies into tensors like ``tensors``."""
        tensors = {name: x.clone() for name, x in self.tensors().items()}
        read(tensors)
        found = iter(x.to_local() if isinstance(x, DTensor) else x for x in tensors.values())
        restored = self._empty.map(lambda x: next(found).to(x.device))
        restored.check_counts("the lanes of a checkpoint")
        self.before = self._divided(restored)

    def _divided(self, state: GeckoState) -> list[GeckoState]:
        return [state.rows(lanes.tolist()) for lanes in torch.arange(self._lanes, device="cpu").chunk(self._parts)]

    def _shared(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor of all lanes."""
        mesh = self._ranks.mesh
        if mesh is None:
            return x
        # The clock is on the CPU, where a mesh of GPUs has no tensors.
        return DTensor.from_local(x.to(mesh.device_type), mesh, [Shard(0), Shard(0), Replicate()], run_check=False)


def carried_state(run: Run, model: LanguageModel, ranks: Ranks) -> CarriedState | None:
    """Return the state that the run carries, or None if it carries none."""
    return CarriedState(run, model, ranks) if run.data.carry_state and isinstance(model, Gecko) else None
