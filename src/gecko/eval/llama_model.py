"""A Llama behind the face that evaluations ask of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.baselines import Llama
from gecko.data import Tokenizer, check_vocabulary
from gecko.eval.scored_model import Predicted, describe_model
from gecko.generation import TextStream
from gecko.generation.llama import LlamaReading, LlamaStream, read_llama, score_llama
from gecko.generation.reading import inference


class LlamaModel:
    """A ``ScoredModel`` that holds keys and values of all it has read, so that memory grows with a text.

    Args:
        name: what results call it.
        trained_length: tokens of the rows it was trained on, where that is known.

    Raises:
        ValueError: the tokenizer has more ids than the model.
    """

    chunk_size: int | None = None

    def __init__(self, model: Llama, tokenizer: Tokenizer, name: str, trained_length: int | None) -> None:
        check_vocabulary(tokenizer, model.config.vocab_size)
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._trained_length, self._longest = trained_length, 0

    @property
    def notes(self) -> list[str]:
        """What is to be said of the scores of all texts read so far."""
        trained, longest = self._trained_length, self._longest
        if trained is None:
            return [f"the longest text had {longest:,} tokens; what context {self.name} was trained with is not known"]
        if longest <= trained:
            return []
        return [
            f"{self.name} was trained with a context of {trained:,} tokens, and the longest text had {longest:,}: "
            "past the former it meets positions that it never saw"
        ]

    def describe(self) -> dict[str, Any]:
        return describe_model(self.model, self.tokenizer, self.name) | {"trained_length": self._trained_length}

    def losses(self, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
        read = 0
        for losses in score_llama(self.model, tokens):
            read += len(losses)  # the last token is predicted and predicts nothing
            self._saw(read)
            yield losses.cpu()

    def read(self, tokens: Tensor, after: LlamaReading | None = None) -> LlamaReading:
        reading = read_llama(self.model, [tokens], after)
        self._saw(reading.cache.length)
        return reading

    def predict(self, after: LlamaReading, tokens: Tensor) -> Predicted:
        tokens = tokens.to(after.logits.device)
        self._saw(after.cache.length + len(tokens) - 1)
        with inference(self.model):
            logits = after.logits.unsqueeze(0)
            if len(tokens) > 1:
                hidden, _ = self.model.read(tokens[None, :-1], after.cache)
                logits = torch.cat([logits, self.model.lm_head(hidden[0])])
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses = F.cross_entropy(wide, tokens, reduction="none")
            return Predicted(losses.cpu(), (wide.argmax(-1) == tokens).cpu())

    def write(self, after: LlamaReading, max_new_tokens: int, stops: Sequence[str] = ()) -> str:
        stream = LlamaStream(
            self.model, after, seed=0, temperature=0, max_new_tokens=max_new_tokens,
            stop_tokens={self.tokenizer.document_end},
        )  # fmt: skip
        text = TextStream(stream, self.tokenizer, stops)
        written = "".join(text)
        self._saw(after.cache.length + text.num_tokens)
        return written

    def _saw(self, length: int) -> None:
        self._longest = max(self._longest, length)
