// Products of blocks of tokens with weights that a core's cache holds. The operand in the lanes of registers (a weight,
// or what is summed over tokens) is laid out in panels as wide as a tile of the product, so that to read one is to read
// on.
#pragma once

#include "native_matrix.h"

enum {
    BLOCK = 96,   // tokens at a time
    DEPTH = 128,  // of a panel that a tile goes through, which a core's first cache holds
    GROUPS = 8,   // of blocks, at most, whose gradients of a weight one thread sums: the same on any number of threads
};

static inline int64_t groups_of(int64_t tokens) { return least(GROUPS, blocks_of(tokens, BLOCK)); }

// A matrix whose rows and columns are so far apart.
typedef struct { const float *at; int64_t row, column; } matrix;

// Panels of b (depth, columns): as many numbers.
static void lay_out(float *panels, const float *b, int64_t depth, int64_t columns) {
    for (int64_t at = 0, width; at < columns; at += width) {
        width = tile_width(columns - at);
        for (int64_t k = 0; k < depth; k++)
            for (int64_t j = 0; j < width; j += LANES)  // a call of memcpy takes longer
                store(panels + at * depth + k * width + j, load(b + k * columns + at + j));
    }
}

// Panels of b^T, for b (columns, depth).
static inline void lay_out_turned(float *panels, const float *b, int64_t depth, int64_t columns) {
    for (int64_t at = 0, width; at < columns; at += width) {
        width = tile_width(columns - at);
        transpose(panels + at * depth, width, b + at * depth, depth, width, depth);
    }
}

// The block of x (tokens, width) that begins at ``begin``; nothing beyond the last token.
static inline upcoming block_of(const float *x, int64_t begin, int64_t width, int64_t tokens) {
    int64_t end = least(begin + BLOCK, tokens);
    return begin < end ? (upcoming){x + begin * width, x + end * width, 0} : (upcoming){0};
}

// c (rows, columns) = a b + onto, for a (rows, depth) and the panels of b, while ``next`` is fetched.
static void multiply(addends onto, float *c, matrix a, const float *panels, int64_t rows, int64_t columns,
                     int64_t depth, upcoming next) {
    int64_t tiles = blocks_of(depth, DEPTH) * blocks_of(columns, MOST_WIDTH * LANES) * blocks_of(rows, MOST_ROWS);
    next.each = blocks_of(next.end - next.at, 16 * tiles) * 16;
    for (int64_t k = 0; k < depth; k += DEPTH, onto = (addends){c, columns, 0})
        for (int64_t at = 0, width; at < columns; at += width) {
            width = tile_width(columns - at);
            product_onto(addends_at(onto, 0, at), c + at, columns, a.at + k * a.column, a.row, a.column,
                         panels + at * depth + k * width, width, rows, width, least(DEPTH, depth - k), &next);
        }
}

// c (rows, columns) = a^T b, or c + a^T b where it ``adds``: for a (count, rows), of tokens, and the panels of
// b (count, columns).
static inline void multiply_over_tokens(float *c, const float *a, const float *panels, int64_t rows, int64_t columns,
                                        int64_t count, int adds, upcoming next) {
    multiply((addends){adds ? c : 0, columns, 0}, c, (matrix){a, 1, rows}, panels, rows, columns, count, next);
}

// The sum of what ``groups`` have, whose parts begin ``apart`` from one another.
static void add_parts(float *to, const float *parts, int64_t count, int64_t groups, int64_t apart, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (count * groups > ALONE)
    for (int64_t i = 0; i < count; i += LANES) {
        vec sum = load(parts + i);
        for (int64_t group = 1; group < groups; group++) sum += load(parts + group * apart + i);
        store(to + i, sum);
    }
}
