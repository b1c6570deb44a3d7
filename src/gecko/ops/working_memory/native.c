// The working memory by the adaptive rule. A call of one stream (a row's head) covers ``chunks`` chunks, the first of
// which holds ``phase`` tokens of earlier calls. phi is exp(k - w), psi the softmax over features.
//
// Summaries, of slots 0 (the chunk before the call) and i + 1 (chunk i of the call, its counted tokens t):
//     w = log sum of exp(k_t),   K = sum of phi_t psi(k_t)^T,   V = sum of phi_t v_t^T,
// the first chunk's with its earlier tokens, w', K', V', where a = exp(w' - w): K = ... + a K', V = ... + a V'.
// Chain, slot j entering as the j-th:
//     N_{j+1} = log(e^{N_j} + e^{w_j}),   rho_j = exp(w_j - N_{j+1}),
//     M_{j+1} = M_j + rho_j (V_j - M_j - K_j M_j),   or V_j, w_j where the slot ``resets``.
// Read, chunk i: out_t = psi(q_t)^T M_i, zero where it is not allowed.
//
// Backward of the read, y = psi(q_t): dy = M_i dout_t, dM_i += y dout_t^T. Of the chain, with D_j the gradient of M_j:
//     E_j = rho_j D_{j+1},   D_j = dM_j + D_{j+1} - E_j - K_j^T E_j,   dV_j = E_j,   dK_j = -E_j M_j^T,
//     g_j = rho_j drho_j = rows of E_j (V_j - M_j - K_j M_j) summed = rows of (dV V + dK K) summed + diagonal of dK,
//     dw_j = g_j + s (dN_{j+1} - g_j),   dN_j = (1 - s) (dN_{j+1} - g_j),   s = sigmoid(w_j - N_j).
// Of the summaries, r = rows of (dK K + dV V) summed, which is what w takes by phi and a:
//     dk_t = phi_t (dK psi_t + dV v_t + dw - r) + softmax backward of (dK^T phi_t),   dv_t = dV^T phi_t.
//
// Counted tokens are the last of their chunk, and allowed ones the first: no mask is read.
#include "../native_matrix.h"

enum {
    TILE = 64,     // tokens at a time
    COLUMNS = 64,  // of the memory that one task takes through the chain
};

typedef struct { int64_t rows, heads, length, keys, values, chunk, phase, chunks, streams; } sizes;
typedef struct { int64_t begin, end; } span;
typedef struct { const float *weight, *key_sum, *value_sum; } summary;

#define SIZES                                                                                       \
    int64_t rows, int64_t heads, int64_t length, int64_t keys, int64_t values, int64_t chunk, int64_t phase, \
        int64_t chunks
#define TAKE_SIZES {rows, heads, length, keys, values, chunk, phase, chunks, rows * heads}

// Tokens of the call that chunk i holds.
static span tokens_of(const sizes *a, int64_t i) {
    int64_t begin = i * a->chunk - a->phase;
    return (span){begin < 0 ? 0 : begin, least(begin + a->chunk, a->length)};
}

static span last_of(span tokens, int64_t count) { return (span){tokens.end - count, tokens.end}; }

static span first_of(span tokens, int64_t count) { return (span){tokens.begin, tokens.begin + count}; }

static int64_t of_chunk(const sizes *a, const int64_t *counts, int64_t stream, int64_t i) {
    return counts[stream / a->heads * a->chunks + i];
}

static int64_t slot_of(const sizes *a, int64_t stream, int64_t j) { return stream * (a->chunks + 1) + j; }

// One of many summaries, or of none.
static summary summary_at(const sizes *a, const float *weights, const float *key_sums, const float *value_sums,
                          int64_t index) {
    if (!weights) return (summary){0, 0, 0};
    return (summary){weights + index * a->keys, key_sums + index * a->keys * a->keys,
                     value_sums + index * a->keys * a->values};
}

static float dot(const float *a, const float *b, int64_t count) {
    vec sum = {0};
    for (int64_t n = 0; n < count; n += LANES) sum += load(a + n) * load(b + n);
    return sum_of(sum);
}

