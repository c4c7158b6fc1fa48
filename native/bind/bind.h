#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <span>

namespace nb = nanobind;

template <class T> using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T> std::span<const T> span_of(const Array1<T>& a) { return {a.data(), a.size()}; }
template <class T> std::vector<T> vector_of(const Array1<T>& a) { return {a.data(), a.data() + a.size()}; }

void bind_pool(nb::module_& m);
void bind_weight(nb::module_& m);
void bind_tape(nb::module_& m);
void bind_sample(nb::module_& m);
void bind_ceilings(nb::module_& m);
void bind_suffix(nb::module_& m);
void bind_frames(nb::module_& m);
