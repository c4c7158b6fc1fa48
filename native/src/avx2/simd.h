// Sixteen float lanes in two registers. Needs AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>
#include <cstdint>

#define UNROLL _Pragma("GCC unroll 16")

namespace {

struct F { __m256 v[2]; };
struct I { __m256i v[2]; };
struct B { __m256i v[2]; };   // 64 bytes

constexpr int kRows = 2, kChainRows = 2;
constexpr int kScoreTiles = 1;
constexpr int kAttendRows = 4, kValueRows = 3, kValueVectors = 2;
constexpr int kZero8 = 0;     // add_dot takes the 128 off itself

#define EACH(expr) { {[&](int h) { return expr; }(0), [&](int h) { return expr; }(1)} }

inline F f_set(float x) { return EACH((void(h), _mm256_set1_ps(x))); }
inline F f_load(const float* p) { return EACH(_mm256_loadu_ps(p + 8 * h)); }
// The first and the second numbers of 16 pairs.
inline void f_load_pairs(const float* p, F& first, F& second) {
    alignas(64) float even[16], odd[16];
    for (int l = 0; l < 16; ++l) { even[l] = p[2 * l]; odd[l] = p[2 * l + 1]; }
    first = f_load(even);
    second = f_load(odd);
}
inline void f_store(float* p, F x) { _mm256_storeu_ps(p, x.v[0]); _mm256_storeu_ps(p + 8, x.v[1]); }
inline F f_load_n(const float* p, int n) { alignas(64) float t[16] = {}; __builtin_memcpy(t, p, sizeof(float) * n); return f_load(t); }
inline void f_store_n(float* p, F x, int n) { alignas(64) float t[16]; f_store(t, x); __builtin_memcpy(p, t, sizeof(float) * n); }
inline void f_store_where(float* p, uint32_t mask, F x) {
    alignas(64) float t[16];
    f_store(t, x);
    for (; mask; mask &= mask - 1) *p++ = t[__builtin_ctz(mask)];
}
inline F f_add(F a, F b) { return EACH(_mm256_add_ps(a.v[h], b.v[h])); }
inline F f_sub(F a, F b) { return EACH(_mm256_sub_ps(a.v[h], b.v[h])); }
inline F f_mul(F a, F b) { return EACH(_mm256_mul_ps(a.v[h], b.v[h])); }
inline F f_div(F a, F b) { return EACH(_mm256_div_ps(a.v[h], b.v[h])); }
inline F f_fma(F a, F b, F c) { return EACH(_mm256_fmadd_ps(a.v[h], b.v[h], c.v[h])); }
inline F f_max(F a, F b) { return EACH(_mm256_max_ps(a.v[h], b.v[h])); }
inline F f_min(F a, F b) { return EACH(_mm256_min_ps(a.v[h], b.v[h])); }
inline F f_abs(F a) { return EACH(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v[h])); }
inline F f_round(F a) { return EACH(_mm256_round_ps(a.v[h], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
inline I i_from_f(F a) { return EACH(_mm256_cvtps_epi32(a.v[h])); }
inline F f_from_i(I a) { return EACH(_mm256_cvtepi32_ps(a.v[h])); }
inline F f_scale2(F a, I n) { return EACH(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v[h]), _mm256_slli_epi32(n.v[h], 23)))); }
inline F f_select(F x, int lo, int hi, float other) {
    const __m256i low = _mm256_set1_epi32(lo - 1), high = _mm256_set1_epi32(hi), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return EACH(([&] {
        const __m256i at = _mm256_add_epi32(lane, _mm256_set1_epi32(8 * h));
        const __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(at, low), _mm256_cmpgt_epi32(high, at));
        return _mm256_blendv_ps(_mm256_set1_ps(other), x.v[h], _mm256_castsi256_ps(in));
    }()));
}
inline F f_unless_lt(F a, F b, F x) { return EACH(_mm256_and_ps(_mm256_cmp_ps(a.v[h], b.v[h], _CMP_NLT_UQ), x.v[h])); }
inline uint32_t f_above(F a, F b) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.v[0], b.v[0], _CMP_GT_OQ))) | uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.v[1], b.v[1], _CMP_GT_OQ))) << 8;
}
inline float f_highest(F x) {
    const __m256 a = _mm256_max_ps(x.v[0], x.v[1]);
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
// Lane r: the highest of x[r].
template <int R> inline F f_highest_of(const F (&x)[R]) {
    alignas(64) float t[16] = {};
    UNROLL for (int r = 0; r < R; ++r) t[r] = f_highest(x[r]);
    return f_load(t);
}
// (l) + (l + 8), (l) + (l + 4), (l) + (l + 2), (l) + (l + 1).
inline float f_tree(F x) {
    const __m256 a = _mm256_add_ps(x.v[0], x.v[1]);
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
inline F f_half(const void* p) { return EACH(_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p) + h))); }
inline F f_bf16(const void* p) { return EACH(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p) + h)), 16))); }
// 16 bf16 numbers from two places.
inline F f_bf16_of(const void* lower, const void* upper) {
    return EACH(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(h ? upper : lower))), 16)));
}

