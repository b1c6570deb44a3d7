// Attention over the own and the previous chunk, for one block of queries at a time. Queries are in the lanes.
//
// The window of a chunk has two chunks of slots; the keys of the previous chunk come first. For a block of queries,
//     S = K Q^T,   P = exp(S - lse) over the slots that a query sees,   O = P^T V.
// Slots are rows, so the softmax reduces over rows and needs no sum across lanes. Backward computes P again:
//     dV += P dO,   dP = V dO^T,   dS = P (dP - sum of P dP),   dK += dS Q,   dQ = dS^T K.
// Queries and keys are rotated by their place in the chunk. Keys seen from the next chunk are also rotated by -chunk.
//
// With ``pairs``, the operands of products with V and dO are rounded to bfloat16. Scores are float32.

#include "../backends/cpu_pairs.h"

enum { QUERIES = 32, GROUPS = QUERIES / LANES };

// A list is one head of one row. k, v: (lists / shared, length, .), because ``shared`` heads of queries have one head of
// keys and values; q: (lists, length - phase, key). The first chunk begins with ``phase`` keys and values of earlier
// calls; these keys are rotated. Widths are multiples of LANES.
typedef struct {
    const float *q, *k, *v;
    const float *k_before, *v_before;  // (lists / shared, chunk, .): the chunk before the call, keys rotated by their place
    const float *turns;                // (chunk + 1, 2, key): cosines and signed sines by place; the last for -chunk
    const int32_t *first;              // (lists / heads, length - phase): the first slot that a query sees
    int64_t lists, heads, shared, turned_heads, length, phase, chunk, key, value, span;
    int pairs;
    int64_t chunks, ranges;  // a range is ``span`` chunks: one task
} problem;

// Buffers of a task.
typedef struct {
    float *keys, *queries, *queries_t, *weights;          // (2 chunk, key), (QUERIES, key), its transpose, (2 chunk, QUERIES)
    float *grad_keys, *grad_queries, *grad_t, *grad_weights;  // the same, but grad_t: (value, QUERIES)
    float *values, *paired, *grad_paired;  // pairs of the values of both chunks, of weights, of the output gradient
} scratch;

typedef struct {
    int64_t begin, count;         // first query in the chunk, number of queries
    int64_t low, high;            // range of the slots that any of them sees
    lanes_of_int first[GROUPS], last[GROUPS];
} block;

typedef struct { const float *before, *own; } halves;

// Allocate the buffers of a task. If memory is refused, ``keys`` is null.
static scratch scratch_of(const problem *a, int with_gradients, int64_t *refused) {
    int64_t keys = 2 * a->chunk * a->key, queries = QUERIES * a->key, weights = 2 * a->chunk * QUERIES;
    int64_t values = a->chunk * a->value, given = QUERIES * a->value, total = keys + 2 * queries + weights;
    if (with_gradients) total += keys + queries + given + weights;
    if (a->pairs) total += values + weights / 2 + given / 2;
    float *at = room_for(total, refused);
    if (!at) return (scratch){0};
    scratch s = {at, at + keys, at + keys + queries, at + keys + 2 * queries, 0, 0, 0, 0, 0, 0, 0};
    s.values = s.weights + weights;
    if (with_gradients) {
        s.grad_keys = s.weights + weights;
        s.grad_queries = s.grad_keys + keys;
        s.grad_t = s.grad_queries + queries;
        s.grad_weights = s.grad_t + given;
        s.values = s.grad_weights + weights;
    }
    s.paired = s.values + values;
    s.grad_paired = s.paired + weights / 2;
    return s;
}

// Rotate pairs of neighbours by the angle of ``place``, or back if ``sign`` is -1. If ``add``, add to ``to``.
static void turn(float *to, const float *from, const problem *a, int64_t list, int64_t place, float sign, int add) {
    const float *cosine = a->turns + 2 * place * a->key, *sine = cosine + a->key;
    int turned = list % a->heads < a->turned_heads;
    for (int64_t j = 0; j < a->key; j += LANES) {
        vec x = load(from + j);
        vec other = x * load(cosine + j) + swapped(x, 1) * (sign * load(sine + j));
        vec y = turned ? other : x;
        store(to + j, add ? load(to + j) + y : y);
    }
}

