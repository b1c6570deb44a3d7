// SwiGLU in one pass each for forward and backward. With s the sigmoid of a:
//
//     y = a s b,   da = dy b s (1 + a (1 - s)),   db = dy a s.
#include "../backends/cpu.h"

int64_t swiglu_forward(const float *a, const float *b, float *y, int64_t total, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (total > ALONE)
    for (int64_t i = 0; i < total; i += LANES) {
        int count = least(LANES, total - i);
        vec x = load_some(a + i, count);
        store_some(y + i, x * sigmoid_of(x) * load_some(b + i, count), count);
    }
    return 0;
}

int64_t swiglu_backward(const float *grad, const float *a, const float *b, float *grad_a, float *grad_b, int64_t total,
                        int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (total > ALONE)
    for (int64_t i = 0; i < total; i += LANES) {
        int count = least(LANES, total - i);
        vec x = load_some(a + i, count), given = load_some(grad + i, count), s = sigmoid_of(x);
        store_some(grad_a + i, given * load_some(b + i, count) * slope_of(x, s), count);
        store_some(grad_b + i, given * (x * s), count);
    }
    return 0;
}
