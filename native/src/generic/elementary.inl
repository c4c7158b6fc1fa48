// Long sums, exp2, bf16: what the other kernels are made of.

inline float lane_tree(F x) {
    alignas(64) float t[16];
    f_store(t, x);
    for (int width = 8; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) t[l] = t[l] + t[l + width];
    return t[0];
}

inline float lane_max(F x) {
    alignas(64) float t[16];
    f_store(t, x);
    float m = t[0];
    for (int l = 1; l < 16; ++l) m = t[l] > m ? t[l] : m;
    return m;
}

inline float fma_one(float a, float b, float c) {
    alignas(64) float t[16];
    f_store(t, f_fma(f_set(a), f_set(b), f_set(c)));
    return t[0];
}

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

inline uint16_t bf16_round(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t((u >> 16) | 64);  // NaN stays NaN
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline float bf16_widen(uint16_t v) {
    const uint32_t u = uint32_t(v) << 16;
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
}
