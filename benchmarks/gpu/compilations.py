"""Tells the process that waits for a measurement when kernels are being compiled, so that it does not take it for a
hang.

A measuring process, and processes that it starts, append a mark to one file when a compilation begins or ends.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGUN, ENDED = b"(", b")"


@dataclass(frozen=True)
class Compilations:
    """The marks of all compilations since the last ``clear``, in a file."""

    path: Path

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def marks(self) -> bytes:
        """Return one byte per beginning and end of a compilation, in order."""
        return self.path.read_bytes() if self.path.exists() else b""

    def note(self) -> None:
        """Append a mark whenever Triton or ``torch.compile`` begins or ends to compile in this process."""
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(lambda _: self.append(BEGUN))
        callback_handler.register_end_callback(lambda _: self.append(ENDED))
        if importlib.util.find_spec("triton") is not None:
            self._note_triton()

    def append(self, mark: bytes) -> None:
        """Append a mark; marks of several processes and threads do not overwrite each other."""
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, mark)
        finally:
            os.close(file)

    def _note_triton(self) -> None:
        from triton import knobs

        def hook(mark: bytes) -> Any:
            def note(**_: Any) -> bool:
                self.append(mark)
                return False  # compile as usual

            return note

        knobs.runtime.jit_cache_hook = hook(BEGUN)  # a kernel that this process has not used yet
        knobs.runtime.jit_post_compile_hook = hook(ENDED)
