// Grows and asks indexes of texts of every kind; built with sanitizers by test_sanitizers.py.
#include "suffix.h"

#include <cstdio>
#include <cstdlib>
#include <random>

int main() {
    std::mt19937 random(1);
    for (int round = 0; round < 300; ++round) {
        const int depth = 1 + int(random() % 40), letters = 1 + int(random() % 6), period = 1 + int(random() % 50);
        mill::SuffixIndex index(depth);
        const std::vector<double> trust(size_t(depth) + 1, 1.0);
        std::vector<int32_t> text;
        size_t tokens = 0;
        for (int part = 0; part < 30; ++part) {
            std::vector<int32_t> fresh(random() % 60);
            for (size_t i = 0; i < fresh.size(); ++i) fresh[i] = part % 2 ? int32_t(random() % letters) : int32_t(i % period);
            index.extend(fresh);
            text.insert(text.end(), fresh.begin(), fresh.end());
            tokens += fresh.size();
            const auto draft = index.draft(text, 20, 0.0, trust);
            if (draft.tokens.size() != draft.shares.size() || draft.tokens.size() != draft.matches.size()) std::abort();
            if (random() % 8) continue;
            index.end();
            text.clear();
            ++tokens;
        }
        if (index.states() > 2 * tokens + 1) std::abort();
    }
    std::puts("done");
}
