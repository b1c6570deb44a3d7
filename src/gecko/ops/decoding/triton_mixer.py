"""Triton kernels of the mixer for one token of several sequences: scores, then values of attention and memory.

Heads of queries may share a head of keys and values: the first of them keeps the token, and the others only read. The
state of a row is in its slot or page, and is changed in place: no program reads what another one of its launch writes.
Positions are read on the device, so a launch does not depend on them: a captured graph can repeat it at any position.

A chunk that ends with this token changes the memory. ``heads_kernel`` updates everything that has key features as rows
and columns, and saves what enters the memory in buffers for ``enter_kernel``, which updates the memory by columns of
values, each program its own. In other rows it ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.decoding.triton_rows import is_visible, place_of, state_of

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def _features(of, i, m):
    """Return features ``i`` of a query or key of a head, z · factor, scaled and shifted by tables from ``at`` on."""
    p_z, p_scale, p_shift, at, factor = of
    b_x = tl.load(p_z + i, mask=m, other=0.0) * factor
    if p_scale is not None:
        b_x *= tl.load(p_scale + at + i, mask=m, other=0.0)
    if p_shift is not None:
        b_x += tl.load(p_shift + at + i, mask=m, other=0.0)
    return b_x


@triton.jit
def _normal_factor(p_z, eps, key: tl.constexpr, width: tl.constexpr):
    """Return 1 / RMS of the features of a head."""
    i_key = tl.arange(0, width)
    b_z = tl.load(p_z + i_key, mask=i_key < key, other=0.0)
    return tl.rsqrt(tl.sum(b_z * b_z, 0) / key + eps)


@triton.jit
def _rotated(b_x, b_partner, p_phases, turn, i, m, key: tl.constexpr):
    """Rotate x by ``turn`` positions; the partner of feature 2j is 2j + 1, and the reverse."""
    p_pair = p_phases + (turn * (key // 2) + i // 2) * 2
    b_cosine, b_sine = tl.load(p_pair, mask=m, other=1.0), tl.load(p_pair + 1, mask=m, other=0.0)
    return b_x * b_cosine + tl.where(i % 2 == 0, -b_partner, b_partner) * b_sine


@triton.jit
def _turned(of, p_phases, turn, head, key: tl.constexpr, width: tl.constexpr, rope_heads: tl.constexpr):
    """Return a query or key of attention, (width,)."""
    i = tl.arange(0, width)
    b_x = _features(of, i, i < key)
    if rope_heads > 0:
        i_partner = i ^ 1
        b_partner = _features(of, i_partner, i_partner < key)
        b_x = tl.where(head < rope_heads, _rotated(b_x, b_partner, p_phases, turn, i, i < key, key), b_x)
    return b_x


@triton.jit
def _score(
    query, own_key, p_phases, p_keys, p_scores, head, keeps, task, position, chunk_start, first, key: tl.constexpr,
    width: tl.constexpr, chunk: tl.constexpr, rope_heads: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """Store the scores of some ring slots in one half of the ring, and the token's key if its slot is one of them."""
    tiles: tl.constexpr = (chunk + slots - 1) // slots
    half, own_half = task // tiles, (position // chunk) % 2
    begin, turn = task % tiles * slots, position - chunk_start
    i_in_half = begin + tl.arange(0, slots)
    i_slot = half * chunk + i_in_half
    m_slot = i_in_half < chunk
    if (half == own_half) & (begin > turn) | (half != own_half) & (chunk_start - chunk + begin + slots <= first):
        tl.store(p_scores + i_slot, tl.full([slots], float("-inf"), tl.float32), mask=m_slot)
    else:
        visible = m_slot & is_visible(i_slot, position, first, chunk)
        own_slot = position % (2 * chunk)
        is_own = m_slot & (i_slot == own_slot)
        i_key = tl.arange(0, width)
        m_key = i_key < key
        p_ring = p_keys + i_slot[:, None] * key + i_key[None, :]
        # The longest loads are issued first; the query is computed meanwhile.
        b_keys = tl.load(p_ring, mask=(visible & ~is_own)[:, None] & m_key[None, :], other=0.0)

        # A key of the previous chunk is c positions farther away than its rotation says.
        far = tl.where(half == own_half, 0, chunk)
        b_query = _turned(query, p_phases, turn + far, head, key, width, rope_heads)
        b_own = _turned(own_key, p_phases, turn, head, key, width, rope_heads)
        tl.debug_barrier()  # all threads have loaded the keys; the token's own one is none of them
        is_mine = (half == own_half) & (turn // slots == task % tiles)
        tl.store(p_keys + own_slot * key + i_key, b_own.to(p_keys.dtype.element_ty), mask=m_key & keeps & is_mine)
        b_keys = b_keys.to(tl.float32)
        b_keys = tl.where(is_own[:, None], b_own[None, :], b_keys)
        b_scores = tl.sum(b_keys * b_query[None, :], 1)
        tl.store(p_scores + i_slot, tl.where(visible, b_scores, float("-inf")), mask=m_slot)


@triton.jit
def _score_sinks(
    query, own_key, p_phases, p_sinks, p_scores, head, keeps, number, seen, key: tl.constexpr, width: tl.constexpr,
    chunk: tl.constexpr, rope_heads: tl.constexpr, sinks: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """Store the scores of the first ``seen`` sinks, and the token's key if it is one: token ``number`` of its document.
    Both are rotated by that number, but at most by the largest distance in the window."""
    turn = tl.minimum(number, 2 * chunk - 1)
    b_query = _turned(query, p_phases, turn, head, key, width, rope_heads)
    b_own = _turned(own_key, p_phases, turn, head, key, width, rope_heads).to(p_sinks.dtype.element_ty)
    i_key = tl.arange(0, width)
    m_key = i_key < key
    tl.store(p_sinks + number * key + i_key, b_own, mask=m_key & keeps & (number < sinks))
    for begin in range(0, sinks, slots):
        i_sink = begin + tl.arange(0, slots)
        m = (i_sink < seen)[:, None] & m_key[None, :]
        b_keys = tl.load(p_sinks + i_sink[:, None] * key + i_key[None, :], mask=m, other=0.0).to(tl.float32)
        b_scores = tl.where(i_sink < seen, tl.sum(b_keys * b_query[None, :], 1), float("-inf"))
        tl.store(p_scores + i_sink, b_scores, mask=i_sink < sinks)


@triton.jit
def _log_sum(a, b):
    """Return log(exp(a) + exp(b))."""
    least = tl.exp(tl.minimum(a, b) - tl.maximum(a, b))
    series = least * (1 - least * (1 / 2 - least * (1 / 3 - least / 4)))
    return tl.maximum(a, b) + tl.where(least < 0.01, series, tl.log(1 + least))


@triton.jit
def _softmax(of, i, m, key: tl.constexpr, width: tl.constexpr):
    """Return features ``i`` of the softmax over the features of a query or key of the memory."""
    i_key = tl.arange(0, width)
    m_key = i_key < key
    b_x = _features(of, i_key, m_key)
    most = tl.max(tl.where(m_key, b_x, float("-inf")), 0)
    return tl.exp(_features(of, i, m) - most) / tl.sum(tl.where(m_key, tl.exp(b_x - most), 0.0), 0)


@triton.jit
def _summarise(
    own_key, p_normaliser, p_previous_weight, p_previous_keys, p_weight, p_key_sum, p_share, p_rho, p_kept, p_entering,
    i_r, resets, ends, key: tl.constexpr, width: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Add the token to the rows ``i_r`` of the current chunk's sums over keys.

    If the chunk ends, store what the previous one enters the memory with. The current one replaces it, and an empty one
    begins.
    """
    i_key = tl.arange(0, width)
    m_key, m_r = i_key < key, i_r < key
    i_sum, m_sum = i_r[:, None] * key + i_key[None, :], m_r[:, None] & m_key[None, :]
    b_sum = tl.load(p_key_sum + i_sum, mask=m_sum, other=0.0)
    b_weight = tl.load(p_weight + i_r, mask=m_r, other=0.0)
    b_psi = _softmax(own_key, i_key, m_key, key, width)
    b_key = _features(own_key, i_r, m_r)
    b_share = tl.sigmoid(b_key - b_weight)
    b_weight = _log_sum(b_weight, b_key)
    tl.store(p_share + i_r, b_share, mask=m_r)
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
    p_projected, p_scale, p_shift, p_phases, p_position, p_start, p_count, p_keys, p_sinks, p_scores,
    p_normaliser, p_previous_weight, p_previous_keys, p_previous_resets, p_weight, p_key_sum, p_read, p_share, p_rho,
    p_kept, p_entering, p_page, eps, projected: tl.constexpr, before: tl.constexpr, heads: tl.constexpr,
    key_heads: tl.constexpr, key: tl.constexpr, width: tl.constexpr, chunk: tl.constexpr, attention: tl.constexpr,
    rope_heads: tl.constexpr, separate: tl.constexpr, normal: tl.constexpr, sinks: tl.constexpr,
    score_row: tl.constexpr, slots: tl.constexpr, sink_slots: tl.constexpr, rows: tl.constexpr,
    page_bytes: tl.constexpr,
):  # fmt: skip
    """One task of one head of a row: scores of some ring slots, some rows of the sums over keys, or scores of sinks.
    The step is counted here, since ``average_kernel`` has read the count.

    Queries and keys are copies of one normal vector, or ``separate``; their projections begin at number ``before`` of a
    row. ``normal``: separate ones are normalised for attention.
    """
    row, head, task = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position, start, chunk_start, first = place_of(p_position, p_start, row, chunk, attention)
    if p_count is not None and (head == 0) & (task == 0):
        p_count = state_of(p_count, p_page, row, 1, page_bytes)
        tl.store(p_count, tl.load(p_count) + 1)
    shared: tl.constexpr = heads // key_heads
    own, keeps = head // shared, head % shared == 0
    i_query, i_key = head * key, (heads + own) * key  # in tables of queries, then keys
    p_query = p_projected + row * projected + before + i_query
    p_key = p_query
    factor, key_factor = 1.0, 1.0
    if separate:
        p_key = p_projected + row * projected + before + i_key
        if normal:
            factor = _normal_factor(p_query, eps, key, width)
            key_factor = _normal_factor(p_key, eps, key, width)
        memory_query, memory_key = (p_query, None, None, 0, 1.0), (p_key, None, None, 0, 1.0)
    else:
        factor = _normal_factor(p_query, eps, key, width)
        key_factor = factor
        after: tl.constexpr = 2 * heads * key
        memory_query = (p_query, p_scale, p_shift, after + i_query, factor)
        memory_key = (p_query, p_scale, p_shift, after + i_key, factor)
    query, own_key = (p_query, p_scale, p_shift, i_query, factor), (p_key, p_scale, p_shift, i_key, key_factor)
    score_tasks: tl.constexpr = 2 * ((chunk + slots - 1) // slots)
    sinks_task: tl.constexpr = 1 if sinks > 0 else 0
    p_scores += (row * heads + head) * score_row
    if task < score_tasks:
        ring: tl.constexpr = 2 * chunk * key
        p_ring = state_of(p_keys, p_page, row, key_heads * ring, page_bytes) + own * ring
        _score(
            query, own_key, p_phases, p_ring, p_scores, head, keeps, task, position, chunk_start, first, key, width,
            chunk, rope_heads, slots,
        )  # fmt: skip
    elif task < score_tasks + sinks_task:
        if sinks > 0:
            p_first = state_of(p_sinks, p_page, row, key_heads * sinks * key, page_bytes) + own * (sinks * key)
            _score_sinks(
                query, own_key, p_phases, p_first, p_scores + 2 * chunk, head, keeps, position - start,
                tl.minimum(first - start, sinks), key, width, chunk, rope_heads, sinks, sink_slots,
            )  # fmt: skip
    else:
        if p_weight is not None:
            i_r = (task - score_tasks - sinks_task) * rows + tl.arange(0, rows)
            if keeps:
                i_head = row * key_heads + own
                i_vector, i_matrix, vectors = i_head * key, i_head * (key * key), key_heads * key
                _summarise(
                    memory_key, state_of(p_normaliser, p_page, row, vectors, page_bytes) + own * key,
                    state_of(p_previous_weight, p_page, row, vectors, page_bytes) + own * key,
                    state_of(p_previous_keys, p_page, row, vectors * key, page_bytes) + own * (key * key),
                    state_of(p_weight, p_page, row, vectors, page_bytes) + own * key,
                    state_of(p_key_sum, p_page, row, vectors * key, page_bytes) + own * (key * key),
                    p_share + i_vector, p_rho + i_vector, p_kept + i_vector, p_entering + i_matrix, i_r,
                    tl.load(state_of(p_previous_resets, p_page, row, 1, page_bytes)) != 0,
                    (position + 1) % chunk == 0, key, width, rows,
                )  # fmt: skip
            b_read = _softmax(memory_query, i_r, i_r < key, key, width)
            tl.store(p_read + (row * heads + head) * key + i_r, b_read, mask=i_r < key)


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
