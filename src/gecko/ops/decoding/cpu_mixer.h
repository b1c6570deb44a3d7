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

// Scores of one query with keys (count, size).
static void score(const float *query, const float *keys, int64_t count, int64_t size, float *scores) {
    for (int64_t first = 0; first < count; first += LANES) {
        int64_t keys_here = least(LANES, count - first);
        vec sums[LANES];
        for (int64_t j = 0; j < LANES; j++) {
            sums[j] = (vec){0};
            if (j >= keys_here) continue;
            const float *key = keys + (first + j) * size;
            int64_t i = 0;
            for (; i + LANES <= size; i += LANES) sums[j] += load(query + i) * load(key + i);
            if (i < size) sums[j] += load_some(query + i, size - i) * load_some(key + i, size - i);
        }
        store_some(scores + first, sums_of(sums), keys_here);
    }
}

static inline __attribute__((always_inline)) vec load_value(const void *row, int64_t at, int count, const int bfloat16) {
    if (!bfloat16) return load_some((const float *)row + at, count);
    if (count == LANES) return load_bfloat16((const uint16_t *)row + at);
    uint16_t some[LANES] = {0};
    memcpy(some, (const uint16_t *)row + at, sizeof(uint16_t) * count);
    return load_bfloat16(some);
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
            for (int n = 0; n < 4; n++) sum += weight[n] * load_value(row[n], i, some, bfloat16);
            store_some(to + i, sum, some);
        }
    }
}

static void add_rows(float *to, const float *weights, const float *rows, int64_t row, int64_t count, int64_t columns) {
    add_rows_of(to, weights, (const char *)rows, 4 * row, count, columns, 0);
}

