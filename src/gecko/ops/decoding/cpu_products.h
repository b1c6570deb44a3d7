// Products of a few rows of activations with a weight matrix that is read from memory once: decoding is as fast as memory
// delivers weights. The weights stay in the order of PyTorch's layers, (outputs, inputs).
#pragma once

#include "../backends/cpu.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef enum { FLOAT32, BFLOAT16, INT8, INT4 } weight_kind;

// A weight matrix and its bias. The fields mirror ``Matrix`` in cpu.py; each is 8 bytes wide.
typedef struct {
    int64_t kind, outputs, inputs, row_bytes;  // inputs are rounded up to whole registers; the added weights are zero
    const char *weight;
    const float *scale;  // INT8: one per output; INT4: one per GROUP inputs of each output
    const float *bias;   // may be null
} matrix;

enum { TILE_OUTPUTS = 4 };  // outputs that one pass over the activations computes
enum { REGISTER = 64 };     // inputs are padded to multiples of this

enum { LINE = 64 };  // bytes that memory delivers at once

// Asks for the line that comes this many bytes later. The processor's own prefetching restarts at every page, and the
// rows of a tile are too short for it.
static inline void prefetch_after(const void *from) { __builtin_prefetch((const char *)from + 8192, 0, 2); }

typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t lanes_of_bits __attribute__((vector_size(4 * LANES)));

// Keeps a value in a register: GCC would read it again from memory for each of its uses, and loads are the limit.
static inline __attribute__((always_inline)) vec kept(vec x) {
#ifdef __AVX512F__
    __asm__("" : "+v"(x));
#endif
    return x;
}

// GCC widens vectors of 16 bits number by number, which takes longer than memory delivers them.
static inline lanes_of_int widened_16(const uint16_t *from) {
#if defined __AVX512F__
    return (lanes_of_int)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from));
#elif defined __AVX2__
    return (lanes_of_int)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
#else
    return (lanes_of_int)__builtin_convertvector(*(const halves *)from, lanes_of_bits);
#endif
}

static inline vec load_bfloat16(const uint16_t *from) { return (vec)(widened_16(from) << 16); }

// Rows of activations in the form that a kind of weights multiplies; ``row`` numbers from one to the next.
typedef struct {
    const float *x;
    int64_t row;
} operand;

#define OWN __attribute__((visibility("hidden")))  // of this library

// Numbers that a row of an operand takes at most.
OWN int64_t operand_row(int64_t inputs);

// Rows of x as ``w`` multiplies them, in ``room`` if they change. Rows of x hold ``inputs`` numbers, zeros after the layer's own inputs.
OWN operand operand_for(const matrix *w, const float *x, int64_t rows, float *room);

// y (rows, outputs begin .. end) = x wᵀ + bias.
OWN void products(const matrix *w, int64_t begin, int64_t end, operand in, int64_t rows, float *y, int64_t y_row);
