#include "bind.h"
#include "common.h"
#include "frames.h"

#include <nanobind/stl/pair.h>

#include <stdexcept>

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A stream over a pool that it keeps alive. writable: the pool again, or nothing if it can only be read.
struct Frames {
    Bytes pool;
    uint8_t* writable;
    mill::FrameStream stream;

    uint8_t* target() const {
        if (!writable) throw std::invalid_argument("[frames] this pool can only be read");
        return writable;
    }
};

std::vector<mill::GroupFrames> groups_of(const std::vector<std::pair<size_t, Array1<int32_t>>>& groups) {
    std::vector<mill::GroupFrames> found;
    for (const auto& [slots, numbers] : groups) found.push_back({slots, span_of(numbers)});
    return found;
}

}  // namespace

void bind_frames(nb::module_& m) {
    nb::class_<mill::Memory>(m, "Memory", "Memory that other processes can map for reading; see native/include/common.h.")
        .def("__init__", [](mill::Memory* self, size_t bytes) { new (self) mill::Memory(mill::Memory::shared(bytes)); }, nb::arg("bytes"))
        .def_prop_ro("data", [](nb::handle_t<mill::Memory> self) {
            const auto& memory = nb::cast<const mill::Memory&>(self);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory.data(), {memory.size()}, self);
        })
        .def_prop_ro("descriptor", &mill::Memory::descriptor);
    nb::class_<Frames>(m, "Frames", "Frames of a pool as one stream of bytes; see native/include/frames.h.")
        .def("__init__", [](Frames* self, const Bytes& pool, size_t slot_stride, size_t piece_bytes, size_t frames,
                            const std::vector<std::pair<size_t, Array1<int32_t>>>& groups) {
            WritableBytes writable;
            const bool can_write = nb::try_cast(nb::cast(pool), writable);
            new (self) Frames{pool, can_write ? writable.data() : nullptr, {{slot_stride, piece_bytes, frames}, pool.size(), groups_of(groups)}};
        }, nb::arg("pool"), nb::arg("slot_stride"), nb::arg("piece_bytes"), nb::arg("frames"), nb::arg("groups"))
        .def_prop_ro("nbytes", [](const Frames& f) { return f.stream.bytes(); })
        .def("gather", [](const Frames& f, size_t begin, const WritableBytes& out) {
            nb::gil_scoped_release release;
            f.stream.gather(f.pool.data(), begin, out.size(), out.data());
        }, nb::arg("begin"), nb::arg("out"))
        .def("scatter", [](const Frames& f, size_t begin, const Bytes& data) {
            nb::gil_scoped_release release;
            f.stream.scatter(f.target(), begin, data.size(), data.data());
        }, nb::arg("begin"), nb::arg("data"))
        .def("copy", [](const Frames& f, const Frames& source, size_t begin, size_t count) {
            nb::gil_scoped_release release;
            f.stream.copy(f.target(), begin, count, source.pool.data(), source.stream);
        }, nb::arg("source"), nb::arg("begin"), nb::arg("count"));
}
