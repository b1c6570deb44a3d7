// The gates in one pass each for forward and backward. They convert between (B, T, H d) of the projections and
// (B, H, T, d) of attention and memory. With s the sigmoid of x, silu(x) = x s and silu'(x) = s (1 + x (1 - s)):
//
//     by head:  y = silu(x),   dx = dy silu'(x);
//     gated:    out = attended silu(gate) + recalled,
//               dattended = dout silu(gate),   dgate = dout attended silu'(gate),   drecalled = dout.
#include "../backends/cpu.h"

typedef struct { int64_t tokens, length, heads, size; int alone; } shape;

static shape shape_of(int64_t rows, int64_t heads, int64_t length, int64_t size) {
    return (shape){rows * length, length, heads, size, rows * length * heads * size <= ALONE};
}

// Offsets of the features of a head of a token in (B, T, H d) and (B, H, T, d).
static int64_t by_token(const shape *a, int64_t token, int64_t head) { return (token * a->heads + head) * a->size; }

static int64_t by_head(const shape *a, int64_t token, int64_t head) {
    return ((token / a->length * a->heads + head) * a->length + token % a->length) * a->size;
}

static void silu(const float *x, float *y, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        int count = least(LANES, size - i);
        vec a = load_some(x + i, count);
        store_some(y + i, a * sigmoid_of(a), count);
    }
}

int64_t gates_silu_forward(const float *x, float *y, int64_t rows, int64_t heads, int64_t length, int64_t size,
                           int64_t threads) {
    shape a = shape_of(rows, heads, length, size);
#pragma omp parallel for schedule(static) num_threads(threads) if (!a.alone)
    for (int64_t token = 0; token < a.tokens; token++)
        for (int64_t head = 0; head < heads; head++)
            silu(x + by_token(&a, token, head), y + by_head(&a, token, head), size);
    return 0;
}

static void silu_gradient(const float *grad, const float *x, float *grad_x, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        int count = least(LANES, size - i);
        vec a = load_some(x + i, count);
        store_some(grad_x + i, load_some(grad + i, count) * slope_of(a, sigmoid_of(a)), count);
    }
}

int64_t gates_silu_backward(const float *grad, const float *x, float *grad_x, int64_t rows, int64_t heads, int64_t length,
                            int64_t size, int64_t threads) {
    shape a = shape_of(rows, heads, length, size);
#pragma omp parallel for schedule(static) num_threads(threads) if (!a.alone)
    for (int64_t token = 0; token < a.tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t here = by_token(&a, token, head);
            silu_gradient(grad + by_head(&a, token, head), x + here, grad_x + here, size);
        }
    return 0;
}

static void gated(const float *attended, const float *gate, const float *recalled, float *out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        int count = least(LANES, size - i);
        vec x = load_some(gate + i, count), y = load_some(attended + i, count) * (x * sigmoid_of(x));
        store_some(out + i, recalled ? y + load_some(recalled + i, count) : y, count);
    }
}

// ``recalled`` may be null, which means zeros.
int64_t gates_gated_forward(const float *attended, const float *gate, const float *recalled, float *out, int64_t rows,
                            int64_t heads, int64_t length, int64_t size, int64_t threads) {
    shape a = shape_of(rows, heads, length, size);
#pragma omp parallel for schedule(static) num_threads(threads) if (!a.alone)
    for (int64_t token = 0; token < a.tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t here = by_token(&a, token, head), there = by_head(&a, token, head);
            gated(attended + there, gate + here, recalled ? recalled + there : 0, out + here, size);
        }
    return 0;
}

static void gated_gradient(const float *grad, const float *attended, const float *gate, float *grad_attended,
                           float *grad_gate, float *grad_recalled, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        int count = least(LANES, size - i);
        vec given = load_some(grad + i, count), x = load_some(gate + i, count), s = sigmoid_of(x);
        store_some(grad_attended + i, given * (x * s), count);
        store_some(grad_gate + i, given * load_some(attended + i, count) * slope_of(x, s), count);
        if (grad_recalled) store_some(grad_recalled + i, given, count);
    }
}

// ``grad_recalled`` may be null.
int64_t gates_gated_backward(const float *grad, const float *attended, const float *gate, float *grad_attended,
                             float *grad_gate, float *grad_recalled, int64_t rows, int64_t heads, int64_t length,
                             int64_t size, int64_t threads) {
    shape a = shape_of(rows, heads, length, size);
#pragma omp parallel for schedule(static) num_threads(threads) if (!a.alone)
    for (int64_t token = 0; token < a.tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t here = by_token(&a, token, head), there = by_head(&a, token, head);
            gated_gradient(grad + here, attended + there, gate + here, grad_attended + there, grad_gate + here,
                           grad_recalled ? grad_recalled + there : 0, size);
        }
    return 0;
}
