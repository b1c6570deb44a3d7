"""A classifier scores every text as alone, wherever its padding is, and keeps what it learns."""

import json

import pytest
import torch
import torch.nn.functional as F
from hf.conftest import BYTES, arguments, losses
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import tokens
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments

import gecko
from gecko.hf import GeckoConfig, GeckoForSequenceClassification, byte_tokenizer

PADDING, WIDTH = 257, 17


@pytest.fixture(scope="module")
def classifier() -> GeckoForSequenceClassification:
    torch.manual_seed(0)
    return GeckoForSequenceClassification(GeckoConfig.of(BYTES, num_labels=3, pad_token_id=PADDING)).double().eval()


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, WIDTH - 6)), min_size=1, max_size=4), st.booleans())
def test_scores_are_as_alone(classifier, rows, masked):
    """The mask marks padding; without one, the padding id before and after a text does. Inside, the id is text."""
    columns = torch.arange(WIDTH)
    mask = torch.stack([(columns >= before) & (columns < before + length) for before, length in rows])
    texts = tokens(len(rows), WIDTH, len(rows))
    for (before, length), text in zip(rows, texts, strict=True):
        text[before + length // 2] = PADDING if length > 2 else 5
    ids = texts.masked_fill(~mask, 9_999 if masked else PADDING)
    with torch.no_grad():
        found = classifier(ids, attention_mask=mask if masked else None).logits
        for row, (before, length) in enumerate(rows):
            text = texts[row : row + 1, before : before + length]
            hidden, _ = classifier.model.gecko.hidden(text)
            expected = classifier.score(hidden[:, -1])
            torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=1e-11)


def test_texts_that_go_on_from_a_cache_are_scored_without_their_padding(classifier):
    ids = tokens(2, 9)
    ids[1, 6:] = PADDING
    with torch.no_grad():
        expected = classifier(ids).logits
        cache = classifier(ids[:, :4], use_cache=True).past_key_values
        torch.testing.assert_close(classifier(ids[:, 4:], past_key_values=cache).logits, expected)
    with pytest.raises(ValueError, match="several texts need an attention_mask"):
        classifier(inputs_embeds=classifier.get_input_embeddings()(tokens(2, 9)))


def test_embeddings_are_scored_as_their_tokens(classifier):
    ids, mask = tokens(2, 9), torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    embeds = classifier.get_input_embeddings()(ids)
    expected = classifier(ids, attention_mask=mask).logits
    torch.testing.assert_close(classifier(inputs_embeds=embeds, attention_mask=mask).logits, expected)


LOSSES = {
    "single_label_classification": (torch.tensor([2, 0]), F.cross_entropy),
    "multi_label_classification": (torch.tensor([[1.0, 0, 1], [0, 0, 1]]), F.binary_cross_entropy_with_logits),
    "regression": (torch.tensor([[0.5, 1, 2], [3, 0, 1]]), F.mse_loss),
}


@pytest.mark.parametrize("problem", LOSSES)
def test_loss(problem, classifier, monkeypatch):
    monkeypatch.setattr(classifier.config, "problem_type", problem)
    labels, loss = LOSSES[problem]
    labels = labels.double() if labels.is_floating_point() else labels
    out = classifier(tokens(2, 9), labels=labels)
    torch.testing.assert_close(out.loss, loss(out.logits, labels))


def test_several_texts_need_a_mask_or_a_padding_id(classifier, monkeypatch):
    monkeypatch.setattr(classifier.config, "pad_token_id", None)
    classifier(tokens(1, 9))
    classifier(tokens(2, 9), attention_mask=torch.ones(2, 9))
    with pytest.raises(ValueError, match="need an attention_mask, or a pad_token_id"):
        classifier(tokens(2, 9))


