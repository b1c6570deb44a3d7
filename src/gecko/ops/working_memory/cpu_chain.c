// The chain of updates of the working memory, for the adaptive rule. The summaries w, K, V (``cpu.c``) enter one after
// the other, in the order of their slots j:
//     N_{j+1} = log(e^{N_j} + e^{w_j}),   rho_j = exp(w_j - N_{j+1}),
//     M_{j+1} = M_j + rho_j (V_j - M_j - K_j M_j).
// If the slot ``resets``, N_{j+1} = w_j and M_{j+1} = V_j.
//
// Backward; D_j is the gradient of M_j, and row sums are over elementwise products:
//     E_j = rho_j D_{j+1},   D_j = dM_j + D_{j+1} - E_j - K_j^T E_j,   dV_j = E_j,   dK_j = -E_j M_j^T,
//     g_j = rho_j drho_j = row sums of E_j (V_j - M_j - K_j M_j) = row sums of (dV V + dK K) + diagonal of dK,
//     dw_j = g_j + s (dN_{j+1} - g_j),   dN_j = (1 - s) (dN_{j+1} - g_j),   s = sigmoid(w_j - N_j).
#include "cpu_sizes.h"

enum { COLUMNS = 64 };  // columns of the memory per task

static inline vec logarithm_of(vec x) {
    for (int n = 0; n < LANES; n++) x[n] = logf(x[n]);
    return x;
}

// Compute rho, the share of w in N, and N after the last slot. rho equals the share, but is 1 if both sums are empty.
static void normalise(const sizes *a, const float *weights, const float *before, const uint8_t *resets, float *rho,
                      float *share, float *after, int64_t steps) {
    for (int64_t z = 0; z < a->keys; z += LANES) {
        vec n = load(before + z);
        for (int64_t j = 0; j < steps; j++) {
            int64_t at = j * a->keys + z;
            vec w = load(weights + at), part = every(1.0f);
            if (resets[j]) n = w;
            else {
                vec least = select_of(w > n, n, w), most = select_of(w > n, w, n);
                part = sigmoid_of(w - n);
                n = most + logarithm_of(1.0f + exp_of(least - most));
            }
            store(share + at, part);
            store(rho + at, select_of(n < -1e29f, every(1.0f), part));
        }
        store(after + z, n);
    }
}

// Copy ``width`` columns of a memory.
static void copy_columns(float *to, const float *from, const sizes *a, int64_t width) {
    for (int64_t z = 0; z < a->keys; z++) memcpy(to + z * a->values, from + z * a->values, sizeof(float) * width);
}

// to = M + rho (V - M - found), for ``width`` columns.
static void enter(const sizes *a, float *to, const float *memory, const float *found, const float *value_sum,
                  const float *rho, int64_t width) {
    for (int64_t z = 0; z < a->keys; z++)
        for (int64_t n = 0; n < width; n += LANES) {
            int64_t at = z * a->values + n;
            vec m = load(memory + at), written = load(value_sum + at) - load(found + z * COLUMNS + n);
            store(to + at, m + rho[z] * (written - m));
        }
}

static void chain_columns(const sizes *a, const float *key_sums, const float *value_sums, const float *rho,
                          const uint8_t *resets, const float *initial, float *memories, float *last, int64_t steps,
                          int64_t width, float *found) {
    int64_t matrix = a->keys * a->values, square = a->keys * a->keys;
    copy_columns(memories, initial, a, width);
    for (int64_t j = 0; j < steps; j++) {
        const float *memory = memories + j * matrix, *value_sum = value_sums + j * matrix;
        float *to = j + 1 < a->chunks ? memories + (j + 1) * matrix : last;
        if (resets[j]) copy_columns(to, value_sum, a, width);
        else {
            product(found, COLUMNS, key_sums + j * square, a->keys, 1, memory, a->values, a->keys, width, a->keys, 0);
            enter(a, to, memory, found, value_sum, rho + j * a->keys, width);
        }
    }
    if (steps < a->chunks) copy_columns(last, memories + steps * matrix, a, width);
}

// Compute M_0 to M_{chunks - 1}, the tensors saved for backward, and M and N after ``steps`` (rows) slots. Without padding
// ``steps`` is ``chunks`` or one less; after it, no memory is computed.
int64_t working_memory_chain(const float *weights, const float *key_sums, const float *value_sums, const uint8_t *resets,
                             const float *normaliser, const float *initial, float *rho, float *share, float *memories,
                             float *last_normaliser, float *last, const int64_t *steps, SIZES, int64_t threads) {
    sizes a = TAKE_SIZES;
    int64_t blocks = blocks_of(values, COLUMNS), matrix = keys * values;
    int64_t refused = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(keys * COLUMNS, &refused);
#pragma omp for schedule(static)
        for (int64_t s = 0; s < a.streams; s++) {
            int64_t kept = s * chunks * keys;
            normalise(&a, weights + slot_of(&a, s, 0) * keys, normaliser + s * keys,
                      resets + s / heads * (chunks + 1), rho + kept, share + kept, last_normaliser + s * keys,
                      steps[s / heads]);
        }
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t block = 0; block < blocks; block++) {
                if (!scratch) continue;
                int64_t at = block * COLUMNS, slot = slot_of(&a, s, 0);
                chain_columns(&a, key_sums + slot * keys * keys, value_sums + slot * matrix + at,
                              rho + s * chunks * keys, resets + s / heads * (chunks + 1), initial + s * matrix + at,
                              memories + s * chunks * matrix + at, last + s * matrix + at, steps[s / heads],
                              least(COLUMNS, values - at), scratch);
            }
        free(scratch);
    }
    return refused;
}

