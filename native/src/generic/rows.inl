// Work on one row of activations: quantising, norms, gates.

// Where a row's blocks start in the arrays of QuantRows.
inline QuantRows row_of(const QuantRows& x, int row) {
    const size_t blocks = x.cols / 32, cols = x.cols, r = row;
    return {x.cols, x.q + r * cols, x.d + r * blocks, x.s + r * blocks, x.neg16 + r * blocks * 2, x.neg32 + r * blocks,
            x.wide + r, x.wide_block + r * blocks, x.wide_q + r * cols, x.wide_d + r * blocks, x.wide_neg16 + r * blocks * 2, x.wide_neg32 + r * blocks};
}

inline float mean_square(const float* x, int n) {
    F ss = f_set(0.0f);
    for (int i = 0; i < n; i += 16) {
        const F v = load_upto(x + i, n - i);
        ss = f_fma(v, v, ss);
    }
    return lane_tree(ss) / float(n);
}

bool all_finite(const float* x, int n) {
    F zeros = f_set(0.0f);
    for (int i = 0; i < n; i += 16) zeros = f_add(zeros, f_mul(load_upto(x + i, n - i), f_set(0.0f)));
    return lane_tree(zeros) == 0.0f;
}

// A row that holds an infinity or NaN has no integers; every output of it is NaN.
void quantize_nothing(const QuantRows& to) {
    const int blocks = to.cols / 32;
    for (int b = 0; b < blocks; ++b) to.d[b] = to.s[b] = __builtin_nanf("");
    __builtin_memset(to.q, 0, to.cols);
    __builtin_memset(to.neg16, 0, sizeof(int32_t) * 2 * blocks);
    __builtin_memset(to.neg32, 0, sizeof(int32_t) * blocks);
    *to.wide = 0;
}

constexpr float kWide = 4.0f;

void quantize(const float* x, int row, const QuantRows& rows) {
    const QuantRows to = row_of(rows, row);
    const float square = mean_square(x, to.cols);
    if (!(square < __builtin_inff()) && !all_finite(x, to.cols)) return quantize_nothing(to);
    const float limit = kWide * __builtin_sqrtf(square);
    int wide = 0;
    for (int b = 0; b < to.cols / 32; ++b) {
        const F x0 = f_load(x + 32 * b), x1 = f_load(x + 32 * b + 16);
        const float amax = lane_max(f_max(f_abs(x0), f_abs(x1)));
        const F inv = f_set(amax < 0x1p-100f ? 0.0f : 127.0f / amax);
        const I q0 = i_from_f(f_mul(x0, inv)), q1 = i_from_f(f_mul(x1, inv));
        i_store_s8(to.q + 32 * b, q0);
        i_store_s8(to.q + 32 * b + 16, q1);
        const int32_t sum0 = i_sum(q0), sum1 = i_sum(q1);
        const float d = amax / 127.0f;
        to.d[b] = d;
        to.s[b] = d * float(sum0 + sum1);
        to.neg16[2 * b] = -sum0;
        to.neg16[2 * b + 1] = -sum1;
        to.neg32[b] = -(sum0 + sum1);
        if (!(amax > limit && amax >= 0x1p-100f)) continue;
        const F fine = f_set(254.0f / d);
        const I e0 = i_from_f(f_mul(f_sub(x0, f_mul(f_set(d), f_from_i(q0))), fine));
        const I e1 = i_from_f(f_mul(f_sub(x1, f_mul(f_set(d), f_from_i(q1))), fine));
        i_store_s8(to.wide_q + 32 * wide, e0);
        i_store_s8(to.wide_q + 32 * wide + 16, e1);
        const int32_t fine0 = i_sum(e0), fine1 = i_sum(e1);
        to.wide_d[wide] = d / 254.0f;
        to.s[b] = fma_one(to.wide_d[wide], float(fine0 + fine1), to.s[b]);
        to.wide_neg16[2 * wide] = -fine0;
        to.wide_neg16[2 * wide + 1] = -fine1;
        to.wide_neg32[wide] = -(fine0 + fine1);
        to.wide_block[wide++] = uint16_t(b);
    }
    *to.wide = wide;
}

void rms_norm(const float* x, const float* w, float eps, int n, float* y) {
    const F r = f_set(1.0f / __builtin_sqrtf(mean_square(x, n) + eps));
    for (int i = 0; i < n; i += 16)
        store_upto(y + i, f_mul(f_mul(load_upto(x + i, n - i), r), load_upto(w + i, n - i)), n - i);
}

void add(float* x, const float* y, int n) {
    for (int i = 0; i < n; i += 16) store_upto(x + i, f_add(load_upto(x + i, n - i), load_upto(y + i, n - i)), n - i);
}

void gated(Activation kind, const float* gate, const float* up, int n, float* y) {
    const F one = f_set(1.0f);
    for (int i = 0; i < n; i += 16) {
        const F g = load_upto(gate + i, n - i);
        F e;
        if (kind == Activation::Silu) {
            e = exp2_lanes(f_mul(g, f_set(-kLog2e)));
        } else {
            const F u = f_fma(f_mul(f_mul(f_set(0.044715f), g), g), g, g);
            e = exp2_lanes(f_mul(u, f_set(float(-2.0 * 1.44269504088896340736 * 0.79788456080286535588))));
        }
        const F act = f_div(g, f_add(one, e));
        store_upto(y + i, f_mul(act, load_upto(up + i, n - i)), n - i);
    }
}
