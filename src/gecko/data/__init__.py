"""Text to batches: documents, tokenizers, packing into rows."""

from gecko.data.corpus import load_documents
from gecko.data.loader import IGNORED, Batch, PackedLoader, validation_batches
from gecko.data.packing import TokenizedCorpus
from gecko.data.stream import StreamDecoder
from gecko.data.tokenizers import ByteTokenizer, Tokenizer, check_vocabulary, load_tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "ByteTokenizer",
    "PackedLoader",
    "StreamDecoder",
    "TokenizedCorpus",
    "Tokenizer",
    "check_vocabulary",
    "load_documents",
    "load_tokenizer",
    "validation_batches",
]
