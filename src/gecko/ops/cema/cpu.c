// CEMA step by step. The lanes of a register are channels; the states of a few modes stay in registers.
//
//     h_t = q h_{t-1} + p x_t,   y_t = Re(sum of gamma h_t) + omega x_t
//
// Forward saves the state before every tile of steps. Backward computes the states of a tile again and then runs
// backwards over its steps:
//
//     a_t = conj(gamma) dy_t + conj(q) a_{t+1},   dx_t = omega dy_t + sum of p Re(a_t),
//     dp = sum of x_t Re(a_t),   dq = sum of a_t conj(h_{t-1}),   dgamma = sum of dy_t conj(h_t).
//
// A tile is split into runs at document starts. Before such a run h is zero, and no gradient passes to earlier steps.
#include "../backends/cpu.h"

enum {
    TILE = 64,
    TOGETHER = 4,  // modes per pass of forward: their states and coefficients fit in registers
    PAIR = 2,      // modes per pass of backward: gradients fit in registers too, and the tile's states in the L1 cache
};

typedef struct { vec re, im; } complex_vec;
typedef struct { vec p; complex_vec q, gamma; } mode;
typedef struct { int begin, end, fresh; } run;

// Row-major tensors: (rows, length, channels) or (channels, modes). Complex numbers are interleaved.
typedef struct {
    const float *x, *p, *q, *gamma, *skip, *initial;
    const uint8_t *starts;  // (rows, length), or null where no document starts
    const int64_t *ends;    // (rows), number of steps that count, or null if all do
    int64_t rows, length, channels, modes;
    int64_t blocks, tiles;
    int padded;  // modes, rounded up to a multiple of TOGETHER; the others are zero
} problem;

static problem problem_of(const float *x, const float *p, const float *q, const float *gamma, const float *skip,
                          const float *initial, const uint8_t *starts, const int64_t *ends, int64_t rows,
                          int64_t length, int64_t channels, int64_t modes) {
    return (problem){x, p, q, gamma, skip, initial, starts, ends, rows, length, channels, modes,
                     blocks_of(channels, LANES), blocks_of(length, TILE), blocks_of(modes, TOGETHER) * TOGETHER};
}

static int64_t end_of(const problem *a, int64_t row) { return a->ends ? a->ends[row] : a->length; }

static int lanes_at(const problem *a, int64_t block) { return least(LANES, a->channels - block * LANES); }

static void gather_modes(mode *to, const problem *a, int64_t block) {
    memset(to, 0, sizeof(mode) * a->padded);
    for (int i = 0; i < lanes_at(a, block); i++)
        for (int64_t n = 0; n < a->modes; n++) {
            int64_t at = (block * LANES + i) * a->modes + n;
            to[n].p[i] = a->p[at];
            to[n].q.re[i] = a->q[2 * at], to[n].q.im[i] = a->q[2 * at + 1];
            to[n].gamma.re[i] = a->gamma[2 * at], to[n].gamma.im[i] = a->gamma[2 * at + 1];
        }
}

// Copy complex numbers (channels, modes) of one row to lanes (zeros if ``from`` is null); ``scatter`` copies them back.
static void gather(complex_vec *to, const float *from, const problem *a, int64_t block) {
    memset(to, 0, sizeof(complex_vec) * a->padded);
    if (!from) return;
    from += 2 * block * LANES * a->modes;
    for (int i = 0; i < lanes_at(a, block); i++)
        for (int64_t n = 0; n < a->modes; n++) {
            to[n].re[i] = from[2 * (i * a->modes + n)];
            to[n].im[i] = from[2 * (i * a->modes + n) + 1];
        }
}

static void scatter(float *to, const complex_vec *from, const problem *a, int64_t block) {
    to += 2 * block * LANES * a->modes;
    for (int i = 0; i < lanes_at(a, block); i++)
        for (int64_t n = 0; n < a->modes; n++) {
            to[2 * (i * a->modes + n)] = from[n].re[i];
            to[2 * (i * a->modes + n) + 1] = from[n].im[i];
        }
}

