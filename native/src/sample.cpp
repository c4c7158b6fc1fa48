#include "sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace mill {
namespace {

constexpr double kLog2e = 1.44269504088896340736;

// Philox4x32-10 (Salmon et al. 2011): four random words for a counter under a key.
struct Words { uint32_t w[4]; };

inline Words philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    uint32_t x0 = c0, x1 = c1, x2 = c2, x3 = c3;
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(0xD2511F53u) * x0, b = uint64_t(0xCD9E8D57u) * x2;
        x0 = uint32_t(b >> 32) ^ x1 ^ k0;
        x1 = uint32_t(b);
        x2 = uint32_t(a >> 32) ^ x3 ^ k1;
        x3 = uint32_t(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{x0, x1, x2, x3}};
}

// Natural logarithm of a positive normal number, the same on every machine: 2 atanh((m - 1) / (m + 1)) + e ln 2.
double natural_log(double x) {
    uint64_t bits = std::bit_cast<uint64_t>(x);
    int e = int(bits >> 52) - 1023;
    double m = std::bit_cast<double>((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull);
    if (m > 1.41421356237309504880) { m *= 0.5; e += 1; }
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double sum = 0.0;
    for (int i = 23; i >= 1; i -= 2) sum = sum * z + 1.0 / i;
    return 2.0 * s * sum + e * 0.69314718055994530942;
}

// 2^x for x in [-1000, 0], by the series of e^(f ln 2) with f in [-0.5, 0.5]; smaller x give 0.
double power_of_two(double x) {
    if (!(x > -1000.0)) return 0.0;
    const double n = std::nearbyint(x), f = (x - n) * 0.69314718055994530942;
    double sum = 1.0;
    for (int i = 14; i >= 1; --i) sum = 1.0 + sum * f / i;
    return std::ldexp(sum, int(n));
}

double uniform_of(uint32_t word) { return (double(word) + 0.5) * 0x1p-32; }

double gumbel_of(uint32_t word) { return -natural_log(-natural_log(uniform_of(word))); }

// The order of tokens: larger value first, NaN last, ties to the lower id. An order for all values, without which sorting has no bounds.
struct Better {
    const float* z;
    bool operator()(int32_t a, int32_t b) const {
        if (z[a] > z[b]) return true;
        if (z[a] < z[b]) return false;
        const bool nan_a = z[a] != z[a], nan_b = z[b] != z[b];
        return nan_a == nan_b ? a < b : nan_b;
    }
};

int32_t argmax(const float* z, int n, float high) {
    for (int i = 0; i < n; ++i)
        if (z[i] == high) return i;
    return 0;   // bias and bans have left nothing above minus infinity
}

void edit(float* z, int n, const SampleRow& how) {
    for (size_t i = 0; i < how.seen.size(); ++i) {
        float& value = z[how.seen[i]];
        if (how.repetition != 1.0f) value = value > 0 ? value / how.repetition : value * how.repetition;
        const int count = how.seen_count[i];
        if (count > 0) value -= how.presence + how.frequency * float(count);
    }
    for (size_t i = 0; i < how.bias.size(); ++i) z[how.bias[i]] += how.bias_value[i];
    constexpr float kNever = -std::numeric_limits<float>::infinity();
    for (int32_t token : how.banned) z[token] = kNever;
    for (int t = 0; how.allowed && t < n; ++t)
        if (!(how.allowed[t / 32] >> (t % 32) & 1)) z[t] = kNever;
}

// Fills `kept` with the first `want` tokens in order of likelihood, sorted. Few of many are a heap with the worst on top, which most tokens leave as it is.
void best_tokens(const float* z, int n, int want, std::vector<int32_t>& kept) {
    want = std::min(want, n);
    kept.resize(want);
    for (int i = 0; i < want; ++i) kept[i] = i;
    if (want == 0) return;
    const Better better{z};
    std::make_heap(kept.begin(), kept.end(), better);
    for (int i = want; i < n; ++i) {
        if (!better(i, kept.front())) continue;
        std::pop_heap(kept.begin(), kept.end(), better);
        kept.back() = i;
        std::push_heap(kept.begin(), kept.end(), better);
    }
    std::sort_heap(kept.begin(), kept.end(), better);
}

double weight_of(float z, float high, double temperature) { return power_of_two((double(z) - double(high)) / temperature * kLog2e); }

// The tokens that survive top_k, then top_p, then min_p.
void filter(const float* z, int n, const SampleRow& how, std::vector<int32_t>& kept) {
    const int limit = how.top_k > 0 ? std::min(how.top_k, n) : n;
    double total = 0;
    if (how.top_k == 0 && how.top_p < 1.0) {
        const float high = *std::max_element(z, z + n);
        for (int i = 0; i < n; ++i) total += weight_of(z[i], high, how.temperature);
    }
    // Without top_k few tokens usually make up top_p: take more only when they do not.
    for (int want = how.top_k > 0 ? limit : std::min(n, 256);; want = std::min(n, want * 8)) {
        best_tokens(z, n, want, kept);
        if (how.top_k > 0 && how.top_p < 1.0) {
            total = 0;
            for (int32_t t : kept) total += weight_of(z[t], z[kept[0]], how.temperature);
        }
        double sum = 0;
        const double enough = how.top_p * total;
        size_t i = 0;
        bool done = false;
        for (; i < kept.size() && !done; ++i) {
            const double w = weight_of(z[kept[i]], z[kept[0]], how.temperature);
            if (w < how.min_p) { done = true; break; }
            sum += w;
            done = how.top_p < 1.0 && sum >= enough;
        }
        if (done || want == limit) {
            kept.resize(std::max<size_t>(i, 1));
            return;
        }
    }
}

int32_t draw(const float* z, const SampleRow& how, std::span<const int32_t> tokens) {
    double best = -std::numeric_limits<double>::infinity();
    int32_t winner = tokens[0];
    for (int32_t t : tokens) {
        const double score = double(z[t]) / how.temperature + gumbel(how.seed, how.choice, how.position, t, how.stream);
        if (score > best || (score == best && t < winner)) { best = score; winner = t; }
    }
    return winner;
}

// Draws from the whole vocabulary. A token whose value is d below the best score so far wins only if its noise exceeds d, that is if
// 1 - u < exp(-d) (as exp(-x) >= 1 - x); nearly all are told apart by that, and only the rest cost two logarithms.
int32_t draw_all(const Kernels& k, const float* z, int n, float high, const SampleRow& how) {
    int32_t winner = argmax(z, n, high);
    double best = double(z[winner]) / how.temperature + gumbel(how.seed, how.choice, how.position, winner, how.stream);
    const float inverse = float(kLog2e / how.temperature);
    constexpr int kChunk = 1024;
    alignas(64) float chance[kChunk];
    const auto [seed, choice, position, stream] = std::tuple(how.seed, how.choice, how.position, how.stream);   // in registers
    for (int at = 0; at < n; at += kChunk) {
        const int count = std::min(kChunk, n - at);
        // A little above the true chance, so that rounding never rejects a winner.
        k.exp2_scaled(z + at, count, inverse, float(-best * kLog2e) + 1e-3f + 1e-5f * float(std::fabs(best)), chance);
        for (int i = 0; i < count; i += 4) {
            const int quad = std::min(4, count - i);
            float most = 0.0f;
            for (int j = 0; j < quad; ++j) most = std::max(most, chance[i + j]);
            if (!(most > 0x1p-34f)) continue;
            const Words words = philox(seed, uint32_t(at + i) / 4, position, choice, stream);
            for (int j = 0; j < quad; ++j) {
                const float left = float(uniform_of(~words.w[j]));   // 1 - u
                if (left > chance[i + j]) continue;
                const int32_t t = at + i + j;
                const double score = double(z[t]) / how.temperature + gumbel_of(words.w[j]);
                if (score > best || (score == best && t < winner)) { best = score; winner = t; }
            }
        }
    }
    return winner;
}

// The row after penalties, bias, bans and mask, and its maximum; nullptr where there is no token to draw.
const float* edited(const Kernels& k, const float* logits, int n, const SampleRow& how, SampleScratch& scratch, float& high) {
    high = k.row_max(logits, n);
    if (!std::isfinite(high)) return nullptr;
    if (how.seen.empty() && how.bias.empty() && how.banned.empty() && !how.allowed) return logits;
    scratch.z.assign(logits, logits + n);
    edit(scratch.z.data(), n, how);
    high = k.row_max(scratch.z.data(), n);
    return how.allowed && !std::isfinite(high) ? nullptr : scratch.z.data();
}

bool filters(const SampleRow& how) { return how.top_k > 0 || how.top_p < 1.0 || how.min_p > 0.0; }

inline uint32_t word_of(uint64_t seed, uint32_t choice, uint32_t position, uint32_t token, uint32_t stream) {
    return philox(seed, token / 4, position, choice, stream).w[token % 4];
}

}  // namespace

