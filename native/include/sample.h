// From logits to a token. docs/sampling.md fixes what is computed; every row is independent of the others.
#pragma once

#include "kernels.h"

#include <cstdint>
#include <span>
#include <vector>

namespace mill {

// How one row is sampled. Spans hold what differs from "nothing": usually they are empty.
struct SampleRow {
    int row;                      // of the logits
    double temperature;           // 0: greedy
    int top_k;                    // 0: off
    double top_p, min_p;          // 1 and 0: off
    float repetition, presence, frequency;
    uint64_t seed;
    uint32_t choice, position;    // position: of the token that is sampled
    std::span<const int32_t> seen, seen_count;    // tokens of prompt and output, and how often each is in the output
    std::span<const int32_t> bias;
    std::span<const float> bias_value;
    std::span<const int32_t> banned;
};

struct SampleScratch {
    std::vector<float> z;
    std::vector<int32_t> kept;
};

int32_t sample_row(const Kernels& k, const float* logits, int vocabulary, const SampleRow& how, SampleScratch& scratch);

// Log-probability and 0-based rank of a token, and the `n` most likely tokens, of softmax(logits).
struct Likelihood {
    double logprob;
    int rank;
};
Likelihood likelihood_of(const Kernels& k, const float* logits, int vocabulary, int token, int n, int32_t* top, double* top_logprob, SampleScratch& scratch);

// Standard Gumbel noise, a pure function of its arguments.
double gumbel(uint64_t seed, uint32_t choice, uint32_t position, uint32_t token);

}  // namespace mill
