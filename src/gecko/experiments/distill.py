"""Distil a converted Llama: a working memory learns what lies beyond the window, taught by the Llama's full attention.

The student has the teacher's parameters, frozen, and a gate per head, g, between the attention to its window, a, and
the memory of what has left it, m: a + g (m − a). g is 0 while the memory is empty, so before and after training the
first two chunks are the Llama's. The teacher is the same parameters with a window that holds a whole row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gecko.config import GeckoConfig
from gecko.data import Tokenizer, document_ids
from gecko.eval.results import Report, Results, Score, quiet, standard_error
from gecko.eval.results import student as students_t
from gecko.eval.retrieval import Haystack, units_by_length
from gecko.eval.scored_model import NO_TOKENS, Cursor, Text
from gecko.io.quantization import is_quantized
from gecko.models.gecko import Gecko, sharing_parameters
from gecko.runtime.tensors import to_device
from gecko.train.optimizer import build_optimizer, named_parameters, set_learning_rate
from gecko.train.settings import OptimizerSettings, ScheduleSettings
from gecko.train.step import learning_rate_factor

LLAMA: Mapping[str, Any] = {
    "queries_and_keys": "separate", "attention": "sliding_chunk", "memory": "none", "local_mixing": "none",
    "gate": "none", "hidden_branch": False, "output_norm": False,
}  # fmt: skip
"""Fields of a converted Llama that the student relies on."""
GATE, PIECE, LONG = -4.0, 512, 4
"""Initial bias of the memory's gates (g is 0.018), tokens whose logits are in memory at once, windows in a row."""
NARROW = 4
"""Every other step reads with a window of this part: tokens leave it early, so that the memory is needed."""
HELD_OUT, ROWS = 5, 4
"""One document of so many is held out, two at least, and so many rows of each are scored."""


@dataclass(frozen=True)
class Distillation:
    """What the student reads, and how it learns; the defaults are those of the command."""

    tokens: int
    """Tokens of training: half of them layer by layer, half by logits."""
    length: int | None
    """Tokens in a row. None: four windows."""
    batch: int
    """Rows in a step."""
    needles: float
    """Share of the rows in which a pass key is hidden and asked for."""
    learning_rate: float
    """Peak rate of AdamW, which cosines lower in both halves."""
    seed: int

    def row_length(self, config: GeckoConfig) -> int:
        """Return the tokens in a row; ValueError if a setting does not fit the model."""
        window = 2 * config.chunk_size
        length = LONG * window if self.length is None else self.length
        if length < window + 3:
            raise ValueError(f"--length must be at least three tokens above the window of {window:,} tokens, in which "
                             f"nothing can be learned; got {length:,}. Try {LONG * window}.")  # fmt: skip
        if self.batch < 1 or self.tokens < 2 * self.batch * length:
            raise ValueError(f"--tokens must hold two steps of --batch rows of {length:,} tokens; got {self.tokens:,} "
                             f"and {self.batch} rows. Try --tokens {2 * max(1, self.batch) * length}.")  # fmt: skip
        if not 0 <= self.needles <= 1 or not self.learning_rate > 0:
            raise ValueError(f"--needles must be a share in 0..1, and --learning-rate positive; got {self.needles} and "
                             f"{self.learning_rate}.")  # fmt: skip
        return length

    def steps(self, length: int) -> int:
        """Return the steps of each half, of whole batches."""
        return self.tokens // (2 * self.batch * length)


