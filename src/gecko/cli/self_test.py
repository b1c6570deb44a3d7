"""Self-test of ``gecko doctor``: invariants of the model, checked with small random inputs on one device."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.inference import generate, read
from gecko.inference.decoder import Decoder
from gecko.models.gecko import Gecko, load
from gecko.ops.cema import CEMACoefficients, cema, cema_reference, empty_cema_state
from gecko.ops.chunk_attention import AttentionState, Pattern, chunk_attention, chunk_attention_reference
from gecko.ops.timestep_norm import TimestepNormState, timestep_norm, timestep_norm_reference
from gecko.ops.working_memory import WorkingMemoryState, working_memory, working_memory_reference
from gecko.segments import Segments
from gecko.state import GeckoState

TOLERANCE = 1e-9
"""Largest error of float64 results, relative to the largest value."""
SINGLE_TOLERANCE = 1e-4
"""Largest relative error of float32 results."""
ROUNDED_TOLERANCE = 0.1
"""Largest relative error of all gradients as one vector, with matrix products in bfloat16."""
_BATCH, _LENGTH, _CHUNK = 2, 45, 8
_MANY = 40
"""Number of rows; large enough for every kernel to be chosen."""
_CONFIG = GeckoConfig(
    vocab_size=64, num_layers=2, model_dim=32, key_dim=32, value_dim=32, num_heads=2, ffn_dim=64,
    cema_modes=4, chunk_size=_CHUNK, timestep_groups=4,
)  # fmt: skip
"""The heads are wide enough for every kernel to be chosen."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    passed: bool
    detail: str


def self_test(device: torch.device) -> list[Finding]:
    """Run every check on ``device``. A check that raises an exception has failed."""
    checks: dict[str, Callable[[torch.device], str]] = {
        "moving average: fast form = reference": _cema,
        "timestep norm: fast form = reference": _timestep_norm,
        "chunk attention: fast form = reference": _chunk_attention,
        "working memory: fast form = reference": _working_memory,
        "kernels: float32 = float64, all gradients": _single_precision,
        "products in bfloat16: near float64": _rounded_products,
        "split law: any cut into calls, same logits": _split_law,
        "files: model and state come back unchanged": _files,
        "decoding: token by token = one call in float64": _decoding,
        "generation: a batch = each text alone": _batch_law,
    }
    # The caller's random number generator is left unchanged.
    with torch.random.fork_rng(devices=[]):
        return [_run(name, check, device) for name, check in checks.items()]


def _run(name: str, check: Callable[[torch.device], str], device: torch.device) -> Finding:
    torch.manual_seed(0)
    try:
        return Finding(name, True, check(device))
    except Exception as error:  # any exception is a failed check
        return Finding(name, False, str(error).splitlines()[0] if str(error) else type(error).__name__)


# The operators read two documents in float64.


def _cema(device: torch.device) -> str:
    dim, modes = 12, 4
    parameters = [_random(device, *shape) for shape in ((dim, modes), (dim, modes), (dim,), (dim, modes, 2))]
    coefficients = CEMACoefficients.from_parameters(*parameters)
    state, segments = empty_cema_state(_BATCH, dim, modes, torch.float64, device), _two_documents(device)
    inputs = _random(device, _BATCH, _LENGTH, dim), coefficients, state
    return _agree(cema(*inputs, segments=segments)[:1], cema_reference(*inputs, segments)[:1])


def _timestep_norm(device: torch.device) -> str:
    groups, dim, segments = 4, 12, _two_documents(device)
    x, weight, bias = (_random(device, *shape) for shape in ((_BATCH, _LENGTH, dim), (dim,), (dim,)))
    state = TimestepNormState.empty(_BATCH, groups, torch.float64, device)
    inputs = x, weight, bias, groups, (0.999, 0.9999), 1e-5, state
    fast, slow = timestep_norm(*inputs, segments=segments), timestep_norm_reference(*inputs, segments=segments)
    return _agree(fast[:1], slow[:1])


def _chunk_attention(device: torch.device) -> str:
    inputs, segments = _heads(device), _two_documents(device)
    state = AttentionState.empty(_BATCH, 2, _CHUNK, 4, 6, torch.float64, device)
    pattern = Pattern(_CHUNK)
    fast = chunk_attention(*inputs, pattern, state=state, segments=segments)
    return _agree(fast[:1], chunk_attention_reference(inputs, pattern, state, segments)[:1])


def _working_memory(device: torch.device) -> str:
    inputs, segments = _heads(device), _two_documents(device)
    state = WorkingMemoryState.empty("adaptive", _BATCH, 2, 4, 6, torch.float64, device)
    fast = working_memory(*inputs, _CHUNK, state=state, segments=segments)
    return _agree(fast[:1], working_memory_reference(inputs, _CHUNK, "adaptive", state, segments)[:1])