static int64_t tokens_of(const problem *a, int64_t chunk) { return least(a->chunk, a->length - chunk * a->chunk); }

// Return how many of a chunk's tokens are of earlier calls.
static int64_t earlier(const problem *a, int64_t chunk) { return chunk ? 0 : a->phase; }

// Return the row of q and of the output for a place in a chunk.
static int64_t row_of(const problem *a, int64_t list, int64_t chunk, int64_t place) {
    return list * (a->length - a->phase) + chunk * a->chunk + place - a->phase;
}

static void turned_keys(float *to, const problem *a, int64_t list, int64_t chunk) {
    const float *from = a->k + (list / a->shared * a->length + chunk * a->chunk) * a->key;
    memcpy(to, from, sizeof(float) * earlier(a, chunk) * a->key);
    for (int64_t i = earlier(a, chunk); i < tokens_of(a, chunk); i++)
        turn(to + i * a->key, from + i * a->key, a, list, i, 1, 0);
}

// Load the keys of the chunk before the first chunk of a range into the own half of the window.
static void first_keys(float *keys, const problem *a, int64_t list, int64_t chunk) {
    float *own = keys + a->chunk * a->key;
    if (chunk) turned_keys(own, a, list, chunk - 1);
    else memcpy(own, a->k_before + list / a->shared * a->chunk * a->key, sizeof(float) * a->chunk * a->key);
}

// Move the own keys to the previous half of the window, and load the keys of ``chunk`` into the own half.
static void next_keys(float *keys, const problem *a, int64_t list, int64_t chunk) {
    float *own = keys + a->chunk * a->key;
    for (int64_t i = 0; i < a->chunk; i++) turn(keys + i * a->key, own + i * a->key, a, list, a->chunk, 1, 0);
    turned_keys(own, a, list, chunk);
}

static halves values_of(const problem *a, int64_t list, int64_t chunk) {
    const int64_t of = list / a->shared;
    const float *own = a->v + (of * a->length + chunk * a->chunk) * a->value;
    return (halves){chunk ? own - a->chunk * a->value : a->v_before + of * a->chunk * a->value, own};
}

// Make pairs of the values of both chunks: ``across`` slots, for sums over slots, else along features. Pairs of the
// previous chunk exist already, unless this chunk is the ``first`` of a range.
static void pair_values(scratch *s, const problem *a, int64_t list, int64_t chunk, int first, int across) {
    if (!a->pairs) return;
    void (*pair)(float *, const float *, int64_t, int64_t) = across ? pair_across : pair_along;
    halves v = values_of(a, list, chunk);
    int64_t half = a->chunk * a->value / 2;
    if (first) pair(s->values, v.before, a->chunk, a->value);
    else memcpy(s->values, s->values + half, sizeof(float) * half);
    pair(s->values + half, v.own, tokens_of(a, chunk), a->value);
}

static block block_of(const problem *a, int64_t list, int64_t chunk, int64_t begin) {
    block b = {begin, least(QUERIES, tokens_of(a, chunk) - begin), 2 * a->chunk, 0, {{0}}, {{0}}};
    const int32_t *first = a->first + row_of(a, list / a->heads, chunk, begin);
    b.high = a->chunk + begin + b.count;
    for (int i = 0; i < QUERIES; i++) {
        int32_t seen = first[least(i, b.count - 1)];
        b.first[i / LANES][i % LANES] = seen;
        b.last[i / LANES][i % LANES] = a->chunk + begin + least(i, b.count - 1);
        b.low = least(b.low, seen);
    }
    if (a->pairs) b.low -= b.low % 2;  // start of a pair
    return b;
}

