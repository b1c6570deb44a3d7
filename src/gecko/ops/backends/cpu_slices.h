// Slices for the norms. A slice is the features of one group in one step; kernels process LANES slices at a time.
#pragma once

#include "cpu.h"

// Row-major tensors. Slices are consecutive in x.
typedef struct {
    const float *x, *weight, *bias;  // (steps, groups, width); (groups, width), or null
    int64_t groups, width, count;
} slices_of_x;

static inline int lanes_at(const slices_of_x *a, int64_t c) { return least(LANES, a->width - c); }

// Return 1 + weight for LANES features of a group, starting at c.
static inline vec scale_at(const slices_of_x *a, int64_t group, int64_t c) {
    return a->weight ? 1.0f + load_some(a->weight + group * a->width + c, lanes_at(a, c)) : every(1.0f);
}

static inline vec shift_at(const slices_of_x *a, int64_t group, int64_t c) {
    return a->bias ? load_some(a->bias + group * a->width + c, lanes_at(a, c)) : (vec){0};
}

static inline vec means_of(const slices_of_x *a, int64_t first, int count) {
    vec sums[LANES] = {0};
    for (int i = 0; i < count; i++)
        for (int64_t c = 0; c < a->width; c += LANES)
            sums[i] += load_some(a->x + (first + i) * a->width + c, lanes_at(a, c));
    return sums_of(sums) / (float)a->width;
}

// Return the mean of (x - mean)^2 of each slice.
static inline vec variances_of(const slices_of_x *a, int64_t first, int count, vec means) {
    vec sums[LANES] = {0};
    for (int i = 0; i < count; i++)
        for (int64_t c = 0; c < a->width; c += LANES) {
            int lanes = lanes_at(a, c);
            vec off = load_some(a->x + (first + i) * a->width + c, lanes) - means[i];
            if (lanes < LANES) memset((float *)&off + lanes, 0, sizeof(float) * (LANES - lanes));
            sums[i] += off * off;
        }
    return sums_of(sums) / (float)a->width;
}

// Copy sums (groups, vecs per width) to (groups, width).
static inline void scatter_sums(float *to, const vec *from, const slices_of_x *a) {
    int64_t blocks = blocks_of(a->width, LANES);
    for (int64_t group = 0; group < a->groups; group++)
        for (int64_t c = 0; c < a->width; c += LANES)
            store_some(to + group * a->width + c, from[group * blocks + c / LANES], lanes_at(a, c));
}
