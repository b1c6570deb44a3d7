// Cross-entropy of rows of logits x, log sum e^x - x[target], and its gradient, (softmax(x) - one-hot) / count.
//
// For a head with few weights, the logits of one block of tokens at a time stay in a core's cache: x = h W^T, dh = dx W
// and dW = dx^T h. With ``pairs``, the operands of products are rounded to bfloat16.
#include "../backends/cpu_panels.h"

static float largest_of(const float *x, int64_t size) {
    vec most = every(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) most = larger(load(x + i), most);
    float largest = largest_across(most)[0];
    for (; i < size; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

// Replace every x by e^(x - most), and return their sum.
static float exponentiate(float *x, int64_t size, float most) {
    vec sum = {0};
    float rest = 0;
    for (int64_t i = 0; i < size; i += LANES) {
        int count = least(LANES, size - i);
        vec y = exp_of(load_some(x + i, count) - most);
        store_some(x + i, y, count);
        if (count == LANES) sum += y;
        else
            for (int j = 0; j < count; j++) rest += y[j];
    }
    return sum_of(sum) + rest;
}

// Replace a row of logits by the gradient of its loss divided by ``count``, and return the loss.
static float row_loss(float *x, int64_t target, int64_t size, float count) {
    float most = largest_of(x, size), of_target = x[target] - most, sum = exponentiate(x, size, most);
    for (int64_t i = 0; i < size; i++) x[i] *= 1 / (sum * count);
    x[target] -= 1 / count;
    return logf(sum) - of_target;
}

// Compute the losses of rows of ``size`` logits, which are ``apart`` numbers apart. The padding gets a zero gradient.
// A row whose target is ``ignored`` has a loss of 0 and a gradient of zeros.
static void row_losses(float *logits, const int64_t *targets, float *losses, float count, int64_t ignored,
                       int64_t rows, int64_t size, int64_t apart) {
    for (int64_t row = 0; row < rows; row++) {
        float *x = logits + row * apart;
        int counts = targets[row] != ignored;
        losses[row] = counts ? row_loss(x, targets[row], size, count) : 0;
        int64_t kept = counts ? size : 0;
        memset(x + kept, 0, sizeof(float) * (apart - kept));
    }
}

// Replace logits (rows, size) by the gradient of the sum of losses divided by ``count``.
int64_t loss_and_gradient(float *logits, const int64_t *targets, float *losses, float count, int64_t ignored,
                          int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > ALONE)
    for (int64_t row = 0; row < rows; row++)
        row_losses(logits + row * size, targets + row, losses + row, count, ignored, 1, size, size);
    return 0;
}

typedef struct {
    const float *hidden, *to_logits, *to_hidden;  // W in panels, for x and for dh
    const int64_t *targets;
    float *losses, *grad_hidden;  // grad_hidden is null if not needed
    float count;
    int64_t ignored, tokens, inputs, size, wide;  // wide: the vocabulary size, rounded up to pairs of registers
    int pairs;
} problem;

// ``part`` is the gradient of W, or null; ``scratch`` holds the logits of a block and the operands of products.
static void block_loss(const problem *p, float *part, int64_t begin, float *scratch, int adds) {
    int64_t count = least(BLOCK, p->tokens - begin);
    const float *hidden = p->hidden + begin * p->inputs;
    float *logits = scratch, *panels = logits + BLOCK * p->wide, *left = panels + BLOCK * p->inputs;
    multiply((addends){0}, logits, rows_of(hidden, count, p->inputs, p->pairs, left), p->to_logits, count, p->wide,
             p->inputs, block_of(p->hidden, begin + BLOCK, p->inputs, p->tokens));
    row_losses(logits, p->targets + begin, p->losses + begin, p->count, p->ignored, count, p->size, p->wide);
    if (p->grad_hidden)
        multiply((addends){0}, p->grad_hidden + begin * p->inputs, rows_of(logits, count, p->wide, p->pairs, left),
                 p->to_hidden, count, p->inputs, p->wide, (upcoming){0});
    if (!part) return;
    lay_out(panels, hidden, count, p->inputs, p->pairs);
    multiply_over_tokens(part, columns_of(logits, count, p->wide, p->pairs, left), panels, p->wide, p->inputs, count,
                         adds, (upcoming){0});
}

// Compute the loss of each token, and the gradients of their sum divided by ``count``. Gradients may be null.
int64_t loss_of_head(const float *hidden, const float *weight, const int64_t *targets, float *losses, float *grad_hidden,
                     float *grad_weight, float count, int64_t ignored, int64_t pairs, int64_t tokens, int64_t inputs,
                     int64_t size, int64_t threads) {
    int64_t wide = blocks_of(size, 2 * LANES) * 2 * LANES, whole = wide * inputs;
    int64_t blocks = blocks_of(tokens, BLOCK), groups = groups_of(tokens);
    int64_t refused = 0;
    float *filled = room_for(3 * whole, &refused), *parts = grad_weight ? room_for(groups * whole, &refused) : 0;
    if (refused) {
        free(filled);
        free(parts);
        return refused;
    }
    problem p = {hidden, filled + whole, filled + 2 * whole, targets, losses, grad_hidden, count, ignored, tokens,
                 inputs, size, wide, pairs};
    memcpy(filled, weight, sizeof(float) * size * inputs);
    memset(filled + size * inputs, 0, sizeof(float) * (wide - size) * inputs);
    lay_out_turned(filled + whole, filled, inputs, wide, pairs, &refused);
    lay_out(filled + 2 * whole, filled, wide, inputs, pairs);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t group = 0; group < groups; group++) {
        float *scratch = room_for(BLOCK * (wide + inputs + (wide > inputs ? wide : inputs)), &refused);
        if (!scratch) continue;
        int64_t first = group * blocks / groups;
        for (int64_t block = first; block < (group + 1) * blocks / groups; block++)
            block_loss(&p, parts ? parts + group * whole : 0, block * BLOCK, scratch, block > first);
        free(scratch);
    }
    if (parts) add_parts(grad_weight, parts, size * inputs, groups, whole, threads);
    free(filled);
    free(parts);
    return refused;
}