static void scatter_real(float *to, const vec *from, const problem *a, int64_t block) {
    to += block * LANES * a->modes;
    for (int i = 0; i < lanes_at(a, block); i++)
        for (int64_t n = 0; n < a->modes; n++) to[i * a->modes + n] = from[n][i];
}

static int tile_runs(run *to, const problem *a, int64_t row, int64_t tile) {
    int steps = least(TILE, end_of(a, row) - tile * TILE), count = 1;
    to[0] = (run){0, steps, 0};
    if (!a->starts) return 1;
    const uint8_t *starts = a->starts + row * a->length + tile * TILE;
    to[0].fresh = starts[0];
    for (int t = 1; t < steps; t++)
        if (starts[t]) {
            to[count - 1].end = t;
            to[count++] = (run){t, steps, 1};
        }
    return count;
}

static int64_t offset(const problem *a, int64_t row, int64_t block, int64_t tile) {
    return (row * a->length + tile * TILE) * a->channels + block * LANES;
}

static float *kept_at(float *kept, const problem *a, int64_t row, int64_t block, int64_t tile) {
    return kept + ((row * a->blocks + block) * a->tiles + tile) * 2 * a->padded * LANES;
}

static inline complex_vec advance(complex_vec h, complex_vec q, vec added) {
    return (complex_vec){q.re * h.re + (added - q.im * h.im), q.re * h.im + q.im * h.re};
}

static void run_forward(const mode *modes, complex_vec *state, const vec *x, vec *y, run r) {
    mode m[TOGETHER];
    complex_vec h[TOGETHER];
    for (int k = 0; k < TOGETHER; k++) m[k] = modes[k], h[k] = r.fresh ? (complex_vec){{0}, {0}} : state[k];
    for (int t = r.begin; t < r.end; t++) {
        vec sum = y[t], rest = {0};
        for (int k = 0; k < TOGETHER; k++) {
            h[k] = advance(h[k], m[k].q, m[k].p * x[t]);
            sum += m[k].gamma.re * h[k].re;
            rest += m[k].gamma.im * h[k].im;
        }
        y[t] = sum - rest;
    }
    for (int k = 0; k < TOGETHER; k++) state[k] = h[k];
}

static void block_forward(const problem *a, int64_t row, int64_t block, float *y, float *kept, float *final) {
    int lanes = lanes_at(a, block);
    mode m[a->padded];
    complex_vec h[a->padded];
    vec in[TILE], out[TILE], omega = load_some(a->skip + block * LANES, lanes);
    run runs[TILE];
    gather_modes(m, a, block);
    gather(h, a->initial + 2 * row * a->channels * a->modes, a, block);
    int64_t end = end_of(a, row);
    for (int64_t tile = 0; tile * TILE < end; tile++) {
        int64_t at = offset(a, row, block, tile);
        int count = tile_runs(runs, a, row, tile), steps = runs[count - 1].end;
        if (kept) memcpy(kept_at(kept, a, row, block, tile), h, sizeof h);
        for (int t = 0; t < steps; t++) {
            in[t] = load_some(a->x + at + t * a->channels, lanes);
            out[t] = omega * in[t];
        }
        for (int r = 0; r < count; r++)
            for (int n = 0; n < a->padded; n += TOGETHER) run_forward(m + n, h + n, in, out, runs[r]);
        for (int t = 0; t < steps; t++) store_some(y + at + t * a->channels, out[t], lanes);
    }
    for (int64_t t = end; t < a->length; t++) store_some(y + offset(a, row, block, 0) + t * a->channels, (vec){0}, lanes);
    scatter(final + 2 * row * a->channels * a->modes, h, a, block);
}

