"""Tokenizers for transformers: of bytes, of chats in bytes, and those of models."""

from __future__ import annotations

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from gecko.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, byte_definition, byte_settings
from gecko.data.tokenizers import Tokenizer as ModelTokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer with the ids of ``gecko.ByteTokenizer``.

    Ids 0 to 255 are the bytes of UTF-8 text, 256 starts and ends a document, 257 pads on the left. Every text starts
    with 256, as documents do in training, unless ``add_special_tokens=False``. No text encodes to 256 or 257.
    """
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_definition()), **byte_settings(chat=False))


CHAT_TEMPLATE = """\
{%- set names = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"} -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role not in names or message.content is not string -%}
{{- raise_exception("a message must have text and the role system, developer, user or assistant.") -}}
{%- endif -%}
{%- set text = message.content | trim | replace("<|endoftext|>", "<|endoftext |>") | replace("<|pad|>", "<|pad |>") -%}
{{- names[message.role] + ":" -}}
{%- if message.role == "assistant" -%}
{%- generation -%}{{- " " + text + eos_token -}}{%- endgeneration -%}{{- "\\n\\n" -}}
{%- else -%}
{{- " " + text + "\\n\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "Assistant:" -}}{%- endif -%}
"""
"""The plain format of ``gecko serve``, with the document end after every answer. Answers are marked for training."""


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return ``byte_tokenizer()`` with a chat template, in the form that trainers of TRL expect.

    As in other tokenizers of transformers, and unlike in ``byte_tokenizer()``, the texts ``<|endoftext|>`` and
    ``<|pad|>`` encode to 256 and 257: TRL and chat templates write special tokens as text. The template changes these
    texts inside messages, so that a message cannot end itself.
    """
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def transformers_tokenizer(tokenizer: ModelTokenizer, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model in transformers' form: the same ids, after the one that starts a document.

    With a chat template, special tokens that a text contains become their ids, as chat templates write them as text.
    Raise ValueError if the tokenizer is a SentencePiece model.
    """
    if isinstance(tokenizer, ByteTokenizer):
        found = byte_tokenizer()
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        found = _of_definition(tokenizer)
    else:
        raise ValueError(
            f"transformers needs a tokenizer.json or the tokenizer of bytes; {tokenizer.name!r} is a SentencePiece "
            "model. Name a tokenizer.json with the same ids, or call gecko.hf.export(model, folder), which writes none."
        )
    if chat_template is not None:
        found.chat_template, found.split_special_tokens = chat_template, False
    return found


def _of_definition(tokenizer: HuggingFaceTokenizer) -> PreTrainedTokenizerFast:
    own = Tokenizer.from_str(tokenizer.definition)
    start, end = (own.id_to_token(index) for index in (tokenizer.document_start, tokenizer.document_end))
    own.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, tokenizer.document_start)]
    )
    padding = next((text for text in tokenizer.special_texts if "pad" in text.lower()), None)
    return PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token=start, eos_token=end, pad_token=padding, padding_side="left",
        split_special_tokens=True, clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
