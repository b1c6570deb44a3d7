"""Constrained text always matches its constraint, and sequences beside it get what they get alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from serving.texts import alone, request, run

import gecko
from gecko.data import Tokenizer, load_tokenizer
from gecko.inference import Sampling
from gecko.inference.grammar import Constraint, ConstraintError, Grammar, GrammarCompiler, Matcher
from gecko.inference.scheduler import Engine

BIG = gecko.GeckoConfig(
    vocab_size=448, num_layers=1, model_dim=16, key_dim=8, value_dim=16, num_heads=1, ffn_dim=16,
    cema_modes=2, chunk_size=8, timestep_groups=2,
)  # fmt: skip
"""Configuration with an embedding for every id of the tokenizers of these tests, and some more."""


class Point(BaseModel):
    """Object of the JSON tests."""

    name: str
    kind: str | None
    values: list[int]
    next: Point | None


@pytest.fixture(scope="session")
def big() -> gecko.Gecko:
    torch.manual_seed(1)
    model = gecko.Gecko(BIG)
    with torch.no_grad():
        model.head.weight.mul_(3)
    return model


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, BIG.vocab_size)


@pytest.fixture(scope="session")
def bytewise() -> GrammarCompiler:
    return GrammarCompiler(load_tokenizer("bytes"), 264)


def written(
    model: gecko.Gecko, tokenizer: Tokenizer, constraint: Constraint, seed: int, tokens: int = 200
) -> tuple[str, str]:
    """Return the text that the engine generates under a constraint, and why it ended. Symbols that close are likely."""
    closing = {int(tokenizer.encode("a" + symbol)[-1]): 6.0 for symbol in '"}],'}
    asked = request(
        torch.tensor([tokenizer.document_start, 5]), tokens, Sampling(1.0, logit_bias=closing), seed=seed,
        constraint=constraint,
        stop_tokens=frozenset({tokenizer.document_end}),
    )  # fmt: skip
    (number,), log = run(Engine(model), asked)
    before = tokenizer.encode("a").tolist()[-1:]
    text = tokenizer.decode([*before, *log.ids(number)])
    return text.removeprefix(tokenizer.decode(before)), log.ends[number].reason


@settings(max_examples=8)
@given(seed=st.integers(0, 1000), texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1))
def test_a_choice_is_one_of_the_texts(
    big: gecko.Gecko, tokenizer: Tokenizer, compiler: GrammarCompiler, seed: int, texts: list[str]
) -> None:
    """Whatever characters they have, if the tokenizer can write them."""
    known = [text for text in texts if tokenizer.decode(tokenizer.encode("a" + text)) == "a" + text]
    if known:
        text, reason = written(big, tokenizer, compiler.compile(Grammar.choice(known)), seed, 2000)
        assert (text in known, reason) == (True, "stop")


@pytest.mark.parametrize(
    "pattern", [r"[a-d]{2,5}(-[0-9]+)?!", r"(yes|no), é{3}", r"[0-9]{2}:[0-9]{2}", r"(a|b)*c", "/x/\\n?"]
)
def test_a_text_matches_its_regular_expression(
    big: gecko.Gecko, tokenizer: Tokenizer, compiler: GrammarCompiler, pattern: str
) -> None:
    constraint, ends = compiler.compile(Grammar("regex", pattern)), set()
    for seed in range(5):
        text, reason = written(big, tokenizer, constraint, seed)
        ends.add(reason)
        assert reason == "length" or re.fullmatch(pattern, text), text
    assert "stop" in ends


def test_json_fits_its_schema(big: gecko.Gecko, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    for schema, kind, most in ((Point.model_json_schema(), Point, 600), ({"type": "object"}, dict[str, Any], 400)):
        constraint = compiler.compile(Grammar.json_schema(schema))
        ends = [written(big, tokenizer, constraint, seed, most) for seed in range(8)]
        texts = [text for text, reason in ends if reason == "stop"]
        assert texts
        for text in texts:
            TypeAdapter(kind).validate_json(text, strict=True)


def test_white_space_ends(model: gecko.Gecko, bytewise: GrammarCompiler) -> None:
    """However likely a model makes it."""
    constraint = bytewise.compile(Grammar.json_schema({"type": "array", "items": {"enum": [1]}, "maxItems": 2}))
    asked = request(new=1000, sampling=Sampling(0.0, logit_bias={10: 100.0, 32: 99.0}), constraint=constraint)
    (number,), log = run(Engine(model), asked)
    assert log.ends[number].reason == "stop"
    assert json.loads(bytes(log.ids(number))) in ([], [1], [1, 1])


@settings(max_examples=8)
@given(seed=st.integers(0, 99), drawn=st.floats(0.0, 1.5), penalty=st.sampled_from([1.0, 1.3]))
def test_sequences_beside_a_constrained_one_are_as_if_alone(
    model: gecko.Gecko, bytewise: GrammarCompiler, seed: int, drawn: float, penalty: float
) -> None:
    """Also with log-probabilities, which stay those of the model."""
    constraint = bytewise.compile(Grammar("regex", "[a-f0-9]{30}"))
    free = request(new=40, sampling=Sampling(drawn, repetition_penalty=penalty), seed=seed, logprobs=2)
    bound = request(new=40, sampling=Sampling(drawn), seed=seed, constraint=constraint, logprobs=2)
    (first, second, third), log = run(Engine(model), free, bound, free)
    (single,), single_log = run(Engine(model), free)
    assert log.ids(first) == log.ids(third) == alone(model, free).tokens[0]
    values = [(event.logprob, event.top_logprobs) for event in log.tokens[first]]
    assert values == [(event.logprob, event.top_logprobs) for event in single_log.tokens[single]]
    assert re.fullmatch("[a-f0-9]{30}", bytes(log.ids(second)).decode())
    assert all(len(event.top_logprobs) == 2 for event in log.tokens[second])


def test_a_constraint_that_excludes_nothing_changes_nothing(model: gecko.Gecko, bytewise: GrammarCompiler) -> None:
    constraint = bytewise.compile(Grammar("regex", "(?s:.)*"))
    for temperature in (0.0, 0.8):
        sampling = Sampling(temperature, logit_bias=dict.fromkeys([*range(128, 264)], -100.0))
        free = request(new=40, sampling=sampling, seed=3)
        bound = request(new=40, sampling=sampling, seed=3, constraint=constraint)
        (first, second), log = run(Engine(model), free, bound)
        assert log.ids(first) == log.ids(second)


def test_a_text_ends_where_it_is_complete_only(model: gecko.Gecko, bytewise: GrammarCompiler) -> None:
    """However likely the stop token is; and a text of full length is said to be cut."""
    constraint = bytewise.compile(Grammar("regex", "ab(cd)?"))
    asked = request(
        new=9, sampling=Sampling(0.0, logit_bias={256: 100.0}), constraint=constraint, stop_tokens=frozenset({256})
    )
    cut = request(new=3, sampling=Sampling(0.0, logit_bias={99: 100.0}), constraint=constraint)
    (first, second), log = run(Engine(model), asked, cut)
    assert (bytes(log.ids(first)), log.ends[first].reason) == (b"ab", "stop")
    assert (bytes(log.ids(second)), log.ends[second].reason) == (b"abc", "length")


WIDE = [{"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(4)]} for i in range(6)]


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar("regex", "(a|b"), "unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("regex", r"[^\s\S]"), "no token"),
        (Grammar("regex", "a" * 20_000), "16,384"),
        (Grammar("regex", "(" * 5000 + "a" + ")*" * 5000), "regex"),
        (Grammar.choice([f"{index * 7919}" for index in range(90_000)]), "262,144"),
        (Grammar.json_schema({"type": "strin"}), "strin"),
        (Grammar.json_schema({"enum": ["\ud800"]}), "hex escape"),
        (Grammar("json_schema", "{"), "Expecting property name"),
        (Grammar("regex", "\ud800"), "surrogate"),
        (Grammar.json_schema({"$ref": "#"}), "no token"),
        (Grammar.json_schema({"$ref": "http://localhost:1/x"}), "does not fetch"),
        (Grammar.json_schema({"$ref": "file:///etc/hostname"}), "does not fetch"),
        (Grammar.json_schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
        (Grammar.json_schema({"properties": {f"p{index}": {} for index in range(20_000)}}), "262,144"),
        (Grammar.json_schema({"allOf": WIDE}), "too"),
    ],
    ids=range(16),
)
def test_bad_constraints_are_refused(bytewise: GrammarCompiler, grammar: Grammar, told: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(told)) as caught:
        bytewise.compile(grammar)
    assert len(str(caught.value)) < 400


def test_a_constraint_that_becomes_too_complex_ends_its_sequence_alone(
    model: gecko.Gecko, bytewise: GrammarCompiler
) -> None:
    constraint = bytewise.compile(Grammar("regex", "((a{1,1000}){1,1000}){1,1000}b"))
    bound, free = request(new=200, sampling=Sampling(1.0, logit_bias={97: 100.0}), constraint=constraint), request()
    (first, second), log = run(Engine(model), bound, free)
    assert log.ends[first].reason == "constraint"
    assert "too many expressions" in str(log.ends[first].error)
    assert log.ids(second) == alone(model, free).tokens[0]


PLACES = st.sets(st.sampled_from([97, 98, 99, 256]))
PATHS = [
    Sampling(0.0), Sampling(0.9), Sampling(0.9, top_p=0.9), Sampling(0.9, top_k=5), Sampling(0.9, min_p=0.1),
    Sampling(0.0, repetition_penalty=1.3), Sampling(0.9, repetition_penalty=1.3), Sampling(0.9, presence_penalty=1.0),
]  # fmt: skip
"""Samplings on every path, in C, and in PyTorch with and without each cut and penalty."""


@settings(max_examples=60)
@given(
    pattern=st.sampled_from(["ab", "a*", "ba*", "a{0}", "[ab]{2}c?", "(ab|ba)*c"]), stops=PLACES, banned=PLACES,
    least=st.integers(0, 4), sampling=st.sampled_from(PATHS), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_constraint_without_a_token_to_draw_ends_its_sequence_alone(
    model: gecko.Gecko, bytewise: GrammarCompiler, pattern: str, stops: set[int], banned: set[int], least: int,
    sampling: Sampling, seed: int,
) -> None:  # fmt: skip
    """Whatever takes the tokens away: stop tokens are no part of the text, others are excluded, or come too early."""
    bound = request(
        new=8, sampling=replace(sampling, logit_bias=dict.fromkeys(banned, -100.0)), seed=seed,
        constraint=bytewise.compile(Grammar("regex", pattern)), stop_tokens=frozenset(stops), min_new_tokens=least,
    )  # fmt: skip
    free = [request(new=9, sampling=one, seed=seed) for one in (Sampling(0.0), sampling)]
    (first, *others), log = run(Engine(model), bound, *free)
    assert [log.ids(other) for other in others] == [alone(model, asked).tokens[0] for asked in free]
    made, end = log.ids(first), log.ends[first]
    assert not (stops | banned) & set(made)
    if end.reason == "constraint":
        assert end.error is not None and "stop tokens, or excluded by logit_bias" in end.error
    else:
        assert end.reason == "length" or (end.reason == "stop" and re.fullmatch(pattern, bytes(made).decode()))


@settings(max_examples=8)
@given(seed=st.integers(0, 99), drawn=st.sampled_from([0.0, 0.9]))
def test_json_that_cannot_end_ends_its_sequence_alone(
    model: gecko.Gecko, bytewise: GrammarCompiler, seed: int, drawn: float
) -> None:
    """After some white space: the quotes of names are stop tokens, and the closing brace is excluded."""
    sampling = Sampling(drawn, top_p=0.9, logit_bias={125: -100.0})
    constraint = bytewise.compile(Grammar.json_schema({"type": "object"}))
    bound = request(new=60, sampling=sampling, seed=seed, constraint=constraint, stop_tokens=frozenset({34}))
    free = request(new=60, sampling=Sampling(drawn), seed=seed)
    (first, second), log = run(Engine(model), bound, free)
    assert log.ends[first].reason == "constraint" and "stop tokens" in str(log.ends[first].error)
    assert bytes(log.ids(first)).strip() == b"{"
    assert log.ids(second) == alone(model, free).tokens[0]


def test_an_error_in_a_constraint_ends_its_sequence_alone(
    model: gecko.Gecko, bytewise: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Matcher, token: int) -> None:
        raise IndexError("planted")

    monkeypatch.setattr(Matcher, "advance", fail)
    bound, free = request(constraint=bytewise.compile(Grammar("regex", "ab"))), request(new=9)
    (first, second), log = run(Engine(model), bound, free)
    assert (log.ends[first].reason, log.ends[first].error) == ("error", "IndexError: planted")
    assert log.ids(second) == alone(model, free).tokens[0]


def test_the_vocabulary_must_be_the_models(model: gecko.Gecko, compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar("regex", "a"))
    with pytest.raises(ValueError, match="vocabulary of 264"):
        Engine(model).submit(request(constraint=constraint))
