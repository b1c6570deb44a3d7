"""The text that a finished model writes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gecko.baselines import LanguageModel, Llama
from gecko.data import Tokenizer
from gecko.generation import NewToken, stream
from gecko.generation.llama import LlamaStream, read_llama
from gecko.train.run import Run


def sample_text(run: Run, model: LanguageModel, tokenizer: Tokenizer) -> str:
    """The model's continuation of the run's prompt."""
    prompt = torch.tensor([tokenizer.document_start, *tokenizer.encode(run.sample.prompt)])
    return tokenizer.decode([token for _, token in _tokens(run, model, prompt, {tokenizer.document_end})])


def _tokens(run: Run, model: LanguageModel, prompt: Tensor, stops: set[int]) -> Iterable[NewToken]:
    count, temperature = run.sample.tokens, run.sample.temperature
    if isinstance(model, Llama):
        reading = read_llama(model, [prompt])
        return LlamaStream(
            model, reading, seed=run.seed, temperature=temperature, max_new_tokens=count, stop_tokens=stops
        )
    return stream(model, prompt, max_new_tokens=count, temperature=temperature, seed=run.seed, stop_tokens=stops)
