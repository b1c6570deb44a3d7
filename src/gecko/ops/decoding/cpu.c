// One token of several sequences through a whole network: one call, in which threads meet six times a layer.
//
// Weights stream from memory once for all sequences (cpu_products.h). Each sequence has its state in a slot, which is
// changed in place. Threads divide features in the timestep norm and CEMA, outputs in products, and heads in the mixer.
// A norm over all features is computed by every thread for itself, which takes less time than to wait for another thread.
#include <omp.h>

#include "cpu_mixer.h"

// Activations of all rows; row r of each starts r times its padded width after the first.
typedef struct {
    float *x, *mixed, *after, *normal, *averaged;                  // features
    float *shared, *value, *gate, *out;  // H · key, or queries and keys; H · value, three times
    float *hidden, *gated, *weight;      // hidden, twice; H · key
    float *own;  // of each thread: normal activations of all rows, an operand, the work memory of a head, and its memory
    int64_t own_size;
} activations;

static int64_t operand_size(const network *net) {
    const int64_t features = padded(net->features), value = padded(net->heads * net->value), hidden = padded(net->hidden);
    const int64_t most = features > value ? features : value;
    return net->rows * operand_row(most > hidden ? most : hidden);
}

// Numbers that queries and keys are made of, and numbers of all values.
static int64_t shared_size(const network *net) {
    return net->key * (net->separate ? net->heads + net->key_heads : net->heads);
}

static int64_t values_size(const network *net) { return net->key_heads * net->value; }

static int64_t own_size_of(const network *net) {
    return net->rows * padded(net->features) + operand_size(net) + head_room_size(net) + padded(net->key * net->value);
}

// Divides ``room``, in the same way in every call: padding that is zero stays zero.
static int64_t carve(activations *a, float *room, const network *net, int64_t threads) {
    const int64_t rows = net->rows;
    const int64_t features = padded(net->features), value = padded(net->heads * net->value);
    const int64_t key = padded(net->heads * net->key), hidden = padded(net->hidden);
    struct { float **at; int64_t size; } parts[] = {
        {&a->x, features}, {&a->mixed, features}, {&a->after, features}, {&a->normal, features}, {&a->averaged, features},
        {&a->shared, padded(shared_size(net))}, {&a->value, value}, {&a->gate, value}, {&a->out, value},
        {&a->hidden, hidden}, {&a->gated, hidden}, {&a->weight, key},
    };
    int64_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].at = room + used;
        used += rows * parts[i].size;
    }
    a->own = room + used, a->own_size = own_size_of(net);
    return used + threads * a->own_size;
}

// Numbers of work memory that a call needs; all of them must be zero before the first call.
int64_t decoding_room(const network *net, int64_t threads) {
    activations unused;
    return carve(&unused, 0, net, threads);
}

static void read_embedding(const network *net, int64_t token, range part, float *x) {
    const char *row = net->embedding.weight + token * net->embedding.row_bytes;
    for (int64_t i = part.begin; i < part.end; i++) {
        uint32_t bits = net->embedding.kind == BFLOAT16 ? (uint32_t)((const uint16_t *)row)[i] << 16 : 0;
        if (net->embedding.kind == BFLOAT16) memcpy(x + i, &bits, sizeof bits);
        else x[i] = ((const float *)row)[i];
        x[i] *= net->embedding_scale;
    }
}

// Mean of x, or zero if it is not ``centred``, and mean of (x - mean)².
static void moments(const float *x, int64_t size, int centred, float *mean, float *variance) {
    vec sum = {0}, squares = {0};
    for (int64_t i = 0; centred && i < size; i += LANES) sum += load_some(x + i, least(LANES, size - i));
    *mean = sum_of(sum) / size;
    for (int64_t i = 0; i < size; i += LANES) {
        const int some = least(LANES, size - i);
        vec deviation = load_some(x + i, some) - *mean;
        if (some < LANES) {
            float lanes[LANES] = {0};
            store_some(lanes, deviation, some);
            deviation = load(lanes);
        }
        squares += deviation * deviation;
    }
    *variance = sum_of(squares) / size;
}

