// Attention and working memory of one token: one head of one sequence, or some columns of its values.
#pragma once

#include "cpu_network.h"

// Work memory of one head.
typedef struct {
    float *query[3];       // (key,): of attention, for keys of the own chunk, of the previous one, and for sinks
    float *memory_query;   // (key,): features of the memory's query
    float *memory_key;     // (key,): the key, then its features
    float *share;          // (key,): of the token in each sum of the current chunk
    float *normal, *key, *sink_key;  // (key,): the key as the window holds it, and as a sink
    float *scores;         // (sinks + 2c,)
} head_room;

static inline int64_t head_room_size(const network *net) {
    return 9 * padded(net->key) + padded(net->sinks + 2 * net->chunk) + 16;
}

static inline head_room head_room_at(const network *net, float *at) {
    int64_t size = padded(net->key);
    return (head_room){{at, at + size, at + 2 * size}, at + 3 * size, at + 4 * size, at + 5 * size, at + 6 * size,
                       at + 7 * size, at + 8 * size, at + 9 * size};
}

// to = z / sqrt(mean(z²) + ε), without a weight.
static void normalise_head(const float *z, float *to, int64_t size, float eps) {
    vec squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vec x = load_some(z + i, least(LANES, size - i));
        squares += x * x;
    }
    vec factor = every(1.0f / sqrtf(sum_of(squares) / size + eps));
    for (int64_t i = 0; i < size; i += LANES) {
        int count = least(LANES, size - i);
        store_some(to + i, load_some(z + i, count) * factor, count);
    }
}

static void scale_and_shift(const float *x, const float *scale, const float *shift, float *to, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        int count = least(LANES, size - i);
        store_some(to + i, load_some(x + i, count) * load_some(scale + i, count) + load_some(shift + i, count), count);
    }
}

static void rotate(const float *x, const float *phases, float *to, int64_t size) {
    for (int64_t i = 0; i < size; i += 2) {
        float a = x[i], b = x[i + 1], cosine = phases[i], sine = phases[i + 1];
        to[i] = a * cosine - b * sine, to[i + 1] = a * sine + b * cosine;
    }
}

// In place; the sum of a softmax is at least 1, as its largest term is.
static void softmax(float *x, int64_t size) {
    vec most = every(-INFINITY), sum = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        int count = least(LANES, size - i);
        vec y = every(x[i]);
        if (count == LANES) y = load(x + i);
        else memcpy(&y, x + i, sizeof(float) * count);
        most = larger(most, y);
    }
    most = largest_across(most);
    for (int64_t i = 0; i < size; i += LANES) {
        int count = least(LANES, size - i);
        vec y = exp_of(load_some(x + i, count) - most);
        store_some(x + i, y, count);
        sum += load_some(x + i, count);
    }
    vec factor = every(1.0f / sum_of(sum));
    for (int64_t i = 0; i < size; i += LANES) {
        int count = least(LANES, size - i);
        store_some(x + i, load_some(x + i, count) * factor, count);
    }
}

static inline __attribute__((always_inline)) vec load_number(const void *row, int64_t at, int count, const int bfloat16) {
    if (!bfloat16) return load_some((const float *)row + at, count);
    if (count == LANES) return load_bfloat16((const uint16_t *)row + at);
    uint16_t some[LANES] = {0};
    memcpy(some, (const uint16_t *)row + at, sizeof(uint16_t) * count);
    return load_bfloat16(some);
}

// Scores of one query with keys (count, size), four keys at a time.
static inline __attribute__((always_inline)) void score_of(
    const float *query, const char *keys, int64_t count, int64_t size, float *scores, const int bfloat16) {
    const int64_t bytes = bfloat16 ? 2 : 4;
    for (int64_t first = 0; first < count; first += 4) {
        const int here = least(4, count - first);
        vec sums[4] = {{0}};
        for (int64_t i = 0; i < size; i += LANES) {
            const int some = least(LANES, size - i);
            const vec wanted = load_some(query + i, some);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                // Where a key is missing, the first one stands in for it.
                const char *key = keys + ((first + (j < here ? j : 0)) * size + i) * bytes;
                prefetch_after(key);
                sums[j] += wanted * load_number(key, 0, some, bfloat16);
            }
        }
        const four sum = sums_of_four(sums);
        memcpy(scores + first, &sum, sizeof(float) * here);
    }
}

