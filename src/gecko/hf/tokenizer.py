"""The bytes tokenizer as one of transformers, made of the parts of the ``tokenizers`` library."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

BORDER, PADDING = "<|endoftext|>", "<|pad|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes of UTF-8 text, 256 starts and ends a document, 257 pads on the left.

    The same ids as of ``gecko.data.ByteTokenizer``. A text starts with 256 unless ``add_special_tokens=False``,
    as every document in training. Text never encodes to 256 or 257, whatever it quotes.
    """
    made = Tokenizer(models.BPE(vocab={character: byte for byte, character in bytes_to_unicode().items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([BORDER, PADDING])
    made.post_processor = processors.TemplateProcessing(
        single=f"{BORDER} $A", pair=f"{BORDER} $A $B", special_tokens=[(BORDER, 256)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=BORDER, eos_token=BORDER, pad_token=PADDING, padding_side="left",
        split_special_tokens=True, clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
