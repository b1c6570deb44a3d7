"""Text generation: prompts are read in pieces, tokens are made one by one, memory stays constant."""

from gecko.generation.encoding import encode_stream
from gecko.generation.generation import Generation, generate, stream
from gecko.generation.reading import Reading, piece_length, read
from gecko.generation.sampling import Sampling
from gecko.generation.scoring import Scored, score
from gecko.generation.stream import FinishReason, NewToken, TokenStream
from gecko.generation.text import TextStream

__all__ = [
    "FinishReason",
    "Generation",
    "NewToken",
    "Reading",
    "Sampling",
    "Scored",
    "TextStream",
    "TokenStream",
    "encode_stream",
    "generate",
    "piece_length",
    "read",
    "score",
    "stream",
]
