"""A Llama in commands, evaluations and plans."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from typer.testing import CliRunner

from gecko.cli import app
from gecko.data import document_ids, load_tokenizer
from gecko.eval import LlamaModel
from gecko.eval.perplexity import perplexity
from gecko.eval.scored_model import open_texts
from gecko.inference.generate import LlamaStream
from gecko.models import PRESETS, Llama, LlamaConfig, build_model, load_any
from gecko.models.gecko import ActivationCheckpointing
from gecko.plan import Assumptions, find_gpu, make_plan
from gecko.plan.counts import counts_of, group_sizes, inference_memory, parameters_by_component, state_memory
from gecko.recipes import get_recipe
from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, Run, SampleSettings, train
from gecko.train.optimizer import build_optimizer
from gecko.train.settings import OptimizerSettings

# ---- Commands accept a run of a Llama, or refuse it with a reason.


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="session")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of a few steps with rows of 64 tokens."""
    run = Run(
        model=LlamaConfig(264, 1, 32, 2, 32), output=str(tmp_path_factory.mktemp("runs") / "llama"), steps=3,
        data=DataSettings(source=str(corpus)), batch_size=2, sequence_length=64, sample=SampleSettings(tokens=3),
        evaluation=EvaluationSettings(rows=4, final_rows=4), checkpoint=CheckpointSettings(keep=1), threads=1,
    )  # fmt: skip
    train(run)
    return run.folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a stone falls slowly over the green river. " * 20, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "MODEL", "--prompt", "x"),
        ("read", "MODEL", "TEXT", "--out", "OUT"),
        ("serve", "MODEL", "--port", "0"),
        ("quantize", "MODEL", "OUT"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_is_not_for_a_llama_says_so(folder: Path, arguments: tuple[str, ...], text: Path) -> None:
    places = {"MODEL": folder, "TEXT": text, "OUT": text.parent / "out"}
    result = command(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert "MODEL must be a Gecko" in result.stderr and "is a Llama. Use it with gecko eval" in result.stderr
    assert not places["OUT"].exists()


def test_perplexity_says_what_the_context_was(folder: Path, text: Path) -> None:
    out = text.parent / "out.json"
    result = command("eval", "perplexity", folder, text, "--lengths", "64,256", "--out", out)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text())
    assert record["model"]["trained_length"] == 64 and record["model"]["parameters"] > 0
    assert any("context of 64 tokens, and the longest text had 256" in note for note in record["notes"])
    alone = command("eval", "perplexity", folder, text, "--lengths", "64")
    assert alone.exit_code == 0 and "it never saw the later positions" not in " ".join(alone.stdout.split())


def test_other_evaluations(folder: Path, text: Path) -> None:
    refused = command("eval", "positions", folder, text, "--length", "128")
    assert refused.exit_code == 2 and "attention has no chunks" in refused.stderr
    assert command("eval", "positions", folder, text, "--length", "128", "--chunk", "32").exit_code == 0
    found = command("eval", "retrieval", folder, "passkey", "--lengths", "600", "--depths", "0.5", "--samples", 2)
    assert found.exit_code == 0 and "longest text had 600" in " ".join(found.stdout.split())
    renewed = command("eval", "perplexity", folder, text, "--lengths", "64", "--renewed-norms")
    assert renewed.exit_code == 2 and "Leave it out" in renewed.stderr


def test_info_and_consolidate_take_a_run(folder: Path, tmp_path: Path) -> None:
    shown = command("info", folder)
    assert shown.exit_code == 0 and "Keys and values" in shown.stdout
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    result = command("consolidate", run, "--out", tmp_path / "model")
    assert result.exit_code == 0, result.stderr
    newest = next((folder / "checkpoints").iterdir())
    joined, before = load_any(tmp_path / "model").state_dict(), load_any(newest).state_dict()
    assert all(bool((joined[name] == weight).all()) for name, weight in before.items())
    assert Run.load(tmp_path / "model" / "recipe.json").model == load_any(newest).config


def test_weights_are_rounded(folder: Path, text: Path) -> None:
    values = {}
    for dtype in ("float32", "bfloat16"):
        out = text.parent / dtype
        result = command("eval", "perplexity", folder, text, "--lengths", "64", "--dtype", dtype, "-o", out)
        assert result.exit_code == 0, result.output
        record = json.loads(out.read_text())
        assert record["model"]["dtype"] == dtype
        values[dtype] = [score["value"] for score in record["scores"]]
    assert values["bfloat16"] != values["float32"]
    assert values["bfloat16"] == pytest.approx(values["float32"], rel=0.05)


# ---- In evaluations, a Llama gives the losses and tokens that it computes on the whole text at once.

TEXT = b"It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 2


@pytest.fixture
def scored(model: Llama) -> LlamaModel:
    return LlamaModel(model, load_tokenizer("bytes"), "random", 64)


def whole_losses(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    return model.token_losses(tokens[None, :-1], tokens[None, 1:])[0][0]


@settings(max_examples=10)
@given(cuts=st.lists(st.integers(1, len(TEXT)), max_size=5, unique=True), piece=st.sampled_from([7, 50, 2048]))
def test_losses_do_not_depend_on_how_the_stream_is_cut(model: Llama, cuts: list[int], piece: int) -> None:
    tokens = torch.tensor([256, *TEXT])
    scored = LlamaModel(model, load_tokenizer("bytes"), "random", 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[LlamaStream.__module__], "LLAMA_PIECE", piece)
        found = torch.cat(list(scored.losses(torch.tensor_split(tokens, sorted(cuts)))))
    torch.testing.assert_close(found, whole_losses(model, tokens))


@settings(max_examples=10)
@given(begin=st.integers(1, 60), length=st.integers(1, 40))
def test_a_continuation_is_scored_after_what_was_read(model: Llama, begin: int, length: int) -> None:
    """Its losses equal those of the whole text there, and reading on does not change an earlier state."""
    tokens = torch.tensor([256, *TEXT])[: begin + length]
    scored = LlamaModel(model, load_tokenizer("bytes"), "random", 64)
    reading = scored.read(tokens[:begin])
    for _ in range(2):
        predicted = scored.predict(reading, tokens[begin:])
        torch.testing.assert_close(predicted.losses, whole_losses(model, tokens)[begin - 1 :])
    later = scored.read(tokens[begin:], reading)
    torch.testing.assert_close(later.logits, scored.read(tokens).logits)


def test_greedy_is_what_is_written(scored: LlamaModel) -> None:
    """Compare with a computation over the whole text for every token, without a cache."""
    prompt = document_ids(scored.tokenizer, "What is")
    tokens = prompt
    for _ in range(12):
        tokens = torch.cat([tokens, scored.model(tokens[None])[0, -1:].argmax(-1)])
    written = tokens[len(prompt) :]
    stops = (written == scored.tokenizer.document_end).nonzero().flatten().tolist()
    expected = scored.tokenizer.decode(written[: stops[0] if stops else None].tolist())
    reading = scored.read(prompt)
    assert scored.write(reading, 12) == expected
    assert scored.write(reading, 12) == expected, "the reading was used up"
    assert scored.write(reading, 12, [expected[2]]) == expected[: expected.index(expected[2])]
    assert bool(scored.predict(reading, written).greedy.all())
    other = torch.cat([written[:-1], (written[-1:] + 1) % 256])
    assert scored.predict(reading, other).greedy.tolist() == [True] * 11 + [False]


def test_it_says_where_it_reads_further_than_it_was_trained(scored: LlamaModel, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(TEXT)
    texts = open_texts([str(tmp_path / "text.txt")], joined=False)
    perplexity(scored, texts, [64])
    assert scored.notes == []
    perplexity(scored, texts, [64, 128])
    assert len(scored.notes) == 1 and "context of 64 tokens, and the longest text had 128" in scored.notes[0]
    unknown = LlamaModel(scored.model, scored.tokenizer, "random", None)
    unknown.read(torch.tensor([256, 1, 2]))
    assert "had 3 tokens; the training context of random is not known" in unknown.notes[0]


def test_what_it_does_not_take(scored: LlamaModel) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        scored.read(torch.tensor([], dtype=torch.int64))
    with pytest.raises(ValueError, match=r"ids in 0\.\.263; got 300"):
        list(scored.losses([torch.tensor([256, 300])]))
    assert list(scored.losses([])) == list(scored.losses([torch.tensor([256])])) == []


# ---- The plan of a Llama agrees with measurements of small models.

BASE = LlamaConfig(vocab_size=64, num_layers=2, model_dim=128, num_heads=4, ffn_dim=256)
VARIANTS = {
    "base": BASE,
    "wide": replace(BASE, ffn_dim=768),
    "grouped": replace(BASE, key_value_heads=1),
    "deep": replace(BASE, num_layers=5, vocab_size=1000, num_heads=2),
}


@pytest.fixture(params=VARIANTS)
def config(request: pytest.FixtureRequest) -> LlamaConfig:
    return VARIANTS[request.param]


def counted_flops(config: LlamaConfig, length: int, mode: ActivationCheckpointing = "none") -> int:
    """Return the FLOPs of one row, forward and backward. Half of attention's pairs are masked, and skipped."""
    model, tokens = build_model(config), torch.zeros(1, length, dtype=torch.int64)
    model.activation_checkpointing = mode

    def forward(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return sdpa_flop_count(q, k, v) // 2

    def backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return sdpa_backward_flop_count(grad, q, k, v) // 2

    attention = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        model.loss(tokens, tokens).backward()
    return counter.get_total_flops()


def test_flops_are_those_of_the_code(config: LlamaConfig) -> None:
    for length in (64, 256):
        planned = sum(part.total for part in counts_of(config).flops(length).values())
        assert planned == pytest.approx(counted_flops(config, length) / length, rel=1e-4)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_flops_of_recomputation(config: LlamaConfig, mode: ActivationCheckpointing) -> None:
    run = replace(
        get_recipe("compare_llama"), model=config, sequence_length=256, activation_checkpointing=mode, compile=False
    )
    plan = make_plan(run, 1, find_gpu("h100"), Assumptions())
    planned = plan.recomputed + sum(part.total for part in plan.flops.values())
    assert planned == pytest.approx(counted_flops(config, 256, mode) / 256, rel=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_state_on_one_gpu_is_exact(config: LlamaConfig, tied: bool) -> None:
    config = replace(config, tie_embedding=tied)
    model = build_model(config)
    optimizer = build_optimizer(model, OptimizerSettings())
    model.loss(*[torch.zeros(1, 64, dtype=torch.int64)] * 2).backward()
    optimizer.step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    sizes = state_memory(config, 1)
    assert sizes == {
        "parameters": sum(parameter.nbytes for parameter in model.parameters()),
        "gradients": sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None),
        "optimizer": sum(tensor.nbytes for tensor in states),
    }
    assert group_sizes(config, bfloat16=False).gradients == sizes["parameters"]
    assert 4 * sum(parameters_by_component(config).values()) == sizes["parameters"]
    assert (parameters_by_component(config)["head"] == 0) is tied


def test_keys_and_values_are_what_a_model_holds(config: LlamaConfig) -> None:
    model = build_model(config)
    _, cache = model.read(torch.zeros(1, 37, dtype=torch.int64))
    held = sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    assert sum(counts_of(config).state(37, 4).values()) == held
    short, long = (inference_memory(config, torch.bfloat16, 1, length)["states"] for length in (10, 10_000))
    assert long == 1000 * short


def test_the_run_of_seven_billion_fits() -> None:
    facts = json.loads(command("plan", "llama2_7b", "--gpus", "128", "--gpu", "h100", "--json").stdout)
    assert facts["fits"] and facts["bytes_sent_per_step"]["context exchange"] == 0
    assert set(facts["flops_per_token"]) == {"linear", "attention", "head", "recomputed"}
    assert facts["memory_bytes"]["parameters"] == pytest.approx(4 * 6_738_415_616 / 8, rel=0.001)
    # The row length of Llama 2, as the recipe says.
    own = ["sequence_length=4096", "batch_size=1024", "model.rope_base=10000", "parallel.replicate=32"]
    shown = command("plan", "llama2_7b", *own, "--gpus", "256")
    assert "2,048 keys on average" in shown.stdout and "does not fit" not in shown.stdout


@pytest.mark.parametrize("name", [name for name, config in PRESETS.items() if isinstance(config, LlamaConfig)])
def test_info_of_a_preset(name: str) -> None:
    facts = json.loads(command("info", name, "--json", "--length", "1000").stdout)
    assert facts["parameters"]["total"] == sum(facts["parameters"][part] for part in facts["parameters"]) // 2
    assert set(facts["state_bytes_per_row"]) == {"keys", "values", "total"}
    assert "Keys and values of one sequence of 1,000 tokens" in command("info", name, "--length", "1000").stdout
