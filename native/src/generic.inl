// The kernels, once, over the sixteen-lane SIMD layer of the including variant. docs/numerics.md says what each must compute.
//
// Included once per variant, after its simd.h, with MILL_VARIANT naming it. Everything lies in an unnamed namespace and nothing from the
// standard library is called, so that no symbol compiled for a newer CPU can replace one of the baseline.

namespace {

using namespace mill;

constexpr float kLog2e = 1.44269504088896340736f;

#include "generic/elementary.inl"
#include "generic/rows.inl"
#include "generic/linear_quant.inl"
#include "generic/linear_dense.inl"
#include "generic/digits.inl"
#include "generic/rotate.inl"
#include "generic/spans.inl"
#include "generic/scores.inl"
#include "generic/values.inl"
#include "generic/attention.inl"
#include "generic/vocabulary.inl"

constexpr Kernels kTable = {
    MILL_VARIANT, kAttendRows, quantize, rms_norm, add, linear_quant, linear_dense, rotate_store, attend_cut, weigh_frames, merge_cut, finish,
    row_max, sum_exp, exp2_scaled,
};

}  // namespace