// to = (x - center) factor scale + shift, where ``shift`` may be null.
static void scale_normal(const float *x, float center, float factor, const float *scale, const float *shift,
                         int64_t size, float *to) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int some = least(LANES, size - i);
        vec y = (load_some(x + i, some) - center) * factor * load_some(scale + i, some);
        store_some(to + i, shift ? y + load_some(shift + i, some) : y, some);
    }
}

// Timestep norm of the groups in ``part`` (features), and their statistics after this step.
static void timestep_norm(const network *net, const running_norm *norm, int64_t slot, range part, const float *x, float *y) {
    const int64_t size = net->features / net->groups;
    const double count = *(int64_t *)state_of(net, norm->count, slot, sizeof(int64_t)) + 1;
    const float mean_weight = net->cumulative ? 1 : -expm1(count * log(net->beta_mean));
    const float variance_weight = net->cumulative ? 1 : -expm1(count * log(net->beta_variance));
    float *means = state_of(net, norm->mean, slot, sizeof(float) * net->groups);
    float *variances = state_of(net, norm->variance, slot, sizeof(float) * net->groups);
    for (int64_t g = part.begin / size; g < part.end / size; g++) {
        float mean, variance, *m = means + g, *v = variances + g;
        moments(x + g * size, size, 1, &mean, &variance);
        if (net->cumulative) {
            float step = mean - *m;
            *m += step / (float)count;
            *v += (variance + step * (mean - *m) - *v) / (float)count;
        } else {
            *m = net->beta_mean * *m + (1 - net->beta_mean) * mean;
            *v = net->beta_variance * *v + (1 - net->beta_variance) * variance;
        }
        const float factor = 1 / sqrtf(*v / variance_weight + (float)net->eps);
        scale_normal(x + g * size, *m / mean_weight, factor, norm->scale + g * size, norm->shift + g * size, size,
                     y + g * size);
    }
}

// Four channels of one slot, h ← q h + p x and y = Re Σ γ h + ω x; a complex number is two neighbouring lanes. Channels
// after ``count`` are not there.
static void cema_of_four(const network *net, const layer *l, int64_t slot, int64_t channel, int64_t count, const float *x,
                         float *y) {
    const int64_t size = 2 * net->modes, row = padded_table(size), table = net->features * row;
    float *state = (float *)state_of(net, l->cema, slot, sizeof(float) * net->features * size) + channel * size;
    vec sums[4] = {{0}};
    for (int64_t c = 0; c < count; c++) {
        const float *factors = l->cema_tables + (channel + c) * row;
        const vec input = every(x[channel + c]);
        for (int64_t i = 0; i < size; i += LANES) {
            const int some = least(LANES, size - i);
            vec h = load_some(state + c * size + i, some);
            h = h * load(factors + i) + swapped(h, 1) * load(factors + table + i) + input * load(factors + 2 * table + i);
            store_some(state + c * size + i, h, some);
            sums[c] += h * load(factors + 3 * table + i);
        }
    }
    const four sum = sums_of_four(sums);
    for (int64_t c = 0; c < count; c++) y[channel + c] = sum[c] + l->cema_skip[channel + c] * x[channel + c];
}

// RMS norm, or layer norm where it is ``centred``, of all features.
static void group_norm(const network *net, const float *x, const float *scale, const float *shift, int centred, float *y) {
    const int64_t size = net->features / net->norm_groups;
    for (int64_t g = 0; g < net->norm_groups; g++) {
        float mean, variance;
        moments(x + g * size, size, centred, &mean, &variance);
        const float factor = 1 / sqrtf(variance + (float)net->eps);
        scale_normal(x + g * size, mean, factor, scale + g * size, shift ? shift + g * size : 0, size, y + g * size);
    }
}

static void silu(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        int some = least(LANES, count - i);
        vec y = load_some(x + i, some);
        store_some(x + i, y * sigmoid_of(y), some);
    }
}

static void add(float *to, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] += x[i];
}

// A thread's share of the work of one call.
typedef struct {
    const network *net;
    const batch *batch;
    activations a;
    int64_t thread, threads;
    float *own, *operand, *head;  // normal activations (rows, features), an operand, and the work memory of a head
} worker;

static range features_of(const worker *w) {
    return part_of(w->net->features, w->net->features / w->net->groups, w->thread, w->threads);
}