static __attribute__((noinline)) void score(const float *query, const char *keys, int64_t count, int64_t size,
                                            float *scores, int64_t bfloat16) {
    if (bfloat16) score_of(query, keys, count, size, scores, 1);
    else score_of(query, keys, count, size, scores, 0);
}

enum { MOST_COLUMNS = LANES == 16 ? 24 : 8 };  // registers that hold sums while all rows stream past

// to += Σ_j weights[j] rows[j], of ``vectors`` registers of columns, the last one with ``last`` numbers.
static inline __attribute__((always_inline)) void add_rows_of(
    float *to, const float *weights, const char *rows, int64_t row_bytes, int64_t count, const int vectors, const int last,
    const int bfloat16) {
    const int64_t bytes = bfloat16 ? 2 : 4;
    vec sums[MOST_COLUMNS];
#pragma GCC unroll 24
    for (int i = 0; i < vectors; i++) sums[i] = load_some(to + i * LANES, i + 1 < vectors ? LANES : last);
    for (int64_t j = 0; j < count; j++) {
        const char *row = rows + j * row_bytes;
        const vec weight = every(weights[j]);
#pragma GCC unroll 24
        for (int i = 0; i < vectors; i++) {
            if (i * LANES * bytes % LINE == 0) prefetch_after(row + i * LANES * bytes);
            sums[i] += weight * load_number(row, i * LANES, i + 1 < vectors ? LANES : last, bfloat16);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < vectors; i++) store_some(to + i * LANES, sums[i], i + 1 < vectors ? LANES : last);
}

#define ADD_ROWS_OF(name, bfloat16)                                                                                     \
    static void name(float *to, const float *weights, const char *rows, int64_t row_bytes, int64_t count,               \
                     int64_t columns) {                                                                                 \
        for (int64_t i = 0, left; left = columns - i, left > 0;) {                                                      \
            const char *from = rows + i * (bfloat16 ? 2 : 4);                                                           \
            const int vectors = left >= MOST_COLUMNS * LANES ? MOST_COLUMNS : left >= 8 * LANES ? 8 : 1;                \
            if (vectors == MOST_COLUMNS) add_rows_of(to + i, weights, from, row_bytes, count, MOST_COLUMNS, LANES, bfloat16); \
            else if (vectors == 8) add_rows_of(to + i, weights, from, row_bytes, count, 8, LANES, bfloat16);            \
            else add_rows_of(to + i, weights, from, row_bytes, count, 1, least(LANES, left), bfloat16);                 \
            i += vectors * LANES;                                                                                       \
        }                                                                                                               \
    }

ADD_ROWS_OF(add_rows_float32, 0)
ADD_ROWS_OF(add_rows_bfloat16, 1)

#undef ADD_ROWS_OF

// to (columns) += Σ_j weights[j] rows[j].
static void add_rows(float *to, const float *weights, const void *rows, int64_t row_bytes, int64_t count, int64_t columns,
                     int64_t bfloat16) {
    if (bfloat16) add_rows_bfloat16(to, weights, rows, row_bytes, count, columns);
    else add_rows_float32(to, weights, rows, row_bytes, count, columns);
}

// rows[k] (columns) of ``count`` rows: rows[k] + share[k] (x − rows[k]), or rows[k] + share[k] x.
static void blend_rows(float *rows, int64_t row, const float *share, const float *x, int64_t count, int64_t columns,
                       int replaces) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t i = 0; i < columns; i += LANES) {
            int some = least(LANES, columns - i);
            float *at = rows + k * row + i;
            vec old = load_some(at, some), new = load_some(x + i, some);
            store_some(at, old + share[k] * (replaces ? new - old : new), some);
        }
}

