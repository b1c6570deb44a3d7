"""Triton kernels of attention and memory for one token of several sequences.

The state of a row is in its slot or page. It is changed in place: no program reads what another one of its launch
writes. Positions are read on the device, so a launch does not depend on them: a captured graph can repeat it at any
position.

A chunk that ends with this token changes the memory. ``heads_kernel`` updates everything that has key features as rows
and columns, and saves what enters the memory in buffers. ``enter_kernel`` then updates the memory by columns of values,
each program its own. In other rows it ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.decoding.triton_pages import state_of

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def _place(p_position, p_start, row, chunk: tl.constexpr, attention: tl.constexpr):
    """Return position, start of its chunk, and the first position that attention sees; then whether the document began
    in this chunk, whether the query reads the memory, and whether the chunk ends."""
    position, start = tl.load(p_position + row), tl.load(p_start + row)
    chunk_start = position - position % chunk
    if attention == "sliding_window":
        first = position - chunk + 1
    elif attention == "chunk":
        first = chunk_start
    else:
        first = chunk_start - chunk
    first = tl.maximum(first, start)
    return position, chunk_start, first, start >= chunk_start, start < chunk_start - chunk, (position + 1) % chunk == 0


@triton.jit
def _visible(i_slot, position, first, chunk: tl.constexpr):
    """Return whether attention sees the token in a ring slot: position j is in slot j mod 2c."""
    own_slot = position % (2 * chunk)
    age = tl.where(i_slot <= own_slot, own_slot - i_slot, own_slot - i_slot + 2 * chunk)
    return position - age >= first


@triton.jit
def _copy(p_z, p_scale, p_shift, copy: tl.constexpr, factor, head, i, m, heads: tl.constexpr, key: tl.constexpr):
    """Return features ``i`` of copy ``copy`` of a head: the normal vector z · factor, scaled and shifted."""
    i_row = (copy * heads + head) * key + i
    b_scale = tl.load(p_scale + i_row, mask=m, other=0.0)
    b_shift = tl.load(p_shift + i_row, mask=m, other=0.0)
    return tl.load(p_z + i, mask=m, other=0.0) * factor * b_scale + b_shift


@triton.jit
def _rotated(b_x, b_partner, p_phases, turn, i, m, key: tl.constexpr):
    """Rotate x by ``turn`` positions; the partner of feature 2j is 2j + 1, and the reverse."""
    p_pair = p_phases + (turn * (key // 2) + i // 2) * 2
    b_cosine, b_sine = tl.load(p_pair, mask=m, other=1.0), tl.load(p_pair + 1, mask=m, other=0.0)
    return b_x * b_cosine + tl.where(i % 2 == 0, -b_partner, b_partner) * b_sine


@triton.jit
def _rotated_copy(p_z, p_scale, p_shift, p_phases, copy: tl.constexpr, factor, head, turn, heads: tl.constexpr,
                  key: tl.constexpr, width: tl.constexpr, rope_heads: tl.constexpr):  # fmt: skip
    """Return a query or key of attention, (width,)."""
    i = tl.arange(0, width)
    b_x = _copy(p_z, p_scale, p_shift, copy, factor, head, i, i < key, heads, key)
    if rope_heads > 0:
        i_partner = i ^ 1
        b_partner = _copy(p_z, p_scale, p_shift, copy, factor, head, i_partner, i_partner < key, heads, key)
        b_x = tl.where(head < rope_heads, _rotated(b_x, b_partner, p_phases, turn, i, i < key, key), b_x)
    return b_x


@triton.jit
def _score(
    p_z, p_scale, p_shift, p_phases, p_keys, p_scores, factor, head, task, position, chunk_start, first,
    heads: tl.constexpr, key: tl.constexpr, width: tl.constexpr, chunk: tl.constexpr, rope_heads: tl.constexpr,
    slots: tl.constexpr,
):  # fmt: skip
    """Store the scores of some ring slots in one half of the ring, and the token's key if its slot is one of them."""
    tiles: tl.constexpr = (chunk + slots - 1) // slots
    half, own_half = task // tiles, (position // chunk) % 2
    i_in_half = task % tiles * slots + tl.arange(0, slots)
    i_slot = half * chunk + i_in_half
    m_slot = i_in_half < chunk
    visible = m_slot & _visible(i_slot, position, first, chunk)
    is_own = m_slot & (i_slot == position % (2 * chunk))

    # A key of the previous chunk is c positions farther away than its rotation says.
    turn = position - chunk_start
    far = tl.where(half == own_half, 0, chunk)
    b_query = _rotated_copy(p_z, p_scale, p_shift, p_phases, 0, factor, head, turn + far, heads, key, width, rope_heads)
    b_own = _rotated_copy(p_z, p_scale, p_shift, p_phases, 1, factor, head, turn, heads, key, width, rope_heads)
    i_key = tl.arange(0, width)
    p_ring = p_keys + i_slot[:, None] * key + i_key[None, :]
    m_key = (i_key < key)[None, :]
    b_own = b_own.to(p_keys.dtype.element_ty)
    tl.store(p_ring, b_own[None, :], mask=is_own[:, None] & m_key)
    b_keys = tl.load(p_ring, mask=(visible & ~is_own)[:, None] & m_key, other=0.0).to(tl.float32)
    b_keys = tl.where(is_own[:, None], b_own.to(tl.float32)[None, :], b_keys)
    b_scores = tl.sum(b_keys * b_query[None, :], 1)
    tl.store(p_scores + i_slot, tl.where(visible, b_scores, float("-inf")), mask=m_slot)


