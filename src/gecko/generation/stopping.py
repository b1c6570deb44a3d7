"""Text that ends before a stop string, wherever the borders of its pieces fall."""

from __future__ import annotations

from collections.abc import Sequence


def check_stops(stops: Sequence[str]) -> None:
    """Raises ValueError for an empty stop string."""
    if not all(stops):
        raise ValueError(f"a stop string must have at least one character; got {list(stops)}.")


class StopStrings:
    """Passes text on until one of ``stops`` is complete; what might begin one is held back until it is clear.

    The string that is complete first counts, the longest of those that end together.

    Raises:
        ValueError: an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        check_stops(stops)
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was met."""

    def push(self, text: str) -> str:
        """What is certain not to belong to a stop string; nothing once one was met."""
        passed = []
        for character in text:
            if self.matched is not None:
                break
            passed.append(self._push(character))
        return "".join(passed)

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _push(self, character: str) -> str:
        self._held += character
        for stop in self._stops:
            if self._held.endswith(stop):
                self.matched = stop
                passed, self._held = self._held.removesuffix(stop), ""
                return passed
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
