"""Which tokenizer a model was trained with, and whether a run that starts from it reads with the same."""

from __future__ import annotations

import warnings
from pathlib import Path

from gecko.data import ByteTokenizer, Tokenizer, load_tokenizer
from gecko.data.tokenizer_files import holds_tokenizer
from gecko.train.run import Run
from gecko.train.snapshot import RECIPE

_PROBE = "The quick brown fox: 3.14 × 2 = 6,28…\n\tif x != 0:  return '/home'\nÀ là niña, Straße, Привет, 你好, 🙂"


def check_same_tokenizer(folder: Path, given: str) -> None:
    """Compare the tokenizer ``given`` with that of the model in ``folder``.

    Where neither is there nothing is known. A warning where the model's cannot be loaded and may be the same.

    Raises:
        ValueError: they make other ids of the same text.
    """
    known = known_tokenizer(folder)
    if known is None or known == given:
        return
    try:
        same = _ids(load_tokenizer(known)) == _ids(load_tokenizer(given))
    except (FileNotFoundError, ValueError, ImportError) as error:
        # What is missing is a file or a library: the bytes need neither.
        same = given != ByteTokenizer.name
        if same:
            warnings.warn(f"data.tokenizer could not be compared with that of init_from: {error}", stacklevel=2)
    if not same:
        raise ValueError(
            f"data.tokenizer must be that of the model in init_from, for which other ids mean other text; {folder} was "
            f"trained with {known!r}, got {given!r}. Set data.tokenizer={known}"
        )


def known_tokenizer(folder: Path) -> str | None:
    """The tokenizer whose files lie beside a model, else the one that the recipe there names; None where neither is.

    The files come first: a recipe may name a path of another machine.
    """
    if holds_tokenizer(folder):
        return str(folder)
    return Run.load(folder / RECIPE).data.tokenizer if (folder / RECIPE).is_file() else None


def _ids(tokenizer: Tokenizer) -> list[int]:
    """Of a text with something of everything: files of one tokenizer, saved by other libraries, differ in bytes."""
    return [tokenizer.document_start, *tokenizer.encode(_PROBE).tolist(), tokenizer.document_end]
