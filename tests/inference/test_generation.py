"""Laws of generate and stream, on a model with random weights."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_calls import assert_same_states

import gecko
from gecko.data import document_ids, load_tokenizer
from gecko.inference import NewToken, stream
from gecko.inference.decoder import Decoder
from gecko.inference.generate import LlamaStream, prefill_llama
from gecko.models.llama import Llama, LlamaConfig

PROMPTS = st.lists(st.lists(st.integers(0, 263), min_size=1, max_size=40), min_size=1, max_size=5)
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"top_k": 20, "top_p": 0.8},
    {"min_p": 0.02, "repetition_penalty": 1.3, "logit_bias": {5: 3.0, 260: -100.0}},
    {"temperature": 0.0, "repetition_penalty": 2.0},
]


@settings(max_examples=15)
@given(prompts=PROMPTS, sampling=st.sampled_from(SAMPLINGS), seed=st.integers(0, 99), stop=st.integers(0, 263))
def test_a_batch_gives_each_row_what_it_would_get_alone(
    model: gecko.Gecko, prompts: list[list[int]], sampling: dict[str, Any], seed: int, stop: int
) -> None:
    # A fifth of all ids stop, so that rows leave the batch at different steps.
    options = {"max_new_tokens": 12, "seed": seed, "stop_tokens": range(stop // 5, 264, 5), **sampling}
    together = gecko.generate(model, prompts, **options)
    for row, prompt in enumerate(prompts):
        alone = gecko.generate(model, prompt, **options)
        assert together.tokens[row] == alone.tokens[0]
        assert together.finish_reasons[row] == alone.finish_reasons[0]
        assert together.state.position[row] == len(prompt) + len(alone.tokens[0])
        assert_same_states(together.state.rows([row]), alone.state, 1e-4)


def test_a_penalty_counts_what_the_prompt_and_the_new_text_held(model: gecko.Gecko) -> None:
    """With the largest penalty, greedy decoding takes no token with a positive logit twice, nor one of the prompt; what
    a state has read does not count."""
    prompt, options = list(range(100)), {"max_new_tokens": 60, "temperature": 0}
    state = gecko.generate(model, prompt, max_new_tokens=0).state
    plain = gecko.generate(model, prompt, **options).tokens[0]
    strict = gecko.generate(model, prompt, repetition_penalty=100, **options).tokens[0]
    free = gecko.generate(model, [0], repetition_penalty=100, state=state, **options).tokens[0]
    assert len({*prompt, *plain}) < len({*prompt, *strict}) == 160
    assert {*prompt} & {*free} - {0}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_streaming_gives_the_same_tokens(model: gecko.Gecko, sampling: dict[str, Any]) -> None:
    prompts = [[1], [2, 3] * 20]
    whole = gecko.generate(model, prompts, max_new_tokens=9, seed=4, **sampling)
    tokens = stream(model, prompts, max_new_tokens=9, seed=4, **sampling)
    pairs = list(tokens)
    assert pairs == [NewToken(row, whole.tokens[row][step]) for step in range(9) for row in (0, 1)]
    assert tokens.finish_reasons == whole.finish_reasons == ["length", "length"]


def test_a_token_is_made_when_it_is_asked_for(model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for owner, name in ((model, "hidden"), (Decoder, "step")):
        call = getattr(owner, name)

        def watched(*args: Any, name: str = name, call: Any = call, **more: Any) -> Any:
            calls.append(name)
            return call(*args, **more)

        monkeypatch.setattr(owner, name, watched)
    tokens = iter(stream(model, [1, 2], max_new_tokens=5))
    for made in range(5):
        next(tokens)
        assert calls == ["hidden"] + ["step"] * made


@settings(max_examples=10)
@given(first=st.integers(1, 40), made=st.integers(0, 20), more=st.integers(1, 20))
def test_a_text_goes_on_from_its_state_as_if_never_interrupted(
    model: gecko.Gecko, first: int, made: int, more: int
) -> None:
    prompt, question = (torch.randint(0, 264, (n,), generator=torch.Generator().manual_seed(n)) for n in (first, more))
    before = gecko.generate(model, prompt, max_new_tokens=made, temperature=0)
    after = gecko.generate(model, question, max_new_tokens=8, temperature=0, state=before.state)
    text = [*prompt.tolist(), *before.tokens[0], *question.tolist()]
    assert before.state.position == [first + made]
    assert after.tokens == gecko.generate(model, text, max_new_tokens=8, temperature=0).tokens


def test_a_state_in_the_middle_of_a_stream_has_read_what_came_out(model: gecko.Gecko) -> None:
    tokens = stream(model, [5, 6], max_new_tokens=10, temperature=0)
    text = [5, 6, *(token for _, (_, token) in zip(range(4), tokens, strict=False))]
    state = tokens.state
    assert state.position == [6] and len(list(tokens)) == 6
    expected = gecko.generate(model, text, max_new_tokens=0).state
    torch.testing.assert_close(state.final_norm.mean, expected.final_norm.mean)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_state_after_numbers_that_are_not_finite_has_read_what_came_out(
    model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """The other rows continue without the broken one, with the random numbers that they would have drawn."""
    whole = gecko.generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=6, temperature=temperature, seed=1)
    tokens = stream(model, [[1, 2, 3], [4, 5]], max_new_tokens=6, temperature=temperature, seed=1)
    made = [token for _, token in zip(range(6), tokens, strict=False)]
    with monkeypatch.context() as patch:
        step = Decoder.step
        patch.setattr(Decoder, "step", lambda *args: step(*args) * torch.tensor([[1.0], [math.nan]]))
        with pytest.raises(ValueError, match="row 1"):
            next(iter(tokens))
    assert tokens.state.position == [6, 5]
    tokens.stop(1)
    made += tokens
    assert [token for row, token in made if row == 0] == whole.tokens[0]
    assert [token for row, token in made if row == 1] == whole.tokens[1][:3]


def test_stopping_a_row_leaves_the_others_alone(model: gecko.Gecko) -> None:
    """In the middle of the stream, and before the first token."""
    prompts = [[1], [2], [3], [4]]
    whole = gecko.generate(model, prompts, max_new_tokens=6, temperature=0)
    tokens = stream(model, prompts, max_new_tokens=6, temperature=0)
    tokens.stop(3)
    made: list[list[int]] = [[] for _ in prompts]
    for row, token in tokens:
        made[row].append(token)
        if row == 2 and len(made[2]) == 2:
            tokens.stop(1)
    assert made == [whole.tokens[0], whole.tokens[1][:2], whole.tokens[2], []]
    assert tokens.finish_reasons == ["length", "stop", "length", "stop"]
    assert tokens.state.position == [7, 3, 7, 1]


def test_a_stop_token_is_neither_returned_nor_read(model: gecko.Gecko) -> None:
    free = gecko.generate(model, [7], max_new_tokens=10, temperature=0).tokens[0]
    stop = free[4]
    out = gecko.generate(model, [7], max_new_tokens=10, temperature=0, stop_tokens=[stop])
    assert out.tokens[0] == free[: free.index(stop)]
    assert out.finish_reasons == ["stop"]
    assert out.state.position == [1 + free.index(stop)]


def test_a_seed_decides_and_none_follows_pytorch(model: gecko.Gecko) -> None:
    def tokens(seed: Any, prompts: Any = ([1, 2],)) -> list[list[int]]:
        return gecko.generate(model, list(prompts), max_new_tokens=12, seed=seed).tokens

    assert tokens(3) == tokens(3) != tokens(4)
    same, other = tokens(None, [[1, 2], [1, 2]])
    assert same != other
    assert tokens([3, 4], [[1, 2], [1, 2]]) == [*tokens(3), *tokens(4)]
    for kind in (np.int64, np.uint8, np.array, torch.tensor):
        assert tokens(kind(3)) == tokens([kind(3)]) == tokens(np.array([3])) == tokens(3)
    torch.manual_seed(5)
    first = tokens(None)
    torch.manual_seed(5)
    assert tokens(None) == first


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)]
)
def test_every_kind_of_prompt(model: gecko.Gecko, kind: Any) -> None:
    expected = gecko.generate(model, [1, 2, 3], max_new_tokens=4, temperature=0).tokens
    assert gecko.generate(model, kind([1, 2, 3]), max_new_tokens=4, temperature=0).tokens == expected
    for prompts in ([kind([1, 2, 3])] * 2, kind([[1, 2, 3]] * 2)):
        assert gecko.generate(model, prompts, max_new_tokens=4, temperature=0).tokens == expected * 2


def test_several_prompts_continue_one_state_or_one_each(model: gecko.Gecko) -> None:
    book = gecko.generate(model, list(range(50)), max_new_tokens=0).state
    questions = [[1], [2, 3]]
    out = gecko.generate(model, questions, max_new_tokens=5, temperature=0, state=book)
    for row, question in enumerate(questions):
        text = [*range(50), *question]
        assert out.tokens[row] == gecko.generate(model, text, max_new_tokens=5, temperature=0).tokens[0]
    swapped = gecko.generate(model, [[9], [9]], max_new_tokens=5, temperature=0, state=out.state.rows([1, 0]))
    ordered = gecko.generate(model, [[9], [9]], max_new_tokens=5, temperature=0, state=out.state)
    assert swapped.tokens == ordered.tokens[::-1]


def test_the_state_may_be_used_where_gradients_flow(model: gecko.Gecko) -> None:
    state = gecko.generate(model, [1, 2], max_new_tokens=2).state
    assert not any(tensor.is_inference() for tensor in state.tensors().values())
    logits, _ = model(torch.tensor([[3, 4]]), state=state)
    logits.sum().backward()
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be at least 0"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_p": 2.0}, ValueError, "top_p"),
        ({"min_p": 2.0}, ValueError, "min_p"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty"),
        ({"logit_bias": {264: 1.0}}, ValueError, "0..263; got 264"),
        ({"seed": [1, 2, 3]}, ValueError, "one per prompt \\(2\\); got 3"),
        ({"seed": 3.0}, TypeError, "an integer; got 3.0"),
        ({"seed": torch.tensor(3.5)}, TypeError, "an integer; got 3.5"),
        ({"seed": np.array(3.5)}, TypeError, "an integer; got 3.5"),
        ({"seed": torch.tensor([1.5, 2.5])}, TypeError, r"an integer; got tensor\(1.5"),
        ({"seed": [1, "2"]}, TypeError, "an integer; got '2'"),
        ({"seed": 2**70}, ValueError, "64 bits"),
        ({"prompt_tokens": []}, ValueError, "at least one token"),
        ({"prompt_tokens": [[1], []]}, ValueError, "at least one token"),
        ({"prompt_tokens": [1, 264]}, ValueError, "0..263; got 264"),
        ({"prompt_tokens": [1.5]}, TypeError, "integers"),
        ({"prompt_tokens": "text"}, ValueError, "from a folder with its tokenizer; this model has none"),
        ({"prompt_tokens": ["text", [1]]}, TypeError, "all texts or all token ids"),
        ({"prompt_tokens": torch.zeros(1, 1, 1, dtype=torch.int64)}, ValueError, "1-D"),
    ],
)
def test_wrong_arguments(
    model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """All but those of prompts are found before anything is read."""
    if "prompt_tokens" not in options:
        monkeypatch.setattr(model, "hidden", lambda *_, **__: pytest.fail("a prompt was read"))
    with pytest.raises(error, match=message):
        gecko.generate(model, **{"prompt_tokens": [[1], [2]], **options})


def test_states_of_others_are_refused(model: gecko.Gecko) -> None:
    with pytest.raises(ValueError, match="one row, which all prompts continue, or one row per prompt"):
        gecko.generate(model, [[1], [2], [3]], state=model.empty_state(2))
    with pytest.raises(ValueError, match="weights"):
        gecko.generate(model, [1], state=gecko.Gecko(model.config).empty_state())


def test_a_text_is_its_ids_and_the_result_is_text() -> None:
    """Texts begin with the document start, or continue a state, and end at the document end."""
    model, tokenizer = gecko.load("books"), load_tokenizer("bytes")
    options: dict[str, Any] = {"seed": 3, "max_new_tokens": 12, "temperature": 0.7}
    texts = gecko.generate(model, ["It was ", "She"], **options)
    ids = [document_ids(tokenizer, text) for text in ("It was ", "She")]
    expected = gecko.generate(model, ids, stop_tokens={tokenizer.document_end}, **options)
    assert texts.tokens == expected.tokens and texts.texts == [tokenizer.decode(row) for row in texts.tokens]
    assert str(texts) == "\n".join(texts.texts) and expected.texts == []
    for record in (texts, expected, texts.state):
        assert len(repr(record)) < 300
    after = gecko.generate(model, [" Then", " So"], state=texts.state, **options)
    ids = [tokenizer.encode(text) for text in (" Then", " So")]
    assert after.tokens == gecko.generate(model, ids, state=texts.state, **options).tokens
    ending = gecko.generate(model, "It was ", logit_bias={tokenizer.document_end: 100.0}, **options)
    assert ending.tokens == [[]] and ending.finish_reasons == ["stop"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_llama_draws_no_token_from_numbers_that_are_not_finite(value: float, temperature: float) -> None:
    """Whichever sampler draws."""
    llama = Llama(LlamaConfig(vocab_size=64, num_layers=1, model_dim=32, num_heads=2, ffn_dim=32)).eval()
    with torch.no_grad():
        llama.lm_head.weight[3] = value
    for dtype in (torch.float32, torch.float64):
        reading = prefill_llama(llama.to(dtype), [torch.tensor([1, 2])])
        tokens = LlamaStream(llama, reading, seed=0, temperature=temperature, max_new_tokens=3)
        with pytest.raises(ValueError, match="logits must be finite"):
            next(iter(tokens))