static uint16_t rounded_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return bits >> 16 | 64;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Numbers begin .. end of a row of the ring, ``row``, in float32 or bfloat16.
static void write_numbers(void *ring, int64_t row, range part, const float *x, int64_t bfloat16) {
    if (!bfloat16) memcpy((float *)ring + row + part.begin, x + part.begin, sizeof(float) * (part.end - part.begin));
    else
        for (int64_t i = part.begin; i < part.end; i++) ((uint16_t *)ring)[row + i] = rounded_bfloat16(x[i]);
}

// The token's place in its stream.
typedef struct {
    int64_t slot, position, chunk_start, first;  // first: first position of the window
    int64_t number, sinks;                       // tokens of the document before this one, and sinks that it sees
    int began_in_chunk, reads_memory, ends_chunk;
} place;

static inline place place_of(const network *net, const batch *b, int64_t row) {
    int64_t position = b->position[row], start = b->document_start[row], chunk = net->chunk;
    int64_t chunk_start = position - position % chunk;
    int64_t first = net->attention == SLIDING_WINDOW ? position - chunk + 1
                  : net->attention == CHUNK          ? chunk_start
                                                     : chunk_start - chunk;
    const int64_t sinks = first > start ? least(net->sinks, first - start) : 0;
    first = first > start ? first : start;
    return (place){b->slot[row], position, chunk_start, first > 0 ? first : 0, position - start, sinks,
                   start >= chunk_start, start < chunk_start - chunk, (position + 1) % chunk == 0};
}

// The state of a head in a float32 tensor with ``size`` numbers per slot and head.
static inline float *head_state(const network *net, const float *first, const place *at, int64_t head, int64_t size) {
    return (float *)state_of(net, first, at->slot, sizeof(float) * net->heads * size) + head * size;
}

// ``count`` keys or values of ``width`` numbers that a head of queries uses: those of the window, or the sinks.
static inline char *rows_of_head(const network *net, const void *of, const place *at, int64_t head, int64_t count,
                                 int64_t width, int64_t bfloat16) {
    const int64_t size = count * width * (bfloat16 ? 2 : 4);
    return (char *)state_of(net, of, at->slot, net->key_heads * size) + head / shared_by(net) * size;
}

static inline char *keys_of_head(const network *net, const layer *l, const place *at, int64_t head) {
    return rows_of_head(net, l->keys, at, head, 2 * net->chunk, net->key, net->keys_are_bfloat16);
}

static inline char *values_of_head(const network *net, const layer *l, const place *at, int64_t head) {
    return rows_of_head(net, l->values, at, head, 2 * net->chunk, net->value, net->values_are_bfloat16);
}

static inline char *sink_keys_of(const network *net, const layer *l, const place *at, int64_t head) {
    return rows_of_head(net, l->sink_keys, at, head, net->sinks, net->key, net->keys_are_bfloat16);
}

static inline char *sink_values_of(const network *net, const layer *l, const place *at, int64_t head) {
    return rows_of_head(net, l->sink_values, at, head, net->sinks, net->value, net->values_are_bfloat16);
}

static inline int previous_resets(const network *net, const layer *l, const place *at) {
    return *(uint8_t *)state_of(net, l->previous_resets, at->slot, 1);
}

