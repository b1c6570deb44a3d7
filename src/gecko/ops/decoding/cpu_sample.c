// Choosing a token from the logits of each row: the most likely one, or one drawn at a temperature.
#include "../backends/cpu.h"

// The number of the first row with a logit that is not finite, or -1.
int64_t decoding_first_broken(const float *logits, int64_t rows, int64_t vocabulary) {
    for (int64_t r = 0; r < rows; r++) {
        vec sum = {0};  // x - x is zero, or NaN
        for (int64_t i = 0; i < vocabulary; i += LANES) {
            vec x = load_some(logits + r * vocabulary + i, least(LANES, vocabulary - i));
            sum += x - x;
        }
        if (sum_of(sum) != 0) return r;
    }
    return -1;
}

static int64_t most_likely(const float *logits, int64_t vocabulary) {
    vec most = every(logits[0]);
    int64_t whole = vocabulary / LANES * LANES, first = 0;
    for (int64_t i = 0; i < whole; i += LANES) most = larger(most, load(logits + i));
    float largest = largest_across(most)[0];
    for (int64_t i = whole; i < vocabulary; i++) largest = logits[i] > largest ? logits[i] : largest;
    while (logits[first] != largest) first++;
    return first;
}

// Inverse transform sampling in float64: the first token up to which the weights sum to more than a uniform share of all.
static int64_t drawn(const float *logits, int64_t vocabulary, double temperature, double uniform, double *weight) {
    const double most = logits[most_likely(logits, vocabulary)];
    double total = 0;
    for (int64_t i = 0; i < vocabulary; i++) total += weight[i] = exp((logits[i] - most) / temperature);
    const double share = uniform * total;
    double sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < vocabulary; i++) {
        sum += weight[i];
        if (sum > share) return i;
        if (weight[i] > 0) last = i;
    }
    return last;  // rounding: the share is all of them
}

// A token of each row. ``temperature`` 0 takes the most likely one; ``weight`` is work memory of (vocabulary,).
// Returns 0: no memory is asked for.
int64_t decoding_sample(const float *logits, int64_t rows, int64_t vocabulary, const double *temperature,
                     const double *uniform, double *weight, int64_t *token) {
    for (int64_t r = 0; r < rows; r++) {
        const float *own = logits + r * vocabulary;
        token[r] = temperature[r] == 0 ? most_likely(own, vocabulary)
                                       : drawn(own, vocabulary, temperature[r], uniform[r], weight);
    }
    return 0;
}
