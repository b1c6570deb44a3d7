// A gated feed-forward with few weights: y = onto + h W2^T for u (tokens, inputs), where a = u W1^T, b = u W3^T and
// h = silu(a) b have ``hidden`` features. With s the sigmoid of a:
//
//     dh = dy W2,   da = dh b s (1 + a (1 - s)),   db = dh a s,   du = da W1 + db W3,
//     dW2 = dy^T h,   dW1 = da^T u,   dW3 = db^T u.
//
// With ``pairs``, the operands of products are rounded to bfloat16. Everything else is float32.
//
// Only a and b are stored for all tokens. h and the gradients of a, b and h exist for one block of tokens at a time.
#include "../backends/cpu_panels.h"

typedef struct {
    const float *u, *onto, *gate, *up, *down;  // the last three as panels
    float *a, *b;                              // null if not saved
    int64_t tokens, inputs, hidden;
    int pairs;
} problem;

static int64_t wider(const problem *p) { return p->hidden > p->inputs ? p->hidden : p->inputs; }

static void activate(float *h, const float *a, const float *b, int64_t total) {
    for (int64_t i = 0; i < total; i += LANES) {
        vec x = load(a + i);
        store(h + i, x * sigmoid_of(x) * load(b + i));
    }
}

static void block_forward(const problem *p, float *y, int64_t begin, float *scratch) {
    int64_t count = least(BLOCK, p->tokens - begin), room = BLOCK * p->hidden;
    float *h = scratch, *a = p->a ? p->a + begin * p->hidden : h + room;
    float *b = p->b ? p->b + begin * p->hidden : h + 2 * room, *left = h + 3 * room;
    matrix u = rows_of(p->u + begin * p->inputs, count, p->inputs, p->pairs, left);
    multiply((addends){0}, a, u, p->gate, count, p->hidden, p->inputs,
             block_of(p->onto, begin, p->inputs, p->tokens));
    multiply((addends){0}, b, u, p->up, count, p->hidden, p->inputs,
             block_of(p->u, begin + BLOCK, p->inputs, p->tokens));
    activate(h, a, b, count * p->hidden);
    multiply((addends){p->onto + begin * p->inputs, p->inputs, 0}, y + begin * p->inputs,
             rows_of(h, count, p->hidden, p->pairs, left), p->down, count, p->inputs, p->hidden, (upcoming){0});
}

// ``a`` and ``b`` (tokens, hidden) are saved for backward, or null.
int64_t feed_forward_forward(const float *u, const float *gate, const float *up, const float *down, const float *onto,
                             float *a, float *b, float *y, int64_t pairs, int64_t tokens, int64_t inputs,
                             int64_t hidden, int64_t threads) {
    int64_t size = inputs * hidden;
    int64_t refused = 0;
    float *panels = room_for(3 * size, &refused);
    if (!panels) return refused;
    problem p = {u, onto, panels, panels + size, panels + 2 * size, a, b, tokens, inputs, hidden, pairs};
    lay_out_turned(panels, gate, inputs, hidden, pairs, &refused);
    lay_out_turned(panels + size, up, inputs, hidden, pairs, &refused);
    lay_out_turned(panels + 2 * size, down, hidden, inputs, pairs, &refused);
    if (refused) {
        free(panels);
        return refused;
    }
#pragma omp parallel num_threads(threads)
    {
        float *scratch = room_for(BLOCK * (3 * hidden + wider(&p)), &refused);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t += BLOCK)
            if (scratch) block_forward(&p, y, t, scratch);
        free(scratch);
    }
    free(panels);
    return refused;
}

// Buffers of backward for one block of tokens.
typedef struct { float *h, *grad_a, *grad_b, *panels, *left; } scratch;

// Compute h, and the gradients of a and b; grad_a holds the gradient of h on entry.
static void propagate(const scratch *s, const float *a, const float *b, int64_t total) {
    for (int64_t i = 0; i < total; i += LANES) {
        vec x = load(a + i), z = load(b + i), given = load(s->grad_a + i), y = sigmoid_of(x);
        store(s->h + i, x * y * z);
        store(s->grad_a + i, given * z * slope_of(x, y));
        store(s->grad_b + i, given * (x * y));
    }
}

