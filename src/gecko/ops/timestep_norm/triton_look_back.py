"""Exchange of two numbers per tile and group between the programs of one launch, in the order of tiles.

``i_tile`` counts in the direction of the scan. Tiles form blocks of ``in_block``. A program stores the numbers of its
tile alone; the last one of a block also stores those after the block.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def take_number(p_words):
    """Return the number of this program in the order in which programs started."""
    program = tl.program_id(0).to(tl.int64)
    if p_words is not None:
        program = tl.atomic_add(p_words, 1, sem="relaxed")  # programs may start in any order
    return program


@triton.jit
def _words(p_words, i_row, i_slot, i_group, tiles, groups: tl.constexpr, in_block: tl.constexpr):
    """Return the places of two words per group, (…, groups, 2): of each tile, then of each block of tiles."""
    slots = tiles + (tiles + in_block - 1) // in_block
    places = (i_slot[:, None] * groups + i_group[None])[:, :, None] * 2 + tl.arange(0, 2)[None, None]
    return p_words + 1 + i_row * slots * groups * 2 + places


@triton.jit
def publish(p_words, i_row, i_slot, i_group, b_pair, m_group, tiles, groups: tl.constexpr, in_block: tl.constexpr):
    """Store two numbers per group (groups, 2) so that other programs see each together with the bit that says it is
    there. ``i_slot``: the tile, or ``tiles`` and the block."""
    p_word = _words(p_words, i_row, tl.zeros([1], tl.int32) + i_slot, i_group, tiles, groups, in_block)
    b_bits = b_pair.to(tl.int32, bitcast=True).to(tl.int64)[None]
    tl.atomic_xchg(
        p_word, (b_bits << 32) | 1, mask=tl.broadcast_to(m_group[None, :, None], b_bits.shape), sem="relaxed"
    )


@triton.jit
def _numbers(b_word):
    """Return the two numbers of each group from words (…, groups, 2), of which ``publish`` wrote one per number."""
    return tl.split((b_word >> 32).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def published(p_words, i_row, i_tile, first, i_group, m_group, tiles, groups: tl.constexpr, in_block: tl.constexpr):
    """Wait until the numbers of each tile alone from tile ``first`` to the one before ``i_tile``, and those after the
    block of tiles before, are there. Return both of each tile (in_block, groups), and of the block (groups); zero for
    others.

    Words are read by an atomic addition of 0, past all caches. Each has its number and its bit in one store, so no
    order of memory accesses matters. Programs of a smaller number do not wait for this one, so the wait ends."""
    i_slot = first + tl.arange(0, in_block)
    p_tile = _words(p_words, i_row, i_slot, i_group, tiles, groups, in_block)
    i_block = tl.zeros([1], tl.int32) + tiles + first // in_block - 1
    p_block = _words(p_words, i_row, i_block, i_group, tiles, groups, in_block)
    m_tile = tl.broadcast_to((i_slot < i_tile)[:, None, None] & m_group[None, :, None], p_tile.shape)
    m_block = tl.broadcast_to((i_block >= tiles)[:, None, None] & m_group[None, :, None], p_block.shape)
    b_none, b_zero = tl.zeros(p_tile.shape, tl.int64), tl.zeros(p_block.shape, tl.int64)
    b_tile = tl.where(m_tile, tl.atomic_add(p_tile, b_none, mask=m_tile, sem="relaxed"), 1)
    b_block = tl.where(m_block, tl.atomic_add(p_block, b_zero, mask=m_block, sem="relaxed"), 1)
    while (tl.min(b_tile & 1) & tl.min(b_block & 1)) == 0:
        b_tile = tl.where(m_tile, tl.atomic_add(p_tile, b_none, mask=m_tile, sem="relaxed"), 1)
        b_block = tl.where(m_block, tl.atomic_add(p_block, b_zero, mask=m_block, sem="relaxed"), 1)
    b_first, b_second = _numbers(b_tile)
    b_first_block, b_second_block = _numbers(b_block)
    return b_first, b_second, tl.sum(b_first_block, 0), tl.sum(b_second_block, 0)
