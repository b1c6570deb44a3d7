"""What commands print: no text of a user, a file or a model controls the terminal, or is read as markup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

_CONTROLS = (
    *range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000),
)  # fmt: skip
"""Control characters but tab and newline, characters that turn the direction of text, and bytes that are no UTF-8."""
_SHOWN = {code: ascii(chr(code))[1:-1] for code in _CONTROLS}


def visible(text: str) -> str:
    """Return a text with every character that controls a terminal replaced by its escape, such as ``\\x1b``."""
    return text.translate(_SHOWN)


class Terminal(Console):
    """Console that prints texts as they are: without markup and names of emoji unless asked for, and ``visible``."""

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, markup=markup, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def status(self, status: RenderableType, **options: Any) -> Status:
        return super().status(Text(visible(status)) if isinstance(status, str) else status, **options)