// Softmax of each of ``count`` rows.
static void softmax(float *to, const float *from, int64_t count, int64_t width) {
    for (int64_t t = 0; t < count; t++, to += width, from += width) {
        vec top = load(from), total = {0};
        for (int64_t z = LANES; z < width; z += LANES) top = larger(load(from + z), top);
        top = largest_across(top);
        for (int64_t z = 0; z < width; z += LANES) {
            vec e = exp_of(load(from + z) - top);
            store(to + z, e);
            total += e;
        }
        float factor = 1.0f / sum_of(total);
        for (int64_t z = 0; z < width; z += LANES) store(to + z, factor * load(to + z));
    }
}

// Gradient of what the softmax was taken of, from that of the softmax.
static void softmax_backward(float *to, const float *softmax, const float *grad, int64_t count, int64_t width) {
    for (int64_t t = 0; t < count; t++, to += width, softmax += width, grad += width) {
        vec total = {0};
        for (int64_t z = 0; z < width; z += LANES) total += load(softmax + z) * load(grad + z);
        total = sum_across(total);
        for (int64_t z = 0; z < width; z += LANES) store(to + z, load(softmax + z) * (load(grad + z) - total));
    }
}

static void raise_top(float *top, const float *k, int64_t count, int64_t width) {
    for (int64_t z = 0; z < width; z += LANES) {
        vec most = load(top + z);
        for (int64_t t = 0; t < count; t++) most = larger(load(k + t * width + z), most);
        store(top + z, most);
    }
}

// exp(k - below), and its sums over tokens added to ``sums``, if there are such.
static void exponentials(float *to, const float *k, const float *below, float *sums, int64_t count, int64_t width) {
    for (int64_t z = 0; z < width; z += LANES) {
        vec level = load(below + z), total = {0};
        for (int64_t t = 0; t < count; t++) {
            vec e = exp_of(load(k + t * width + z) - level);
            store(to + t * width + z, e);
            total += e;
        }
        if (sums) store(sums + z, load(sums + z) + total);
    }
}

// to (rows, columns) = factor of the row * from.
static void scale_rows(float *to, const float *from, const float *factor, int64_t rows, int64_t columns) {
    for (int64_t z = 0; z < rows; z++)
        for (int64_t n = 0; n < columns; n += LANES)
            store(to + z * columns + n, factor[z] * load(from + z * columns + n));
}

// The sums of the first chunk begin with its earlier tokens, relative to ``top``.
static void begin_sums(const sizes *a, const float *top, float *sum, const summary *earlier, float *key_sum,
                       float *value_sum) {
    if (!earlier) {
        memset(sum, 0, sizeof(float) * a->keys);
        return;
    }
    for (int64_t z = 0; z < a->keys; z += LANES) store(sum + z, exp_of(load(earlier->weight + z) - load(top + z)));
    scale_rows(key_sum, earlier->key_sum, sum, a->keys, a->keys);
    scale_rows(value_sum, earlier->value_sum, sum, a->keys, a->values);
}

// Relative to the largest key of each feature, and divided by what that leaves of w at the end.
static void summarise_chunk(const sizes *a, const float *k, const float *v, span tokens, const summary *earlier,
                            float *weight, float *key_sum, float *value_sum, float *scratch) {
    float *top = scratch, *sum = top + a->keys, *phi = sum + a->keys, *psi = phi + TILE * a->keys;
    memcpy(top, earlier ? earlier->weight : k + tokens.begin * a->keys, sizeof(float) * a->keys);
    raise_top(top, k + tokens.begin * a->keys, tokens.end - tokens.begin, a->keys);
    begin_sums(a, top, sum, earlier, key_sum, value_sum);
    for (int64_t t = tokens.begin; t < tokens.end; t += TILE) {
        int64_t count = least(TILE, tokens.end - t);
        int adds = earlier || t > tokens.begin;
        exponentials(phi, k + t * a->keys, top, sum, count, a->keys);
        softmax(psi, k + t * a->keys, count, a->keys);
        product(key_sum, a->keys, phi, 1, a->keys, psi, a->keys, a->keys, a->keys, count, adds);
        product(value_sum, a->values, phi, 1, a->keys, v + t * a->values, a->values, a->keys, a->values, count, adds);
    }
    for (int64_t z = 0; z < a->keys; z++) {
        weight[z] = top[z] + logf(sum[z]);
        sum[z] = 1.0f / sum[z];
    }
    scale_rows(key_sum, key_sum, sum, a->keys, a->keys);
    scale_rows(value_sum, value_sum, sum, a->keys, a->values);
}

