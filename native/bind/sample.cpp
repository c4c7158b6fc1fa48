#include "bind.h"
#include "pool.h"
#include "sample.h"
#include "variants.h"

#include <stdexcept>

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;   // rows may lie apart
using Reals = nb::ndarray<const double, nb::shape<-1, 6>, nb::c_contig, nb::device::cpu>;
using Wholes = nb::ndarray<const int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
using Ends = nb::ndarray<const int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
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
    m.def("sample", [](mill::Pool& pool, const std::string& variant, const Logits& logits, const Reals& reals, const Wholes& wholes, const Ends& ends,
                       const Array1<int32_t>& seen, const Array1<int32_t>& seen_count, const Array1<int32_t>& bias, const Array1<float>& bias_value,
                       const Array1<int32_t>& banned, Output<int32_t, -1> out) {
        const int rows = int(reals.shape(0)), vocabulary = int(logits.shape(1));
        if (int(wholes.shape(0)) != rows || int(ends.shape(0)) != rows || int(out.shape(0)) != rows || seen.size() != seen_count.size() || bias.size() != bias_value.size())
            throw std::invalid_argument("[sample] arrays differ in length");
        check_rows(logits);
        for (const auto& tokens : {span_of(seen), span_of(bias), span_of(banned)}) check_tokens(tokens, vocabulary);
        std::vector<mill::SampleRow> how(rows);
        int32_t seen_at = 0, bias_at = 0, banned_at = 0;
        for (int i = 0; i < rows; ++i) {
            const double* r = reals.data() + 6 * i;
            const int64_t* w = wholes.data() + 5 * i;
            const int32_t* e = ends.data() + 3 * i;
            if (w[0] < 0 || w[0] >= int64_t(logits.shape(0))) throw std::invalid_argument("[sample] no such row of logits");
            if (e[0] < seen_at || e[1] < bias_at || e[2] < banned_at || size_t(e[0]) > seen.size() || size_t(e[1]) > bias.size() || size_t(e[2]) > banned.size())
                throw std::invalid_argument("[sample] list ends are out of order");
            how[i] = {int(w[0]), r[0], int(w[1]), r[1], r[2], float(r[3]), float(r[4]), float(r[5]), uint64_t(w[2]), uint32_t(w[3]), uint32_t(w[4]),
                      span_of(seen).subspan(seen_at, e[0] - seen_at), span_of(seen_count).subspan(seen_at, e[0] - seen_at),
                      span_of(bias).subspan(bias_at, e[1] - bias_at), span_of(bias_value).subspan(bias_at, e[1] - bias_at),
                      span_of(banned).subspan(banned_at, e[2] - banned_at)};
            seen_at = e[0]; bias_at = e[1]; banned_at = e[2];
        }
        const mill::Kernels& k = mill::kernels_named(variant);
        nb::gil_scoped_release release;
        pool.parallel(rows, [&](int begin, int end) {
            thread_local mill::SampleScratch scratch;
            for (int i = begin; i < end; ++i) out.data()[i] = mill::sample_row(k, row_of(logits, how[i].row), vocabulary, how[i], scratch);
        });
    }, nb::arg("pool"), nb::arg("variant"), nb::arg("logits"), nb::arg("reals"), nb::arg("wholes"), nb::arg("ends"), nb::arg("seen"), nb::arg("seen_count"),
       nb::arg("bias"), nb::arg("bias_value"), nb::arg("banned"), nb::arg("out"));

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
