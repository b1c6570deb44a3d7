// Timestep norm in three passes: compute the moments of every slice (the features of one group in one step), run the
// recurrence of the statistics over steps, and normalise the slices. The first and the last pass read all of x and are
// parallel over slices.
//
// mu and s are mean and variance of a slice of n = D / G features; m and v are those of the document so far. N is the
// number of steps of the document up to t. Decaying:
//     m_t = b1 m_{t-1} + (1 - b1) mu_t,   v_t = b2 v_{t-1} + (1 - b2) s_t,   M_t = m_t / (1 - b1^N),   V_t likewise.
// Cumulative, with k = 1 / N, M = m and V = v:
//     m_t = m_{t-1} + k (mu_t - m_{t-1}),   v_t = v_{t-1} + k (s_t + (1 - k) (mu_t - m_{t-1})^2 - v_{t-1}).
// Then y = z (1 + weight) + bias, with z = (x - M) r and r = 1 / sqrt(V + eps).
//
// Backward reads x again, and M and r, which forward saved. With g = dy (1 + weight) and sums over a slice:
//     dM = -r sum of g,   dV = -r^3 / 2 sum of g (x - M),   dx = g r + dmu / n + 2 (x - mu) ds / n.
// dmu and ds come from the recurrence run backwards; no gradient passes a document start.

#include "../backends/cpu_slices.h"

typedef struct {
    slices_of_x of;
    const float *mean, *variance;    // (rows, groups), before the first step
    const uint8_t *starts;           // (rows, length), or null where no document starts
    const int64_t *ends;             // (rows), number of steps that count, or null if all do
    const double *betas;             // two, or null if cumulative
    float *factors;                  // (rows, length, 2): 1 / (1 - beta^N) of mean and variance; cumulative: 1 / N
    int64_t rows, length;
    float eps;
} problem;

typedef struct { double mean, variance; } pair;

static problem problem_of(const float *x, const float *weight, const float *bias, const float *mean,
                          const float *variance, const uint8_t *starts, const int64_t *ends, const double *betas,
                          float *factors, float eps, int64_t rows, int64_t length, int64_t groups, int64_t width) {
    return (problem){{x, weight, bias, groups, width, rows * length * groups}, mean, variance, starts, ends, betas,
                     factors, rows, length, eps};
}

static inline int64_t end_of(const problem *a, int64_t row) { return a->ends ? a->ends[row] : a->length; }

static inline int fresh_at(const problem *a, int64_t row, int64_t t) {
    return a->starts && a->starts[row * a->length + t];
}

// Count the steps and compute the factors. In double, because 1 - beta^N would lose digits for a beta near 1.
static void count_steps(const problem *a, int64_t row, int64_t *count) {
    float *factors = a->factors + row * a->length * 2;
    pair beta = a->betas ? (pair){a->betas[0], a->betas[1]} : (pair){0.0, 0.0};
    pair power = {pow(beta.mean, count[row]), pow(beta.variance, count[row])};
    int64_t steps = count[row], end = end_of(a, row);
    for (int64_t t = 0; t < a->length; t++) {
        if (fresh_at(a, row, t)) steps = 0, power = (pair){1.0, 1.0};
        steps++;
        power.mean *= beta.mean, power.variance *= beta.variance;
        factors[2 * t] = 1.0 / (a->betas ? 1.0 - power.mean : steps);
        factors[2 * t + 1] = 1.0 / (a->betas ? 1.0 - power.variance : steps);
        if (t + 1 == end) count[row] = steps;
    }
}

static void slice_moments(const problem *a, int64_t first, float *mean, float *variance) {
    int count = least(LANES, a->of.count - first);
    vec means = means_of(&a->of, first, count);
    store_some(mean + first, means, count);
    store_some(variance + first, variances_of(&a->of, first, count, means), count);
}

static inline pair advance(const problem *a, pair s, pair beta, const float *factor, double mean, double variance) {
    if (a->betas)
        return (pair){beta.mean * s.mean + (1.0 - beta.mean) * mean,
                      beta.variance * s.variance + (1.0 - beta.variance) * variance};
    double k = *factor, step = mean - s.mean;
    return (pair){s.mean + k * step, s.variance + k * (variance + (1.0 - k) * step * step - s.variance)};
}

// Replace moments by corrected statistics, in place. In double: with b = 0.9999 a rounding error decays over ten
// thousand steps, so the errors of many steps would accumulate.
static void recur(const problem *a, int64_t row, int64_t begin, int count, float *mean, float *variance,
                  float *final_mean, float *final_variance) {
    pair s[LANES], beta = a->betas ? (pair){a->betas[0], a->betas[1]} : (pair){0.0, 0.0};
    int64_t series = row * a->of.groups + begin, end = end_of(a, row);
    for (int i = 0; i < count; i++) s[i] = (pair){a->mean[series + i], a->variance[series + i]};
    for (int64_t t = 0; t < a->length; t++) {
        int64_t at = (row * a->length + t) * a->of.groups + begin;
        const float *factor = a->factors + (row * a->length + t) * 2;
        if (fresh_at(a, row, t)) memset(s, 0, sizeof s);
        for (int i = 0; i < count; i++) {
            s[i] = advance(a, s[i], beta, factor, mean[at + i], variance[at + i]);
            mean[at + i] = a->betas ? s[i].mean * factor[0] : s[i].mean;
            variance[at + i] = a->betas ? s[i].variance * factor[1] : s[i].variance;
        }
        if (t + 1 < end || t >= end) continue;
        for (int i = 0; i < count; i++) final_mean[series + i] = s[i].mean, final_variance[series + i] = s[i].variance;
    }
}

