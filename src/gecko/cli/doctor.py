"""What ``gecko doctor`` says of this machine, and its self-test: invariants of the model, with small random inputs."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.inference import generate, read
from gecko.inference.decoder import Decoder
from gecko.models.gecko import Gecko, load
from gecko.ops.backends import cpu as kernels
from gecko.ops.backends.dispatch import triton_kernels_installed
from gecko.ops.cema import CEMACoefficients, cema, cema_reference, empty_cema_state
from gecko.ops.chunk_attention import AttentionState, Pattern, chunk_attention, chunk_attention_reference
from gecko.ops.timestep_norm import Statistics, TimestepNormState, timestep_norm, timestep_norm_reference
from gecko.ops.working_memory import WorkingMemoryState, working_memory, working_memory_reference
from gecko.runtime.process import processor_field, processor_name
from gecko.segments import Segments
from gecko.state import GeckoState
from gecko.train.throughput import multiplies_bfloat16

DISTRIBUTION = "gecko-lm"
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "sve", "bf16")


def machine() -> dict[str, str]:
    """Describe the software, the processor, disk and memory, and each GPU by device name."""
    features = (processor_field("flags") or processor_field("Features")).split()
    facts = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": platform.python_version(),
        "PyTorch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "processor": f"{processor_name() or 'unknown'}, {os.cpu_count()} cores",
        "features": ", ".join(name for name in CPU_FEATURES if name in features) or "unknown",
        "PyTorch uses": torch.backends.cpu.get_cpu_capability(),
        "disk": f"{shutil.disk_usage(Path.cwd()).free / 1e9:.1f} GB free in {Path.cwd()}",
    }
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = (os.sysconf(name) * page / 1e9 for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
        facts["memory"] = f"{total:.1f} GB, of which {free:.1f} GB are unused"
    if not torch.cuda.is_available():
        return facts | {"GPU": "none that this PyTorch can use"}
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return facts | {
        f"cuda:{index}": f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB, compute capability {gpu.major}.{gpu.minor}"
        for index, gpu in enumerate(gpus)
    }


def paths() -> dict[str, str]:
    """Describe the device, the operators and the precision that training uses on this machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    eager = "chunked PyTorch operators for prompts and training, recurrent ones for decoding"
    if device == "cpu" and kernels.missing():
        operators = f"without C kernels ({kernels.missing()}): {eager}"
    elif device == "cuda" and not triton_kernels_installed():
        operators = f"{eager}; without the Triton kernels: pip install 'gecko-lm[kernels]'"
    else:
        operators = f"{'C' if device == 'cpu' else 'Triton'} kernels; for float64 {eager}"
    fast = multiplies_bfloat16(torch.device(device))
    advice = "in hardware: precision=bfloat16 may be faster" if fast else "emulated: stay with precision=float32"
    return {"device": f"{device}, with device=auto", "operators": operators, "bfloat16": advice}


class Package(NamedTuple):
    """An optional package, the extra that installs it, and its version if it is installed."""

    name: str
    extra: str
    version: str | None


def optional_packages() -> list[Package]:
    """Return the packages of all extras except ``dev``, each with the smallest extra that installs it."""

    def version(distribution: str) -> str | None:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    matches = (re.match(r"""([\w.-]+)[^;]*;\s*extra == ["'](\w+)["']""", requirement) for requirement in required)
    named = [(match[1], match[2]) for match in matches if match and match[2] != "dev"]
    sizes = Counter(extra for _, extra in named)
    extras = {name: [extra for other, extra in named if other == name] for name, _ in named if name != DISTRIBUTION}
    return [Package(name, min(extras[name], key=sizes.__getitem__), version(name)) for name in sorted(extras)]


DOUBLE, SINGLE, ROUNDED = 1e-9, 1e-4, 0.1
"""Largest errors relative to the largest value: of results in float64 and float32; and of all gradients as one vector,
with matrix products in bfloat16."""
_BATCH, _MANY, _LENGTH, _CHUNK = 2, 40, 45, 8
"""Few rows, and so many that every kernel is chosen."""
_CONFIG = GeckoConfig(
    vocab_size=64, num_layers=2, model_dim=32, key_dim=32, value_dim=32, num_heads=2, ffn_dim=64,
    cema_modes=4, chunk_size=_CHUNK, timestep_groups=4,
)  # fmt: skip
"""The heads are wide enough for every kernel to be chosen."""
OPERATORS = ("moving average", "timestep norm", "chunk attention", "working memory")


class Finding(NamedTuple):
    """Result of one check."""

    name: str
    passed: bool
    detail: str