static void load_queries(scratch *s, const problem *a, int64_t list, int64_t chunk, const block *b) {
    const float *from = a->q + row_of(a, list, chunk, b->begin) * a->key;
    for (int64_t i = 0; i < b->count; i++)
        turn(s->queries + i * a->key, from + i * a->key, a, list, b->begin + i, 1, 0);
    memset(s->queries + b->count * a->key, 0, sizeof(float) * (QUERIES - b->count) * a->key);
    transpose(s->queries_t, QUERIES, s->queries, a->key, QUERIES, a->key);
}

static void scores(scratch *s, const problem *a, const block *b) {
    product(s->weights + b->low * QUERIES, QUERIES, s->keys + b->low * a->key, a->key, 1, s->queries_t, QUERIES,
            b->high - b->low, QUERIES, a->key, 0);
}

static inline vec seen_or(const block *b, int64_t slot, int group, vec score, float otherwise) {
    lanes_of_int at = (lanes_of_int){0} + (int32_t)slot;
    return select_of((at >= b->first[group]) & (at <= b->last[group]), score, every(otherwise));
}

// Replace scores by weights, and store the log of the sum of exp of each query to ``lse`` unless it is null.
static void softmax(scratch *s, const block *b, float *lse) {
    vec most[GROUPS], sum[GROUPS];
    for (int g = 0; g < GROUPS; g++) most[g] = every(-INFINITY), sum[g] = (vec){0};
    for (int64_t j = b->low; j < b->high; j++)
        for (int g = 0; g < GROUPS; g++) {
            float *at = s->weights + j * QUERIES + g * LANES;
            vec score = seen_or(b, j, g, load(at), -INFINITY);
            store(at, score);
            most[g] = larger(most[g], score);
        }
    for (int64_t j = b->low; j < b->high; j++)
        for (int g = 0; g < GROUPS; g++) {
            float *at = s->weights + j * QUERIES + g * LANES;
            vec weight = exp_of(load(at) - most[g]);
            store(at, weight);
            sum[g] += weight;
        }
    for (int g = 0; g < GROUPS; g++) {
        vec share = 1.0f / sum[g];
        for (int64_t j = b->low; j < b->high; j++) {
            float *at = s->weights + j * QUERIES + g * LANES;
            store(at, load(at) * share);
        }
    }
    for (int i = 0; lse && i < b->count; i++) lse[i] = most[i / LANES][i % LANES] + logf(sum[i / LANES][i % LANES]);
}

// out = weights of the block times values.
static void average(scratch *s, const problem *a, const block *b, halves v, float *out) {
    int64_t low = b->low, middle = low > a->chunk ? low : a->chunk, value = a->value;
    float *weights = s->weights + low * QUERIES;
    if (a->pairs) {
        pair_across(s->paired, weights, b->high - low, QUERIES);
        product_onto((addends){0}, out, value, s->paired, 1, QUERIES, s->values + low / 2 * value, value, b->count,
                     value, blocks_of(b->high - low, 2), 1, 0);
        return;
    }
    if (low < a->chunk)
        product(out, value, weights, 1, QUERIES, v.before + low * value, value, b->count, value, a->chunk - low, 0);
    product(out, value, s->weights + middle * QUERIES, 1, QUERIES, v.own + (middle - a->chunk) * value, value,
            b->count, value, b->high - middle, low < a->chunk);
}

static void forward_block(scratch *s, const problem *a, int64_t list, int64_t chunk, const block *b, float *out,
                          float *lse) {
    int64_t at = row_of(a, list, chunk, b->begin);
    load_queries(s, a, list, chunk, b);
    scores(s, a, b);
    softmax(s, b, lse ? lse + at : 0);
    average(s, a, b, values_of(a, list, chunk), out + at * a->value);
}

