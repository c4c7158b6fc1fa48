// An index over strings of tokens: what has followed the suffix that a context ends with, and how often.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace mill {

// A draft, token by token: how often the token has followed its context, of all the times that anything has, and how long that context was.
struct SuffixDraft {
    std::vector<int32_t> tokens;
    std::vector<double> shares;
    std::vector<int32_t> matches;
    double expected = 0;   // tokens that will come true
};

// A suffix automaton (Blumer et al. 1985) of a set of strings, whose suffixes are cut off at depth + 1 tokens: a context of `depth`, and what follows.
// A state stands for strings that have occurred at the same places; its link for the longest of their suffixes that has occurred elsewhere too.
// The cut bounds every chain of links that is walked to depth + 2, and text that repeats itself adds no states.
class SuffixIndex {
public:
    explicit SuffixIndex(int depth);   // throws std::invalid_argument if it is not positive

    // Goes on with the newest string. At most two states and three edges a token, on the whole.
    void extend(std::span<const int32_t> tokens);
    // The newest string is over, which counts as something that follows; what comes next is another.
    void end();

    // The likeliest continuation of a context: again and again the token that has followed its longest known suffix most often, the most recent of
    // equals. A token's odds are its share, times the trust in matches of that length; the draft ends, but for its first token, before the product of
    // its odds falls under `floor`; and after `most` tokens, where no suffix is known or where strings have ended most often. trust: by length of the match, 0 to depth.
    SuffixDraft draft(std::span<const int32_t> context, int most, double floor, std::span<const double> trust) const;

    size_t states() const { return states_.size(); }
    size_t edges() const { return edges_.size(); }      // beyond the first of each state
    size_t bytes() const;
    uint64_t work() const { return work_; }             // steps along chains and lists so far, by extend()

private:
    static constexpr int32_t kRoot = 0, kNone = -1, kEnd = -1;   // kEnd: a token that ends a string

    struct State {
        int32_t length;                // of the longest string
        int32_t link;
        int32_t token, target;         // the first edge
        int32_t more;                  // the first of its other edges
        int32_t followed;              // how often a token has come after it
        int32_t best, best_count;      // the token that came most often
    };
    struct Edge {
        int32_t state, token, target, next;
    };
    struct Match {
        int32_t state, length;
    };

    int32_t find(int32_t state, int32_t token) const;
    int32_t& target_of(int32_t state, int32_t token);
    void connect(int32_t state, int32_t token, int32_t target);
    int32_t add(int32_t length, int32_t link);
    int32_t split(int32_t state, int32_t before, int32_t token);
    int32_t grow(int32_t token);
    void count(int32_t before, int32_t after, int32_t token);
    void append(int32_t token);
    size_t slot(int32_t state, int32_t token) const;
    void rehash();
    Match followed(Match match) const;
    Match step(Match match, int32_t token) const;

    int depth_;
    int32_t newest_ = kRoot;           // of the newest string's suffix of depth + 1 tokens
    uint64_t work_ = 0;
    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> slots_;       // an open hash table of edges
};

}  // namespace mill
