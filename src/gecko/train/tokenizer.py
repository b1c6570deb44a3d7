"""Whether a run that starts from a model uses the tokenizer of that model."""

from __future__ import annotations

import warnings
from pathlib import Path

from gecko.data import ByteTokenizer, Tokenizer, load_tokenizer
from gecko.data.tokenizers import known_tokenizer

_PROBE = "The quick brown fox: 3.14 × 2 = 6,28…\n\tif x != 0:  return '/home'\nÀ là niña, Straße, Привет, 你好, 🙂"


def check_same_tokenizer(folder: Path, given: str) -> None:
    """Check that the tokenizer ``given`` is that of the model in ``folder``, if that is known.

    Warn if the model's tokenizer cannot be loaded and may be the same.

    Raises:
        ValueError: the two produce different ids for the same text.
    """
    known = known_tokenizer(folder)
    if known is None or known == given:
        return
    try:
        same = _ids(load_tokenizer(known)) == _ids(load_tokenizer(given))
    except (FileNotFoundError, ValueError, ImportError) as error:
        # A file or a library is missing. The bytes tokenizer needs neither: if it is ``given``, ``known`` is another.
        same = given != ByteTokenizer.name
        if same:
            warnings.warn(f"data.tokenizer could not be compared with that of init_from: {error}", stacklevel=2)
    if not same:
        raise ValueError(
            f"data.tokenizer must be that of the model in init_from, for which other ids mean other text; {folder} was "
            f"trained with {known!r}, got {given!r}. Set data.tokenizer={known}"
        )


def _ids(tokenizer: Tokenizer) -> list[int]:
    """Tokenize a varied text. Files cannot be compared: libraries save the same tokenizer with different bytes."""
    return [tokenizer.document_start, *tokenizer.encode(_PROBE).tolist(), tokenizer.document_end]
