"""A scored model as lm-evaluation-harness sees one: pass ``HarnessModel`` to ``lm_eval.simple_evaluate(model=...)``.

Importing this needs the extra ``eval``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from torch import Tensor
from tqdm import tqdm

from gecko.eval.scored_model import ScoredModel, encode_document

_BLOCK = 1 << 16
"""Tokens handed to the model at a time."""
_NEW_TOKENS = 256
"""Of an answer, where a task does not say; as the harness's own models have it."""

Pair = tuple[tuple[str, str], list[int], list[int]]


class HarnessModel(TemplateLM):
    """Texts of any length, never cut: contexts begin with the document start, and choices share what was read.

    Raises:
        ValueError: generation settings that ask for sampling, which no task of the suite does.
    """

    def __init__(self, model: ScoredModel[Any]) -> None:
        super().__init__()
        self._model = model

    @property
    def eot_token_id(self) -> int:
        return self._model.tokenizer.document_end

    @property
    def prefix_token_id(self) -> int:
        return self._model.tokenizer.document_start

    @property
    def tokenizer_name(self) -> str:
        return self._model.tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._model.tokenizer.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Each (texts, context, continuation): log-probability of the continuation, and whether greedy gives it."""
        found, read_ids, reading = [], None, None
        for (context, text), before, tokens in tqdm(requests, "scoring", disable=disable_tqdm or None):
            if not tokens:
                raise ValueError(f"a continuation must have at least one token; got {text!r} after {context[-40:]!r}.")
            ids = before if before[:1] == [self.prefix_token_id] else [self.prefix_token_id, *before]
            if ids != read_ids:
                read_ids, reading = ids, self._model.read(torch.tensor(ids))
            losses, greedy = self._model.predict(reading, torch.tensor(tokens))
            found.append((-float(losses.double().sum()), bool(greedy.all())))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, every token with all of the text before it."""
        found = []
        for request in tqdm(requests, "scoring", disable=disable_tqdm or None):
            pieces = self._model.losses(_blocks(encode_document(self._model.tokenizer, request.args[0])))
            found.append(-sum(float(losses.double().sum()) for losses in pieces))
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        found = []
        for request in tqdm(requests, "answering", disable=disable_tqdm or None):
            context, settings = request.args
            if settings.get("do_sample"):
                raise ValueError("generation must be greedy here; the task asks for do_sample=True.")
            until = settings.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            limit = settings.get("max_gen_toks", _NEW_TOKENS)
            reading = self._model.read(encode_document(self._model.tokenizer, context))
            found.append(self._model.write(reading, int(limit), [stop for stop in stops if stop]))
        return found


def _blocks(tokens: Tensor) -> Iterator[Tensor]:
    yield from tokens.split(_BLOCK)