// RMS norm of the features in ``part``, of single steps.
static void step_norm(const network *net, const running_norm *norm, range part, const float *x, float *y) {
    const int64_t size = net->features / net->norm_groups;
    for (int64_t g = part.begin / size; g * size < part.end; g++) {
        const range mine = intersection(part, g * size, (g + 1) * size);
        const int64_t at = g * size + mine.begin;
        float mean, variance;
        moments(x + g * size, size, 0, &mean, &variance);
        const float factor = 1 / sqrtf(variance + (float)net->eps);
        scale_normal(x + at, 0, factor, norm->scale + at, 0, mine.end - mine.begin, y + at);
    }
}

static void norm_and_cema(const worker *w, const layer *l, const running_norm *norm) {
    const int64_t row = padded(w->net->features);
    const range part = features_of(w);
    for (int64_t r = 0; r < w->batch->rows; r++)
        if (w->net->steps_only) step_norm(w->net, norm, part, w->a.x + r * row, w->a.normal + r * row);
        else timestep_norm(w->net, norm, w->batch->slot[r], part, w->a.x + r * row, w->a.normal + r * row);
    if (!w->net->averages) return;
    // The tables of some channels stay in the cache for all rows.
    for (int64_t channel = part.begin; l && channel < part.end; channel += 4)
        for (int64_t r = 0; r < w->batch->rows; r++)
            cema_of_four(w->net, l, w->batch->slot[r], channel, least(4, part.end - channel), w->a.normal + r * row,
                         w->a.averaged + r * row);
}

static void count_step(const worker *w, const running_norm *norm) {
    if (w->thread == 0 && !w->net->steps_only)
        for (int64_t r = 0; r < w->batch->rows; r++)
            ++*(int64_t *)state_of(w->net, norm->count, w->batch->slot[r], sizeof(int64_t));
}

// Rows of activations that several matrices multiply, and how the last of them did.
typedef struct {
    const float *x;
    int64_t kind;
    operand as;
} input;

static input input_of(const float *x) { return (input){x, -1}; }

// One part of the outputs of a layer, for all rows. Matrices of one kind share the operand.
static void run_layer(const worker *w, const matrix *m, range part, input *in, float *y, int64_t y_row) {
    if (part.begin >= part.end) return;
    if (in->kind != m->kind) in->as = operand_for(m, in->x, w->batch->rows, w->operand), in->kind = m->kind;
    products(m, part.begin, part.end, in->as, w->batch->rows, y, y_row);
}

// Values, gates, queries and keys, and the residual of the mixer, as one list of outputs; parts that a model does not have
// are empty.
static void project(const worker *w, const layer *l) {
    const network *net = w->net;
    const int64_t rows = w->batch->rows, features = padded(net->features), query = net->heads * net->key;
    const int64_t key = shared_size(net), value = padded(net->heads * net->value);
    const int64_t sizes[4] = {values_size(net), net->gate == NO_GATE ? 0 : net->heads * net->value, key,
                              net->hidden_branch ? net->features : 0};
    int64_t to[5] = {0};
    for (int i = 0; i < 4; i++) to[i + 1] = to[i] + sizes[i];
    for (int64_t r = 0; net->averages && r < rows; r++)
        group_norm(net, w->a.averaged + r * features, l->cema_norm, 0, 0, w->own + r * features);
    const range part = part_of(to[4], TILE_OUTPUTS, w->thread, w->threads);
    const range to_value = intersection(part, 0, to[1]), to_gate = intersection(part, to[1], to[2]);
    const range to_hidden = intersection(part, to[3], to[4]);
    input normal = input_of(w->a.normal), other = input_of(w->own), *averaged = net->averages ? &other : &normal;
    run_layer(w, &l->to_value, to_value, &normal, w->a.value, value);
    run_layer(w, &l->to_gate, to_gate, averaged, w->a.gate, value);
    if (net->separate) {
        run_layer(w, &l->to_query, intersection(part, to[2], to[2] + query), averaged, w->a.shared, padded(key));
        run_layer(w, &l->to_key, intersection(part, to[2] + query, to[3]), averaged, w->a.shared + query, padded(key));
    } else run_layer(w, &l->to_shared, intersection(part, to[2], to[3]), averaged, w->a.shared, padded(key));
    run_layer(w, &l->to_hidden, to_hidden, averaged, w->a.mixed, features);
    for (int64_t r = 0; r < rows; r++) {
        if (net->silu_values && to_value.begin < to_value.end)
            silu(w->a.value + r * value + to_value.begin, to_value.end - to_value.begin);
        if (to_gate.begin < to_gate.end)
            silu(w->a.gate + r * value + to_gate.begin, to_gate.end - to_gate.begin);
        if (to_hidden.begin < to_hidden.end)
            add(w->a.mixed + r * features + to_hidden.begin, w->a.x + r * features + to_hidden.begin,
                to_hidden.end - to_hidden.begin);
    }
}

