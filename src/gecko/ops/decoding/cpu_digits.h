// Products of float32 activations with 8 and 4 bit weights in exact integer arithmetic, on processors with AVX-512 VNNI.
//
// Widening 8 bit weights to float32 takes longer than memory delivers them. Instead a row of activations becomes integers
// of 24 bits, in units of its largest number / LARGEST, written as three digits of 8 bits, x = 256² a + 256 b + c with
// digits from -128 to 127. An instruction multiplies 64 digits with 64 weights and adds the products to 16 sums of 32
// bits. The rounding of x to 24 bits is that of a float32 at the largest number. Sums of integers do not depend on their
// order; they become float32 once. A sum holds a million inputs.
//
// The instruction takes weights without a sign: 128 (in 4 bits, 8) is added to them, and that many times the sum of the
// digits is where the sums begin.
#pragma once

enum { DIGITS = 3 };
enum { DIGITS_HEAD = 64 };  // numbers before the digits of a row: the unit, then from 16 on where 8 bit sums begin

#define LARGEST 8300000.0f  // below 127 (256² + 256 + 1)

#if defined __AVX512VNNI__ && defined __AVX512BW__

enum { HAS_DIGITS = 1 };

static inline float unit_of_digits(const float *row) { return row[0]; }

static inline const char *digits_at(const float *row, int64_t block, int in_4_bits) {
    return (const char *)(row + DIGITS_HEAD) + block * (DIGITS + in_4_bits) * LINE;
}

// 256² a + 256 b + c.
static inline __m512i joined_digits(__m512i a, __m512i b, __m512i c) {
    return _mm512_add_epi32(c, _mm512_slli_epi32(_mm512_add_epi32(b, _mm512_slli_epi32(a, 8)), 8));
}

// The largest magnitude of x, or NaN or infinity if one of them is.
static inline float largest_of(const float *x, int64_t count) {
    vec most = {0}, broken = {0};  // y - y is zero, or NaN
    for (int64_t i = 0; i < count; i += LANES) {
        vec y = load(x + i);
        most = larger(most, _mm512_abs_ps(y)), broken += y - y;
    }
    return largest_across(most)[0] + sum_of(broken);
}

// Digits of 64 numbers, ``digit[d]`` in order, c first. In 4 bits a register of weights holds its groups' first halves before
// their second halves, so the second and third 16 numbers change places.
static inline void split_digits(const float *x, vec factor, int in_4_bits, char *to) {
    const __m512i middle = _mm512_set1_epi32(0x808080);  // digits without sign, each 128 too large
    for (int part = 0; part < 4; part++) {
        const int place = in_4_bits && (part == 1 || part == 2) ? 3 - part : part;
        __m512i all = _mm512_add_epi32(_mm512_cvtps_epi32(load(x + LANES * part) * factor), middle);
        for (int d = 0; d < DIGITS; d++) {
            __m128i digit = _mm512_cvtepi32_epi8(_mm512_srli_epi32(all, 8 * d));
            _mm_storeu_si128((void *)(to + d * LINE + place * LANES), _mm_xor_si128(digit, _mm_set1_epi8(-128)));
        }
    }
}

// The digits of a row of x. In 8 bits the sums' beginnings are in the row's head; in 4 bits they follow each 64 numbers' digits.
static void write_digits(const float *x, int64_t inputs, int in_4_bits, float *row) {
    const float largest = largest_of(x, inputs);
    const vec factor = every(LARGEST / (largest < 1e-30f ? 1e-30f : largest));
    const __m512i added = _mm512_set1_epi8(in_4_bits ? 8 : -128), zero = _mm512_setzero_si512();
    __m512i begin[DIGITS] = {zero, zero, zero};
    row[0] = (largest < 1e-30f ? 1e-30f : largest) / LARGEST;
    for (int64_t block = 0; block < inputs / LINE; block++) {
        char *to = (char *)digits_at(row, block, in_4_bits);
        split_digits(x + block * LINE, factor, in_4_bits, to);
        for (int d = 0; d < DIGITS; d++)
            begin[d] = _mm512_dpbusd_epi32(in_4_bits ? zero : begin[d], added, _mm512_loadu_si512(to + d * LINE));
        if (in_4_bits)
            _mm512_storeu_si512(to + DIGITS * LINE, _mm512_sub_epi32(zero, joined_digits(begin[2], begin[1], begin[0])));
    }
    for (int d = 0; d < DIGITS; d++) _mm512_storeu_si512(row + 16 + 16 * d, _mm512_sub_epi32(zero, begin[d]));
}

