"""PyTorch's default dtype and default device change no number: what is read, decoded, generated or differentiated."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import cases
from torch import Tensor

import gecko
from gecko.inference import read
from gecko.inference.decoder import Decoder
from gecko.io.quantization import quantize
from gecko.runtime.process import flushed_denormals

DEFAULTS = [torch.float64, torch.bfloat16, torch.device("meta")]


@contextmanager
def default(value: torch.dtype | torch.device) -> Iterator[None]:
    if isinstance(value, torch.device):
        with value:
            yield
        return
    torch.set_default_dtype(value)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def found(folder: Path, text: Tensor) -> dict[str, Any]:
    """Return everything that a model in ``folder`` says about ``text`` (2, n)."""
    model = gecko.load(folder)
    prefill = read(model, [text[0]])
    decoder = Decoder(model, 2)
    with torch.inference_mode():
        decoder.add(prefill.state, prefill.seen)
        logits = [decoder.step([token]).clone() for token in (3, 1, 4)]
        whole, state = model(text)
        stepped, after = model.step(text[:, 0], state)
    prefill.state.save(folder / "state")
    drawn = gecko.generate(model, [text[0].tolist(), text[1, :5]], max_new_tokens=20, temperature=0.8, seed=1)
    known = gecko.GeckoState.load(folder / "state")
    greedy = gecko.generate(model, text[0], max_new_tokens=5, temperature=0, state=known)
    return {
        "prefill": [prefill.logits, *prefill.state.tensors().values()], "steps": logits, "call": whole,
        "step": [stepped, *after.tensors().values()], "decoded": list(decoder.state(0).tensors().values()),
        "drawn": drawn.tokens, "greedy": greedy.tokens, "drawn states": list(drawn.state.tensors().values()),
    }  # fmt: skip


def trained(model: gecko.Gecko, text: Tensor) -> dict[str, Any]:
    model.z_loss = 1e-3
    ids = torch.tensor([[0] * 9 + [1] * (text.shape[1] - 10)], device="cpu").expand(2, -1)
    loss = model.loss(text[:, :-1], text[:, 1:], ids)
    loss.backward()
    return {"loss": loss.detach(), **{name: x.grad for name, x in model.named_parameters()}}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, expected in one.items():
        for a, b in zip(*(x if isinstance(x, list) else [x] for x in (expected, other[name])), strict=True):
            assert a == b if isinstance(a, list | int) else a.dtype == b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize("form", [*cases.VARIANTS, "bfloat16", "8 bit", "4 bit"])
def test_what_a_folder_says_does_not_depend_on_defaults(form, tmp_path):
    """Nor do loss and gradients."""
    torch.manual_seed(0)
    if form.endswith("bit"):
        pytest.importorskip("torchao")
        model = gecko.Gecko(gecko.GeckoConfig.preset("tiny", num_layers=1, chunk_size=16))
        quantize(model, int(form[0]))
    else:
        model = cases.model(form if form in cases.VARIANTS else "gecko", torch.float32)
    (model.bfloat16() if form == "bfloat16" else model).save(tmp_path)
    text = cases.tokens(2, 3 * cases.CHUNK + 2)

    def everything() -> dict[str, Any]:
        return found(tmp_path, text) | (trained(copy.deepcopy(model), text) if form in cases.VARIANTS else {})

    expected = everything()
    for value in DEFAULTS:
        with default(value):
            assert_same(expected, everything())


@pytest.mark.parametrize("value", DEFAULTS, ids=str)
def test_denormals_are_flushed_only_meanwhile(value):
    with default(value), flushed_denormals():
        pass
    assert torch.tensor(1e-30, dtype=torch.float32) * 1e-9 > 0


FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
OF_FLOATS = {"empty", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
BY_DEFAULT = ("gecko/layers/", "gecko/hf/modeling.py")
"""Parameters are made where and as PyTorch's default says, like those of PyTorch's own layers."""


def test_every_new_tensor_names_its_device_and_floats_their_dtype():
    source, wrong = Path(gecko.__file__).parent, []
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source.parent).as_posix()
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func).removeprefix("torch.") in FACTORIES:
                made = ast.unparse(call.func)
                given = {keyword.arg for keyword in call.keywords}
                needed = {"device", "dtype"} if made.removeprefix("torch.") in OF_FLOATS else {"device"}
                if made.startswith("torch.") and not needed <= given and not name.startswith(BY_DEFAULT):
                    wrong.append(f"{name}:{call.lineno}: {ast.unparse(call)}")
    assert not wrong, "\n".join(wrong)
