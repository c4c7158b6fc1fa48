#include "bind.h"
#include "pool.h"
#include "sample.h"
#include "variants.h"

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
        .def("observe", &SampleState::observe, nb::arg("token"));

    m.def("sample", [](mill::Pool& pool, const std::string& variant, const Logits& logits, const std::vector<int>& rows, const std::vector<SampleState*>& states,
                       const std::vector<uint32_t>& positions) {
        const size_t n = rows.size();
        const int vocabulary = int(logits.shape(1));
        if (states.size() != n || positions.size() != n) throw std::invalid_argument("[sample] lists differ in length");
        check_rows(logits);
        for (size_t i = 0; i < n; ++i) {
            if (rows[i] < 0 || size_t(rows[i]) >= logits.shape(0)) throw std::invalid_argument("[sample] no such row of logits");
            states[i]->check(vocabulary);
        }
        const mill::Kernels& k = mill::kernels_named(variant);
        std::vector<int32_t> tokens(n);
        nb::gil_scoped_release release;
        pool.parallel(int(n), [&](int begin, int end) {
            thread_local mill::SampleScratch scratch;
            for (int i = begin; i < end; ++i)
                tokens[i] = mill::sample_row(k, row_of(logits, rows[i]), vocabulary, states[i]->row(rows[i], positions[i]), scratch);
        });
        return tokens;
    }, nb::arg("pool"), nb::arg("variant"), nb::arg("logits"), nb::arg("rows"), nb::arg("states"), nb::arg("positions"));

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

    m.def("gumbel", &mill::gumbel, nb::arg("seed"), nb::arg("choice"), nb::arg("position"), nb::arg("token"));
}
