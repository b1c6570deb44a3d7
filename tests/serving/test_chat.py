"""Conversations become prompts by the model's template, and a message cannot imitate another role."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.conftest import CONFIG
from serving.sites import serving

import gecko
from gecko.data import Tokenizer, load_tokenizer
from gecko.data.chat import PlainChat, TemplateChat, find_format
from gecko.data.turns import Turn

TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
BYTES = load_tokenizer("bytes")


def messages(*spoken: tuple[str, str]) -> list[Turn]:
    return [Turn(role, content) for role, content in spoken]


A = messages(("user", "a"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a byte-level BPE tokenizer with a chat template beside it."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    library.train_from_iterator(["user and assistant"] * 9, trainer)
    folder = tmp_path_factory.mktemp("chat")
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": TEMPLATE}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer, folder: Path) -> TemplateChat:
    found = find_format(tokenizer, folder / "model")
    assert isinstance(found, TemplateChat)
    return found


def spell(tokenizer: Tokenizer, ids: list[int]) -> list[str | int]:
    """Return the texts between special tokens, and the ids of special tokens."""
    parts: list[Any] = [[]]
    for index in ids:
        if index in tokenizer.special_ids:
            parts += [index, []]
        else:
            parts[-1].append(index)
    return [tokenizer.decode(part) if isinstance(part, list) else part for part in parts]


def test_a_template_writes_special_tokens(template: TemplateChat, tokenizer: Tokenizer) -> None:
    ids = template.encode(messages(("system", "Be short."), ("user", " Hello\n"), ("assistant", "Hi"), ("user", "No")))
    start, end = 0, 1
    assert spell(tokenizer, ids) == [
        "", start, "system\nBe short.", end, "\n", start, "user\nHello", end, "\n", start, "assistant\nHi", end,
        "\n", start, "user\nNo", end, "\n", start, "assistant\n",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "specials",
    [["¤", "<e>"], ["<s>", "<<s>>"], ["ab", "bc"], ["aba"], ["a", "b", "ab"], ["¤", "¤¤"]],
)
@settings(max_examples=40)
@given(data=st.data())
def test_messages_hold_text_only_whatever_special_tokens_look_like(specials: list[str], data: st.DataObject) -> None:
    """Special tokens may overlap, contain one another, or consist of one character."""
    parts = [*specials, *"".join(specials), "\ue000", "\ue001", "\ue002", "\U000f0000", "x"]
    content = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    template = specials[0] + "{{ messages[0].content }}x{{ eos_token }}" + specials[-1]
    ids = {special: 300 + index for index, special in enumerate(specials)}
    encoded = TemplateChat(BYTES, template, ids, "a test").encode(messages(("user", f"x{content}")))
    assert (encoded[0], encoded[-1]) == (300, 299 + len(specials))
    assert bytes(encoded[1:-1]).decode() == f"x{content}x"


def test_an_answer_ends_where_the_template_closes_a_turn(folder: Path, tmp_path: Path) -> None:
    """Also if documents end with another token."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, "eos_token": "<|endoftext|>"}))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    model = gecko.Gecko(replace(CONFIG, vocab_size=tokenizer.vocab_size))
    hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
    with serving(model, tokenizer, tmp_path) as site:
        for special in ("<|im_end|>", "<|im_start|>", "<|endoftext|>"):
            bias = {str(SPECIALS.index(special)): 100}
            (choice,) = site.post("/v1/chat/completions", json={**hello, "logit_bias": bias}).json()["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop"), special


def test_where_templates_are_found(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder one stands in is not the tokenizer's."""
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}yes"}]
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"chat_template": named}))
    assert find_format(BYTES, tmp_path).encode(A) == [256, *b"yes"]
    (tmp_path / TEMPLATE_FILE).write_text("file")
    assert find_format(BYTES, tmp_path).encode(A) == list(b"file")
    assert find_format(BYTES, tmp_path).source == f"the template in {tmp_path / TEMPLATE_FILE}"
    assert isinstance(find_format(tokenizer, tmp_path), TemplateChat)
    assert find_format(tokenizer, tmp_path).encode(A)[0] == 0
    monkeypatch.chdir(tmp_path)
    assert isinstance(find_format(BYTES, tmp_path / "model"), PlainChat)


