"""The Triton decoder computes the steps of the model, and its launches depend on no position."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import IN_TRITON, LLAMA, VARIANTS, in_pages
from torch import Tensor

from gecko import Gecko, GeckoConfig
from gecko.config import PAPER
from gecko.inference import Prefill, Sampling, read
from gecko.inference.batch import DecodingBatch
from gecko.inference.decoder import Decoder
from gecko.inference.packed_weights import _ONLY_IN_PYTORCH, PackedWeights, decoder_of
from gecko.inference.request import Request, Token
from gecko.ops.backends.dispatch import Launch
from gecko.ops.decoding import triton as steps
from gecko.ops.decoding.triton_rows import choose_kernel, draw_kernel
from gecko.state import GeckoState

CHUNK = 4
SMALL = GeckoConfig(
    vocab_size=37, num_layers=1, model_dim=24, key_dim=12, value_dim=20, num_heads=2, ffn_dim=20, chunk_size=CHUNK,
    cema_modes=3, timestep_groups=3,
)  # fmt: skip
LENGTHS = (1, 2 * CHUNK - 1, 3 * CHUNK + 2)
STEPS = CHUNK + 1
"""A chunk ends in every row, at different steps, and the memory is empty, begins, and changes."""

LLAMAS = {
    "qwen2": {**LLAMA, "num_heads": 6, "key_value_heads": 2, "key_dim": 36, "value_dim": 30, "sinks": 4},
    "qwen3": {
        **LLAMA, "num_heads": 3, "key_value_heads": 1, "key_dim": 30, "value_dim": 15, "sinks": 1,
        "query_key_bias": False, "query_key_norm": True, "tie_embedding": True,
        "rope_frequencies": (2.0, 1.0, 0.5, 0.0, 0.1),
    },
    "llama-2": {**LLAMA, "query_key_bias": False},
    "student": {
        **LLAMA, "num_heads": 4, "key_value_heads": 2, "key_dim": 24, "query_key_bias": False, "sinks": 1,
        "memory": "adaptive", "memory_gate_channels": 1,
    },
    "factor": {**LLAMA, "num_heads": 6, "key_value_heads": 3, "key_dim": 36, "value_dim": 30, "memory": "adaptive",
               "memory_factor": 0.0, "memory_gate_channels": 5, "gate": "attention"},
    "unrotated": {**LLAMA, "num_heads": 4, "key_value_heads": 2, "rope_heads": 0, "sinks": 2},
    "expanded": {"cema_expansion": True, "gate_bias": False, "queries_and_keys": "separate", "gate": "sum"},
}  # fmt: skip
"""Forms of converted Llamas with odd sizes, and what else a user may combine."""
CHANGES = {
    **{name: {"key_dim": 16, **VARIANTS[name]} if VARIANTS[name].keys() & {"num_heads", "rope_frequencies"}
       else VARIANTS[name] for name in VARIANTS}, **LLAMAS,
}  # fmt: skip
DECODED = [*IN_TRITON, *LLAMAS]
SOME = ["gecko", "qwen2", "llama-window", "student", "shared-keys"]
"""What a state may hold: sums of chunks or none, sinks or none, heads of its own or shared ones."""


pytestmark = pytest.mark.usefixtures("on_kernels")


def model_of(variant: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Gecko:
    torch.manual_seed(0)
    model = Gecko(replace(SMALL, **{**CHANGES[variant], **changes})).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(SMALL.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def state_for(model: Gecko, state: GeckoState) -> GeckoState:
    """Return the state of the model in float64 as one of ``model``."""
    narrow = state.map(lambda x: x.float() if x.is_floating_point() else x)
    dtypes = narrow.mixers[0].attention.keys.dtype, model.embedding.weight.dtype
    mixers = tuple(replace(x, attention=x.attention.to(*dtypes)) for x in narrow.mixers)
    return replace(narrow, mixers=mixers, model=model.fingerprint())


def start(model: Gecko, exact: Gecko, texts: Sequence[Tensor], window: torch.dtype | None = None) -> Decoder:
    """Return a decoder with the states of ``texts``, which the model in float64 has read."""
    return holding(model, [state_for(model, read(exact, [text]).state) for text in texts], window)


def holding(model: Gecko, states: Sequence[GeckoState], window: torch.dtype | None = None) -> Decoder:
    """Return a decoder that holds the states."""
    decoder = Decoder(model, len(states), window)
    with torch.inference_mode():
        for state in states:
            decoder.add(state, torch.zeros(SMALL.vocab_size, dtype=torch.bool))
    assert decoder.backend == "triton"
    return decoder


def run(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return the logits of every step (rows, steps, V) over ``tokens`` (rows, steps)."""
    with torch.inference_mode():
        return torch.stack([decoder.step(column.tolist()).clone() for column in tokens.unbind(1)], 1)


