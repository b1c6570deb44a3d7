"""``Trainer`` trains, evaluates, predicts, resumes, and keeps the best model with the right weights."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf.conftest import arguments, improved, losses
from torch.nn.utils import prune
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import gecko
from gecko.hf import PROJECTIONS, byte_tokenizer

pytest.importorskip("accelerate")

TOKENIZER = byte_tokenizer()
TOKENIZER.padding_side = "right"
ROWS = [{"input_ids": TOKENIZER("xy" * (3 + i * i % 11)).input_ids} for i in range(12)]


def trainer(model: torch.nn.Module, folder: Path, rows: Any = ROWS, **options: Any) -> Trainer:
    sizes = {"max_steps": 4, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 5}
    return Trainer(
        model=model, compute_metrics=options.pop("compute_metrics", None), train_dataset=rows, eval_dataset=ROWS[:7],
        data_collator=DataCollatorForLanguageModeling(TOKENIZER, mlm=False), processing_class=TOKENIZER,
        args=TrainingArguments(**arguments(folder, **sizes | options)),
    )  # fmt: skip


def test_what_was_trained_is_saved(model, tmp_path):
    sizes = {"max_steps": 20, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    texts = [f"question {i}: what is {i} + {i}? answer: {2 * i}." for i in range(24)]
    run = trainer(model, tmp_path, [{"input_ids": TOKENIZER(text).input_ids} for text in texts], **sizes)
    run.train()
    assert improved(run)
    run.save_model(str(tmp_path / "saved"))
    ids = torch.arange(30).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(gecko.load(tmp_path / "saved")(ids)[0], model.eval()(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token_id == 257


def test_gradient_accumulation_is_one_large_batch(text_folder, tmp_path):
    """Rows have unequal lengths; the loss is the mean over all their tokens, however they are divided. With padding on
    the left, transformers would count a row's first token as predicted from padding."""
    texts, found = [{"input_ids": TOKENIZER("x" * (1 + i * i)).input_ids} for i in range(6)], []
    for rows, steps in ((6, 1), (2, 3)):
        sizes = {"max_steps": 1, "per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
        run = trainer(AutoModelForCausalLM.from_pretrained(text_folder), tmp_path, texts, **sizes)
        run.train()
        found.append(losses(run)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(text_folder, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = trainer(AutoModelForCausalLM.from_pretrained(text_folder), tmp_path, **saving)
    whole.train()
    resumed = trainer(AutoModelForCausalLM.from_pretrained(text_folder), tmp_path, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert resumed.model.model.gecko.fingerprint() == whole.model.model.gecko.fingerprint()


def test_the_best_model_is_kept(model, tmp_path):
    values = itertools.chain([1.0, 3.0], itertools.repeat(2.0))
    run = trainer(
        model, tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True,
        compute_metrics=lambda _: {"score": next(values)},
    )  # fmt: skip
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    kept = gecko.load(tmp_path / "checkpoint-2").fingerprint()
    assert run.model.model.gecko.fingerprint() == kept != gecko.load(tmp_path / "checkpoint-4").fingerprint()


def test_evaluate_and_predict(model, tmp_path):
    found = {}

    def metrics(prediction: Any) -> dict[str, float]:
        found["logits"], found["labels"] = map(torch.from_numpy, (prediction.predictions, prediction.label_ids))
        return {"accuracy": float((found["logits"].argmax(-1)[:, :-1] == found["labels"][:, 1:]).float().mean())}

    run = trainer(model, tmp_path, compute_metrics=metrics)
    run.model.config.use_cache = True  # which transformers 5 sets to False; a cache is no prediction
    evaluated = run.evaluate()
    assert {"eval_loss", "eval_accuracy"} <= evaluated.keys()
    predicted = run.predict(ROWS[:7])
    assert predicted.metrics["test_loss"] == pytest.approx(evaluated["eval_loss"])
    for row, logits in zip(ROWS[:7], found["logits"], strict=True):
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            torch.testing.assert_close(logits[: ids.shape[1]], model.eval()(ids).logits[0])


def test_a_compiled_model_trains_as_without(text_folder, tmp_path):
    found = []
    for compiles in (False, True):
        run = trainer(AutoModelForCausalLM.from_pretrained(text_folder), tmp_path, torch_compile=compiles)
        run.train()
        found.append(run.model.model.gecko.fingerprint())
    assert found[0] == found[1]


def test_nothing_is_given_to_a_compiler(model):
    """It would take minutes for each length of a batch."""
    ids, greedy, graphs = torch.arange(18).view(2, 9), {"max_new_tokens": 4, "do_sample": False}, []
    expected, loss = model.eval().generate(ids, **greedy), model(ids, labels=ids).loss

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    assert torch.equal(torch.compile(model, backend=backend)(ids, labels=ids).loss, loss)
    model.forward = torch.compile(model.forward, backend=backend)
    assert torch.equal(model.generate(ids, **greedy), expected)
    assert not graphs


def test_the_loss_is_of_the_logits_of_a_head_with_hooks(model):
    """Pruning keeps the mask in a hook, which makes the weight anew before each call."""
    ids = torch.arange(18).view(2, 9)
    prune.random_unstructured(model.get_output_embeddings(), "weight", 0.5)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(2):
        out = model(ids, labels=ids)
        expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        torch.testing.assert_close(out.loss, expected)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert losses[1] < losses[0]


@pytest.mark.parametrize("lora", [False, True])
def test_smoothed_labels_are_those_of_the_next_token(lora, model, tmp_path):
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"))
    run = trainer(model, tmp_path, label_smoothing_factor=0.1)
    batch = run.data_collator([ROWS[3], ROWS[4]])
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = run.compute_loss(model, dict(batch))
    targets = batch["labels"][:, 1:].flatten()
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