# The model.


def _single_precision(device: torch.device) -> str:
    """Compare float32, which the kernels compute, with float64, which the eager operators compute."""
    single: list[Tensor] = []
    double: list[Tensor] = []
    for rows in (_BATCH, _MANY):  # kernels for few tokens, and for many
        model, tokens = _model_and_tokens(device, rows)
        single += _gradients(model, tokens)
        double += _gradients(copy.deepcopy(model).double(), tokens)
    return _agree(single, double, SINGLE_TOLERANCE)


def _rounded_products(device: torch.device) -> str:
    model, tokens = _model_and_tokens(device, _MANY)
    with torch.autocast(device.type, torch.bfloat16):
        loss = model.loss(tokens, tokens.roll(-1, dims=1))
    rounded = torch.autograd.grad(loss, list(model.parameters()))
    exact = _gradients(copy.deepcopy(model).double(), tokens)
    difference = float((_joined(rounded) - _joined(exact)).norm() / _joined(exact).norm())
    if not difference <= ROUNDED_TOLERANCE:
        raise ValueError(f"relative difference of gradients {difference:.3g}")
    return f"relative difference {difference:.0e}"


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def _gradients(model: Gecko, tokens: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model.loss(tokens, tokens.roll(-1, dims=1)), list(model.parameters()))


def _split_law(device: torch.device) -> str:
    model, tokens = _model_and_tokens(device, _BATCH)
    model.double()
    with torch.no_grad():
        whole, _ = model(tokens)
        state, parts = None, []
        for part in tokens.split([1, 2, 19, 1, 22], dim=1):
            logits, state = model(part, state=state)
            parts.append(logits)
    return _agree([torch.cat(parts, dim=1)], [whole])


def _files(device: torch.device) -> str:
    model, tokens = _model_and_tokens(device, 1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder)
        model.save(path)
        _, state = model(tokens)
        state.save(path / "text.state")
        expected, _ = model(tokens, state=state)
        found, _ = load(path).to(device)(tokens, state=GeckoState.load(path / "text.state").to(device))
    _agree([found], [expected], 0)
    return "equal to the bit"


def _decoding(device: torch.device) -> str:
    model, tokens = _model_and_tokens(device, _BATCH)
    with torch.inference_mode():
        expected, _ = copy.deepcopy(model).double()(tokens)
        decoder = Decoder(model, _BATCH)
        for row in tokens:
            prefill = read(model, [row[:5]])
            decoder.add(prefill.state, prefill.seen)
        logits = torch.stack([decoder.step(column.tolist()).clone() for column in tokens[:, 5:].unbind(1)], dim=1)
    where = {"cpu": "in C", "triton": "in Triton", None: "in PyTorch"}[decoder.backend]
    return f"{_agree([logits], [expected[:, 5:]], SINGLE_TOLERANCE)}, {where}"


def _batch_law(device: torch.device) -> str:
    model, (tokens,) = _model_and_tokens(device, 1)
    prompts = [tokens[:3], tokens[:21], tokens]
    together = generate(model, prompts, max_new_tokens=20, seed=0).tokens
    alone = [generate(model, prompt, max_new_tokens=20, seed=0).tokens[0] for prompt in prompts]
    if together != alone:
        raise ValueError(f"got {together} together and {alone} alone")
    return "equal tokens"


def _model_and_tokens(device: torch.device, rows: int) -> tuple[Gecko, Tensor]:
    model = Gecko(_CONFIG).to(device)
    return model, torch.randint(0, _CONFIG.vocab_size, (rows, _LENGTH), device="cpu").to(device)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device="cpu").to(device)


def _heads(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_random(device, _BATCH, 2, _LENGTH, dim) for dim in (4, 4, 6))
    return q, k, v


def _two_documents(device: torch.device) -> Segments:
    ids = (torch.arange(_LENGTH, device="cpu") >= 20).long().expand(_BATCH, -1)
    return Segments.build(_BATCH, _LENGTH, segment_ids=ids, device=device)


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = TOLERANCE) -> str:
    """Return the largest difference relative to a tensor's largest value; ValueError if it is above the tolerance."""
    pairs = [(x.double(), y.double()) for x, y in zip(found, expected, strict=True)]
    errors = [(x - y).abs().max() / y.abs().max() for x, y in pairs]
    worst = float(torch.stack(errors).max())  # NaN if one is NaN
    if not worst <= tolerance:
        raise ValueError(f"relative difference {worst:.3g}")
    return f"relative difference {worst:.0e}"
