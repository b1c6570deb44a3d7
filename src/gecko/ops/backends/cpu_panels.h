// Products of blocks of tokens with weights that fit in a core's cache. The operand in the lanes of registers (a
// weight, or a block of tokens in a sum over tokens) is packed into panels as wide as a tile of the product, which
// reads them sequentially.
#pragma once

#include "cpu_pairs.h"

enum {
    BLOCK = 96,   // tokens per block
    DEPTH = 128,  // rows of a panel per tile: they fit in the L1 cache
    GROUPS = 8,   // maximum groups of blocks with separate weight gradients: constant, so sums do not depend on threads
};

static inline int64_t groups_of(int64_t tokens) { return least(GROUPS, blocks_of(tokens, BLOCK)); }

// An operand with strides ``row`` and ``column``. If ``pairs``, its columns are pairs.
typedef struct { const float *at; int64_t row, column; int pairs; } matrix;

// Return the number of terms of a sum: numbers, or ``pairs``.
static inline int64_t terms_of(int64_t depth, int pairs) { return pairs ? blocks_of(depth, 2) : depth; }

// Return x (rows, width) as an operand. Pairs are written to ``scratch``.
static inline matrix rows_of(const float *x, int64_t rows, int64_t width, int pairs, float *scratch) {
    if (!pairs) return (matrix){x, width, 1, 0};
    pair_along(scratch, x, rows, width);
    return (matrix){scratch, width / 2, 1, 1};
}

// Return x^T, for x (count, width), as an operand. Pairs are written to ``scratch``.
static inline matrix columns_of(const float *x, int64_t count, int64_t width, int pairs, float *scratch) {
    if (!pairs) return (matrix){x, 1, width, 0};
    pair_across(scratch, x, count, width);
    return (matrix){scratch, 1, width, 1};
}

// Pack b (depth, columns) into panels of floats or pairs.
static void lay_out(float *panels, const float *b, int64_t depth, int64_t columns, int pairs) {
    int64_t terms = terms_of(depth, pairs);
    for (int64_t at = 0, width; at < columns; at += width) {
        width = tile_width(columns - at);
        for (int64_t k = 0; k < terms; k++)
            for (int64_t j = 0; j < width; j += LANES)  // a call of memcpy takes longer
                store(panels + at * terms + k * width + j,
                      pairs ? pair_of_rows(b, k, depth, columns, at + j) : load(b + k * columns + at + j));
    }
}

// Pack b^T, for b (columns, depth), into panels. Return early if memory is refused.
static inline void lay_out_turned(float *panels, const float *b, int64_t depth, int64_t columns, int pairs,
                                  int64_t *refused) {
    float *scratch = pairs ? room_for(columns * depth / 2, refused) : 0;
    if (pairs && !scratch) return;
    matrix from = rows_of(b, columns, depth, pairs, scratch);
    for (int64_t at = 0, width; at < columns; at += width) {
        width = tile_width(columns - at);
        transpose(panels + at * from.row, width, from.at + at * from.row, from.row, width, from.row);
    }
    free(scratch);
}

// Return the block of x (tokens, width) that starts at ``begin``, for prefetching; empty after the last token.
static inline upcoming block_of(const float *x, int64_t begin, int64_t width, int64_t tokens) {
    int64_t end = least(begin + BLOCK, tokens);
    return begin < end ? (upcoming){x + begin * width, x + end * width, 0} : (upcoming){0};
}

// c (rows, columns) = a b + onto, for a (rows, depth) and the panels of b. Prefetch ``next`` meanwhile.
static void multiply(addends onto, float *c, matrix a, const float *panels, int64_t rows, int64_t columns,
                     int64_t depth, upcoming next) {
    int64_t terms = terms_of(depth, a.pairs);
    int64_t tiles = blocks_of(terms, DEPTH) * blocks_of(columns, MOST_WIDTH * LANES) * blocks_of(rows, MOST_ROWS);
    next.each = blocks_of(next.end - next.at, 16 * tiles) * 16;
    for (int64_t k = 0; k < terms; k += DEPTH, onto = (addends){c, columns, 0})
        for (int64_t at = 0, width; at < columns; at += width) {
            width = tile_width(columns - at);
            product_onto(addends_at(onto, 0, at), c + at, columns, a.at + k * a.column, a.row, a.column,
                         panels + at * terms + k * width, width, rows, width, least(DEPTH, terms - k), a.pairs, &next);
        }
}

// c (rows, columns) = a b, or c += a b if ``adds``, for a (rows, count tokens) and the panels of b.
static inline void multiply_over_tokens(float *c, matrix a, const float *panels, int64_t rows, int64_t columns,
                                        int64_t count, int adds, upcoming next) {
    multiply((addends){adds ? c : 0, columns, 0}, c, a, panels, rows, columns, count, next);
}

// Sum the parts of ``groups``, which are ``apart`` from one another.
static void add_parts(float *to, const float *parts, int64_t count, int64_t groups, int64_t apart, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (count * groups > ALONE)
    for (int64_t i = 0; i < count; i += LANES) {
        vec sum = load(parts + i);
        for (int64_t group = 1; group < groups; group++) sum += load(parts + group * apart + i);
        store(to + i, sum);
    }
}