def self_test(device: torch.device) -> list[Finding]:
    """Run every check on ``device``. A check that raises an exception has failed."""
    checks: dict[str, Callable[[torch.device], str]] = {
        **{f"{name}: fast form = reference": partial(_operator, name) for name in OPERATORS},
        "kernels: float32 = float64, all gradients": _single_precision,
        "products in bfloat16: near float64": _rounded_products,
        "split law: any cut into calls, same logits": _split_law,
        "files: model and state come back unchanged": _files,
        "decoding: token by token = one call in float64": _decoding,
        "generation: a batch = each text alone": _batch_law,
    }
    findings = []
    with torch.random.fork_rng(devices=[]):  # the caller's random number generator is left unchanged
        for name, check in checks.items():
            torch.manual_seed(0)
            try:
                findings.append(Finding(name, True, check(device)))
            except Exception as error:  # any exception is a failed check
                findings.append(Finding(name, False, (str(error) or type(error).__name__).splitlines()[0]))
    return findings


def _operator(name: str, device: torch.device) -> str:
    """Compare an operator's fast form with its reference, on two documents in float64."""
    wide = torch.float64, device
    ids = (torch.arange(_LENGTH, device="cpu") >= 20).long().expand(_BATCH, -1)
    segments = Segments.build(_BATCH, _LENGTH, segment_ids=ids, device=device)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device="cpu").to(device)

    q, k, v = (random(_BATCH, 2, _LENGTH, dim) for dim in (4, 4, 6))
    x, weight, bias = (random(*shape) for shape in ((_BATCH, _LENGTH, 12), (12,), (12,)))
    fast: Sequence[Any]
    slow: Sequence[Any]
    match name:
        case "moving average":
            parameters = [random(*shape) for shape in ((12, 4), (12, 4), (12,), (12, 4, 2))]
            average = x, CEMACoefficients.from_parameters(*parameters), empty_cema_state(_BATCH, 12, 4, *wide)
            fast, slow = cema(*average, segments=segments), cema_reference(*average, segments)
        case "timestep norm":
            norm = x, weight, bias, Statistics(4, (0.999, 0.9999), 1e-5), TimestepNormState.empty(_BATCH, 4, *wide)
            fast, slow = timestep_norm(*norm, segments=segments), timestep_norm_reference(*norm, segments=segments)
        case "chunk attention":
            pattern, window = Pattern(_CHUNK), AttentionState.empty(_BATCH, 2, _CHUNK, 4, 6, *wide)
            fast = chunk_attention(q, k, v, pattern, state=window, segments=segments)
            slow = chunk_attention_reference((q, k, v), pattern, window, segments)
        case "working memory":
            memory = WorkingMemoryState.empty("adaptive", _BATCH, 2, 4, 6, *wide)
            fast = working_memory(q, k, v, _CHUNK, state=memory, segments=segments)
            slow = working_memory_reference((q, k, v), _CHUNK, "adaptive", memory, segments)
    return _agree(fast[:1], slow[:1])


def _single_precision(device: torch.device) -> str:
    """Compare float32, which the kernels compute, with float64, which the eager operators compute."""
    single: list[Tensor] = []
    double: list[Tensor] = []
    for rows in (_BATCH, _MANY):  # kernels for few tokens, and for many
        model, tokens = _model_and_tokens(device, rows)
        single += _gradients(model, tokens)
        double += _gradients(copy.deepcopy(model).double(), tokens)
    return _agree(single, double, SINGLE)


def _rounded_products(device: torch.device) -> str:
    model, tokens = _model_and_tokens(device, _MANY)
    with torch.autocast(device.type, torch.bfloat16):
        loss = model.loss(tokens, tokens.roll(-1, dims=1))
    both = torch.autograd.grad(loss, list(model.parameters())), _gradients(copy.deepcopy(model).double(), tokens)
    rounded, exact = (torch.cat([tensor.double().flatten() for tensor in gradients]) for gradients in both)
    difference = float((rounded - exact).norm() / exact.norm())
    if not difference <= ROUNDED:
        raise ValueError(f"relative difference of gradients {difference:.3g}")
    return f"relative difference {difference:.0e}"


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
    return f"{_agree([logits], [expected[:, 5:]], SINGLE)}, {where}"


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


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = DOUBLE) -> str:
    """Return the largest difference relative to a tensor's largest value; ValueError if it is above the tolerance."""
    pairs = [(x.double(), y.double()) for x, y in zip(found, expected, strict=True)]
    errors = [(x - y).abs().max() / y.abs().max() for x, y in pairs]
    worst = float(torch.stack(errors).max())  # NaN if one is NaN
    if not worst <= tolerance:
        raise ValueError(f"relative difference {worst:.3g}")
    return f"relative difference {worst:.0e}"
