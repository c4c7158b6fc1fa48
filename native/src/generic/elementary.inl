// Long sums, exp2, bf16: what the other kernels are made of.

inline F load_upto(const float* p, int left) { return left >= 16 ? f_load(p) : f_load_n(p, left); }
inline void store_upto(float* p, F x, int left) { if (left >= 16) f_store(p, x); else f_store_n(p, x, left); }

// ---- elementary functions ----

inline F exp2_lanes(F x) {
    const F clamped = f_max(f_set(-126.0f), f_min(f_set(126.0f), x));   // in this order NaN stays NaN
    const F n = f_round(clamped);
    const F f = f_sub(clamped, n);
    F y = f_set(1.535336188319500e-4f);
    y = f_fma(y, f, f_set(1.339887440266574e-3f));
    y = f_fma(y, f, f_set(9.618437357674640e-3f));
    y = f_fma(y, f, f_set(5.550332471162809e-2f));
    y = f_fma(y, f, f_set(2.402264791363012e-1f));
    y = f_fma(y, f, f_set(6.931472028550421e-1f));
    y = f_fma(y, f, f_set(1.0f));
    return f_unless_lt(x, f_set(-126.0f), f_scale2(y, i_from_f(n)));
}

inline float exp2_one(float x) {
    alignas(64) float t[16];
    f_store(t, exp2_lanes(f_set(x)));
    return t[0];
}

// bf16 bits of 16 numbers, in 32 bits each; NaN stays NaN.
inline I bf16_bits(F x) {
    const I u = i_bits(x);
    const I rounded = i_add(i_add(u, i_set(0x7fff)), i_and(i_shr<16>(u), 1));
    return i_shr<16>(i_where_nan(x, i_or(u, i_set(0x400000)), rounded));
}

inline F bf16_widen(I bits) { return f_bits(i_shl<16>(bits)); }

// x, none of which is denormal, rounded to bf16: stored, and returned.
template <class V> inline V store_bf16(uint16_t* p, V x) {
    if constexpr (kRoundsToBf16) {
        return f_store_bf16(p, x);
    } else {
        const I bits = bf16_bits(x);
        i_store_u16(p, bits);
        return bf16_widen(bits);
    }
}

// act(x) of a gated activation.
[[gnu::noinline]] F activate(Activation kind, F g) {
    F e;
    if (kind == Activation::Silu) {
        e = exp2_lanes(f_mul(g, f_set(-kLog2e)));
    } else {
        const F u = f_fma(f_mul(f_mul(f_set(0.044715f), g), g), g, g);
        e = exp2_lanes(f_mul(u, f_set(float(-2.0 * 1.44269504088896340736 * 0.79788456080286535588))));
    }
    return f_div(g, f_add(f_set(1.0f), e));
}
