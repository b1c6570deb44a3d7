"""A conversation kept as a state goes on as if all of it were read again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gecko
from gecko.data import Tokenizer, load_tokenizer
from gecko.data.chat import ChatFormat, PlainChat, tuning_format
from gecko.data.turns import Turn
from gecko.inference import Sampling, read
from gecko.inference.chat import Conversation

GREEDY, BYTES = Sampling(temperature=0.0), load_tokenizer("bytes")


@pytest.fixture(params=["plain", "template"])
def chat_format(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> ChatFormat:
    return PlainChat(tokenizer) if request.param == "plain" else tuning_format(tokenizer, Path("no folder"))


@pytest.fixture
def wide(model: gecko.Gecko, tokenizer: Tokenizer) -> gecko.Gecko:
    torch.manual_seed(1)
    return gecko.Gecko(replace(model.config, vocab_size=tokenizer.vocab_size + 3)).eval()


def ask(conversation: Conversation, question: str, tokens: int = 12) -> str:
    return "".join(conversation.ask(question, sampling=GREEDY, seed=0, max_new_tokens=tokens))


def test_the_state_is_that_of_the_whole_conversation(
    wide: gecko.Gecko, tokenizer: Tokenizer, chat_format: ChatFormat
) -> None:
    conversation = Conversation(wide, tokenizer, chat_format, system="short")
    ids = chat_format.encode([Turn("system", "short"), Turn("user", "q")])
    for place, question in enumerate(("q", "more", "again")):
        closing, following = chat_format.continuation([Turn("user", question)])
        ids += [*closing, *following] if place else []
        answer = conversation.ask(question, sampling=GREEDY, seed=0, max_new_tokens=12)
        shown = "".join(answer)
        whole = gecko.generate(wide, ids, max_new_tokens=12, temperature=0.0, stop_tokens=chat_format.stop_ids)
        assert tokenizer.decode(whole.tokens[0]).startswith(shown.rstrip("\ufffd"))
        ids += whole.tokens[0]
        again = read(wide, [torch.tensor(ids)]).state
        assert conversation.state is not None and conversation.state.position == again.position
        for ours, theirs in zip(conversation.state.tensors().values(), again.tensors().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_stop_string_is_no_part_of_the_conversation(wide: gecko.Gecko) -> None:
    plain = PlainChat(BYTES)
    with torch.no_grad():
        for row in wide.head.weight:
            row.zero_()

    class Forced(PlainChat):
        stops = ("\x00",)

    conversation = Conversation(wide, BYTES, Forced(BYTES))
    # All logits are equal, so the first id, the stop string, is the most likely.
    assert ask(conversation, "q") == ""
    assert conversation.state is not None
    assert conversation.state.position[0] == len(plain.encode([Turn("user", "q")]))


def test_a_stopped_answer_goes_on_after_its_words(model: gecko.Gecko) -> None:
    plain = PlainChat(BYTES)
    conversation = Conversation(model, BYTES, plain)
    answer = conversation.ask("q", sampling=Sampling(temperature=1.0), seed=1, max_new_tokens=500)
    for number, _ in enumerate(answer):
        if number == 3:
            answer.stop()
    assert 4 <= answer.num_tokens < 50 and not answer.cut
    assert conversation.state is not None
    assert conversation.state.position[0] == len(plain.encode([Turn("user", "q")])) + answer.num_tokens


def test_saved_and_loaded_it_goes_on(
    wide: gecko.Gecko, tokenizer: Tokenizer, chat_format: ChatFormat, tmp_path: Path
) -> None:
    first = Conversation(wide, tokenizer, chat_format)
    with pytest.raises(ValueError, match="nothing was asked yet"):
        first.save(tmp_path / "talk.state")
    ask(first, "q")
    first.save(tmp_path / "talk.state")
    second = Conversation(wide, tokenizer, chat_format)
    second.load(tmp_path / "talk.state")
    expected = ask(first, "more")
    assert ask(second, "more") == expected
    second.reset()
    assert second.state is None


def test_a_conversation_follows_a_text(wide: gecko.Gecko, tokenizer: Tokenizer, chat_format: ChatFormat) -> None:
    book = read(wide, [torch.tensor([tokenizer.document_start, *tokenizer.encode("a long book")])]).state
    conversation = Conversation(wide, tokenizer, chat_format, before=book)
    ask(conversation, "q", tokens=0)
    assert conversation.state is not None
    prompt = chat_format.encode([Turn("user", "q")])
    assert conversation.state.position[0] == book.position[0] + len(prompt) - (prompt[0] == tokenizer.document_start)


def test_states_of_other_models_are_refused(
    wide: gecko.Gecko, model: gecko.Gecko, tokenizer: Tokenizer, chat_format: ChatFormat, tmp_path: Path
) -> None:
    read(model, [torch.tensor([1, 2])]).state.save(tmp_path / "other.state")
    conversation = Conversation(wide, tokenizer, chat_format)
    with pytest.raises(ValueError, match="state"):
        conversation.load(tmp_path / "other.state")
    assert conversation.state is None
