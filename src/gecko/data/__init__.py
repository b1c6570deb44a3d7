"""Data pipeline: sources of documents, tokenizers, token shards, packed rows and batches."""

from gecko.data.loader import IGNORED, Batch, Loader, PackedLoader, Rows, validation_batches
from gecko.data.packing import TokenizedCorpus
from gecko.data.shards import ShardFolder, is_shard_folder
from gecko.data.sources import load_documents
from gecko.data.text_stream import StreamDecoder, document_ids, document_stream
from gecko.data.tokenizers import ByteTokenizer, Tokenizer, check_vocabulary, load_tokenizer
from gecko.data.training_data import DataRequest, TrainingData, open_training_data

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
    "document_ids",
    "document_stream",
    "is_shard_folder",
    "load_documents",
    "load_tokenizer",
    "open_training_data",
    "validation_batches",
]