static problem problem_of(const float *q, const float *k, const float *v, const float *k_before, const float *v_before,
                          const float *turns, const int32_t *first, int64_t lists, int64_t heads, int64_t shared,
                          int64_t turned_heads, int64_t length, int64_t phase, int64_t chunk, int64_t key,
                          int64_t value, int64_t span, int64_t pairs) {
    int64_t chunks = blocks_of(length, chunk);
    return (problem){q, k, v, k_before, v_before, turns, first, lists, heads, shared, turned_heads, length, phase,
                     chunk, key, value, span, pairs, chunks, blocks_of(chunks, span)};
}

// ``lse`` (lists, length) may be null.
int64_t chunk_attention_forward(const float *q, const float *k, const float *v, const float *k_before,
                                const float *v_before, const float *turns, const int32_t *first, float *out, float *lse,
                                int64_t lists, int64_t heads, int64_t shared, int64_t turned_heads, int64_t length,
                                int64_t phase, int64_t chunk, int64_t key, int64_t value, int64_t span, int64_t pairs,
                                int64_t threads) {
    problem a = problem_of(q, k, v, k_before, v_before, turns, first, lists, heads, shared, turned_heads, length, phase,
                           chunk, key, value, span, pairs);
    int64_t refused = 0;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (lists * length * value > ALONE)
    for (int64_t list = 0; list < a.lists; list++)
        for (int64_t range = 0; range < a.ranges; range++) {
            scratch s = scratch_of(&a, 0, &refused);
            if (!s.keys) continue;
            first_keys(s.keys, &a, list, range * span);
            for (int64_t u = range * span; u < least(a.chunks, (range + 1) * span); u++) {
                next_keys(s.keys, &a, list, u);
                pair_values(&s, &a, list, u, u == range * span, 1);
                for (int64_t begin = earlier(&a, u); begin < tokens_of(&a, u); begin += QUERIES) {
                    block b = block_of(&a, list, u, begin);
                    forward_block(&s, &a, list, u, &b, out, lse);
                }
            }
            free(s.keys);
        }
    return refused;
}

// Compute the weights again from the scores and the log of their sums, and normalise them: for large scores the log is
// too coarse, and if weights do not sum to 1, the gradient of scores does not sum to 0. Lanes without a query get zero
// weights, because such a lane can be half of a pair.
static void weights_again(scratch *s, const block *b, const float *lse) {
    vec less[GROUPS], sum[GROUPS] = {{0}};
    for (int i = 0; i < QUERIES; i++) {
        less[i / LANES][i % LANES] = i < b->count ? lse[i] : INFINITY;
        sum[i / LANES][i % LANES] = i >= b->count;
    }
    for (int64_t j = b->low; j < b->high; j++)
        for (int g = 0; g < GROUPS; g++) {
            float *at = s->weights + j * QUERIES + g * LANES;
            vec weight = exp_of(seen_or(b, j, g, load(at) - less[g], -INFINITY));
            store(at, weight);
            sum[g] += weight;
        }
    for (int g = 0; g < GROUPS; g++) sum[g] = 1.0f / sum[g];
    for (int64_t j = b->low; j < b->high; j++)
        for (int g = 0; g < GROUPS; g++) {
            float *at = s->weights + j * QUERIES + g * LANES;
            store(at, load(at) * sum[g]);
        }
}

// Replace the gradient of weights by the gradient of scores; ``further`` is the gradient of the log of their sums, or null.
static void softmax_backward(scratch *s, const block *b, const float *further) {
    for (int g = 0; g < GROUPS; g++) {
        float *weights = s->weights + g * LANES, *grads = s->grad_weights + g * LANES;
        vec along = {0};
        for (int i = 0; further && i < least(LANES, b->count - g * LANES); i++) along[i] = -further[g * LANES + i];
        for (int64_t j = b->low; j < b->high; j++) along += load(weights + j * QUERIES) * load(grads + j * QUERIES);
        for (int64_t j = b->low; j < b->high; j++) {
            vec given = load(grads + j * QUERIES);
            store(grads + j * QUERIES, load(weights + j * QUERIES) * (given - along));
        }
    }
}