// out = attention over the sinks and the visible slots; columns ``part`` of the values, of which ``v`` is the token's own.
static void attend(const network *net, const layer *l, const place *at, int64_t head, range part, const head_room *room,
                   const float *v, float *out) {
    const int64_t chunk = net->chunk, own = at->first > at->chunk_start ? at->first : at->chunk_start;
    const int64_t key_bytes = net->keys_are_bfloat16 ? 2 : 4, bytes = net->values_are_bfloat16 ? 2 : 4;
    const char *all_keys = keys_of_head(net, l, at, head), *all_values = values_of_head(net, l, at, head);
    const int64_t before = own - at->first, count = at->position + 1 - at->first;
    const int64_t columns = part.end - part.begin;
    // The token's own key and value may not be in the ring yet: another thread writes them.
    const int64_t slots[2] = {at->first % (2 * chunk), own % (2 * chunk)}, counts[2] = {before, count - before - 1};
    float *window = room->scores + at->sinks, *scores[2] = {window, window + before}, *last = window + count - 1;
    if (at->sinks)
        score(room->query[2], sink_keys_of(net, l, at, head), at->sinks, net->key, room->scores, net->keys_are_bfloat16);
    for (int half = 0; half < 2; half++) {
        const char *keys = all_keys + slots[half] * net->key * key_bytes;
        score(room->query[!half], keys, counts[half], net->key, scores[half], net->keys_are_bfloat16);
    }
    score(room->query[0], (const char *)room->key, 1, net->key, last, 0);
    softmax(room->scores, at->sinks + count);
    memset(out + part.begin, 0, sizeof(float) * columns);
    if (at->sinks)
        add_rows(out + part.begin, room->scores, sink_values_of(net, l, at, head) + part.begin * bytes,
                 net->value * bytes, at->sinks, columns, net->values_are_bfloat16);
    for (int half = 0; half < 2; half++) {
        const char *rows = all_values + (slots[half] * net->value + part.begin) * bytes;
        add_rows(out + part.begin, scores[half], rows, net->value * bytes, counts[half], columns,
                 net->values_are_bfloat16);
    }
    add_rows(out + part.begin, last, (const char *)(v + part.begin), sizeof(float) * net->value, 1, columns, 0);
}

static float elu_plus_one(float x) { return x > 0 ? x + 1 : expf(x); }

// log(e^a + e^b) = most + log(1 + t), t = e^-|a - b|. The logarithm is twice the series of the inverse hyperbolic tangent
// at t / (2 + t), which is at most a third, so eight terms are accurate to float32.
static inline vec log_sum_of(vec a, vec b) {
    const vec most = larger(a, b), t = exp_of(-larger(-a, -b) - most);
    const vec s = t / (2.0f + t), square = s * s;
    vec series = every(1.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) series = series * square + 1.0f / odd;
    return most + 2.0f * s * series;
}

// x / (x · total), and zero where nothing was accumulated.
static void divide_by_total(float *x, const float *total, int64_t size) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += x[i] * total[i];
    for (int64_t i = 0; i < size; i++) x[i] = sum == 0 ? 0 : x[i] / sum;
}

static float accumulated(const network *net, float a, float b) { return net->memory == ADAPTIVE ? log_sum_of(every(a), every(b))[0] : a + b; }

// Normaliser of all chunks up to the previous one, feature i of a head.
static float normaliser_before(const network *net, const layer *l, const place *at, int64_t head, int64_t i) {
    float previous = head_state(net, l->previous.weight, at, head, net->key)[i];
    if (previous_resets(net, l, at)) return previous;
    return accumulated(net, head_state(net, l->normaliser, at, head, net->key)[i], previous);
}

// Features of the memory's query and key, the token's share of the current chunk's sums, and their weight with the token.
static void memory_features(const network *net, const layer *l, const place *at, int64_t head, const head_room *room,
                            float *next_weight) {
    const int64_t size = net->key;
    const float *weight = head_state(net, l->current.weight, at, head, size);
    if (net->memory == ADAPTIVE) {
        for (int64_t i = 0; i < size; i += LANES) {
            const int some = least(LANES, size - i);
            const vec before = load_some(weight + i, some), own = load_some(room->memory_key + i, some);
            store_some(room->share + i, sigmoid_of(own - before), some);
            store_some(next_weight + i, log_sum_of(before, own), some);
        }
        softmax(room->memory_query, size);
        softmax(room->memory_key, size);
        return;
    }
    for (int64_t i = 0; i < size; i++) {
        room->memory_query[i] = elu_plus_one(room->memory_query[i]);
        room->share[i] = room->memory_key[i] = elu_plus_one(room->memory_key[i]);
        next_weight[i] = weight[i] + room->share[i];
        // Work memory of the token's key, which the ring holds already.
        room->key[i] = at->began_in_chunk ? 0 : normaliser_before(net, l, at, head, i);
    }
    divide_by_total(room->memory_query, head_state(net, l->normaliser, at, head, size), size);
    divide_by_total(room->memory_key, room->key, size);
}

