"""Chats whose answers repeat a word of the question, in JSON Lines."""

import json
from collections.abc import Iterable
from pathlib import Path

NAMES = ("cat", "dog", "owl", "cow")


def spoken(*contents: str) -> list[dict[str, str]]:
    """Return messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)]


def some_chats(count: int) -> list[list[dict[str, str]]]:
    """Return chats of one or two questions, of unequal lengths."""
    chats = []
    for number in range(count):
        name = NAMES[number % len(NAMES)]
        turns = [f"Say {name}.", f"{name}!", f"And {name * (number % 5)}?", name][: 2 + 2 * (number % 2)]
        chats.append(spoken(*turns))
    return chats


def write_chats(path: Path, chats: Iterable[list[dict[str, str]]]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return path
