"""One token of several sequences through a whole network on a GPU: ten launches a layer, captured as one graph.

Everything that a step reads and writes has a fixed address: weights, states in their slots, activations, tokens,
positions. Tokens and positions are on the device, so a step depends on nothing of the host. ``Launches`` makes the list
of launches of a number of rows. The first step of that number runs them one by one, which compiles their kernels; then
they are captured as a CUDA graph, which later steps replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import Launch
from gecko.ops.decoding import Record, Weights
from gecko.ops.decoding.triton_step import Buffers, Launches

GRAPHS = 64
"""Most numbers of rows whose steps are kept as graphs; steps of others are launched one by one."""


class Network:
    """A network with the states of its sequences on one GPU.

    Args:
        record: the fields of the network; "layer" is a list of those of the layers.
        clock: (slots,) int64 on the host, tokens that each sequence has read, and the position at which its document
            started. The owner counts the steps there too; another change is copied to the device before a step.
    """

    def __init__(self, record: Record, clock: tuple[Tensor, Tensor]) -> None:
        embedding = record["embedding"].weight
        self._device, self._clock = embedding.device, clock
        record = _on(self._device, record, paged=record["page_bytes"] > 0)
        self._vocabulary = record["vocabulary"]
        with torch.inference_mode(False):  # tensors of that mode can only be changed in it
            self.buffers = Buffers(record, embedding.dtype, self._device)
        self._launches = Launches(record, self.buffers)
        self._steps: dict[int, list[Launch]] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._copied: dict[str, list[Any]] = {}

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token of each of the first sequences and return the logits of the next ones, (rows, vocabulary).

        The states in the slots are changed in place. The next call overwrites the logits. Tokens that ``draw`` returned
        are on the device already.

        Raises:
            ValueError: a token is not in the vocabulary.
        """
        self._check(tokens)
        rows = len(tokens)
        self._copy("token", list(tokens))
        self._copy_clock(rows)
        self.replay(rows)
        return self.buffers.logits[:rows]

    def hidden(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Read one token of each of some sequences and return the input of the head, (rows, D) in the weights' dtype.

        The states in the pages ``slots``, all different, are changed in place. The next call overwrites the result.
        The host reads and allocates nothing, so it does not see whether a token is in the vocabulary: one that is not
        makes the result of its row, and its state, NaN.

        Args:
            tokens, slots: (rows,) integers on the device.
            positions: (rows,) tokens that each sequence has read, in one document. The clock of the network is not
                used.
        """
        buffers, rows = self.buffers, len(tokens)
        assert buffers.page is not None, "the states must be in pages"
        for buffer, values in ((buffers.token, tokens), (buffers.page, slots), (buffers.position, positions)):
            buffer[:rows].copy_(values)
        self._replay(rows)
        return buffers.normal[:rows]

    def replay(self, rows: int) -> None:
        """Read the tokens on the device, one of each of the first sequences, and draw the next ones there.

        The host only launches: it reads nothing, copies nothing and allocates nothing.
        """
        self._replay(rows)
        self._copied.pop("token", None)
        for position in range(rows):
            self._copied["position"][position] += 1

    def draw(self, logits: Tensor, temperatures: Sequence[float], seeds: Sequence[int]) -> list[int]:
        """Return one token per row of ``logits`` (rows, vocabulary), or −1 for a row with a logit that is not finite.

        The step has drawn already if ``logits`` are those that it returned, and the options are those of the last draw.

        Args:
            temperatures: 0 takes the first of the most likely tokens.
            seeds: of each row; a row's random numbers are a function of its seed and position.
        """
        rows = len(logits)
        # The numbers that a device of float32 and int64 keeps.
        changed = self._copy("temperature", list(temperatures)) | self._copy("seed", [_signed(seed) for seed in seeds])
        changed |= self._copy_clock(rows)
        if changed or logits.data_ptr() != self.buffers.logits.data_ptr():
            for launch in self._launches.draw(rows, logits.float().contiguous()):
                launch.run()
            self._copied.pop("token", None)
        if "token" not in self._copied:
            self._copied["token"] = self.buffers.token[:rows].tolist()
        return list(self._copied["token"])

    def launches(self, rows: int) -> list[Launch]:
        """Return the launches of a step; they are the same at every position."""
        if rows not in self._steps:
            self._steps[rows] = self._launches.step(rows)
        return self._steps[rows]

    def _check(self, tokens: Sequence[int]) -> None:
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise ValueError(f"tokens must be ids in 0..{self._vocabulary - 1}; got {list(tokens)}.")

    def _replay(self, rows: int) -> None:
        """Run the launches of a step: one by one, and capture them, unless the interpreter runs them on the CPU; or as
        the graph that was captured."""
        if (graph := self._graphs.get(rows)) is not None:
            graph.replay()
            return
        for launch in self.launches(rows):
            launch.run()
        if self._device.type != "cpu" and len(self._graphs) < GRAPHS:
            graph = torch.cuda.CUDAGraph()
            # PyTorch's own stream of captures is on the device of the process's first capture.
            stream = torch.cuda.Stream(self._device)
            capture = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
            with torch.cuda.device(self._device), capture:
                for launch in self.launches(rows):
                    launch.run()
            self._graphs[rows] = graph

    def _copy_clock(self, rows: int) -> bool:
        position, start = (x[:rows].tolist() for x in self._clock)
        return self._copy("position", position) | self._copy("start", start)

    def _copy(self, name: str, values: list[Any]) -> bool:
        """Copy the values to the buffer of this name, unless it holds them. Return whether it did not."""
        if self._copied.get(name) == values:
            return False
        buffer = getattr(self.buffers, name)
        buffer[: len(values)].copy_(torch.tensor(values, dtype=buffer.dtype, device="cpu"))
        self._copied[name] = values
        return True


def _signed(seed: int) -> int:
    """Return the number of 64 bits as a signed one."""
    return (seed + 2**63) % 2**64 - 2**63


def _on(device: torch.device, value: Any, *, paged: bool) -> Any:
    """Return the record with its tensors on ``device``; those that are there are not copied."""
    if isinstance(value, Weights):
        return Weights(*(_on(device, x, paged=False) for x in value))
    if isinstance(value, Tensor):
        assert value.is_contiguous() or (paged and value[0].is_contiguous()), "kernels take contiguous tensors"
        return value.to(device)
    if isinstance(value, dict):
        return {name: _on(device, x, paged=paged) for name, x in value.items()}
    return [_on(device, x, paged=paged) for x in value] if isinstance(value, list) else value
