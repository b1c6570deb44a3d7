"""Records the launches that operators and models make, without running kernels or computing floating-point numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from gecko import Gecko, GeckoConfig
from gecko.inference.decoder import Decoder
from gecko.ops.backends import cpu, dispatch
from gecko.ops.backends.dispatch import Launch
from gecko.state import GeckoState
from gecko.train.step import Precision, autocast


@dataclass(frozen=True)
class Configuration:
    """Everything that determines the code that Triton compiles for a launch, except the GPU."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    """Triton type ("*bf16", "i32", "constexpr") of each parameter; None is a constant."""
    constants: tuple[tuple[Any, Any], ...]
    attributes: tuple[tuple[Any, Any], ...]
    """Facts about arguments that Triton uses, such as alignment."""
    options: tuple[tuple[str, int], ...]
    """The compiler's options, by Triton's names."""

    @classmethod
    def of(cls, launch: Launch) -> Configuration:
        kernel, backend = launch.kernel, make_backend(GPUTarget("cuda", 90, 32))
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, _ = bind(**launch.arguments)
        _, signature, constants, attributes = kernel._pack_args(backend, {}, bound, specialization, None)
        facts = tuple((place, tuple(map(tuple, given))) for place, given in attributes.items())
        return cls(kernel, tuple(signature.items()), tuple(constants.items()), facts, tuple(launch.options.items()))

    def __str__(self) -> str:
        names = [name for name, _ in self.signature]
        constants = {names[place[0]]: value for place, value in self.constants}
        return f"{self.kernel.__name__} with {self.warps} warps, {dict(self.options)} and {constants}"

    @property
    def warps(self) -> int:
        return dict(self.options)["num_warps"]


class _WithoutNumbers(TorchDispatchMode):
    """Mode in which floating-point results are unwritten memory of the right shape, which takes no space.

    Views are made as usual. Integers and masks are computed, because they determine the layout of calls.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.is_view or not tree_any(_is_floating, (args, kwargs)):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0] if func._schema.returns else None
        meta = {name: torch.device("meta") if name == "device" else x for name, x in _on("meta", kwargs).items()}
        return _on("cpu", func(*_on("meta", args), **meta))


def _is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _on(device: str, tree: Any) -> Any:
    """Return unwritten tensors with the shapes and strides of those in ``tree``."""
    return tree_map_only(
        torch.Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device), tree
    )


def launches(call: Callable[[], Any], run: Callable[[Launch], Any]) -> None:
    """Make ``call`` as on a GPU, with ``run`` instead of each launch. Results on the CPU are unwritten.

    All tensors say that they are on a GPU, so whatever asks them chooses as there, not only the choice of kernels.
    """
    with pytest.MonkeyPatch.context() as patch, _WithoutNumbers():
        patch.setattr(Launch, "run", lambda launch: run(launch))
        patch.setattr(dispatch, "is_watched", lambda: False)
        # C kernels would keep activations in float32 under autocast, on processors with bfloat16 products.
        patch.setattr(dispatch, "_cpu_kernels_installed", lambda: False)
        patch.setattr(cpu, "onednn_is_faster", lambda: False)  # products of a GPU are PyTorch's own on any processor
        patch.setattr(torch.Tensor, "is_cuda", True)
        call()


def recorded(call: Callable[[], Any]) -> list[Configuration]:
    """Return the distinct configurations of the launches that ``call`` makes."""
    found: dict[Configuration, None] = {}
    launches(call, lambda launch: found.setdefault(Configuration.of(launch)))
    assert found
    return list(found)


def take_kernels(patch: pytest.MonkeyPatch) -> None:
    """Make operators choose their Triton kernels for CPU tensors, for the dtypes for which they do so on a GPU."""
    patch.setattr(dispatch, "triton_kernels_run_on", lambda x: x.dtype in dispatch.DTYPES)


def model_on_nothing(config: GeckoConfig, dtype: torch.dtype = torch.float32) -> Gecko:
    """Return a model with unwritten parameters, which take no space."""
    with torch.device("meta"):
        model = Gecko(config)
    return model.to(dtype).to_empty(device="cpu")


def _documents(rows: int, length: int) -> torch.Tensor:
    """Return ids of several documents a row."""
    return (torch.arange(length) >= torch.tensor([[length // 3], [length - 2]])).long()[:rows]


def train(model: Gecko, length: int, precision: Precision, documents: bool, rows: int = 2) -> None:
    """Compute loss and gradients of rows with one document each, or several."""
    text = torch.zeros(rows, length + 1, dtype=torch.int64)
    with autocast(precision, text.device):
        loss = model.loss(text[:, :-1], text[:, 1:], _documents(rows, length) if documents else None)
    loss.backward()  # outside, as in training: autocast would round products of gradients


@torch.no_grad()
def read(model: Gecko, length: int, precision: Precision, documents: bool) -> None:
    """Read a text in two calls, and two more tokens one by one."""
    text = torch.zeros(2, length, dtype=torch.int64)
    ids = _documents(2, length) if documents else None
    state = None
    with autocast(precision, text.device):
        for part in (slice(0, length // 2), slice(length // 2, None)):
            _, state = model(text[:, part], None if ids is None else ids[:, part], state)
        for _ in range(2):
            _, state = model.step(text[:, 0], state)


@torch.inference_mode()
def decode(model: Gecko, rows: int) -> None:
    """Decode one token of each of ``rows`` rows, and draw the next ones."""
    decoder, config = Decoder(model, rows), model.config
    for _ in range(rows):
        state = GeckoState.empty(config, value_dtype=model.embedding.weight.dtype)  # of no model, so it is not compared
        decoder.add(state, torch.zeros(config.vocab_size, dtype=torch.bool))
    assert decoder.backend == "triton"
    decoder.step([0] * rows)
