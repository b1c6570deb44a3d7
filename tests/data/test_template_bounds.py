"""Chat templates are programs: whatever one does, it ends soon, in little memory, with an error that says so."""

# ruff: noqa: E501 (a template is one line)
import time

import pytest
from data.test_chat_templates import TEMPLATES, chat_of, talk

from gecko.data import load_tokenizer
from gecko.data.chat import TemplateChat
from gecko.data.turns import Turn

WITHOUT_END = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in [range(99999)] recursive %}{{ loop(range(99999)) if loop.depth < 9 else '' }}{% endfor %}",
    "{% for a in [1] recursive %}{% if loop.depth < 4 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ 2 ** 1000000000 }}",
    "{{ 10 ** -10000000000 }}",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=['a']) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=['a']) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=['a']) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns }}",
    "{% set ns = namespace(x=['a']) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x=['a'], y=['a']) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ 1 if ns.x == ns.y }}",
    "{% set ns = namespace(x=('a',)) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    "{% set ns = namespace(x=('a',)) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {}[ns.x] }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ (5).to_bytes(10**9, 'big') }}",
    "{{ 'a\nb' | indent(10**9) }}",
    "{{ [1] | tojson(indent=10**9) }}",
    "{{ [1] | batch(10**9, 0) | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{a:1000000000}'.format_map({'a':1}) }}",
    "{{ strftime_now('%1000000000Y') }}",
    "{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}",
    "{% set x = 'a' * 99999 %}{{ x | replace('a', x) }}",
    "{% set x = 'a' * 99999 %}{{ x.join(range(99999) | map('string')) }}",
    "{% set x = 'a' * 99999 %}{{ range(99999) | join(x) }}",
    "{% set x = 'a' * 99999 %}{{ x.translate({97: x}) }}",
    "{{ 5 | round(-10**10) }}",
    "{{ lipsum(n=10**9) }}",
    "{% set x = 'a' * 600000 %}{% set y = 'b' ~ 'a' * 300000 %}{{ x.rfind(y) }}",
    "{% set x = 'a' * 600000 %}{% set y = 'b' * 300000 ~ 'a' %}{{ x.strip(y) }}",
    "{% set x = 'a' * 600000 %}{% set y = 'b' * 300000 ~ 'a' %}{{ x | trim(y) }}",
    "{% set x = 'a' * 600000 %}{% set y = 'b' ~ 'a' * 300000 %}{% for i in range(99999) %}{{ 1 if y in x }}{% endfor %}",
    "{% set x = 'a' * 600000 %}{% set y = 'a' * 600000 %}{% for i in range(99999) %}{{ 1 if y == x }}{% endfor %}",
    "{% set x = 'a' * 600000 %}{% set y = 'a' * 600000 %}{% for i in range(99999) %}{{ 1 if y is eq x }}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "{% for i in range(99999) %}LONG{% endfor %}".replace("LONG", "a" * 100000),
    "{% macro m() %}LONG{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}".replace("LONG", "a" * 100000),
    "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x | upper %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x.upper() %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "{% set x = 'a ' * 1000000 %}{% for i in range(99) %}{% set y = x.split() %}{% endfor %}",
    "{% for i in range(99999) %}{% set y = range(99999) | list %}{% endfor %}",
    "{% for i in range(99999) %}{% set y = range(99999) | map('string') | list %}{% endfor %}",
    "{{ [[1]] | sum(start=[]) }}",
    "{{ [1,2] | random }}",
    "{{ 'a' | urlize }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{{ 'f' * 1000000 }}{{ ('f' * 1000000) | int(base=16) // 3 }}",
    "{% set x = 'a ' * 1000000 %}{% for i in range(9999) %}{% set y = x | wordcount %}{% endfor %}",
    "{% set x = 'A' * 600000 %}{% for i in range(99999) %}{{ 1 if x is upper }}{% endfor %}",
    "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call m() %}{% call m() %}{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}{% endcall %}{% endcall %}",
    "{% for i in range(9999) %}{% set y = messages * 99999 | int %}{% endfor %}",
    "{% for i in range(9999) %}{% filter upper %}LONG{% endfilter %}{% endfor %}".replace("LONG", "a" * 100000),
    "{{ ('a' * 1000000).encode() * 100000 }}",
    "{% set x = 'a' * 1000000 %}{% for i in range(999) %}{% for c in x %}{% endfor %}{% endfor %}",
    "{% set x = '\t' * 100000 %}{% for i in range(9999) %}{% set y = x | wordwrap %}{% endfor %}",
    "{% set x = 'a ' * 500000 %}{% for i in range(9999) %}{% set y = x | selectattr('a') | list %}{% endfor %}",
    "{% set x = '\t' * 1000000 %}{% for i in range(9999) %}{% set y = x | sort %}{% endfor %}",
    "{% set c = cycler(1,2) %}{% for i in range(99999) %}{% for j in range(99999) %}{{ c.next() }}{% endfor %}{% endfor %}",
]


def seconds(template: str) -> float:
    """Return the time of this thread until a template without end is refused."""
    begin = time.thread_time()
    with pytest.raises(ValueError, match=r"chat template (refuses|must be valid)"):
        TemplateChat(load_tokenizer("bytes"), template, {}, "x").encode([Turn("user", "hi")])
    return time.thread_time() - begin


@pytest.fixture(scope="module")
def budget() -> float:
    """Return the time of the empty rounds that a budget pays for."""
    return max(seconds(WITHOUT_END[0]) for _ in range(3))


@pytest.mark.parametrize("template", WITHOUT_END, ids=range(len(WITHOUT_END)))
def test_a_template_ends(template: str, budget: float) -> None:
    assert seconds(template) < 4 * budget


@pytest.mark.parametrize("template", TEMPLATES)
def test_long_conversations_fit(template: str) -> None:
    for turns, length in ((2000, 20), (2, 1_000_000)):
        said = "ab " * (length // 3)
        assert len(chat_of(TEMPLATES[template]).encode(talk(*[said] * turns, "x"))) > turns * (length - 3)
