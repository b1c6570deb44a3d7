"""Tokenizers of bytes for transformers."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

BORDER, PADDING = "<|endoftext|>", "<|pad|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer with the ids of ``gecko.data.ByteTokenizer``.

    Ids 0 to 255 are the bytes of UTF-8 text, 256 starts and ends a document, 257 pads on the left. Every text starts
    with 256, as documents do in training, unless ``add_special_tokens=False``. No text encodes to 256 or 257.
    """
    tokenizer = Tokenizer(
        models.BPE(vocab={character: byte for byte, character in bytes_to_unicode().items()}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BORDER, PADDING])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BORDER} $A", pair=f"{BORDER} $A $B", special_tokens=[(BORDER, 256)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BORDER, eos_token=BORDER, pad_token=PADDING, padding_side="left",
        split_special_tokens=True, clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


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
