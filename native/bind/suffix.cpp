#include "bind.h"
#include "suffix.h"

void bind_suffix(nb::module_& m) {
    using mill::SuffixDraft;
    using mill::SuffixIndex;
    nb::class_<SuffixDraft>(m, "SuffixDraft", "A draft with what speaks for it; see native/include/suffix.h.")
        .def_ro("tokens", &SuffixDraft::tokens)
        .def_ro("shares", &SuffixDraft::shares)
        .def_ro("matches", &SuffixDraft::matches)
        .def_ro("expected", &SuffixDraft::expected);
    nb::class_<SuffixIndex>(m, "SuffixIndex", "What has followed the suffixes of strings of tokens; see native/include/suffix.h.")
        .def(nb::init<int>(), nb::arg("depth"))
        .def("extend", [](SuffixIndex& index, const std::vector<int32_t>& tokens) { index.extend(tokens); }, nb::arg("tokens"))
        .def("end", &SuffixIndex::end)
        .def("draft", [](const SuffixIndex& index, const std::vector<int32_t>& context, int most, double floor, const Array1<double>& trust) {
            return index.draft(context, most, floor, span_of(trust));
        }, nb::arg("context"), nb::arg("most"), nb::arg("floor"), nb::arg("trust"))
        .def_prop_ro("states", &SuffixIndex::states)
        .def_prop_ro("edges", &SuffixIndex::edges)
        .def_prop_ro("bytes", &SuffixIndex::bytes)
        .def_prop_ro("work", &SuffixIndex::work);
}
