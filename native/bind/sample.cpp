#include "bind.h"
#include "pool.h"
#include "verify.h"
#include "variants.h"

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <stdexcept>

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;   // rows may lie apart
template <class T, int... shape> using Output = nb::ndarray<T, nb::shape<shape...>, nb::c_contig, nb::device::cpu>;

void check_tokens(std::span<const int32_t> tokens, int vocabulary) {
    for (int32_t t : tokens)
        if (t < 0 || t >= vocabulary) throw std::invalid_argument("[sample] token " + std::to_string(t) + " is outside the vocabulary of " + std::to_string(vocabulary));
}

const float* row_of(const Logits& logits, int row) {
    return logits.data() + row * logits.stride(0);
}

void check_rows(const Logits& logits) {
    if (logits.shape(0) && logits.stride(1) != 1) throw std::invalid_argument("[sample] a row of logits must be contiguous");
}

using Drafts = std::vector<std::vector<int32_t>>;
using Masks = std::vector<std::optional<nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>>>;

std::vector<mill::Draw> draws_of(const Logits& logits, const std::vector<int>& rows, const std::vector<mill::SampleState*>& states,
                                 const std::vector<uint32_t>& positions, const Drafts& drafts, const Masks& allowed) {
    const size_t n = rows.size();
    const int vocabulary = int(logits.shape(1));
    if (states.size() != n || positions.size() != n || drafts.size() != n || allowed.size() != n) throw std::invalid_argument("[sample] lists differ in length");
    check_rows(logits);
    std::vector<mill::Draw> draws(n);
    std::vector<const mill::SampleState*> changing;
    for (size_t i = 0; i < n; ++i) {
        if (!states[i]) throw std::invalid_argument("[sample] a draw without a state");
        if (rows[i] < 0 || size_t(rows[i]) + drafts[i].size() >= logits.shape(0))
            throw std::invalid_argument("[sample] no such row of logits: " + std::to_string(rows[i]) + " and " + std::to_string(drafts[i].size()) + " for its draft, of " +
                                        std::to_string(logits.shape(0)));
        states[i]->check(vocabulary);
        check_tokens(drafts[i], vocabulary);
        draws[i] = {{row_of(logits, rows[i]), logits.stride(0)}, states[i], positions[i], drafts[i]};
        if (allowed[i]) {
            if (allowed[i]->shape(0) != drafts[i].size() + 1 || int64_t(allowed[i]->shape(1)) * 32 < vocabulary)
                throw std::invalid_argument("[sample] a mask has a row for each token of its draft and one more, and a bit for each token of the vocabulary");
            draws[i].allowed = {allowed[i]->data(), int64_t(allowed[i]->shape(1))};
        }
        if (!drafts[i].empty() && states[i]->looks_back()) changing.push_back(states[i]);
    }
    for (const mill::SampleState* state : changing)
        if (std::count(states.begin(), states.end(), state) > 1) throw std::invalid_argument("[sample] a draw with a draft shares its state with another");
    return draws;
}

}  // namespace

