"""Token ids to text as they come."""

from __future__ import annotations

from collections.abc import Iterable

from gecko.data.tokenizers import Tokenizer, text_ids

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes of a UTF-8 character, and so at most as many ids."""


def letter(tokenizer: Tokenizer) -> list[int]:
    """An id of text, which others may follow; none where the tokenizer knows no letters."""
    return tokenizer.encode("a").tolist()[-1:]


class StreamDecoder:
    """Turns ids into text piece by piece; the pieces join to ``tokenizer.decode`` of all the ids.

    Text is held back while it ends in an incomplete UTF-8 character. Decoding costs the same
    for every id, however long the stream is.

    Args:
        goes_on: the ids follow other text, so that a first word keeps the space that SentencePiece begins it with.
    """

    def __init__(self, tokenizer: Tokenizer, *, goes_on: bool = False) -> None:
        self._tokenizer = tokenizer
        self._context = letter(tokenizer) if goes_on else []
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete, possibly none."""
        pieces = []
        for index in text_ids(self._tokenizer, ids):
            self._pending.append(index)
            pieces.append(self._release(final=False))
        return "".join(pieces)

    def flush(self) -> str:
        """The text held back, at the end of the stream; U+FFFD for the incomplete character."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        # Tokens before these decide how they are written: SentencePiece drops the space before a
        # text's first word only. So decode with the last piece that was given out, and cut it off.
        before = self._tokenizer.decode(self._context)
        text: str = self._tokenizer.decode(self._context + self._pending)[len(before) :]
        if not text or (text.endswith(REPLACEMENT) and not final):
            return self._release_invalid(before, before + text)
        self._context, self._pending = self._pending, []
        return text

    def _release_invalid(self, before: str, whole: str) -> str:
        """What no later id can change of a long ``whole`` that ends in U+FFFD: bytes that are no text.

        An incomplete character lies in the last ids, fewer than ``LONGEST_CHARACTER``, and of as many
        borders between ids before them one ends a character, unless ids straddle characters throughout.
        """
        kept = len(self._pending) - LONGEST_CHARACTER
        if kept < LONGEST_CHARACTER:
            return ""
        for end in range(kept, kept - LONGEST_CHARACTER, -1):
            text = self._tokenizer.decode(self._context + self._pending[:end])
            if len(text) > len(before) and whole.startswith(text):
                self._context, self._pending = self._pending[:end], self._pending[end:]
                return text[len(before) :]
        return ""