// ``kept``: receives the states before every tile, (rows, blocks, tiles, padded modes, 2, LANES), or null.
int64_t cema_forward(const float *x, const float *p, const float *q, const float *gamma, const float *skip,
                     const float *initial, const uint8_t *starts, const int64_t *ends, float *y, float *kept,
                     float *final, int64_t rows, int64_t length, int64_t channels, int64_t modes, int64_t threads) {
    problem a = problem_of(x, p, q, gamma, skip, initial, starts, ends, rows, length, channels, modes);
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (rows * length * channels > ALONE)
    for (int64_t row = 0; row < a.rows; row++)
        for (int64_t block = 0; block < a.blocks; block++) block_forward(&a, row, block, y, kept, final);
    return 0;
}

typedef struct { vec p; complex_vec q, gamma; } sums;

// For PAIR modes, compute the state before every step of a run, and add to the sum of dgamma.
static void run_states(const mode *modes, complex_vec *state, const vec *x, const vec *grad_y,
                       complex_vec (*before)[PAIR], sums *total, run r) {
    mode m[PAIR];
    complex_vec h[PAIR], sum[PAIR];
    for (int k = 0; k < PAIR; k++) {
        m[k] = modes[k], h[k] = r.fresh ? (complex_vec){{0}, {0}} : state[k], sum[k] = total[k].gamma;
    }
    for (int t = r.begin; t < r.end; t++)
        for (int k = 0; k < PAIR; k++) {
            before[t][k] = h[k];
            h[k] = advance(h[k], m[k].q, m[k].p * x[t]);
            sum[k].re += grad_y[t] * h[k].re;
            sum[k].im -= grad_y[t] * h[k].im;
        }
    for (int k = 0; k < PAIR; k++) state[k] = h[k], total[k].gamma = sum[k];
}

// ``back`` is conj(q) a_{t+1}, the gradient of h_t through all later steps.
static void run_backward(const mode *modes, complex_vec *back, const vec *x, const vec *grad_y, vec *grad_x,
                         complex_vec (*before)[PAIR], sums *total, run r) {
    mode m[PAIR];
    complex_vec a[PAIR], sum_q[PAIR];
    vec sum_p[PAIR];
    for (int k = 0; k < PAIR; k++) m[k] = modes[k], a[k] = back[k], sum_p[k] = total[k].p, sum_q[k] = total[k].q;
    for (int t = r.end - 1; t >= r.begin; t--) {
        vec given = grad_y[t], here = x[t], to = grad_x[t];
        for (int k = 0; k < PAIR; k++) {
            complex_vec h = before[t][k];
            a[k].re += m[k].gamma.re * given;
            a[k].im -= m[k].gamma.im * given;
            to += m[k].p * a[k].re;
            sum_p[k] += here * a[k].re;
            sum_q[k].re += a[k].re * h.re + a[k].im * h.im;
            sum_q[k].im += a[k].im * h.re - a[k].re * h.im;
            a[k] = (complex_vec){m[k].q.re * a[k].re + m[k].q.im * a[k].im, m[k].q.re * a[k].im - m[k].q.im * a[k].re};
        }
        grad_x[t] = to;
    }
    for (int k = 0; k < PAIR; k++) {
        back[k] = r.fresh ? (complex_vec){{0}, {0}} : a[k];
        total[k].p = sum_p[k], total[k].q = sum_q[k];
    }
}

static void add_sums(sums *to, const sums *from, int count) {
    for (int n = 0; n < count; n++) {
        to[n].p += from[n].p;
        to[n].q.re += from[n].q.re, to[n].q.im += from[n].q.im;
        to[n].gamma.re += from[n].gamma.re, to[n].gamma.im += from[n].gamma.im;
    }
}

