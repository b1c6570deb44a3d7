"""Conversations become the same tokens in transformers, TRL and the server, also after an adapter was merged."""

import pytest
import torch
from hf.conftest import arguments, losses
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from gecko.data import load_tokenizer
from gecko.data.chat import find_format
from gecko.data.turns import Turn
from gecko.hf import PROJECTIONS, byte_tokenizer, chat_tokenizer

pytest.importorskip("jinja2")

BORDER = 256
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": " 1 + 1? "},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 2?"},
]


def encode(messages: list[dict[str, str]], **options) -> list[int]:
    return chat_tokenizer().apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]


def test_the_template_is_the_plain_format_with_ends_of_answers_which_are_marked():
    prompt, whole = encode(TALK, add_generation_prompt=True), encode([*TALK, {"role": "assistant", "content": "4"}])
    assert byte_tokenizer().decode(prompt) == (
        "<|endoftext|>System: be brief\n\nUser: 1 + 1?\n\nAssistant: 2<|endoftext|>\n\nUser: 2 + 2?\n\nAssistant:"
    )
    assert whole == [*prompt, *b" 4", BORDER, *b"\n\n"], "a prompt is the beginning of what is trained"
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    found = chat_tokenizer().apply_chat_template(TALK, **options)
    marked = [token for token, mark in zip(found["input_ids"], found["assistant_masks"], strict=True) if mark]
    assert marked == [*b" 2", BORDER]


PIECES = st.sampled_from(["<|endoftext|>", "<|pad|>", "<|", "|>", "endoftext", "pad", "<", "|", ">", " ", "x", "λ"])


@settings(max_examples=60)
@given(st.lists(PIECES, max_size=8).map("".join), st.sampled_from(["user", "assistant"]))
def test_a_message_cannot_end_itself(content, role):
    """There are as many document ends as without the message's text."""
    ids = encode([{"role": role, "content": content}])
    assert ids.count(BORDER) == (2 if role == "assistant" else 1) and 257 not in ids


@pytest.mark.parametrize("message", [{"role": "tool", "content": "x"}, {"role": "user", "content": [{"type": "text"}]}])
def test_other_messages_are_refused(message):
    with pytest.raises(Exception, match="must have text and the role"):
        encode([message])


def test_trl_s_document_end_is_one_token():
    """TRL writes the end as text. ``byte_tokenizer`` reads it as text, as its law says."""
    assert chat_tokenizer()("a<|endoftext|>").input_ids == [BORDER, 97, BORDER]
    assert byte_tokenizer()("a<|endoftext|>").input_ids == [BORDER, 97, *b"<|endoftext|>"]


def test_a_chat_is_trained_and_kept_through_a_merge(text_folder, tmp_path):
    trl = pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    datasets = pytest.importorskip("datasets")
    rows = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}] for i in range(8)]
    trainer = trl.SFTTrainer(
        model=str(text_folder), processing_class=chat_tokenizer(),
        train_dataset=datasets.Dataset.from_list([{"messages": row} for row in rows]),
        args=trl.SFTConfig(
            **arguments(tmp_path / "out", max_steps=8, learning_rate=2e-2, seed=42), bf16=False,
            assistant_only_loss=True,
        ),
        peft_config=peft.LoraConfig(r=8, target_modules=list(PROJECTIONS)),
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    for labels in batch["labels"]:
        answer = labels[labels != -100].tolist()
        assert bytes(answer[:-1]).decode()[::2] == " !" and answer[-1] == BORDER
    trainer.train()
    assert losses(trainer)[-1] < 0.9 * losses(trainer)[0]
    trainer.save_model(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(text_folder)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tmp_path / "adapter").save_pretrained(tmp_path / "merged")
    served = find_format(load_tokenizer(str(tmp_path / "merged")), tmp_path / "merged")
    assert served.encode([Turn(**message) for message in TALK]) == encode(TALK, add_generation_prompt=True)
    asked = AutoTokenizer.from_pretrained(tmp_path / "merged").apply_chat_template(
        rows[0][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").generate(**asked, max_new_tokens=3, do_sample=False)
    assert torch.equal(out[:, : asked["input_ids"].shape[1]], asked["input_ids"])
