// Linear layers with few weights, y = x W^T + b (+ onto):
//
//     dx = dy W,   dW = dy^T x,   db = sum of dy over tokens.
//
// With ``pairs``, the operands of products are rounded to bfloat16. Everything else is float32.
#include "../backends/cpu_panels.h"

// Whether the processor and the compiler support products of pairs.
const int projections_of_pairs = HAS_PAIRS;

// ``bias`` and ``onto`` may be null.
int64_t projections_forward(const float *x, const float *weight, const float *bias, const float *onto, float *y,
                            int64_t pairs, int64_t tokens, int64_t inputs, int64_t outputs, int64_t threads) {
    addends all = {onto, outputs, bias};
    int64_t refused = 0;
    float *panels = room_for(inputs * outputs, &refused);
    if (panels) lay_out_turned(panels, weight, inputs, outputs, pairs, &refused);
    if (refused) {
        free(panels);
        return refused;
    }
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(BLOCK * inputs, &refused);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t += BLOCK) {
            if (!scratch) continue;
            int64_t count = least(BLOCK, tokens - t);
            multiply(addends_at(all, t, 0), y + t * outputs, rows_of(x + t * inputs, count, inputs, pairs, scratch),
                     panels, count, outputs, inputs, block_of(x, t + BLOCK, inputs, tokens));
        }
        free(scratch);
    }
    free(panels);
    return refused;
}

typedef struct {
    const float *grad, *x, *panels;           // panels of the weight
    float *grad_x, *grad_weight, *grad_bias;  // null if not needed
    int64_t tokens, inputs, outputs;
    int adds, pairs;  // adds: add to grad_x
} problem;

// Sum COLUMNS vecs at once. With a single one, each addition would wait for the one before.
static void sum_tokens(float *to, const float *grad, int64_t count, int64_t outputs, int adds) {
    enum { COLUMNS = 4 };
    for (int64_t at = 0; at < outputs; at += COLUMNS * LANES) {
        int columns = least(COLUMNS, (outputs - at) / LANES);
        vec sum[COLUMNS] = {0};
        for (int64_t t = 0; t < count; t++)
#pragma GCC unroll 4
            for (int j = 0; j < columns; j++) sum[j] += load(grad + t * outputs + at + j * LANES);
        for (int j = 0; j < columns; j++) {
            float *here = to + at + j * LANES;
            store(here, adds ? load(here) + sum[j] : sum[j]);
        }
    }
}

// ``part`` is the gradient of the weight (outputs, inputs), then that of the bias. ``scratch`` holds a block of x and a
// block of the output gradient.
static void block_backward(const problem *a, float *part, int64_t begin, float *scratch, int adds) {
    int64_t count = least(BLOCK, a->tokens - begin);
    const float *grad = a->grad + begin * a->outputs;
    float *panels = scratch, *left = scratch + BLOCK * a->inputs;
    if (a->grad_x) {
        float *grad_x = a->grad_x + begin * a->inputs;
        addends onto = {a->adds ? grad_x : 0, a->inputs, 0};
        multiply(onto, grad_x, rows_of(grad, count, a->outputs, a->pairs, left), a->panels, count, a->inputs,
                 a->outputs, block_of(a->x, begin, a->inputs, a->tokens));
    }
    if (a->grad_weight) {
        lay_out(panels, a->x + begin * a->inputs, count, a->inputs, a->pairs);
        multiply_over_tokens(part, columns_of(grad, count, a->outputs, a->pairs, left), panels, a->outputs, a->inputs,
                             count, adds, block_of(a->grad, begin + BLOCK, a->outputs, a->tokens));
    }
    if (a->grad_bias) sum_tokens(part + a->outputs * a->inputs, grad, count, a->outputs, adds);
}

// Gradients that are not needed are null.
int64_t projections_backward(const float *grad, const float *x, const float *weight, float *grad_x, float *grad_weight,
                             float *grad_bias, int64_t adds, int64_t pairs, int64_t tokens, int64_t inputs,
                             int64_t outputs, int64_t threads) {
    int64_t blocks = blocks_of(tokens, BLOCK), groups = groups_of(tokens), size = outputs * (inputs + 1);
    int64_t refused = 0;
    float *panels = room_for(inputs * outputs, &refused), *parts = room_for(groups * size, &refused);
    if (refused) {
        free(panels);
        free(parts);
        return refused;
    }
    problem a = {grad, x, panels, grad_x, grad_weight, grad_bias, tokens, inputs, outputs, adds, pairs};
    if (grad_x) lay_out(panels, weight, outputs, inputs, pairs);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t group = 0; group < groups; group++) {
        float *scratch = room_for(BLOCK * (inputs + outputs), &refused);
        if (!scratch) continue;
        int64_t first = group * blocks / groups;
        for (int64_t block = first; block < (group + 1) * blocks / groups; block++)
            block_backward(&a, parts + group * size, block * BLOCK, scratch, block > first);
        free(scratch);
    }
    if (grad_weight) add_parts(grad_weight, parts, outputs * inputs, groups, size, threads);
    if (grad_bias) add_parts(grad_bias, parts + outputs * inputs, outputs, groups, size, threads);
    free(panels);
    free(parts);
    return refused;
}
