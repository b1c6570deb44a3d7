// Query-key scale and shift in one pass each for forward and backward: normalise the d features of each head, and
// return several scaled and shifted copies (rows).
//
//     n = r z,   r = 1 / sqrt(mean(z^2) + eps),   row_i = n (1 + scale_i) / sqrt(d) + offset_i
//
// Backward computes n again from z, and reads the rows' gradients g_i once:
//
//     total = sum of (1 + scale_i) g_i,   dz = r / sqrt(d) (total - n mean(total n)),
//     dscale_i = sum over tokens of g_i n / sqrt(d),   doffset_i = sum over tokens of g_i.
//
// Sums over tokens are computed per tile and then added per group of tiles.
#include "../backends/cpu.h"

enum { TILE = 64 };

// z is (tokens, heads, size), scale and offset (rows, heads, size), each row (B, heads, length, size).
typedef struct {
    const float *z, *scale, *offset;
    int64_t rows, tokens, length, heads, size, blocks;
    float eps, factor;
} problem;

static problem problem_of(const float *z, const float *scale, const float *offset, float eps, int64_t rows,
                          int64_t batch, int64_t length, int64_t heads, int64_t size) {
    return (problem){z, scale, offset, rows, batch * length, length, heads, size, blocks_of(size, LANES),
                     eps, 1.0f / sqrtf(size)};
}

static int lanes_at(const problem *a, int64_t block) { return least(LANES, a->size - block * LANES); }

// Offsets of the features of a head: of a token in z, of a token in a row of the result, of the parameters of a row.
static int64_t by_token(const problem *a, int64_t token, int64_t head) { return (token * a->heads + head) * a->size; }

static int64_t by_head(const problem *a, int64_t token, int64_t head) {
    return ((token / a->length * a->heads + head) * a->length + token % a->length) * a->size;
}

static int64_t by_row(const problem *a, int64_t row, int64_t head) { return (row * a->heads + head) * a->size; }

// Compute n, and return r.
static float normalise(const problem *a, vec *n, int64_t token, int64_t head) {
    const float *z = a->z + by_token(a, token, head);
    vec squares = {0};
    for (int64_t c = 0; c < a->blocks; c++) {
        n[c] = load_some(z + c * LANES, lanes_at(a, c));
        squares += n[c] * n[c];
    }
    float r = 1.0f / sqrtf(sum_of(squares) / a->size + a->eps);
    for (int64_t c = 0; c < a->blocks; c++) n[c] *= r;
    return r;
}

static void token_forward(const problem *a, float *const *out, int64_t token, int64_t head) {
    vec n[a->blocks];
    normalise(a, n, token, head);
    for (int64_t row = 0; row < a->rows; row++) {
        const float *scale = a->scale + by_row(a, row, head), *offset = a->offset + by_row(a, row, head);
        float *to = out[row] + by_head(a, token, head);
        for (int64_t c = 0; c < a->blocks; c++) {
            int lanes = lanes_at(a, c);
            vec factor = (1.0f + load_some(scale + c * LANES, lanes)) * a->factor;
            store_some(to + c * LANES, n[c] * factor + load_some(offset + c * LANES, lanes), lanes);
        }
    }
}

// ``out`` points to each row.
int64_t qk_scale_shift_forward(const float *z, const float *scale, const float *offset, float *const *out, float eps,
                        int64_t rows, int64_t batch, int64_t length, int64_t heads, int64_t size, int64_t threads) {
    problem a = problem_of(z, scale, offset, eps, rows, batch, length, heads, size);
#pragma omp parallel for schedule(static) num_threads(threads) if (a.tokens * heads * size > ALONE)
    for (int64_t token = 0; token < a.tokens; token++)
        for (int64_t head = 0; head < heads; head++) token_forward(&a, out, token, head);
    return 0;
}

// ``sums``: sums of g n, then of g, (rows, 2, blocks). ``grads`` is null for rows without a gradient.
static void token_backward(const problem *a, const float *const *grads, float *grad_z, vec *sums, int64_t token,
                           int64_t head) {
    vec n[a->blocks], total[a->blocks], along = {0};
    memset(total, 0, sizeof total);
    float r = normalise(a, n, token, head);
    for (int64_t row = 0; row < a->rows; row++) {
        if (!grads[row]) continue;
        const float *scale = a->scale + by_row(a, row, head), *grad = grads[row] + by_head(a, token, head);
        vec *with_n = sums + 2 * row * a->blocks, *plain = with_n + a->blocks;
        for (int64_t c = 0; c < a->blocks; c++) {
            int lanes = lanes_at(a, c);
            vec given = load_some(grad + c * LANES, lanes);
            with_n[c] += given * n[c];
            plain[c] += given;
            total[c] += given * (1.0f + load_some(scale + c * LANES, lanes));
        }
    }
    for (int64_t c = 0; c < a->blocks; c++) along += total[c] * n[c];
    float mean = sum_of(along) / a->size;
    grad_z += by_token(a, token, head);
    for (int64_t c = 0; c < a->blocks; c++)
        store_some(grad_z + c * LANES, (total[c] - n[c] * mean) * (r * a->factor), lanes_at(a, c));
}

// Add the sums of a tile to those of its group.
static void add_sums(const problem *a, float *grad_scale, float *grad_offset, const vec *sums, int64_t head) {
    for (int64_t row = 0; row < a->rows; row++) {
        float *scale = grad_scale + by_row(a, row, head), *offset = grad_offset + by_row(a, row, head);
        const vec *with_n = sums + 2 * row * a->blocks, *plain = with_n + a->blocks;
        for (int64_t c = 0; c < a->blocks; c++) {
            int64_t at = c * LANES;
            int lanes = lanes_at(a, c);
            store_some(scale + at, load_some(scale + at, lanes) + with_n[c] * a->factor, lanes);
            store_some(offset + at, load_some(offset + at, lanes) + plain[c], lanes);
        }
    }
}

// grad_scale, grad_offset: (groups, rows, heads, size), initially zero; the caller sums over groups. ``grads`` points
// to the gradient of each row, or is null for zeros.
int64_t qk_scale_shift_backward(const float *z, const float *scale, const float *const *grads, float *grad_z, float *grad_scale,
                         float *grad_offset, float eps, int64_t groups, int64_t rows, int64_t batch, int64_t length,
                         int64_t heads, int64_t size, int64_t threads) {
    problem a = problem_of(z, scale, 0, eps, rows, batch, length, heads, size);
    int64_t tiles = blocks_of(a.tokens, TILE), per_group = rows * heads * size;
    int64_t refused = 0;
    size_t held = sizeof(vec) * 2 * rows * a.blocks;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (a.tokens * heads * size > ALONE)
    for (int64_t group = 0; group < groups; group++)
        for (int64_t head = 0; head < heads; head++) {
            vec *sums = (vec *)room_for(held / sizeof(float), &refused);
            if (!sums) continue;
            for (int64_t tile = group * tiles / groups; tile < (group + 1) * tiles / groups; tile++) {
                memset(sums, 0, held);
                for (int64_t token = tile * TILE; token < least(a.tokens, (tile + 1) * TILE); token++)
                    token_backward(&a, grads, grad_z, sums, token, head);
                add_sums(&a, grad_scale + group * per_group, grad_offset + group * per_group, sums, head);
            }
            free(sums);
        }
    return refused;
}