double gumbel(uint64_t seed, uint32_t choice, uint32_t position, uint32_t token, uint32_t stream) {
    return gumbel_of(word_of(seed, choice, position, token, stream));
}

double uniform(uint64_t seed, uint32_t choice, uint32_t position, uint32_t token, uint32_t stream) {
    return uniform_of(word_of(seed, choice, position, token, stream));
}

SampleState::SampleState(const SampleSettings& how, std::vector<int32_t> bias, std::vector<float> bias_value, std::vector<int32_t> ends, std::span<const int32_t> prompt)
    : how_(how), bias_(std::move(bias)), bias_value_(std::move(bias_value)), ends_(std::move(ends)) {
    if (bias_.size() != bias_value_.size()) throw std::invalid_argument("[sample] a bias without a token, or a token without a bias");
    for (int32_t token : bias_) note(token);
    if (how_.min_tokens > 0)
        for (int32_t token : ends_) note(token);
    if (how_.repetition != 1.0f)   // the other penalties count output only
        for (int32_t token : prompt) see(token, 0);
    given_ = seen_.size();
}

void SampleState::observe(int32_t token) {
    ++made_;
    if (counts()) see(token, 1);
}

void SampleState::retract(int32_t token) {
    const auto found = place_.find(token);
    if (made_ == 0 || (counts() && (found == place_.end() || seen_count_[found->second] == 0)))
        throw std::invalid_argument("[sample] token " + std::to_string(token) + " was not observed");
    --made_;
    if (!counts()) return;
    const size_t place = found->second;
    if (--seen_count_[place] > 0 || place < given_) return;
    // The newest takes its place: usually it is the newest.
    place_[seen_.back()] = place;
    seen_[place] = seen_.back();
    seen_count_[place] = seen_count_.back();
    place_.erase(token);
    seen_.pop_back();
    seen_count_.pop_back();
}