// x of one head, normalised if the model does so, times its scale.
static void scaled_head(const network *net, const float *x, const float *scale, float *normal, float *to) {
    if (net->unit_queries) normalise_head(x, normal, net->key, net->eps);
    for (int64_t i = 0; i < net->key; i++) to[i] = (net->unit_queries ? normal : x)[i] * scale[i];
}

// Query of one head, and the key that it shares with others, before they are rotated, to ``share`` and ``memory_key``:
// a unit vector, scaled and shifted, or projections of their own.
static void query_and_key(const network *net, const layer *l, int64_t head, const float *shared, const head_room *room) {
    const int64_t size = net->key, all = net->heads * size, first = head * size;
    if (net->separate) {
        const int64_t own = head / shared_by(net) * size;
        scaled_head(net, shared + first, l->query_scale + first, room->normal, room->share);
        scaled_head(net, shared + all + own, l->key_scale + own, room->normal, room->memory_key);
        return;
    }
    normalise_head(shared + first, room->normal, size, net->eps);
    scale_and_shift(room->normal, l->qk_scale + first, l->qk_shift + first, room->share, size);
    scale_and_shift(room->normal, l->qk_scale + all + first, l->qk_shift + all + first, room->memory_key, size);
}

// Queries and keys of one head, for attention rotated.
static void queries_and_keys(const network *net, const layer *l, const place *at, int64_t head, const float *shared,
                             const head_room *room) {
    const int64_t size = net->key, all = net->heads * size, first = head * size;
    const int64_t turn = at->position - at->chunk_start;
    // As far as the window reaches: a Llama has learned no distances beyond its context.
    const int64_t from_start = least(at->number, 2 * net->chunk - 1);
    query_and_key(net, l, head, shared, room);
    if (head < net->rope_heads) {
        rotate(room->share, net->phases + turn * size, room->query[0], size);
        rotate(room->share, net->phases + (turn + net->chunk) * size, room->query[1], size);
        if (at->sinks) rotate(room->share, net->phases + from_start * size, room->query[2], size);
        rotate(room->memory_key, net->phases + turn * size, room->key, size);
        if (at->number < net->sinks) rotate(room->memory_key, net->phases + at->number * size, room->sink_key, size);
    } else {
        for (int i = 0; i < 3; i++) memcpy(room->query[i], room->share, sizeof(float) * size);
        memcpy(room->key, room->memory_key, sizeof(float) * size);
        memcpy(room->sink_key, room->memory_key, sizeof(float) * size);
    }
    if (net->memory == NO_MEMORY) return;
    if (net->separate) {
        memcpy(room->memory_query, shared + first, sizeof(float) * size);
        memcpy(room->memory_key, shared + all + first, sizeof(float) * size);
        return;
    }
    const float *scale = l->qk_scale + 2 * all + first, *shift = l->qk_shift + 2 * all + first;
    scale_and_shift(room->normal, scale, shift, room->memory_query, size);
    scale_and_shift(room->normal, scale + all, shift + all, room->memory_key, size);
}

// Write the token to the ring, and to the sinks if it is one.
static void keep_token(const network *net, const layer *l, const place *at, int64_t head, range part,
                       const head_room *room, const float *v) {
    const int64_t newest = at->position % (2 * net->chunk);
    const range all = {0, net->key};
    if (part.begin == 0)
        write_numbers(keys_of_head(net, l, at, head), newest * net->key, all, room->key, net->keys_are_bfloat16);
    write_numbers(values_of_head(net, l, at, head), newest * net->value, part, v, net->values_are_bfloat16);
    if (at->number >= net->sinks) return;
    if (part.begin == 0)
        write_numbers(sink_keys_of(net, l, at, head), at->number * net->key, all, room->sink_key, net->keys_are_bfloat16);
    write_numbers(sink_values_of(net, l, at, head), at->number * net->value, part, v, net->values_are_bfloat16);
}

