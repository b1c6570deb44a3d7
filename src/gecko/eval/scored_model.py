"""What evaluations ask of a model, and Gecko behind that face."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.baselines import LanguageModel
from gecko.data import Tokenizer, check_vocabulary
from gecko.eval.renewed_norms import renewed_losses
from gecko.fingerprint import fingerprint
from gecko.generation import Reading, Sampling, TextStream, TokenStream, read, score
from gecko.generation.reading import inference
from gecko.model import Gecko

C = TypeVar("C")


class Predicted(NamedTuple):
    losses: Tensor
    """(n,) nats, of every token."""
    greedy: Tensor
    """(n,) bool: the token was the most likely one."""


class ScoredModel(Protocol[C]):
    """A model with its tokenizer. ``C`` is what it keeps of a text it has read; nothing here changes one."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chunk_size(self) -> int | None:
        """Tokens between borders of its attention; None: it has no such borders."""

    def describe(self) -> dict[str, Any]:
        """What a result says of the model, as JSON values."""

    def losses(self, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
        """Losses in nats of all tokens of one text but its first, in pieces, without holding the text.

        Args:
            tokens: the text from its document start, as 1-D int64 tensors of any lengths.
        """

    def read(self, tokens: Tensor, after: C | None = None) -> C:
        """Read 1-D tokens, at least one; a text begins with the document start."""

    def predict(self, after: C, tokens: Tensor) -> Predicted:
        """How 1-D tokens, at least one, were predicted after what was read."""

    def write(self, after: C, max_new_tokens: int, stops: Sequence[str] = ()) -> str:
        """The most likely continuation, which ends before a stop string or at the end of the document."""


class GeckoModel:
    """A ``ScoredModel``: any model of the package, Megalodon among them.

    Args:
        name: what results call it.
        renew_norms: score streams as Megalodon's released evaluator does; see :mod:`gecko.eval.renewed_norms`.

    Raises:
        ValueError: the tokenizer has more ids than the model, or ``renew_norms`` for a norm that decays.
    """

    def __init__(self, model: Gecko, tokenizer: Tokenizer, name: str, *, renew_norms: bool = False) -> None:
        check_vocabulary(tokenizer, model.config.vocab_size)
        if renew_norms and model.config.timestep_betas is not None:
            raise ValueError(
                "renewed norm statistics are for models with the cumulative norm (timestep_betas=None), as Megalodon "
                f"is; {name} has decays {model.config.timestep_betas}, which forget by themselves. Leave it out."
            )
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._renew_norms = renew_norms

    @property
    def notes(self) -> list[str]:
        """What is to be said of its scores: nothing, a text of any length is read."""
        return []

    @property
    def chunk_size(self) -> int | None:
        return None if self.model.config.attention == "sliding_window" else self.model.config.chunk_size

    def describe(self) -> dict[str, Any]:
        return describe_model(self.model, self.tokenizer, self.name)

    def losses(self, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
        if self._renew_norms:
            yield from renewed_losses(self.model, tokens)
            return
        for scored in score(self.model, tokens):
            yield scored.losses.cpu()

    def read(self, tokens: Tensor, after: Reading | None = None) -> Reading:
        return read(self.model, [tokens], None if after is None else after.state)

    def predict(self, after: Reading, tokens: Tensor) -> Predicted:
        tokens = tokens.to(after.logits.device)
        with inference(self.model):
            logits = after.logits.unsqueeze(0)
            if len(tokens) > 1:
                later, _ = self.model(tokens[None, :-1], state=after.state)
                logits = torch.cat([logits, later[0]])
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses = F.cross_entropy(wide, tokens, reduction="none")
            return Predicted(losses.cpu(), (wide.argmax(-1) == tokens).cpu())

    def write(self, after: Reading, max_new_tokens: int, stops: Sequence[str] = ()) -> str:
        stream = TokenStream(
            self.model, [after], seeds=[0], sampling=Sampling(temperature=0), max_new_tokens=max_new_tokens,
            stop_tokens={self.tokenizer.document_end},
        )  # fmt: skip
        return "".join(TextStream(stream, self.tokenizer, stops))


def describe_model(model: LanguageModel, tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """``ScoredModel.describe`` of any model of the package."""
    parameters = list(model.parameters())
    return {
        "name": name,
        "weights": fingerprint(model),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "device": str(parameters[0].device),
        "tokenizer": tokenizer.name,
        "config": model.config.to_dict(),
    }


def encode_document(tokenizer: Tokenizer, text: str) -> Tensor:
    """Ids of a text that begins a document, (1 + length,) int64."""
    return torch.cat([torch.tensor([tokenizer.document_start]), torch.from_numpy(tokenizer.encode(text))])
