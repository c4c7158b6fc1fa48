#include "bind.h"
#include "tape.h"
#include "variants.h"

#include <cstring>
#include <stdexcept>

using mill::Tape;

void bind_tape(nb::module_& m) {
    nb::class_<Tape>(m, "Tape", "A recorded forward pass. kernels/tape.py records it from a Program.")
        .def("__init__", [](Tape* self, std::shared_ptr<mill::Pool> pool, const std::string& variant, int max_rows, int max_outputs, int max_cols,
                            int frames, int layers, int heads, int kv_heads, int head_dim) {
            const mill::TapeShape shape{max_rows, max_outputs, max_cols, frames, {layers, kv_heads, head_dim}, heads};
            new (self) Tape(std::move(pool), mill::kernels_named(variant), shape);
        }, nb::arg("pool"), nb::arg("variant"), nb::arg("max_rows"), nb::arg("max_outputs"), nb::arg("max_cols"), nb::arg("frames"),
           nb::arg("layers"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"))
        .def("add_buffer", &Tape::add_buffer, nb::arg("width"), nb::arg("output_rows"), nb::arg("plain"))
        .def("add_rope", [](Tape& t, const Array1<double>& inverse) { return t.add_rope(vector_of(inverse)); })
        .def("embed", &Tape::embed, nb::arg("weight"), nb::arg("out"), nb::arg("scale"))
        .def("linear", [](Tape& t, int x, std::vector<std::shared_ptr<mill::Weight>> weights, int out, const Array1<float>& norm, float eps,
                          const Array1<float>& bias, const std::string& result) {
            auto kind = mill::Out::Store;
            auto activation = mill::Activation::Silu;
            if (result == "add") kind = mill::Out::Add;
            else if (result == "silu" || result == "gelu_tanh") kind = mill::Out::Gate;
            else if (result != "store") throw std::invalid_argument("[tape] unknown result " + result);
            if (result == "gelu_tanh") activation = mill::Activation::GeluTanh;
            t.linear(x, std::move(weights), out, {vector_of(norm), eps}, vector_of(bias), kind, activation);
        }, nb::arg("x"), nb::arg("weights"), nb::arg("out"), nb::arg("norm"), nb::arg("eps"), nb::arg("bias"), nb::arg("result"))
        .def("rotate_store", [](Tape& t, int qkv, int layer, int rope, float scale, bool interleaved, const Array1<float>& q_norm, const Array1<float>& k_norm, float eps) {
            t.rotate_store(qkv, layer, rope, scale, interleaved, vector_of(q_norm), vector_of(k_norm), eps);
        }, nb::arg("qkv"), nb::arg("layer"), nb::arg("rope"), nb::arg("scale"), nb::arg("interleaved"), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("eps"))
        .def("attention", &Tape::attention, nb::arg("layer"), nb::arg("out"), nb::arg("window"))
        .def("add_norm", [](Tape& t, int x, int y, const Array1<float>& weight, float eps) { t.add_norm(x, y, vector_of(weight), eps); },
             nb::arg("x"), nb::arg("y"), nb::arg("weight"), nb::arg("eps"))
        .def("select", &Tape::select, nb::arg("x"), nb::arg("out"))
        .def("start", [](Tape& t, const Array1<int32_t>& tokens, const Array1<int32_t>& segments,
                         const Array1<int32_t>& frames, const Array1<int32_t>& starts, const Array1<int32_t>& outputs) {
            static_assert(sizeof(mill::Segment) == 5 * sizeof(int32_t));
            if (segments.size() % 5) throw std::invalid_argument("[tape] a segment is five numbers");
            const mill::Batch batch{span_of(tokens), {reinterpret_cast<const mill::Segment*>(segments.data()), segments.size() / 5},
                                    span_of(frames), span_of(starts), span_of(outputs)};
            t.start(batch);
        }, nb::arg("tokens"), nb::arg("segments"), nb::arg("frames"), nb::arg("starts"), nb::arg("outputs"))
        .def("finish", &Tape::finish, nb::call_guard<nb::gil_scoped_release>())
        .def("rerun", [](Tape& t, const Array1<int32_t>& outputs) {
            nb::gil_scoped_release release;
            t.rerun(span_of(outputs));
        }, nb::arg("outputs"))
        .def("buffer", [](nb::handle_t<Tape> self, int index, int rows) {
            Tape& t = nb::cast<Tape&>(self);
            return nb::ndarray<nb::numpy, float, nb::ndim<2>>(const_cast<float*>(t.buffer(index)), {size_t(rows), size_t(t.width(index))}, self, {int64_t(t.stride(index)), 1});
        }, nb::arg("index"), nb::arg("rows"), "A view [rows, width] whose rows are apart, overwritten by the next start.")
        .def_prop_ro("kv_bytes", &Tape::kv_bytes)
        .def("fill_kv", [](Tape& t, int byte) { std::memset(t.kv(), byte, t.kv_bytes()); }, nb::arg("byte"), "For tests and benchmarks; see kernels/tape.py.");
}