constexpr bool kRoundsToBf16 = false;

inline I i_set(int32_t x) { return EACH((void(h), _mm256_set1_epi32(x))); }
inline I i_load(const void* p) { return EACH(_mm256_loadu_si256(static_cast<const __m256i*>(p) + h)); }
inline I i_bits(F x) { return EACH(_mm256_castps_si256(x.v[h])); }
inline F f_bits(I x) { return EACH(_mm256_castsi256_ps(x.v[h])); }
// a where x is NaN, b elsewhere.
inline I i_where_nan(F x, I a, I b) {
    return EACH(_mm256_blendv_epi8(b.v[h], a.v[h], _mm256_castps_si256(_mm256_cmp_ps(x.v[h], x.v[h], _CMP_UNORD_Q))));
}
inline I i_u8(const void* p) { return EACH(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(p) + 8 * h)))); }
inline I i_s8(const void* p) { return EACH(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(p) + 8 * h)))); }
inline I i_and(I a, int m) { return EACH(_mm256_and_si256(a.v[h], _mm256_set1_epi32(m))); }
inline I i_or(I a, I b) { return EACH(_mm256_or_si256(a.v[h], b.v[h])); }
inline I i_sub(I a, I b) { return EACH(_mm256_sub_epi32(a.v[h], b.v[h])); }
inline I i_add(I a, I b) { return EACH(_mm256_add_epi32(a.v[h], b.v[h])); }
template <int n> inline I i_shl(I a) { return EACH(_mm256_slli_epi32(a.v[h], n)); }
template <int n> inline I i_shr(I a) { return EACH(_mm256_srli_epi32(a.v[h], n)); }
inline I i_shr_by(I a, int n) { return EACH(_mm256_srl_epi32(a.v[h], _mm_cvtsi32_si128(n))); }
inline void i_store(int32_t* p, I a) { for (int h = 0; h < 2; ++h) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + h, a.v[h]); }
inline I i_lanes() { return {{_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}}; }
inline void i_store_where(uint32_t* p, uint32_t mask, I a) {
    alignas(64) int32_t t[16];
    i_store(t, a);
    for (; mask; mask &= mask - 1) *p++ = uint32_t(t[__builtin_ctz(mask)]);
}
inline void i_store_u16(uint16_t* p, I a) {
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(a.v[0], a.v[1]), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}
inline __m128i bytes_of(I a) {
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.v[0], a.v[1]), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
}
inline void i_store_s8(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes_of(a)); }
// The sum of 16 signed bytes, which psadbw takes as unsigned.
inline int32_t byte_sum(__m128i x) {
    const __m128i sums = _mm_sad_epu8(_mm_xor_si128(x, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums))) - 128 * 16;
}
// 32 numbers each as signed bytes at p[r]. Lane r of `half` and `total`: the sum of the first 16 and of all.
template <int R> inline void i_store_blocks(int8_t* const (&p)[R], const I (&q0)[R], const I (&q1)[R], I& half, I& total) {
    alignas(64) int32_t halves[16] = {}, totals[16] = {};
    UNROLL for (int r = 0; r < R; ++r) {
        const __m128i b0 = bytes_of(q0[r]), b1 = bytes_of(q1[r]);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p[r]), b0);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p[r]) + 1, b1);
        halves[r] = byte_sum(b0);
        totals[r] = halves[r] + byte_sum(b1);
    }
    half = i_load(halves);
    total = i_load(totals);
}
// Of 16 pairs at p the first or the second number.
inline void i_store_alternate(uint16_t* p, I a, int second) {
    alignas(64) int32_t t[16];
    i_store(t, a);
    for (int l = 0; l < 16; ++l) p[2 * l + second] = uint16_t(t[l]);
}

