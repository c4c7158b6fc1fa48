// Work on tiles of activations: norms, quantising. A tile lies as [cols / 16][n][16] (kernels.h); its rows are taken several at a time.

// Column i (a multiple of 16) of the rows from `first` on.
struct TileRows {
    const float* x;
    size_t step;
    TileRows(const float* tile, int n, int first) : x(tile + kLanes * first), step(size_t(kLanes) * n) {}
    const float* at(int i, int r) const { return x + i / kLanes * step + kLanes * r; }
};

// What a norm makes of R rows: load() gives their elements normed.
template <int R> struct Normed {
    const TileRows& rows;
    const float* w;            // null: no norm
    F scale[R];
    F load(int i, int r) const {
        const F v = f_load(rows.at(i, r));
        return w ? f_mul(f_mul(v, scale[r]), f_load(w + i)) : v;
    }
};

template <int R> inline void mean_squares(const Normed<R>& y, int n, float* out) {
    F ss[R];
    UNROLL for (int r = 0; r < R; ++r) ss[r] = f_set(0.0f);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes)
        UNROLL for (int r = 0; r < R; ++r) {
            const F v = y.load(i, r);
            ss[r] = f_fma(v, v, ss[r]);
        }
    if (i < n)
        for (int r = 0; r < R; ++r) {
            const F v = f_load_n(y.rows.at(i, r), n - i);   // only a norm's own input ends within a run
            ss[r] = f_fma(v, v, ss[r]);
        }
    for (int r = 0; r < R; ++r) out[r] = f_tree(ss[r]) / float(n);
}

template <int R> inline Normed<R> norm_of(const TileRows& rows, const float* w, float eps, int n) {
    Normed<R> y{rows, nullptr, {}};
    if (w) {
        float square[R];
        mean_squares(y, n, square);
        for (int r = 0; r < R; ++r) y.scale[r] = f_set(1.0f / __builtin_sqrtf(square[r] + eps));
        y.w = w;
    }
    return y;
}

template <int R> bool all_finite(const Normed<R>& y, int r, int n) {
    F zeros = f_set(0.0f);
    for (int i = 0; i < n; i += kLanes) zeros = f_add(zeros, f_mul(y.load(i, r), f_set(0.0f)));
    return f_tree(zeros) == 0.0f;
}

// The numbers of a record, for the rows from `first` on.
struct RecordRows {
    int8_t* q;
    float *d, *s;
    int32_t *total, *half;
    RecordRows(const QuantTile& tile, int block, int first) {
        uint8_t* record = tile.records + size_t(block) * tile.n * kRecordBytes;
        q = reinterpret_cast<int8_t*>(record) + 32 * first;
        d = reinterpret_cast<float*>(record + 32 * tile.n) + first;
        s = d + tile.n;
        total = reinterpret_cast<int32_t*>(s + tile.n);
        half = total + tile.n;
    }
};

// A row that holds an infinity or NaN has no integers; every output of it is NaN.
void quantize_nothing(int r, const QuantTile& to) {
    for (int b = 0; b < to.cols / 32; ++b) {
        const RecordRows at(to, b, r);
        *at.d = *at.s = __builtin_nanf("");
        *at.total = *at.half = 0;
        __builtin_memset(at.q, 0, 32);
    }
}

// The outliers of block `block` of row r, named by a mask of its columns. Up to 16 numbers more than that are written.
template <int R> inline void keep_outliers(const Normed<R>& y, int r, int block, uint32_t mask, const QuantTile& to, int row, int& count) {
    to.used[block / 2] |= uint64_t(mask) << 32 * (block % 2);
    for (int half = 0; half < 2; ++half, mask >>= 16) {
        const int k = 32 * block + 16 * half;
        const size_t at = row * to.stride + count;
        f_store_where(to.x + at, mask & 0xffff, y.load(k, r));
        i_store_where(to.at + at, mask & 0xffff, i_shl<4>(i_add(i_set(k + 1), i_lanes())));
        count += __builtin_popcount(mask & 0xffff);
    }
}

