// Work on one row of activations: quantising, norms.

inline float mean_square(const float* x, int n) {
    F ss = f_set(0.0f);
    for (int i = 0; i < n; i += 16) {
        const F v = load_upto(x + i, n - i);
        ss = f_fma(v, v, ss);
    }
    return f_tree(ss) / float(n);
}

bool all_finite(const float* x, int n) {
    F zeros = f_set(0.0f);
    for (int i = 0; i < n; i += 16) zeros = f_add(zeros, f_mul(load_upto(x + i, n - i), f_set(0.0f)));
    return f_tree(zeros) == 0.0f;
}

// Row r of a record.
struct RecordRow {
    int8_t* q;
    float *d, *s;
    int32_t *total, *first;
    RecordRow(uint8_t* record, int n, int r) {
        q = reinterpret_cast<int8_t*>(record) + 32 * r;
        d = reinterpret_cast<float*>(record + 32 * n) + r;
        s = d + n;
        total = reinterpret_cast<int32_t*>(s + n);
        first = total + n;
    }
};

// A row that holds an infinity or NaN has no integers; every output of it is NaN.
void quantize_nothing(int r, const QuantTile& to) {
    for (int b = 0; b < to.cols / 32; ++b) {
        const RecordRow at(to.records + size_t(b) * to.n * kRecordBytes, to.n, r);
        *at.d = *at.s = __builtin_nanf("");
        *at.total = *at.first = 0;
        __builtin_memset(at.q, 0, 32);
    }
}

int quantize(const float* x, int r, const QuantTile& to) {
    const float square = mean_square(x, to.cols);
    if (!(square < __builtin_inff()) && !all_finite(x, to.cols)) {
        quantize_nothing(r, to);
        return 0;
    }
    // Squares of smaller numbers are lost, and so would be the bound on how many outliers there are.
    const float high = kOutlier * __builtin_sqrtf(square);
    const F limit = f_set(high < 0x1p-60f ? 0x1p-60f : high);
    int outliers = 0;
    for (int b = 0; b < to.cols / 32; ++b) {
        F x0 = f_load(x + 32 * b), x1 = f_load(x + 32 * b + 16);
        const uint32_t out = f_above(f_abs(x0), limit) | f_above(f_abs(x1), limit) << 16;
        for (uint32_t left = out; left; left &= left - 1, ++outliers) {
            const int k = 32 * b + __builtin_ctz(left);
            to.at[size_t(outliers) * to.n + r] = k + 1;
            to.x[size_t(outliers) * to.n + r] = x[k];
            to.used[k / 64] |= uint64_t(1) << k % 64;
        }
        if (out) {
            x0 = f_unless_lt(limit, f_abs(x0), x0);
            x1 = f_unless_lt(limit, f_abs(x1), x1);
        }
        const float amax = f_highest(f_max(f_abs(x0), f_abs(x1)));
        const F inv = f_set(amax < 0x1p-100f ? 0.0f : 127.0f / amax);
        const I q0 = i_from_f(f_mul(x0, inv)), q1 = i_from_f(f_mul(x1, inv));
        const RecordRow at(to.records + size_t(b) * to.n * kRecordBytes, to.n, r);
        int32_t first, total;
        i_store_block(at.q, q0, q1, first, total);
        const float d = amax / 127.0f;
        *at.d = d;
        *at.s = d * float(total);
        *at.total = -total;
        *at.first = -first;
    }
    return outliers;
}

void rms_norm(const float* x, const float* w, float eps, int n, float* y) {
    const F r = f_set(1.0f / __builtin_sqrtf(mean_square(x, n) + eps));
    for (int i = 0; i < n; i += 16)
        store_upto(y + i, f_mul(f_mul(load_upto(x + i, n - i), r), load_upto(w + i, n - i)), n - i);
}

void add(float* x, const float* y, int n) {
    for (int i = 0; i < n; i += 16) store_upto(x + i, f_add(load_upto(x + i, n - i), load_upto(y + i, n - i)), n - i);
}