inline B b_load2(const void* lower, const void* upper) { return {{_mm256_loadu_si256(static_cast<const __m256i*>(lower)), _mm256_loadu_si256(static_cast<const __m256i*>(upper))}}; }
inline B b_load(const void* p) { return b_load2(p, static_cast<const char*>(p) + 32); }
inline B b_or(B a, B b) { return EACH(_mm256_or_si256(a.v[h], b.v[h])); }
inline B b_low(B a) { return EACH(_mm256_and_si256(a.v[h], _mm256_set1_epi8(15))); }
inline B b_high(B a) { return EACH(_mm256_and_si256(_mm256_srli_epi16(a.v[h], 4), _mm256_set1_epi8(15))); }
template <int j> inline B b_bit(B a) {
    return EACH(_mm256_and_si256(j <= 4 ? _mm256_slli_epi16(a.v[h], j <= 4 ? 4 - j : 0) : _mm256_srli_epi16(a.v[h], j > 4 ? j - 4 : 0), _mm256_set1_epi8(16)));
}
template <int j> inline B b_crumb(B a) {
    return EACH(_mm256_and_si256(j <= 2 ? _mm256_slli_epi16(a.v[h], j <= 2 ? 4 - 2 * j : 0) : _mm256_srli_epi16(a.v[h], 2), _mm256_set1_epi8(48)));
}
inline B b_even_only(B a) { return EACH(_mm256_and_si256(a.v[h], _mm256_set1_epi32(0xffff))); }

// Sums of u8 x s8 over quads. Quad j of a block of `bits`-bit values goes in once each, ascending; a holds 4 signed bytes for all lanes.
// vpmaddubsw adds two products in 16 bits, which hold 8 such pairs of 4-bit values, 4 of 5 bits, 2 of 6 bits: `pairs` collects them. The sign of
// bytes is moved to a, so that one pair of 128 x 127 fits.
struct Dots { I i; __m256i pairs[2]; };
inline Dots dots_from(I start) { return {start, {}}; }
inline I total_of(const Dots& d) { return d.i; }
template <int bits, int j> inline void add_dot(Dots& d, B w, const int8_t* a) {
    constexpr int held = bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
    int32_t quad; __builtin_memcpy(&quad, a, 4);
    const __m256i all = _mm256_set1_epi32(quad);
    UNROLL for (int h = 0; h < 2; ++h) {
        __m256i pair;
        if constexpr (bits == 8) {
            const __m256i s = _mm256_xor_si256(w.v[h], _mm256_set1_epi8(-128));
            pair = _mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8(all, s));
        } else {
            pair = _mm256_maddubs_epi16(w.v[h], all);
        }
        d.pairs[h] = j % held == 0 ? pair : _mm256_add_epi16(d.pairs[h], pair);
        if (j % held == held - 1) d.i.v[h] = _mm256_add_epi32(d.i.v[h], _mm256_madd_epi16(d.pairs[h], _mm256_set1_epi16(1)));
    }
}
inline F dot2(F acc, B x, const uint16_t* a) {
    const __m256 a0 = _mm256_set1_ps(__builtin_bit_cast(float, uint32_t(a[0]) << 16));
    const __m256 a1 = _mm256_set1_ps(__builtin_bit_cast(float, uint32_t(a[1]) << 16));
    return EACH(([&] {
        const __m256 x0 = _mm256_castsi256_ps(_mm256_slli_epi32(x.v[h], 16));
        const __m256 x1 = _mm256_castsi256_ps(_mm256_and_si256(x.v[h], _mm256_set1_epi32(int(0xffff0000))));
        return _mm256_fmadd_ps(a0, x0, _mm256_fmadd_ps(a1, x1, acc.v[h]));
    }()));
}

#undef EACH

}  // namespace
