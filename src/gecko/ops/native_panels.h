// Products of blocks of tokens with weights that a core's cache holds. The operand in the lanes of registers (a weight,
// or what is summed over tokens) is laid out in panels as wide as a tile of the product, so that to read one is to read
// on.
#pragma once

#include "native_matrix.h"

#include <stdlib.h>

enum {
    BLOCK = 96,   // tokens at a time
    DEPTH = 128,  // of a panel that a tile goes through, which a core's first cache holds
};

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

// c (rows, columns) = a b + onto, for a (rows, depth) and the panels of b.
static void multiply(addends onto, float *c, matrix a, const float *panels, int64_t rows, int64_t columns,
                     int64_t depth) {
    for (int64_t k = 0; k < depth; k += DEPTH, onto = (addends){c, columns, 0})
        for (int64_t at = 0, width; at < columns; at += width) {
            width = tile_width(columns - at);
            product_onto(addends_at(onto, 0, at), c + at, columns, a.at + k * a.column, a.row, a.column,
                         panels + at * depth + k * width, width, rows, width, least(DEPTH, depth - k));
        }
}

// c (rows, columns) = a^T b, or c + a^T b where it ``adds``: for a (count, rows), of tokens, and the panels of b (count,
// columns).
static inline void multiply_over_tokens(float *c, const float *a, const float *panels, int64_t rows, int64_t columns,
                                        int64_t count, int adds) {
    multiply((addends){adds ? c : 0, columns, 0}, c, (matrix){a, 1, rows}, panels, rows, columns, count);
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
