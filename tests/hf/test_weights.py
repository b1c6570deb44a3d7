"""Each way in which transformers, accelerate and PyTorch load weights loads them correctly or raises an error."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import cases
from support.cases import tokens
from transformers import AutoModel, AutoModelForCausalLM

import gecko
from gecko.hf import GeckoConfig, GeckoForCausalLM, GeckoModel
from gecko.io.quantization import quantize
from gecko.models.gecko import save_model

CONFIGS = {"untied": cases.SMALL, "tied": dataclasses.replace(cases.SMALL, tie_embedding=True)}


Writer = Callable[[GeckoForCausalLM, Path], Any]
Loader = Callable[[Path, gecko.GeckoConfig], gecko.Gecko]


def write_as_before(model: GeckoForCausalLM, folder: Path) -> None:
    """Write names without the prefix, as ``save_pretrained`` of version 0.1.0 did."""
    model.save_pretrained(folder)
    config = (folder / "config.json").read_bytes()
    save_model(folder, model.config.architecture(), model.model.gecko.state_dict())
    (folder / "config.json").write_bytes(config)


def empty(config: gecko.GeckoConfig) -> GeckoForCausalLM:
    torch.manual_seed(99)
    return GeckoForCausalLM(GeckoConfig.of(config))


def by_load_state_dict(folder: Path, config: gecko.GeckoConfig) -> gecko.Gecko:
    model = empty(config)
    weights = load_file(folder / "model.safetensors")
    of_base = any(name.startswith("gecko.") for name in weights)
    assert not (model.model if of_base else model).load_state_dict(weights).missing_keys
    return model.model.gecko


def by_trainer_s_load_state_dict(folder: Path, config: gecko.GeckoConfig) -> gecko.Gecko:
    model = empty(config)
    model.load_state_dict(load_file(folder / "model.safetensors"), False)
    return model.model.gecko


def by_accelerate(folder: Path, config: gecko.GeckoConfig, *, meta: bool = True) -> gecko.Gecko:
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights() if meta else nullcontext():
        model = empty(config)
    if meta:
        model.tie_weights()  # required by accelerate's documentation
    return accelerate.load_checkpoint_and_dispatch(model, str(folder), device_map={"": "cpu"}).model.gecko


WRITERS: dict[str, Writer] = {
    "gecko": lambda model, folder: model.model.gecko.save(folder),
    "transformers": lambda model, folder: model.save_pretrained(folder),
    "the base model": lambda model, folder: model.model.save_pretrained(folder),
    "transformers before": write_as_before,
}
LOADERS: dict[str, Loader] = {
    "from_pretrained": lambda folder, config: AutoModelForCausalLM.from_pretrained(folder).model.gecko,
    "the base's from_pretrained": lambda folder, config: AutoModel.from_pretrained(folder).gecko,
    "load_state_dict": by_load_state_dict,
    "Trainer's load_state_dict": by_trainer_s_load_state_dict,
    "accelerate": by_accelerate,
    "accelerate without meta": partial(by_accelerate, meta=False),
}
MAY_REFUSE = {
    ("the base model", "accelerate"),
    ("transformers before", "accelerate"),
    ("the base model", "Trainer's load_state_dict"),
}
"""Pairs in which the file has the names of another model class: the loader may raise, but not ignore the names."""
SKIPPED = {"the base model", "transformers before"}
"""Writers of names that accelerate skips with a warning where the model has weights."""


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_weights_arrive(config, write, load, tmp_path):
    torch.manual_seed(3)
    model = GeckoForCausalLM(GeckoConfig.of(config))
    WRITERS[write](model, tmp_path)
    assert gecko.load(tmp_path).fingerprint() == model.model.gecko.fingerprint()
    if load == "accelerate without meta" and write in SKIPPED:
        return
    try:
        loaded = LOADERS[load](tmp_path, config)
    except (RuntimeError, ValueError):
        assert (write, load) in MAY_REFUSE
    else:
        assert loaded.fingerprint() == model.model.gecko.fingerprint()
        assert (loaded.head.weight is loaded.embedding.weight) is config.tie_embedding
    if write in ("gecko", "transformers") and not config.tie_embedding:
        assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


@pytest.mark.parametrize("names", ["quantised", "another model's"])
def test_weights_of_another_kind_are_refused_where_names_need_not_fit(names, tmp_path):
    if names == "quantised":
        pytest.importorskip("torchao")
        model = gecko.Gecko(gecko.GeckoConfig.preset("tiny", num_layers=1))
        quantize(model, 8)
        model.save(tmp_path)
        weights: dict[str, Any] = load_file(tmp_path / "model.safetensors")
        with pytest.raises(OSError, match="metadata"):
            by_accelerate(tmp_path, model.config, meta=False)
    else:
        model, weights = gecko.Gecko(cases.SMALL), {"transformer.wte.weight": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"weights must be those of this model, named model\.gecko\.… "):
        empty(model.config).load_state_dict(weights, strict=False)


def test_part_of_the_weights_may_be_loaded_and_the_base_model_alone():
    """PEFT loads the weights of an adapter the first way."""
    model, base = empty(cases.SMALL), GeckoModel(GeckoConfig.of(cases.SMALL))
    base.load_state_dict(model.model.gecko.state_dict())
    assert base.gecko.fingerprint() == model.model.gecko.fingerprint()
    weight = torch.full_like(model.model.gecko.head.weight, 0.5)
    missing, unexpected = model.load_state_dict({"model.gecko.head.weight": weight}, strict=False)
    assert not unexpected and len(missing) == len(model.state_dict()) - 1
    assert torch.equal(model.model.gecko.head.weight, weight)


PARTS = ("embedding", "blocks", "final_norm", "head")


def on_disk(*parts: str) -> dict[str, str]:
    return {f"model.gecko.{part}": "disk" if part in parts else "cpu" for part in PARTS}


DEVICES = {
    "disk": {"": "disk"},
    "blocks on the disk": on_disk("blocks"),
    "ends on the disk": on_disk("embedding", "final_norm", "head"),
}


@pytest.fixture(params=["untied", "tied"])
def model(request, tmp_path) -> GeckoForCausalLM:
    torch.manual_seed(3)
    GeckoForCausalLM(GeckoConfig.of(CONFIGS[request.param])).save_pretrained(tmp_path / "model")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()


def offloaded(way: str, folder: Path) -> GeckoForCausalLM:
    accelerate = pytest.importorskip("accelerate")
    tied = gecko.GeckoConfig.load(folder / "model" / "config.json").tie_embedding
    if transformers.__version__ < "5" and (way == "disk" or (tied and way == "ends on the disk")):
        pytest.skip("transformers 4 loads no model with everything, or with a tied head, on the disk: no Llama either")
    if way in DEVICES:
        places = {"device_map": DEVICES[way], "offload_folder": folder / "elsewhere"}
        return AutoModelForCausalLM.from_pretrained(folder / "model", **places).eval()
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    if way == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device="cpu")
    return accelerate.disk_offload(model, folder / "elsewhere", execution_device="cpu")


@pytest.mark.parametrize("way", [*DEVICES, "cpu_offload", "disk_offload"])
def test_offloaded_weights_compute_the_same(way, model, tmp_path):
    there = offloaded(way, tmp_path)
    ids, name = tokens(2, 40), model.model.gecko.fingerprint()
    assert any(parameter.is_meta for parameter in there.parameters())
    with torch.no_grad():
        expected, found = (each(ids, labels=ids, use_cache=True) for each in (model, there))
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)
    assert found.past_key_values.state.model == name == there.model.gecko.fingerprint()
    greedy = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(there.generate(ids, **greedy), model.generate(ids, **greedy))
    with torch.no_grad():
        other = empty(model.config.architecture()).eval()(ids, use_cache=True).past_key_values
    with torch.no_grad(), pytest.raises(ValueError, match="made by other weights"):
        there(tokens(2, 1), past_key_values=other)


@pytest.mark.parametrize("most", [None, "20KB"])
@pytest.mark.parametrize("way", [*DEVICES, "cpu_offload", "disk_offload"])
def test_offloaded_weights_are_saved(way, most, model, tmp_path):
    offloaded(way, tmp_path).save_pretrained(tmp_path / "saved", max_shard_size=most)
    assert gecko.load(tmp_path / "saved").fingerprint() == model.model.gecko.fingerprint()


def test_replaced_and_resized_weights_are_not_drawn_again(text_folder):
    model = AutoModelForCausalLM.from_pretrained(text_folder)
    model.set_output_embeddings(torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False))
    model.resize_token_embeddings(model.config.vocab_size + 8)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.post_init()
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
