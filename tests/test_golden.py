"""Every golden file: values and gradients of the reference release (``golden/README.md``)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import gecko
from gecko.layers.gated_attention import MixerState
from gecko.models.gecko import from_weights
from gecko.ops.cema import CEMACoefficients, cema
from gecko.ops.chunk_attention import AttentionState, Pattern, chunk_attention
from gecko.ops.norms import group_layer_norm, group_rms_norm
from gecko.ops.rotary import rotary_frequencies, rotary_phases, rotate
from gecko.ops.timestep_norm import Statistics, TimestepNormState, timestep_norm
from gecko.ops.working_memory import WorkingMemoryState, working_memory
from gecko.segments import Clock, Segments

pytestmark = pytest.mark.usefixtures("poisoned")

FOLDER = Path(__file__).parent / "golden"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
F64 = torch.float64


def golden(kind: str) -> list[Any]:
    """Return the cases of a kind, as parameters of a test."""
    return [pytest.param(case, id=case["name"]) for case in MANIFEST["cases"] if case["kind"] == kind]


def load(case: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a case; floats are float64 and require gradients."""
    tensors = load_file(FOLDER / case["file"])
    return {k: x.double().requires_grad_() if x.is_floating_point() else x for k, x in tensors.items()}


def load_model(case: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> gecko.Gecko:
    state = {name[6:]: x.detach().to(dtype) for name, x in tensors.items() if name.startswith("state/")}
    return from_weights(*gecko.convert.from_reference(case["config"], state))


def segment_ids(case: Mapping[str, Any], tokens: Tensor) -> Tensor | None:
    return (tokens == MANIFEST["bos_id"]).cumsum(1) if case["multi_segments"] else None


def assert_near(actual: Tensor, expected: Tensor, name: str, tolerance: float = 1e-6) -> None:
    """Compare elementwise, relative to the largest number. The log of an empty sum is −1e30 here, there −∞."""
    expected, actual = expected.detach().clamp(min=-1e30), actual.detach().double()
    scale = max(1.0, expected[expected > -1e20].abs().max().item()) if (expected > -1e20).any() else 1.0
    torch.testing.assert_close(
        actual, expected.double(), rtol=tolerance, atol=tolerance * scale, msg=lambda text: f"{name}: {text}"
    )


def assert_gradient(actual: Tensor, expected: Tensor, name: str, tolerance: float = 1e-6) -> None:
    """Compare by the relative norm of the difference."""
    difference = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert difference <= tolerance, f"{name}: relative norm of the difference is {difference:.2e}"


def test_every_file_has_a_test():
    kinds = {case["kind"] for case in MANIFEST["cases"]}
    assert len(MANIFEST["cases"]) == 60
    assert kinds == {
        "model", "stream", "op.cema", "op.timestep_decay_norm", "op.group_rms_norm", "op.group_layer_norm",
        "op.sliding_chunk_attention", "op.adaptive_working_memory", "op.rope",
    }  # fmt: skip


# Whole models

TOLERANCES = {  # logits, gradients, loss
    torch.float64: (1e-6, 1e-6, 1e-6),
    torch.float32: (2e-5, 1e-4, 5e-6),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float64", "float32"])
@pytest.mark.parametrize("case", golden("model"))
def test_model(case, dtype):
    tensors = load(case)
    model = load_model(case, tensors, dtype)
    tokens = tensors["input/tokens"]
    logits, _ = model(tokens, segment_ids(case, tokens))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()

    logit_tolerance, gradient_tolerance, loss_tolerance = TOLERANCES[dtype]
    assert (logits - tensors["out/logits"]).abs().max() <= logit_tolerance
    assert abs(loss.item() - case["loss"]) <= loss_tolerance
    _, gradients = gecko.convert.to_reference(model.config, {n: p.grad for n, p in model.named_parameters()})
    expected = {name[5:]: x for name, x in tensors.items() if name.startswith("grad/")}
    assert gradients.keys() == expected.keys() - case["tied"].keys()
    for name, gradient in gradients.items():
        assert_gradient(gradient, expected[name], name, gradient_tolerance)


@pytest.mark.parametrize("case", golden("model"))
def test_intermediate_values(case):
    tensors = load(case)
    model = load_model(case, tensors, F64)
    mixer, feed_forward = model.blocks[0].mixer, model.blocks[0].feed_forward
    found: dict[str, Tensor] = {}
    for name, module in {
        "layer0/timenorm_out": mixer.norm, "layer0/cema_out": mixer.cema, "layer0/rmsnorm_out": mixer.cema_norm,
        "layer0/wz_out": mixer.to_shared, "layer0/mega_out": mixer, "layer0/nffn_norm_out": feed_forward.norm,
        "layer0/nffn_out": model.blocks[0], "final/norm_out": model.final_norm,
    }.items():  # fmt: skip

        def keep(module, inputs, output, name=name):
            found[name] = output if isinstance(output, Tensor) else output[0]

        module.register_forward_hook(keep)
    tokens = tensors["input/tokens"]
    _, state = model(tokens, segment_ids(case, tokens))
    for name, value in found.items():
        assert_near(value, tensors[name], name)
    values = {name[7:]: x for name, x in tensors.items() if name.startswith("layer0/")}
    # The file contains h at every step; the state is the last one. Of the norm statistics it contains only the last.
    assert_mixer(state.mixers[0], values)


def assert_mixer(state: MixerState, values: Mapping[str, Tensor]) -> None:
    assert state.memory is not None
    for name, x in {
        "cema_h": state.cema, "timenorm_count": state.norm.count, "timenorm_mean": state.norm.mean,
        "timenorm_var": state.norm.variance, "awm_memory": state.memory.memory, "awm_log_norm": state.memory.normaliser,
    }.items():  # fmt: skip
        assert_near(x, values[name], name)


# Streams


@pytest.mark.parametrize("case", golden("stream"))
def test_stream(case):
    tensors = load(case)
    model = load_model(case, tensors, F64)
    tokens = tensors["input/tokens"]
    ids = segment_ids(case, tokens)
    state, logits, begin = None, [], 0
    for call, length in enumerate(case["pieces"], start=1):
        part = slice(begin, begin + length)
        out, state = model(tokens[:, part], None if ids is None else ids[:, part], state)
        logits.append(out)
        begin += length
        if call == case["prefill_pieces"]:
            assert begin == case["tail_start"]
            assert_cache(model.config, state, tensors, "cache_prefill")
    assert_cache(model.config, state, tensors, "cache_final")
    whole = torch.cat(logits, dim=1)
    assert (whole - tensors["out/logits"]).abs().max() <= 1e-6
    assert (whole[:, case["tail_start"] :] - tensors["out/tail_logits"]).abs().max() <= 1e-6


def assert_cache(config: gecko.GeckoConfig, state: gecko.GeckoState, tensors: Mapping[str, Tensor], which: str) -> None:
    """Compare our state with the reference's cache.

    Its awm_prev_k are the raw keys of the memory. Our state contains only a summary of them, which affects later
    memories.
    """
    cache = {name[len(which) + 1 :]: x for name, x in tensors.items() if name.startswith(which)}
    assert state.position == cache["layer0.kv_count"].tolist() * state.batch_size
    for layer, mixer in enumerate(state.mixers):
        values = {name.removeprefix(f"layer{layer}."): x for name, x in cache.items()}
        assert_mixer(mixer, values)
        end, kept = state.position[0], values["prev_v"].shape[1]
        keys, window = from_ring(mixer.attention, range(end - kept, end), config.chunk_size)
        assert_near(window, values["prev_v"].transpose(1, 2), "prev_v")
        chunk_start = torch.arange(end - kept, end) // config.chunk_size * config.chunk_size
        turned = turn(keys, chunk_start, config.num_rope_heads, config.rope_base)
        assert_near(turned, values["sca_prev_k"].transpose(1, 2), "sca_prev_k")
    norm = state.final_norm
    for name, x in {"count": norm.count, "mean": norm.mean, "var": norm.variance}.items():
        assert_near(x, cache[f"final_norm.{name}"], name)


def from_ring(state: AttentionState, positions: range, chunk: int) -> tuple[Tensor, Tensor]:
    slots = [position % (2 * chunk) for position in positions]
    return state.keys[:, :, slots], state.values[:, :, slots]


def turn(keys: Tensor, angles: Tensor, heads: int, base: float) -> Tensor:
    """Rotate keys (B, H, T, d) by the positions ``angles``. The reference's cache holds keys rotated by absolute
    position, ours by the position in the chunk."""
    return rotate(keys, rotary_phases(angles, rotary_frequencies(keys.shape[-1], base), keys.dtype, keys.device), heads)


# Operators


def assert_operator(case: Mapping[str, Any], tensors: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    """Compare the outputs, and the gradients of Σ⟨cotangent, output⟩ by everything that has one in the file."""
    for name, output in outputs.items():
        assert_near(output, tensors[f"out/{name}"], name)
    differentiated = [name for name in case["grad_of"] if f"cotangent/{name}" in tensors]
    if not differentiated:
        return
    leaves = {
        name[5:]: tensors.get(f"input/{name[5:]}", tensors.get(f"state/{name[5:]}"))
        for name in tensors if name.startswith("grad/")
    }  # fmt: skip
    gradients = torch.autograd.grad(
        [outputs[name] for name in differentiated], list(leaves.values()),
        [tensors[f"cotangent/{name}"] for name in differentiated],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    for name, gradient in zip(leaves, gradients, strict=True):
        assert_gradient(gradient, tensors[f"grad/{name}"], name)


def document_segments(starts: Tensor | None, batch: int, length: int) -> Segments:
    """Return the segments of a call that continues any given state, except where documents start."""
    ids = None if starts is None else starts.long().cumsum(1)
    return Segments.build(batch, length, segment_ids=ids, clock=Clock.start(batch))


@pytest.mark.parametrize("case", golden("op.cema"))
def test_cema(case):
    """The file's x is (B, D, T), and its y includes the residual."""
    t = load(case)
    x = t["input/x"].transpose(1, 2)
    coefficients = CEMACoefficients.from_parameters(*(t[f"state/{n}"] for n in ("alpha", "delta", "theta", "gamma")))
    segments = document_segments(t.get("input/bos_mask"), x.shape[0], x.shape[1])
    y, h = cema(x, coefficients, t.get("input/hx"), segments=segments)
    outputs = {
        "y": (y + x).transpose(1, 2), "scan": y.transpose(1, 2), "h_last": h,
        "p": coefficients.input, "q": torch.view_as_real(coefficients.decay()),
    }  # fmt: skip
    assert_operator(case, t, outputs)


@pytest.mark.parametrize("case", golden("op.timestep_decay_norm"))
def test_timestep_decay_norm(case):
    """The reference's padded steps keep the state and give 0. We have no padding, so our call leaves them out."""
    t = load(case)
    x = t["input/x"]
    batch, length, _ = x.shape
    rows = [torch.arange(length)] * batch
    if "input/padding_mask" in t:
        rows = [torch.arange(length)[~padded] for padded in t["input/padding_mask"]]
    ys, states = [], []
    for row, kept in enumerate(rows):
        state = None
        if "input/prev_count" in t:
            parts = (t[f"input/prev_{name}"][row : row + 1] for name in ("count", "mean", "var"))
            state = TimestepNormState(*parts)
        starts = t["input/bos_mask"][row : row + 1, kept] if "input/bos_mask" in t else None
        statistics = Statistics(case["num_groups"], (case["beta1"], case["beta2"]), case["eps"])
        y, after = timestep_norm(
            x[row : row + 1, kept], t["state/weight"], t["state/bias"], statistics, state,
            segments=document_segments(starts, 1, len(kept)),
        )  # fmt: skip
        ys.append(torch.zeros_like(x[row]).index_copy(0, kept, y[0]))
        states.append(after)
    outputs = {
        "y": torch.stack(ys), "count": torch.cat([s.count for s in states]),
        "mean": torch.cat([s.mean for s in states]), "var": torch.cat([s.variance for s in states]),
    }  # fmt: skip
    assert_operator(case, t, outputs)


@pytest.mark.parametrize("case", [*golden("op.group_rms_norm"), *golden("op.group_layer_norm")])
def test_norm_of_groups(case):
    t = load(case)
    x, weight, options = t["input/x"], t.get("state/weight"), (case["num_groups"], case["eps"])
    rms = case["kind"] == "op.group_rms_norm"
    y = group_rms_norm(x, weight, *options) if rms else group_layer_norm(x, weight, t.get("state/bias"), *options)
    assert_operator(case, t, {"y": y})


@pytest.mark.parametrize("case", golden("op.rope"))
def test_rope(case):
    t = load(case)
    positions = case["start"] + torch.arange(t["input/q"].shape[1])
    outputs = {
        name: turn(t[f"input/{name}"].transpose(1, 2), positions, t["input/q"].shape[2], case["base"]).transpose(1, 2)
        for name in ("q", "k")
    }
    assert_operator(case, t, outputs)


def by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def clock_before(t: Mapping[str, Tensor], position: int, batch: int) -> Clock:
    """Return a clock at ``position``. The document starts with the last run of equal ids before, or at position 0."""
    at = torch.full((batch,), position)
    if "input/prev_segment_idx" not in t:
        return Clock(at, torch.zeros_like(at), torch.zeros_like(at))
    before = t["input/prev_segment_idx"]
    same = (before == before[:, -1:]).long()
    run = same.flip(1).cumprod(1).sum(1)
    return Clock(at, at - run, before[:, -1])


@pytest.mark.parametrize("case", golden("op.sliding_chunk_attention"))
def test_sliding_chunk_attention(case):
    t = load(case)
    chunk, heads, start = case["chunk_size"], case["n_heads"], case["start"]
    rope = case["n_rope_heads"], case["rope_base"]
    q, k, v = (by_head(t[f"input/{name}"], heads) for name in ("q", "k", "v"))
    batch, length = q.shape[0], q.shape[2]
    state, clock = None, None
    if "input/prev_k" in t:
        state = window_before(t, case)
        clock = clock_before(t, start, batch)
    segments = Segments.build(batch, length, segment_ids=t.get("input/segment_idx"), clock=clock)
    y, state = chunk_attention(
        q, k, v, Pattern(chunk, rope_base=rope[1], rope_heads=rope[0]), state=state, segments=segments
    )

    end, kept = start + length, t["out/new_prev_k"].shape[1]
    keys, values = from_ring(state, range(end - kept, end), chunk)
    keys = turn(keys, torch.arange(end - kept, end) // chunk * chunk, *rope)
    outputs = {
        "y": y.transpose(1, 2).flatten(2), "new_prev_k": keys.transpose(1, 2), "new_prev_v": values.transpose(1, 2),
    }  # fmt: skip
    assert_operator(case, t, outputs)


def window_before(t: Mapping[str, Tensor], case: Mapping[str, Any]) -> AttentionState:
    """Return a window state with the file's last keys, rotated back to positions in their chunk."""
    chunk, start = case["chunk_size"], case["start"]
    kept = t["input/prev_k"].shape[1]
    positions = torch.arange(start - kept, start)
    back = -(positions // chunk * chunk)
    keys = turn(t["input/prev_k"].transpose(1, 2), back, case["n_rope_heads"], case["rope_base"])
    rings = []
    for x in (keys, t["input/prev_v"].transpose(1, 2)):
        empty = x.new_full((*x.shape[:2], 2 * chunk, x.shape[3]), 1e3)  # values outside the window must not matter
        rings.append(empty.index_copy(2, positions % (2 * chunk), x))
    return AttentionState(*rings)


@pytest.mark.parametrize("case", golden("op.adaptive_working_memory"))
def test_adaptive_working_memory(case):
    """Start from the file's memory and read its last keys and values first."""
    t = load(case)
    chunk, heads = case["chunk_size"], case["n_heads"]
    q, k, v = (by_head(t[f"input/{name}"], heads) for name in ("q", "k", "v"))
    batch, length = q.shape[0], q.shape[2]
    state, clock = None, Clock.start(batch)
    if "input/memory" in t:
        # The chunk before the last complete one is already in the memory, so an empty one takes its place.
        nothing = WorkingMemoryState.empty("adaptive", batch, heads, k.shape[-1], v.shape[-1], F64)
        state = WorkingMemoryState(
            t["input/memory"], t["input/log_norm"], nothing.previous, nothing.current, nothing.previous_resets
        )
        at = torch.full((batch,), 3 * chunk)
        clock = Clock(at, torch.zeros_like(at), t.get("input/prev_segment_count", torch.zeros_like(at)))
    if "input/prev_k" in t:
        before_k, before_v = t["input/prev_k"], t["input/prev_v"]
        segments = Segments.build(batch, before_k.shape[2], segment_ids=t.get("input/prev_segment_idx"), clock=clock)
        _, state = working_memory(torch.zeros_like(before_k), before_k, before_v, chunk, state=state, segments=segments)
        clock = segments.end
    elif "input/segment_idx" in t:
        clock = None
    segments = Segments.build(batch, length, segment_ids=t.get("input/segment_idx"), clock=clock)
    y, state = working_memory(q, k, v, chunk, state=state, segments=segments)
    outputs = {
        "y": y.transpose(1, 2).flatten(2), "new_memory": state.memory, "new_log_norm": state.normaliser,
    }  # fmt: skip
    assert_operator(case, t, outputs)
