"""Blocks of a page, and what a terminal shows."""

import sys

import pytest
from documents.forms import differences, form_of_values, missing_lines
from documents.plan import Step, indented_commands, shown_steps
from documents.terminal import run_on_terminal, shown

# ---- Blocks of a page, and the comparison of what a command prints with what its page shows.

PAGE = """\
Text.

```python
print(1)
```

```
1
```

1. A step:

   ```
   $ gecko train tiny \\
       steps=1
   done in 3 s
   ```

| command | what |
|---|---|
| `gecko info demo` | numbers |
| `gecko info MODEL` | placeholders |
"""


def test_blocks_and_commands_of_a_page() -> None:
    assert shown_steps(PAGE, "page.md") == [
        Step("page.md", 4, "python", "print(1)\n", "1\n"),
        Step("page.md", 14, "command", "gecko train tiny \\\n    steps=1", "done in 3 s"),
        Step("page.md", 21, "command", "gecko info demo"),
    ]
    apart = PAGE.replace("```\n\n```\n1", "```\n\nThen\n\n```\n1")
    assert [(step.kind, step.output) for step in shown_steps(apart, "page.md")[:2]] == [("python", ""), ("other", "")]
    indented = PAGE + "\nSo:\n\n    gecko train tiny\n\n1. Or\n\n       $ gecko info demo\n"
    assert indented_commands(PAGE) == []
    assert [line.strip() for line in indented_commands(indented)] == ["gecko train tiny", "$ gecko info demo"]


TABLE = " length   value\n ──────────────\n 1,024     3.03\n\nintervals: bootstrap"


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("read 400,001 tokens in 35.87 s", "read 5 tokens in 0.1 s\n"),
        ("saved to a.state (1,189,780 bytes)", "saved to a.state (12 bytes)"),
        ("weights dc11697f6f6bbd14", "weights 0123456789ab"),
        ("17.2 KB of state", "3 B of state"),
        ("training\n…\nend of 3", "training\nstep 1\nstep 2\nend of 5"),
        ("…\nend", "end"),
        ("error: they differ in …", "error: they differ in steps (1, 2)."),
        (TABLE, TABLE.replace("1,024     3.03", "16      -12.25e+3").replace("──────────────", "────")),
        ('{"id": "a", "n": [1,\n 2], "text": null}', '{"id": "b", "n": [], "text": null}'),
        ("", ""),
    ],
)
def test_equal_forms(shown: str, printed: str) -> None:
    assert differences(shown, printed) == ""


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("read 4 tokens in 3 s", "read 4 tokens in 3 s, 2 tokens/s"),
        ("read 4 tokens", ""),
        ("one\ntwo", "one"),
        ("one", "one\ntwo"),
        ("one\ntwo", "two\none"),
        ("training\n…\nend", "training\nstep 1"),
        ("error: they differ in …", "error: they agree"),
        ("1.00 a token", "1.00 per token"),
        (TABLE, TABLE.replace("length", "context")),
        (TABLE, TABLE.replace("intervals", "95 % intervals")),
        ('{"id": "a"}', '{"id": "a", "object": "b"}'),
        ('{"id": "a"}', '{"id": 1}'),
        ('{"a": [{"b": 1}]}', '{"a": [{"c": 1}]}'),
        ('{"a": 1}', "error: no"),
        ("HTTP/1.1 400 Bad Request\n{}", "HTTP/1.1 200 OK\n{}"),
    ],
)
def test_other_forms(shown: str, printed: str) -> None:
    assert differences(shown, printed) != ""


def test_values_of_python_may_have_other_texts() -> None:
    assert differences("['a', \"it's\"] [32]", "['b\\'c', ''] [1]", form_of_values) == ""
    assert differences("['a'] [32]", "('a') [32]", form_of_values) != ""


def test_notes_beside_the_text_of_a_model_are_on_the_page() -> None:
    shown = "some text\nof 3 lines\nread 4 tokens\nended by 'length'; seed 1"
    assert missing_lines(shown, "read 7 tokens\nended by 'length'; seed 23\n") == []
    assert missing_lines(shown, "ended by 'length'; seed 1\nread 7 tokens") == ["read 0 tokens"]
    assert missing_lines(f"{shown}\n…", "and more") == []
    assert missing_lines(shown, "read 7 tokens, 8 tokens/s") == ["read 0 tokens, 0 tokens/s"]


# ---- What a terminal shows of what a command writes, and the times of a command on it.


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("10 %\r\x1b[2K20 %\r\n", "20 %\n"),  # a bar that is drawn again
        ("bar\r\n\x1b[1A\x1b[2Kstep 1\r\nbar", "step 1\nbar\n"),  # a line above a bar
        ("\x1b[1mbold\x1b[0m \x1b[?25lend\r\n", "bold end\n"),
        ("abc\r\x1b[Kd", "d\n"),
        ("ab\bc", "ac\n"),
    ],
)
def test_the_screen_in_the_end(written: str, lines: str) -> None:
    assert shown(written) == lines


def test_times_and_exit_code_of_a_command() -> None:
    code = "import sys, time; print(sys.stdout.isatty(), flush=True); time.sleep(0.5); sys.exit(3)"
    screen = run_on_terminal([sys.executable, "-c", code], {})
    assert (screen.text, screen.code) == ("True\n", 3)
    # The first byte is seen a little after it was written, so the silence seems a little shorter than the sleep.
    assert 0.4 <= screen.silent <= screen.seconds and screen.first < screen.seconds