// Slots 1 on of weights (streams, chunks + 1, keys), key_sums (..., keys, keys) and value_sums (..., keys, values).
// ``earlier``: of the first chunk's tokens before the call (streams, ...), or null where there are none.
void working_memory_summarise(const float *k, const float *v, const int64_t *counted, const float *earlier_weight,
                              const float *earlier_key_sum, const float *earlier_value_sum, float *weights,
                              float *key_sums, float *value_sums, SIZES, int64_t threads) {
    sizes a = TAKE_SIZES;
    int64_t square = keys * keys, matrix = keys * values;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(2 * keys + 2 * TILE * keys);
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t i = 0; i < chunks; i++) {
                summary earlier = summary_at(&a, earlier_weight, earlier_key_sum, earlier_value_sum, s);
                span tokens = last_of(tokens_of(&a, i), of_chunk(&a, counted, s, i));
                int64_t to = slot_of(&a, s, i + 1);
                summarise_chunk(&a, k + s * length * keys, v + s * length * values, tokens,
                                i == 0 && earlier.weight ? &earlier : 0, weights + to * keys, key_sums + to * square,
                                value_sums + to * matrix, scratch);
            }
        free(scratch);
    }
}

static inline vec logarithm_of(vec x) {
    for (int n = 0; n < LANES; n++) x[n] = logf(x[n]);
    return x;
}

// rho, the share of w in N (the same but for an empty sum, of which all is new), and N after the last slot.
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

// Some columns of a memory.
static void copy_columns(float *to, const float *from, const sizes *a, int64_t width) {
    for (int64_t z = 0; z < a->keys; z++) memcpy(to + z * a->values, from + z * a->values, sizeof(float) * width);
}

// M + rho (V - M - found), for ``width`` columns.
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

// M_0 to M_{chunks - 1}, what is kept for backward, and M and N after ``steps`` slots: all chunks, or all but the last.
void working_memory_chain(const float *weights, const float *key_sums, const float *value_sums, const uint8_t *resets,
                          const float *normaliser, const float *initial, float *rho, float *share, float *memories,
                          float *last_normaliser, float *last, int64_t steps, SIZES, int64_t threads) {
    sizes a = TAKE_SIZES;
    int64_t blocks = blocks_of(values, COLUMNS), matrix = keys * values;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(keys * COLUMNS);
#pragma omp for schedule(static)
        for (int64_t s = 0; s < a.streams; s++) {
            int64_t kept = s * chunks * keys;
            normalise(&a, weights + slot_of(&a, s, 0) * keys, normaliser + s * keys,
                      resets + s / heads * (chunks + 1), rho + kept, share + kept, last_normaliser + s * keys, steps);
        }
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t block = 0; block < blocks; block++) {
                int64_t at = block * COLUMNS, slot = slot_of(&a, s, 0);
                chain_columns(&a, key_sums + slot * keys * keys, value_sums + slot * matrix + at,
                              rho + s * chunks * keys, resets + s / heads * (chunks + 1), initial + s * matrix + at,
                              memories + s * chunks * matrix + at, last + s * matrix + at, steps,
                              least(COLUMNS, values - at), scratch);
            }
        free(scratch);
    }
}

static void clear_tokens(float *x, int64_t begin, int64_t end, int64_t width) {
    memset(x + begin * width, 0, sizeof(float) * (end - begin) * width);
}

static void read_chunk(const sizes *a, const float *q, const float *memory, span tokens, float *out, float *psi) {
    for (int64_t t = tokens.begin; t < tokens.end; t += TILE) {
        int64_t count = least(TILE, tokens.end - t);
        softmax(psi, q + t * a->keys, count, a->keys);
        product(out + t * a->values, a->values, psi, a->keys, 1, memory, a->values, count, a->values, a->keys, 0);
    }
}