// sums (rows, 4) of each output: its products with the digits, in units of the row.
static inline __attribute__((always_inline)) void add_digits_int8(
    vec *sums, int64_t inputs, int64_t row_bytes, const char *weight, operand in, const int outputs, const int rows,
    const int first) {
    __m512i all[2][4][DIGITS];
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int o = 0; o < outputs; o++)
#pragma GCC unroll 3
            for (int d = 0; d < DIGITS; d++) all[r][o][d] = _mm512_loadu_si512(in.x + r * in.row + 16 + 16 * d);
    for (int64_t block = 0; block < inputs / LINE; block++)
#pragma GCC unroll 4
        for (int o = 0; o < outputs; o++) {
            const char *from = weight + o * row_bytes + block * LINE;
            if (first) prefetch_after(from);
            __m512i left = _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(-128));
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
                for (int d = 0; d < DIGITS; d++)
                    all[r][o][d] = _mm512_dpbusd_epi32(
                        all[r][o][d], left, _mm512_loadu_si512(digits_at(in.x + r * in.row, block, 0) + d * LINE));
        }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int o = 0; o < outputs; o++)
            sums[4 * r + o] = (vec)_mm512_cvtepi32_ps(all[r][o][2]) * 65536.0f +
                              ((vec)_mm512_cvtepi32_ps(all[r][o][1]) * 256.0f + (vec)_mm512_cvtepi32_ps(all[r][o][0]));
}

// The same for 4 bits: 64 weights are two groups, each with its scale.
static inline __attribute__((always_inline)) void add_digits_int4(
    vec *sums, int64_t inputs, int64_t row_bytes, const char *weight, const float *scale, operand in, const int outputs,
    const int rows, const int first) {
    const __m512i zero = _mm512_setzero_si512(), low = _mm512_set1_epi8(15);
    const __m512i group = _mm512_set_epi32(1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0);
    for (int64_t block = 0; block < inputs / LINE; block++)
#pragma GCC unroll 4
        for (int o = 0; o < outputs; o++) {
            const char *from = weight + o * row_bytes + block * (LINE / 2);
            if (first && block % 2 == 0) prefetch_after(from);
            const __m256i bytes = _mm256_loadu_si256((const void *)from);
            const __m512i halves = _mm512_inserti64x4(_mm512_castsi256_si512(bytes), _mm256_srli_epi16(bytes, 4), 1);
            const __m512i left = _mm512_and_si512(halves, low);
            const __m512d both = _mm512_set1_pd(*(const double_of_floats *)(scale + o * (inputs / 32) + 2 * block));
            const vec scales = _mm512_permutevar_ps((__m512)both, group);
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) {
                const char *right = digits_at(in.x + r * in.row, block, 1);
                __m512i c = _mm512_dpbusd_epi32(_mm512_loadu_si512(right + 3 * LINE), left, _mm512_loadu_si512(right));
                __m512i b = _mm512_dpbusd_epi32(zero, left, _mm512_loadu_si512(right + LINE));
                __m512i a = _mm512_dpbusd_epi32(zero, left, _mm512_loadu_si512(right + 2 * LINE));
                sums[4 * r + o] += (vec)_mm512_cvtepi32_ps(joined_digits(a, b, c)) * scales;
            }
        }
}

#else  // not called

enum { HAS_DIGITS = 0 };

static inline float unit_of_digits(const float *row) { return row[0]; }
static inline void write_digits(const float *x, int64_t inputs, int in_4_bits, float *row) {}
static inline void add_digits_int8(vec *sums, int64_t inputs, int64_t row_bytes, const char *weight, operand in,
                                   int outputs, int rows, int first) {}
static inline void add_digits_int4(vec *sums, int64_t inputs, int64_t row_bytes, const char *weight, const float *scale,
                                   operand in, int outputs, int rows, int first) {}

#endif
