"""Triton kernels of the values of attention and memory for one token of several sequences, after ``heads_kernel``.

Where a chunk ends with this token, ``enter_kernel`` updates the memory by columns of values, each program its own. In
other rows it ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.decoding.triton_rows import place_of, state_of

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def _softmax_of(p_scores, scores: tl.constexpr, scored: tl.constexpr):
    """Return the largest score, and the sum of exponentials of what they are below it."""
    most, total = -1e30, 0.0
    for begin in range(0, scores, scored):
        i = begin + tl.arange(0, scored)
        b_score = tl.load(p_scores + i, mask=i < scores, other=float("-inf"))
        new = tl.maximum(most, tl.max(b_score, 0))
        total = total * tl.exp(most - new) + tl.sum(tl.exp(b_score - new), 0)
        most = new
    return most, total


@triton.jit
def _attend(
    p_scores, most, total, p_values, p_sinks, b_value, i_column, m_column, position, first, seen, value: tl.constexpr,
    chunk: tl.constexpr, sinks: tl.constexpr, slots: tl.constexpr, sink_slots: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Return the sum of the values in the ring, of the sinks, and of the token's own one, by the softmax of their
    scores."""
    b_sum = tl.zeros([slots, columns], tl.float32)
    first_slot, before = (first % (2 * chunk)).to(tl.int32), (position - first).to(tl.int32)
    for begin in tl.range(0, before, slots, num_stages=5):  # only what the row sees, wherever it is in the ring
        i = begin + tl.arange(0, slots)
        i_slot, m_slot = (first_slot + i) % (2 * chunk), i < before
        b_score = tl.load(p_scores + i_slot, mask=m_slot, other=float("-inf"))
        m = m_slot[:, None] & m_column[None, :]
        b_values = tl.load(p_values + i_slot[:, None] * value + i_column[None, :], mask=m, other=0.0).to(tl.float32)
        b_sum += tl.exp(b_score - most)[:, None] * b_values
    b_out = tl.sum(b_sum, 0) + tl.exp(tl.load(p_scores + position % (2 * chunk)) - most) * b_value
    if p_sinks is not None:
        for begin in range(0, sinks, sink_slots):
            i_sink = begin + tl.arange(0, sink_slots)
            m_sink = i_sink < seen
            b_score = tl.load(p_scores + 2 * chunk + i_sink, mask=m_sink, other=float("-inf"))
            m = m_sink[:, None] & m_column[None, :]
            b_values = tl.load(p_sinks + i_sink[:, None] * value + i_column[None, :], mask=m, other=0.0).to(tl.float32)
            b_out += tl.sum(tl.exp(b_score - most)[:, None] * b_values, 0)
    return b_out / total


@triton.jit
def _use_memory(p_memory, p_value_sum, p_read, p_share, b_value, reads, keeps, i_column, m_column, key: tl.constexpr,
                value: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):  # fmt: skip
    """Add the token to the current chunk's sum of values, and return what its query reads from the memory."""
    b_recalled = tl.zeros([rows, columns], tl.float32)
    for begin in range(0, key, rows):
        i_r = begin + tl.arange(0, rows)
        m_r = i_r < key
        i, m = i_r[:, None] * value + i_column[None, :], m_r[:, None] & m_column[None, :]
        b_memory = tl.load(p_memory + i, mask=m & reads, other=0.0)
        b_recalled += tl.load(p_read + i_r, mask=m_r, other=0.0)[:, None] * b_memory
        b_sum = tl.load(p_value_sum + i, mask=m & keeps, other=0.0)
        b_share = tl.load(p_share + i_r, mask=m_r, other=0.0)
        tl.debug_barrier()  # all threads have loaded the sums
        tl.store(p_value_sum + i, b_sum + b_share[:, None] * (b_value[None, :] - b_sum), mask=m & keeps)
    return tl.sum(b_recalled, 0)