// One head of one row, of whose values it takes the columns ``part``.
static void mix_head(const worker *w, const layer *l, int64_t row, int64_t head, range part, const head_room *room) {
    const network *net = w->net;
    const place at = place_of(net, w->batch, row);
    const int64_t values = padded(net->heads * net->value), first = row * values + head * net->value;
    float *v = w->a.value + row * values + head / shared_by(net) * net->value, *out = w->a.out + first;
    const float *shared = w->a.shared + row * padded(shared_size(net));
    queries_and_keys(net, l, &at, head, shared, room);
    if (head % shared_by(net) == 0) keep_token(net, l, &at, head, part, room, v);
    attend(net, l, &at, head, part, room, v, out);
    for (int64_t i = part.begin; net->gate == GATED_ATTENTION && i < part.end; i++) out[i] *= w->a.gate[first + i];
    if (net->memory != NO_MEMORY) {
        float *next = w->a.weight + row * padded(net->heads * net->key) + head * net->key;
        if (part.begin) next = room->scores;  // the thread of the first columns keeps it
        memory_features(net, l, &at, head, room, next);
        use_memory(net, l, &at, head, part, room, v, out);
    }
    for (int64_t i = part.begin; net->gate == GATED_SUM && i < part.end; i++) out[i] *= w->a.gate[first + i];
}

static void mix(const worker *w, const layer *l) {
    const network *net = w->net;
    const int64_t tasks = w->batch->rows * net->heads, parts = blocks_of(w->threads, tasks);
    const head_room room = head_room_at(net, w->head);
    const range mine = part_of(tasks * parts, 1, w->thread, w->threads);
    for (int64_t task = mine.begin; task < mine.end; task++) {
        const range columns = part_of(net->value, LANES, task % parts, parts);
        if (columns.begin < columns.end)
            mix_head(w, l, task / parts / net->heads, task / parts % net->heads, columns, &room);
    }
}

// After all heads: the weights of the current chunk with this token, and the memory where a chunk is complete.
static void finish_chunk(const worker *w, const layer *l) {
    const network *net = w->net;
    const int64_t key = padded(net->heads * net->key);
    if (net->memory == NO_MEMORY) return;
    const range mine = part_of(w->batch->rows * net->heads, 1, w->thread, w->threads);
    for (int64_t task = mine.begin; task < mine.end; task++) {
        const int64_t row = task / net->heads, head = task % net->heads;
        const place at = place_of(net, w->batch, row);
        memcpy(head_state(net, l->current.weight, &at, head, net->key), w->a.weight + row * key + head * net->key,
               sizeof(float) * net->key);
        if (at.ends_chunk) complete_chunk(net, l, &at, head, w->head + head_room_size(net));
    }
}

static void mark_resets(const worker *w, const layer *l) {
    for (int64_t r = 0; w->net->memory != NO_MEMORY && w->thread == 0 && r < w->batch->rows; r++) {
        const place at = place_of(w->net, w->batch, r);
        if (at.ends_chunk) *(uint8_t *)state_of(w->net, l->previous_resets, at.slot, 1) = at.began_in_chunk;
    }
}

static void project_output(const worker *w, const layer *l) {
    const int64_t features = padded(w->net->features);
    const range part = part_of(w->net->features, TILE_OUTPUTS, w->thread, w->threads);
    input mixed = input_of(w->a.out);
    run_layer(w, &l->to_output, part, &mixed, w->a.after, features);
    const float *residual = w->net->hidden_branch ? w->a.mixed : w->a.x;
    for (int64_t r = 0; r < w->batch->rows && part.begin < part.end; r++)
        add(w->a.after + r * features + part.begin, residual + r * features + part.begin, part.end - part.begin);
}

