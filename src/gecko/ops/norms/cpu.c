// RMS norm, or layer norm if ``centered``, of slices. A slice is the features of one group in one step. LANES slices
// are processed at a time, so that they are in the cache when they are read again.
//
//     z = (x - m) r,   r = 1 / sqrt(mean of (x - m)^2 + eps),   y = z (1 + weight) + bias
//
// m is the mean of the slice for layer norm, else 0. Backward reads x again, and m and r, which forward saved. With
// g = dy (1 + weight):
//     dx = r (g - z mean of g z - mean of g),   dweight = sum of dy z,   dbias = sum of dy.
// The term "mean of g" is for layer norm only.

#include "../backends/cpu_slices.h"

typedef struct {
    slices_of_x of;
    int64_t centered;
    float eps;
} problem;

static problem problem_of(const float *x, const float *weight, const float *bias, float eps, int64_t centered,
                          int64_t steps, int64_t groups, int64_t width) {
    return (problem){{x, weight, bias, groups, width, steps * groups}, centered, eps};
}

static void normalise(const problem *a, int64_t first, float *y, float *kept) {
    int count = least(LANES, a->of.count - first);
    vec means = a->centered ? means_of(&a->of, first, count) : (vec){0};
    vec rstds = inverse_root_of(variances_of(&a->of, first, count, means) + a->eps);
    int64_t group = first % a->of.groups;
    store_some(kept + first, rstds, count);
    if (a->centered) store_some(kept + a->of.count + first, means, count);
    for (int i = 0; i < count; i++) {
        for (int64_t c = 0; c < a->of.width; c += LANES) {
            int64_t at = (first + i) * a->of.width + c;
            vec z = (load_some(a->of.x + at, lanes_at(&a->of, c)) - means[i]) * rstds[i];
            store_some(y + at, z * scale_at(&a->of, group, c) + shift_at(&a->of, group, c), lanes_at(&a->of, c));
        }
        group = group + 1 == a->of.groups ? 0 : group + 1;
    }
}

// ``kept`` receives r and, if centered, m of every slice, (1 or 2, steps, groups).
int64_t norms_forward(const float *x, const float *weight, const float *bias, float *y, float *kept, float eps,
                      int64_t centered, int64_t steps, int64_t groups, int64_t width, int64_t threads) {
    problem a = problem_of(x, weight, bias, eps, centered, steps, groups, width);
#pragma omp parallel for schedule(static) num_threads(threads) if (a.of.count * width > ALONE)
    for (int64_t first = 0; first < a.of.count; first += LANES) normalise(&a, first, y, kept);
    return 0;
}

// m, r, and the means of g z and of g, of one group in up to LANES steps.
typedef struct { float mean[LANES], rstd[LANES], along[LANES], level[LANES]; } statistics;

static void read_kept(statistics *to, const problem *a, const float *kept, int64_t step, int count, int64_t group) {
    memset(to, 0, sizeof *to);
    for (int i = 0; i < count; i++) {
        int64_t slice = (step + i) * a->of.groups + group;
        to->rstd[i] = kept[slice];
        if (a->centered) to->mean[i] = kept[a->of.count + slice];
    }
}

static void gradient_means(statistics *to, const problem *a, int64_t step, int count, int64_t group,
                           const float *grad_y) {
    vec along[LANES] = {0}, sums[LANES] = {0};
    for (int i = 0; i < count; i++)
        for (int64_t c = 0; c < a->of.width; c += LANES) {
            int64_t at = ((step + i) * a->of.groups + group) * a->of.width + c;
            vec g = load_some(grad_y + at, lanes_at(&a->of, c)) * scale_at(&a->of, group, c);
            along[i] += g * (load_some(a->of.x + at, lanes_at(&a->of, c)) - to->mean[i]);
            sums[i] += g;
        }
    store(to->along, sums_of(along) * load(to->rstd) / (float)a->of.width);
    if (a->centered) store(to->level, sums_of(sums) / (float)a->of.width);
}

// Compute the gradient of x, and add to the gradients of weight and bias.
static void propagate(const statistics *s, const problem *a, int64_t step, int count, int64_t group,
                      const float *grad_y, float *grad_x, vec *scales, vec *shifts) {
    for (int64_t c = 0; c < a->of.width; c += LANES) {
        int lanes = lanes_at(&a->of, c);
        vec scale = scale_at(&a->of, group, c), along = {0}, sum = {0};
        for (int i = 0; i < count; i++) {
            int64_t at = ((step + i) * a->of.groups + group) * a->of.width + c;
            vec g = load_some(grad_y + at, lanes), z = (load_some(a->of.x + at, lanes) - s->mean[i]) * s->rstd[i];
            along += g * z;
            sum += g;
            store_some(grad_x + at, (g * scale - z * s->along[i] - s->level[i]) * s->rstd[i], lanes);
        }
        scales[c / LANES] += along, shifts[c / LANES] += sum;
    }
}

// Process the steps of one part. Gradients of weight and bias are summed over LANES steps, then over those sums.
static void part_backward(const problem *a, int64_t begin, int64_t end, const float *kept, const float *grad_y,
                          float *grad_x, float *grad_weight, float *grad_bias, int64_t *refused) {
    int64_t blocks = blocks_of(a->of.width, LANES), size = a->of.groups * blocks;
    vec *total = (vec *)room_for(2 * size * LANES, refused);
    if (!total) return;
    memset(total, 0, sizeof(vec) * 2 * size);
    for (int64_t step = begin; step < end; step += LANES)
        for (int64_t group = 0; group < a->of.groups; group++) {
            int count = least(LANES, end - step);
            vec *scales = total + group * blocks;
            statistics s;
            read_kept(&s, a, kept, step, count, group);
            gradient_means(&s, a, step, count, group, grad_y);
            propagate(&s, a, step, count, group, grad_y, grad_x, scales, scales + size);
        }
    scatter_sums(grad_weight, total, &a->of);
    scatter_sums(grad_bias, total + size, &a->of);
    free(total);
}

// The gradients of weight and bias are (parts, features); the caller sums them.
int64_t norms_backward(const float *x, const float *weight, const float *kept, const float *grad_y, float *grad_x,
                       float *grad_weight, float *grad_bias, int64_t centered, int64_t parts, int64_t steps,
                       int64_t groups, int64_t width, int64_t threads) {
    problem a = problem_of(x, weight, 0, 0, centered, steps, groups, width);
    int64_t features = groups * width, refused = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (a.of.count * width > ALONE)
    for (int64_t part = 0; part < parts; part++)
        part_backward(&a, part * steps / parts, (part + 1) * steps / parts, kept, grad_y, grad_x,
                      grad_weight + part * features, grad_bias + part * features, &refused);
    return refused;
}