// B blocks, from `block` on, of R rows, from `first` on.
template <int R, int B> inline void quantize_blocks(const Normed<R>& y, int first, int block, const F (&limit)[R], const QuantTile to, int* outliers) {
    constexpr int n = R * B;   // unit u is block u / R of row u % R
    F x0[n], x1[n], top[n];
    uint32_t out[n], any = 0;
    UNROLL for (int u = 0; u < n; ++u) {
        const int k = 32 * (block + u / R), r = u % R;
        x0[u] = y.load(k, r);
        x1[u] = y.load(k + 16, r);
        const F a0 = f_abs(x0[u]), a1 = f_abs(x1[u]);
        out[u] = f_above(a0, limit[r]) | f_above(a1, limit[r]) << 16;
        any |= uint32_t(out[u] != 0) << u;
        x0[u] = f_unless_lt(limit[r], a0, x0[u]);
        x1[u] = f_unless_lt(limit[r], a1, x1[u]);
        top[u] = f_max(f_abs(x0[u]), f_abs(x1[u]));
    }
    for (; any; any &= any - 1) {
        const int u = __builtin_ctz(any);
        keep_outliers<R>(y, u % R, block + u / R, out[u], to, first + u % R, outliers[first + u % R]);
    }
    const F amax = f_highest_of<n>(top), d = f_div(amax, f_set(127.0f));
    alignas(64) float inverse[kLanes], ds[kLanes], sums[kLanes];
    f_store(inverse, f_unless_lt(amax, f_set(0x1p-100f), f_div(f_set(127.0f), amax)));
    I q0[n], q1[n];
    int8_t* bytes[n];
    UNROLL for (int u = 0; u < n; ++u) {
        q0[u] = i_from_f(f_mul(x0[u], f_set(inverse[u])));
        q1[u] = i_from_f(f_mul(x1[u], f_set(inverse[u])));
        bytes[u] = RecordRows(to, block + u / R, first + u % R).q;
    }
    I half, total;
    i_store_blocks<n>(bytes, q0, q1, half, total);
    f_store(ds, d);
    f_store(sums, f_mul(d, f_from_i(total)));
    alignas(64) int32_t halves[kLanes], totals[kLanes];
    i_store(halves, i_sub(i_set(0), half));
    i_store(totals, i_sub(i_set(0), total));
    UNROLL for (int b = 0; b < B; ++b) {
        const RecordRows at(to, block + b, first);
        __builtin_memcpy(at.d, ds + b * R, R * sizeof(float));
        __builtin_memcpy(at.s, sums + b * R, R * sizeof(float));
        __builtin_memcpy(at.total, totals + b * R, R * sizeof(int32_t));
        __builtin_memcpy(at.half, halves + b * R, R * sizeof(int32_t));
    }
}

template <int R, int B> inline void quantize_blocks_from(const Normed<R>& y, int first, int block, const F (&limit)[R], const QuantTile& to, int* outliers) {
    const int blocks = to.cols / 32;
    for (; block + B <= blocks; block += B) quantize_blocks<R, B>(y, first, block, limit, to, outliers);
    if constexpr (B > 1) if (block < blocks) quantize_blocks_from<R, B / 2>(y, first, block, limit, to, outliers);
}

template <int R> void quantize_rows(const float* x, int first, const float* norm, float eps, const QuantTile& to, int* outliers) {
    const TileRows rows(x, to.n, first);
    const Normed<R> y = norm_of<R>(rows, norm, eps, to.cols);
    float square[R];
    mean_squares(y, to.cols, square);
    F limit[R];
    for (int r = 0; r < R; ++r) {
        outliers[first + r] = 0;
        // Squares of smaller numbers are lost, and so would be the bound on how many outliers there are.
        const float high = kOutlier * __builtin_sqrtf(square[r]);
        limit[r] = f_set(high < 0x1p-60f ? 0x1p-60f : high);
    }
    quantize_blocks_from<R, kRows / R>(y, first, 0, limit, to, outliers);
    for (int r = 0; r < R; ++r)
        if (!(square[r] < __builtin_inff()) && !all_finite(y, r, to.cols)) quantize_nothing(first + r, to);
}

template <int R> void quantize_from(const float* x, int first, const float* norm, float eps, const QuantTile& to, int* outliers) {
    for (; to.n - first >= R; first += R) quantize_rows<R>(x, first, norm, eps, to, outliers);
    if constexpr (R > 1) if (first < to.n) quantize_from<R / 2>(x, first, norm, eps, to, outliers);
}

constexpr int kFetched = 6144;   // floats

int quantize(const float* x, const float* norm, float eps, const QuantTile& to) {
    __builtin_memset(to.used, 0, sizeof(uint64_t) * QuantRows::words(to.cols));
    // Other threads wrote half of it: it is fetched from their caches ahead of use.
    for (int i = 0; i < to.n * to.cols && i < kFetched; i += kLanes) __builtin_prefetch(x + i);
    int outliers[kFewRows], slots = 0;
    quantize_from<kRows>(x, 0, norm, eps, to, outliers);
    for (int r = 0; r < to.n; ++r) slots = outliers[r] > slots ? outliers[r] : slots;
    for (int r = 0; r < to.n; ++r)
        for (int i = outliers[r]; i < slots; ++i) {
            to.at[r * to.stride + i] = 0;
            to.x[r * to.stride + i] = 0.0f;
        }
    return slots;
}

void rms_norm(const float* x, const float* w, float eps, int n, int cols, float* y) {
    for (int r = 0; r < n; ++r) {
        const TileRows rows(x, n, r);
        const F scale = norm_of<1>(rows, w, eps, cols).scale[0];
        float* to = y + kLanes * r;
        for (int i = 0; i < cols; i += kLanes, to += rows.step)
            store_upto(to, f_mul(f_mul(f_load(rows.at(i, 0)), scale), load_upto(w + i, cols - i)), cols - i);
    }
}

void add(float* x, const float* y, int n) {
    for (int i = 0; i < n; i += kLanes) f_store(x + i, f_add(f_load(x + i), f_load(y + i)));
}