static void tile_backward(const mode *m, complex_vec *back, const float *kept, const vec *x, const vec *grad_y,
                          vec *grad_x, sums *total, int padded, const run *runs, int count) {
    complex_vec before[TILE][PAIR], h[padded];
    memcpy(h, kept, sizeof h);
    for (int n = 0; n < padded; n += PAIR) {
        for (int r = 0; r < count; r++) run_states(m + n, h + n, x, grad_y, before, total + n, runs[r]);
        for (int r = count - 1; r >= 0; r--)
            run_backward(m + n, back + n, x, grad_y, grad_x, before, total + n, runs[r]);
    }
}

typedef struct { float *x, *p, *q, *gamma, *skip, *initial; } gradients;

// Compute the gradients of one block of channels for rows group, group + groups, ...; those of coefficients are summed.
static void block_backward(const problem *a, const float *grad_y, const float *grad_final, float *kept, gradients to,
                           int64_t group, int64_t groups, int64_t block) {
    int lanes = lanes_at(a, block);
    int64_t per_row = a->channels * a->modes;
    mode m[a->padded];
    complex_vec back[a->padded], part[a->padded];
    sums total[a->padded], in_tile[a->padded];
    vec x[TILE], given[TILE], grad_x[TILE], omega = load_some(a->skip + block * LANES, lanes), grad_omega = {0};
    run runs[TILE];
    gather_modes(m, a, block);
    memset(total, 0, sizeof total);
    for (int64_t row = group; row < a->rows; row += groups) {
        gather(back, grad_final ? grad_final + 2 * row * per_row : 0, a, block);
        for (int64_t tile = a->tiles - 1; tile >= 0; tile--) {
            int64_t at = offset(a, row, block, tile);
            int count = tile_runs(runs, a, row, tile), steps = runs[count - 1].end;
            for (int t = 0; t < steps; t++) {
                x[t] = load_some(a->x + at + t * a->channels, lanes);
                given[t] = load_some(grad_y + at + t * a->channels, lanes);
                grad_x[t] = omega * given[t];
                grad_omega += x[t] * given[t];
            }
            memset(in_tile, 0, sizeof in_tile);
            tile_backward(m, back, kept_at(kept, a, row, block, tile), x, given, grad_x, in_tile, a->padded, runs, count);
            add_sums(total, in_tile, a->padded);
            for (int t = 0; t < steps; t++) store_some(to.x + at + t * a->channels, grad_x[t], lanes);
        }
        scatter(to.initial + 2 * row * per_row, back, a, block);
    }
    vec real[a->padded];
    for (int n = 0; n < a->padded; n++) real[n] = total[n].p;
    scatter_real(to.p + group * per_row, real, a, block);
    for (int n = 0; n < a->padded; n++) part[n] = total[n].q;
    scatter(to.q + 2 * group * per_row, part, a, block);
    for (int n = 0; n < a->padded; n++) part[n] = total[n].gamma;
    scatter(to.gamma + 2 * group * per_row, part, a, block);
    store_some(to.skip + group * a->channels + block * LANES, grad_omega, lanes);
}

// Gradients of coefficients are (groups, ...), to be summed. ``grad_final`` may be null.
int64_t cema_backward(const float *x, const float *p, const float *q, const float *gamma, const float *skip,
                      const uint8_t *starts, float *kept, const float *grad_y, const float *grad_final, float *grad_x,
                      float *grad_p, float *grad_q, float *grad_gamma, float *grad_skip, float *grad_initial,
                      int64_t groups, int64_t rows, int64_t length, int64_t channels, int64_t modes, int64_t threads) {
    problem a = problem_of(x, p, q, gamma, skip, 0, starts, 0, rows, length, channels, modes);
    gradients to = {grad_x, grad_p, grad_q, grad_gamma, grad_skip, grad_initial};
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (rows * length * channels > ALONE)
    for (int64_t group = 0; group < groups; group++)
        for (int64_t block = 0; block < a.blocks; block++)
            block_backward(&a, grad_y, grad_final, kept, to, group, groups, block);
    return 0;
}
