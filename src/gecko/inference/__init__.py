"""Text generation in constant memory: prompts are prefilled in pieces, then decoded one token at a time."""

from gecko.data.text_stream import encode_stream
from gecko.inference.generate import FinishReason, Generation, NewToken, TokenStream, generate, stream
from gecko.inference.pieces import piece_length
from gecko.inference.prefill import Prefill, Scored, read, score
from gecko.inference.sampling import Sampling
from gecko.inference.text import TextStream

__all__ = [
    "FinishReason", "Generation", "NewToken", "Prefill", "Sampling", "Scored", "TextStream", "TokenStream",
    "encode_stream", "generate", "piece_length", "read", "score", "stream",
]  # fmt: skip
