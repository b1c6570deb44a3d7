"""gecko and transformers read the same folders, whichever of them wrote the folder."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import cases
from support.cases import tokens
from support.corpora import BYTE_MODEL, write_corpus
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

import gecko
from gecko.data import ByteTokenizer, load_tokenizer
from gecko.hf import GeckoConfig, GeckoForCausalLM, GeckoModel, byte_tokenizer
from gecko.layers.gated_attention import GatedAttention
from gecko.train import DataSettings, Run, train
from gecko.train.model import known_tokenizer


def test_transformers_opens_a_run_and_its_checkpoints_with_their_tokenizer(tmp_path):
    """Of a model of bytes, whose tokenizer needs no files here; a resumed session and a quantised copy keep them."""
    run = tmp_path / "run"
    settings = {"output": str(run), "batch_size": 2, "sequence_length": 24, "threads": 1}
    data = DataSettings(source=str(write_corpus(tmp_path / "texts")), validation_fraction=0.2)
    for steps in (1, 2):
        last = train(Run(model=BYTE_MODEL, data=data, steps=steps, **settings), resume=steps > 1).checkpoint
    expected = gecko.generate(gecko.load(run), [256, *b"def f("], max_new_tokens=6, temperature=0).tokens[0]
    for folder in (run, last):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        byte_tokenizer().save_pretrained(tmp_path / "made")
        made = load_tokenizer(str(tmp_path / "made"))
        for text in ("", "a<|pad|>\x00Größe 中\ud7ff<|endoftext|>", "a λ\n\r  b ", "don't", "日本 🦎"):
            ids = [256, *text.encode()]
            assert tokenizer(text).input_ids == ids == byte_tokenizer()(text).input_ids == [256, *made.encode(text)]
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
            assert byte_tokenizer().decode(ids, skip_special_tokens=True) == text
        for one in (tokenizer, byte_tokenizer()):
            assert one(["a", "bcd"], padding=True).input_ids == [[257, 257, 256, 97], [256, 98, 99, 100]]
            assert (one.bos_token_id, one.eos_token_id, one.pad_token_id) == (256, 256, 257)
        assert made.document_start == 256
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            assert torch.equal(model(tokens(2, 40)).logits, gecko.load(folder)(tokens(2, 40))[0])
        ids = tokenizer("def f(", return_tensors="pt")
        assert model.generate(**ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 7:].tolist() == expected
        write = pipeline("text-generation", model=str(folder))
        (found,) = write("def f(", max_new_tokens=6, do_sample=False, eos_token_id=None, return_full_text=False)
        assert found["generated_text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert known_tokenizer(folder) == "bytes" and isinstance(load_tokenizer(str(folder)), ByteTokenizer)


@pytest.mark.parametrize("variant", cases.VARIANTS)
def test_a_folder_is_the_same_model_for_both(variant, pair, tmp_path):
    ours, theirs = pair(variant)
    assert isinstance(theirs, GeckoForCausalLM) and theirs.config.architecture() == ours.config
    with torch.no_grad():
        assert torch.equal(theirs(tokens(2, 40)).logits, ours(tokens(2, 40))[0])
    theirs.save_pretrained(tmp_path)
    assert ours.config.tie_embedding is not ("model.gecko.head.weight" in load_file(tmp_path / "model.safetensors"))
    back = gecko.load(tmp_path)
    assert back.config == ours.config and back.fingerprint() == ours.fingerprint()
    again, base = (kind.from_pretrained(tmp_path, dtype="auto").eval() for kind in (AutoModelForCausalLM, AutoModel))
    assert isinstance(base, GeckoModel)
    with torch.no_grad():
        expected, _ = ours.hidden(tokens(2, 40))
        assert torch.equal(base(tokens(2, 40)).last_hidden_state, expected)
        assert torch.equal(again(tokens(2, 40)).logits, ours(tokens(2, 40))[0])


def test_config_keeps_what_transformers_adds(tmp_path):
    config = GeckoConfig.of(cases.SMALL, eos_token_id=3, use_cache=False)
    GeckoForCausalLM(config).save_pretrained(tmp_path)
    back = AutoConfig.from_pretrained(tmp_path)
    assert (back.eos_token_id, back.use_cache, back.model_type) == (3, False, "gecko")
    assert back.architecture() == gecko.load(tmp_path).config == cases.SMALL
    assert (back.hidden_size, back.num_hidden_layers) == (cases.SMALL.model_dim, cases.SMALL.num_layers)
    named = GeckoConfig(num_hidden_layers=3, tie_word_embeddings=True)
    assert (named.num_layers, named.tie_embedding, named.architecture().num_layers) == (3, True, 3)
    assert not GeckoConfig().tie_word_embeddings
    with pytest.raises(ValueError, match="num_heads"):
        GeckoForCausalLM(GeckoConfig(num_heads=3))


def test_made_from_a_config_it_starts_as_a_gecko_does():
    config = GeckoConfig.of(cases.SMALL)
    torch.manual_seed(5)
    theirs = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(5)
    assert theirs.model.gecko.fingerprint() == gecko.Gecko(cases.SMALL).fingerprint()


def test_another_dtype_and_more_tokens(text_folder, tmp_path):
    theirs = AutoModelForCausalLM.from_pretrained(text_folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in theirs.parameters()} == {torch.bfloat16}
    theirs.save_pretrained(tmp_path)
    assert gecko.load(tmp_path).head.weight.dtype == torch.bfloat16
    theirs.resize_token_embeddings(300)
    theirs.save_pretrained(tmp_path)
    assert gecko.load(tmp_path).config.vocab_size == 300
    with torch.no_grad():
        assert theirs(torch.tensor([[299]])).logits.shape == (1, 1, 300)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant, text_folder, monkeypatch):
    """Each block runs twice: once in the forward pass, once when the backward pass recomputes it."""
    runs, attend = [], GatedAttention.forward
    monkeypatch.setattr(GatedAttention, "forward", lambda self, *inputs: (runs.append(self), attend(self, *inputs))[1])
    gradients, counts = [], []
    for enabled in (False, True):
        runs.clear()
        theirs = AutoModelForCausalLM.from_pretrained(text_folder).train()
        if enabled:
            theirs.gradient_checkpointing_enable({"use_reentrant": reentrant})
            theirs.enable_input_require_grads()
        assert theirs.is_gradient_checkpointing is enabled
        theirs(tokens(2, 30), labels=tokens(2, 30)).loss.backward()
        gradients.append(theirs.model.gecko.embedding.weight.grad)
        counts.append(len(runs))
    assert torch.equal(*gradients) and counts == [2, 4]
    if reentrant:  # it would lose the gradients of a state, which a later call reads
        with pytest.raises(ValueError, match="loses the gradients of a state"):
            theirs(tokens(2, 30), use_cache=True)
    else:
        assert theirs(tokens(2, 30), use_cache=True).past_key_values is not None
    theirs.gradient_checkpointing_disable()
    assert not theirs.is_gradient_checkpointing


def write_without(name: str, source: Path, folder: Path, other: str | None = None) -> dict[str, torch.Tensor]:
    """Write a model's folder without a parameter, or with another name for it; return the other parameters."""
    weights = load_file(source / "model.safetensors")
    missing = weights.pop(name)
    save_file(weights | ({other: missing} if other else {}), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return weights


@pytest.mark.parametrize("other", [None, "model.gecko.blocks.1.mixer.to_value.bios"])
def test_a_folder_without_its_parameters_is_refused(other, text_folder, tmp_path):
    write_without("model.gecko.blocks.1.mixer.to_value.bias", text_folder, tmp_path, other)
    with pytest.raises(ValueError, match=r"must hold the parameters of its config; missing keys: .*to_value.bias"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_missing_parameters_are_drawn_where_the_caller_is_told(text_folder, tmp_path):
    name = "model.gecko.blocks.1.mixer.cema.alpha"
    weights = write_without(name, text_folder, tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {name}
    found = dict(model.named_parameters())
    drawn = found.pop(name)
    assert 0.15 < float(drawn.std()) < 0.25 and drawn.isfinite().all()
    assert all(torch.equal(weights[other], x) for other, x in found.items())


def test_a_vocabulary_of_another_size_is_drawn_if_the_caller_wants_it(text_folder):
    config = GeckoConfig.from_pretrained(text_folder, vocab_size=280)
    model = AutoModelForCausalLM.from_pretrained(text_folder, config=config, ignore_mismatched_sizes=True)
    assert model.get_input_embeddings().weight.shape[0] == 280
    weights = load_file(text_folder / "model.safetensors")
    assert torch.equal(model.model.gecko.blocks[0].mixer.scale, weights["model.gecko.blocks.0.mixer.scale"])
    assert 0 < float(model.get_input_embeddings().weight.abs().max()) < 3.1 / config.hidden_size**0.5
    with pytest.raises((RuntimeError, ValueError), match="size"):
        AutoModelForCausalLM.from_pretrained(text_folder, config=config)


@pytest.mark.parametrize("lost", ["embedding.weight", "blocks.1.mixer.to_value.bias"])
def test_a_state_dict_that_lacks_parameters_is_refused_before_anything_is_written(lost, pair, tmp_path):
    theirs = pair()[1]
    weights = {name: x for name, x in theirs.state_dict().items() if name != f"model.gecko.{lost}"}
    with pytest.raises(ValueError, match=f"missing or unknown: model.gecko.{lost}"):
        theirs.save_pretrained(tmp_path, state_dict=weights)
    assert not list(tmp_path.iterdir())


def test_two_names_of_one_field_may_not_differ():
    for theirs, ours in GeckoConfig.attribute_map.items():
        fields = GeckoConfig().to_dict()
        GeckoConfig(**fields)
        with pytest.raises(ValueError, match=f"{theirs} and {ours} are names of one field; got 6 and "):
            GeckoConfig(**{**fields, theirs: 6})


@pytest.mark.parametrize("arguments", [{"push_to_hub": True}, {"safe_serialization": False}, {"variant": "fp16"}])
def test_other_ways_to_save_are_refused(arguments, pair, tmp_path):
    with pytest.raises(ValueError, match="saved as safetensors files"):
        pair()[1].save_pretrained(tmp_path, **arguments)
    with pytest.raises(ValueError, match="state_dict must hold parameters"):
        pair()[1].save_pretrained(tmp_path, state_dict={"lm_head.weight": torch.zeros(1)})
    assert not list(tmp_path.iterdir())


def test_weights_in_several_files(pair, tmp_path):
    """Both read the files; saving again as one file, or as fewer, leaves none of the others behind."""
    ours, theirs = pair()
    for most, several in (("20KB", True), (None, False), (50_000, True), ("1GB", False)):
        theirs.save_pretrained(tmp_path, max_shard_size=most)
        files = sorted(path.name for path in tmp_path.glob("model*"))
        assert (files == ["model.safetensors"]) is not several
        assert not several or len(files) == 1 + int(files[0][-17:-12])
        assert gecko.load(tmp_path).fingerprint() == ours.fingerprint()
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
        assert again.model.gecko.fingerprint() == ours.fingerprint()


@pytest.mark.parametrize(("most", "written"), [(None, 0), (None, 1), ("20KB", 0), ("20KB", 2)])
def test_a_save_that_fails_leaves_the_model_that_was_there(most, written, pair, tmp_path, monkeypatch):
    """The disk is full after some files. The other model has the same config, so that its files would fit."""
    GeckoForCausalLM(GeckoConfig.of(pair()[0].config)).save_pretrained(tmp_path, max_shard_size=most)
    before, files = {path: path.read_bytes() for path in tmp_path.iterdir()}, []

    def full(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        files.append(path)
        if len(files) > written:
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr("gecko.io.model_folder.save_file", full)
    monkeypatch.setattr(gecko.GeckoConfig, "save", lambda self, path: full({}, path, {}))
    with pytest.raises(OSError, match=r"^\[Errno 28\] could not write [^ ]* \(No space left on device\); "):
        pair()[1].save_pretrained(tmp_path, max_shard_size=most)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def file_of_other_weights(folder: Path) -> None:
    torch.manual_seed(9)
    GeckoForCausalLM(GeckoConfig.of(cases.SMALL)).save_pretrained(folder / "other", max_shard_size="32KB")
    (folder / FILE.format(2)).write_bytes((folder / "other" / FILE.format(2)).read_bytes())


def file_of_another_model(folder: Path) -> None:
    wider = dataclasses.replace(cases.SMALL, cema_modes=cases.SMALL.cema_modes + 1)
    GeckoForCausalLM(GeckoConfig.of(wider)).save_pretrained(folder / "other", max_shard_size="32KB")
    for name in (FILE.format(1), FILE.format(3)):
        (folder / name).write_bytes((folder / "other" / name).read_bytes())


def shorter_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].popitem()
    (folder / INDEX).write_text(json.dumps(index))


FILE, INDEX = "model-{:05d}-of-00003.safetensors", "model.safetensors.index.json"
DAMAGES = {
    lambda folder: flip(folder / FILE.format(2)): "is damaged",
    file_of_other_weights: "of one model",
    file_of_another_model: "of one model|must hold the weights that",
    shorter_index: "must hold the weights that",
    lambda folder: (folder / FILE.format(3)).unlink(): "there is none",
    lambda folder: (folder / "model.safetensors").write_bytes(b""): "Remove the older one",
    lambda folder: (folder / INDEX).write_text("{}"): "weight_map",
}


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_several_files_is_noticed(damage, tmp_path):
    GeckoForCausalLM(GeckoConfig.of(cases.SMALL)).save_pretrained(tmp_path, max_shard_size="32KB")
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    gecko.load(tmp_path)
    damage(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=DAMAGES[damage]):
        gecko.load(tmp_path)


def test_transformers_refuses_files_of_two_models(tmp_path):
    GeckoForCausalLM(GeckoConfig.of(cases.SMALL)).save_pretrained(tmp_path / "own", max_shard_size="32KB")
    GeckoForCausalLM.from_pretrained(tmp_path, subfolder="own")
    file_of_other_weights(tmp_path / "own")
    for given in ({"subfolder": "own"}, {}):
        with pytest.raises(ValueError, match="must be of one model"):
            GeckoForCausalLM.from_pretrained(tmp_path if given else tmp_path / "own", **given)