@triton.jit
def _log_sum(a, b):
    """Return log(exp(a) + exp(b))."""
    least = tl.exp(tl.minimum(a, b) - tl.maximum(a, b))
    series = least * (1 - least * (1 / 2 - least * (1 / 3 - least / 4)))
    return tl.maximum(a, b) + tl.where(least < 0.01, series, tl.log(1 + least))


@triton.jit
def _softmax_parts(b_x, m):
    """Return the largest number, and the sum of the exponentials of the differences from it."""
    most = tl.max(tl.where(m, b_x, float("-inf")), 0)
    return most, tl.sum(tl.where(m, tl.exp(b_x - most), 0.0), 0)


@triton.jit
def _summarise(
    p_z, p_scale, p_shift, p_normaliser, p_previous_weight, p_previous_keys, p_weight, p_key_sum, p_read, p_share,
    p_rho, p_kept, p_entering, factor, head, task, resets, ends, heads: tl.constexpr, key: tl.constexpr,
    width: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Add the token to some rows of the current chunk's sums over keys, and store its features.

    If the chunk ends, store what the previous one enters the memory with. The current one replaces it, and an empty one
    begins.
    """
    i_key, i_r = tl.arange(0, width), task * rows + tl.arange(0, rows)
    m_key, m_r = i_key < key, i_r < key
    b_psi = _copy(p_z, p_scale, p_shift, 3, factor, head, i_key, m_key, heads, key)
    most, total = _softmax_parts(b_psi, m_key)
    b_psi = tl.exp(b_psi - most) / total
    b_query = _copy(p_z, p_scale, p_shift, 2, factor, head, i_key, m_key, heads, key)
    most, total = _softmax_parts(b_query, m_key)
    b_read = tl.exp(_copy(p_z, p_scale, p_shift, 2, factor, head, i_r, m_r, heads, key) - most) / total
    tl.store(p_read + i_r, b_read, mask=m_r)

    b_key = _copy(p_z, p_scale, p_shift, 3, factor, head, i_r, m_r, heads, key)
    b_weight = tl.load(p_weight + i_r, mask=m_r, other=0.0)
    b_share = tl.sigmoid(b_key - b_weight)
    b_weight = _log_sum(b_weight, b_key)
    tl.store(p_share + i_r, b_share, mask=m_r)
    i_sum, m_sum = i_r[:, None] * key + i_key[None, :], m_r[:, None] & m_key[None, :]
    b_sum = tl.load(p_key_sum + i_sum, mask=m_sum, other=0.0)
    b_sum += b_share[:, None] * (b_psi[None, :] - b_sum)
    tl.debug_barrier()  # all threads have loaded the weights; several have loaded the same ones
    if ends:
        b_previous = tl.load(p_previous_weight + i_r, mask=m_r, other=0.0)
        b_after = _log_sum(tl.load(p_normaliser + i_r, mask=m_r, other=0.0), b_previous)
        b_after = tl.where(resets, b_previous, b_after)
        b_rho = tl.exp(b_previous - b_after)
        tl.store(p_rho + i_r, b_rho, mask=m_r)
        tl.store(p_kept + i_r, tl.where(resets, 0.0, 1 - b_rho), mask=m_r)
        b_enters = tl.load(p_previous_keys + i_sum, mask=m_sum, other=0.0)
        tl.debug_barrier()  # all threads have loaded those of the previous chunk
        tl.store(p_entering + i_sum, tl.where(resets, 0.0, b_enters), mask=m_sum)
        tl.store(p_normaliser + i_r, b_after, mask=m_r)
        tl.store(p_previous_weight + i_r, b_weight, mask=m_r)
        tl.store(p_previous_keys + i_sum, b_sum, mask=m_sum)
        b_weight = tl.full([rows], -1e30, tl.float32)
        b_sum = tl.zeros([rows, width], tl.float32)
    tl.store(p_weight + i_r, b_weight, mask=m_r)
    tl.store(p_key_sum + i_sum, b_sum, mask=m_sum)


@triton.jit
def heads_kernel(
    p_projected, p_scale, p_shift, p_phases, p_position, p_start, p_count, p_keys, p_scores, p_normaliser,
    p_previous_weight, p_previous_keys, p_previous_resets, p_weight, p_key_sum, p_read, p_share, p_rho, p_kept,
    p_entering, p_page, eps, projected: tl.constexpr, shared: tl.constexpr, heads: tl.constexpr, key: tl.constexpr,
    width: tl.constexpr, chunk: tl.constexpr, attention: tl.constexpr, rope_heads: tl.constexpr, slots: tl.constexpr,
    rows: tl.constexpr, page_bytes: tl.constexpr,
):  # fmt: skip
    """One task of one head of a row: scores of some ring slots, or some rows of the sums over keys. The step is counted
    here, since ``average_kernel`` has read the count."""
    row, head, task = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position, chunk_start, first, _, _, ends = _place(p_position, p_start, row, chunk, attention)
    if (head == 0) & (task == 0):
        p_count = state_of(p_count, p_page, row, 1, page_bytes)
        tl.store(p_count, tl.load(p_count) + 1)
    i_key, i_head = tl.arange(0, width), row * heads + head
    p_z = p_projected + row * projected + shared + head * key
    b_z = tl.load(p_z + i_key, mask=i_key < key, other=0.0)
    factor = tl.rsqrt(tl.sum(b_z * b_z, 0) / key + eps)
    score_tasks: tl.constexpr = 2 * ((chunk + slots - 1) // slots)
    if task < score_tasks:
        ring: tl.constexpr = 2 * chunk * key
        p_ring = state_of(p_keys, p_page, row, heads * ring, page_bytes) + head * ring
        _score(
            p_z, p_scale, p_shift, p_phases, p_ring, p_scores + i_head * (2 * chunk),
            factor, head, task, position, chunk_start, first, heads, key, width, chunk, rope_heads, slots,
        )  # fmt: skip
    else:
        if p_weight is not None:
            i_vector, i_matrix = i_head * key, i_head * (key * key)
            vectors: tl.constexpr = heads * key
            _summarise(
                p_z, p_scale, p_shift, state_of(p_normaliser, p_page, row, vectors, page_bytes) + head * key,
                state_of(p_previous_weight, p_page, row, vectors, page_bytes) + head * key,
                state_of(p_previous_keys, p_page, row, vectors * key, page_bytes) + head * (key * key),
                state_of(p_weight, p_page, row, vectors, page_bytes) + head * key,
                state_of(p_key_sum, p_page, row, vectors * key, page_bytes) + head * (key * key), p_read + i_vector,
                p_share + i_vector, p_rho + i_vector, p_kept + i_vector, p_entering + i_matrix, factor, head,
                task - score_tasks, tl.load(state_of(p_previous_resets, p_page, row, 1, page_bytes)) != 0, ends, heads,
                key, width, rows,
            )  # fmt: skip


@triton.jit
def _attend(p_scores, p_values, b_value, i_column, m_column, position, first, value: tl.constexpr, chunk: tl.constexpr,
            slots: tl.constexpr, columns: tl.constexpr):  # fmt: skip
    """Return the sum of the values in the ring, and of the token's own one, by the softmax of their scores."""
    most, total = -1e30, 0.0
    for begin in range(0, 2 * chunk, 1024):
        i = begin + tl.arange(0, 1024)
        b_score = tl.load(p_scores + i, mask=i < 2 * chunk, other=float("-inf"))
        new = tl.maximum(most, tl.max(b_score, 0))
        total = total * tl.exp(most - new) + tl.sum(tl.exp(b_score - new), 0)
        most = new
    b_sum = tl.zeros([slots, columns], tl.float32)
    own_slot = position % (2 * chunk)
    for begin in tl.range(0, 2 * chunk, slots, num_stages=3):
        i_slot = begin + tl.arange(0, slots)
        m_slot = (i_slot < 2 * chunk) & (i_slot != own_slot) & _visible(i_slot, position, first, chunk)
        b_score = tl.load(p_scores + i_slot, mask=m_slot, other=float("-inf"))
        m = m_slot[:, None] & m_column[None, :]
        b_values = tl.load(p_values + i_slot[:, None] * value + i_column[None, :], mask=m, other=0.0).to(tl.float32)
        b_sum += tl.exp(b_score - most)[:, None] * b_values
    own = tl.exp(tl.load(p_scores + own_slot) - most)
    return (tl.sum(b_sum, 0) + own * b_value) / total


@triton.jit
def _use_memory(p_memory, p_value_sum, p_read, p_share, b_value, reads, i_column, m_column, key: tl.constexpr,
                value: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):  # fmt: skip
    """Add the token to the current chunk's sum of values, and return what its query reads from the memory."""
    b_recalled = tl.zeros([rows, columns], tl.float32)
    for begin in range(0, key, rows):
        i_r = begin + tl.arange(0, rows)
        m_r = i_r < key
        i, m = i_r[:, None] * value + i_column[None, :], m_r[:, None] & m_column[None, :]
        b_memory = tl.load(p_memory + i, mask=m & reads, other=0.0)
        b_recalled += tl.load(p_read + i_r, mask=m_r, other=0.0)[:, None] * b_memory
        b_sum = tl.load(p_value_sum + i, mask=m, other=0.0)
        b_share = tl.load(p_share + i_r, mask=m_r, other=0.0)
        tl.debug_barrier()  # all threads have loaded the sums
        tl.store(p_value_sum + i, b_sum + b_share[:, None] * (b_value[None, :] - b_sum), mask=m)
    return tl.sum(b_recalled, 0)


@triton.jit
def mix_kernel(
    p_projected, p_position, p_start, p_scores, p_values, p_memory, p_value_sum, p_read, p_share, p_out, p_page,
    projected: tl.constexpr, heads: tl.constexpr, key: tl.constexpr, value: tl.constexpr, chunk: tl.constexpr,
    attention: tl.constexpr, slots: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, page_bytes: tl.constexpr,
):  # fmt: skip
    """Gated attention plus memory, for some columns of the values of a head of a row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, _, first, _, reads, _ = _place(p_position, p_start, row, chunk, attention)
    i_head = row * heads + head
    i_column = tl.program_id(2) * columns + tl.arange(0, columns)
    m_column = i_column < value
    p_row = p_projected + row * projected + head * value + i_column
    b_value = tl.load(p_row, mask=m_column, other=0.0)
    b_rounded = b_value.to(p_values.dtype.element_ty)
    ring: tl.constexpr = 2 * chunk * value
    p_ring = state_of(p_values, p_page, row, heads * ring, page_bytes) + head * ring
    tl.store(p_ring + position % (2 * chunk) * value + i_column, b_rounded, mask=m_column)
    b_out = _attend(
        p_scores + i_head * (2 * chunk), p_ring, b_rounded.to(tl.float32), i_column, m_column, position, first, value,
        chunk, slots, columns,
    )  # fmt: skip
    b_out *= tl.load(p_row + heads * value, mask=m_column, other=0.0)
    if p_memory is not None:
        i_vector, matrix = i_head * key, key * value
        b_out += _use_memory(
            state_of(p_memory, p_page, row, heads * matrix, page_bytes) + head * matrix,
            state_of(p_value_sum, p_page, row, heads * matrix, page_bytes) + head * matrix,
            p_read + i_vector, p_share + i_vector, b_value, reads,
            i_column, m_column, key, value, rows, columns,
        )  # fmt: skip
    tl.store(p_out + i_head * value + i_column, b_out.to(p_out.dtype.element_ty), mask=m_column)


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
    heads: tl.constexpr, key: tl.constexpr, value: tl.constexpr, width: tl.constexpr, chunk: tl.constexpr,
    attention: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, page_bytes: tl.constexpr,
):  # fmt: skip
    """If the chunk of a row ends, update some columns of the memory of a head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, began, _, ends = _place(p_position, p_start, row, chunk, attention)
    if ends:
        i_head = row * heads + head
        i_column = tl.program_id(2) * columns + tl.arange(0, columns)
        i_vector, matrix = i_head * key, key * value
        _enter_previous(
            state_of(p_memory, p_page, row, heads * matrix, page_bytes) + head * matrix,
            state_of(p_previous_values, p_page, row, heads * matrix, page_bytes) + head * matrix,
            state_of(p_value_sum, p_page, row, heads * matrix, page_bytes) + head * matrix, p_rho + i_vector,
            p_kept + i_vector, p_entering + i_head * (key * key), i_column, i_column < value, key, value, width, rows,
            columns,
        )  # fmt: skip
        if (head == 0) & (tl.program_id(2) == 0):
            p_resets = state_of(p_previous_resets, p_page, row, 1, page_bytes)
            tl.store(p_resets, began.to(p_previous_resets.dtype.element_ty))
