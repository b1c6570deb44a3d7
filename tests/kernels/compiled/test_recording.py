"""Launches are recorded as a card runs them: the same kernels, dtypes, shapes and constants as on a device whose
tensors say that they are on a GPU, while those of the host do not."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernels.recording import decode, launches, model_on_nothing, read, train
from support import cases
from torch import Tensor

from gecko import Gecko, GeckoConfig
from gecko.inference.packed_weights import PackedWeights
from gecko.models import meta_model
from gecko.ops.backends.dispatch import Launch
from gecko.plan.device import DEVICE, FakeGPU
from gecko.state import GeckoState
from gecko.train.model import use_float8

SOURCE = Path(__file__).parents[3] / "src/gecko"
Call = Callable[[Gecko], Any]


def described(launch: Launch) -> tuple[Any, ...]:
    """Return what determines a launch's code and its work; of tensors, dtype and shape."""
    arguments = {
        name: (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else x for name, x in launch.arguments.items()
    }
    return launch.kernel.__name__, launch.grid, arguments, launch.options


def recorded(config: GeckoConfig, precision: str, call: Call, dtype: torch.dtype = torch.float32) -> list[Any]:
    model, found = model_on_nothing(config, dtype), []
    use_float8(model, precision)
    launches(lambda: call(model), lambda launch: found.append(described(launch)))
    assert found
    return found


def on_a_card(config: GeckoConfig, precision: str, call: Call) -> list[Any]:
    """Return the launches on a device that computes nothing, which ``gecko plan`` uses. Its tensors are on a GPU, and
    those of the host are not."""
    found: list[Any] = []
    with FakeGPU().running(), patch.object(Launch, "run", lambda launch: found.append(described(launch))):
        model = meta_model(config).to_empty(device=DEVICE)
        model.tie()
        use_float8(model, precision)
        with patch.object(Gecko, "fingerprint", lambda _: ""):  # of numbers, which there are not
            call(model)
    return found


LENGTH = 3 * cases.CHUNK + 5
CONFIGS = {name: replace(cases.SMALL, **variant, num_layers=1) for name, variant in cases.VARIANTS.items()}
CONFIGS["gecko-1b"] = replace(GeckoConfig.preset("gecko-1b"), num_layers=1, vocab_size=264)

CALLS: dict[str, tuple[str, Call]] = {
    "documents": ("bfloat16", lambda model: train(model, LENGTH, "bfloat16", documents=True)),
    "float32": ("float32", lambda model: train(model, LENGTH, "float32", documents=False)),
    "reading": ("bfloat16", lambda model: read(model, LENGTH, "bfloat16", documents=True)),
    "float8": ("float8", lambda model: train(model, LENGTH, "float8", documents=True)),
}
DECODED = [*cases.IN_TRITON, "gecko-1b"]
CASES = [(name, call) for call in CALLS for name in (CONFIGS if call == "documents" else ("gecko", "gecko-1b"))]


@pytest.mark.parametrize(("name", "call"), CASES)
def test_recorded_launches_are_those_of_a_card(name, call):
    assert on_a_card(CONFIGS[name], *CALLS[call]) == recorded(CONFIGS[name], *CALLS[call])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DECODED)
def test_recorded_launches_of_a_token_are_those_of_a_card(name, dtype):
    """The card's tensors have no numbers, and are not on the host."""
    config, rows = CONFIGS[name], 2
    with torch.no_grad():
        packed = PackedWeights(meta_model(config).to(dtype), "triton")
    state = GeckoState.empty(config, rows, value_dtype=dtype, device="meta").map(torch.clone)
    expected = [described(launch) for launch in packed.with_states(state).launches(rows)]
    assert recorded(config, "float32", lambda model: decode(model, rows), dtype)[: len(expected)] == expected


BESIDE = "ops/backends/dispatch.py"
"""The one file that asks a tensor whether it is on a GPU."""


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_dispatcher_asks_where_a_tensor_is(path):
    """What asks beside it, or binds the predicate that tests replace, chooses otherwise when it is recorded."""
    inside = path.relative_to(SOURCE).parts[0] in ("ops", "layers", "models")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert "triton_kernels_run_on" not in [name.name for name in node.names], node.lineno
        if isinstance(node, ast.Attribute) and str(path.relative_to(SOURCE)) != BESIDE:
            assert node.attr != "is_cuda", node.lineno
        if isinstance(node, ast.Constant) and inside:
            assert node.value != "cuda", node.lineno
