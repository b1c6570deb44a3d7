"""Text to batches: documents, tokenizers, packing into rows."""

from gecko.data.corpus import load_documents
from gecko.data.loader import IGNORED, Batch, Loader, PackedLoader, Rows, validation_batches
from gecko.data.packing import TokenizedCorpus
from gecko.data.shards import ShardFolder, is_shard_folder
from gecko.data.stream import StreamDecoder
from gecko.data.tokenizers import ByteTokenizer, Tokenizer, check_vocabulary, load_tokenizer
from gecko.data.training import DataRequest, TrainingData, open_training_data

__all__ = [
    "IGNORED",
    "Batch",
    "ByteTokenizer",
    "DataRequest",
    "Loader",
    "PackedLoader",
    "Rows",
    "ShardFolder",
    "StreamDecoder",
    "TokenizedCorpus",
    "Tokenizer",
    "TrainingData",
    "check_vocabulary",
    "is_shard_folder",
    "load_documents",
    "load_tokenizer",
    "open_training_data",
    "validation_batches",
]