void working_memory_read(const float *q, const float *memories, const int64_t *allowed, float *out, SIZES,
                         int64_t threads) {
    sizes a = TAKE_SIZES;
#pragma omp parallel num_threads(threads)
    {
        float *psi = room_for(TILE * keys);
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t i = 0; i < chunks; i++) {
                span all = tokens_of(&a, i), tokens = first_of(all, of_chunk(&a, allowed, s, i));
                float *to = out + s * length * values;
                read_chunk(&a, q + s * length * keys, memories + (s * chunks + i) * keys * values, tokens, to, psi);
                clear_tokens(to, tokens.end, all.end, values);
            }
        free(psi);
    }
}

static void read_chunk_backward(const sizes *a, const float *q, const float *memory, const float *grad, span tokens,
                                float *grad_q, float *grad_memory, float *scratch) {
    float *turned = scratch, *psi = turned + a->keys * a->values, *grad_psi = psi + TILE * a->keys;
    if (tokens.begin == tokens.end) memset(grad_memory, 0, sizeof(float) * a->keys * a->values);
    else transpose(turned, a->keys, memory, a->values, a->keys, a->values);
    for (int64_t t = tokens.begin; t < tokens.end; t += TILE) {
        int64_t count = least(TILE, tokens.end - t);
        const float *given = grad + t * a->values;
        softmax(psi, q + t * a->keys, count, a->keys);
        product(grad_psi, a->keys, given, a->values, 1, turned, a->keys, count, a->keys, a->values, 0);
        softmax_backward(grad_q + t * a->keys, psi, grad_psi, count, a->keys);
        product(grad_memory, a->values, psi, 1, a->keys, given, a->values, a->keys, a->values, count,
                t > tokens.begin);
    }
}

// Gradients of q and, in slots 0 to chunks - 1 of ``grad_memories`` (streams, chunks + 1, keys, values), of each M.
void working_memory_read_backward(const float *q, const float *memories, const float *grad, const int64_t *allowed,
                                  float *grad_q, float *grad_memories, SIZES, int64_t threads) {
    sizes a = TAKE_SIZES;
    int64_t matrix = keys * values;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(matrix + 2 * TILE * keys);
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t i = 0; i < chunks; i++) {
                span all = tokens_of(&a, i), tokens = first_of(all, of_chunk(&a, allowed, s, i));
                float *to = grad_q + s * length * keys;
                read_chunk_backward(&a, q + s * length * keys, memories + (s * chunks + i) * matrix,
                                    grad + s * length * values, tokens, to, grad_memories + slot_of(&a, s, i) * matrix,
                                    scratch);
                clear_tokens(to, tokens.end, all.end, keys);
            }
        free(scratch);
    }
}

// From -D_{j+1} in ``total`` to -D_j but for K^T E; dM gives its place to E. Where the slot resets, rho is 1.
static void leave(const sizes *a, float *total, float *grad, const float *rho, int64_t width) {
    for (int64_t z = 0; z < a->keys; z++)
        for (int64_t n = 0; n < width; n += LANES) {
            float *place = grad + z * a->values + n, *sum = total + z * COLUMNS + n;
            vec later = load(sum), entered = -rho[z] * later, given = load(place);
            store(place, entered);
            store(sum, later + entered - given);
        }
}

// The negative of D is kept, to which K^T E is added.
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

// dK of one slot from E and M, and g.
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

// Of the running normalisers: dw in the place of g, and the gradient of N_0.
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

// ``grads``: in, the gradients of every M that was read; out, in slots before ``steps``, those of value sums. The same
// slots of grad_weights and grad_key_sums, and the gradients of the memory and the normaliser at the beginning.
void working_memory_chain_backward(const float *key_sums, const float *value_sums, const float *memories,
                                   const float *rho, const float *share, const uint8_t *resets, const float *grad_last,
                                   const float *grad_last_normaliser, float *grads, float *grad_weights,
                                   float *grad_key_sums, float *grad_initial, float *grad_normaliser, int64_t steps,
                                   SIZES, int64_t threads) {
    sizes a = TAKE_SIZES;
    int64_t blocks = blocks_of(values, COLUMNS), matrix = keys * values, square = keys * keys;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(keys * COLUMNS + matrix);
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t block = 0; block < blocks; block++) {
                int64_t at = block * COLUMNS, first = slot_of(&a, s, 0);
                chain_columns_backward(&a, key_sums + first * square, rho + s * chunks * keys,
                                       resets + s / heads * (chunks + 1), grad_last ? grad_last + s * matrix + at : 0,
                                       grads + first * matrix + at, grad_initial + s * matrix + at, steps,
                                       least(COLUMNS, values - at), scratch);
            }
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t j = 0; j < steps; j++) {
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
}

