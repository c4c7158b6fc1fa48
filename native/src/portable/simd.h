// Sixteen float lanes as compiler vectors: any CPU, and whatever vector unit the compiler knows for it. No fused multiply-add.
#pragma once
#include <cmath>
#include <cstdint>

#define UNROLL _Pragma("GCC unroll 2")

namespace {

typedef float VF __attribute__((vector_size(64)));
typedef int32_t VI __attribute__((vector_size(64)));
typedef uint32_t VU __attribute__((vector_size(64)));
typedef uint8_t VB __attribute__((vector_size(64)));

struct F { VF v; };
struct I { VI v; };
struct B { VB v; };

constexpr int kRows = 2, kChainRows = 2;
constexpr int kScoreTiles = 1;
constexpr int kAttendRows = 4, kValueRows = 2, kValueVectors = 2;
constexpr int kZero8 = 128;

template <class T> inline T load_any(const void* p) { T t; __builtin_memcpy(&t, p, sizeof(T)); return t; }

inline F f_set(float x) { return {VF{} + x}; }
inline F f_load(const float* p) { return {load_any<VF>(p)}; }
// The first and the second numbers of 16 pairs.
inline void f_load_pairs(const float* p, F& first, F& second) { for (int l = 0; l < 16; ++l) { first.v[l] = p[2 * l]; second.v[l] = p[2 * l + 1]; } }
inline void f_store(float* p, F x) { __builtin_memcpy(p, &x.v, 64); }
inline F f_load_n(const float* p, int n) { VF t{}; __builtin_memcpy(&t, p, sizeof(float) * n); return {t}; }
inline void f_store_n(float* p, F x, int n) { __builtin_memcpy(p, &x.v, sizeof(float) * n); }
inline void f_store_where(float* p, uint32_t mask, F x) { for (; mask; mask &= mask - 1) *p++ = x.v[__builtin_ctz(mask)]; }
inline F f_add(F a, F b) { return {a.v + b.v}; }
inline F f_sub(F a, F b) { return {a.v - b.v}; }
inline F f_mul(F a, F b) { return {a.v * b.v}; }
inline F f_div(F a, F b) { return {a.v / b.v}; }
inline F f_fma(F a, F b, F c) { return {a.v * b.v + c.v}; }
inline F f_max(F a, F b) { return {a.v > b.v ? a.v : b.v}; }
inline F f_min(F a, F b) { return {a.v < b.v ? a.v : b.v}; }
inline F f_abs(F a) { return {(VF)((VU)a.v & 0x7fffffffu)}; }
// Adding and taking off 1.5 x 2^23 rounds half to even for |x| < 2^22, which is all that is ever asked.
inline F f_round(F a) { return {(a.v + 12582912.0f) - 12582912.0f}; }
inline I i_from_f(F a) { return {__builtin_convertvector(f_round(a).v, VI)}; }
inline F f_from_i(I a) { return {__builtin_convertvector(a.v, VF)}; }
inline F f_scale2(F a, I n) { return {(VF)((VU)a.v + ((VU)n.v << 23))}; }
inline F f_select(F x, int lo, int hi, float other) {
    const VI lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const VI in = (lane >= lo) & (lane < hi);
    return {in ? x.v : VF{} + other};
}
inline F f_unless_lt(F a, F b, F x) { return {a.v < b.v ? VF{} : x.v}; }
inline uint32_t f_above(F a, F b) { uint32_t mask = 0; for (int l = 0; l < 16; ++l) mask |= uint32_t(a.v[l] > b.v[l]) << l; return mask; }
inline float f_highest(F x) { float m = x.v[0]; for (int l = 1; l < 16; ++l) m = x.v[l] > m ? x.v[l] : m; return m; }
// Lane r: the highest of x[r].
template <int R> inline F f_highest_of(const F (&x)[R]) {
    F t{};
    for (int r = 0; r < R; ++r) t.v[r] = f_highest(x[r]);
    return t;
}
// (l) + (l + 8), (l) + (l + 4), (l) + (l + 2), (l) + (l + 1).
inline float f_tree(F x) {
    for (int width = 8; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) x.v[l] = x.v[l] + x.v[l + width];
    return x.v[0];
}
inline F f_half(const void* p) { VF t; for (int l = 0; l < 16; ++l) t[l] = mill::f16_to_f32(load_any<uint16_t>(static_cast<const char*>(p) + 2 * l)); return {t}; }
inline F f_bf16(const void* p) { VF t; for (int l = 0; l < 16; ++l) t[l] = mill::bf16_to_f32(load_any<uint16_t>(static_cast<const char*>(p) + 2 * l)); return {t}; }
// 16 bf16 numbers from two places.
inline F f_bf16_of(const void* lower, const void* upper) {
    VF t;
    for (int l = 0; l < 16; ++l) t[l] = mill::bf16_to_f32(load_any<uint16_t>(static_cast<const char*>(l < 8 ? lower : upper) + 2 * (l % 8)));
    return {t};
}

constexpr bool kRoundsToBf16 = false;

inline I i_set(int32_t x) { return {VI{} + x}; }
inline I i_load(const void* p) { return {load_any<VI>(p)}; }
inline I i_bits(F x) { return {(VI)x.v}; }
inline F f_bits(I x) { return {(VF)x.v}; }
// a where x is NaN, b elsewhere.
inline I i_where_nan(F x, I a, I b) { return {x.v != x.v ? a.v : b.v}; }
inline I i_u8(const void* p) { VI t; for (int l = 0; l < 16; ++l) t[l] = static_cast<const uint8_t*>(p)[l]; return {t}; }
inline I i_s8(const void* p) { VI t; for (int l = 0; l < 16; ++l) t[l] = static_cast<const int8_t*>(p)[l]; return {t}; }
inline I i_and(I a, int m) { return {a.v & m}; }
inline I i_or(I a, I b) { return {a.v | b.v}; }
// Both wrap around: the bits of a NaN are added to as well.
inline I i_sub(I a, I b) { return {(VI)((VU)a.v - (VU)b.v)}; }
inline I i_add(I a, I b) { return {(VI)((VU)a.v + (VU)b.v)}; }
template <int n> inline I i_shl(I a) { return {(VI)((VU)a.v << n)}; }
template <int n> inline I i_shr(I a) { return {(VI)((VU)a.v >> n)}; }
inline I i_shr_by(I a, int n) { return {(VI)((VU)a.v >> n)}; }
inline void i_store_s8(int8_t* p, I a) { for (int l = 0; l < 16; ++l) p[l] = int8_t(a.v[l]); }
inline void i_store_u16(uint16_t* p, I a) { for (int l = 0; l < 16; ++l) p[l] = uint16_t(a.v[l]); }
inline I i_lanes() { return {VI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}; }
inline void i_store(int32_t* p, I a) { __builtin_memcpy(p, &a.v, sizeof(a.v)); }
inline void i_store_where(uint32_t* p, uint32_t mask, I a) { for (; mask; mask &= mask - 1) *p++ = uint32_t(a.v[__builtin_ctz(mask)]); }
// Of 16 pairs at p the first or the second number.
inline void i_store_alternate(uint16_t* p, I a, int second) { for (int l = 0; l < 16; ++l) p[2 * l + second] = uint16_t(a.v[l]); }
// 32 numbers each as signed bytes at p[r]. Lane r of `half` and `total`: the sum of the first 16 and of all.
template <int R> inline void i_store_blocks(int8_t* const (&p)[R], const I (&q0)[R], const I (&q1)[R], I& half, I& total) {
    half = total = I{};
    for (int r = 0; r < R; ++r) {
        uint32_t lower = 0, upper = 0;   // unsigned, since what is no number became the least int, and sums of it wrap
        for (int l = 0; l < 16; ++l) {
            p[r][l] = int8_t(q0[r].v[l]);
            p[r][l + 16] = int8_t(q1[r].v[l]);
            lower += uint32_t(q0[r].v[l]);
            upper += uint32_t(q1[r].v[l]);
        }
        half.v[r] = int32_t(lower);
        total.v[r] = int32_t(lower + upper);
    }
}

inline B b_load(const void* p) { return {load_any<VB>(p)}; }
inline B b_load2(const void* lower, const void* upper) { VB t; __builtin_memcpy(&t, lower, 32); __builtin_memcpy(reinterpret_cast<char*>(&t) + 32, upper, 32); return {t}; }
inline B b_or(B a, B b) { return {a.v | b.v}; }
inline B b_low(B a) { return {a.v & 15}; }
inline B b_high(B a) { return {a.v >> 4}; }
template <int j> inline B b_bit(B a) { return {((a.v >> j) & 1) << 4}; }
template <int j> inline B b_crumb(B a) { return {((a.v >> (2 * j)) & 3) << 4}; }
inline B b_even_only(B a) { return {(VB)((VU)a.v & 0xffffu)}; }

// Sums of u8 x s8 over quads. Quad j of a block of `bits`-bit values goes in once each, ascending; a holds 4 signed bytes for all lanes.
using Dots = I;
inline Dots dots_from(I start) { return start; }
inline I total_of(Dots d) { return d; }
template <int bits, int j> inline void add_dot(Dots& d, B w, const int8_t* a) {
    alignas(64) uint8_t bytes[64];
    __builtin_memcpy(bytes, &w.v, 64);
    const int a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
    for (int l = 0; l < 16; ++l) d.v[l] += bytes[4 * l] * a0 + bytes[4 * l + 1] * a1 + bytes[4 * l + 2] * a2 + bytes[4 * l + 3] * a3;
}
inline F dot2(F acc, B x, const uint16_t* a) {
    const VU u = (VU)x.v;
    const VF x0 = (VF)(u << 16), x1 = (VF)(u & 0xffff0000u);
    const VF inner = mill::bf16_to_f32(a[1]) * x1 + acc.v;
    return {mill::bf16_to_f32(a[0]) * x0 + inner};
}

}  // namespace
