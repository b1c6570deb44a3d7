"""The run of supervised fine-tuning: settings that follow from the model and the chats."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gecko.data import check_vocabulary, load_tokenizer
from gecko.data.chat import tuning_format
from gecko.data.chats import ChatCorpus, ChatRows, read_chats
from gecko.data.sources import empty_source
from gecko.data.tokenizers import known_tokenizer
from gecko.io.checkpoints import model_folder
from gecko.io.model_folder import CONFIG
from gecko.models import load_config
from gecko.recipes import apply_overrides
from gecko.train import DataSettings, OptimizerSettings, Run, SampleSettings, ScheduleSettings
from gecko.train.data import template_folder
from gecko.train.settings import current_override

SHORTEST, LONGEST = 256, 4096
"""Bounds of the default length of a row in tokens."""
ROWS = 4
"""Default number of rows of a step, if there are as many."""
MOST_EPOCHS = 1_000_000
RATE = 0.128
"""Default learning rate times the width of the model."""


def finetuning_run(
    model: str | Path,
    source: str,
    *,
    output: str,
    tokenizer: str | None = None,
    lora_rank: int | None = None,
    epochs: float = 3,
    overrides: Sequence[str] = (),
) -> Run:
    """Return the run that fine-tunes a model on chats, with the loss on the assistant's answers.

    A row has the length of the longest chat, rounded up to a power of two in 256 to 4,096 tokens; a step has 4 rows.
    The learning rate is 1e-3 for a width of 128, falls with the width, and is three times as large for adapters; it
    rises for a tenth of the steps and falls to 0. Raise FileNotFoundError or ValueError if there is no model, tokenizer
    or chat, a line is no chat, or a setting is out of range.

    Args:
        model: model folder, or training run (its newest checkpoint).
        source: JSON Lines of chats, see ``gecko.data.chats.read_chats``.
        output: folder of the run.
        tokenizer: see ``load_tokenizer``; None: the one beside the model, or the one that its recipe names.
        lora_rank: rank of adapters; None: train all parameters.
        epochs: number of times that each chat is read, if the overrides set no ``steps``.
        overrides: ``key=value`` changes of the run's fields.
    """
    folder = model_folder(model)
    spec = tokenizer or known_tokenizer(folder)
    if spec is None:
        raise FileNotFoundError(
            f"{folder} must hold a tokenizer or a recipe.json that names one; it holds neither. Name it: --tokenizer "
            "bytes, or the path of a tokenizer.json."
        )
    config, vocabulary = load_config(folder / CONFIG), load_tokenizer(spec)
    check_vocabulary(vocabulary, config.vocab_size)
    chats = list(read_chats(source))
    if not chats:
        raise empty_source(source)
    corpus = ChatCorpus.build(chats, tuning_format(vocabulary, folder))
    rate = RATE / config.model_dim * (1 if lora_rank is None else 3)
    question = next((turn.content for turn in chats[0][1].turns if turn.role == "user"), "Hello")
    run = Run(
        model=config, output=output, data=DataSettings(source=source, format="chat", tokenizer=spec), batch_size=ROWS,
        sequence_length=min(max(SHORTEST, 1 << (corpus.longest - 2).bit_length()), LONGEST), steps=1,
        optimizer=OptimizerSettings(learning_rate=float(f"{rate:.2g}"), weight_decay=0.01),
        schedule=ScheduleSettings(warmup=0.1), precision="auto", init_from=str(folder), lora_rank=lora_rank,
        sample=SampleSettings(prompt=question, tokens=200),
    )  # fmt: skip
    # Batch, steps, evaluations and checkpoints follow from the chats if the overrides do not set them.
    given = {current_override(override).partition("=")[0] for override in overrides}
    if "minutes" in given and "steps" not in given:
        given, overrides = {*given, "steps"}, [*overrides, "steps=none"]
    run = apply_overrides(run, overrides)
    rows = _rows(run, corpus)
    if "batch_size" not in given:
        run = replace(run, batch_size=min(run.batch_size, rows))
    steps = _steps(run, rows, epochs)
    if "steps" not in given:
        run = replace(run, steps=steps)
    often = 100 if run.steps is None else max(1, run.steps // 5)
    if "evaluation.every" not in given:
        run = replace(run, evaluation=replace(run.evaluation, every=often))
    if "checkpoint.every" not in given:
        run = replace(run, checkpoint=replace(run.checkpoint, every=often))
    return replace(run, overrides=())


def with_epochs(run: Run, epochs: float) -> Run:
    """Return a run of ``finetuning_run`` that reads each chat ``epochs`` times in all; errors are the same."""
    chat_format = tuning_format(load_tokenizer(run.data.tokenizer), template_folder(run))
    rows = _rows(run, ChatCorpus.build(read_chats(run.data.source), chat_format))
    return apply_overrides(run, [f"steps={_steps(run, rows, epochs)}"])


def _rows(run: Run, corpus: ChatCorpus) -> int:
    """Return the rows of an epoch."""
    training = corpus.cut(run.sequence_length + 1)
    if run.data.validation is None:
        training, _ = training.split(run.data.validation_fraction, run.seed)
    return ChatRows(training, run.sequence_length, run.seed).rows_per_epoch


def _steps(run: Run, rows: int, epochs: float) -> int:
    """Return the least number of steps that read each chat ``epochs`` times; an epoch has ``rows`` rows."""
    if not 0 < epochs <= MOST_EPOCHS:
        raise ValueError(f"epochs must be above 0 and at most {MOST_EPOCHS:,}; got {epochs:g}. Try 3.")
    return max(1, bisect_left(range(sys.maxsize), epochs * rows, key=run.rows_before))
