// Attention and working memory of one token: one head of one sequence, or some columns of its values.
#pragma once

#include "cpu_network.h"

// Work memory of one head.
typedef struct {
    float *query[2];       // (key,): of attention, for keys of the own chunk and for keys of the previous one
    float *memory_query;   // (key,): features of the memory's query
    float *memory_key;     // (key,): the key, then its features
    float *share;          // (key,): of the token in each sum of the current chunk
    float *normal, *key;   // (key,)
    float *scores;         // (2c,)
} head_room;

static inline int64_t head_room_size(const network *net) { return 7 * padded(net->key) + padded(2 * net->chunk) + 16; }

static inline head_room head_room_at(const network *net, float *at) {
    int64_t size = padded(net->key);
    return (head_room){{at, at + size}, at + 2 * size, at + 3 * size, at + 4 * size, at + 5 * size, at + 6 * size,
                       at + 7 * size};
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

// Scores of one query with keys (count, size).
static inline __attribute__((always_inline)) void score_of(
    const float *query, const char *keys, int64_t count, int64_t size, float *scores, const int bfloat16) {
    const int64_t bytes = bfloat16 ? 2 : 4;
    for (int64_t first = 0; first < count; first += LANES) {
        int64_t keys_here = least(LANES, count - first);
        vec sums[LANES];
        for (int64_t j = 0; j < LANES; j++) {
            sums[j] = (vec){0};
            if (j >= keys_here) continue;
            const char *key = keys + (first + j) * size * bytes;
            for (int64_t i = 0; i < size; i += LANES) {
                int some = least(LANES, size - i);
                prefetch_after(key + i * bytes);
                sums[j] += load_some(query + i, some) * load_number(key, i, some, bfloat16);
            }
        }
        store_some(scores + first, sums_of(sums), keys_here);
    }
}

static __attribute__((noinline)) void score(const float *query, const char *keys, int64_t count, int64_t size,
                                            float *scores, int64_t bfloat16) {
    if (bfloat16) score_of(query, keys, count, size, scores, 1);
    else score_of(query, keys, count, size, scores, 0);
}

// to (columns) += Σ_j weights[j] rows[j], four rows at a time so that they stream from memory side by side.
static inline __attribute__((always_inline)) void add_rows_of(
    float *to, const float *weights, const char *rows, int64_t row_bytes, int64_t count, int64_t columns,
    const int bfloat16) {
    for (int64_t j = 0; j < count; j += 4) {
        const char *row[4];
        vec weight[4];
        for (int n = 0; n < 4; n++) {
            int64_t real = j + n < count ? j + n : j;
            row[n] = rows + real * row_bytes, weight[n] = every(j + n < count ? weights[j + n] : 0.0f);
        }
        for (int64_t i = 0; i < columns; i += LANES) {
            int some = least(LANES, columns - i);
            vec sum = load_some(to + i, some);
            for (int n = 0; n < 4; n++) {
                prefetch_after(row[n] + i * (bfloat16 ? 2 : 4));
                sum += weight[n] * load_number(row[n], i, some, bfloat16);
            }
            store_some(to + i, sum, some);
        }
    }
}

static __attribute__((noinline)) void add_rows(float *to, const float *weights, const float *rows, int64_t row, int64_t count, int64_t columns) {
    add_rows_of(to, weights, (const char *)rows, 4 * row, count, columns, 0);
}

static __attribute__((noinline)) void add_values(float *to, const float *weights, const char *rows, int64_t row_bytes, int64_t count,
                       int64_t columns, int64_t bfloat16) {
    if (bfloat16) add_rows_of(to, weights, rows, row_bytes, count, columns, 1);
    else add_rows_of(to, weights, rows, row_bytes, count, columns, 0);
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
    int64_t slot, position, chunk_start, first;  // first: first position that attention sees
    int began_in_chunk, reads_memory, ends_chunk;
} place;

static inline place place_of(const network *net, const batch *b, int64_t row) {
    int64_t position = b->position[row], start = b->document_start[row], chunk = net->chunk;
    int64_t chunk_start = position - position % chunk;
    int64_t first = net->attention == SLIDING_WINDOW ? position - chunk + 1
                  : net->attention == CHUNK          ? chunk_start
                                                     : chunk_start - chunk;
    first = first > start ? first : start;
    return (place){b->slot[row], position, chunk_start, first > 0 ? first : 0, start >= chunk_start,
                   start < chunk_start - chunk, (position + 1) % chunk == 0};
}

// The state of a head in a float32 tensor with ``size`` numbers per slot and head.
static inline float *head_state(const network *net, const float *first, const place *at, int64_t head, int64_t size) {
    return (float *)state_of(net, first, at->slot, sizeof(float) * net->heads * size) + head * size;
}

// The attention window of a head.
static inline char *keys_of_head(const network *net, const layer *l, const place *at, int64_t head) {
    const int64_t size = 2 * net->chunk * net->key * (net->keys_are_bfloat16 ? 2 : 4);
    return (char *)state_of(net, l->keys, at->slot, net->heads * size) + head * size;
}

static inline char *values_of_head(const network *net, const layer *l, const place *at, int64_t head) {
    const int64_t size = 2 * net->chunk * net->value * (net->values_are_bfloat16 ? 2 : 4);
    return (char *)state_of(net, l->values, at->slot, net->heads * size) + head * size;
}

static inline int previous_resets(const network *net, const layer *l, const place *at) {
    return *(uint8_t *)state_of(net, l->previous_resets, at->slot, 1);
}

// out = attention over the visible slots; columns ``part`` of the values.
static void attend(const network *net, const layer *l, const place *at, int64_t head, range part, const head_room *room,
                   float *out) {
    const int64_t chunk = net->chunk, own = at->first > at->chunk_start ? at->first : at->chunk_start;
    const int64_t key_bytes = net->keys_are_bfloat16 ? 2 : 4, bytes = net->values_are_bfloat16 ? 2 : 4;
    const char *all_keys = keys_of_head(net, l, at, head), *all_values = values_of_head(net, l, at, head);
    const int64_t before = own - at->first, count = at->position + 1 - at->first;
    const int64_t slots[2] = {at->first % (2 * chunk), own % (2 * chunk)}, counts[2] = {before, count - before};
    float *scores[2] = {room->scores, room->scores + before};
    // The token's own key may not be in the ring yet: another thread writes it.
    for (int half = 0; half < 2; half++) {
        const char *keys = all_keys + slots[half] * net->key * key_bytes;
        score(room->query[!half], keys, counts[half] - half, net->key, scores[half], net->keys_are_bfloat16);
    }
    score(room->query[0], (const char *)room->key, 1, net->key, room->scores + count - 1, 0);
    softmax(room->scores, count);
    memset(out + part.begin, 0, sizeof(float) * (part.end - part.begin));
    for (int half = 0; half < 2; half++) {
        const char *rows = all_values + (slots[half] * net->value + part.begin) * bytes;
        add_values(out + part.begin, scores[half], rows, net->value * bytes, counts[half], part.end - part.begin,
                   net->values_are_bfloat16);
    }
}

static float elu_plus_one(float x) { return x > 0 ? x + 1 : expf(x); }

// x / (x · total), and zero where nothing was accumulated.
static void divide_by_total(float *x, const float *total, int64_t size) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += x[i] * total[i];
    for (int64_t i = 0; i < size; i++) x[i] = sum == 0 ? 0 : x[i] / sum;
}

static float log_sum(float a, float b) {
    float most = a > b ? a : b, least_one = a > b ? b : a;
    return most + log1pf(expf(least_one - most));
}

static float accumulated(const network *net, float a, float b) { return net->memory == ADAPTIVE ? log_sum(a, b) : a + b; }

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
        for (int64_t i = 0; i < size; i++) {
            room->share[i] = 1.0f / (1.0f + expf(weight[i] - room->memory_key[i]));
            next_weight[i] = log_sum(weight[i], room->memory_key[i]);
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
                 net->value, net->key, columns);
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
        if (!resets) add_rows(row, key_sum, old, value, key, value);
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