void bind_sample(nb::module_& m) {
    using mill::SampleState;
    nb::class_<SampleState>(m, "SampleState", "What sampling needs to know of one choice of a request; see sampling/state.py.")
        .def("__init__", [](SampleState* self, double temperature, double top_p, double min_p, int top_k, float repetition, float presence, float frequency,
                            uint64_t seed, uint32_t choice, int64_t min_tokens, std::vector<int32_t> bias, std::vector<float> bias_value,
                            std::vector<int32_t> ends, const std::vector<int32_t>& prompt) {
            const mill::SampleSettings how{temperature, top_p, min_p, top_k, repetition, presence, frequency, seed, choice, min_tokens};
            new (self) SampleState(how, std::move(bias), std::move(bias_value), std::move(ends), prompt);
        }, nb::arg("temperature"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("top_k"), nb::arg("repetition"), nb::arg("presence"), nb::arg("frequency"),
           nb::arg("seed"), nb::arg("choice"), nb::arg("min_tokens"), nb::arg("bias"), nb::arg("bias_value"), nb::arg("ends"), nb::arg("prompt"))
        .def("observe", &SampleState::observe, nb::arg("token"))
        .def("retract", &SampleState::retract, nb::arg("token"));

    m.def("sample", [](mill::Pool& pool, const std::string& variant, const Logits& logits, const std::vector<int>& rows, const std::vector<SampleState*>& states,
                       const std::vector<uint32_t>& positions, const Drafts& drafts, const Masks& allowed, uint32_t stream) {
        const std::vector<mill::Draw> draws = draws_of(logits, rows, states, positions, drafts, allowed);
        const mill::Kernels& k = mill::kernels_named(variant);
        nb::gil_scoped_release release;
        return mill::draw_along(pool, k, draws, int(logits.shape(1)), stream);
    }, nb::arg("pool"), nb::arg("variant"), nb::arg("logits"), nb::arg("rows"), nb::arg("states"), nb::arg("positions"), nb::arg("drafts"), nb::arg("allowed"), nb::arg("stream"));

    m.def("reject", [](mill::Pool& pool, const std::string& variant, const Logits& logits, const std::vector<int>& rows, const std::vector<SampleState*>& states,
                       const std::vector<uint32_t>& positions, const Drafts& drafts, const Masks& allowed, const std::vector<std::optional<Logits>>& proposals) {
        const std::vector<mill::Draw> draws = draws_of(logits, rows, states, positions, drafts, allowed);
        if (proposals.size() != draws.size()) throw std::invalid_argument("[reject] lists differ in length");
        std::vector<mill::Proposal> given(draws.size(), {nullptr, 0});
        for (size_t i = 0; i < draws.size(); ++i) {
            if (!proposals[i]) continue;
            if (proposals[i]->shape(0) != drafts[i].size() || proposals[i]->shape(1) != logits.shape(1))
                throw std::invalid_argument("[reject] a proposal has a row of the vocabulary for each token of its draft");
            check_rows(*proposals[i]);
            given[i] = {proposals[i]->data(), proposals[i]->stride(0)};
        }
        const mill::Kernels& k = mill::kernels_named(variant);
        nb::gil_scoped_release release;
        return mill::accept_or_replace(pool, k, draws, given, int(logits.shape(1)));
    }, nb::arg("pool"), nb::arg("variant"), nb::arg("logits"), nb::arg("rows"), nb::arg("states"), nb::arg("positions"), nb::arg("drafts"), nb::arg("allowed"), nb::arg("proposals"));

    m.def("likelihoods", [](mill::Pool& pool, const std::string& variant, const Logits& logits, const Array1<int32_t>& rows, const Array1<int32_t>& tokens,
                            Output<double, -1> logprob, Output<int32_t, -1> rank, Output<int32_t, -1, -1> top, Output<double, -1, -1> top_logprob) {
        const size_t n = rows.size();
        const int vocabulary = int(logits.shape(1)), top_n = int(top.shape(1));
        if (tokens.size() != n || logprob.shape(0) != n || rank.shape(0) != n || top.shape(0) != n || top_logprob.shape(0) != n || int(top_logprob.shape(1)) != top_n || top_n > vocabulary)
            throw std::invalid_argument("[likelihoods] arrays differ in length");
        check_rows(logits);
        check_tokens(span_of(tokens), vocabulary);
        check_tokens(span_of(rows), int(logits.shape(0)));
        const mill::Kernels& k = mill::kernels_named(variant);
        nb::gil_scoped_release release;
        pool.parallel(int(n), [&](int begin, int end) {
            thread_local mill::SampleScratch scratch;
            for (int i = begin; i < end; ++i) {
                const mill::Likelihood l = mill::likelihood_of(k, row_of(logits, rows.data()[i]), vocabulary, tokens.data()[i], top_n,
                                                               top.data() + size_t(i) * top_n, top_logprob.data() + size_t(i) * top_n, scratch);
                logprob.data()[i] = l.logprob;
                rank.data()[i] = l.rank;
            }
        });
    }, nb::arg("pool"), nb::arg("variant"), nb::arg("logits"), nb::arg("rows"), nb::arg("tokens"), nb::arg("logprob"), nb::arg("rank"), nb::arg("top"), nb::arg("top_logprob"));

    m.def("gumbel", &mill::gumbel, nb::arg("seed"), nb::arg("choice"), nb::arg("position"), nb::arg("token"), nb::arg("stream") = 0);
}
