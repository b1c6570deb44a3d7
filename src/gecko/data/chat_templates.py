"""Files of chat templates, and of the special tokens that they write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gecko.data.tokenizers import Tokenizer
from gecko.io.files import read_object

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def find_template(tokenizer: Tokenizer, model_folder: Path) -> Template | None:
    """Return the template in the folder of the tokenizer, else the one in the folder of the model, else None.

    Errors are those of ``find_format``.
    """
    folders = (folder for folder in (tokenizer.folder, model_folder) if folder is not None)
    return next((found for folder in folders if (found := _read_template(folder)) is not None), None)


class Template(NamedTuple):
    """A chat template and the file that holds it."""

    text: str
    path: Path


def _read_template(folder: Path) -> Template | None:
    if (folder / TEMPLATE).is_file():
        return Template(_read_text(folder / TEMPLATE), folder / TEMPLATE)
    template = _read_json(folder / CONFIG).get("chat_template")
    if isinstance(template, list):
        with _naming(folder / CONFIG):
            named = {str(entry["name"]): entry["template"] for entry in template}
        template = _default_template(named, folder)
    if not isinstance(template, str | None):
        raise ValueError(f"{folder / CONFIG} must hold a chat_template that is text; got a {type(template).__name__}.")
    return None if template is None else Template(template, folder / CONFIG)


def _default_template(named: Mapping[str, Any], folder: Path) -> Any:
    if "default" not in named:
        raise ValueError(
            f"one of several chat templates must be named 'default'; {folder / CONFIG} has {sorted(named)}. "
            f"Save the template to use as {folder / TEMPLATE}."
        )
    return named["default"]


def special_tokens(folder: Path) -> dict[str, int]:
    """Return text and id of the special tokens."""
    added = _read_json(folder / "tokenizer.json").get("added_tokens", [])
    decoder = _read_json(folder / CONFIG).get("added_tokens_decoder", {})
    with _naming(folder):
        every = [*added, *({"id": int(index), **token} for index, token in decoder.items())]
        if not all(isinstance(token["content"], str) for token in every):
            raise TypeError("the content of a token is no text")
        return {token["content"]: int(token["id"]) for token in every if token.get("special", True)}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Convert the errors of missing and unsuitable fields into one that names ``path``."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} must hold a tokenizer; a field is missing or of another type: {error}.") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must hold a chat template as UTF-8 text; {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_object(path, "a tokenizer")