def assert_follows(found: Tensor, decoder: Decoder, exact: Gecko, texts: Sequence[Tensor]) -> None:
    """Assert that the last logits of each row, and the states, are those of a call over the whole text."""
    near = {"rtol": 1e-4, "atol": 1e-4}
    for slot, text in enumerate(texts):
        with torch.no_grad():
            expected, state = exact(text.unsqueeze(0))
        torch.testing.assert_close(found[slot].double(), expected[0, -found.shape[1] :], **near)
        for name, tensor in decoder.state(slot).tensors().items():
            torch.testing.assert_close(tensor.double(), state.tensors()[name].double(), **near, msg=f"{slot} {name}")


def assert_steps_are_calls(exact: Gecko, lengths: Sequence[int]) -> None:
    """Assert that a decoder continues texts of these lengths as ``exact``, the model in float64, reads them."""
    texts = [tokens_of(1, length + STEPS, seed)[0] for seed, length in enumerate(lengths)]
    decoder = start(copy.deepcopy(exact).float(), exact, [text[:-STEPS] for text in texts])
    assert_follows(run(decoder, torch.stack([text[-STEPS:] for text in texts])), decoder, exact, texts)


@pytest.mark.parametrize("variant", DECODED)
def test_steps_are_calls_in_float64(variant: str) -> None:
    assert_steps_are_calls(model_of(variant), LENGTHS)


@pytest.mark.parametrize("variant", ["gecko", "qwen2", "llama-window"])
def test_slots_that_a_row_does_not_see_are_passed_over(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of several tiles has slots before the window, before the document, and after the token."""
    monkeypatch.setattr(steps, "_KEYS", 256)
    monkeypatch.setattr(steps, "_VALUES", 256)
    chunk = 20
    assert_steps_are_calls(model_of(variant, chunk_size=chunk), (2, chunk - 4, 2 * chunk + 15))


@pytest.mark.parametrize("variant", ["gecko", "qwen2"])
def test_launches_of_one_step_are_those_of_every_step(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are recorded once and repeated, as by a captured graph: over borders of chunks, with tokens drawn there."""
    exact = model_of(variant)
    texts = [tokens_of(1, length + 1, seed)[0] for seed, length in enumerate(LENGTHS)]
    model = copy.deepcopy(exact).float()
    decoder, other = (start(model, exact, [text[:-1] for text in texts]) for _ in range(2))
    recorded: list[Launch] = []
    run_launch = Launch.run
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "run", lambda launch: (recorded.append(launch), run_launch(launch)))
        run(decoder, torch.stack([text[-1:] for text in texts]))
    run(other, torch.stack([text[-1:] for text in texts]))
    buffers = decoder._network.buffers
    for _ in range(STEPS):
        texts = [torch.cat([text, token[None]]) for text, token in zip(texts, buffers.token.clone(), strict=False)]
        for launch in recorded:
            run_launch(launch)
        logits = buffers.logits[: len(texts)]
        assert torch.equal(logits.unsqueeze(1), run(other, torch.stack([text[-1:] for text in texts])))
    assert_follows(logits.unsqueeze(1), other, exact, texts)
    assert all(len(set(text[-STEPS:].tolist())) > 1 for text in texts), "tokens that the device drew"


