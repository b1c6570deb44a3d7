// Shared by the C kernels of all operators: vectors of LANES floats, one register each, as GCC's vector types.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if defined __AVX512F__
enum { LANES = 16 };
#elif defined __AVX__
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t lanes_of_int __attribute__((vector_size(4 * LANES)));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vec load(const float *from) { return *(const unaligned *)from; }

static inline void store(float *to, vec x) { *(unaligned *)to = x; }

// Load the first ``count`` lanes; the others are zero.
static inline vec load_some(const float *from, int count) {
    if (count == LANES) return load(from);
    vec x = {0};
    memcpy(&x, from, sizeof(float) * count);
    return x;
}

static inline void store_some(float *to, vec x, int count) {
    if (count == LANES) store(to, x);
    else memcpy(to, &x, sizeof(float) * count);
}

static inline int64_t blocks_of(int64_t total, int64_t size) { return (total + size - 1) / size; }

// Allocate ``floats`` numbers, aligned to whole registers; the caller frees them. If memory is refused, return null and
// set ``refused`` to the number of bytes. Several threads may pass the same ``refused``.
static inline float *room_for(int64_t floats, int64_t *refused) {
    int64_t bytes = floats < INT64_MAX / 8 ? (blocks_of(floats, 16) + !floats) * 64 : INT64_MAX;
    float *room = bytes < INT64_MAX ? aligned_alloc(64, bytes) : 0;
    if (!room) __atomic_store_n(refused, bytes, __ATOMIC_RELAXED);
    return room;
}

// Up to this many numbers, one thread finishes before another thread would start.
enum { ALONE = 1 << 15 };

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// a where the mask is set, else b.
static inline vec select_of(lanes_of_int mask, vec a, vec b) {
    return (vec)((mask & (lanes_of_int)a) | (~mask & (lanes_of_int)b));
}

static inline vec larger(vec a, vec b) { return select_of(a > b, a, b); }

static inline vec every(float x) { return x - (vec){0}; }

// Swap lanes n and n ^ size.
static inline __attribute__((always_inline)) vec swapped(vec x, const int size) {
    lanes_of_int order;
    for (int n = 0; n < LANES; n++) order[n] = n ^ size;
    return __builtin_shuffle(x, order);
}

// The sum of all lanes, in each of them.
static inline vec sum_across(vec x) {
    if (LANES > 8) x += swapped(x, 8);
    if (LANES > 4) x += swapped(x, 4);
    x += swapped(x, 2);
    return x + swapped(x, 1);
}

static inline vec largest_across(vec x) {
    if (LANES > 8) x = larger(x, swapped(x, 8));
    if (LANES > 4) x = larger(x, swapped(x, 4));
    x = larger(x, swapped(x, 2));
    return larger(x, swapped(x, 1));
}

static inline float sum_of(vec x) { return sum_across(x)[0]; }

// Polynomial for e^r, |r| <= log(2) / 2, accurate to one unit in the last place.
static inline vec exp_near_zero(vec r) {
    vec y = every(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    return y * (r * r) + r + 1.0f;
}

// Return r of x = r + n log(2). log(2) is split into two parts, so that n times the first part is exact.
static inline vec without_powers(vec x, vec n) { return x - n * 0.693359375f + n * 2.12194440e-4f; }

#define LEAST_EXPONENT -87.33654f
#define MOST_EXPONENT 88.72283f

// exp_of returns e^x, accurate to one or two units in the last place: 0 below the smallest normal number, infinity
// above the largest, NaN for NaN. sigmoid_of returns 1 / (1 + e^-x) with the same accuracy, and 0 below about -88.
#ifdef __AVX512F__

static inline vec exp_of(vec x) {
    vec bounded = _mm512_min_ps(every(MOST_EXPONENT + 1.0f), x);  // returns x if x is NaN
    vec n = _mm512_roundscale_ps(bounded * 1.44269504f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __mmask16 normal = _mm512_cmp_ps_mask(x, every(LEAST_EXPONENT), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(normal, exp_near_zero(without_powers(bounded, n)), n);
}

// Uses an estimate of the reciprocal and one Newton step, because a division takes as long as the exponential.
static inline vec sigmoid_of(vec x) {
    __mmask16 normal = _mm512_cmp_ps_mask(x, every(-88.0f), _CMP_NLT_UQ);
    vec sum = 1.0f + exp_of(_mm512_min_ps(every(88.0f), -x)), guess = _mm512_rcp14_ps(sum);
    return _mm512_maskz_mul_ps(normal, guess, 2.0f - sum * guess);
}

#else

static inline vec exp_of(vec x) {
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    vec bounded = select_of(x > MOST_EXPONENT, every(MOST_EXPONENT), x);
    bounded = select_of(x < LEAST_EXPONENT, every(LEAST_EXPONENT), bounded);
    vec shifted = bounded * 1.44269504f + round, y = exp_near_zero(without_powers(bounded, shifted - round));
    // 2^128 is not a float, so the power is applied in two halves.
    lanes_of_int power = (lanes_of_int)shifted - (lanes_of_int)every(round), half = power >> 1;
    vec first = (vec)((half + 127) << 23), second = (vec)((power - half + 127) << 23);
    y = select_of(x < LEAST_EXPONENT, (vec){0}, y * first * second);
    return select_of(x > MOST_EXPONENT, every(INFINITY), y);
}

static inline vec sigmoid_of(vec x) { return 1.0f / (1.0f + exp_of(-x)); }

#endif

// The derivative of silu(x) = x s, where s is the sigmoid of x.
static inline vec slope_of(vec x, vec s) { return s * (1.0f + x * (1.0f - s)); }

// 1 / sqrt(x).
static inline vec inverse_root_of(vec x) {
    float lanes[LANES];
    store(lanes, x);
    for (int i = 0; i < LANES; i++) lanes[i] = sqrtf(lanes[i]);
    return 1.0f / load(lanes);
}

// Lanes n without bit ``size``: a[n] + a[n + size]. The others: b[n - size] + b[n].
static inline __attribute__((always_inline)) vec halves_added(vec a, vec b, const int size) {
    lanes_of_int low, high;
    for (int n = 0; n < LANES; n++) {
        low[n] = n & size ? n - size + LANES : n;
        high[n] = n & size ? n + LANES : n + size;
    }
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

static inline __attribute__((always_inline)) void add_halves(vec *x, const int size) {
    for (int i = 0; i < size; i++) x[i] = halves_added(x[i], x[i + size], size);
}

// Sum each of LANES vectors: lane i of the result is the sum of vector i. Steps add halves, quarters, ... of pairs.
static inline vec sums_of(const vec *from) {
    vec x[LANES];
    memcpy(x, from, sizeof x);
    if (LANES > 8) add_halves(x, 8);
    if (LANES > 4) add_halves(x, 4);
    add_halves(x, 2);
    add_halves(x, 1);
    return x[0];
}

typedef float four __attribute__((vector_size(16), aligned(4), may_alias));

// Sum each of four vectors, in the order of ``sum_of``.
static inline __attribute__((always_inline)) four sums_of_four(const vec *x) {
    vec even = halves_added(x[0], x[2], LANES / 2), odd = halves_added(x[1], x[3], LANES / 2);
    vec sums = halves_added(even, odd, LANES / 4);
    if (LANES > 8) sums += swapped(sums, 2);
    if (LANES > 4) sums += swapped(sums, 1);
    return (four){sums[0], sums[LANES / 4], sums[LANES / 2], sums[3 * LANES / 4]};
}
