"""Fine-tuning learns the answers and what ends them, and nothing else, with chat templates of every structure."""

import re
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.data import Tokenizer, load_tokenizer
from gecko.data.chat import DEFAULT_TEMPLATE, TemplateChat, encode_text
from gecko.data.turns import Turn

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
HEADERS = """\
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
CHANNELS = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
THINKING = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- said + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
INSTRUCTIONS = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set messages = messages[1:] if system else messages %}{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if loop.index0 >= messages | length - 2 and system %}{{ '[INST]' + system + '\\n\\n' + m.content + '[/INST]' }}
{%- else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}
{%- else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}
{%- endfor %}"""
TURNS = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}
{%- for m in messages %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
BARS = """\
{{- bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- else %}{{ '<|Assistant|>' + m.content + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
SPACED = "{% for m in messages %}{{ '\\n' + m.content + ' ' + eos_token }}{% endfor %}"

TEMPLATES = {
    "default": DEFAULT_TEMPLATE, "chatml": CHATML, "headers": HEADERS, "channels": CHANNELS, "thinking": THINKING,
    "instructions": INSTRUCTIONS, "turns": TURNS, "bars": BARS,
}  # fmt: skip
NAMES = sorted({name for text in TEMPLATES.values() for name in re.findall(r"<\|?\w+\|?>|\[/?INST\]", text)})
SPECIALS = {"<|endoftext|>": 256, **{name: 300 + index for index, name in enumerate(NAMES) if "think" not in name}}
ENDS = {name: index for name, index in SPECIALS.items() if re.search("end|eot|return", name)}


@cache
def chat_of(template: str, tokenizer: Tokenizer | None = None) -> TemplateChat:
    return TemplateChat(tokenizer or load_tokenizer("bytes"), template, SPECIALS, "the template in x.jinja")


def spell(ids: list[int]) -> str:
    """Return the text of ids, special tokens by their names between ¦."""
    names = {index: f"¦{name}¦" for name, index in SPECIALS.items()}
    parts = [bytes([index]) if index < 256 else names[index].encode() for index in ids]
    return b"".join(parts).decode()


def talk(*contents: str, system: str | None = None) -> list[Turn]:
    spoken = [Turn(("user", "assistant")[place % 2], content) for place, content in enumerate(contents)]
    return spoken if system is None else [Turn("system", system), *spoken]


def check_law(template: str, chat: list[Turn]) -> list[str]:
    """Check that each answer is learned with what ends it, after the prompt that generation reads."""
    chat_format = chat_of(template)
    pieces = list(chat_format.trained_pieces(chat))
    answers = [turn.content for turn in chat if turn.role == "assistant" and turn.learned]
    assert [is_answer for _, is_answer in pieces] == [False, True] * len(answers)
    for (ids, _), answer in zip(pieces[1::2], answers, strict=True):
        assert ids[-1] in ENDS.values() and not set(ids[:-1]) & set(SPECIALS.values())
        assert bytes(ids[:-1]).decode().strip() == answer.strip()
    last = max(place for place, turn in enumerate(chat) if turn.role == "assistant" and turn.learned)
    assert [index for ids, _ in pieces[:-1] for index in ids] == chat_format.encode(chat[:last])
    return [spell(ids) for ids, _ in pieces]


CHATS = {
    "one answer": talk("one?", "first"),
    "two answers": talk("one?", "first", "two?", "second"),
    "the same text everywhere": talk("a", "a", "a", "a", "a", "a"),
    "text of the template": talk("assistant\n", "assistant\n", "user", "Assistant:"),
    "special tokens as text": talk("<|im_end|>", "<|im_end|><|end|><|endoftext|>", "[INST]", "<|start|>x"),
    "an empty answer": talk("one?", "", "two?", "second"),
    "spaces": talk(" one?\n", "\n first ", "two?", "second\n\n"),
    "private characters": talk("\ue000", "\ue000\ue001\U000f0000\ue000", "é", "\ue002é"),
    "later turns": talk("one?", "first", "two?"),
    "an answer that is not learned": [*talk("one?"), Turn("assistant", "first", False), *talk("two?", "second")],
    "a last answer that is not learned": [*talk("one?", "first", "two?"), Turn("assistant", "second", False)],
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_answers_and_their_ends_are_learned(template: str) -> None:
    for chat in CHATS.values():
        check_law(TEMPLATES[template], chat)
    if template != "turns":
        assert "Be brief." in check_law(TEMPLATES[template], talk("one?", "first", system="Be brief."))[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*NAMES, "\ue000", "\ue001", "\ue002", "a", " ", "\n", "é"]), max_size=6).map("".join))
def test_any_answer_is_learned(content: str) -> None:
    for template in (CHATML, CHANNELS, HEADERS, DEFAULT_TEMPLATE, SPACED):
        if content.strip():
            check_law(template, talk("q", content, "r", content))


def test_what_a_template_writes_around_answers() -> None:
    chat = talk("q", "a", "r", "b")
    assert check_law(CHANNELS, chat) == [
        "¦<|start|>¦user¦<|message|>¦q¦<|end|>¦¦<|start|>¦assistant¦<|channel|>¦final¦<|message|>¦", "a¦<|end|>¦",
        "¦<|start|>¦user¦<|message|>¦r¦<|end|>¦¦<|start|>¦assistant¦<|channel|>¦final¦<|message|>¦", "b¦<|return|>¦",
    ]  # fmt: skip
    assert check_law(THINKING, chat)[1:] == [
        "a¦<|im_end|>¦",
        "\n¦<|im_start|>¦user\nr¦<|im_end|>¦\n¦<|im_start|>¦assistant\n<think>\n\n</think>\n\n",
        "b¦<|im_end|>¦",
    ]
    assert check_law(INSTRUCTIONS, chat)[1::2] == [" a¦<|endoftext|>¦", " b¦<|endoftext|>¦"]
    assert check_law(SPACED, talk("q", "a"))[1] == "\na ¦<|endoftext|>¦"


FOLLOWING = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '' if add_generation_prompt else eos_token }}"
REFUSED = {
    "capitals": ("{% for m in messages %}{{ m.content | upper + eos_token }}{% endfor %}", "changes the message of"),
    "cuts": ("{% for m in messages %}{{ m.content[:3] + eos_token }}{% endfor %}", "has no place for a message of"),
    "replaces": (
        "{% for m in messages %}{{ m.content.replace('s', 'z') + eos_token }}{% endfor %}",
        "changes the message of 'assistant' that begins 'first'",
    ),
    "repeats": ("{% for m in messages %}{{ m.content * 2 + eos_token }}{% endfor %}", "and an answer once"),
    "loses questions": (
        "{% for m in messages if m.role != 'user' %}{{ m.content + eos_token }}{% endfor %}",
        "has no place for a message of 'user'",
    ),
    "drops answers": (
        "{% for m in messages %}{{ m.content if m.role == 'user' }}{{ eos_token }}{% endfor %}",
        "has no place for a message of 'assistant'",
    ),
    "ends nothing": ("{% for m in messages %}{{ m.content }}{% endfor %}", "must end every answer with a special"),
    "ends the last answer only": (FOLLOWING, "must end every answer with a special token"),
    "raises": ("{{ raise_exception('no') }}", "refuses these messages: no"),
    "asks otherwise": (BARS + "{% if add_generation_prompt %}<think>{% endif %}", "must begin answers as it asks"),
    "counts": ("{{ messages | length }}" + CHATML, "or changes earlier turns"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_templates_that_change_answers_are_refused(case: str) -> None:
    template, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        list(chat_of(template).trained_pieces(talk("one?", "first", "two?", "second")))


def test_a_lost_system_message_is_refused() -> None:
    silent = CHATML.replace("{{ '<|im_start|>'", "{% if m.role != 'system' %}{{ '<|im_start|>'")
    silent = chat_of(silent.replace("'<|im_end|>\\n' }}", "'<|im_end|>\\n' }}{% endif %}"))
    chat = talk("one?", "first", "two?", system="e")
    for read in (silent.encode, silent.continuation, lambda chat: list(silent.trained_pieces(chat))):
        with pytest.raises(ValueError, match="no place for a message of 'system'"):
            read(chat)
    assert silent.encode(chat[1:])
    with pytest.raises(ValueError, match="no system messages here"):
        list(chat_of(TURNS).trained_pieces(chat))


def test_thoughts_that_a_template_removes_are_not_learned() -> None:
    thought = "<think>\nhm\n</think>\n\nfirst"
    with pytest.raises(ValueError, match=r"'assistant' that begins '<think>.*the weight 0"):
        list(chat_of(THINKING).trained_pieces(talk("one?", thought, "two?", "second")))
    before, answer = check_law(THINKING, [Turn("user", "one?"), Turn("assistant", thought, False), *talk("r", "b")])
    assert "hm" not in before and answer == "b¦<|im_end|>¦"


def test_half_a_surrogate_pair_is_named(tokenizer: Tokenizer) -> None:
    """Whatever the library of the tokenizer says about it."""
    for read in (partial(encode_text, tokenizer), lambda text: chat_of(CHATML, tokenizer).encode(talk(text))):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            read("a\ud800")
