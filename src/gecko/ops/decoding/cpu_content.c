// A hash of all bytes of some tensors: any other byte, or an exchange of two, gives another number.
#include "../backends/cpu.h"

enum { WORDS = 16, SUMS = 4 };  // of 32 bits in a vector, and vectors that are hashed independently
typedef uint32_t words __attribute__((vector_size(4 * WORDS)));

static uint64_t mixed(uint64_t before, uint64_t next) {
    before = (before ^ next) * 0x9E3779B97F4A7C15u;
    return before ^ before >> 29;
}

static uint64_t hash_of(const char *from, int64_t bytes) {
    words sums[SUMS] = {{0}}, next[SUMS];
    for (int64_t left = bytes; left > 0; left -= sizeof next, from += sizeof next) {
        if (left < (int64_t)sizeof next) memset(next, 0, sizeof next);
        memcpy(next, from, least(left, sizeof next));
        for (int i = 0; i < SUMS; i++) sums[i] = (sums[i] ^ next[i]) * 0x01000193u;  // FNV
    }
    uint64_t all = bytes;
    for (int i = 0; i < SUMS * WORDS; i++) all = mixed(all, sums[i / WORDS][i % WORDS]);
    return all;
}

int64_t decoding_content(const char *const *tensors, const int64_t *bytes, int64_t count, int64_t threads) {
    uint64_t all = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(+ : all)
    for (int64_t i = 0; i < count; i++) all += mixed(i, hash_of(tensors[i], bytes[i]));
    return all;
}
