"""Where the state of a row lies: in the slot of that number, or in a page."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def state_of(p_states, p_page, row, numbers: tl.constexpr, page_bytes: tl.constexpr):
    """Return the address of the ``numbers`` of a row in a tensor of the state.

    Without ``p_page`` the rows lie one after the other. With it the tensor is a view of pages that are ``page_bytes``
    apart, and row r is in page ``p_page[r]``.
    """
    if p_page is None:
        p_state = p_states + row * numbers
    else:
        bits: tl.constexpr = p_states.dtype.element_ty.primitive_bitwidth  # 1 for bool, which fills a byte
        size: tl.constexpr = bits // 8 if bits > 8 else 1
        p_state = p_states + tl.load(p_page + row) * (page_bytes // size)
    return p_state
