#include "bind.h"
#include "pool.h"
#include "weight_format.h"

#include <stdexcept>

namespace {

mill::Form form_named(const std::string& name) {
    for (int i = 0; i < int(std::size(mill::kForms)); ++i)
        if (name == mill::kForms[i].name) return mill::Form(i);
    throw std::invalid_argument("[pack] unknown weight type " + name);
}

}  // namespace

void bind_weight(nb::module_& m) {
    using mill::Weight;
    nb::class_<Weight>(m, "Weight", "A weight matrix [rows, cols] in the form made for its kernels.")
        .def_ro("rows", &Weight::rows)
        .def_ro("cols", &Weight::cols)
        .def_prop_ro("type", [](const Weight& w) { return mill::traits(w.form).name; })
        .def_prop_ro("nbytes", [](const Weight& w) { return w.memory.size(); })
        .def("dequantize_rows", [](const Weight& w, const Array1<int32_t>& rows, nb::ndarray<float, nb::ndim<2>, nb::c_contig> out) {
            if (out.shape(0) != rows.size() || int(out.shape(1)) != w.cols) throw std::invalid_argument("[dequantize] out has the wrong shape");
            for (size_t i = 0; i < rows.size(); ++i) {
                if (rows.data()[i] < 0 || rows.data()[i] >= w.rows) throw std::invalid_argument("[dequantize] no such row");
                mill::dequantize_row(w, rows.data()[i], out.data() + i * w.cols);
            }
        }, nb::arg("rows"), nb::arg("out"));
    m.def("pack", [](const std::string& type, int rows, int cols, const Array1<uint8_t>& data, mill::Pool& pool) {
        const mill::Form form = form_named(type);
        nb::gil_scoped_release release;
        return std::make_shared<Weight>(mill::pack_weight(form, rows, cols, data.data(), data.size(), pool));
    }, nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"), nb::arg("pool"));
    m.def("narrow", [](const Weight& weight, mill::Pool& pool) {
        nb::gil_scoped_release release;
        return std::make_shared<Weight>(mill::narrow_weight(weight, pool));
    }, nb::arg("weight"), nb::arg("pool"));
}
