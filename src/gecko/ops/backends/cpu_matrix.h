// Matrix products of operands that fit in a core's cache, with one operand in the lanes of registers, and transposes.
#pragma once

#include "cpu.h"

// Tile of a product: six rows of MOST_WIDTH registers, with the operands of a step, fill the 32 or 16 registers.
#if defined __AVX512F__ || defined __aarch64__
enum { MOST_ROWS = 6, MOST_WIDTH = 4 };
#else
enum { MOST_ROWS = 6, MOST_WIDTH = 2 };
#endif

// Numbers that are needed next. Each tile of a product prefetches ``each`` of them, so that its arithmetic hides the
// latency.
typedef struct { const float *at, *end; int64_t each; } upcoming;

static inline void fetch(upcoming *next) {
    if (!next) return;
    const float *stop = next->at + next->each < next->end ? next->at + next->each : next->end;
    for (; next->at < stop; next->at += 16) __builtin_prefetch(next->at, 0, 2);
}

// Addends of a product: a matrix with rows ``row`` apart, and a vector; either may be null.
typedef struct { const float *matrix; int64_t row; const float *vector; } addends;

static inline addends addends_at(addends of, int64_t row, int64_t column) {
    return (addends){of.matrix ? of.matrix + row * of.row + column : 0, of.row, of.vector ? of.vector + column : 0};
}

// Operands are floats, or pairs of bfloat16 that are adjacent along the sum and take the place of one float. The
// product of two pairs is the sum of two products in float32.
#ifdef __AVX512BF16__
enum { HAS_PAIRS = 1 };
static inline vec multiply_add(vec sum, vec left, vec right, const int pairs) {
    return pairs ? (vec)_mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right) : sum + left * right;
}
#else
enum { HAS_PAIRS = 0 };
static inline vec multiply_add(vec sum, vec left, vec right, const int pairs) {
    (void)pairs;
    return sum + left * right;
}
#endif

// Compute c (rows, width vecs) from a, with elements a[row * a_row + k * a_col], and b (depth, width vecs). All of c is
// in registers, so ``rows`` and ``width`` must be constants after inlining.
static inline __attribute__((always_inline)) void tile_product(
    float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_col, const float *b, int64_t b_row, int64_t depth,
    addends onto, const int rows, const int width, const int pairs) {
    vec sum[MOST_ROWS][MOST_WIDTH];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) sum[i][j] = (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec right[MOST_WIDTH];
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) right[j] = load(b + k * b_row + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            vec left = every(a[i * a_row + k * a_col]);
#pragma GCC unroll 4
            for (int j = 0; j < width; j++) sum[i][j] = multiply_add(sum[i][j], left, right[j], pairs);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) {
            vec total = sum[i][j];
            if (onto.vector) total += load(onto.vector + j * LANES);
            if (onto.matrix) total += load(onto.matrix + i * onto.row + j * LANES);
            store(c + i * c_row + j * LANES, total);
        }
}

#define ROWS_OF(count, width, pairs)                                                                          \
    for (; row + count <= rows; row += count, fetch(next))                                                    \
        tile_product(c + row * c_row, c_row, a + row * a_row, a_row, a_col, b, b_row, depth,                  \
                     addends_at(onto, row, 0), count, width, pairs);

#define COLUMNS_OF(name, width, pairs)                                                                        \
    static void name(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_col, const float *b,   \
                     int64_t b_row, int64_t rows, int64_t depth, addends onto, upcoming *next) {              \
        int64_t row = 0;                                                                                      \
        ROWS_OF(6, width, pairs) ROWS_OF(4, width, pairs) ROWS_OF(2, width, pairs) ROWS_OF(1, width, pairs)   \
    }

COLUMNS_OF(product_wide, MOST_WIDTH, 0)
COLUMNS_OF(product_half, MOST_WIDTH / 2, 0)
COLUMNS_OF(product_narrow, 1, 0)
COLUMNS_OF(pairs_wide, MOST_WIDTH, HAS_PAIRS)
COLUMNS_OF(pairs_half, MOST_WIDTH / 2, HAS_PAIRS)
COLUMNS_OF(pairs_narrow, 1, HAS_PAIRS)

#undef COLUMNS_OF
#undef ROWS_OF

typedef void tiles(float *, int64_t, const float *, int64_t, int64_t, const float *, int64_t, int64_t, int64_t, addends,
                   upcoming *);

static tiles *const PRODUCTS[2][3] = {{product_narrow, product_half, product_wide},
                                      {pairs_narrow, pairs_half, pairs_wide}};

// Return the number of columns of the next tile when ``left`` columns remain.
static inline int64_t tile_width(int64_t left) {
    const int64_t wide = MOST_WIDTH * LANES;
    return left >= wide ? wide : left >= wide / 2 ? wide / 2 : LANES;
}

// c (rows, columns) = a b + onto. ``columns`` is a multiple of LANES. a is (rows, depth) with strides a_row and a_col,
// so it may be transposed; rows of b and c are b_row and c_row apart. With ``pairs``, ``depth`` is the number of pairs.
static void product_onto(addends onto, float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_col,
                         const float *b, int64_t b_row, int64_t rows, int64_t columns, int64_t depth, int pairs,
                         upcoming *next) {
    for (int64_t at = 0, width; at < columns; at += width) {
        width = tile_width(columns - at);
        PRODUCTS[pairs][width == MOST_WIDTH * LANES ? 2 : width > LANES](
            c + at, c_row, a, a_row, a_col, b + at, b_row, rows, depth, addends_at(onto, 0, at), next);
    }
}

// c = a b, or c += a b if ``adds``, for sums that are computed tile by tile.
static inline void product(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_col, const float *b,
                           int64_t b_row, int64_t rows, int64_t columns, int64_t depth, int adds) {
    addends onto = {adds ? c : 0, c_row, 0};
    product_onto(onto, c, c_row, a, a_row, a_col, b, b_row, rows, columns, depth, 0, 0);
}

// One stage of the transpose of LANES rows: swap blocks of ``size`` across the diagonal.
static inline __attribute__((always_inline)) void swap_blocks(vec *x, const int size) {
    for (int i = 0; i < LANES; i++) {
        if (i & size) continue;
        vec a = x[i], b = x[i + size];
        lanes_of_int low, high;
        for (int n = 0; n < LANES; n++) {
            low[n] = n & size ? n - size + LANES : n;
            high[n] = n & size ? n + LANES : n + size;
        }
        x[i] = __builtin_shuffle(a, b, low);
        x[i + size] = __builtin_shuffle(a, b, high);
    }
}

// Transpose ``from`` (rows, columns) to ``to`` (columns, rows). Both counts are multiples of LANES.
static void transpose(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < columns; j += LANES) {
            vec x[LANES];
            for (int n = 0; n < LANES; n++) x[n] = load(from + (i + n) * from_row + j);
            swap_blocks(x, 1);
            swap_blocks(x, 2);
            if (LANES > 4) swap_blocks(x, 4);
            if (LANES > 8) swap_blocks(x, 8);
            for (int n = 0; n < LANES; n++) store(to + (j + n) * to_row + i, x[n]);
        }
}
