"""Where a row is: its state in the slot of that number or in a page, and its token in document, chunk and window."""

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


@triton.jit
def place_of(p_position, p_start, row, chunk: tl.constexpr, attention: tl.constexpr):
    """Return position, start of its document and of its chunk, and the first position that the window has of it."""
    position, start = tl.load(p_position + row), tl.load(p_start + row)
    chunk_start = position - position % chunk
    if attention == "sliding_window":
        first = position - chunk + 1
    elif attention == "chunk":
        first = chunk_start
    else:
        first = chunk_start - chunk
    return position, start, chunk_start, tl.maximum(first, start)


@triton.jit
def is_visible(i_slot, position, first, chunk: tl.constexpr):
    """Return whether attention sees the token in a ring slot: position j is in slot j mod 2c."""
    own_slot = position % (2 * chunk)
    age = tl.where(i_slot <= own_slot, own_slot - i_slot, own_slot - i_slot + 2 * chunk)
    return position - age >= first
