"""``gecko doctor`` and ``gecko info`` describe machines and models."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import Command
from plan.test_plan import config_of
from support.native_agreement import needs_compiler

import gecko
from gecko import layers
from gecko.cli import doctor
from gecko.cli.plan import readable
from gecko.config import PRESETS
from gecko.layers import gated_attention
from gecko.models.gecko import Block
from gecko.ops.backends import cpu as native
from gecko.plan.counts import counts_of, inference_memory, parameters_by_component, training_memory
from gecko.plan.dry_run import block_memory
from gecko.segments import Segments
from gecko.train.throughput import multiplies_bfloat16

# ---- ``gecko doctor`` describes the machine and finds faults. Its self-test takes seconds, so few are run.

CPU = torch.device("cpu")


def failed() -> list[tuple[str, str]]:
    """Return the name and the detail of every check that fails."""
    return [(found.name.partition(":")[0], found.detail) for found in doctor.self_test(CPU) if not found.passed]


@needs_compiler
def test_a_healthy_machine_whose_kernels_in_c_all_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except SwiGLU's, which is for wide models. The decoder calls its own functions without ``native.call``. Random
    numbers are left alone."""
    monkeypatch.setattr(native, "_functions", {})
    before = torch.get_rng_state()
    result = command("doctor", code=0)
    assert torch.equal(torch.get_rng_state(), before)
    for text in ("Python", "PyTorch", "processor", "disk", "Self-test on cpu", "All "):
        assert text in result.stdout
    sources = (path.read_text() for path in Path(native.__file__).parents[1].glob("*/cpu*.c"))
    kernels = {name for source in sources for name in re.findall(r"^int64_t (\w+)\(", source, re.MULTILINE)}
    decoding = {f"decoding_{name}" for name in ("room", "step", "first_broken", "sample", "content")}
    assert kernels - set(native._functions) == {"swiglu_forward", "swiglu_backward"} | decoding


def test_operators_that_compute_wrongly_are_found(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*args: Any, **more: Any) -> Any:
            out, state = right(*args, **more)
            return out + 1e-6 * out.abs().max(), state

        return computed

    for name in ("cema", "timestep_norm", "chunk_attention", "working_memory"):
        monkeypatch.setattr(doctor, name, wrong(getattr(doctor, name)))
    result = command("doctor", code=1)
    assert "4 of 10 checks failed" in result.stdout
    lines = [line for line in result.stdout.splitlines() if "FAIL" in line]
    assert [line.partition(":")[0] for line in lines] == list(doctor.OPERATORS)


def test_a_kernel_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers.cema

    def wrong(x: torch.Tensor, *args: Any, **more: Any) -> Any:
        out, state = right(x, *args, **more)
        return out + 1e-2 * (x.dtype == torch.float32), state

    monkeypatch.setattr(layers, "cema", wrong)
    assert [name for name, _ in failed()] == ["kernels", "decoding"]


def test_products_that_are_rounded_wrongly_and_checks_that_raise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gated_attention.project

    def wrong(*args: Any, **more: Any) -> Any:
        scale = 1.3 if torch.is_autocast_enabled("cpu") else 1.0
        return tuple(scale * y for y in right(*args, **more))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken\nin two lines")

    monkeypatch.setattr(gated_attention, "project", wrong)
    for name in ("load", "generate"):
        monkeypatch.setattr(doctor, name, fail)
    (products, difference), *raised = failed()
    assert products == "products in bfloat16" and "relative difference" in difference
    assert raised == [("files", "broken"), ("generation", "broken")]


def test_a_number_that_is_none_differs_from_every_number() -> None:
    one, none = torch.ones(2), torch.full((2,), float("nan"))
    for found, expected in (([one, none], [one, one]), ([one, one], [one, none])):
        with pytest.raises(ValueError, match="relative difference nan"):
            doctor._agree(found, expected)


def test_missing_kernels_are_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(native, "missing", lambda: "none of gcc, cc is installed")
    assert "without C kernels (none of gcc, cc is installed)" in doctor.paths()["operators"]


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bfloat16_is_called_fast_where_training_takes_it(
    monkeypatch: pytest.MonkeyPatch, device: str, multiplies: bool
) -> None:
    """Emulated bfloat16, which a GPU also reports as supported, does not count."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or multiplies
    )
    monkeypatch.setattr("gecko.train.throughput.has_bfloat16_products", lambda: multiplies)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: multiplies)
    assert doctor.paths()["bfloat16"].startswith("in hardware" if multiplies else "emulated")


@pytest.mark.parametrize("kernels", [True, False])
def test_kernels_without_bfloat16_stay_with_float32(monkeypatch: pytest.MonkeyPatch, kernels: bool) -> None:
    """An old compiler builds such kernels; PyTorch's own operations are faster in bfloat16."""
    monkeypatch.setattr("gecko.train.throughput.has_bfloat16_products", lambda: True)
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(native, "library", lambda: object() if kernels else None)
    assert multiplies_bfloat16(CPU) is not kernels


