"""Float8 by torchao, emulated: what is rounded, that masters stay float32, and that a run resumes bit for bit."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.corpora import BYTE_MODEL
from support.whole_runs import curve
from torch import Tensor, nn

import gecko
from gecko.models import build_model
from gecko.train import Run, train
from gecko.train.model import check_float8, use_float8, without_float8

CPU = torch.device("cpu")


def rounded(x: Tensor) -> Tensor:
    """Return each row divided by a power of two that makes its largest number at most 448, rounded, multiplied."""
    largest = x.abs().amax(-1, keepdim=True).double().clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(448 / largest))).float()
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


def converted() -> gecko.Gecko:
    torch.manual_seed(0)
    model = build_model(BYTE_MODEL)
    use_float8(model, "float8_emulated")
    return model


def test_the_three_products_of_a_layer_have_rounded_rows() -> None:
    layer = converted().blocks[0].feed_forward.fc1
    x = torch.randn(5, layer.in_features, requires_grad=True)
    grad = torch.randn(5, layer.out_features)
    y = layer(x)
    y.backward(grad)
    weight = layer.weight.detach()
    torch.testing.assert_close(y, rounded(x.detach()) @ rounded(weight).T)
    torch.testing.assert_close(x.grad, rounded(grad) @ rounded(weight.T).T)
    torch.testing.assert_close(layer.weight.grad, rounded(grad.T) @ rounded(x.detach().T).T)
    assert not torch.equal(y, x @ weight.T)


def test_only_matrices_of_blocks_change_and_no_parameter_does() -> None:
    torch.manual_seed(0)
    before, model = build_model(BYTE_MODEL), converted()
    kinds = [{name: type(x) for name, x in one.named_parameters()} for one in (before, model)]
    assert kinds[0] == kinds[1]
    assert all(torch.equal(x, y) for x, y in zip(before.parameters(), model.parameters(), strict=True))
    layers = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {kind for name, kind in layers.items() if name.startswith("blocks.")} == {"Float8Linear"}
    assert layers["head"] == "Linear"


def test_matrices_of_other_sizes_stay_as_they_are() -> None:
    model = build_model(replace(BYTE_MODEL, ffn_dim=40))
    use_float8(model, "float8_emulated")
    assert type(model.blocks[0].feed_forward.fc1) is nn.Linear
    assert type(model.blocks[0].mixer.to_shared) is not nn.Linear


@pytest.fixture
def float8_run(small_run: Run) -> Run:
    return replace(small_run, precision="float8_emulated")


def test_masters_are_float32_and_it_trains_as_bfloat16_does(float8_run: Run, tmp_path: Path) -> None:
    names = "bfloat16", "float8_emulated"
    half, eight = (train(replace(float8_run, output=str(tmp_path / name), precision=name)) for name in names)
    losses = [[r["loss"] for r in curve(result.run) if r["kind"] == "train"] for result in (half, eight)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    stored = load_file(eight.checkpoint / "model.safetensors")
    moments = load_file(eight.checkpoint / "optimizer.safetensors")
    assert {x.dtype for x in [*stored.values(), *moments.values()]} == {torch.float32}
    assert type(gecko.load(eight.checkpoint).blocks[0].feed_forward.fc1) is nn.Linear


def test_recomputation_gives_the_same_gradients() -> None:
    tokens = torch.arange(48).reshape(2, 24)
    found = []
    for recompute in ("none", "full", "selective"):
        model = converted()
        model.activation_checkpointing = recompute
        model.loss(tokens, tokens).backward()
        found.append(torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None]))
    assert torch.equal(found[1], found[0])
    assert (found[2] - found[0]).norm() < 1e-5 * found[0].norm()


def test_a_device_without_float8_is_an_error(float8_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    check_float8("float8_emulated", CPU)
    with pytest.raises(ValueError, match=r"precision=float8 needs a GPU of compute capability 8\.9 .* got cpu\. Try"):
        train(replace(float8_run, precision="float8", device="cpu"))
    for capability, said in (((8, 0), r"got cuda with 8\.0"), ((8, 9), ""), ((10, 0), "")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        with pytest.raises(ValueError, match=said) if said else nullcontext():
            check_float8("float8", torch.device("cuda"))
    with pytest.raises(ValueError, match=r"precision must be float32 or bfloat16 for adapters.*lora_rank=none"):
        replace(float8_run, init_from="model", lora_rank=4)


def test_generating_uses_plain_layers_and_then_they_are_float8_again() -> None:
    model = converted()
    layers = {type(module) for module in model.blocks.modules() if isinstance(module, nn.Linear)}
    with without_float8(model, "float8_emulated"):
        plain = {type(module) for module in model.blocks.modules() if isinstance(module, nn.Linear)}
    assert plain == {nn.Linear}
    assert {type(module) for module in model.blocks.modules() if isinstance(module, nn.Linear)} == layers != plain
