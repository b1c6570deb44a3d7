"""Chats become tokens of which the answers are learned, in rows of whole chats; wrong lines are named."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.chats import some_chats, spoken, write_chats

from gecko.data import IGNORED, load_tokenizer
from gecko.data.chat import DEFAULT_TEMPLATE, TemplateChat, find_format, tuning_format
from gecko.data.chats import ChatCorpus, ChatRows, load_chats, pack, read_chats
from gecko.data.turns import Turn

END = 256


@pytest.fixture(scope="module")
def own_format() -> TemplateChat:
    return tuning_format(load_tokenizer("bytes"), Path("no folder"))


@pytest.fixture(scope="module")
def corpus(own_format: TemplateChat, tmp_path_factory: pytest.TempPathFactory) -> ChatCorpus:
    return load_chats(str(write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", some_chats(30))), own_format)


def turns(*contents: str) -> list[Turn]:
    return [Turn(**message) for message in spoken(*contents)]


def followed(chat_format: TemplateChat, question: str) -> list[int]:
    closing, following = chat_format.continuation(turns(question))
    assert chat_format.continuation([]) == (closing, [])
    return [*closing, *following]


def test_a_model_learns_the_answers_and_their_ends(own_format: TemplateChat) -> None:
    pieces = list(own_format.trained_pieces(turns("one?", "first", "two?", "second", "three?")))
    learned = [bytes(ids[:-1]).decode() for ids, is_answer in pieces if is_answer]
    assert learned == ["first", "second"]
    assert all(ids[-1] == END for ids, is_answer in pieces if is_answer)
    assert "three" not in bytes(i for ids, _ in pieces for i in ids if i != END).decode()


def test_the_pieces_of_a_chat_are_what_generation_reads(own_format: TemplateChat) -> None:
    """Prompt, answer, continuation, answer: the same ids as in training, cut at the same places."""
    (prompt, _), (first, _), (between, _), (second, _) = own_format.trained_pieces(turns("q", "a", "r", "b"))
    assert prompt == own_format.encode(turns("q"))
    # The token that ends an answer is generated, but no state reads it: it is the first of the continuation.
    assert [first[-1], *between] == followed(own_format, "r")
    assert [*prompt, *first, *between, *second[:-1]] == own_format.encode(turns("q", "a", "r", "b", "s"))[
        : -len(followed(own_format, "s"))
    ]


def test_a_saved_default_template_is_found_again(own_format: TemplateChat, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(DEFAULT_TEMPLATE)
    found = find_format(load_tokenizer("bytes"), tmp_path)
    assert found.encode(turns("q", "a", "r")) == own_format.encode(turns("q", "a", "r"))


GOOD = json.dumps({"messages": spoken("q", "a")})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2, must hold one JSON object; got invalid JSON"),
        ("[]", "line 2, must hold one JSON object; got a list"),
        ('{"text": "x"}', r"line 2, must be a chat as {.*}; got the fields \['text'\]"),
        ('{"messages": "x"}', "line 2, must be a chat as .*; got messages that are no list"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "line 2, .* without an answer of the assistant"),
        ('{"messages": ["x"]}', "line 2, message 1, .*; got no object with role and content"),
        ('{"messages": [{"role": "bot", "content": "q"}]}', "message 1, .* the role 'bot', which is none of system"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message 1, .* content of the type int instead of text"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "message 1, .* half a surrogate pair"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(ValueError, match=message) as error:
        list(read_chats(str(path)))
    assert str(path) in str(error.value)
    (tmp_path / "chats.txt").write_text(GOOD)
    with pytest.raises(ValueError, match=r"must be JSON Lines \(.jsonl\).*; got .*chats.txt"):
        list(read_chats(str(tmp_path / "chats.txt")))


def test_a_row_holds_whole_chats_and_an_epoch_every_chat_once(corpus: ChatCorpus) -> None:
    rows = ChatRows(corpus, 200, seed=3)
    assert rows.rows_per_epoch < len(corpus)
    for epoch in range(2):
        seen = []
        for index in range(epoch * rows.rows_per_epoch, (epoch + 1) * rows.rows_per_epoch):
            tokens, _, segments = rows.row(index)
            chats = [tokens[segments == segment].tobytes() for segment in range(segments[-1] + 1)]
            seen += [chat for chat in chats if np.frombuffer(chat, np.int64)[0] == END]
        # The last token of a row that is full is a target only.
        assert sorted(len(chat) // 8 for chat in seen) == pytest.approx(sorted(map(len, corpus.tokens)), abs=1)


def test_only_answers_are_targets(corpus: ChatCorpus) -> None:
    rows = ChatRows(corpus, 200, seed=3)
    batch = [rows.row(index) for index in range(rows.rows_per_epoch)]
    assert sum(int((targets != IGNORED).sum()) for _, targets, _ in batch) == corpus.trained_tokens
    for tokens, targets, segments in batch:
        for place in np.flatnonzero(targets != IGNORED)[:-1]:
            if place + 1 < len(tokens) and segments[place] == segments[place + 1]:
                assert targets[place] == tokens[place + 1]
        learned = bytes(targets[(targets != IGNORED) & (targets != END)].tolist()).decode()
        assert "Say" not in learned and "User" not in learned


def test_the_order_of_rows_is_that_of_the_seed(corpus: ChatCorpus) -> None:
    def order(seed: int) -> list[bytes]:
        rows = ChatRows(corpus, 120, seed)
        return [rows.row(index)[0].tobytes() for index in range(2 * rows.rows_per_epoch)]

    assert order(1) == order(1) != order(2)
    assert order(1)[: len(order(1)) // 2] != order(1)[len(order(1)) // 2 :]


def test_packing_wastes_little_and_keeps_every_item() -> None:
    sizes = [int(size) for size in np.random.default_rng(0).integers(1, 100, 500)]
    groups = pack(sizes, 100)
    assert sorted(item for group in groups for item in group) == list(range(500))
    assert all(sum(sizes[item] for item in group) <= 100 for group in groups)
    assert len(groups) <= 1.05 * sum(sizes) / 100 + 1
    with pytest.raises(ValueError, match="at most 100; got 101"):
        pack([5, 101], 100)


def test_long_chats_are_cut_and_those_without_an_answer_left_out(corpus: ChatCorpus) -> None:
    cut = corpus.cut(45)
    assert cut.longest == 45 and len(cut) == len(corpus)
    assert all(trained[1:].any() for trained in cut.trained)
    assert len(corpus.cut(20)) == 0
    with pytest.raises(ValueError, match="at least one chat must have an answer within its first 20 tokens"):
        ChatRows(corpus.cut(20), 19, seed=0)


@pytest.mark.parametrize("lengths", [[20], [20, 30], [400, *[10] * 40], [10] * 50])
@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5])
def test_no_more_of_the_answers_than_the_fraction_is_held_out(lengths: list[int], fraction: float) -> None:
    """Every token is another number; each chat is a question of five tokens and an answer."""
    ends = np.cumsum([5 + length for length in lengths])
    tokens = [np.arange(end - 5 - length, end) for end, length in zip(ends, lengths, strict=True)]
    corpus = ChatCorpus(tokens, [np.arange(len(ids)) >= 5 for ids in tokens])
    for seed in range(8):
        training, held_out = corpus.split(fraction, seed)
        trained, kept = (
            [ids for chat, marks in zip(part.tokens, part.trained, strict=True) for ids in chat[marks].tolist()]
            for part in (training, held_out)
        )
        assert sorted(trained + kept) == [ids for chat in tokens for ids in chat[5:].tolist()]
        assert fraction * sum(lengths) / 2 - 1 < len(kept) <= fraction * sum(lengths)
        assert len(training) + len(held_out) - len(corpus) in (0, 1)
        assert not {index for chat in training.tokens for index in chat.tolist()} & set(kept)
