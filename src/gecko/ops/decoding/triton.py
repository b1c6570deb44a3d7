"""One token of several sequences through a whole network on a GPU: ten launches a layer, captured as one graph.

Everything that a step reads and writes has a fixed address: weights, states in their slots, activations, tokens,
positions. Tokens and positions are on the device, so a step depends on nothing of the host. The list of launches is
made once per number of rows. The first step of that number runs them one by one, which compiles their kernels; then
they are captured as a CUDA graph, which later steps replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, tile
from gecko.ops.chunk_attention.triton_layout import operand
from gecko.ops.decoding import Record, Weights
from gecko.ops.decoding.triton_mixer import enter_kernel, heads_kernel, mix_kernel
from gecko.ops.decoding.triton_products import gated_kernel, norm_kernel, onto_kernel, project_kernel
from gecko.ops.decoding.triton_rows import advance_kernel, average_kernel, choose_kernel, draw_kernel, embed_kernel
from gecko.ops.timestep_norm.triton import decay_arguments

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
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise ValueError(f"tokens must be ids in 0..{self._vocabulary - 1}; got {list(tokens)}.")
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


_ATTENTIONS = "sliding_chunk", "chunk", "sliding_window"
_GATES = "none", "attention", "sum"
_PARTS = "value", "gate", "query", "key", "memory_gate", "hidden"
_PROGRAMS = 256
"""Programs that fill a large GPU; tiles are halved until there are as many."""
_KEYS, _VALUES = 8192, 4096
"""Numbers of keys, and of values, in a tile of the ring."""


class Buffers:
    """Activations of all slots, float32, or of the dtype of the weights if they are the input of a product."""

    def __init__(self, record: Record, dtype: torch.dtype, device: torch.device) -> None:
        slots, heads, key_heads, key = (record[name] for name in ("rows", "heads", "key_heads", "key"))
        features, value, sinks = record["features"], heads * record["value"], record["sinks"]

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        self.token = empty(dtype=torch.int64)
        self.page = empty(dtype=torch.int64) if record["page_bytes"] else None
        self.position, self.start = empty(dtype=torch.int64), empty(dtype=torch.int64)
        self.temperature, self.seed = empty(), empty(dtype=torch.int64)
        self.x, self.mixed, self.averaged = empty(features), empty(features), empty(features)
        self.normal, self.normal_averaged = empty(features, dtype=dtype), empty(features, dtype=dtype)
        self.projected = empty(sum(_sizes(record["layer"][0]).values()))
        row = 2 * record["chunk"] + 16 * blocks(sinks, 16)  # of scores; wide loads begin at multiples of 16
        self.scores = empty(heads, row)
        self.out, self.hidden = empty(value, dtype=dtype), empty(record["hidden"], dtype=dtype)
        vocabulary = record["vocabulary"] if self.page is None else 0
        self.logits, choices = empty(vocabulary), blocks(vocabulary, 4 * _drawn(vocabulary))
        self.choice_scores, self.choices = empty(choices), empty(choices, dtype=torch.int32)
        self.read = empty(heads, key)
        self.share, self.rho, self.kept = (empty(key_heads, key) for _ in range(3))
        self.entering = empty(key_heads, key, key if record["memory"] else 0)


class Launches:
    """Makes the launches of a network, whose tensors are on one device."""

    def __init__(self, record: Record, buffers: Buffers) -> None:
        self._net, self._buffers = record, buffers
        betas = None if record["cumulative"] else [record["beta_mean"], record["beta_variance"]]
        self._decay = decay_arguments(betas)
        self._eps = {"eps": record["eps"]}
        self._pages = {"p_page": buffers.page, "page_bytes": record["page_bytes"]}
        self._projection = [_side_by_side(layer) for layer in record["layer"]]
        self._scale = [
            torch.cat([x["query_scale"], x["key_scale"]]) if record["separate"] else x["qk_scale"]
            for x in record["layer"]
        ]

    def step(self, rows: int) -> list[Launch]:
        """Return the launches of one step of ``rows`` rows: each reads its token and, unless states are in pages, draws
        the next one; the owner of pages has head and draw of its own."""
        net, a = self._net, self._buffers
        found = [self._embed(rows)]
        for layer, projection, scale in zip(net["layer"], self._projection, self._scale, strict=True):
            found += self._block(rows, layer, projection, scale)
        counts = {"p_position": a.position, "p_count": net["final_norm"].get("count"), **self._pages}
        found += [self._block_norm(rows, net["final_norm"]), Launch(advance_kernel, (rows,), counts, 1)]
        if a.page is None:
            found += [self._onto(rows, a.normal, net["head"], a.logits), *self.draw(rows, a.logits)]
        return found

    def draw(self, rows: int, logits: Tensor) -> list[Launch]:
        """Return the launches that choose a token of each row of ``logits`` (rows, V)."""
        a, choices = self._buffers, self._buffers.choices.shape[1]
        drawn = {"p_scores": a.choice_scores, "p_tokens": a.choices}
        return [
            Launch(draw_kernel, (rows, choices), {
                "p_logits": logits, "p_temperature": a.temperature, "p_seed": a.seed, "p_position": a.position,
                **drawn, "vocabulary": self._net["vocabulary"], "block": _drawn(self._net["vocabulary"]),
            }, 8),
            Launch(choose_kernel, (rows,), {
                **drawn, "p_token": a.token, "choices": choices, "width": tile(choices, 1),
            }, 1),
        ]  # fmt: skip

    def _embed(self, rows: int) -> Launch:
        net, a = self._net, self._buffers
        block, weight = min(1024, tile(net["features"])), net["embedding"].weight
        return Launch(embed_kernel, (rows, blocks(net["features"], block)), {
            "p_token": a.token, "p_embedding": weight, "p_x": a.x, "scale": net["embedding_scale"],
            "vocabulary": net["vocabulary"], "features": net["features"], "stride": weight.shape[1], "block": block,
        }, 4)  # fmt: skip

    def _block(
        self, rows: int, layer: Record, projection: tuple[Tensor | None, Tensor], scale: Tensor
    ) -> Iterator[Launch]:
        net, a = self._net, self._buffers
        two_hop, hidden = net["two_hop"], a.projected[:, -net["features"] :] if net["hidden_branch"] else None
        yield self._block_norm(rows, layer["norm"], layer if net["averages"] else None)
        if net["averages"]:
            yield self._norm(rows, a.averaged, layer["cema_norm"], None, a.normal_averaged)
        yield self._project(rows, layer, *projection)
        yield self._heads(rows, layer, scale)
        yield self._mix(rows, layer)
        if net["memory"]:
            yield self._enter(rows, layer)
        yield self._onto(rows, a.out, layer["to_output"], a.mixed, onto=a.x, more=hidden)
        yield self._norm(rows, a.mixed, layer["ffn_norm_scale"], layer["ffn_norm_shift"], a.normal)
        yield self._gated(rows, layer)
        yield self._onto(rows, a.hidden, layer["fc2"], a.x, factor=layer["ffn_scale"], onto=a.x if two_hop else a.mixed)

    def _block_norm(self, rows: int, norm: Record, layer: Record | None = None) -> Launch:
        """Return the launch of the norm of a block's or the head's input, and of the moving average of ``layer``."""
        net, a = self._net, self._buffers
        if net["steps_only"]:
            return self._norm(rows, a.x, norm["scale"], None, a.normal)
        size = net["features"] // net["groups"]
        width, modes = tile(size, 1), net["modes"]
        together = min(tile(net["groups"], 1), max(1, 64 // width))
        tables = None if layer is None else layer["cema_tables"]
        return Launch(average_kernel, (rows, blocks(net["groups"], together)), {
            "p_x": a.x, **{f"p_{name}": norm[name] for name in ("scale", "shift", "count", "mean", "variance")},
            "p_tables": tables, "p_skip": None if layer is None else layer["cema_skip"],
            "p_state": None if layer is None else layer["cema"], "p_normal": a.normal, "p_averaged": a.averaged,
            **self._decay, **self._eps, **self._pages, "features": net["features"], "groups": net["groups"],
            "size": size, "width": width, "together": together, "modes": modes, "modes_width": tile(modes, 1),
            "table_row": 0 if tables is None else tables.shape[-1],
        }, 4)  # fmt: skip

    def _norm(self, rows: int, x: Tensor, scale: Tensor, shift: Tensor | None, y: Tensor) -> Launch:
        net = self._net
        features, groups = net["features"], net["norm_groups"]
        return Launch(norm_kernel, (rows,), {
            "p_x": x, "p_scale": scale, "p_shift": shift, "p_y": y, **self._eps, "features": features,
            "groups": groups, "size": features // groups, "width": tile(features // groups, 1),
            "together": tile(groups, 1), "centered": shift is not None,
        }, 8)  # fmt: skip

    def _project(self, rows: int, layer: Record, scale: Tensor | None, bias: Tensor) -> Launch:
        a, net, parts, outputs = self._buffers, self._net, _parts(layer), _sizes(layer)
        first = layer["to_value"]  # stands in for parts that are not there
        sizes = _tiles(rows, len(bias), first, a.normal)
        tiles = sum(blocks(size, sizes["out"]) for size in outputs.values())
        return Launch(project_kernel, (tiles, blocks(rows, sizes["many"])), {
            "p_normal": a.normal, "p_averaged": a.normal_averaged if net["averages"] else a.normal,
            **{f"p_{name}": (one or first).weight for name, one in parts.items()},
            "p_scale": scale, "p_bias": bias, "p_y": a.projected, "rows": rows, **outputs,
            "silu_values": bool(net["silu_values"]), "inputs": net["features"], **sizes,
        }, 4, 4)  # fmt: skip

    def _both(self) -> dict[str, Any]:
        """Return the arguments that all kernels of the mixer take."""
        net, a = self._net, self._buffers
        return {
            "p_position": a.position, "p_start": a.start, "key_heads": net["key_heads"], "key": net["key"],
            "chunk": net["chunk"], "attention": _ATTENTIONS[net["attention"]], **self._pages,
        }  # fmt: skip

    def _of_heads(self) -> dict[str, Any]:
        """Return the arguments of those with a program for each head of queries."""
        net, a = self._net, self._buffers
        return {
            **self._both(), "p_projected": a.projected, "p_scores": a.scores, "p_read": a.read, "p_share": a.share,
            "projected": a.projected.shape[1], "heads": net["heads"], "sinks": net["sinks"],
            "score_row": a.scores.shape[2],
        }  # fmt: skip

    def _heads(self, rows: int, layer: Record, scale: Tensor) -> Launch:
        net, a = self._net, self._buffers
        width, chunk = tile(net["key"]), net["chunk"]
        slots, sums = min(tile(chunk), max(16, _KEYS // width)), 8
        tasks = 2 * blocks(chunk, slots) + bool(net["sinks"]) + (blocks(net["key"], sums) if net["memory"] else 0)
        previous, current = layer.get("previous", {}), layer.get("current", {})
        return Launch(heads_kernel, (rows, net["heads"], tasks), {
            **self._of_heads(), "p_scale": scale, "p_shift": layer.get("qk_shift"), "p_phases": net["phases"],
            "p_count": layer["norm"].get("count"), "p_keys": layer["keys"], "p_sinks": layer.get("sink_keys"),
            "p_normaliser": layer.get("normaliser"), "p_previous_weight": previous.get("weight"),
            "p_previous_keys": previous.get("key_sum"), "p_previous_resets": layer.get("previous_resets"),
            "p_weight": current.get("weight"), "p_key_sum": current.get("key_sum"), "p_rho": a.rho, "p_kept": a.kept,
            "p_entering": a.entering, **self._eps, "before": _before(layer, "query"), "width": width,
            "rope_heads": net["rope_heads"], "separate": bool(net["separate"]), "normal": bool(net["unit_queries"]),
            "slots": slots, "sink_slots": min(slots, tile(net["sinks"], 1)), "rows": sums,
        }, 4)  # fmt: skip

    def _mix(self, rows: int, layer: Record) -> Launch:
        net, value = self._net, self._net["value"]
        columns = min(128, tile(value))
        while columns > 16 and rows * net["heads"] * blocks(value, columns) < _PROGRAMS:
            columns //= 2
        slots, channels = min(tile(2 * net["chunk"]), _VALUES // columns), net["memory_gate_channels"]
        gate = "sum" if net["gate"] and channels else _GATES[net["gate"]]
        return Launch(mix_kernel, (rows, net["heads"], blocks(value, columns)), {
            **self._of_heads(), "p_values": layer["values"], "p_sinks": layer.get("sink_values"),
            "p_memory": layer.get("memory"), "p_factor": layer["memory_factor"],
            "p_value_sum": layer.get("current", {}).get("value_sum"), "p_out": self._buffers.out, "value": value,
            "gate": gate, "channels": channels, "before": _before(layer, "memory_gate"), "slots": slots,
            "scored": min(4096, tile(2 * net["chunk"] + net["sinks"])),
            "sink_slots": min(slots, tile(net["sinks"], 1)), "columns": columns,
            "rows": min(tile(net["key"]), (2048 if columns > 32 else 4096) // columns),
        }, 8)  # fmt: skip

    def _enter(self, rows: int, layer: Record) -> Launch:
        net, a, value = self._net, self._buffers, self._net["value"]
        width, columns = tile(net["key"]), min(32, tile(value))
        tiles = min(blocks(value, columns), blocks(2 * _PROGRAMS, rows * net["key_heads"]))
        return Launch(enter_kernel, (rows, net["key_heads"], tiles), {
            **self._both(), "p_memory": layer["memory"], "p_previous_values": layer["previous"]["value_sum"],
            "p_previous_resets": layer["previous_resets"], "p_value_sum": layer["current"]["value_sum"],
            "p_rho": a.rho, "p_kept": a.kept, "p_entering": a.entering, "value": value, "width": width,
            "rows": min(width, 32), "columns": columns,
        }, 8)  # fmt: skip

    def _gated(self, rows: int, layer: Record) -> Launch:
        net, a, up = self._net, self._buffers, layer.get("fc3")
        sizes = _tiles(rows, net["hidden"], layer["fc1"], a.normal, 1 if up is None else 2)
        return Launch(gated_kernel, (blocks(net["hidden"], sizes["out"]), blocks(rows, sizes["many"])), {
            "p_x": a.normal, "p_gate": layer["fc1"].weight, "p_gate_scale": layer["fc1"].scale,
            "p_up": None if up is None else up.weight, "p_up_scale": None if up is None else up.scale,
            "p_y": a.hidden, "rows": rows, "outputs": net["hidden"], "inputs": net["features"], **sizes,
        }, 4, 4)  # fmt: skip

    def _onto(
        self, rows: int, x: Tensor, weights: Weights, y: Tensor, *, factor: Tensor | None = None,
        onto: Tensor | None = None, more: Tensor | None = None,
    ) -> Launch:  # fmt: skip
        outputs = len(weights.weight)
        sizes = _tiles(rows, outputs, weights, x)
        return Launch(onto_kernel, (blocks(outputs, sizes["out"]), blocks(rows, sizes["many"])), {
            "p_x": x, "p_weight": weights.weight, "p_scale": weights.scale, "p_factor": factor, "p_onto": onto,
            "p_more": more, "p_y": y, "rows": rows, "more_stride": 0 if more is None else more.stride(0),
            "outputs": outputs, "inputs": x.shape[1], **sizes,
        }, 4, 4)  # fmt: skip


def _drawn(vocabulary: int) -> int:
    """Return a quarter of the tokens among which a program of ``draw_kernel`` chooses."""
    return min(1024, tile(vocabulary))


def _tiles(rows: int, outputs: int, weights: Weights, x: Tensor, matrices: int = 1) -> dict[str, Any]:
    """Return rows, outputs and inputs of a tile of a product with ``x``, the numbers in a row of the weights, and the
    dtype of both factors. A program reads tiles of that many ``matrices``."""
    narrow = weights.weight.dtype != torch.float32
    if rows == 1:
        many, out, inner = 1, 4, 2048 if narrow and weights.inputs <= 2048 else 1024
    else:
        many = min(64, tile(rows))
        out = 64 if many > 16 else 32
        while out > 16 and blocks(outputs, out) < _PROGRAMS:
            out //= 2
        # Tiles of all stages, of x and of all matrices, fit in the 99 KB of small GPUs.
        inner = (128 if narrow else 64) // (matrices if out == 64 else 1)
        if narrow and out == 16 and many * matrices <= 32:
            # Few programs: each keeps up to 48 KB of weights in flight, or most of its rows.
            inner = 512 if weights.inputs > 1024 and many * matrices == 16 else 256
    inner = min(inner, tile(weights.inputs))
    return {"many": many, "out": out, "inner": inner, "stride": weights.weight.shape[1], "operand_type": operand(x)}


def _parts(layer: Record) -> dict[str, Weights | None]:
    """Return the projections of the mixer in the order of their outputs; None where it has not that one."""
    parts = {name: layer.get(f"to_{name}") for name in _PARTS}
    return parts | {"query": parts["query"] or layer["to_shared"]}


def _sizes(layer: Record) -> dict[str, int]:
    return {name: 0 if one is None else len(one.weight) for name, one in _parts(layer).items()}


def _before(layer: Record, name: str) -> int:
    """Return the outputs before those of a projection."""
    return sum(list(_sizes(layer).values())[: _PARTS.index(name)])


def _side_by_side(layer: Record) -> tuple[Tensor | None, Tensor]:
    """Return the scales, or None, and the biases of the projections of the mixer as one vector each."""
    there = [one for one in _parts(layer).values() if one is not None]
    scales = [one.scale for one in there if one.scale is not None]
    assert len(scales) in (0, len(there)), "the projections are of one kind"
    zeros = [one.weight.new_zeros(len(one.weight), dtype=torch.float32) for one in there]
    biases = [zero if one.bias is None else one.bias for one, zero in zip(there, zeros, strict=True)]
    return torch.cat(scales) if scales else None, torch.cat(biases)
