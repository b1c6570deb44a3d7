"""Function that processes of a context group run with interpreted kernels; see ``interpreted/test_context.py``."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.interpreted.conftest import interpret_as_the_card_does
from support.context_cases import Text, read_on_kernels


def read_interpreted(variant: str, text: Text, checkpointing: str, layers: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        interpret_as_the_card_does(patch)
        return read_on_kernels(variant, text, checkpointing, "triton", layers)