// Normalise up to LANES slices by their statistics, and replace their variance by r.
static void normalise(const problem *a, int64_t first, const float *mean, float *variance, float *y) {
    int count = least(LANES, a->of.count - first);
    vec rstd = inverse_root_of(load_some(variance + first, count) + a->eps);
    int64_t group = first % a->of.groups;
    store_some(variance + first, rstd, count);
    for (int i = 0; i < count; i++) {
        for (int64_t c = 0; c < a->of.width; c += LANES) {
            int64_t at = (first + i) * a->of.width + c;
            vec z = (load_some(a->of.x + at, lanes_at(&a->of, c)) - mean[first + i]) * rstd[i];
            store_some(y + at, z * scale_at(&a->of, group, c) + shift_at(&a->of, group, c), lanes_at(&a->of, c));
        }
        group = group + 1 == a->of.groups ? 0 : group + 1;
    }
}

// ``count`` (rows) holds the steps of the document before the call, and receives those after it. ``kept`` (2, rows,
// length, groups) receives M and r of every slice.
int64_t timestep_norm_forward(const float *x, const float *weight, const float *bias, const float *mean,
                              const float *variance, const uint8_t *starts, const int64_t *ends, const double *betas,
                              float *factors, int64_t *count, float *y, float *kept, float *final_mean,
                              float *final_variance, float eps, int64_t rows, int64_t length, int64_t groups,
                              int64_t width, int64_t threads) {
    problem a = problem_of(x, weight, bias, mean, variance, starts, ends, betas, factors, eps, rows, length, groups,
                           width);
    float *spread = kept + a.of.count;
#pragma omp parallel num_threads(threads) if (a.of.count * width > ALONE)
    {
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < rows; row++) count_steps(&a, row, count);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < a.of.count; first += LANES) slice_moments(&a, first, kept, spread);
#pragma omp for collapse(2) schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t begin = 0; begin < groups; begin += LANES)
                recur(&a, row, begin, least(LANES, groups - begin), kept, spread, final_mean, final_variance);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < a.of.count; first += LANES) normalise(&a, first, kept, spread, y);
    }
    return 0;
}

// Per slice: M and r saved by forward, mu, and the gradients of M and V, which are replaced by those of mu and s.
typedef struct { const float *mean, *rstd; float *mu, *grad_mean, *grad_variance; } slices;

static void slice_gradients(const problem *a, int64_t first, const float *grad_y, slices of) {
    int count = least(LANES, a->of.count - first);
    vec sums[LANES] = {0}, along[LANES] = {0}, rstd = load_some(of.rstd + first, count);
    int64_t group = first % a->of.groups;
    for (int i = 0; i < count; i++) {
        for (int64_t c = 0; c < a->of.width; c += LANES) {
            int64_t at = (first + i) * a->of.width + c;
            vec g = load_some(grad_y + at, lanes_at(&a->of, c)) * scale_at(&a->of, group, c);
            sums[i] += g;
            along[i] += g * (load_some(a->of.x + at, lanes_at(&a->of, c)) - of.mean[first + i]);
        }
        group = group + 1 == a->of.groups ? 0 : group + 1;
    }
    store_some(of.mu + first, means_of(&a->of, first, count), count);
    store_some(of.grad_mean + first, -rstd * sums_of(sums), count);
    store_some(of.grad_variance + first, -0.5f * rstd * rstd * rstd * sums_of(along), count);
}

// Run one step of the recurrence backwards. ``back`` is the gradient of m_t and v_t from later steps; ``step`` is
// mu_t - m_{t-1}, for cumulative statistics.
static inline pair retreat(const problem *a, pair *back, pair beta, const float *factor, pair grad, double step) {
    if (a->betas) {
        double mean = back->mean + factor[0] * grad.mean, variance = back->variance + factor[1] * grad.variance;
        *back = (pair){beta.mean * mean, beta.variance * variance};
        return (pair){(1.0 - beta.mean) * mean, (1.0 - beta.variance) * variance};
    }
    double mean = back->mean + grad.mean, variance = back->variance + grad.variance;
    double k = *factor, slope = 2.0 * k * (1.0 - k) * step * variance;
    *back = (pair){(1.0 - k) * mean - slope, (1.0 - k) * variance};
    return (pair){k * mean + slope, k * variance};
}