// Transpose the output gradient of a block, so that queries are in the lanes. With pairs, also pair it across queries.
static void load_gradient(scratch *s, const problem *a, const float *grad, const block *b) {
    int64_t width = a->pairs ? a->value / 2 : a->value, whole = b->count / LANES * LANES;
    const float *from = grad;
    if (a->pairs) {
        pair_along(s->grad_paired, grad, b->count, a->value);
        from = s->grad_paired;
    }
    transpose(s->grad_t, QUERIES, from, width, whole, width);
    for (int64_t i = whole; i < QUERIES; i++)
        for (int64_t j = 0; j < width; j++) s->grad_t[j * QUERIES + i] = i < b->count ? from[i * width + j] : 0;
    if (a->pairs) pair_across(s->grad_paired, grad, b->count, a->value);
}

typedef struct { float *before, *own; } grad_halves;

// Compute the gradients of weights and values for slots ``low`` to ``high`` in one half of the window, which starts at
// slot ``half``.
static void values_backward(scratch *s, const problem *a, const float *grad, const block *b, const float *values,
                            float *grad_values, int64_t half, int64_t low, int64_t high) {
    if (low >= high) return;
    int64_t value = a->value, rows = high - low;
    float *grad_weights = s->grad_weights + low * QUERIES, *to = grad_values + (low - half) * value;
    if (a->pairs) {
        product_onto((addends){0}, grad_weights, QUERIES, s->values + low * value / 2, value / 2, 1, s->grad_t, QUERIES,
                     rows, QUERIES, value / 2, 1, 0);
        pair_along(s->paired, s->weights + low * QUERIES, rows, QUERIES);
        product_onto((addends){to, value, 0}, to, value, s->paired, QUERIES / 2, 1, s->grad_paired, value, rows, value,
                     blocks_of(b->count, 2), 1, 0);
        return;
    }
    product(grad_weights, QUERIES, values + (low - half) * value, value, 1, s->grad_t, QUERIES, rows, QUERIES, value, 0);
    product(to, value, s->weights + low * QUERIES, QUERIES, 1, grad, value, rows, value, b->count, 1);
}

static void block_backward(scratch *s, const problem *a, int64_t list, int64_t chunk, const block *b, const float *lse,
                           const float *grad, const float *grad_lse, float *grad_q, grad_halves grad_v) {
    halves v = values_of(a, list, chunk);
    int64_t at = row_of(a, list, chunk, b->begin), count = b->high - b->low;
    const float *given = grad + at * a->value;
    load_queries(s, a, list, chunk, b);
    scores(s, a, b);
    weights_again(s, b, lse + at);
    load_gradient(s, a, given, b);
    values_backward(s, a, given, b, v.before, grad_v.before, 0, b->low, least(b->high, a->chunk));
    values_backward(s, a, given, b, v.own, grad_v.own, a->chunk, b->low > a->chunk ? b->low : a->chunk, b->high);
    softmax_backward(s, b, grad_lse ? grad_lse + at : 0);
    product(s->grad_keys + b->low * a->key, a->key, s->grad_weights + b->low * QUERIES, QUERIES, 1, s->queries, a->key,
            count, a->key, b->count, 1);
    product(s->grad_queries, a->key, s->grad_weights + b->low * QUERIES, 1, QUERIES, s->keys + b->low * a->key, a->key,
            b->count, a->key, count, 0);
    for (int64_t i = 0; i < b->count; i++)
        turn(grad_q + (at + i) * a->key, s->grad_queries + i * a->key, a, list, b->begin + i, -1, 0);
}

