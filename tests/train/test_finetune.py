"""Fine-tuning on chats: the loss is on answers, chats in a row are apart, adapters are merged, runs resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.chats import some_chats, write_chats
from support.corpora import BYTE_MODEL
from support.whole_runs import killed

import gecko
from gecko.data import IGNORED, load_tokenizer
from gecko.data.chat import DEFAULT_TEMPLATE, find_format
from gecko.data.turns import Turn
from gecko.io.checkpoints import list_checkpoints
from gecko.parallel.mesh import Ranks
from gecko.recipes.finetune import finetuning_run, with_epochs
from gecko.train import Run, train
from gecko.train.data import load_data, replayed

Tune = Callable[..., Run]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    gecko.Gecko(BYTE_MODEL).save(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def tune(base: Path, tmp_path: Path) -> Tune:
    """Return a function that makes a short run of fine-tuning."""
    chats = write_chats(tmp_path / "chats.jsonl", some_chats(24))

    def make(name: str, *overrides: str, lora_rank: int | None = None) -> Run:
        settings = ["steps=6", "checkpoint.every=3", "sample.tokens=4", "threads=1", "precision=float32", *overrides]
        return finetuning_run(
            base, str(chats), output=str(tmp_path / name), tokenizer="bytes", lora_rank=lora_rank, overrides=settings
        )

    return make


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return gecko.load(folder).state_dict()


def test_chats_in_a_row_do_not_see_one_another(tune: Tune, base: Path) -> None:
    batch = load_data(tune("run"), Ranks()).rows(range(2))
    model = gecko.load(base).eval()
    assert batch.segment_ids.max() > 1
    with torch.no_grad():
        losses, _ = model.token_losses(batch.tokens, batch.targets, batch.segment_ids)
        assert float(losses[batch.targets == IGNORED].abs().sum()) == 0
        for segment in range(2):
            first = batch.segment_ids == segment
            others = torch.where(first, (batch.tokens + 1) % 250, batch.tokens)
            changed, _ = model.token_losses(others, batch.targets, batch.segment_ids)
            learned = batch.targets != IGNORED
            assert torch.equal(changed[~first & learned], losses[~first & learned])
            assert not torch.equal(changed[first & learned], losses[first & learned])


def test_a_tuned_model_answers(tune: Tune, tmp_path: Path) -> None:
    result = train(tune("run", "steps=60", "optimizer.learning_rate=1e-2", "optimizer.weight_decay=0"))
    assert result.evaluation is not None and result.evaluation.loss < 0.7
    folder = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    tokenizer = load_tokenizer("bytes")
    chat_format = find_format(tokenizer, folder)
    assert "chat_template.jinja" in chat_format.source
    ids = chat_format.encode([Turn("user", "Say owl.")])
    written = gecko.generate(gecko.load(folder), ids, max_new_tokens=20, temperature=0.0,
                             stop_tokens=chat_format.stop_ids)  # fmt: skip
    assert written.finish_reasons == ["stop"]
    assert tokenizer.decode(written.tokens[0]) in ("owl!", "cat!", "dog!", "cow!")
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("Say cat.\n\n")


def test_the_settings_follow_from_model_and_chats(tune: Tune, base: Path, tmp_path: Path) -> None:
    run = tune("run", "steps=none", "minutes=1")
    timed = finetuning_run(base, run.data.source, output="x", tokenizer="bytes", overrides=["minutes=2"])
    assert (timed.steps, timed.minutes) == (None, 2.0)
    assert (run.steps, run.minutes, run.sequence_length, run.init_from) == (None, 1.0, 256, str(base))
    chats = write_chats(tmp_path / "few.jsonl", some_chats(3))
    few = finetuning_run(base, str(chats), output=str(tmp_path / "few"), tokenizer="bytes", epochs=5)
    assert (few.batch_size, few.steps) == (1, 5)
    growth = ("schedule.initial_batch_size=1", "schedule.batch_size_steps=20")
    grown = finetuning_run(base, run.data.source, output="x", tokenizer="bytes", epochs=9, overrides=growth)
    even = finetuning_run(base, run.data.source, output="x", tokenizer="bytes", epochs=9)
    assert grown.steps and even.steps and grown.rows_before(grown.steps) >= even.rows_before(even.steps) - 3
    assert with_epochs(grown, 9).steps == grown.steps and (with_epochs(grown, 18).steps or 0) > grown.steps
    with pytest.raises(ValueError, match="epochs must be above 0 and at most 1,000,000; got 0"):
        finetuning_run(base, str(chats), output="x", tokenizer="bytes", epochs=0)


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_resumed_run_equals_an_undisturbed_one(tune: Tune, base: Path, tmp_path: Path, lora_rank: int | None) -> None:
    """With its own template, after the model that it started from is gone; adapters need that model."""
    pytest.importorskip("peft")
    own = "{% for m in messages %}{{ m.role + ' ' + m.content + eos_token }}{% endfor %}"
    own += "{% if add_generation_prompt %}assistant {% endif %}"
    (base / "chat_template.jinja").write_text(own)
    whole, parts = (tune(name, lora_rank=lora_rank) for name in ("whole", "parts"))
    train(whole)
    killed(5, parts)
    if lora_rank is None:
        shutil.rmtree(base)
    assert train(parts, resume=True).finished
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (list_checkpoints(tmp_path / "parts" / "checkpoints")[0] / "chat_template.jinja").read_text() == own


def test_a_run_goes_on_at_another_time_with_the_time_of_its_start(
    tune: Tune, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return clock

    def set_clock(day: int) -> Clock:
        for module in ("gecko.data.chat_templates", "gecko.train.metrics"):
            monkeypatch.setattr(f"{module}.datetime", Clock, raising=False)
        return Clock(2026, 3, day, 23, 59, day, 7 * day)

    dated = f"{{{{ strftime_now('%d %H:%M:%S.%f') + '\n' }}}}{DEFAULT_TEMPLATE}"
    (base / "chat_template.jinja").write_text(dated)
    clock = set_clock(4)
    train(tune("whole"))
    killed(5, tune("parts"))
    clock = set_clock(5)
    train(tune("parts"), resume=True)
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "04" in "".join(replayed(tune("parts"), 1)) and "05" in "".join(replayed(tune("new"), 1))


def test_adapters_are_merged_and_all_else_is_unchanged(tune: Tune, base: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    result = train(tune("run", "optimizer.learning_rate=1e-2", lora_rank=2))
    before, after = weights(base), weights(tmp_path / "run")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    linear = {f"{name}.weight" for name, module in gecko.load(base).blocks.named_modules(prefix="blocks")
              if isinstance(module, torch.nn.Linear)}  # fmt: skip
    assert changed == linear
    for name in changed:
        difference = (after[name] - before[name]).double()
        assert torch.linalg.matrix_rank(difference, atol=1e-6) <= 2
    # The merged model has the held-out loss of the model that was trained.
    again = train(tune("again", "steps=1", "optimizer.learning_rate=1e-12", f"init_from={tmp_path / 'run'}"))
    assert result.evaluation is not None and again.evaluation is not None
    assert again.evaluation.loss == pytest.approx(result.evaluation.loss, rel=1e-5)


def test_adapters_of_another_model_are_not_resumed(tune: Tune, base: Path) -> None:
    pytest.importorskip("peft")
    train(tune("run", "steps=3", lora_rank=2))
    torch.manual_seed(5)
    gecko.Gecko(BYTE_MODEL).save(base)
    with pytest.raises(ValueError, match=r"init_from must hold the weights that the adapters in .* were trained on"):
        train(tune("run", lora_rank=2), resume=True)


def test_a_quantised_model_is_not_trained(tune: Tune, base: Path) -> None:
    pytest.importorskip("torchao")
    from gecko.io.quantization import quantize

    model = gecko.load(base)
    quantize(model, 8)
    run = tune("run")
    model.save(base)
    with pytest.raises(ValueError, match="init_from must hold a model that is not quantised"):
        train(run)


def test_long_chats_are_reported(tune: Tune, capsys: pytest.CaptureFixture[str]) -> None:
    load_data(tune("run", "sequence_length=56", "batch_size=1"), Ranks(console=Console()))
    assert "of 24 chats are longer than a row of 56 tokens; what follows is left out" in capsys.readouterr().out


def test_a_batch_larger_than_the_chats_and_adapters_without_a_model_are_refused(tune: Tune) -> None:
    with pytest.raises(ValueError, match=r"one batch takes 50 rows, and the chats fill \d+ rows of 256 tokens"):
        load_data(tune("run", "batch_size=50"), Ranks(console=Console()))
    with pytest.raises(ValueError, match="lora_rank trains adapters of a trained model"):
        Run(model=BYTE_MODEL, output="x", steps=1, lora_rank=2)
