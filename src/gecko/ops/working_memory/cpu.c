// Summarise chunks and read the working memory, for the adaptive rule. The chain of updates that runs between the two
// is in ``cpu_chain.c``. phi is exp(k - w), psi is the softmax over features.
//
// Summary of chunk i of the call, in slot i + 1, over its counted tokens t (slot 0 holds the chunk before the call):
//     w = log sum of exp(k_t),   K = sum of phi_t psi(k_t)^T,   V = sum of phi_t v_t^T.
// The first chunk adds the summary w', K', V' of its tokens of earlier calls: K += a K', V += a V', a = exp(w' - w).
// Read in chunk i: out_t = psi(q_t)^T M_i, or zero if token t is not allowed to read.
//
// Backward of the read, with y = psi(q_t): dy = M_i dout_t, dM_i += y dout_t^T.
// Backward of the summaries, with r = row sums of (dK K + dV V) elementwise, the gradient of w through phi and a:
//     dk_t = phi_t (dK psi_t + dV v_t + dw - r) + softmax backward of (dK^T phi_t),   dv_t = dV^T phi_t.
//
// Counted tokens are the last ones of their chunk and allowed tokens the first ones, so counts replace masks.
#include "cpu_sizes.h"

enum { TILE = 64 };  // tokens per product

typedef struct { int64_t begin, end; } span;
typedef struct { const float *weight, *key_sum, *value_sum; } summary;

// Return the tokens of the call that are in chunk i.
static span tokens_of(const sizes *a, int64_t i) {
    int64_t begin = i * a->chunk - a->phase;
    return (span){begin < 0 ? 0 : begin, least(begin + a->chunk, a->length)};
}

static span before(span tokens, int64_t end) { return (span){tokens.begin, least(tokens.end, end)}; }

static span last_of(span tokens, int64_t count) { return (span){tokens.end - count, tokens.end}; }

static span first_of(span tokens, int64_t count) { return (span){tokens.begin, tokens.begin + count}; }

static int64_t of_chunk(const sizes *a, const int64_t *counts, int64_t stream, int64_t i) {
    return counts[stream / a->heads * a->chunks + i];
}

// Return summary ``index``, or null pointers if there are no summaries.
static summary summary_at(const sizes *a, const float *weights, const float *key_sums, const float *value_sums,
                          int64_t index) {
    if (!weights) return (summary){0, 0, 0};
    return (summary){weights + index * a->keys, key_sums + index * a->keys * a->keys,
                     value_sums + index * a->keys * a->values};
}

// Compute the softmax of each of ``count`` rows.
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

// Compute the gradient of the input of a softmax from the gradient of its output.
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

// to = exp(k - below). Add the sums over tokens to ``sums`` unless it is null.
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

// to (rows, columns) = factor[row] * from.
static void scale_rows(float *to, const float *from, const float *factor, int64_t rows, int64_t columns) {
    for (int64_t z = 0; z < rows; z++)
        for (int64_t n = 0; n < columns; n += LANES)
            store(to + z * columns + n, factor[z] * load(from + z * columns + n));
}

// Initialise the sums of a chunk: with its ``earlier`` tokens relative to ``top``, or with zero.
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

// Summarise one chunk. Sums are relative to the largest key of each feature, and are normalised at the end.
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