def distill(
    model: Gecko, tokenizer: Tokenizer, texts: Sequence[Text], settings: Distillation, report: Report = quiet
) -> tuple[Gecko, Results]:
    """Return the student, and its losses beyond the window on held-out texts; both models are float32 then.

    Raises:
        ValueError: the model is no converted Llama, texts are too few or too short, or a setting does not fit.
    """
    for name, wanted in LLAMA.items():
        own = getattr(model.config, name)
        if own != wanted:
            raise ValueError(f"MODEL must be a Llama of gecko convert, which has {name}={wanted}; this one has {own}.")
    if any(map(is_quantized, model.parameters())):
        raise ValueError("MODEL must have the weights that gecko convert wrote; this one is quantised.")
    model.float()
    length = settings.row_length(model.config)
    hay = Haystack("passkey", tokenizer, length, units_by_length("passkey", tokenizer)(length))
    try:
        units = hay.fit() if settings.needles else 0
    except ValueError as error:
        raise ValueError(f"{error} Or leave pass keys out with --needles 0.") from error
    most = max(ROWS, -(-settings.tokens // (length * max(1, len(texts) - 2))))
    rows = {text.name: rows_of(text, tokenizer, length, most) for text in texts}
    train, held_out = divided({name: found for name, found in rows.items() if found}, length)
    student = student_of(model)

    def needle(seed: str) -> Tensor:
        """Return a document in which a pass key is hidden and asked for, with the answer."""
        sample = hay.sample(units, None, seed)
        return document_ids(tokenizer, f"{sample.prompt} {sample.answers[0]}.")

    batches = batches_of(train, needle, settings)
    curves = taught(student, model, batches, settings, length, report)
    report("scoring the held-out texts")
    scores = compared(student, model, held_out)
    skipped = [f"skipped {name}: it has fewer than {length:,} tokens" for name, found in rows.items() if not found]
    read = 2 * settings.steps(length) * settings.batch * length
    used = {**vars(settings), "tokens": read, "length": length, "texts": list(train), "held_out": list(held_out)}
    return student, Results("distill", scores, used, settings.seed, skipped, {"losses": curves})


def student_of(teacher: Gecko) -> Gecko:
    """Return a model with the teacher's parameters, frozen, and with a memory and its gates."""
    config, like = teacher.config, teacher.embedding.weight
    gates: dict[str, nn.Parameter] = {}
    for layer in range(config.num_layers):
        name = f"blocks.{layer}.mixer.to_memory_gate"
        gates[f"{name}.weight"] = nn.Parameter(like.new_zeros(config.num_heads, config.model_dim))
        gates[f"{name}.bias"] = nn.Parameter(like.new_full((config.num_heads,), GATE))
    student = sharing_parameters(teacher, gates, memory="adaptive", memory_gate_channels=1)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name in gates)
    return student


def rows_of(text: Text, tokenizer: Tokenizer, length: int, most: int) -> list[Tensor]:
    """Return the first whole rows of a text, at most so many, each (length,)."""
    cursor = Cursor(text.tokens(tokenizer))
    rows = (torch.cat([NO_TOKENS, *cursor.take(length)]) for _ in range(most))
    return [row for row in rows if len(row) == length]


Rows = dict[str, list[Tensor]]


def divided(rows: Rows, length: int) -> tuple[Rows, Rows]:
    """Divide documents into those to learn from and those held out, which are the last ones."""
    count = max(2, len(rows) // HELD_OUT)
    if len(rows) <= count:
        raise ValueError(f"TEXT must be at least 3 files of {length:,} tokens each, of which 2 are held out; "
                         f"got {len(rows)}. Give more files, or a smaller --length.")  # fmt: skip
    names, seen = list(rows), dict[bytes, str]()
    for name in names:
        if (same := seen.setdefault(rows[name][0].numpy().tobytes(), name)) != name:
            raise ValueError(f"TEXT must be different texts, as some are held out; {name} begins as {same}. Name one.")
    return {name: rows[name] for name in names[:-count]}, {name: rows[name][:ROWS] for name in names[-count:]}


def batches_of(rows: Rows, needle: Callable[[str], Tensor], settings: Distillation) -> Iterator[Tensor]:
    """Yield batches (rows, length) without end, in random order. A needle's row ends with the text that it replaces."""
    draw = random.Random(settings.seed)
    every = [row for found in rows.values() for row in found]
    held: list[Tensor] = []
    while True:
        batch = list[Tensor]()
        while len(batch) < settings.batch:
            held = held or draw.sample(every, len(every))
            row = held.pop()
            if draw.random() < settings.needles:
                row = torch.cat([needle(str(draw.random())), row])[: len(row)]
            batch.append(row)
        yield torch.stack(batch)


def full_attention(model: Gecko, length: int) -> Gecko:
    """Return a Llama of the same parameters that attends to all tokens of a row."""
    return sharing_parameters(
        model, chunk_size=-(-length // 2), sinks=0, bfloat16_window=False, memory="none", memory_gate_channels=0
    )


def taught(
    student: Gecko, model: Gecko, batches: Iterator[Tensor], settings: Distillation, length: int, report: Report
) -> dict[str, list[float]]:
    """Train the gates in place; return the losses of the steps of both stages."""
    trained = {name for name, _ in named_parameters(student)}
    chunk, sinks = student.config.chunk_size, student.config.sinks
    narrow = max(1, sinks, chunk // NARROW)
    teacher = full_attention(model, length)
    readers = [(size, sharing_parameters(student, chunk_size=size, bfloat16_window=False)) for size in (chunk, narrow)]
    for _, reader in readers:
        reader.activation_checkpointing = "full"
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name in trained)
    rates = OptimizerSettings(learning_rate=settings.learning_rate, weight_decay=0.0)
    optimizer = build_optimizer(student, rates)
    device, steps = student.embedding.weight.device, settings.steps(length)
    stages: dict[str, Loss] = {"layers": layer_losses, "logits": logit_loss}
    curves: dict[str, list[float]] = {stage: [] for stage in stages}
    for stage, loss_of in stages.items():
        for step in range(steps):
            set_learning_rate(optimizer, rates.learning_rate * learning_rate_factor(ScheduleSettings(), step, steps))
            size, reader = readers[step % 2]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = loss_of(teacher, reader, to_device(next(batches), device), 2 * size)
            nn.utils.clip_grad_norm_(student.parameters(), rates.clip, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
            curves[stage].append(round(float(loss), 6))
            report(f"{stage}: step {step + 1} of {steps}, loss {curves[stage][-1]:.4f}")
    return curves


Loss = Callable[[Gecko, Gecko, Tensor, int], Tensor]
"""Function of teacher, student, tokens (B, T) and the first position that counts. It adds to the gradients."""


def layer_losses(teacher: Gecko, student: Gecko, tokens: Tensor, begin: int) -> Tensor:
    """Return the mean over layers of the share of the variance of the teacher's mixer that the student's misses, for
    the teacher's inputs.

    Each layer's graph is freed before the next one is computed.
    """
    shares = []

    def compare(mixer: nn.Module, _: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
        x, segments = inputs[0].detach(), inputs[2]
        theirs = (output[0].detach() - x)[:, begin:].float()
        missed = (mixer(x, None, segments)[0] - x)[:, begin:].float() - theirs
        share = missed.square().sum() / (theirs - theirs.mean((0, 1))).square().sum()
        (share / len(student.blocks)).backward()
        shares.append(share.detach())

    hooks = [
        taught.mixer.register_forward_hook(partial(compare, learner.mixer))  # type: ignore[union-attr, arg-type]
        for taught, learner in zip(teacher.blocks, student.blocks, strict=True)
    ]
    try:
        teacher.hidden(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(shares).mean()


def logit_loss(teacher: Gecko, student: Gecko, tokens: Tensor, begin: int) -> Tensor:
    """Return the mean Kullback-Leibler divergence of the student's predictions from the teacher's, in nats."""
    theirs, ours = (model.hidden(tokens)[0][:, begin:].flatten(0, 1).split(PIECE) for model in (teacher, student))

    def divergence(theirs: Tensor, ours: Tensor) -> Tensor:
        p, q = (student.head(hidden).float().log_softmax(-1) for hidden in (theirs, ours))
        return F.kl_div(q, p, log_target=True, reduction="sum")

    parts = [checkpoint(divergence, p, q, use_reentrant=False) for p, q in zip(theirs, ours, strict=True)]
    loss = torch.stack(parts).sum() / tokens[:, begin:].numel()
    loss.backward()
    return loss.detach()


def compared(student: Gecko, model: Gecko, held_out: Rows) -> list[Score]:
    """Return the mean losses beyond the window by position: full attention, memory off, memory on, and on less off."""
    window, length = 2 * model.config.chunk_size, len(next(iter(held_out.values()))[0])
    models = {"full attention": full_attention(model, length), "memory off": model, "memory on": student}
    device = model.embedding.weight.device

    def of_document(one: Gecko, rows: Sequence[Tensor]) -> Any:
        """Return the losses of a document's rows by position, their mean, (length − 1,) float64."""
        found = [one.token_losses(row[None, :-1].to(device), row[None, 1:].to(device))[0][0].double() for row in rows]
        return torch.stack(found).mean(0).cpu().numpy()

    losses = {name: np.stack([of_document(one, rows) for rows in held_out.values()]) for name, one in models.items()}
    losses["memory on less off"] = losses["memory on"] - losses["memory off"]
    borders = [window * 2**i for i in range(40) if window * 2**i < length - 1]
    ranges = dict.fromkeys([(window, length - 1), *pairwise([*borders, length - 1])])
    scores = []
    for low, high in ranges:
        for name, of_documents in losses.items():
            means = of_documents[:, low:high].mean(1)
            interval = students_t(float(means.mean()), standard_error(means.tolist()), len(means), "held-out texts")
            where = {"tokens before": f"{low:,} .. {high - 1:,}"}
            scores.append(Score(name, float(means.mean()), len(means), "texts", interval, where))
    return scores
