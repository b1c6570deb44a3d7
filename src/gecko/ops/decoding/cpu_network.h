// The network and the states of its sequences, as ``cpu.py`` passes them: every field is 8 bytes wide.
#pragma once

#include "cpu_products.h"

// Timestep norm: parameters, and the statistics of every slot.
typedef struct {
    const float *scale, *shift;  // (D,): 1 + weight and bias
    int64_t *count;              // (slots,)
    float *mean, *variance;      // (slots, groups)
} running_norm;

// Summary of the tokens of one chunk, for every slot and head.
typedef struct {
    float *weight, *key_sum, *value_sum;
} chunk_summary;

typedef struct {
    running_norm norm;
    const float *cema_tables;  // (4, D, 2N rounded up to 16): factors of h, of h with swapped parts, of x, and of the output
    const float *cema_skip;    // (D,)
    float *cema;               // (slots, D, N, 2)
    const float *cema_norm;    // (D,): 1 + weight
    matrix to_shared, to_query, to_key, to_value, to_gate, to_hidden, to_output;
    const float *qk_scale, *qk_shift;  // (2 or 4, H · key): of queries and keys of attention, then of the memory
    const float *query_scale, *key_scale;  // (H · key,), (K · key,): of separate queries and keys
    void *keys, *values;                   // (slots, K, 2c, key), (slots, K, 2c, value), in float32 or bfloat16
    void *sink_keys, *sink_values;         // (slots, K, sinks, key), (slots, K, sinks, value), in the same
    float *memory, *normaliser;        // (slots, H, key, value), (slots, H, key)
    chunk_summary previous, current;
    uint8_t *previous_resets;                // (slots,)
    const float *ffn_norm_scale, *ffn_norm_shift, *ffn_scale;  // (D,); the last may be null
    matrix fc1, fc3, fc2;
} layer;

typedef enum { NO_MEMORY, ADAPTIVE, LINEAR } memory_rule;
typedef enum { NO_GATE, GATED_ATTENTION, GATED_SUM } gated_part;
typedef enum { SLIDING_CHUNK, CHUNK, SLIDING_WINDOW } attention_pattern;

typedef struct {
    int64_t rows, slots, layers, features, heads, key, value, hidden, modes, chunk, groups, norm_groups, vocabulary;
    int64_t attention, memory, rope_heads, swiglu, two_hop, cumulative, keys_are_bfloat16, values_are_bfloat16;
    int64_t key_heads, sinks, separate, unit_queries, steps_only, averages, gate, hidden_branch, silu_values;
    int64_t page_bytes;  // from the state of one slot to the next in every tensor; 0: their slots lie side by side
    double beta_mean, beta_variance, eps, embedding_scale;
    const float *phases;        // (2c, key / 2, 2): cosine and sine of each position's angles
    matrix embedding, head;
    running_norm final_norm;
    const layer *layer;
} network;

// One token of each of ``rows`` sequences.
typedef struct {
    int64_t rows;
    const int64_t *token, *slot, *position, *document_start;  // (rows,)
    float *logits;                                            // (rows, vocabulary), or null if ``hidden`` is wanted
    float *hidden;                                            // (rows, D): the input of the head; may be null
} batch;

// The state of ``slot`` in a tensor whose slots have ``bytes`` each.
static inline void *state_of(const network *net, const void *first, int64_t slot, int64_t bytes) {
    return (char *)first + slot * (net->page_bytes ? net->page_bytes : bytes);
}

// Heads of queries that share a head of keys and values.
static inline int64_t shared_by(const network *net) { return net->heads / net->key_heads; }

static inline int64_t padded(int64_t count) { return blocks_of(count, REGISTER) * REGISTER; }

// Numbers of one channel in the tables of CEMA.
static inline int64_t padded_table(int64_t count) { return blocks_of(count, 16) * 16; }

// The part of ``total`` that belongs to a thread, cut at multiples of ``unit``.
typedef struct { int64_t begin, end; } range;

static inline range part_of(int64_t total, int64_t unit, int64_t thread, int64_t threads) {
    int64_t units = blocks_of(total, unit);
    range part = {units * thread / threads * unit, units * (thread + 1) / threads * unit};
    part.begin = least(part.begin, total), part.end = least(part.end, total);
    return part;
}

static inline range intersection(range a, int64_t begin, int64_t end) {
    range both = {a.begin > begin ? a.begin : begin, least(a.end, end)};
    both.begin -= begin, both.end -= begin;
    return both;
}
