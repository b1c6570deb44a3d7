"""Files that hold one JSON object: configs, recipes, results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: str | Path, what: str) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        what: what the file holds, for the message: ``path must hold what as JSON``.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no JSON, or something else than an object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must hold {what} as JSON; {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold {what} as a JSON object; got a {type(content).__name__}.")
    return content