// Add one block to ``part``, the gradients of W1, W3 and W2.
static void add_to_weights(const problem *p, const scratch *s, float *part, const float *grad, int64_t begin,
                           int64_t count, int adds) {
    int64_t size = p->inputs * p->hidden;
    lay_out(s->panels, p->u + begin * p->inputs, count, p->inputs, p->pairs);
    multiply_over_tokens(part, columns_of(s->grad_a, count, p->hidden, p->pairs, s->left), s->panels, p->hidden,
                         p->inputs, count, adds, block_of(p->b, begin + BLOCK, p->hidden, p->tokens));
    multiply_over_tokens(part + size, columns_of(s->grad_b, count, p->hidden, p->pairs, s->left), s->panels, p->hidden,
                         p->inputs, count, adds, (upcoming){0});
    lay_out(s->panels, s->h, count, p->hidden, p->pairs);
    multiply_over_tokens(part + 2 * size, columns_of(grad, count, p->inputs, p->pairs, s->left), s->panels, p->inputs,
                         p->hidden, count, adds, (upcoming){0});
}

static void block_backward(const problem *p, const scratch *s, const float *all_grads, float *grad_u, float *part,
                           int64_t begin, int adds) {
    int64_t count = least(BLOCK, p->tokens - begin), here = begin * p->hidden;
    const float *grad = all_grads + begin * p->inputs;
    multiply((addends){0}, s->grad_a, rows_of(grad, count, p->inputs, p->pairs, s->left), p->down, count, p->hidden,
             p->inputs, block_of(p->a, begin, p->hidden, p->tokens));
    propagate(s, p->a + here, p->b + here, count * p->hidden);
    float *to = grad_u + begin * p->inputs;
    multiply((addends){0}, to, rows_of(s->grad_a, count, p->hidden, p->pairs, s->left), p->gate, count, p->inputs,
             p->hidden, block_of(p->u, begin, p->inputs, p->tokens));
    multiply((addends){to, p->inputs, 0}, to, rows_of(s->grad_b, count, p->hidden, p->pairs, s->left), p->up, count,
             p->inputs, p->hidden, block_of(all_grads, begin + BLOCK, p->inputs, p->tokens));
    if (part) add_to_weights(p, s, part, grad, begin, count, adds);
}

static void group_backward(const problem *p, const float *grad, float *grad_u, float *part, int64_t begin,
                           int64_t end, int64_t *refused) {
    int64_t room = BLOCK * p->hidden, widest = BLOCK * wider(p);
    float *at = room_for(3 * room + 2 * widest, refused);
    if (!at) return;
    scratch s = {at, at + room, at + 2 * room, at + 3 * room, at + 3 * room + widest};
    for (int64_t block = begin; block < end; block++)
        block_backward(p, &s, grad, grad_u, part, block * BLOCK, block > begin);
    free(at);
}

// The gradients of the weights are all null if they are not needed.
int64_t feed_forward_backward(const float *grad, const float *u, const float *gate, const float *up, const float *down,
                              float *a, float *b, float *grad_u, float *grad_gate, float *grad_up, float *grad_down,
                              int64_t pairs, int64_t tokens, int64_t inputs, int64_t hidden, int64_t threads) {
    int64_t size = inputs * hidden, blocks = blocks_of(tokens, BLOCK), groups = groups_of(tokens);
    int64_t refused = 0;
    float *panels = room_for(3 * size, &refused), *parts = grad_gate ? room_for(groups * 3 * size, &refused) : 0;
    if (refused) {
        free(panels);
        free(parts);
        return refused;
    }
    problem p = {u, 0, panels, panels + size, panels + 2 * size, a, b, tokens, inputs, hidden, pairs};
    lay_out(panels, gate, hidden, inputs, pairs);
    lay_out(panels + size, up, hidden, inputs, pairs);
    lay_out(panels + 2 * size, down, inputs, hidden, pairs);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t group = 0; group < groups; group++)
        group_backward(&p, grad, grad_u, parts ? parts + 3 * size * group : 0, group * blocks / groups,
                       (group + 1) * blocks / groups, &refused);
    float *grads[] = {grad_gate, grad_up, grad_down};
    for (int i = 0; parts && i < 3; i++) add_parts(grads[i], parts + i * size, size, groups, 3 * size, threads);
    free(panels);
    free(parts);
    return refused;
}