static void add_values(float *to, const float *weights, const char *rows, int64_t row_bytes, int64_t count,
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

// out = attention over the visible slots; columns ``part`` of the values.
static void attend(const network *net, const layer *l, const place *at, int64_t head, range part, const head_room *room,
                   float *out) {
    const int64_t chunk = net->chunk, ring = (at->slot * net->heads + head) * 2 * chunk;
    const int64_t bytes = net->values_are_bfloat16 ? 2 : 4, own = at->first > at->chunk_start ? at->first : at->chunk_start;
    const int64_t before = own - at->first, count = at->position + 1 - at->first;
    const int64_t slots[2] = {at->first % (2 * chunk), own % (2 * chunk)}, counts[2] = {before, count - before};
    float *scores[2] = {room->scores, room->scores + before};
    // The token's own key may not be in the ring yet: another thread writes it.
    score(room->query[1], l->keys + (ring + slots[0]) * net->key, before, net->key, scores[0]);
    score(room->query[0], l->keys + (ring + slots[1]) * net->key, counts[1] - 1, net->key, scores[1]);
    score(room->query[0], room->key, 1, net->key, room->scores + count - 1);
    softmax(room->scores, count);
    memset(out + part.begin, 0, sizeof(float) * (part.end - part.begin));
    for (int half = 0; half < 2; half++) {
        const char *rows = (const char *)l->values + ((ring + slots[half]) * net->value + part.begin) * bytes;
        add_values(out + part.begin, scores[half], rows, net->value * bytes, counts[half], part.end - part.begin,
                   net->values_are_bfloat16);
    }
}

static void write_values(const network *net, const layer *l, const place *at, int64_t head, range part, const float *v) {
    int64_t to = ((at->slot * net->heads + head) * 2 * net->chunk + at->position % (2 * net->chunk)) * net->value;
    if (!net->values_are_bfloat16)
        memcpy((float *)l->values + to + part.begin, v + part.begin, sizeof(float) * (part.end - part.begin));
    else
        for (int64_t i = part.begin; i < part.end; i++) ((uint16_t *)l->values)[to + i] = rounded_bfloat16(v[i]);
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

// Normaliser of all chunks up to the previous one, feature i.
static float normaliser_before(const network *net, const layer *l, const place *at, int64_t feature) {
    float previous = l->previous.weight[feature];
    return l->previous_resets[at->slot] ? previous : accumulated(net, l->normaliser[feature], previous);
}

// Features of the memory's query and key, the token's share of the current chunk's sums, and their weight with the token.
static void memory_features(const network *net, const layer *l, const place *at, int64_t head, const head_room *room,
                            float *next_weight) {
    const int64_t size = net->key, first = (at->slot * net->heads + head) * size;
    const float *weight = l->current.weight + first;
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
        room->key[i] = at->began_in_chunk ? 0 : normaliser_before(net, l, at, first + i);
    }
    divide_by_total(room->memory_query, l->normaliser + first, size);
    divide_by_total(room->memory_key, room->key, size);
}

// Adds what the query reads to ``recalled``, and the token to the current chunk's summary; columns ``part`` of the values.
static void use_memory(const network *net, const layer *l, const place *at, int64_t head, range part,
                       const head_room *room, const float *v, float *recalled) {
    const int64_t rows = (at->slot * net->heads + head) * net->key, columns = part.end - part.begin;
    if (at->reads_memory)
        add_rows(recalled + part.begin, room->memory_query, l->memory + rows * net->value + part.begin, net->value,
                 net->key, columns);
    blend_rows(l->current.value_sum + rows * net->value + part.begin, net->value, room->share, v + part.begin, net->key,
               columns, net->memory == ADAPTIVE);
    if (part.begin == 0)
        blend_rows(l->current.key_sum + rows * net->key, net->key, room->share, room->memory_key, net->key, net->key,
                   net->memory == ADAPTIVE);
}

// The previous chunk enters the memory, M ← A M + B; ``old`` is work memory of (key, value).
static void enter_previous(const network *net, const layer *l, const place *at, int64_t head, float *old) {
    const int64_t key = net->key, value = net->value, first = (at->slot * net->heads + head) * key;
    const int resets = l->previous_resets[at->slot], adaptive = net->memory == ADAPTIVE;
    float *memory = l->memory + first * value;
    memcpy(old, memory, sizeof(float) * key * value);
    for (int64_t k = 0; k < key; k++) {
        const float *key_sum = l->previous.key_sum + (first + k) * key, *sum = l->previous.value_sum + (first + k) * value;
        const float after = normaliser_before(net, l, at, first + k);
        const float rho = adaptive ? expf(l->previous.weight[first + k] - after) : 1.0f;
        float *row = memory + k * value;
        for (int64_t i = 0; i < value; i++) row[i] = 0;
        if (!resets) add_rows(row, key_sum, old, value, key, value);
        for (int64_t i = 0; i < value; i++) {
            float kept = resets ? 0 : (adaptive ? 1 - rho : 1) * old[k * value + i];
            row[i] = kept + rho * (sum[i] - row[i]);
        }
    }
    for (int64_t k = 0; k < key; k++) l->normaliser[first + k] = normaliser_before(net, l, at, first + k);
}

// The chunk is complete: the previous one enters the memory, this one becomes the previous, and an empty one begins.
static void complete_chunk(const network *net, const layer *l, const place *at, int64_t head, float *old) {
    const int64_t key = net->key, value = net->value, first = (at->slot * net->heads + head) * key;
    enter_previous(net, l, at, head, old);
    memcpy(l->previous.weight + first, l->current.weight + first, sizeof(float) * key);
    memcpy(l->previous.key_sum + first * key, l->current.key_sum + first * key, sizeof(float) * key * key);
    memcpy(l->previous.value_sum + first * value, l->current.value_sum + first * value, sizeof(float) * key * value);
    memset(l->current.key_sum + first * key, 0, sizeof(float) * key * key);
    memset(l->current.value_sum + first * value, 0, sizeof(float) * key * value);
    for (int64_t k = 0; k < key; k++) l->current.weight[first + k] = net->memory == ADAPTIVE ? -1e30f : 0.0f;
}
