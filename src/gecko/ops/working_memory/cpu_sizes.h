// What the working memory's kernels share: the sizes of a call, and the places of slots.
#pragma once

#include "../backends/cpu_matrix.h"

// A call of one stream (a row's head) covers ``chunks`` chunks, the first of which holds ``phase`` tokens of earlier
// calls.
typedef struct { int64_t rows, heads, length, keys, values, chunk, phase, chunks, streams; } sizes;

#define SIZES                                                                                       \
    int64_t rows, int64_t heads, int64_t length, int64_t keys, int64_t values, int64_t chunk, int64_t phase, \
        int64_t chunks
#define TAKE_SIZES {rows, heads, length, keys, values, chunk, phase, chunks, rows * heads}

static inline int64_t slot_of(const sizes *a, int64_t stream, int64_t j) { return stream * (a->chunks + 1) + j; }

static inline float dot(const float *a, const float *b, int64_t count) {
    vec sum = {0};
    for (int64_t n = 0; n < count; n += LANES) sum += load(a + n) * load(b + n);
    return sum_of(sum);
}
