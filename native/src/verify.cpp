#include "verify.h"

#include <algorithm>
#include <atomic>

namespace mill {
namespace {

// Observes tokens of a draft one by one, and takes them back in the end.
class Ahead {
public:
    Ahead(SampleState& state, std::span<const int32_t> draft) : state_(state), draft_(draft) {}
    ~Ahead() {
        while (seen_ > 0) state_.retract(draft_[--seen_]);
    }
    void go_on() {
        state_.observe(draft_[seen_]);
        ++seen_;
    }

private:
    SampleState& state_;
    std::span<const int32_t> draft_;
    size_t seen_ = 0;
};

// Rows of one draw that one thread looks at, in order.
struct Run {
    size_t draw;
    int begin, end;
};

void lower(std::atomic<int>& value, int to) {
    int now = value.load(std::memory_order_relaxed);
    while (to < now && !value.compare_exchange_weak(now, to, std::memory_order_relaxed)) {}
}

// token_at(draw, i, scratch): the token for row i of a draw, all tokens of the draft before it being right.
template <class TokenAt> Tokens along_drafts(Pool& pool, std::span<const Draw> draws, TokenAt token_at) {
    Tokens tokens(draws.size());
    std::vector<std::atomic<int>> last(draws.size());   // the row of each draw behind which none counts, as far as is known
    std::vector<Run> runs;
    runs.reserve(draws.size());
    for (size_t d = 0; d < draws.size(); ++d) {
        const int rows = int(draws[d].draft.size()) + 1;
        tokens[d].resize(rows);
        last[d] = rows - 1;
        // Rows that need nothing of those before them are for any thread.
        const int step = draws[d].state->looks_back() ? rows : 1;
        for (int at = 0; at < rows; at += step) runs.push_back({d, at, at + step});
    }
    pool.parallel(int(runs.size()), [&](int begin, int end) {
        thread_local SampleScratch scratch;
        for (const Run& run : std::span(runs).subspan(begin, end - begin)) {
            const Draw& draw = draws[run.draw];
            Ahead ahead(*draw.state, draw.draft);
            for (int i = run.begin; i < run.end && i <= last[run.draw].load(std::memory_order_relaxed); ++i) {
                const int32_t token = tokens[run.draw][i] = token_at(run.draw, i, scratch);
                if (size_t(i) < draw.draft.size() && token != draw.draft[i]) lower(last[run.draw], i);
                else if (i + 1 < run.end) ahead.go_on();
            }
        }
    });
    for (size_t d = 0; d < draws.size(); ++d) tokens[d].resize(last[d] + 1);
    return tokens;
}

SampleRow row_of(const Draw& draw, int i, uint32_t stream) {
    SampleRow how = draw.state->row(draw.position + uint32_t(i), stream);
    how.allowed = draw.allowed.row(i);
    return how;
}

double luck(const SampleRow& how, Stream stream) { return uniform(how.seed, how.choice, how.position, 0, uint32_t(stream)); }

// scratch.target and scratch.draft are p and q.
int32_t token_or_another(int32_t token, const SampleRow& how, const SampleScratch& scratch) {
    const std::vector<float>&p = scratch.target, &q = scratch.draft;
    if (q[token] > 0.0f && luck(how, Stream::Accepting) * q[token] < p[token]) return token;
    double total = 0;
    for (size_t t = 0; t < p.size(); ++t) total += std::max(0.0, double(p[t]) - double(q[t]));
    double left = luck(how, Stream::Replacing) * total;
    int32_t other = token;   // stays if p is nowhere above q, which rounding alone brings about
    for (size_t t = 0; t < p.size() && left >= 0.0; ++t) {
        const double more = double(p[t]) - double(q[t]);
        if (!(more > 0.0)) continue;
        other = int32_t(t);
        left -= more;
    }
    return other;
}

}  // namespace

Tokens draw_along(Pool& pool, const Kernels& k, std::span<const Draw> draws, int vocabulary, uint32_t stream) {
    return along_drafts(pool, draws, [&](size_t d, int i, SampleScratch& scratch) {
        const Draw& draw = draws[d];
        return sample_row(k, draw.logits.row(i), vocabulary, row_of(draw, i, stream), scratch);
    });
}

Tokens accept_or_replace(Pool& pool, const Kernels& k, std::span<const Draw> draws, std::span<const Proposal> proposals, int vocabulary) {
    return along_drafts(pool, draws, [&](size_t d, int i, SampleScratch& scratch) {
        const Draw& draw = draws[d];
        const float* row = draw.logits.row(i);
        const SampleRow how = row_of(draw, i, uint32_t(Stream::Sampling));
        if (size_t(i) == draw.draft.size() || how.temperature == 0.0) return sample_row(k, row, vocabulary, how, scratch);
        if (!probabilities(k, row, vocabulary, how, scratch, scratch.target)) return kNoToken;
        if (proposals[d].data) {
            probabilities(k, proposals[d].row(i), vocabulary, how, scratch, scratch.draft);
        } else {
            scratch.draft.assign(vocabulary, 0.0f);
            scratch.draft[draw.draft[i]] = 1.0f;
        }
        return token_or_another(draw.draft[i], how, scratch);
    });
}

}  // namespace mill
