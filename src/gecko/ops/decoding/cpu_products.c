// Products of weights in float32, bfloat16, 8 bits and 4 bits: a tile of outputs and rows at a time, with sums in registers.
#include "cpu_products.h"

enum { GROUP = 32 };  // inputs that share a scale in 4 bits
enum { TILE_ROWS = LANES == 16 ? 4 : 2 };  // rows of activations, as many as sums fit into the registers

typedef uint32_t pairs_of_halves __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef double double_of_floats __attribute__((aligned(4), may_alias));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#include "cpu_digits.h"

// GCC widens vectors of 8 bits number by number too.
static inline lanes_of_int widened_8(const int8_t *from) {
#if defined __AVX512F__
    return (lanes_of_int)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from));
#elif defined __AVX2__
    return (lanes_of_int)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from));
#else
    return __builtin_convertvector(*(const bytes *)from, lanes_of_int);
#endif
}

static inline vec load_int8(const int8_t *from) { return __builtin_convertvector(widened_8(from), vec); }

// The low or the high half of each byte, minus 8.
static inline vec load_int4(const int8_t *from, int high) {
    lanes_of_int both = widened_8(from);
    return __builtin_convertvector((high ? both >> 4 & 15 : both & 15) - 8, vec);
}

// bfloat16 weights are read two at a time, as the halves of a float's bits: the even ones, and the odd ones. They are
// multiplied with activations in the same order: of each 2 LANES, first the even ones.
static inline void separate_pairs(const float *x, int64_t inputs, float *to) {
    lanes_of_int even;
    for (int n = 0; n < LANES; n++) even[n] = 2 * n;
    for (int64_t k = 0; k < inputs; k += 2 * LANES) {
        vec first = load(x + k), second = load(x + k + LANES);
        store(to + k, __builtin_shuffle(first, second, even));
        store(to + k + LANES, __builtin_shuffle(first, second, even + 1));
    }
}

// LANES weights from ``at`` on; of bfloat16, the even or odd ones of 2 LANES.
static inline __attribute__((always_inline)) vec load_weights(const char *row, int64_t at, const weight_kind kind) {
    if (kind == INT8) return load_int8((const int8_t *)row + at);
    if (kind == FLOAT32) return load((const float *)row + at);
    const int64_t pair = at / (2 * LANES) * (2 * LANES);
    lanes_of_bits both = *(const pairs_of_halves *)((const uint16_t *)row + pair);
    return (vec)(at == pair ? both << 16 : both & 0xffff0000);
}

// sums[r][o] += the products of rows o of the weights and r of x. Everything stays in registers.
// The ``first`` pass over the weights asks memory for those that follow.
static inline __attribute__((always_inline)) void add_products(
    vec sums[TILE_ROWS][TILE_OUTPUTS], const matrix *w, const char *weight, operand in, const int outputs, const int rows,
    const weight_kind kind, const int first) {
    const int64_t bytes_of_one = kind == BFLOAT16 ? 2 : kind == INT8 ? 1 : 4;
    for (int64_t block = 0; block < w->inputs; block += 2 * LANES)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const int64_t k = block + half * LANES;
            if (first && k * bytes_of_one % LINE == 0)
                for (int o = 0; o < outputs; o++) prefetch_after(weight + o * w->row_bytes + k * bytes_of_one);
            vec right[TILE_ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) right[r] = kept(load(in.x + r * in.row + k));
#pragma GCC unroll 4
            for (int o = 0; o < outputs; o++) {
                const vec left = kept(load_weights(weight + o * w->row_bytes, k, kind));
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) sums[r][o] += left * right[r];
            }
        }
}

// The same for 4 bits: a group's bytes hold its first half in their low halves and its second in their high halves.
static inline __attribute__((always_inline)) void add_products_int4(
    vec sums[TILE_ROWS][TILE_OUTPUTS], const matrix *w, const char *weight, const float *scale, operand in,
    const int outputs, const int rows, const int first) {
    const int64_t groups = w->inputs / GROUP;
    for (int64_t g = 0; g < groups; g++)
#pragma GCC unroll 4
        for (int o = 0; o < outputs; o++) {
            const int8_t *from = (const int8_t *)weight + o * w->row_bytes + g * (GROUP / 2);
            if (first && g % (2 * LINE / GROUP) == 0) prefetch_after(from);
            vec part[TILE_ROWS] = {{0}};
            for (int high = 0; high < 2; high++)
                for (int at = 0; at < GROUP / 2; at += LANES) {
                    vec left = load_int4(from + at, high);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++)
                        part[r] += left * load(in.x + r * in.row + g * GROUP + high * (GROUP / 2) + at);
                }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][o] += part[r] * scale[o * groups + g];
        }
}

