"""The model card of a converted Llama: what it is, where it comes from, what was changed, and its licence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gecko.config import GeckoConfig
from gecko.runtime.process import __version__

_CARD = """\
---
{licence_field}pipeline_tag: text-generation
tags:
- gecko
---

# {name} in a Gecko block

The weights of {name}, from {place}, converted by gecko-lm {version}. **Nothing was trained**,
and no claim of the Gecko paper holds for this model.

- **Up to {window:,} tokens** of a text it computes what {name} computes.
- **After that** a token sees its own chunk of {chunk:,} tokens, the chunk before it{sinks}. So the state has a
  constant size, and what lies further back is forgotten. How good the answers are there was not measured.
- It has no moving average, no gate and no adaptive memory.

## Changes

{changes} Parameters have the names of this package, and rows of queries and keys another order.

## Licence

That of {name}: {licence}.
"""
_LICENCES = ("licen", "notice", "copying", "use_policy")
"""Beginnings of the names of files that must stay with the weights."""


class Origin(NamedTuple):
    """Where a model comes from."""

    name: str
    """The model's own name."""
    place: str
    """What was read, in words."""
    changes: str
    """What happened to the numbers of the weights: sentences."""
    licence: str | None = None
    """Identifier of the licence, if the source names one."""
    files: Mapping[str, bytes] = {}
    """Licences and notices, by the names of their files."""


def licences(folder: Path) -> dict[str, bytes]:
    """Return the content of the licences and notices in a folder, by name."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name.lower().startswith(_LICENCES))
    return {path.name: path.read_bytes() for path in files}


def write_card(origin: Origin, config: GeckoConfig, folder: Path) -> None:
    """Write the card, licences and notices. What a source calls itself stays text in one line."""
    for name, content in origin.files.items():
        (folder / name).write_bytes(content)
    name, place = (re.sub(r"[\s`\[\]<>]+", " ", text).strip() for text in (origin.name, origin.place))
    licence = origin.licence if re.fullmatch(r"[\w.+-]+", origin.licence or "") else None
    first = "first token" if config.sinks == 1 else f"first {config.sinks} tokens"
    sinks = f" and the {first} of the text" if config.sinks else ""
    text = _CARD.format(
        licence_field=f"license: {licence}\n" * bool(licence), name=name, place=place, version=__version__,
        window=2 * config.chunk_size, chunk=config.chunk_size, sinks=sinks, changes=origin.changes,
        licence=", ".join([licence or "see its source", *origin.files]),
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")