// Replace -D_{j+1} in ``total`` by -D_j without the term K^T E, and dM in ``grad`` by E. If the slot resets, rho is 1.
static void leave(const sizes *a, float *total, float *grad, const float *rho, int64_t width) {
    for (int64_t z = 0; z < a->keys; z++)
        for (int64_t n = 0; n < width; n += LANES) {
            float *place = grad + z * a->values + n, *sum = total + z * COLUMNS + n;
            vec later = load(sum), entered = -rho[z] * later, given = load(place);
            store(place, entered);
            store(sum, later + entered - given);
        }
}

// Run the chain backwards for some columns. ``total`` is -D, so that the product K^T E can be added to it.
static void chain_columns_backward(const sizes *a, const float *key_sums, const float *rho, const uint8_t *resets,
                                   const float *grad_last, float *grads, float *grad_initial, int64_t steps,
                                   int64_t width, float *total) {
    int64_t matrix = a->keys * a->values, square = a->keys * a->keys;
    const float *read = steps < a->chunks ? grads + steps * matrix : 0;
    for (int64_t z = 0; z < a->keys; z++)
        for (int64_t n = 0; n < width; n += LANES) {
            int64_t at = z * a->values + n;
            vec given = grad_last ? load(grad_last + at) : (vec){0};
            store(total + z * COLUMNS + n, read ? -given - load(read + at) : -given);
        }
    for (int64_t j = steps - 1; j >= 0; j--) {
        float *grad = grads + j * matrix;
        leave(a, total, grad, rho + j * a->keys, width);
        if (resets[j]) continue;
        product(total, COLUMNS, key_sums + j * square, 1, a->keys, grad, a->values, a->keys, width, a->keys, 1);
    }
    for (int64_t z = 0; z < a->keys; z++)
        for (int64_t n = 0; n < width; n += LANES)
            store(grad_initial + z * a->values + n, -load(total + z * COLUMNS + n));
}

// Compute dK of one slot from E and M, and g.
static void entering_backward(const sizes *a, const float *key_sum, const float *value_sum, const float *memory,
                              const float *entered, int reset, float *grad_key_sum, float *g, float *turned) {
    int64_t keys = a->keys, values = a->values;
    if (reset) {
        memset(grad_key_sum, 0, sizeof(float) * keys * keys);
        memset(g, 0, sizeof(float) * keys);
        return;
    }
    transpose(turned, keys, memory, values, keys, values);
    product(grad_key_sum, keys, entered, values, 1, turned, keys, keys, keys, values, 0);
    for (int64_t z = 0; z < keys; z++) {
        float *row = grad_key_sum + z * keys;
        for (int64_t n = 0; n < keys; n += LANES) store(row + n, -load(row + n));
        g[z] = dot(entered + z * values, value_sum + z * values, values) + dot(row, key_sum + z * keys, keys) + row[z];
    }
}

// Backward of the normalisers: replace g by dw, and compute the gradient of N_0.
static void normalise_backward(const sizes *a, const float *share, const float *grad_last, float *grad_weights,
                               float *grad_normaliser, int64_t steps) {
    for (int64_t z = 0; z < a->keys; z += LANES) {
        vec grad = grad_last ? load(grad_last + z) : (vec){0};
        for (int64_t j = steps - 1; j >= 0; j--) {
            float *place = grad_weights + j * a->keys + z;
            vec g = load(place), part = load(share + j * a->keys + z), rest = grad - g;
            store(place, g + part * rest);
            grad = (1.0f - part) * rest;
        }
        store(grad_normaliser + z, grad);
    }
}

// ``grads`` holds the gradients of every M that was read. In slots before ``steps``, replace them by the gradients of
// the value sums. Also fill these slots of grad_weights and grad_key_sums, and the gradients of M_0 and N_0.
int64_t working_memory_chain_backward(const float *key_sums, const float *value_sums, const float *memories,
                                      const float *rho, const float *share, const uint8_t *resets, const float *grad_last,
                                      const float *grad_last_normaliser, float *grads, float *grad_weights,
                                      float *grad_key_sums, float *grad_initial, float *grad_normaliser, int64_t steps,
                                      SIZES, int64_t threads) {
    sizes a = TAKE_SIZES;
    int64_t blocks = blocks_of(values, COLUMNS), matrix = keys * values, square = keys * keys;
    int64_t refused = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(keys * COLUMNS + matrix, &refused);
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t block = 0; block < blocks; block++) {
                if (!scratch) continue;
                int64_t at = block * COLUMNS, first = slot_of(&a, s, 0);
                chain_columns_backward(&a, key_sums + first * square, rho + s * chunks * keys,
                                       resets + s / heads * (chunks + 1), grad_last ? grad_last + s * matrix + at : 0,
                                       grads + first * matrix + at, grad_initial + s * matrix + at, steps,
                                       least(COLUMNS, values - at), scratch);
            }
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t j = 0; j < steps; j++) {
                if (!scratch) continue;
                int64_t slot = slot_of(&a, s, j);
                entering_backward(&a, key_sums + slot * square, value_sums + slot * matrix,
                                  memories + (s * chunks + j) * matrix, grads + slot * matrix,
                                  resets[s / heads * (chunks + 1) + j], grad_key_sums + slot * square,
                                  grad_weights + slot * keys, scratch);
            }
#pragma omp for schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            normalise_backward(&a, share + s * chunks * keys,
                               grad_last_normaliser ? grad_last_normaliser + s * keys : 0,
                               grad_weights + slot_of(&a, s, 0) * keys, grad_normaliser + s * keys, steps);
        free(scratch);
    }
    return refused;
}