SampleRow SampleState::row(uint32_t position, uint32_t stream) const {
    return {how_.temperature, how_.top_k, how_.top_p, how_.min_p, how_.repetition, how_.presence, how_.frequency, how_.seed, how_.choice, position, stream,
            seen_, seen_count_, bias_, bias_value_, std::span(ends_).first(made_ < how_.min_tokens ? ends_.size() : 0)};
}

void SampleState::check(int vocabulary) const {
    for (int32_t token : {lowest_, highest_})
        if (token < 0 || token >= vocabulary) throw std::invalid_argument("[sample] token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(vocabulary));
}

void SampleState::see(int32_t token, int32_t count) {
    const auto [found, is_new] = place_.try_emplace(token, seen_.size());
    if (is_new) {
        note(token);
        seen_.push_back(token);
        seen_count_.push_back(0);
    }
    seen_count_[found->second] += count;
}

void SampleState::note(int32_t token) {
    lowest_ = std::min(lowest_, token);
    highest_ = std::max(highest_, token);
}

int32_t sample_row(const Kernels& k, const float* logits, int n, const SampleRow& how, SampleScratch& scratch) {
    float high;
    const float* z = edited(k, logits, n, how, scratch, high);
    if (!z) return kNoToken;
    if (how.temperature == 0.0) return argmax(z, n, high);
    if (!filters(how)) return draw_all(k, z, n, high, how);
    filter(z, n, how, scratch.kept);
    return draw(z, how, scratch.kept);
}

bool probabilities(const Kernels& k, const float* logits, int n, const SampleRow& how, SampleScratch& scratch, std::vector<float>& out) {
    float high;
    const float* z = edited(k, logits, n, how, scratch, high);
    out.assign(n, 0.0f);
    if (!z) return false;
    if (!std::isfinite(high)) {   // bias and bans leave one token that is drawn
        out[argmax(z, n, high)] = 1.0f;
        return true;
    }
    if (filters(how)) {
        filter(z, n, how, scratch.kept);
        for (int32_t t : scratch.kept) out[t] = float(weight_of(z[t], high, how.temperature));
    } else {
        for (int i = 0; i < n; ++i) out[i] = z[i] - high;
        k.exp2_scaled(out.data(), n, float(std::min(kLog2e / how.temperature, 1e38)), 0.0f, out.data());
    }
    double total = 0;
    for (float& weight : out) {
        if (!(weight > 0.0f)) weight = 0.0f;   // a logit that was no number
        total += double(weight);
    }
    const float scale = float(1.0 / total);
    for (float& weight : out) weight *= scale;
    return true;
}

Likelihood likelihood_of(const Kernels& k, const float* logits, int n, int token, int top_n, int32_t* top, double* top_logprob, SampleScratch& scratch) {
    const float high = k.row_max(logits, n);
    const double norm = double(high) + natural_log(k.sum_exp(logits, n, high));
    int rank = 0;
    const float own = logits[token];
    for (int i = 0; i < n; ++i) rank += logits[i] > own || (logits[i] == own && i < token);
    if (top_n > 0) {
        best_tokens(logits, n, top_n, scratch.kept);
        for (int i = 0; i < top_n; ++i) {
            top[i] = scratch.kept[i];
            top_logprob[i] = double(logits[scratch.kept[i]]) - norm;
        }
    }
    return {double(own) - norm, rank};
}

}  // namespace mill
