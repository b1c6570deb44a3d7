"""A Gekko in the files of the authors' later code, written here by their names, computes the equations of Gekko."""

import json
import os
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import cases
from support.equations import LENGTH, Equations
from torch import Tensor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import gecko
from gecko.config import PRESETS, GeckoConfig
from gecko.convert import convert_model, from_reference

FIELDS: dict[str, Any] = {
    "arch": "gekko", "num_layers": 2, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "v_head_dim": 5, "rope_head_dim": 4, "rope_base": 100.0, "ffn_hidden_dim": 24, "chunk_size": cases.CHUNK,
    "causal_conv_width": 3, "causal_conv_weight_normalization": True, "causal_conv_backend": "fla",
    "attn_act_func": "softmax", "attn_gate_func": "softplus", "apply_bias_term": True, "awm_orthogonal_update": False,
    "timenorm_num_groups": 4, "timenorm_beta1": 0.9, "timenorm_beta2": 0.97, "timenorm_eps": 1e-3,
    "layernorm_num_groups": 2, "layernorm_eps": 2e-3, "rmsnorm_eps": 3e-3, "apply_rmsnorm": False, "norm_affine": True,
    "swiglu": True, "scale_emb": False, "vocab_size": -1, "output_size": -1, "residual_func": "base",
    "residual_heads": None, "num_experts": 0, "num_dense_layers": None, "moe_router_bias": False, "init_mode": "he",
    "recompute_q": True, "dropout": 0.1, "ddp_backend": "fsdp1", "fused_block": True, "qknorm": False,
}  # fmt: skip
OURS = GeckoConfig(
    vocab_size=37, num_layers=2, model_dim=32, key_dim=24, value_dim=20, num_heads=4, key_value_heads=2, ffn_dim=24,
    chunk_size=cases.CHUNK, timestep_groups=4, timestep_betas=(0.9, 0.97), norm_groups=2, norm_eps=2e-3,
    timestep_eps=1e-3, rms_eps=3e-3, rope_base=100.0, rope_frequencies=(1.0, 0.1, 0.0), queries_and_keys="separate",
    query_key_bias=False, query_key_norm=True, local_mixing="none", convolution_width=3, gate="sum",
    gate_activation="softplus", hidden_branch=False, output_norm=True,
)  # fmt: skip


def shapes(c: GeckoConfig) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Return shape and divided axis of every tensor, by the authors' names."""
    dim, q, v = c.model_dim, c.key_dim, c.value_dim
    k, own_v = c.num_key_value_heads * c.key_head_dim, c.num_key_value_heads * c.value_head_dim
    norms = {"prior_count": ((), None), "prior_mean": ((c.timestep_groups,), 0), "prior_var": ((c.timestep_groups,), 0)}
    norms |= {"weight": ((dim,), 0), "bias": ((dim,), 0)}
    layer = {f"gda.timenorm.{name}": shape for name, shape in norms.items()} | {
        "gda.wq.weight": ((q, dim), 0), "gda.wk.weight": ((k, dim), 0), "gda.wv.weight": ((own_v, dim), 0),
        "gda.wv.bias": ((own_v,), 0), "gda.wr.weight": ((v, dim), 0), "gda.wo.weight": ((dim, v), 1),
        "gda.q_conv.weight": ((q, c.convolution_width), 0), "gda.k_conv.weight": ((k, c.convolution_width), 0),
        "gda.v_conv.weight": ((own_v, c.convolution_width), 0), "gda.query_norm.weight": ((q,), 0),
        "gda.key_norm.weight": ((k,), 0), "nffn.norm.weight": ((dim,), 0), "nffn.norm.bias": ((dim,), 0),
        "nffn.fc1.weight": ((c.ffn_dim, dim), 0), "nffn.fc3.weight": ((c.ffn_dim, dim), 0),
        "nffn.fc2.weight": ((dim, c.ffn_dim), 1),
    }  # fmt: skip
    layer |= {"gda.wr.bias": ((v,), 0)} if c.gate_bias else {}
    return {
        "embed.weight": ((c.vocab_size, dim), 1), "output.output.weight": ((c.vocab_size, dim), 0),
        **{f"output.final_norm.{name}": shape for name, shape in norms.items()},
        **{f"layers.{i}.{name}": shape for i in range(c.num_layers) for name, shape in layer.items()},
    }  # fmt: skip


def random_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        if "prior" in name:
            return torch.zeros(shape, dtype=torch.int64 if shape == () else torch.float32)
        return 0.5 * torch.randn(shape, generator=generator)

    return {name: drawn(name, shape) for name, (shape, _) in shapes(OURS).items()}


