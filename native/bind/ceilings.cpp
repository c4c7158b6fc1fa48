#include "bind.h"
#include "ceilings.h"
#include "variants.h"

void bind_ceilings(nb::module_& m) {
    m.def("run_int8", [](mill::Pool& pool, const std::string& variant, int64_t rounds) {
        mill::kernels_named(variant);   // refuses what this CPU cannot run
        return mill::run_int8(pool, variant, rounds);
    }, nb::arg("pool"), nb::arg("variant"), nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>());
    m.def("run_bf16", [](mill::Pool& pool, const std::string& variant, int64_t rounds) {
        mill::kernels_named(variant);
        return mill::run_bf16(pool, variant, rounds);
    }, nb::arg("pool"), nb::arg("variant"), nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>());
    m.def("run_read", [](mill::Pool& pool, const std::string& variant, const Array1<uint8_t>& data) {
        mill::kernels_named(variant);
        nb::gil_scoped_release release;
        return mill::run_read(pool, variant, data.data(), data.size());
    }, nb::arg("pool"), nb::arg("variant"), nb::arg("data"));
}
