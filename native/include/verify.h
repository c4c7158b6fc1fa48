// Which tokens of a draft stand, and the one that follows them. docs/sampling.md fixes what is computed.
#pragma once

#include "pool.h"
#include "sample.h"

namespace mill {

// Rows of logits, `stride` floats apart.
struct LogitRows {
    const float* data;
    int64_t stride;
    const float* row(size_t i) const { return data + int64_t(i) * stride; }
};

// What a mask allows, a row of words for each row of logits; no data: everything.
struct MaskRows {
    const uint32_t* data;
    int64_t stride;
    const uint32_t* row(size_t i) const { return data ? data + int64_t(i) * stride : nullptr; }
};

// Row i of `logits` is for the token at position + i, given the first i tokens of `draft`: one row more than there are tokens.
struct Draw {
    LogitRows logits;
    SampleState* state;
    uint32_t position;
    std::span<const int32_t> draft;   // in the vocabulary
    MaskRows allowed = {nullptr, 0};
};

// The draft model's logits, a row for each token of the draft; no data: the draft was certain.
using Proposal = LogitRows;

// What the noise is used for; see docs/sampling.md.
enum class Stream : uint32_t { Sampling = 0, Proposing = 1, Accepting = 2, Replacing = 3 };

// The tokens that are drawn for each draw: those of its draft as far as they are equal, and one more. Each is that which sample_row gives once the
// tokens before it are observed. States are as they were afterwards; one that looks back must have only one draw that has a draft, and no other.
using Tokens = std::vector<std::vector<int32_t>>;
Tokens draw_along(Pool& pool, const Kernels& k, std::span<const Draw> draws, int vocabulary, uint32_t stream);

// The same, where a token of the draft stands with probability min(1, p / q), and else one of max(0, p - q) is drawn in its place (Leviathan et
// al. 2023, Chen et al. 2023). proposals: one for each draw.
Tokens accept_or_replace(Pool& pool, const Kernels& k, std::span<const Draw> draws, std::span<const Proposal> proposals, int vocabulary);

}  // namespace mill