def test_a_tokenizer_of_the_hub_brings_its_template(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is downloaded separately, when it is needed."""
    from huggingface_hub.errors import EntryNotFoundError

    shutil.copytree(folder, tmp_path / "hub")
    cache = tmp_path / "cache"
    cache.mkdir()

    def download(name: str, file: str, local_files_only: bool = False) -> str:
        if not (tmp_path / "hub" / file).is_file():
            raise EntryNotFoundError("no such file")
        return str(shutil.copy(tmp_path / "hub" / file, cache))

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    for name in (CONFIG_FILE, TEMPLATE_FILE):
        if name == TEMPLATE_FILE:
            (tmp_path / "hub" / name).write_text(TEMPLATE)
        chat = find_format(load_tokenizer("someone/model"), tmp_path)
        assert chat.source == f"the template in {cache / name}"
        assert chat.encode(A)[0] == 0


def test_special_tokens_are_the_tokenizers_wherever_the_template_lies(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / TEMPLATE_FILE).write_text(TEMPLATE + "{{ eos_token }}")
    tokenizer = load_tokenizer(str(tmp_path))
    ids = find_format(tokenizer, tmp_path / "model").encode(messages(("user", "Hi<|im_end|>")))
    assert spell(tokenizer, ids) == ["", 0, "user\nHi<|im_end|>", 1, "\n", 0, "assistant\n", 1, ""]


def test_a_template_beside_a_sentencepiece_model(tmp_path: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["user and assistant say hello"] * 20), model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=40, hard_vocab_limit=False, minloglevel=2, control_symbols=["<turn>"],
    )  # fmt: skip
    template = "{{ bos_token }}{% for m in messages %}<turn>{{ m.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / TEMPLATE_FILE).write_text(template)
    tokenizer = load_tokenizer(str(tmp_path))
    ids = find_format(tokenizer, tmp_path / "model").encode(messages(("user", "hello")))
    start, end = tokenizer.document_start, tokenizer.document_end
    (turn,) = tokenizer.special_ids - {start, end}
    assert spell(tokenizer, ids) == ["", start, "", turn, "hello", end, ""]


def test_the_plain_format_grows_at_its_end() -> None:
    """The prompt of a conversation is a prefix of all later ones, so that a prefix cache helps."""
    plain, asked = PlainChat(BYTES), [("system", "Be short."), ("user", "Hi")]
    first = plain.encode(messages(*asked))
    assert first == [256, *b"System: Be short.\n\nUser: Hi\n\nAssistant:"]
    then = plain.encode(messages(*asked, ("assistant", " Hello there"), ("user", "Bye")))
    assert then[: len(first) + 12] == first + list(b" Hello there")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", r"refuses .* no element 5 \(roles of the messages: user\)"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_templates_that_fail(template: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TemplateChat(BYTES, template, {}, "a test").encode(A)


def test_a_template_says_no_more_than_a_line() -> None:
    chat = TemplateChat(BYTES, "{{ raise_exception(messages[0].content) }}", {}, "a test")
    with pytest.raises(ValueError, match="refuses") as caught:
        chat.encode(messages(*[("user", "a" * 1000), ("assistant", "b")] * 1000))
    assert len(str(caught.value)) < 1000


def test_what_templates_may_use() -> None:
    template = (
        "{{ strftime_now('%Y') | length }}{{ {'a': 'é<'} | tojson }}"
        "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True, indent=None) }}"
        "{% set said = 1 %}{% generation %}{% set said = 2 %}[{{ said }}]{% endgeneration %}{{ said }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    )
    written = bytes(TemplateChat(BYTES, template, {}, "a test").encode(A * 2)).decode()
    assert written == '4{"a": "é<"}{"a":1,"b":"\\u00e9"}[2]1user'


DAMAGED = {
    "{": r"tokenizer_config\.json must hold a tokenizer as JSON",
    "[]": "JSON object",
    '{"chat_template": "{% if %}"}': "valid Jinja",
    '{"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "rag", "template": "no"}]}':
        rf"named 'default'.* has \['rag', 'tool_use'\]\. .*{TEMPLATE_FILE}\.$",
    '{"chat_template": {"a": 1}}': "must hold a chat_template that is text; got a dict",
    '{"chat_template": [{"name": "default", "template": ["x"]}]}': "chat_template that is text; got a list",
    '{"chat_template": [{"name": ["x"], "template": "y"}]}': "must be named 'default'",
    '{"chat_template": [1]}': "must hold a tokenizer",
    '{"chat_template": "x", "added_tokens_decoder": {"x": {"content": "a"}}}': "must hold a tokenizer",
    '{"chat_template": "x", "added_tokens_decoder": {"1": {"content": ["a"]}}}': "content of a token is no text",
    '{"chat_template": "x", "added_tokens_decoder": {"1": {"content": "a", "id": []}}}': "must hold a tokenizer",
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_files_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(content)
    with pytest.raises(ValueError, match=DAMAGED[content]) as error:
        find_format(BYTES, tmp_path)
    assert str(tmp_path) in str(error.value) or "Jinja" in str(error.value)
