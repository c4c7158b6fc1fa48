// Sixteen float lanes in one register. Needs AVX-512 F, BW, VL, DQ, VNNI and BF16.
#pragma once
#include <immintrin.h>
#include <cstdint>

#define UNROLL _Pragma("GCC unroll 16")

namespace {

struct F { __m512 v; };
struct I { __m512i v; };
struct B { __m512i v; };   // 64 bytes

constexpr int kRows = 8;       // rows that are quantised at once
constexpr int kChainRows = 10; // and that a panel is multiplied by: as many as registers hold
constexpr int kScoreTiles = 2;
constexpr int kAttendRows = 8, kValueRows = 4, kValueVectors = 4;
constexpr int kZero8 = 128;    // what add_dot expects the caller to take off for bytes

inline F f_set(float x) { return {_mm512_set1_ps(x)}; }
inline F f_load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F f_load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
// The first and the second numbers of 16 pairs.
inline void f_load_pairs(const float* p, F& first, F& second) {
    const __m512 low = _mm512_loadu_ps(p), high = _mm512_loadu_ps(p + 16);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    first.v = _mm512_permutex2var_ps(low, even, high);
    second.v = _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high);
}
inline void f_store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
// The lanes that the mask names, one after the other; up to 16 are written.
inline void f_store_where(float* p, uint32_t mask, F x) { _mm512_storeu_ps(p, _mm512_maskz_compress_ps(__mmask16(mask), x.v)); }
inline void f_store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), x.v); }
inline F f_add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F f_sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F f_mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F f_div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F f_fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F f_max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F f_min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F f_abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F f_round(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline I i_from_f(F a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F f_from_i(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F f_scale2(F a, I n) { return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))}; }
// Lanes [lo, hi) of x, `other` elsewhere.
inline F f_select(F x, int lo, int hi, float other) {
    const uint32_t below = lo <= 0 ? 0 : lo >= 16 ? 0xffff : (1u << lo) - 1;
    const uint32_t upto = hi <= 0 ? 0 : hi >= 16 ? 0xffff : (1u << hi) - 1;
    return {_mm512_mask_blend_ps(__mmask16(upto & ~below), _mm512_set1_ps(other), x.v)};
}
// 0 where a < b, else x.
inline F f_unless_lt(F a, F b, F x) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ), x.v)}; }
inline uint32_t f_above(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
// Lane r: the highest of x[r].
template <int R> inline F f_highest_of(const F (&x)[R]) {
    if constexpr (R < 8) {
        alignas(64) float t[16] = {};
        UNROLL for (int r = 0; r < R; ++r) t[r] = _mm512_reduce_max_ps(x[r].v);
        return f_load(t);
    } else {
        __m512 pair[4], four[2];   // quarters of a row: two of each of 2 rows, one of each of 4
        UNROLL for (int i = 0; i < 4; ++i) {
            const __m512 a = x[2 * i].v, b = x[2 * i + 1].v;
            pair[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        }
        UNROLL for (int i = 0; i < 2; ++i) {
            const __m512 a = pair[2 * i], b = pair[2 * i + 1];
            four[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        }
        const __m512 two = _mm512_max_ps(_mm512_shuffle_ps(four[0], four[1], 0x44), _mm512_shuffle_ps(four[0], four[1], 0xee));
        const __m512 one = _mm512_max_ps(two, _mm512_permute_ps(two, 0xb1));
        return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0), one)};
    }
}
inline float f_highest(F x) { return _mm512_reduce_max_ps(x.v); }
// (l) + (l + 8), (l) + (l + 4), (l) + (l + 2), (l) + (l + 1).
inline float f_tree(F x) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
inline F f_half(const void* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))}; }
inline F f_bf16(const void* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))), 16))}; }
// 16 bf16 numbers from two places.
inline F f_bf16_of(const void* lower, const void* upper) {
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(lower))), _mm_loadu_si128(static_cast<const __m128i*>(upper)), 1);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16))};
}

