// Draws with and without drafts over odd vocabularies, hostile logits and all kinds of settings. test_sanitizers.py builds it with a sanitizer and
// judges it by its exit; it also fails by itself if one thread and several give different tokens.
#include "variants.h"
#include "verify.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <sys/mman.h>

// The build renames mmap and munmap to these; nothing here needs their guards.
extern "C" void* guarded_mmap(void*, size_t bytes, int, int, int, off_t) noexcept { return std::calloc(1, bytes); }
extern "C" int guarded_munmap(void* p, size_t) noexcept { std::free(p); return 0; }

using namespace mill;

namespace {

using Random = std::mt19937;

int below(Random& random, int n) { return int(random() % unsigned(n)); }

std::vector<float> rows_of(Random& random, int rows, int vocabulary) {
    std::normal_distribution<float> normal;
    std::vector<float> out(size_t(rows) * vocabulary);
    const float scale = below(random, 8) ? 2.0f : 1e38f;
    for (float& x : out) x = below(random, 50) ? scale * normal(random) : std::numeric_limits<float>::quiet_NaN();
    if (below(random, 5) == 0) std::fill(out.end() - vocabulary, out.end(), -std::numeric_limits<float>::infinity());
    return out;
}

SampleState state_of(Random& random, int vocabulary) {
    const auto any = [&](auto... choices) {
        const double list[] = {double(choices)...};
        return list[below(random, int(sizeof...(choices)))];
    };
    const SampleSettings how{any(0, 0.3, 1, 1.5), any(1, 1, 0.9), any(0, 0, 0.1), int(any(0, 0, 3)), float(any(1, 1, 1.5)), float(any(0, 0, 1)), float(any(0, 0, 0.5)),
                             random(), uint32_t(below(random, 3)), below(random, 9)};
    std::vector<int32_t> prompt(7);
    for (int32_t& token : prompt) token = below(random, vocabulary);
    return SampleState(how, {below(random, vocabulary)}, {1.0f}, {below(random, vocabulary)}, prompt);
}

void draw_and_verify(Random& random, Pool& one, Pool& three, const Kernels& k, int vocabulary) {
    constexpr int kDraws = 6;
    std::vector<SampleState> states;
    std::vector<std::vector<float>> logits, proposed;
    std::vector<std::vector<int32_t>> drafts;
    std::vector<std::vector<uint32_t>> masks;
    const int words = (vocabulary + 31) / 32;
    for (int i = 0; i < kDraws; ++i) {
        states.push_back(state_of(random, vocabulary));
        drafts.emplace_back(below(random, 6));
        for (int32_t& token : drafts[i]) token = below(random, vocabulary);
        logits.push_back(rows_of(random, int(drafts[i].size()) + 1, vocabulary));
        proposed.push_back(rows_of(random, int(drafts[i].size()) + 1, vocabulary));
        proposed[i].resize(drafts[i].size() * size_t(vocabulary));
        proposed[i].shrink_to_fit();
        masks.emplace_back((drafts[i].size() + 1) * words);
        for (uint32_t& word : masks[i]) word = random() | random();
    }
    std::vector<Draw> draws;
    std::vector<Proposal> proposals;
    for (int i = 0; i < kDraws; ++i) {
        draws.push_back({{logits[i].data(), vocabulary}, &states[i], uint32_t(i), drafts[i], {i % 3 ? nullptr : masks[i].data(), words}});
        proposals.push_back({i % 2 ? proposed[i].data() : nullptr, vocabulary});
    }
    const Tokens tokens = draw_along(one, k, draws, vocabulary, 0);
    for (int i = 0; i < kDraws; ++i)   // what is right is drafted, for the first half of the draft
        for (size_t j = 0; j < drafts[i].size() / 2 && j < tokens[i].size(); ++j) drafts[i][j] = std::max(0, tokens[i][j]);
    for (int again = 0; again < 3; ++again)
        if (draw_along(one, k, draws, vocabulary, 0) != draw_along(three, k, draws, vocabulary, 0) ||
            accept_or_replace(one, k, draws, proposals, vocabulary) != accept_or_replace(three, k, draws, proposals, vocabulary)) {
            std::fprintf(stderr, "one thread and three give different tokens\n");
            std::exit(1);
        }
}

}  // namespace

int main() {
    Random random(1);
    Pool one(1), three(3);
    for (const Kernels* kernels : usable_kernels())
        for (int vocabulary : {1, 2, 3, 17, 300, 1025})
            for (int round = 0; round < 20; ++round) draw_and_verify(random, one, three, *kernels, vocabulary);
    std::puts("done");
}