// to += phi (grad + level), of ``count`` tokens.
static void add_exponentials_backward(float *to, const float *phi, const float *grad, const float *level, int64_t count,
                                      int64_t width) {
    for (int64_t t = 0; t < count; t++, to += width, phi += width, grad += width)
        for (int64_t z = 0; z < width; z += LANES)
            store(to + z, load(to + z) + load(phi + z) * (load(grad + z) + load(level + z)));
}

// ``made`` and ``grad``: a summary and its gradient.
static void summarise_chunk_backward(const sizes *a, const float *k, const float *v, span tokens, summary made,
                                     summary grad, float *grad_k, float *grad_v, float *scratch) {
    int64_t keys = a->keys, values = a->values;
    float *turned_keys = scratch, *turned_values = turned_keys + keys * keys, *level = turned_values + keys * values;
    float *phi = level + keys, *psi = phi + TILE * keys, *grad_phi = psi + TILE * keys;
    float *grad_psi = grad_phi + TILE * keys;
    transpose(turned_keys, keys, grad.key_sum, keys, keys, keys);
    transpose(turned_values, keys, grad.value_sum, values, keys, values);
    for (int64_t z = 0; z < keys; z++)
        level[z] = grad.weight[z] - (dot(grad.key_sum + z * keys, made.key_sum + z * keys, keys) +
                                     dot(grad.value_sum + z * values, made.value_sum + z * values, values));
    for (int64_t t = tokens.begin; t < tokens.end; t += TILE) {
        int64_t count = least(TILE, tokens.end - t);
        exponentials(phi, k + t * keys, made.weight, 0, count, keys);
        softmax(psi, k + t * keys, count, keys);
        product(grad_v + t * values, values, phi, keys, 1, grad.value_sum, values, count, values, keys, 0);
        product(grad_phi, keys, v + t * values, values, 1, turned_values, keys, count, keys, values, 0);
        product(grad_phi, keys, psi, keys, 1, turned_keys, keys, count, keys, keys, 1);
        product(grad_psi, keys, phi, keys, 1, grad.key_sum, keys, count, keys, keys, 0);
        softmax_backward(grad_k + t * keys, psi, grad_psi, count, keys);
        add_exponentials_backward(grad_k + t * keys, phi, grad_phi, level, count, keys);
    }
}

// Gradients of k and v from those of summaries in slots before ``live``; the others have none.
void working_memory_summarise_backward(const float *k, const float *v, const int64_t *counted, const float *weights,
                                       const float *key_sums, const float *value_sums, const float *grad_weights,
                                       const float *grad_key_sums, const float *grad_value_sums, float *grad_k,
                                       float *grad_v, int64_t live, SIZES, int64_t threads) {
    sizes a = TAKE_SIZES;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(keys * keys + keys * values + keys + 4 * TILE * keys);
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t i = 0; i < chunks; i++) {
                span all = tokens_of(&a, i);
                span tokens = last_of(all, i + 1 < live ? of_chunk(&a, counted, s, i) : 0);
                float *to_k = grad_k + s * length * keys, *to_v = grad_v + s * length * values;
                clear_tokens(to_k, all.begin, tokens.begin, keys);
                clear_tokens(to_v, all.begin, tokens.begin, values);
                if (tokens.begin == tokens.end) continue;
                int64_t slot = slot_of(&a, s, i + 1);
                summary made = summary_at(&a, weights, key_sums, value_sums, slot);
                summary grad = summary_at(&a, grad_weights, grad_key_sums, grad_value_sums, slot);
                summarise_chunk_backward(&a, k + s * length * keys, v + s * length * values, tokens, made, grad, to_k,
                                         to_v, scratch);
            }
        free(scratch);
    }
}
