// Cross-entropy of rows of logits x, log sum e^x - x[target], and its gradient, (softmax(x) - one-hot) / count.
#include "../native.h"

static float largest_of(const float *x, int64_t size) {
    vec most = every(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) most = larger(load(x + i), most);
    float largest = largest_across(most)[0];
    for (; i < size; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

// Every x becomes e^(x - most); their sum.
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

// Logits (rows, size) become the gradient of the sum of losses over ``count``. A row whose target is ``ignored`` has a
// loss of 0 and a gradient of zeros.
void loss_and_gradient(float *logits, const int64_t *targets, float *losses, float count, int64_t ignored,
                       int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > ALONE)
    for (int64_t row = 0; row < rows; row++) {
        float *x = logits + row * size;
        losses[row] = 0;
        if (targets[row] == ignored) {
            memset(x, 0, sizeof(float) * size);
            continue;
        }
        float most = largest_of(x, size), of_target = x[targets[row]] - most, sum = exponentiate(x, size, most);
        losses[row] = logf(sum) - of_target;
        for (int64_t i = 0; i < size; i++) x[i] *= 1 / (sum * count);
        x[targets[row]] -= 1 / count;
    }
}