@pytest.mark.parametrize("variant", [*SOME, "cumulative"])
def test_states_in_pages_in_any_order(variant: str) -> None:
    """The input of the head, from states in pages, gives the logits of a decoder with states side by side."""
    exact = model_of(variant)
    model = copy.deepcopy(exact).float()
    tokens = tokens_of(len(LENGTHS), max(LENGTHS) + STEPS)
    decoder = start(model, exact, [row[:length] for row, length in zip(tokens, LENGTHS, strict=True)])
    pages = in_pages(GeckoState.stack([decoder.state(slot) for slot in range(len(LENGTHS))]).rows([1, 0, 2, 0]))
    kept, page_of, order = pages.map(torch.clone), [1, 0, 2], torch.tensor([2, 0, 1])
    where = torch.tensor(page_of, dtype=torch.int32)[order]
    network = PackedWeights(model, "triton").with_states(pages, rows=len(order))
    with torch.inference_mode():
        for step in range(STEPS):
            column = torch.stack([tokens[row, length + step] for row, length in enumerate(LENGTHS)])
            expected = decoder.step(column.tolist())[order]
            hidden = network.hidden(column[order].int(), where, torch.tensor(LENGTHS)[order] + step)
            torch.testing.assert_close(model.head(hidden), expected, rtol=1e-5, atol=1e-5)
    for row, page in enumerate(page_of):
        for name, tensor in decoder.state(row).tensors().items():
            if not name.startswith("clock."):
                assert torch.equal(pages.tensors()[name][page], tensor[0]), name
    for name, tensor in pages.tensors().items():
        assert torch.equal(tensor[3], kept.tensors()[name][3]), name


@pytest.mark.parametrize("variant", SOME)
def test_rows_come_and_go_among_pages(variant: str) -> None:
    """Each row of a step is decoded as alone, whichever others there are, and a token after the vocabulary spoils its
    own row only."""
    model = model_of(variant, torch.float32)
    states = GeckoState.empty(model.config, 4).map(torch.clone)
    together, alone = (PackedWeights(model, "triton").with_states(in_pages(states)) for _ in range(2))
    steps = [([1, 2], [0, 0]), ([2], [1]), ([3, 2, 1], [0, 2, 1]), ([1, 3], [2, 1]), ([0, 1], [0, 3])]
    with torch.inference_mode():
        for count, (slots, positions) in enumerate(steps):
            tokens = tokens_of(1, len(slots), count)[0]
            hidden = together.hidden(tokens, torch.tensor(slots), torch.tensor(positions)).clone()
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
                expected = alone.hidden(tokens[row : row + 1], torch.tensor([slot]), torch.tensor([position]))
                torch.testing.assert_close(hidden[row], expected[0], rtol=1e-5, atol=1e-5)
        hidden = together.hidden(*map(torch.tensor, ([SMALL.vocab_size, 1], [2, 3], [3, 2])))
    assert hidden.isnan().all(1).tolist() == [True, False]


@pytest.mark.parametrize("variant", SOME)
def test_a_state_continues_in_another_decoder_to_the_bit(variant: str) -> None:
    """A chunk has just ended in one row, and ends in every row afterwards."""
    exact = model_of(variant)
    model = copy.deepcopy(exact).float()
    decoder = start(model, exact, [tokens_of(1, length)[0] for length in LENGTHS])
    tokens, steps = tokens_of(len(LENGTHS), STEPS + 2, 5), 2
    run(decoder, tokens[:, :steps])
    slots = [2, 0, 1]
    with torch.inference_mode():
        moved = holding(model, [decoder.state(slot) for slot in slots])
    expected = run(decoder, tokens[:, steps:])
    assert torch.equal(run(moved, tokens[slots, steps:]), expected[slots])
    for at, slot in enumerate(slots):
        for name, tensor in decoder.state(slot).tensors().items():
            assert torch.equal(moved.state(at).tensors()[name], tensor), name


@pytest.mark.parametrize("variant", SOME)
def test_documents_in_the_prompt_are_kept_apart(variant: str) -> None:
    exact = model_of(variant)
    model = copy.deepcopy(exact).float()
    length = 4 * CHUNK + 1
    for start_at in (length - 2, length - CHUNK - 1):  # in the chunk of the last token, and in the one before
        text, ids = tokens_of(1, length + STEPS + CHUNK), torch.zeros(1, length + STEPS + CHUNK, dtype=torch.int64)
        ids[:, start_at:] = 1
        with torch.no_grad():
            _, state = exact(text[:, :length], segment_ids=ids[:, :length])
            expected, _ = exact(text, segment_ids=ids)
        found = run(holding(model, [state_for(model, state)]), text[:, length:])
        torch.testing.assert_close(found.double(), expected[:, length:], rtol=1e-4, atol=1e-4)