// Fill slots 1 to chunks of weights (streams, chunks + 1, keys), key_sums (..., keys, keys) and value_sums
// (..., keys, values). ``earlier`` is the summary of the first chunk's tokens before the call (streams, ...), or null.
int64_t working_memory_summarise(const float *k, const float *v, const int64_t *ends, const int64_t *counted,
                                 const float *earlier_weight, const float *earlier_key_sum,
                                 const float *earlier_value_sum, float *weights, float *key_sums, float *value_sums,
                                 SIZES, int64_t threads) {
    sizes a = TAKE_SIZES;
    int64_t square = keys * keys, matrix = keys * values;
    int64_t refused = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(2 * keys + 2 * TILE * keys, &refused);
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t i = 0; i < chunks; i++) {
                if (!scratch) continue;
                summary earlier = summary_at(&a, earlier_weight, earlier_key_sum, earlier_value_sum, s);
                span tokens = last_of(before(tokens_of(&a, i), ends ? ends[s / heads] : length), of_chunk(&a, counted, s, i));
                if (tokens.begin >= tokens.end) continue;
                int64_t to = slot_of(&a, s, i + 1);
                summarise_chunk(&a, k + s * length * keys, v + s * length * values, tokens,
                                i == 0 && earlier.weight ? &earlier : 0, weights + to * keys, key_sums + to * square,
                                value_sums + to * matrix, scratch);
            }
        free(scratch);
    }
    return refused;
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

int64_t working_memory_read(const float *q, const float *memories, const int64_t *allowed, float *out, SIZES,
                            int64_t threads) {
    sizes a = TAKE_SIZES;
    int64_t refused = 0;
#pragma omp parallel num_threads(threads)
    {
        float *psi = room_for(TILE * keys, &refused);
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t i = 0; i < chunks; i++) {
                if (!psi) continue;
                span all = tokens_of(&a, i), tokens = first_of(all, of_chunk(&a, allowed, s, i));
                float *to = out + s * length * values;
                read_chunk(&a, q + s * length * keys, memories + (s * chunks + i) * keys * values, tokens, to, psi);
                clear_tokens(to, tokens.end, all.end, values);
            }
        free(psi);
    }
    return refused;
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

// Compute the gradients of q and of each M, in slots 0 to chunks - 1 of ``grad_memories`` (streams, chunks + 1, keys,
// values).
int64_t working_memory_read_backward(const float *q, const float *memories, const float *grad, const int64_t *allowed,
                                     float *grad_q, float *grad_memories, SIZES, int64_t threads) {
    sizes a = TAKE_SIZES;
    int64_t matrix = keys * values;
    int64_t refused = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(matrix + 2 * TILE * keys, &refused);
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t i = 0; i < chunks; i++) {
                if (!scratch) continue;
                span all = tokens_of(&a, i), tokens = first_of(all, of_chunk(&a, allowed, s, i));
                float *to = grad_q + s * length * keys;
                read_chunk_backward(&a, q + s * length * keys, memories + (s * chunks + i) * matrix,
                                    grad + s * length * values, tokens, to, grad_memories + slot_of(&a, s, i) * matrix,
                                    scratch);
                clear_tokens(to, tokens.end, all.end, keys);
            }
        free(scratch);
    }
    return refused;
}

// to += phi (grad + level), for ``count`` tokens.
static void add_exponentials_backward(float *to, const float *phi, const float *grad, const float *level, int64_t count,
                                      int64_t width) {
    for (int64_t t = 0; t < count; t++, to += width, phi += width, grad += width)
        for (int64_t z = 0; z < width; z += LANES)
            store(to + z, load(to + z) + load(phi + z) * (load(grad + z) + load(level + z)));
}

// Compute the gradients of k and v in one chunk from the summary ``made`` and its gradient ``grad``.
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

// Compute the gradients of k and v from those of the summaries in slots before ``live``; other slots have no gradient.
int64_t working_memory_summarise_backward(const float *k, const float *v, const int64_t *counted, const float *weights,
                                          const float *key_sums, const float *value_sums, const float *grad_weights,
                                          const float *grad_key_sums, const float *grad_value_sums, float *grad_k,
                                          float *grad_v, int64_t live, SIZES, int64_t threads) {
    sizes a = TAKE_SIZES;
    int64_t refused = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(keys * keys + keys * values + keys + 4 * TILE * keys, &refused);
#pragma omp for collapse(2) schedule(static)
        for (int64_t s = 0; s < a.streams; s++)
            for (int64_t i = 0; i < chunks; i++) {
                if (!scratch) continue;
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
    return refused;
}
