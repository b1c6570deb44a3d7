"""Parts of the page: pictures, tables and words about one kind of measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gecko.report.tables import Table


@dataclass(frozen=True)
class Picture:
    svg: str
    caption: str
    small: bool = False
    """Stands beside another where the page is wide enough."""


@dataclass(frozen=True)
class Statement:
    """What the paper says in words."""

    source: str
    text: str


@dataclass(frozen=True)
class Section:
    title: str
    intro: str
    pictures: Sequence[Picture] = field(default_factory=list)
    tables: Sequence[Table] = field(default_factory=list)
    statement: Statement | None = None
