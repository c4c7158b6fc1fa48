#include "bind.h"
#include "tape.h"
#include "variants.h"

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

using mill::Tape;

namespace {

using Weights = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

mill::KVType kv_type(const std::string& name) {
    if (name == "bf16") return mill::KVType::Bf16;
    if (name == "int8") return mill::KVType::Int8;
    if (name == "int4") return mill::KVType::Int4;
    throw std::invalid_argument("[tape] unknown KV format " + name);
}

// Structs of int32 numbers.
template <class T> std::span<const T> structs_of(const Array1<int32_t>& numbers) {
    constexpr size_t n = sizeof(T) / sizeof(int32_t);
    if (numbers.size() % n) throw std::invalid_argument("[tape] numbers are missing");
    return {reinterpret_cast<const T*>(numbers.data()), numbers.size() / n};
}

}  // namespace

void bind_tape(nb::module_& m) {
    nb::class_<Tape>(m, "Tape", "A recorded forward pass. kernels/tape.py records it from a Program.")
        .def("__init__", [](Tape* self, std::shared_ptr<mill::Pool> pool, const std::string& variant, int max_rows, int max_outputs, int max_cols,
                            int frames, int layers, int heads, int kv_heads, int head_dim, const std::string& key, const std::string& value, int group_size,
                            const std::vector<std::vector<std::pair<int, int>>>& groups, const std::vector<std::pair<int, int>>& streaming, bool shared) {
            const mill::PageFormat page{head_dim, kv_type(key), kv_type(value), std::min(group_size, head_dim)};
            mill::TapeShape shape{max_rows, max_outputs, max_cols, frames, layers, heads, kv_heads, page, {}, shared};
            if (groups.size() != streaming.size()) throw std::invalid_argument("[tape] a KV group has no rule, or a rule no group");
            for (size_t g = 0; g < groups.size(); ++g) {
                shape.groups.push_back({{}, {streaming[g].first, streaming[g].second}});
                for (const auto& [layer, head] : groups[g]) shape.groups[g].pairs.push_back({layer, head});
            }
            new (self) Tape(std::move(pool), mill::kernels_named(variant), shape);
        }, nb::arg("pool"), nb::arg("variant"), nb::arg("max_rows"), nb::arg("max_outputs"), nb::arg("max_cols"), nb::arg("frames"),
           nb::arg("layers"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("key"), nb::arg("value"), nb::arg("group_size"),
           nb::arg("groups"), nb::arg("streaming"), nb::arg("shared"))
        .def("calibrate", [](Tape& t, int layer, const Array1<float>& factor, const Array1<float>& zero) { t.calibrate(layer, vector_of(factor), vector_of(zero)); },
             nb::arg("layer"), nb::arg("factor"), nb::arg("zero"))
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
        .def("start", [](Tape& t, const Array1<int32_t>& tokens, const Array1<int32_t>& segments, const Array1<int32_t>& tables, const Array1<int32_t>& frames,
                         const Array1<int32_t>& starts, const Array1<int32_t>& outputs, const std::vector<Weights>& weights) {
            std::vector<mill::FrameWeights> to;
            for (const Weights& w : weights) {
                if (w.shape(0) != size_t(t.pairs())) throw std::invalid_argument("[tape] weights need a row for each head of each layer");
                to.push_back({w.data(), int(w.shape(1)), std::make_shared<Weights>(w)});
            }
            const mill::Batch batch{span_of(tokens), structs_of<mill::Segment>(segments), structs_of<mill::PageTable>(tables), span_of(frames),
                                    span_of(starts), span_of(outputs), to};
            t.start(batch);
        }, nb::arg("tokens"), nb::arg("segments"), nb::arg("tables"), nb::arg("frames"), nb::arg("starts"), nb::arg("outputs"), nb::arg("weights"))
        .def("finish", &Tape::finish, nb::call_guard<nb::gil_scoped_release>())
        .def("rerun", [](Tape& t, const Array1<int32_t>& outputs) {
            nb::gil_scoped_release release;
            t.rerun(span_of(outputs));
        }, nb::arg("outputs"))
        .def("read_keys", [](const Tape& t, const Array1<int32_t>& tables, const Array1<int32_t>& frames, const Array1<int32_t>& starts, const Keys& out) {
            if (out.shape(0) != size_t(t.pairs()) || out.shape(2) != size_t(t.head_dim())) throw std::invalid_argument("[tape] keys need [layers * kv_heads, count, head_dim]");
            t.read_keys(structs_of<mill::PageTable>(tables), span_of(frames), span_of(starts), int(out.shape(1)), out.data());
        }, nb::arg("tables"), nb::arg("frames"), nb::arg("starts"), nb::arg("out"))
        .def("buffer", [](nb::handle_t<Tape> self, int index, int rows) {
            Tape& t = nb::cast<Tape&>(self);
            return nb::ndarray<nb::numpy, float, nb::ndim<2>>(const_cast<float*>(t.buffer(index)), {size_t(rows), size_t(t.width(index))}, self, {int64_t(t.stride(index)), 1});
        }, nb::arg("index"), nb::arg("rows"), "A view [rows, width] whose rows are apart, overwritten by the next start.")
        .def_prop_ro("kv_bytes", &Tape::kv_bytes)
        .def_prop_ro("kv_descriptor", &Tape::kv_descriptor)
        .def_prop_ro("kv", [](nb::handle_t<Tape> self) {
            const Tape& t = nb::cast<const Tape&>(self);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(t.kv(), {t.kv_bytes()}, self);
        })
        .def("fill_kv", [](Tape& t, int byte) { std::memset(t.kv(), byte, t.kv_bytes()); }, nb::arg("byte"), "For tests and benchmarks; see kernels/tape.py.");
}
