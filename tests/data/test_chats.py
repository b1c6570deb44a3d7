"""Chats become tokens of which the answers are learned, in rows of whole chats; wrong lines are named."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving.templates import QWEN, SPECIALS
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


ASKED, ANSWER = spoken("q", "a")
FUNCTION = {"name": "weather", "arguments": {"city": "Rome"}}
CALL = {"type": "function", "function": FUNCTION}
RESULT = {"role": "tool", "name": "weather", "content": "sun"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tell."}}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def called(**changes: Any) -> dict[str, Any]:
    """Return a chat with the changed call of a function."""
    call = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {**FUNCTION, **changes}}]}
    return chat(ASKED, call, RESULT, {**ANSWER, "content": "Sunny."}, tools=[TOOL])


REFUSED: list[tuple[Any, str]] = [
    ([], "must hold one JSON object; got a list"),
    ({"text": "x"}, r"must be a chat as {.*}; got the fields \['text'\]"),
    ({"messages": "x"}, "must be a chat as .*; got messages that are no list"),
    (chat(ASKED), "without an answer of the assistant"),
    (chat(ASKED, {**ANSWER, "weight": 0}), "without an answer of the assistant"),
    (chat("x"), "message 1, .*; got no object with role and content"),
    (chat({"role": "bot", "content": "q"}), "message 1, .* the role 'bot', which is none of system"),
    (chat({"role": "user", "content": 3}), "message 1, .* content of the type int instead of text"),
    (chat({"role": "user", "content": [{"type": "image_url"}]}), "content of the type list instead of text"),
    (chat({"role": "user", "content": "\ud800"}), "message 1, .* half a surrogate pair"),
    (chat(ASKED, {**ANSWER, "function_call": FUNCTION}), "message 2, .*; got 'function_call', which"),
    (chat(ASKED, {**ANSWER, "reasoning_content": "hm"}), "message 2, .*; got 'reasoning_content', which"),
    (chat(ASKED, {**ANSWER, "thinking": "hm", "audio": 1}), "message 2, .*; got 'audio', 'thinking', which"),
    (chat(ASKED, {**ANSWER, "name": "Ann"}), "message 2, .*; got 'name', which"),
    (chat(ASKED, ANSWER, system="Be brief."), "must .*; got 'system', which"),
    (chat(ASKED, {**ANSWER, "weight": 0.5}), "got the weight 0.5 of 'assistant'; answers alone have one, 0"),
    (chat(ASKED, {**ANSWER, "weight": True}), "got the weight True of 'assistant'"),
    (chat(ASKED, {**ANSWER, "weight": []}), r"got the weight \[\] of 'assistant'"),
    (chat({**ASKED, "weight": 1}, ANSWER), "the weight 1 of 'user'"),
    (chat({**ASKED, "tool_calls": [1]}, ANSWER), "message 1, .*; got 'tool_calls', which"),
    (chat(ASKED, ANSWER, {"role": "function", "content": "t"}), "the role 'function', which is none of"),
    (chat(ASKED, {**ANSWER, "tool_calls": [{"id": "x"}]}), "message 2, a call needs the fields"),
    (chat(ASKED, {**ANSWER, "tool_calls": "x"}), "message 2, tool_calls must be a list"),
    (called(arguments="{"), "message 2, tool_calls.0.function.arguments must be a JSON"),
    (called(arguments=[1]), "tool_calls.0.function.arguments must be a JSON object"),
    (chat(ASKED, ANSWER, tools=[{}]), r"a tool needs the fields \['tools.0.type', 'tools.0.function'\]"),
    (chat(ASKED, ANSWER, tools={"a": 1}), "tools must be a list"),
    (chat(ASKED, ANSWER, tools=[{**TOOL, "function": {"name": "a b"}}]), "tools.0.function.name must have 1 to 64"),
    (chat(ASKED, ANSWER, tools=[TOOL] * 2), "tools must have different names; got 2 of the name 'weather'"),
    (chat(RESULT, ANSWER), "messages.0.tool_call_id must be the id of a call"),
    (chat(ASKED, ANSWER, {**RESULT, "tool_call_id": "b"}), "messages.2.tool_call_id must be the id .* got 'b'"),
    (chat(ASKED, ANSWER, {**RESULT, "weight": 0}), "got 'weight', which"),
    (chat(ASKED, ANSWER, RESULT), "messages.2.tool_call_id must be the id of a call in an earlier message; got ''"),
    (chat(ASKED, {**ANSWER, "tool_calls": [{**CALL, "id": "a"}] * 2}), "messages.1.tool_calls must have different ids"),
    (chat(ASKED, ANSWER, {**RESULT, "content": {"sun": 1}}), "content of the type dict"),
]


@pytest.mark.parametrize(("record", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_line_is_named(record: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(chat(ASKED, ANSWER))}\n{json.dumps(record)}\n")
    with pytest.raises(ValueError, match=f"chats.jsonl, line 2, (.* )?{message}"):
        list(read_chats(str(path)))


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match="line 1, must hold one JSON object; got invalid JSON"):
        list(read_chats(str(tmp_path)))
    (tmp_path / "chats.txt").write_text("{}")
    with pytest.raises(ValueError, match=r"must be JSON Lines \(.jsonl\).*; got .*chats.txt"):
        list(read_chats(str(tmp_path / "chats.txt")))


def learned(records: list[dict[str, Any]], folder: Path, chat_format: TemplateChat) -> list[str]:
    """Return the learned text of chats, where ¦ stands for special tokens."""
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    corpus = load_chats(str(folder / "chats.jsonl"), chat_format)
    parts = (tokens[trained] for tokens, trained in zip(corpus.tokens, corpus.trained, strict=True))
    return ["".join("¦" if index > 255 else chr(index) for index in ids) for ids in parts]


def test_weights_and_empty_fields(own_format: TemplateChat, tmp_path: Path) -> None:
    """Answers of weight 0 are read; a field without a value, and notes about a chat, are as if they were not there."""
    unlearned = {**ANSWER, "content": "no", "weight": 0, "tool_calls": None}
    record = chat(ASKED, unlearned, ASKED, {**ANSWER, "weight": 1, "name": ""}, id=7, tools=[])
    assert learned([record], tmp_path, own_format) == ["a¦"]


def test_files_of_chats_with_calls(own_format: TemplateChat, tmp_path: Path) -> None:
    """Arguments may be an object or its text, and calls may have ids."""
    texts = called(arguments='{"city": "Rome"}')
    texts["messages"][1]["tool_calls"][0]["id"] = "a"
    texts["messages"][2] = {"role": "tool", "tool_call_id": "a", "content": "sun"}
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>¦Sunny.¦'
    for chat_format in (own_format, TemplateChat(load_tokenizer("bytes"), QWEN, SPECIALS, "x.jinja")):
        assert learned([called(), texts], tmp_path, chat_format) == [written] * 2


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


def asking(*names: str, ids: Sequence[str] = ("", "")) -> dict[str, Any]:
    """Return an answer that calls functions without arguments."""
    calls = [
        {"type": "function", "function": {"name": name, "arguments": "{}"}, "id": call_id}
        for name, call_id in zip(names, ids, strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(
    ("ids", "results", "named"),
    [
        (("", ""), [{}, {}], ["rain", "sun"]),
        (("a", "b"), [{"tool_call_id": "b"}, {}], ["sun", "rain"]),
        (("", "b"), [{}, {}], ["rain", "sun"]),
        (("", ""), [{"name": "wind"}, {}], ["wind", "sun"]),
    ],
)
def test_results_without_ids_are_those_of_the_newest_calls_in_order(
    ids: tuple[str, str], results: list[dict[str, str]], named: list[str], tmp_path: Path
) -> None:
    told = [{"role": "tool", "content": str(number), **fields} for number, fields in enumerate(results)]
    record = chat(ASKED, asking("sun", "rain"), ASKED, asking("rain", "sun", ids=ids), *told, ANSWER)
    (tmp_path / "chats.jsonl").write_text(json.dumps(record))
    ((_, found),) = read_chats(str(tmp_path / "chats.jsonl"))
    assert [turn.name for turn in found.turns if turn.role == "tool"] == named


@pytest.mark.parametrize(("index", "refused"), [(97, True), (-5, True), (256, False), (300, False)])
def test_special_tokens_of_a_folder_have_ids_of_their_own(index: int, refused: bool, tmp_path: Path) -> None:
    """An id of the tokenizer must have that text; one beyond its ids, as a SentencePiece model lacks, is new."""
    (tmp_path / "chat_template.jinja").write_text(DEFAULT_TEMPLATE)
    text = "<0x100>" if index == 256 else "<|end|>"
    added = {"added_tokens_decoder": {str(index): {"content": text}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    with pytest.raises(ValueError, match=r"'<\|end\|>' .* must have an id of its own") if refused else nullcontext():
        find_format(load_tokenizer("bytes"), tmp_path)