def started_and_apart(model: Gecko, rows: int, window: torch.dtype | None = None) -> tuple[Decoder, float]:
    """Return a decoder after some steps, and how far its logits are from those of the model in float64."""
    exact, texts = copy.deepcopy(model).double(), tokens_of(rows, 2 * CHUNK + STEPS)
    decoder = start(model, exact, list(texts[:, :-STEPS]), window)
    found = run(decoder, texts[:, -STEPS:])
    with torch.no_grad():
        expected = exact(texts)[0][:, -STEPS:]
    return decoder, float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 2], ids="{} rows".format)
@pytest.mark.parametrize("variant", ["gecko", "qwen2"])
def test_sixteen_bit_weights_are_near(variant: str, rows: int) -> None:
    decoder, apart = started_and_apart(model_of(variant).bfloat16(), rows)
    assert apart < 0.02
    assert decoder.state(0).mixers[0].attention.values.dtype == torch.bfloat16


def test_a_window_in_bfloat16_is_near() -> None:
    decoder, apart = started_and_apart(model_of("gecko", torch.float32), 1, torch.bfloat16)
    assert 0 < apart < 0.02
    assert decoder._all.mixers[0].attention.keys.dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 2], ids="{} rows".format)
@pytest.mark.parametrize("variant", ["gecko", "qwen3"])
def test_weights_in_8_bits_are_those_of_torchao(variant: str, rows: int) -> None:
    pytest.importorskip("torchao")
    from gecko.io.quantization import quantize

    model = model_of(variant, torch.float32).eval()
    exact = copy.deepcopy(model)
    quantize(model, 8)
    for wide, narrow in zip(exact.parameters(), model.parameters(), strict=True):
        wide.data = narrow.dequantize() if hasattr(narrow, "dequantize") and narrow.dim() == 2 else narrow.data
    exact = exact.double()
    texts = tokens_of(rows, CHUNK + 3)
    decoder = start(model, exact, list(texts[:, :CHUNK]))
    with torch.no_grad():
        expected = exact(texts)[0][:, CHUNK:]
    torch.testing.assert_close(run(decoder, texts[:, CHUNK:]).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_rounded_window_is_that_of_steps_in_pytorch() -> None:
    """The token's own key and value are not rounded; those of the tokens before it, and sinks, are."""
    model = model_of("llama", torch.float32, bfloat16_window=True)
    tokens = tokens_of(2, 3 * CHUNK + 2)
    state = model.empty_state(2)
    decoder = holding(model, [model.empty_state()] * 2)
    with torch.no_grad():
        for column in tokens.unbind(1):
            expected, state = model.unchecked_step(column, state)
            torch.testing.assert_close(run(decoder, column[:, None])[:, 0], expected, rtol=1e-3, atol=1e-3)
    for name, tensor in decoder.state(1).tensors().items():
        assert tensor.dtype == state.tensors()[name].dtype, name
    rings = [one.mixers[0].attention for one in (decoder.state(1), state)]
    assert torch.equal(rings[0].values[0], rings[1].values[1])
    assert float((rings[0].keys[0] != rings[1].keys[1]).float().mean()) < 0.01, "but where a last bit turns"


IN_PYTORCH: list[tuple[str, dict[str, Any]]] = [
    ("linear-memory", {}), ("separate-linear", {}), ("orthogonal", {}), ("gekko", {}),
    ("later-gecko", {"memory_gate_channels": 5}), ("paper", {}),
    ("shared-rms", {"local_mixing": "cema"}), ("llama", {"rms_eps": 1e-3}), ("separate", {"timestep_eps": 1e-3}),
    ("separate", {"convolution_width": 1}), ("separate", {"gate_activation": "softplus"}),
    ("llama", {"output_norm": True}), ("gecko", {"unit_vectors": "whole"}), ("gecko", {"dtype": torch.float16}),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "changes"), IN_PYTORCH, ids=str)
def test_other_models_decode_in_pytorch(variant: str, changes: dict[str, Any]) -> None:
    model = model_of(variant, **{"dtype": torch.float32, **changes})
    assert decoder_of(model, model.empty_state()) is None