def test_folders(text_folder, tmp_path):
    """A language model's folder gives everything but the scores; a classifier's folder is refused as one of those."""
    torch.manual_seed(1)
    made = AutoModelForSequenceClassification.from_pretrained(text_folder, num_labels=3, pad_token_id=PADDING)
    ours = gecko.load(text_folder)
    assert made.model.gecko.fingerprint() == ours.fingerprint()
    assert 0.5 < made.score.weight.std() * BYTES.model_dim**0.5 < 2
    made.save_pretrained(tmp_path, max_shard_size="40KB")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(again.score.weight, made.score.weight) and again.config.num_labels == 3
    assert torch.equal(again(tokens(1, 9)).logits, made.eval()(tokens(1, 9)).logits)
    assert AutoModel.from_pretrained(tmp_path).gecko.fingerprint() == ours.fingerprint()
    with pytest.raises(ValueError, match=r"gecko-model-1\); it holds gecko-classifier-1"):
        gecko.load(tmp_path)
    with pytest.raises(ValueError, match=r"unexpected keys: score\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert other.score.weight.shape[0] == 5 and other.model.gecko.fingerprint() == ours.fingerprint()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_classifier_learns(side, text_folder, tmp_path):
    """The class is that of the first word; all parameters but those of the language model's head change."""
    pytest.importorskip("accelerate")
    model = AutoModelForSequenceClassification.from_pretrained(text_folder, num_labels=2, pad_token_id=PADDING)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = side
    rows = [{**tokenizer("ab"[i % 2] + "x" * (i % 5)), "labels": i % 2} for i in range(16)]
    args = TrainingArguments(**arguments(tmp_path, max_steps=30, per_device_train_batch_size=8))
    trainer = Trainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    found = trainer.predict(rows)
    assert (found.predictions.argmax(-1) == found.label_ids).all()
    same = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert same == {"model.gecko.head.weight"}


def test_a_reward_model_learns(text_folder, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    peft = pytest.importorskip("peft")
    from gecko.hf import PROJECTIONS, chat_tokenizer

    asked = {"role": "user", "content": "say"}
    words = {"chosen": "yes", "rejected": "no"}
    pairs = [
        {name: [asked, {"role": "assistant", "content": word * (1 + i % 3)}] for name, word in words.items()}
        for i in range(8)
    ]
    model = AutoModelForSequenceClassification.from_pretrained(text_folder, num_labels=1, pad_token_id=PADDING)
    trainer = trl.RewardTrainer(
        model=model, args=trl.RewardConfig(**arguments(tmp_path), bf16=False),
        train_dataset=datasets.Dataset.from_list(pairs), processing_class=chat_tokenizer(),
        peft_config=peft.LoraConfig(r=8, target_modules=list(PROJECTIONS), task_type="SEQ_CLS"),
    )  # fmt: skip
    trainer.train()
    assert sum(losses(trainer)[-3:]) < 0.7 * sum(losses(trainer)[:3])
    trainer.save_model(str(tmp_path / "adapter"))
    base = AutoModelForSequenceClassification.from_pretrained(text_folder, num_labels=1, pad_token_id=PADDING)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, trainer.model.eval()(ids).logits)


def test_an_adapter_that_names_the_classifiers_old_module_loads(classifier, tmp_path):
    """Without ``task_type`` PEFT stores the module of the class, which was ``gecko.hf.classification``."""
    peft = pytest.importorskip("peft")
    classifier.save_pretrained(tmp_path / "base")
    base = GeckoForSequenceClassification.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["to_value"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    stored = json.loads(path.read_text())
    stored["auto_mapping"]["parent_library"] = "gecko.hf.classification"
    path.write_text(json.dumps(stored))
    allowed = [stored["auto_mapping"]["parent_library"]]
    again = peft.AutoPeftModel.from_pretrained(tmp_path / "adapter", import_allowlist=allowed)
    text = tokens(1, 9)
    torch.testing.assert_close(again.eval()(text).logits, adapted.eval()(text).logits, rtol=0, atol=0)