inline I i_set(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I i_load(const void* p) { return {_mm512_loadu_si512(p)}; }
inline I i_bits(F x) { return {_mm512_castps_si512(x.v)}; }
inline F f_bits(I x) { return {_mm512_castsi512_ps(x.v)}; }
// a where x is NaN, b elsewhere.
inline I i_where_nan(F x, I a, I b) { return {_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), b.v, a.v)}; }
inline I i_u8(const void* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))}; }
inline I i_s8(const void* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))}; }
inline I i_and(I a, int m) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(m))}; }
inline I i_or(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I i_sub(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I i_add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
template <int n> inline I i_shl(I a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> inline I i_shr(I a) { return {_mm512_srli_epi32(a.v, n)}; }
inline I i_shr_by(I a, int n) { return {_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(n))}; }
inline I i_lanes() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
inline void i_store(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
inline void i_store_where(uint32_t* p, uint32_t mask, I a) { _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(__mmask16(mask), a.v)); }
// Of 16 pairs at p the first or the second number.
inline void i_store_alternate(uint16_t* p, I a, int second) {
    const __m512i moved = _mm512_sllv_epi32(a.v, _mm512_set1_epi32(16 * second));
    _mm512_mask_storeu_epi16(p, second ? 0xaaaaaaaau : 0x55555555u, moved);
}
inline void i_store_s8(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
inline void i_store_u16(uint16_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v)); }

// The sum of 16 signed bytes in each half of x, which psadbw takes as unsigned.
inline void byte_sums(__m256i x, int32_t& first, int32_t& total) {
    const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(x, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    const __m128i low = _mm256_castsi256_si128(sums), high = _mm256_extracti128_si256(sums, 1);
    first = _mm_cvtsi128_si32(_mm_add_epi32(low, _mm_unpackhi_epi64(low, low))) - 128 * 16;
    total = first + _mm_cvtsi128_si32(_mm_add_epi32(high, _mm_unpackhi_epi64(high, high))) - 128 * 16;
}
// 32 numbers each as signed bytes at p[r]. Lane r of `half` and `total`: the sum of the first 16 and of all.
template <int R> inline void i_store_blocks(int8_t* const (&p)[R], const I (&q0)[R], const I (&q1)[R], I& half, I& total) {
    if constexpr (R < 8) {
        alignas(64) int32_t halves[16] = {}, totals[16] = {};
        UNROLL for (int r = 0; r < R; ++r) {
            const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(q0[r].v)), _mm512_cvtepi32_epi8(q1[r].v), 1);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(p[r]), both);
            byte_sums(both, halves[r], totals[r]);
        }
        half = i_load(halves);
        total = i_load(totals);
    } else {
        const __m512i in_rows = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        __m512i sums[4];   // of 8 bytes each; psadbw takes them as unsigned
        UNROLL for (int i = 0; i < 4; ++i) {
            const __m512i a = _mm512_packs_epi32(q0[2 * i].v, q1[2 * i].v), b = _mm512_packs_epi32(q0[2 * i + 1].v, q1[2 * i + 1].v);
            const __m512i bytes = _mm512_permutexvar_epi32(in_rows, _mm512_packs_epi16(a, b));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(p[2 * i]), _mm512_castsi512_si256(bytes));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(p[2 * i + 1]), _mm512_extracti64x4_epi64(bytes, 1));
            sums[i] = _mm512_sad_epu8(_mm512_xor_si512(bytes, _mm512_set1_epi8(-128)), _mm512_setzero_si512());
        }
        const __m512i low = _mm512_add_epi64(_mm512_unpacklo_epi64(sums[0], sums[1]), _mm512_unpackhi_epi64(sums[0], sums[1]));
        const __m512i high = _mm512_add_epi64(_mm512_unpacklo_epi64(sums[2], sums[3]), _mm512_unpackhi_epi64(sums[2], sums[3]));
        const __m512i all = _mm512_or_si512(low, _mm512_slli_epi64(high, 32)), bias = _mm512_set1_epi32(128 * 16);
        half.v = _mm512_sub_epi32(_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 8, 2, 10, 1, 9, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0), all), bias);
        const __m512i second = _mm512_permutexvar_epi32(_mm512_setr_epi32(4, 12, 6, 14, 5, 13, 7, 15, 0, 0, 0, 0, 0, 0, 0, 0), all);
        total.v = _mm512_add_epi32(half.v, _mm512_sub_epi32(second, bias));
    }
}

constexpr bool kRoundsToBf16 = true;
// x, none of which is denormal, rounded to bf16: stored, and returned.
inline F f_store_bf16(uint16_t* p, F x) {
    const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(x.v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16))};
}

inline B b_load(const void* p) { return {_mm512_loadu_si512(p)}; }
inline B b_load2(const void* lower, const void* upper) {
    const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(lower)));
    return {_mm512_inserti64x4(low, _mm256_loadu_si256(static_cast<const __m256i*>(upper)), 1)};
}
inline B b_or(B a, B b) { return {_mm512_or_si512(a.v, b.v)}; }
inline B b_low(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline B b_high(B a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// Bit j of every byte, moved to bit 4; two bits 2j, 2j + 1 moved to bits 4 and 5.
template <int j> inline B b_bit(B a) {
    const __m512i moved = j <= 4 ? _mm512_slli_epi16(a.v, j <= 4 ? 4 - j : 0) : _mm512_srli_epi16(a.v, j > 4 ? j - 4 : 0);
    return {_mm512_and_si512(moved, _mm512_set1_epi8(16))};
}
template <int j> inline B b_crumb(B a) {
    const __m512i moved = j <= 2 ? _mm512_slli_epi16(a.v, j <= 2 ? 4 - 2 * j : 0) : _mm512_srli_epi16(a.v, 2);
    return {_mm512_and_si512(moved, _mm512_set1_epi8(48))};
}
inline B b_even_only(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(0xffff))}; }

// Sums of u8 x s8 over quads. Quad j of a block of `bits`-bit values goes in once each, ascending; a holds 4 signed bytes for all lanes.
using Dots = I;
inline Dots dots_from(I start) { return start; }
inline I total_of(Dots d) { return d; }
template <int bits, int j> inline void add_dot(Dots& d, B w, const int8_t* a) {
    int32_t quad; __builtin_memcpy(&quad, a, 4);
    d.v = _mm512_dpbusd_epi32(d.v, w.v, _mm512_set1_epi32(quad));
}
// acc + bf16 pairs; a holds one pair for all lanes.
inline F dot2(F acc, B x, const uint16_t* a) {
    int32_t pair; __builtin_memcpy(&pair, a, 4);
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)x.v, (__m512bh)_mm512_set1_epi32(pair))};
}

}  // namespace