static void recur_back(const problem *a, int64_t row, int64_t begin, int count, slices of, const float *grad_mean,
                       const float *grad_variance, float *to_mean, float *to_variance) {
    pair s[LANES], beta = a->betas ? (pair){a->betas[0], a->betas[1]} : (pair){0.0, 0.0};
    int64_t series = row * a->of.groups + begin;
    for (int i = 0; i < count; i++) s[i] = (pair){grad_mean[series + i], grad_variance[series + i]};
    for (int64_t t = a->length - 1; t >= 0; t--) {
        int64_t at = (row * a->length + t) * a->of.groups + begin;
        const float *factor = a->factors + (row * a->length + t) * 2;
        const float *before = t ? of.mean + at - a->of.groups : a->mean + series;
        for (int i = 0; i < count; i++) {
            pair grad = {of.grad_mean[at + i], of.grad_variance[at + i]};
            grad = retreat(a, s + i, beta, factor, grad, of.mu[at + i] - before[i]);
            of.grad_mean[at + i] = grad.mean, of.grad_variance[at + i] = grad.variance;
        }
        if (fresh_at(a, row, t)) memset(s, 0, sizeof s);
    }
    for (int i = 0; i < count; i++) to_mean[series + i] = s[i].mean, to_variance[series + i] = s[i].variance;
}

// Compute the gradient of x for one slice, and add to the gradients of weight and bias.
static void propagate(const problem *a, int64_t slice, slices of, const float *grad_y, float *grad_x, vec *scales,
                      vec *shifts) {
    int64_t group = slice % a->of.groups;
    float part = 1.0f / a->of.width, mean = of.mean[slice], rstd = of.rstd[slice], mu = of.mu[slice];
    float added = part * of.grad_mean[slice], slope = 2.0f * part * of.grad_variance[slice];
    for (int64_t c = 0; c < a->of.width; c += LANES, scales++, shifts++) {
        int lanes = lanes_at(&a->of, c);
        int64_t at = slice * a->of.width + c;
        vec x = load_some(a->of.x + at, lanes), g = load_some(grad_y + at, lanes);
        *scales += g * ((x - mean) * rstd);
        *shifts += g;
        vec grad = g * scale_at(&a->of, group, c) * rstd + (slope * (x - mu) + added);
        store_some(grad_x + at, grad, lanes);
    }
}

static void add(vec *to, vec *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
    memset(from, 0, sizeof(vec) * count);
}

// Process the steps of one part. Gradients of weight and bias are summed over LANES steps, then over those sums.
static void part_backward(const problem *a, int64_t begin, int64_t end, slices of, const float *grad_y, float *grad_x,
                          float *grad_weight, float *grad_bias, int64_t *refused) {
    int64_t blocks = blocks_of(a->of.width, LANES), size = a->of.groups * blocks;
    vec *total = (vec *)room_for(4 * size * LANES, refused), *in_tile = total + 2 * size;
    if (!total) return;
    memset(total, 0, sizeof(vec) * 4 * size);
    for (int64_t step = begin; step < end; step++) {
        for (int64_t group = 0; group < a->of.groups; group++) {
            vec *scales = in_tile + group * blocks;
            propagate(a, step * a->of.groups + group, of, grad_y, grad_x, scales, scales + size);
        }
        if ((step - begin) % LANES == LANES - 1 || step + 1 == end) add(total, in_tile, 2 * size);
    }
    scatter_sums(grad_weight, total, &a->of);
    scatter_sums(grad_bias, total + size, &a->of);
    free(total);
}

// The gradients of weight and bias are (parts, features); the caller sums them. ``room`` is (3, rows, length, groups).
int64_t timestep_norm_backward(const float *x, const float *weight, const float *mean, const uint8_t *starts,
                               const double *betas, float *factors, const float *kept, float *room, const float *grad_y,
                               const float *grad_final_mean, const float *grad_final_variance, float *grad_x,
                               float *grad_weight, float *grad_bias, float *grad_mean, float *grad_variance,
                               int64_t parts, int64_t rows, int64_t length, int64_t groups, int64_t width,
                               int64_t threads) {
    problem a = problem_of(x, weight, 0, mean, 0, starts, 0, betas, factors, 0, rows, length, groups, width);
    slices of = {kept, kept + a.of.count, room, room + a.of.count, room + 2 * a.of.count};
    int64_t steps = rows * length, features = groups * width, refused = 0;
#pragma omp parallel num_threads(threads) if (a.of.count * width > ALONE)
    {
#pragma omp for schedule(static)
        for (int64_t first = 0; first < a.of.count; first += LANES) slice_gradients(&a, first, grad_y, of);
#pragma omp for collapse(2) schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t begin = 0; begin < groups; begin += LANES)
                recur_back(&a, row, begin, least(LANES, groups - begin), of, grad_final_mean, grad_final_variance,
                           grad_mean, grad_variance);
#pragma omp for schedule(static)
        for (int64_t part = 0; part < parts; part++)
            part_backward(&a, part * steps / parts, (part + 1) * steps / parts, of, grad_y, grad_x,
                          grad_weight + part * features, grad_bias + part * features, &refused);
    }
    return refused;
}
