// Operands of bfloat16 products: rounded numbers, in pairs that are adjacent along the sum. A pair takes the place of
// one float, so panels and tiles have the same layout as with floats (``cpu_matrix.h``).
#pragma once

#include "cpu_matrix.h"

#ifdef __AVX512BF16__

// Pair numbers: those of ``first`` are in the lower halves, those of ``second`` in the upper halves.
static inline vec interleaved(vec first, vec second) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
        16, 0);
    return (vec)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Pair adjacent numbers of ``first``, and then of ``second``.
static inline vec joined(vec first, vec second) { return (vec)_mm512_cvtne2ps_pbh(second, first); }

#else  // not called without bfloat16 products

static inline vec interleaved(vec first, vec second) { return first + second; }
static inline vec joined(vec first, vec second) { return first + second; }

#endif

// Pair adjacent numbers of each row; ``to`` is (rows, columns / 2). ``columns`` is a multiple of 2 LANES.
static inline void pair_along(float *to, const float *from, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows * columns; i += 2 * LANES)
        store(to + i / 2, joined(load(from + i), load(from + i + LANES)));
}

// Pair row 2 k of (rows, columns) with the next row, or zeros after the last: LANES columns starting at ``column``.
static inline vec pair_of_rows(const float *from, int64_t k, int64_t rows, int64_t columns, int64_t column) {
    const float *first = from + 2 * k * columns + column;
    return interleaved(load(first), 2 * k + 1 < rows ? load(first + columns) : (vec){0});
}

// Pair each even row with the next row; ``to`` is (rows / 2 rounded up, columns).
static inline void pair_across(float *to, const float *from, int64_t rows, int64_t columns) {
    for (int64_t k = 0; 2 * k < rows; k++)
        for (int64_t j = 0; j < columns; j += LANES)
            store(to + k * columns + j, pair_of_rows(from, k, rows, columns, j));
}
