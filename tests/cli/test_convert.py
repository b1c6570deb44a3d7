"""``gecko convert`` converts checkpoints of the releases, and says what is wrong with other files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import Command
from support import cases
from support.cases import tokens

import gecko
from gecko.convert.release import BLOCK, FIELDS, TOP, to_reference


def release_of_gecko(folder: Path) -> gecko.Gecko:
    """Write a random model as Gecko's release does: with complex gamma and with derived tensors."""
    model = cases.model("gecko", torch.float32)
    config, weights = to_reference(model.config, model.state_dict())
    state = {name: torch.view_as_complex(x) if name.endswith("cema.gamma") else x for name, x in weights.items()}
    state |= {"rope.freqs": torch.ones(4), "output.final_norm.prior_count": torch.tensor(0)}
    write(folder, {"model": config, "tokenizer": {"path": "x"}}, state)
    return model


def release_of_megalodon(folder: Path) -> gecko.Gecko:
    """Write a model as Megalodon's release does: axes of length 1, log of a norm's prior, null RoPE base."""
    changes = {**cases.VARIANTS["megalodon"], "rope_base": 10_000.0}
    torch.manual_seed(1)
    model = gecko.Gecko(gecko.GeckoConfig(**{**cases.SMALL.to_dict(), **changes}))
    names = {ours: theirs for theirs, ours in TOP.items()}
    for i in range(model.config.num_layers):
        names |= {f"blocks.{i}.{ours}": f"layers.{i}.{theirs}" for theirs, ours in BLOCK.items()}
    state = {names[name]: x for name, x in model.state_dict().items()}
    for name, axes in (("alpha", 1), ("delta", 1), ("theta", 2), ("omega", 1)):
        for key in [key for key in state if key.endswith(f"cema.{name}")]:
            state[key] = state[key].reshape(*state[key].shape, *[1] * axes)
    state |= {f"layers.0.mega.timenorm.{name}": torch.zeros(4) for name in ("prior_mean", "prior_logv")}
    state["layers.0.mega.timenorm.prior_count"] = torch.tensor(0)
    own = ("timenorm_num_groups", "layernorm_num_groups", "num_rope_heads", "two_hop_residual", "rope_base")
    fields = {theirs: getattr(model.config, ours) for theirs, ours in FIELDS.items() if theirs not in own}
    fields |= {"norm_num_groups": 4, "rope_base": None, "vocab_size": -1, "output_size": -1, "layerwise_ckpt": False}
    write(folder, {"model": fields}, state)
    (folder / "consolidate_config.json").write_text('{"model_parallel_size": 1, "dtype": "fp32"}')
    return model


def write(folder: Path, config: dict[str, Any], state: Any, name: str = "consolidated.pth") -> None:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / name)
    (folder / "config.json").write_text(json.dumps(config))


RELEASES = {"gecko": release_of_gecko, "megalodon": release_of_megalodon}