// Rotate the key gradients of a window back. Store those of the own chunk, and add those of the previous chunk.
static void keys_backward(scratch *s, const problem *a, int64_t list, int64_t chunk, grad_halves to) {
    float *own = s->grad_keys + a->chunk * a->key;
    for (int64_t i = 0; i < tokens_of(a, chunk); i++)
        turn(to.own + i * a->key, own + i * a->key, a, list, i, -1, 0);
    for (int64_t i = 0; i < a->chunk; i++) {
        float *row = s->grad_keys + i * a->key;
        turn(row, row, a, list, a->chunk, -1, 0);
        if (chunk) turn(to.before + i * a->key, row, a, list, i, -1, 1);
        else memcpy(to.before + i * a->key, row, sizeof(float) * a->key);
    }
}

typedef struct { float *q, *k, *v, *k_before, *v_before; } gradients;

static void range_backward(const problem *a, const float *lse, const float *grad, const float *grad_lse, gradients to,
                           int64_t list, int64_t range, int64_t *refused) {
    scratch s = scratch_of(a, 1, refused);
    if (!s.keys) return;
    int64_t begin = range * a->span, border = (list * a->ranges + range) * a->chunk;
    // Gradients of the chunk before the range go to separate buffers, which the caller adds at the end.
    grad_halves k = {to.k_before + border * a->key, 0}, v = {to.v_before + border * a->value, 0};
    memset(k.before, 0, sizeof(float) * a->chunk * a->key);
    memset(v.before, 0, sizeof(float) * a->chunk * a->value);
    first_keys(s.keys, a, list, begin);
    for (int64_t u = begin; u < least(a->chunks, begin + a->span); u++) {
        int64_t at = list * a->length + u * a->chunk;
        k.own = to.k + at * a->key, v.own = to.v + at * a->value;
        next_keys(s.keys, a, list, u);
        pair_values(&s, a, list, u, u == begin, 0);
        memset(s.grad_keys, 0, sizeof(float) * 2 * a->chunk * a->key);
        memset(v.own, 0, sizeof(float) * tokens_of(a, u) * a->value);
        for (int64_t first = 0; first < tokens_of(a, u); first += QUERIES) {
            block b = block_of(a, list, u, first);
            block_backward(&s, a, list, u, &b, lse, grad, grad_lse, to.q, v);
        }
        keys_backward(&s, a, list, u, k);
        k.before = k.own, v.before = v.own;
    }
    free(s.keys);
}

static void add_to(float *to, const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

// ``grad_lse`` may be null, and ``phase`` is 0. grad_k, grad_v: (lists, length, .), a gradient for each head of queries.
// grad_k_before, grad_v_before: (lists, ranges, chunk, .); range 0 has the gradients of the chunk before the call.
int64_t chunk_attention_backward(const float *q, const float *k, const float *v, const float *k_before,
                                 const float *v_before, const float *turns, const int32_t *first, const float *lse,
                                 const float *grad, const float *grad_lse, float *grad_q, float *grad_k, float *grad_v,
                                 float *grad_k_before, float *grad_v_before, int64_t lists, int64_t heads,
                                 int64_t shared, int64_t turned_heads, int64_t length, int64_t phase, int64_t chunk,
                                 int64_t key, int64_t value, int64_t span, int64_t pairs, int64_t threads) {
    problem a = problem_of(q, k, v, k_before, v_before, turns, first, lists, heads, shared, turned_heads, length, phase,
                           chunk, key, value, span, pairs);
    gradients to = {grad_q, grad_k, grad_v, grad_k_before, grad_v_before};
    int64_t refused = 0;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (lists * length * value > ALONE)
    for (int64_t list = 0; list < a.lists; list++)
        for (int64_t range = 0; range < a.ranges; range++)
            range_backward(&a, lse, grad, grad_lse, to, list, range, &refused);
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (lists * length * value > ALONE)
    for (int64_t list = 0; list < a.lists; list++)
        for (int64_t range = 1; range < a.ranges; range++) {
            int64_t border = (list * a.ranges + range) * chunk, at = list * length + (range * span - 1) * chunk;
            add_to(grad_k + at * key, grad_k_before + border * key, chunk * key);
            add_to(grad_v + at * value, grad_v_before + border * value, chunk * value);
        }
    return refused;
}