def test_every_field_is_decoded_or_left_to_pytorch() -> None:
    decoded = {name for variant in DECODED for name in CHANGES[variant]} | {"bfloat16_window"}
    assert PAPER.keys() <= decoded | set(_ONLY_IN_PYTORCH)
    changed = {name for variant, changes in IN_PYTORCH for name in {**CHANGES[variant], **changes}}
    assert set(_ONLY_IN_PYTORCH) <= changed


def draw(logits: Tensor, temperature: float, seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    rows, token, choices = len(logits), torch.empty(len(logits), dtype=torch.int64), -(-logits.shape[1] // 64)
    drawn = {"p_scores": torch.empty(rows, choices), "p_tokens": torch.empty(rows, choices, dtype=torch.int32)}
    Launch(draw_kernel, (rows, choices), {
        "p_logits": logits, "p_temperature": torch.full((rows,), temperature), "p_seed": torch.tensor(seeds),
        "p_position": torch.tensor(positions), **drawn, "vocabulary": logits.shape[1], "block": 16,
    }, 8).run()  # fmt: skip
    Launch(choose_kernel, (rows,), {**drawn, "p_token": token, "choices": choices, "width": 8}, 1).run()
    return token.tolist()


def test_greedy_takes_the_first_of_the_most_likely_tokens() -> None:
    logits = torch.randn(4, 75, generator=torch.Generator().manual_seed(0))
    logits[0, [70, 30]] = 9.0
    logits[1, [0, 74]] = 9.0
    logits[2, 74] = 9.0  # of the second program
    expected = [30, 0, *logits[2:].argmax(-1).tolist()]
    assert draw(logits, 0.0, [0] * 4, [0] * 4) == expected
    assert draw(logits, 1e-9, [0] * 4, [0] * 4)[2:] == expected[2:], "a small temperature is almost greedy"


def test_tokens_are_drawn_from_the_softmax() -> None:
    """With several seeds, at many positions, far ones included."""
    logits, count = torch.tensor([0.0, 0.0, 2.1, 0.0, 0.0, 0.0, 0.0, 0.0]), 150
    seeds, positions = [i % 3 for i in range(count)], [2**40 + i // 3 for i in range(count)]
    drawn = torch.tensor(draw(logits.repeat(count, 1), 1.5, seeds, positions))
    expected = (logits / 1.5).softmax(-1)
    spread = (expected * (1 - expected) / count).sqrt()
    assert ((torch.bincount(drawn, minlength=8) / count - expected).abs() < 3 * spread).all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_noticed(broken: float, temperature: float) -> None:
    logits = torch.zeros(3, 100)  # two programs choose
    logits[1, 39] = broken
    assert [token < 0 for token in draw(logits, temperature, [0] * 3, [0] * 3)] == [False, True, False]


def drawn_of(model: Gecko, prefills: Sequence[Prefill], samplings: Sequence[Sampling], count: int) -> list[list[int]]:
    """Return ``count`` tokens of each sequence, decoded side by side; their seeds are their samplings' places."""
    batch, tokens = DecodingBatch(model, len(prefills)), []
    with torch.inference_mode():
        for prefill, sampling in zip(prefills, samplings, strict=True):
            batch.add(0, Request(torch.empty(0), count, sampling, SAMPLINGS.index(sampling)), prefill)
        for _ in range(count):
            batch.decode()
            tokens.append([event.token for event in batch.draw() if isinstance(event, Token)])
    assert batch.decoder.backend == "triton"
    return [list(one) for one in zip(*tokens, strict=True)]


SAMPLINGS = [Sampling(1.0), Sampling(1.0, top_k=5), Sampling(0.0)]


def test_texts_get_the_tokens_that_they_get_alone() -> None:
    """Some rows are drawn on the device, and one on the host."""
    exact = model_of("gecko")
    model = copy.deepcopy(exact).float()
    prefills = []
    for length in LENGTHS:
        found = read(exact, [tokens_of(1, length)[0]])
        prefills.append(replace(found, state=state_for(model, found.state), logits=found.logits.float()))
    together = drawn_of(model, prefills, SAMPLINGS, 3)
    alone = [drawn_of(model, [prefill], [one], 3)[0] for prefill, one in zip(prefills, SAMPLINGS, strict=True)]
    assert together == alone
    last, text = together[2], tokens_of(1, LENGTHS[2])[0]
    for count, token in enumerate(last):
        assert token == int(read(exact, [torch.cat([text, torch.tensor(last[:count]).long()])]).logits.argmax())
