"""LoRA with PEFT and SFT with TRL train, and what they save can be loaded."""

import dataclasses
import json
import os

import pytest
import torch
import torch.nn.functional as F
from hf.conftest import BYTES, arguments, improved
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

import gecko
from gecko.hf import PROJECTIONS, byte_tokenizer, chat_tokenizer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

TEXTS = [f"question {i}: what is {i} + {i}? answer: {2 * i}." for i in range(24)]


@pytest.fixture
def lines(tmp_path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(30).unsqueeze(0)).logits


def test_lora(model, text_folder, lines, tmp_path):
    peft = pytest.importorskip("peft")
    datasets = pytest.importorskip("datasets")
    before, tokenizer = logits(model), byte_tokenizer()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"))
    changed = {name.split(".")[-2] for name, _ in adapted.named_modules() if name.endswith(".lora_A")}
    assert changed == set(PROJECTIONS)
    rows = datasets.load_dataset("json", data_files=lines, split="train", cache_dir=str(tmp_path / "cache"))
    rows = rows.map(lambda row: {"input_ids": tokenizer(row["text"]).input_ids}, remove_columns=["text"])
    trainer = Trainer(
        model=adapted, args=TrainingArguments(**arguments(tmp_path)), train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )  # fmt: skip
    trainer.train()
    assert improved(trainer)
    trained, greedy = logits(adapted), {"max_new_tokens": 8, "do_sample": False}
    assert not torch.allclose(trained, before, atol=1e-2)
    inputs = tokenizer(["def f(", "a"], padding=True, return_tensors="pt")
    assert torch.equal(adapted.generate(**inputs, **greedy), adapted.generate(**inputs, **greedy, use_cache=False))
    adapted.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(text_folder), tmp_path / "adapter")
    assert torch.equal(logits(again), trained)
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        merged, _ = gecko.load(tmp_path / "merged")(torch.arange(30).unsqueeze(0))
    torch.testing.assert_close(merged, trained, atol=1e-4, rtol=1e-4)


def test_the_head_can_have_an_adapter(model):
    """The loss is that of the adapted head."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["head"], task_type="CAUSAL_LM", init_lora_weights=False)
    ids, before = torch.arange(9).unsqueeze(0), logits(model)
    adapted = peft.get_peft_model(model, config)
    out = adapted(ids, labels=ids)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[0, :-1], ids[0, 1:]))
    assert not torch.allclose(logits(adapted), before)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_trained_beside_an_adapter_is_saved(tied, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    gecko.Gecko(dataclasses.replace(BYTES, tie_embedding=tied)).save(tmp_path / "base")
    config = peft.LoraConfig(
        r=4, target_modules=["to_value"], modules_to_save=["head"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    ids, found = torch.arange(9).unsqueeze(0), []
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        out = adapted.train()(ids, labels=ids)
        torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[0, :-1], ids[0, 1:]))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        found.append(out.loss.item())
    assert found[-1] < found[0]
    trained = logits(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits(again), trained)
    merged = again.merge_and_unload()
    if merged.config.tie_word_embeddings:  # with transformers 4, PEFT has reset it
        with pytest.raises(ValueError, match=r"head and embedding must be equal.*tie_word_embeddings"):
            merged.save_pretrained(tmp_path / "merged")
        merged.config.tie_word_embeddings = False
    merged.save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        written, _ = gecko.load(tmp_path / "merged")(torch.arange(30).unsqueeze(0))
    torch.testing.assert_close(written, trained, atol=1e-4, rtol=1e-4)


ADAPTERS = {
    "DoRA": ("LoraConfig", {"target_modules": list(PROJECTIONS), "use_dora": True}),
    "LoRA of the embedding": ("LoraConfig", {"target_modules": ["embedding", "to_value"]}),
    "IA3": ("IA3Config", {"target_modules": ["to_value", "fc1"], "feedforward_modules": ["fc1"]}),
    "LoHa": ("LoHaConfig", {"target_modules": list(PROJECTIONS)}),
    "norm": ("LoraConfig", {"target_modules": ["to_hidden"], "modules_to_save": ["final_norm"]}),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_compute_the_same_whole_by_token_saved_and_merged(kind, model, text_folder, tmp_path):
    peft = pytest.importorskip("peft")
    name, settings = ADAPTERS[kind]
    ids, before = torch.arange(24).unsqueeze(0), logits(model)
    adapted = peft.get_peft_model(model, getattr(peft, name)(**settings))
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in (x for x in adapted.parameters() if x.requires_grad):
            weight.add_(0.1 * torch.randn_like(weight))
        whole, trained = adapted.eval()(ids).logits, logits(adapted)
        assert not torch.allclose(trained, before, atol=1e-3)
        cache, parts = None, []
        for begin, end in ((0, 11), *((i, i + 1) for i in range(11, 24))):
            part = adapted(ids[:, begin:end], past_key_values=cache, use_cache=True)
            cache, parts = part.past_key_values, [*parts, part.logits]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)
        inputs, greedy = byte_tokenizer()(["def f(", "a"], padding=True, return_tensors="pt"), {"max_new_tokens": 8}
        made = [adapted.generate(**inputs, **greedy, do_sample=False, use_cache=cached) for cached in (True, False)]
        assert torch.equal(*made)
        adapted.save_pretrained(tmp_path / "adapter")
        assert not (tmp_path / "adapter" / "model.safetensors").exists()
        base = AutoModelForCausalLM.from_pretrained(text_folder)
        again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        torch.testing.assert_close(again(ids).logits, whole)
        merged = again.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, whole, atol=1e-4, rtol=1e-4)
        merged.save_pretrained(tmp_path / "merged")
        written, _ = gecko.load(tmp_path / "merged")(ids)
        torch.testing.assert_close(written, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_sft(packing, model, text_folder, lines, tmp_path):
    trl = pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_dataset("json", data_files=lines, split="train", cache_dir=str(tmp_path / "cache"))
    config = trl.SFTConfig(**arguments(tmp_path), max_length=64, packing=packing, bf16=False)
    lora = peft.LoraConfig(r=8, target_modules=list(PROJECTIONS)) if packing else None
    trainer = trl.SFTTrainer(
        model=model if packing else str(text_folder), args=config, train_dataset=rows,
        processing_class=chat_tokenizer(), peft_config=lora,
    )  # fmt: skip
    for text, row in zip(TEXTS, trainer.train_dataset, strict=False):
        assert packing or row["input_ids"] == [256, *text.encode(), 256][:64]
    trainer.train()
    assert improved(trainer)
    trained = logits(trainer.model)
    trainer.save_model(str(tmp_path / "saved"))
    if packing:
        again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(text_folder), tmp_path / "saved")
        assert torch.equal(logits(again), trained)
    else:
        with torch.no_grad():
            assert torch.equal(gecko.load(tmp_path / "saved")(torch.arange(30).unsqueeze(0))[0], trained)
