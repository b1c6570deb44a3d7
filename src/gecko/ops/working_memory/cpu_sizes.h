// Shared by the kernels of the working memory: the sizes of a call and the index of a slot.
#pragma once

#include "../backends/cpu_matrix.h"

// A stream is one head of one row. A call covers ``chunks`` chunks of each stream. The first chunk holds ``phase``
// tokens of earlier calls.
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