static void feed_forward_in(const worker *w, const layer *l) {
    const network *net = w->net;
    const int64_t rows = w->batch->rows, features = padded(net->features), hidden = padded(net->hidden);
    const range part = part_of(net->hidden, TILE_OUTPUTS, w->thread, w->threads);
    for (int64_t r = 0; r < rows; r++)
        group_norm(net, w->a.after + r * features, l->ffn_norm_scale, l->ffn_norm_shift, !net->steps_only,
                   w->own + r * features);
    input normal = input_of(w->own);
    run_layer(w, &l->fc1, part, &normal, w->a.hidden, hidden);
    if (net->swiglu) run_layer(w, &l->fc3, part, &normal, w->a.gated, hidden);
    for (int64_t r = 0; r < rows && part.begin < part.end; r++) {
        float *y = w->a.hidden + r * hidden, *factor = w->a.gated + r * hidden;
        silu(y + part.begin, part.end - part.begin);
        for (int64_t i = part.begin; net->swiglu && i < part.end; i++) y[i] *= factor[i];
    }
}

// x ← fc2 hidden + residual; ``two_hop`` adds the block's input, not the mixer's output.
static void feed_forward_out(const worker *w, const layer *l) {
    const network *net = w->net;
    const int64_t features = padded(net->features);
    const range part = part_of(net->features, TILE_OUTPUTS, w->thread, w->threads);
    input hidden = input_of(w->a.hidden);
    run_layer(w, &l->fc2, part, &hidden, w->own, features);
    for (int64_t r = 0; r < w->batch->rows; r++) {
        float *x = w->a.x + r * features, *y = w->own + r * features, *residual = w->a.after + r * features;
        for (int64_t i = part.begin; i < part.end; i++) {
            float scaled = l->ffn_scale ? y[i] * l->ffn_scale[i] : y[i];
            x[i] = scaled + (net->two_hop ? x[i] : residual[i]);
        }
    }
}

static void run_block(const worker *w, const layer *l) {
    norm_and_cema(w, l, &l->norm);
#pragma omp barrier
    count_step(w, &l->norm);
    project(w, l);
#pragma omp barrier
    mix(w, l);
#pragma omp barrier
    finish_chunk(w, l);
    project_output(w, l);
#pragma omp barrier
    mark_resets(w, l);
    feed_forward_in(w, l);
#pragma omp barrier
    feed_forward_out(w, l);
#pragma omp barrier
}

static void run_network(const worker *w) {
    const network *net = w->net;
    const range part = features_of(w);
    for (int64_t r = 0; r < w->batch->rows; r++)
        read_embedding(net, w->batch->token[r], part, w->a.x + r * padded(net->features));
    if (net->steps_only) {
#pragma omp barrier
    }
    for (int64_t i = 0; i < net->layers; i++) run_block(w, net->layer + i);
    norm_and_cema(w, 0, &net->final_norm);
#pragma omp barrier
    count_step(w, &net->final_norm);
    for (int64_t r = 0; w->batch->hidden && r < w->batch->rows && part.begin < part.end; r++)
        memcpy(w->batch->hidden + r * net->features + part.begin, w->a.normal + r * padded(net->features) + part.begin,
               sizeof(float) * (part.end - part.begin));
    if (!w->batch->logits) return;
    const range outputs = part_of(net->vocabulary, TILE_OUTPUTS, w->thread, w->threads);
    input last = input_of(w->a.normal);
    run_layer(w, &net->head, outputs, &last, w->batch->logits, net->vocabulary);
}

// Whether every row has a slot, and its position does not lie before the start of its document.
static int are_places(const network *net, const batch *b) {
    int are = 1;
    for (int64_t r = 0; r < b->rows; r++)
        are &= (uint64_t)b->slot[r] < (uint64_t)net->slots && b->document_start[r] >= 0 &&
               b->position[r] >= b->document_start[r] && b->position[r] < INT64_MAX / 2;
    return are;
}

// Logits of the token after those of ``b``, whose states are changed in place; ``room`` as ``decoding_room`` says. Returns
// 1, and does nothing, if a row has no place.
int64_t decoding_step(const network *net, const batch *b, float *room, int64_t threads) {
    activations a;
    if (!are_places(net, b)) return 1;
    carve(&a, room, net, threads);
#pragma omp parallel num_threads(threads)
    {
        const int64_t thread = omp_get_thread_num(), there = omp_get_num_threads();
        float *own = a.own + thread * a.own_size;
        float *operand = own + net->rows * padded(net->features);
        const worker w = {net, b, a, thread, there, own, operand, operand + operand_size(net)};
        run_network(&w);
    }
    return 0;
}