// Adds what the query reads to ``recalled``, and the token to the current chunk's summary; columns ``part`` of the values.
static void use_memory(const network *net, const layer *l, const place *at, int64_t head, range part,
                       const head_room *room, const float *v, float *recalled) {
    const int64_t columns = part.end - part.begin, size = net->key * net->value;
    if (at->reads_memory)
        add_rows(recalled + part.begin, room->memory_query, head_state(net, l->memory, at, head, size) + part.begin,
                 sizeof(float) * net->value, net->key, columns, 0);
    blend_rows(head_state(net, l->current.value_sum, at, head, size) + part.begin, net->value, room->share,
               v + part.begin, net->key, columns, net->memory == ADAPTIVE);
    if (part.begin == 0)
        blend_rows(head_state(net, l->current.key_sum, at, head, net->key * net->key), net->key, room->share, room->memory_key, net->key, net->key,
                   net->memory == ADAPTIVE);
}

// The previous chunk enters the memory, M ← A M + B; ``old`` is work memory of (key, value).
static void enter_previous(const network *net, const layer *l, const place *at, int64_t head, float *old) {
    const int64_t key = net->key, value = net->value;
    const int resets = previous_resets(net, l, at), adaptive = net->memory == ADAPTIVE;
    const float *key_sums = head_state(net, l->previous.key_sum, at, head, key * key);
    const float *value_sums = head_state(net, l->previous.value_sum, at, head, key * value);
    const float *weight = head_state(net, l->previous.weight, at, head, key);
    float *memory = head_state(net, l->memory, at, head, key * value);
    float *normaliser = head_state(net, l->normaliser, at, head, key);
    memcpy(old, memory, sizeof(float) * key * value);
    for (int64_t k = 0; k < key; k++) {
        const float *key_sum = key_sums + k * key, *sum = value_sums + k * value;
        const float after = normaliser_before(net, l, at, head, k);
        const float rho = adaptive ? expf(weight[k] - after) : 1.0f;
        float *row = memory + k * value;
        for (int64_t i = 0; i < value; i++) row[i] = 0;
        if (!resets) add_rows(row, key_sum, old, sizeof(float) * value, key, value, 0);
        for (int64_t i = 0; i < value; i++) {
            float kept = resets ? 0 : (adaptive ? 1 - rho : 1) * old[k * value + i];
            row[i] = kept + rho * (sum[i] - row[i]);
        }
    }
    for (int64_t k = 0; k < key; k++) normaliser[k] = normaliser_before(net, l, at, head, k);
}

// The chunk is complete: the previous one enters the memory, this one becomes the previous, and an empty one begins.
static void complete_chunk(const network *net, const layer *l, const place *at, int64_t head, float *old) {
    const int64_t key = net->key, key_sum = key * key, value_sum = key * net->value;
    float *weight = head_state(net, l->current.weight, at, head, key);
    float *keys = head_state(net, l->current.key_sum, at, head, key_sum);
    float *values = head_state(net, l->current.value_sum, at, head, value_sum);
    enter_previous(net, l, at, head, old);
    memcpy(head_state(net, l->previous.weight, at, head, key), weight, sizeof(float) * key);
    memcpy(head_state(net, l->previous.key_sum, at, head, key_sum), keys, sizeof(float) * key_sum);
    memcpy(head_state(net, l->previous.value_sum, at, head, value_sum), values, sizeof(float) * value_sum);
    memset(keys, 0, sizeof(float) * key_sum);
    memset(values, 0, sizeof(float) * value_sum);
    for (int64_t k = 0; k < key; k++) weight[k] = net->memory == ADAPTIVE ? -1e30f : 0.0f;
}