@pytest.mark.parametrize("release", RELEASES)
def test_converted_model_computes_the_same(release: str, command: Command, tmp_path: Path) -> None:
    model = RELEASES[release](tmp_path / "release")
    result = command("convert", tmp_path / "release", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{release.capitalize()}, 2 layers, {count:,} parameters in float32" in result.stdout
    converted = gecko.load(tmp_path / "out")
    assert converted.config == model.config
    with torch.no_grad():
        assert torch.equal(converted(tokens(2, 50))[0], model(tokens(2, 50))[0])


def test_a_release_brings_its_tokenizer(command: Command, tmp_path: Path) -> None:
    release_of_gecko(tmp_path / "release")
    for name in ("tokenizer.model", "notes.txt"):
        (tmp_path / "release" / name).write_text(name)
    for source, out in (("release", "one"), ("release/consolidated.pth", "two")):
        assert command("convert", tmp_path / source, tmp_path / out).exit_code == 0
        names = {path.name for path in (tmp_path / out).iterdir()}
        assert names == {"config.json", "model.safetensors", "tokenizer.model"}


def test_a_file_of_any_name(command: Command, tmp_path: Path) -> None:
    model = release_of_gecko(tmp_path / "release")
    path = (tmp_path / "release" / "consolidated.pth").rename(tmp_path / "release" / "step.pth")
    assert command("convert", path, tmp_path / "one").exit_code == 0
    assert command("convert", path.parent, tmp_path / "two").exit_code == 0
    assert gecko.load(tmp_path / "one").fingerprint() == gecko.load(tmp_path / "two").fingerprint()
    assert gecko.load(tmp_path / "one").config == model.config


def test_nothing_is_lost_where_dtypes_are_mixed(command: Command, tmp_path: Path) -> None:
    release_of_gecko(tmp_path / "release")
    state = torch.load(tmp_path / "release" / "consolidated.pth")
    state["embed.weight"] = state["embed.weight"].bfloat16()
    torch.save(state, tmp_path / "release" / "consolidated.pth")
    assert command("convert", tmp_path / "release", tmp_path / "out").exit_code == 0
    converted = gecko.load(tmp_path / "out")
    assert torch.equal(converted.embedding.weight, state["embed.weight"].float())
    assert torch.equal(converted.head.weight, state["output.output.weight"])


class Code:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> Any:
        return print, ("run",)


def change(folder: Path, function: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "consolidated.pth"
    torch.save(function(torch.load(path)), path)


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model": config["model"] | changes}))


def drop_config(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["model"][name]
    (folder / "config.json").write_text(json.dumps(config))


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / "consolidated.pth").unlink(), "must hold consolidated.pth"),
    (lambda f: (f / "config.json").unlink(), "config.json must lie beside the weights"),
    (lambda f: (f / "config.json").write_text("{"), "must hold a model's config as JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "must hold a model's config as a JSON object; got a list"),
    (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "needs the fields ['vocab_size'"),
    (lambda f: (f / "consolidated.pth").write_bytes(b"not at all"), "must hold tensors as torch.save"),
    (lambda f: (f / "consolidated.pth").write_bytes(b""), "must be a file written by torch.save"),
    (lambda f: torch.save(Code(), f / "consolidated.pth"), "could be code, and was not opened"),
    (lambda f: torch.save([torch.zeros(2)], f / "consolidated.pth"), "must hold parameters by name"),
    (lambda f: change(f, lambda s: {"model": s}), "must hold parameters by name"),
    (
        lambda f: [
            (f / "consolidated.pth").rename(f / "consolidated.00.pth"),
            torch.save({}, f / "consolidated.01.pth"),
        ],
        "it has 2 .pth files",
    ),
    (lambda f: (f / "consolidated.pth").write_bytes(b"PK\x03\x04 cut off"), "torch.save"),
    (lambda f: change(f, without("embed.weight")), "must hold embed.weight"),
    (lambda f: change(f, without("layers.1.mega.wv.bias")), "float32 of shape (24,), and is absent"),
    (lambda f: change(f, lambda s: s | {"layers.0.mega.wv.bias": torch.zeros(3)}), "and is float32 of shape (3,)"),
    (lambda f: change(f, lambda s: s | {"lm_head": torch.zeros(3)}), "reference parameter must be one of"),
    (lambda f: change(f, lambda s: s | {"output.final_norm.prior_count": torch.tensor(2)}), "prior_count must be 0"),
    (lambda f: change_config(f, {"share_emb": True}), "holds two that differ"),
    (lambda f: change_config(f, {"chunksize": 8}), "Did you mean 'chunk_size'?"),
    (lambda f: drop_config(f, "num_heads"), "a config needs the fields ['num_heads']"),
]


@pytest.mark.parametrize(("fault", "message"), BROKEN)
def test_anything_else_is_refused(fault: Callable[[Path], Any], message: str, command: Command, tmp_path: Path) -> None:
    release_of_gecko(tmp_path / "release")
    fault(tmp_path / "release")
    result = command("convert", tmp_path / "release", tmp_path / "out", code=2)
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert "run\n" not in result.stdout and not (tmp_path / "out").exists()


def test_weights_beside_another_config(command: Command, tmp_path: Path) -> None:
    release_of_gecko(tmp_path / "release")
    (tmp_path / "release" / "config.json").write_text('{"model_type": "llama"}')
    result = command("convert", tmp_path / "release" / "consolidated.pth", tmp_path / "out", code=2)
    assert "is of a 'llama' folder" in result.stderr