// y[r][first + o] = the sum of sums[r][o], scaled, plus the bias.
static inline __attribute__((always_inline)) void store_products(
    const matrix *w, int64_t first, operand in, float *y, int64_t y_row, vec sums[TILE_ROWS][TILE_OUTPUTS],
    const int outputs, const int rows, const weight_kind kind) {
    four scale = {1, 1, 1, 1}, bias = {0};
    if (kind == INT8) memcpy(&scale, w->scale + first, sizeof(float) * outputs);
    if (w->bias) memcpy(&bias, w->bias + first, sizeof(float) * outputs);
    float all[TILE_ROWS * TILE_OUTPUTS] __attribute__((aligned(64)));
    if (rows * outputs == LANES) store(all, sums_of(sums[0]));
    else
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) *(four *)(all + r * TILE_OUTPUTS) = sums_of_four(sums[r]);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        four sum = *(four *)(all + r * TILE_OUTPUTS);
        if (kind >= INT8 && HAS_DIGITS) sum *= unit_of_digits(in.x + r * in.row);
        if (kind == INT8) sum *= scale;
        if (w->bias) sum += bias;
        memcpy(y + r * y_row + first, &sum, sizeof(float) * outputs);
    }
}

// Outputs ``first`` to ``first + outputs`` for some rows. The ``first_pass`` over the weights prefetches.
static inline __attribute__((always_inline)) void products_tile(
    const matrix *w, int64_t first, operand in, float *y, int64_t y_row, const int outputs, const int rows,
    const weight_kind kind, const int first_pass) {
    vec sums[TILE_ROWS][TILE_OUTPUTS] = {{{0}}};
    const char *weight = w->weight + first * w->row_bytes;
    const float *scale = kind == INT4 ? w->scale + first * (w->inputs / GROUP) : 0;
    if (kind == INT4 && HAS_DIGITS) add_digits_int4(sums[0], w->inputs, w->row_bytes, weight, scale, in, outputs, rows, first_pass);
    else if (kind == INT4) add_products_int4(sums, w, weight, scale, in, outputs, rows, first_pass);
    else if (kind == INT8 && HAS_DIGITS) add_digits_int8(sums[0], w->inputs, w->row_bytes, weight, in, outputs, rows, first_pass);
    else add_products(sums, w, weight, in, outputs, rows, kind, first_pass);
    store_products(w, first, in, y, y_row, sums, outputs, rows, kind);
}

// ``many``: rows of one pass.
#define PRODUCTS_OF(name, kind, many)                                                                                 \
    static void name(const matrix *w, int64_t begin, int64_t end, operand in, int64_t rows, float *y, int64_t y_row) { \
        for (int64_t o = begin; o < end; o += TILE_OUTPUTS)                                                           \
            if (end - o >= TILE_OUTPUTS) {                                                                            \
                int64_t r = 0;                                                                                        \
                for (; r + many <= rows; r += many) TILE(o, r, TILE_OUTPUTS, many, kind);                             \
                for (; r < rows; r++) TILE(o, r, TILE_OUTPUTS, 1, kind);                                              \
            } else                                                                                                    \
                for (int64_t one = o; one < end; one++)                                                               \
                    for (int64_t r = 0; r < rows; r++) TILE(one, r, 1, 1, kind);                                      \
    }

#define TILE(o, r, outputs, rows, kind) \
    products_tile(w, o, (operand){in.x + (r) * in.row, in.row}, y + (r) * y_row, y_row, outputs, rows, kind, (r) == 0)

PRODUCTS_OF(products_float32, FLOAT32, TILE_ROWS)
PRODUCTS_OF(products_bfloat16, BFLOAT16, TILE_ROWS)
PRODUCTS_OF(products_int8, INT8, 2)
PRODUCTS_OF(products_int4, INT4, 2)

#undef PRODUCTS_OF
#undef TILE

OWN int64_t operand_row(int64_t inputs) { return inputs + DIGITS_HEAD; }

OWN operand operand_for(const matrix *w, const float *x, int64_t rows, float *room) {
    const int64_t row = operand_row(w->inputs);
    if (w->kind == FLOAT32 || (w->kind != BFLOAT16 && !HAS_DIGITS)) return (operand){x, w->inputs};
    for (int64_t r = 0; r < rows; r++)
        if (w->kind == BFLOAT16) separate_pairs(x + r * w->inputs, w->inputs, room + r * row);
        else write_digits(x + r * w->inputs, w->inputs, w->kind == INT4, room + r * row);
    return (operand){room, row};
}

OWN void products(const matrix *w, int64_t begin, int64_t end, operand in, int64_t rows, float *y, int64_t y_row) {
    switch (w->kind) {
    case FLOAT32: products_float32(w, begin, end, in, rows, y, y_row); break;
    case BFLOAT16: products_bfloat16(w, begin, end, in, rows, y, y_row); break;
    case INT8: products_int8(w, begin, end, in, rows, y, y_row); break;
    default: products_int4(w, begin, end, in, rows, y, y_row);
    }
}
