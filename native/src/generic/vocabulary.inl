// Reductions over a row of logits.

float row_max(const float* x, int n) {
    F high = f_set(-__builtin_inff());
    int i = 0;
    for (; i + 16 <= n; i += 16) high = f_max(f_load(x + i), high);
    float m = f_highest(high);
    for (; i < n; ++i) m = x[i] > m ? x[i] : m;
    return m;
}

// Sixteen lanes over each 1,024 values, the chunks' sums added in float64.
double sum_exp(const float* x, int n, float high) {
    const F top = f_set(high), scale = f_set(kLog2e);
    double total = 0.0;
    for (int chunk = 0; chunk < n; chunk += 1024) {
        const int end = chunk + 1024 < n ? chunk + 1024 : n;
        F sum = f_set(0.0f);
        for (int i = chunk; i < end; i += 16)
            sum = f_add(sum, f_select(exp2_lanes(f_mul(f_sub(load_upto(x + i, end - i), top), scale)), 0, end - i, 0.0f));
        total += double(f_tree(sum));
    }
    return total;
}

void exp2_scaled(const float* x, int n, float scale, float offset, float* y) {
    for (int i = 0; i < n; i += 16) store_upto(y + i, exp2_lanes(f_fma(load_upto(x + i, n - i), f_set(scale), f_set(offset))), n - i);
}
