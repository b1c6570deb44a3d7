"""Functions, calls and results in conversations: as the template writes them, and as text where it knows none."""

import json
from functools import cache

import pytest
from serving.templates import IGNORANT, MISTRAL, QWEN, SPECIALS, TEMPLATES

from gecko.data import load_tokenizer
from gecko.data.chat import PlainChat, TemplateChat
from gecko.data.turns import PLAIN_FORM, CallForm, Function, FunctionCall, Turn

WEATHER = Function(
    name="weather", description="Tell the weather.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)  # fmt: skip
NOW = Function(name="now")
CALL = FunctionCall("weather", {"city": "Rom <|im_end|> é"}, "abcdefghi")
NAMES = {index: f"¦{name}¦" for name, index in SPECIALS.items()}


@cache
def chat_of(template: str) -> TemplateChat:
    return TemplateChat(load_tokenizer("bytes"), template, SPECIALS, "the template in x.jinja")


def spell(ids: list[int]) -> str:
    return b"".join(bytes([index]) if index < 256 else NAMES[index].encode() for index in ids).decode()


def talk(content: str = "", last: str = "Sunny.") -> list[Turn]:
    result = Turn("tool", 'sun "x"', call_id="abcdefghi", name="weather")
    return [Turn("user", "q"), Turn("assistant", content, calls=(CALL,)), result, Turn("assistant", last)]


FORMS = {
    "qwen": PLAIN_FORM, "llama": CallForm("", "parameters", ""), "ignorant": PLAIN_FORM,
    "mistral": CallForm("[TOOL_CALLS] [", "arguments", "]"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_with_a_call(name: str) -> None:
    chat = chat_of(TEMPLATES[name])
    form, arguments = chat.call_form, json.dumps(CALL.arguments, ensure_ascii=False)
    assert form == FORMS[name]
    prompt = spell(chat.encode(talk()[:-1], [WEATHER, NOW]))
    written = f'{{"name": "weather", "{form.arguments}": {arguments}'
    assert written in prompt and "Tell the weather." in prompt and "sun" in prompt
    asked = chat.encode(talk()[:1], [WEATHER, NOW])
    if name != "mistral":  # it tells functions before the last question
        assert prompt.startswith(spell(asked))
    # A state after the call reads the result.
    closing, turns = chat.continuation(talk()[2:3])
    assert prompt.endswith(spell(closing + turns))


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_learned_with_what_ends_them(name: str) -> None:
    chat = chat_of(TEMPLATES[name])
    pieces = list(chat.trained_pieces(talk(), [WEATHER]))
    assert [learned for _, learned in pieces] == [False, True] * 2
    assert pieces[0][0] == chat.encode(talk()[:1], [WEATHER])
    assert [index for ids, _ in pieces[:-1] for index in ids] == chat.encode(talk()[:-1], [WEATHER])
    call, answer = (spell(ids) for ids, learned in pieces if learned)
    end = "¦<|endoftext|>¦" if name == "mistral" else "¦<|eot_id|>¦" if name == "llama" else "¦<|im_end|>¦"
    opening, arguments, closing = chat.call_form
    opening = opening.replace("[TOOL_CALLS]", "¦[TOOL_CALLS]¦")
    ident = ', "id": "abcdefghi"' if name == "mistral" else ""
    written = json.dumps(CALL.arguments, ensure_ascii=False)
    assert call == f'{opening}{{"name": "weather", "{arguments}": {written}{ident}}}{closing}{end}'
    assert answer.strip() == f"Sunny.{end}"
    (_, read), (last, _) = pieces[0], list(chat.trained_pieces(talk()[:2], [WEATHER]))[-1]
    assert (read, spell(last)) == (False, call)


def test_text_beside_a_call_is_learned_or_refused() -> None:
    for template in (QWEN, IGNORANT):
        (_, learned), *_ = [piece for piece in chat_of(template).trained_pieces(talk("I look."), [WEATHER])][1:]
        assert learned
    with pytest.raises(ValueError, match=r"changes the message of 'assistant' with calls that begins 'I look\.'"):
        list(chat_of(MISTRAL).trained_pieces(talk("I look."), [WEATHER]))


def test_plain_text_tells_functions() -> None:
    """In the words of the system message; two results are one message."""
    turns = [Turn("system", "Be short."), *talk()[:3], Turn("tool", "rain", name="now"), Turn("user", "r")]
    ids = PlainChat(load_tokenizer("bytes")).encode(turns, [WEATHER])
    text = bytes(ids[1:]).decode()
    assert text.startswith("System: Be short.\n\nYou may call functions")
    assert text.endswith(
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom <|im_end|> é"}}\n</tool_call>\n\n'
        'User: The result of weather is: sun "x"\nThe result of now is: rain\n\n'
        "User: r\n\nAssistant:"
    )
    assert PlainChat(load_tokenizer("bytes")).encode(talk()[:1]) == [256, *b"User: q\n\nAssistant:"]


@pytest.mark.parametrize(
    "template",
    [
        QWEN.replace('\'\\n<tool_call>\\n{"name": "\'', "'\\n<function='").replace('\'", "arguments": \'', "'>'"),
        QWEN.replace("tool_call.arguments | tojson", "tool_call.arguments | tojson | tojson"),
        QWEN.replace("{{- '<|im_start|>' + message.role }}", "{{- '<|im_start|>caller' }}"),
    ],
)
def test_other_forms_of_calls_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"must write a call .* as a JSON object .*; the template in x\.jinja"):
        assert chat_of(template).call_form


def test_a_template_that_loses_results_is_refused() -> None:
    silent = QWEN.replace("+ message.content + '\\n</tool_response>'", "+ '\\n</tool_response>'")
    for read in (chat_of(silent).encode, lambda *chat: list(chat_of(silent).trained_pieces(*chat))):
        with pytest.raises(ValueError, match="no place for a message of 'tool'"):
            read(talk(), [WEATHER])


def test_special_tokens_in_functions_are_text() -> None:
    hostile = Function(name="f", description="<|im_end|>", parameters={"type": "object", "title": "<|im_start|>"})
    for template in (QWEN, IGNORANT):
        ids, plain = (chat_of(template).encode(talk()[:1], [one]) for one in (hostile, NOW))
        assert sum(index > 255 for index in ids) == sum(index > 255 for index in plain)


def test_a_template_that_takes_too_long_with_functions_is_refused() -> None:
    slow = QWEN.replace("{%- for tool in tools %}", "{%- for tool in tools %}{% for i in range(99999) %}{% endfor %}")
    with pytest.raises(ValueError, match="too many rounds"):
        chat_of("{{ 1234567890 if tools }}" + slow).encode(talk()[:1], [NOW] * 9)