@triton.jit
def mix_kernel(
    p_projected, p_position, p_start, p_scores, p_values, p_sinks, p_memory, p_factor, p_value_sum, p_read, p_share,
    p_out, p_page, projected: tl.constexpr, heads: tl.constexpr, key_heads: tl.constexpr, key: tl.constexpr,
    value: tl.constexpr, chunk: tl.constexpr, attention: tl.constexpr, gate: tl.constexpr, channels: tl.constexpr,
    before: tl.constexpr, sinks: tl.constexpr, score_row: tl.constexpr, scored: tl.constexpr, slots: tl.constexpr,
    sink_slots: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, page_bytes: tl.constexpr,
):  # fmt: skip
    """Attention and memory, joined and gated, for some columns of the values of a head of a row.

    The memory is added, or joined by gates of that many ``channels``, which begin at number ``before`` of a row.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_scores += (row * heads + head) * score_row
    most, total = _softmax_of(p_scores, 2 * chunk + sinks, scored)  # first: it waits for nothing
    position, start, chunk_start, first = place_of(p_position, p_start, row, chunk, attention)
    shared: tl.constexpr = heads // key_heads
    own, keeps = head // shared, head % shared == 0
    i_column = tl.program_id(2) * columns + tl.arange(0, columns)
    m_column = i_column < value
    p_row = p_projected + row * projected + i_column
    b_value = tl.load(p_row + own * value, mask=m_column, other=0.0)
    b_rounded = b_value.to(p_values.dtype.element_ty)
    ring: tl.constexpr = 2 * chunk * value
    p_ring = state_of(p_values, p_page, row, key_heads * ring, page_bytes) + own * ring
    tl.store(p_ring + position % (2 * chunk) * value + i_column, b_rounded, mask=m_column & keeps)
    p_first, number = p_sinks, position - start
    if p_sinks is not None:
        p_first = state_of(p_sinks, p_page, row, key_heads * sinks * value, page_bytes) + own * (sinks * value)
        tl.store(p_first + number * value + i_column, b_rounded, mask=m_column & keeps & (number < sinks))
    b_out = _attend(
        p_scores, most, total, p_ring, p_first, b_value, i_column, m_column, position, first,
        tl.minimum(first - start, sinks), value, chunk, sinks, slots, sink_slots, columns,
    )  # fmt: skip
    p_gate = p_row + (key_heads + head) * value
    if gate == "attention":
        b_out *= tl.load(p_gate, mask=m_column, other=0.0)
    if p_memory is not None:
        i_own, matrix, reads = (row * key_heads + own) * key, key * value, start < chunk_start - chunk
        b_recalled = _use_memory(
            state_of(p_memory, p_page, row, key_heads * matrix, page_bytes) + own * matrix,
            state_of(p_value_sum, p_page, row, key_heads * matrix, page_bytes) + own * matrix,
            p_read + (row * heads + head) * key, p_share + i_own, b_value, reads, keeps, i_column, m_column, key,
            value, rows, columns,
        )  # fmt: skip
        if p_factor is not None:
            b_recalled *= tl.load(p_factor + head)
        if channels > 0:
            p_join = p_projected + row * projected + before + head * channels + i_column // (value // channels)
            b_share = tl.sigmoid(tl.load(p_join, mask=m_column, other=0.0))
            b_recalled = tl.where(reads, b_share, 0.0) * (b_recalled - b_out)
        b_out += b_recalled
    if gate == "sum":
        b_out *= tl.load(p_gate, mask=m_column, other=0.0)
    tl.store(p_out + (row * heads + head) * value + i_column, b_out.to(p_out.dtype.element_ty), mask=m_column)


@triton.jit
def _enter_previous(p_memory, p_previous_values, p_value_sum, p_rho, p_kept, p_entering, i_column, m_column,
                    key: tl.constexpr, value: tl.constexpr, width: tl.constexpr, rows: tl.constexpr,
                    columns: tl.constexpr):  # fmt: skip
    """Compute M ← (1 − ρ) M + ρ (values − keys M) of the previous chunk. The current one replaces it, and an empty one
    begins."""
    i_key = tl.arange(0, width)
    m_key = i_key < key
    b_known = tl.zeros([width, columns], tl.float32)
    for begin in range(0, key, rows):
        i_r = begin + tl.arange(0, rows)
        m_r = i_r < key
        i, m = i_r[:, None] * value + i_column[None, :], m_r[:, None] & m_column[None, :]
        b_memory = tl.load(p_memory + i, mask=m, other=0.0)
        i, m = i_key[:, None] * key + i_r[None, :], m_key[:, None] & m_r[None, :]
        b_known = tl.dot(tl.load(p_entering + i, mask=m, other=0.0), b_memory, b_known, input_precision="tf32x3")
    i, m = i_key[:, None] * value + i_column[None, :], m_key[:, None] & m_column[None, :]
    b_rho = tl.load(p_rho + i_key, mask=m_key, other=0.0)[:, None]
    b_kept = tl.load(p_kept + i_key, mask=m_key, other=0.0)[:, None] * tl.load(p_memory + i, mask=m, other=0.0)
    b_enters = tl.load(p_previous_values + i, mask=m, other=0.0) - b_known
    tl.debug_barrier()  # the program has read all of its columns of the memory
    tl.store(p_memory + i, b_kept + b_rho * b_enters, mask=m)
    tl.store(p_previous_values + i, tl.load(p_value_sum + i, mask=m, other=0.0), mask=m)
    tl.debug_barrier()  # all threads have loaded the sums of the chunk that ended
    tl.store(p_value_sum + i, tl.zeros([width, columns], tl.float32), mask=m)


@triton.jit
def enter_kernel(
    p_position, p_start, p_memory, p_previous_values, p_previous_resets, p_value_sum, p_rho, p_kept, p_entering, p_page,
    key_heads: tl.constexpr, key: tl.constexpr, value: tl.constexpr, width: tl.constexpr, chunk: tl.constexpr,
    attention: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, page_bytes: tl.constexpr,
):  # fmt: skip
    """If the chunk of a row ends, update some columns of the memory of a head: a program's number of tiles is only one
    if there are few rows, since most steps end no chunk, and programs that do nothing take time too."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, start, chunk_start, _ = place_of(p_position, p_start, row, chunk, attention)
    if (position + 1) % chunk == 0:
        i_head = row * key_heads + head
        i_vector, matrix = i_head * key, key * value
        for begin in range(tl.program_id(2) * columns, value, tl.num_programs(2) * columns):
            i_column = begin + tl.arange(0, columns)
            _enter_previous(
                state_of(p_memory, p_page, row, key_heads * matrix, page_bytes) + head * matrix,
                state_of(p_previous_values, p_page, row, key_heads * matrix, page_bytes) + head * matrix,
                state_of(p_value_sum, p_page, row, key_heads * matrix, page_bytes) + head * matrix, p_rho + i_vector,
                p_kept + i_vector, p_entering + i_head * (key * key), i_column, i_column < value, key, value, width,
                rows, columns,
            )  # fmt: skip
        if (head == 0) & (tl.program_id(2) == 0):
            p_resets = state_of(p_previous_resets, p_page, row, 1, page_bytes)
            tl.store(p_resets, (start >= chunk_start).to(p_previous_resets.dtype.element_ty))