@pytest.mark.parametrize("order", [1, -1])
def test_optional_packages_are_offered_with_the_least_beside_them(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    required = [
        "numpy>=1", "notthere>=1; extra == 'small'", "notthere>=1; extra == 'large'", 'hypothesis; extra == "large"',
        "gecko-lm[small]; extra == 'middle'", "notthere>=1; extra == 'middle'", "notthere>=1; extra == 'dev'",
    ]  # fmt: skip
    monkeypatch.setattr("importlib.metadata.requires", lambda _: required[::order])
    here, missing = doctor.optional_packages()
    assert here[:2] == ("hypothesis", "large") and here.version is not None
    assert missing == ("notthere", "small", None)


def test_brackets_are_shown_as_they_are(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the name of an extra, the name of a folder, and an error."""
    (tmp_path / "[bold]").mkdir()
    monkeypatch.chdir(tmp_path / "[bold]")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(doctor, "paths", lambda: {"operators": "pip install 'gecko-lm[kernels]'"})
    monkeypatch.setattr(doctor, "optional_packages", lambda: [doctor.Package("notthere", "data", None)])
    monkeypatch.setattr(doctor, "self_test", lambda _: [doctor.Finding("files", False, "broken [here]")])
    shown = command("doctor").stdout
    for text in ("gecko-lm[kernels]'", "missing; pip install 'gecko-lm[data]'", "/[bold]", "broken [here]"):
        assert text in shown


# ---- ``gecko info`` reports correct numbers.


@pytest.mark.parametrize("changes", [{}, {"tie_embedding": True}, {"memory": "none", "cema_skip": "learned"}])
def test_parameters_add_up(changes: dict[str, Any]) -> None:
    config = config_of(changes)
    counts = parameters_by_component(config)
    assert sum(counts.values()) == sum(parameter.numel() for parameter in gecko.Gecko(config).parameters())
    assert counts["embedding"] == 64 * 128
    assert counts["head"] == (0 if config.tie_embedding else 64 * 128)
    assert counts["feed-forward"] == 2 * 3 * 128 * 256
    assert counts["CEMA"] == 2 * (128 * 16 * 4 + 128 + (128 if config.cema_skip == "learned" else 0))
    assert counts["norms"] == 2 * (2 + 1 + 2) * 128 + 2 * 128


@pytest.mark.parametrize("name", [name for name in PRESETS if "tiny" in name])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_as_large_as_it_says(name: str, dtype: torch.dtype) -> None:
    model = gecko.Gecko(gecko.GeckoConfig.preset(name)).to(dtype)
    state, size = model.empty_state(), sum(counts_of(model.config).state(99, dtype.itemsize).values())
    assert state.num_bytes == size
    for length in (1, 3, 200):
        with torch.no_grad():
            _, state = model(torch.zeros(1, length, dtype=torch.int64), state=state)
        assert state.num_bytes == size


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make operators use no Triton kernels."""
    monkeypatch.setattr("gecko.ops.backends.dispatch.triton_kernels_installed", lambda: False)
    block_memory.cache_clear()
    monkeypatch.setattr("gecko.plan.counts.block_memory", block_memory.__wrapped__)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"swiglu": False, "cema_modes": 8, "timestep_groups": 64}, {"memory": "none", "attention": "chunk"},
        {"model_dim": 256, "ffn_dim": 64, "key_dim": 256, "num_heads": 1, "value_dim": 512},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("eager_forms", "no_kernels")
def test_activations_of_a_block_are_those_that_it_saves(changes: dict[str, Any]) -> None:
    config = config_of(changes)
    kept = [block_memory(config, torch.float32, length).kept for length in (256, 512)]
    assert kept[1] - kept[0] == pytest.approx(kept_for_backward(config, 512) - kept_for_backward(config, 256), rel=0.02)


@pytest.mark.parametrize("length", [256, 1024])
@pytest.mark.usefixtures("eager_forms", "no_kernels")
def test_activations_of_a_model_are_estimated_well(length: int) -> None:
    """Including the tables, which are half of the total for a short text."""
    config = gecko.GeckoConfig.preset("tiny")
    model, text = gecko.Gecko(config), torch.zeros(1, length, dtype=torch.int64)
    measured = saved(model, lambda: model.loss(text, text))
    activations = training_memory(config, 1, length, recompute=False)["activations"]
    assert activations == pytest.approx(measured, rel=0.15)


def kept_for_backward(config: gecko.GeckoConfig, length: int) -> int:
    """Return the number of bytes that one block saves."""
    block, x = Block(config, 0), torch.randn(1, length, config.model_dim, requires_grad=True)
    return saved(block, lambda: block(x, None, Segments.build(1, length)))


def saved(module: torch.nn.Module, forward: Callable[[], Any]) -> int:
    """Return the number of bytes saved for the backward pass, without the module's parameters."""
    storages = {parameter.untyped_storage().data_ptr(): 0 for parameter in module.parameters()}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storages.values())


def test_inference_needs_no_more_for_a_longer_text() -> None:
    config = gecko.GeckoConfig.preset("gecko-7b")
    short, long = (inference_memory(config, torch.bfloat16, 1, length) for length in (4096, 4_000_000))
    assert short == long and short["weights"] == 2 * 7_385_817_088


def test_sizes_are_readable() -> None:
    assert [readable(n) for n in (0, 999, 1000, 123_456, 7_000_000_000)] == ["0 B", "999 B", "1 KB", "123 KB", "7 GB"]