def write(folder: Path, weights: dict[str, Tensor], ranks: int = 2, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"model": FIELDS | changes, "steps": 7, "tokenizer": {"type": "llama2"}}
    (folder / "config.json").write_text(json.dumps(config))
    axes = {name: axis for name, (_, axis) in shapes(OURS).items()}
    for rank in range(ranks):
        part = {
            name: (x if axes.get(name) is None else x.chunk(ranks, axes[name])[rank]).clone()
            for name, x in weights.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(part, checkpoint_id=folder / f"full_model.tp{rank:02d}", no_dist=True)
    return folder


def by_our_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters by the names that the equations use, in float64."""
    w = {name: x.double() for name, x in weights.items()}
    found = {
        "embedding.weight": w["embed.weight"], "head.weight": w["output.output.weight"],
        "final_norm.weight": w["output.final_norm.weight"], "final_norm.bias": w["output.final_norm.bias"],
    }  # fmt: skip
    names = {"timenorm": "norm", "wq": "to_query", "wk": "to_key", "wv": "to_value", "wr": "to_gate", "wo": "to_output",
             "query_norm": "query_norm", "key_norm": "key_norm"}  # fmt: skip
    for i in range(OURS.num_layers):
        for name, x in w.items():
            prefix, part = f"layers.{i}.gda.", name.split(".")
            if name.startswith(prefix) and part[3] in names:
                found[f"blocks.{i}.mixer.{names[part[3]]}.{part[4]}"] = x
            if name.startswith(f"layers.{i}.nffn."):
                found[f"blocks.{i}.feed_forward.{'.'.join(part[3:])}"] = x
        found[f"blocks.{i}.mixer.taps"] = torch.cat([w[f"{prefix}{x}_conv.weight"] for x in "qkv"])
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@torch.no_grad()
def test_a_converted_gekko_computes_its_equations(ranks: int, tmp_path: Path) -> None:
    weights = random_weights()
    said = convert_model(str(write(tmp_path / "theirs", weights, ranks)), tmp_path / "ours")
    model = gecko.load(tmp_path / "ours")
    assert said.startswith("Gekko, 2 layers, ") and said.endswith(" parameters in float32")
    assert model.config == OURS
    text = cases.tokens(1, LENGTH)
    wanted = Equations(OURS, by_our_names(weights), (0,)).logits(text[0].tolist())
    torch.testing.assert_close(model.double()(text)[0][0], wanted, rtol=1e-10, atol=1e-10)


def test_key_norms_without_weights_are_zeros_in_all_layers_or_in_none(tmp_path: Path) -> None:
    weights = random_weights()
    for lacking, folder in (("gda.key_norm", "all"), ("layers.1.gda.key_norm", "one")):
        theirs = write(tmp_path / folder, {name: x for name, x in weights.items() if lacking not in name})
        if folder == "one":
            with pytest.raises(ValueError, match="key_norm"):
                convert_model(str(theirs), tmp_path / "other")
        else:
            convert_model(str(theirs), tmp_path / "ours")
    assert not gecko.load(tmp_path / "ours").blocks[1].mixer.key_norm.weight.any()


PUBLISHED = {
    "gekko-0.9b": (28, 1536, 8, 4, 256, 256, 128, 4096, 24, 2),
    "gekko-4b": (36, 2560, 32, 8, 128, 128, 128, 9216, 40, 2),
    "gekko-7.1b": (32, 4096, 4, 4, 256, 2048, 256, 8192, 64, 4),
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_configs_are_the_presets(preset: str) -> None:
    names = ("num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "rope_head_dim",
             "ffn_hidden_dim", "timenorm_num_groups", "layernorm_num_groups")  # fmt: skip
    fields = FIELDS | dict(zip(names, PUBLISHED[preset], strict=True)) | {
        "timenorm_beta1": 0.999, "timenorm_beta2": 0.9999, "timenorm_eps": 1e-5, "layernorm_eps": 1e-5,
        "rmsnorm_eps": 1e-6, "rope_base": 500_000.0, "chunk_size": 4096, "causal_conv_width": 4,
        "apply_bias_term": False,
    }  # fmt: skip
    wanted = shapes(PRESETS[preset]).items()
    state = {name: torch.empty(shape, device="meta") for name, (shape, _) in wanted if "prior" not in name}
    assert from_reference(fields, state)[0] == PRESETS[preset]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "transformer": ({"arch": "transformer"}, "arch must be 'gekko'"),
    "softdelta": ({"attn_act_func": "softdelta"}, "attn_act_func must be 'softmax'"),
    "ortho": ({"residual_func": "ortho"}, "residual_func must be 'base' or 'add'"),
    "rms": ({"apply_rmsnorm": True}, "apply_rmsnorm must be False"),
    "plain": ({"norm_affine": False}, "norm_affine must be True"),
    "taps": ({"causal_conv_weight_normalization": False}, "causal_conv_weight_normalization must be True"),
    "experts": ({"num_experts": 8}, "num_experts must be 0"),
    "turned": ({"rope_head_dim": 3}, "rope_head_dim must be even"),
    "words": ({"head_dim": "6"}, "head_dim must be a whole number"),
    "unknown": ({"chunk_sizes": 8}, "Did you mean 'chunk_size'"),
    "outputs": ({"output_size": 40}, "output_size must be -1 or vocab_size 37; got 40"),
    "other ε": ({"awm_orthogonal_update": True}, "rmsnorm_eps must be 1e-6"),
    "layers": ({"num_layers": 1}, "unknown reference parameter|reference parameter must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_block_does_not_compute_is_refused_by_name(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        from_reference(FIELDS | changes, random_weights())


def test_other_tensors_and_a_missing_field_are_refused_by_name() -> None:
    weights = random_weights()
    with pytest.raises(ValueError, match="must have timenorm_eps"):
        from_reference({name: x for name, x in FIELDS.items() if name != "timenorm_eps"}, weights)
    for name, x in {
        "layers.1.gda.v_conv.weight": torch.zeros(12, 3), "layers.0.gda.wg.weight": torch.zeros(4, 32),
        "layers.0.gda.timenorm.prior_mean": torch.ones(4),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=name):
            from_reference(FIELDS, weights | {name: x})


class Planted:
    def __reduce__(self) -> Any:
        return os.mkdir, ("planted",)


def test_damaged_folders_are_refused_and_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "theirs", random_weights())

    def refused(message: str) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            convert_model(str(source), tmp_path / "ours")

    index, plain = source / "full_model.tp01" / ".metadata", (source / "full_model.tp01" / ".metadata").read_bytes()
    index.write_bytes(pickle.dumps(Planted()))
    refused("could be code")
    assert not (tmp_path / "planted").exists()
    for change, message in (
        (lambda x: x.state_dict_metadata.pop("embed.weight"), "ranks 0 and 1 differ in embed.weight"),
        (lambda x: x.state_dict_metadata["embed.weight"].chunks.clear(), "NaN"),
        (lambda x: setattr(next(iter(x.storage_data.values())), "relative_path", "../x"), "refers to '../x'"),
        (lambda x: setattr(next(iter(x.storage_data.values())), "relative_path", ".."), "refers to '..'"),
        (lambda x: setattr(x.state_dict_metadata["embed.weight"], "size", torch.Size([10**15])), "smaller"),
        (lambda x: setattr(x.state_dict_metadata["embed.weight"], "size", torch.Size([2**32, 2**32])), "too much"),
        (lambda x: setattr(x.state_dict_metadata["embed.weight"], "size", torch.Size([-5])), "whole numbers"),
        (lambda x: setattr(x, "storage_data", OrderedDict(x.storage_data)), None),
    ):
        found = pickle.loads(plain)
        change(found)
        index.write_bytes(pickle.dumps(found))
        if message is None:
            convert_model(str(source), tmp_path / "ours")
        else:
            refused(message)
    index.unlink()
    refused("there is no")
    index.write_bytes(plain)
    (source / "full_model.tp00").rename(source / "full_model.tp02")
    refused("full_model.tp00 and those of all other ranks")


def test_an_index_that_changes_classes_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle may set attributes of the classes that it names: a tensor may become bytes to unpickle."""
    monkeypatch.chdir(tmp_path)
    part = write(tmp_path / "theirs", {"x": torch.zeros(1)}, 1) / "full_model.tp00"
    torch.save({"x": Planted()}, part / "data")

    def named(name: str, module: str = "torch.distributed.checkpoint.metadata") -> bytes:
        return b"c" + f"{module}\n{name}\n".encode()

    def text(x: str) -> bytes:
        return b"X" + len(x).to_bytes(4, "little") + x.encode()

    def number(n: int) -> bytes:
        return b"J" + n.to_bytes(4, "little")

    def called(function: bytes, *given: bytes) -> bytes:
        return function + b"(" + b"".join(given) + b"tR"

    def fields(*pairs: bytes) -> bytes:
        return b"(" + b"".join(pairs) + b"d"

    kinds = b"(" + named("TensorStorageMetadata") + named("BytesStorageMetadata") + b"t"
    changed = named("_MEM_FORMAT_ENCODING") + b"(N" + fields(text("__bases__"), kinds) + b"tb"
    shown = called(named("TensorProperties"), named("float32", "torch"))
    size = called(named("Size", "torch"), b"(" + number(1) + b"t")
    entry = (
        called(named("_MEM_FORMAT_ENCODING"), number(0))
        + fields(text("size"), size, text("properties"), shown, text("chunks"), b"]")
        + b"b"
    )
    file = named("_StorageInfo", "torch.distributed.checkpoint.filesystem")
    place = called(file, text("data"), number(0), number((part / "data").stat().st_size))
    at = called(named("MetadataIndex"), text("x"))
    index = called(named("Metadata"), fields(text("x"), entry), b"N", fields(at, place))
    (part / ".metadata").write_bytes(b"\x80\x02" + changed + b"0" + index + b".")
    before = _MEM_FORMAT_ENCODING.__bases__
    with pytest.raises(ValueError, match=r"could be code|must hold"):
        convert_model(str(part.parent), tmp_path / "ours")
    assert not (tmp_path / "planted").exists() and _MEM_FORMAT_ENCODING.__bases__ == before
