// From logits to a token. docs/sampling.md fixes what is computed; every row is independent of the others.
#pragma once

#include "kernels.h"

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace mill {

// How one row is sampled. Spans hold what differs from "nothing": usually they are empty.
struct SampleRow {
    double temperature;           // 0: greedy
    int top_k;                    // 0: off
    double top_p, min_p;          // 1 and 0: off
    float repetition, presence, frequency;
    uint64_t seed;
    uint32_t choice, position, stream;            // position: of the token that is sampled; stream: of the noise
    std::span<const int32_t> seen, seen_count;    // tokens of prompt and output, and how often each is in the output
    std::span<const int32_t> bias;
    std::span<const float> bias_value;
    std::span<const int32_t> banned;
    const uint32_t* allowed = nullptr;            // a bit for each token: whether a mask allows it; nullptr: all
};

struct SampleSettings {
    double temperature, top_p, min_p;
    int top_k;
    float repetition, presence, frequency;
    uint64_t seed;
    uint32_t choice;
    int64_t min_tokens;
};

// What sampling needs to know of one choice of a request from token to token: its settings, and what it has put out.
class SampleState {
public:
    // bias, bias_value: tokens and what is added to their logits. ends: forbidden until there are min_tokens.
    SampleState(const SampleSettings& how, std::vector<int32_t> bias, std::vector<float> bias_value, std::vector<int32_t> ends, std::span<const int32_t> prompt);

    void observe(int32_t token);   // it was put out
    // Takes back one observe(token). Throws std::invalid_argument if there was none, as far as is known: without penalties nobody keeps tokens.
    void retract(int32_t token);
    // Does observe() change how the tokens that follow are sampled?
    bool looks_back() const { return counts() || (made_ < how_.min_tokens && !ends_.empty()); }
    // How the row of the logits that follows is sampled; the spans are valid until the next observe() or retract().
    SampleRow row(uint32_t position, uint32_t stream) const;
    // Throws std::invalid_argument if some token that row() names is not in the vocabulary.
    void check(int vocabulary) const;

private:
    bool counts() const { return how_.repetition != 1.0f || how_.presence != 0.0f || how_.frequency != 0.0f; }
    void see(int32_t token, int32_t count);
    void note(int32_t token);

    SampleSettings how_;
    std::vector<int32_t> bias_;
    std::vector<float> bias_value_;
    std::vector<int32_t> ends_, seen_, seen_count_;
    std::unordered_map<int32_t, size_t> place_;   // of a token in seen_
    size_t given_ = 0;                            // how many of seen_ are the prompt's: the first
    int64_t made_ = 0;
    int32_t lowest_ = 0, highest_ = 0;            // of all tokens that are or were in the lists
};

struct SampleScratch {
    std::vector<float> z;
    std::vector<int32_t> kept;
    std::vector<float> target, draft;   // probabilities
};

// What is drawn from a row without a finite maximum, a damaged model's, or from one of which its mask leaves nothing.
constexpr int32_t kNoToken = -1;

int32_t sample_row(const Kernels& k, const float* logits, int vocabulary, const SampleRow& how, SampleScratch& scratch);

// What sample_row draws from, for a temperature above 0: the probability of each token. False, and zeros, where that is kNoToken.
bool probabilities(const Kernels& k, const float* logits, int vocabulary, const SampleRow& how, SampleScratch& scratch, std::vector<float>& out);

// Log-probability and 0-based rank of a token, and the `n` most likely tokens, of softmax(logits).
struct Likelihood {
    double logprob;
    int rank;
};
Likelihood likelihood_of(const Kernels& k, const float* logits, int vocabulary, int token, int n, int32_t* top, double* top_logprob, SampleScratch& scratch);

// Standard Gumbel noise, a pure function of its arguments, and the uniform number in (0, 1) that it is made of.
double gumbel(uint64_t seed, uint32_t choice, uint32_t position, uint32_t token, uint32_t stream);
double uniform(uint64_t seed, uint32_t choice, uint32_t position, uint32_t token, uint32_t stream);

}  // namespace mill
