// Quantised weights times quantised rows: the chain over blocks of docs/numerics.md, then the outliers.

constexpr bool has_minimum(Form f) { return f == Form::Q4M || f == Form::Q5M || f == Form::Q4K || f == Form::Q5K; }
constexpr bool in_halves(Form f) { return f == Form::Q6K; }
constexpr bool has_bit_plane(Form f) { return f == Form::Q5 || f == Form::Q5M || f == Form::Q5K; }
constexpr int bits_of(Form f) { return f == Form::Q8 ? 8 : f == Form::Q6K ? 6 : has_bit_plane(f) ? 5 : 4; }
constexpr int zero_of(Form f) { return f == Form::Q4 ? 8 : f == Form::Q5 ? 16 : f == Form::Q6K ? 32 : f == Form::Q8 ? 128 : 0; }

// x times a power of two.
template <int n> inline I i_times(I x) {
    if constexpr (n == 0) return i_set(0);
    else return i_shl<__builtin_ctz(n)>(x);
}

// Scales of block i of a unit: d and m where the form has a minimum, d of each half for Q6K, otherwise d.
template <Form form> inline void scales_of(const uint8_t* area, int i, F (&out)[2]) {
    if constexpr (form == Form::Q4 || form == Form::Q5 || form == Form::Q8) {
        out[0] = f_half(area + 32 * i);
    } else if constexpr (form == Form::Q4M || form == Form::Q5M) {
        out[0] = f_half(area);
        out[1] = f_half(area + 32);
    } else if constexpr (form == Form::Q6K) {
        const F d = f_half(area);
        out[0] = f_mul(d, f_from_i(i_s8(area + 32 + 32 * i)));
        out[1] = f_mul(d, f_from_i(i_s8(area + 48 + 32 * i)));
    } else {
        const uint8_t* rows = area + 64;
        I sub, min;
        if (i < 4) {
            sub = i_and(i_u8(rows + 16 * i), 63);
            min = i_and(i_u8(rows + 16 * (i + 4)), 63);
        } else {
            const I low = i_u8(rows + 16 * (i + 4));
            sub = i_or(i_and(low, 15), i_shl<4>(i_shr<6>(i_u8(rows + 16 * (i - 4)))));
            min = i_or(i_shr<4>(low), i_shl<4>(i_shr<6>(i_u8(rows + 16 * i))));
        }
        out[0] = f_mul(f_half(area), f_from_i(sub));
        out[1] = f_sub(f_set(0.0f), f_mul(f_half(area + 32), f_from_i(min)));
    }
}

// Where the rows of a tile that a kernel takes at once begin in a record.
struct RowsOfTile {
    int n;                 // rows of the tile
    const int8_t* q;
    const float* d;
    void next() {
        q += n * kRecordBytes;
        d = reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(d) + n * kRecordBytes);
    }
    float s(int r) const { return d[n + r]; }
    I total(int r) const { return i_set(reinterpret_cast<const int32_t*>(d + 2 * n)[r]); }
    I first(int r) const { return i_set(reinterpret_cast<const int32_t*>(d + 3 * n)[r]); }
};

// Quads [j, j + 4) of a block and, where the form has nibbles, quads j + 4 onwards from the high ones: R rows' dot products go to i.
template <Form form, int j, int R> inline void low_quad(Dots (&i)[R], const uint8_t* planes, B bits, const RowsOfTile& a) {
    B q = b_load(planes + 64 * j);
    if constexpr (form != Form::Q8) q = b_low(q);
    if constexpr (has_bit_plane(form)) q = b_or(q, b_bit<j>(bits));
    if constexpr (form == Form::Q6K) q = b_or(q, b_crumb<j>(bits));
    UNROLL for (int r = 0; r < R; ++r) add_dot<bits_of(form), j>(i[r], q, a.q + 32 * r + 4 * j);
}

template <Form form, int j, int R> inline void high_quad(Dots (&i)[R], const uint8_t* planes, B bits, const RowsOfTile& a) {
    B q = b_load(planes + 64 * (form == Form::Q8 ? j + 4 : j));
    if constexpr (form != Form::Q8) q = b_high(q);
    if constexpr (has_bit_plane(form)) q = b_or(q, b_bit<j + 4>(bits));
    if constexpr (form == Form::Q6K) q = b_or(q, b_crumb<j>(bits));
    UNROLL for (int r = 0; r < R; ++r) add_dot<bits_of(form), j + 4>(i[r], q, a.q + 32 * r + 4 * (j + 4));
}

template <int R> inline void scaled(F (&acc)[R], const Dots (&i)[R], F scale, const RowsOfTile& a) {
    UNROLL for (int r = 0; r < R; ++r) acc[r] = f_fma(f_mul(f_from_i(total_of(i[r])), scale), f_set(a.d[r]), acc[r]);
}

// One step of the chain.
template <Form form, int R> inline void add_block(F (&acc)[R], const uint8_t* planes, const F (&scale)[2], const RowsOfTile& a) {
    constexpr int zero = form == Form::Q8 ? kZero8 : zero_of(form);
    Dots i[R];
    B bits{};
    if constexpr (has_bit_plane(form) || form == Form::Q6K) bits = b_load(planes + 256);
    if constexpr (has_minimum(form)) UNROLL for (int r = 0; r < R; ++r) acc[r] = f_fma(scale[1], f_set(a.s(r)), acc[r]);
    UNROLL for (int r = 0; r < R; ++r) i[r] = dots_from(i_times<zero>(in_halves(form) ? a.first(r) : a.total(r)));
    low_quad<form, 0>(i, planes, bits, a);
    low_quad<form, 1>(i, planes, bits, a);
    low_quad<form, 2>(i, planes, bits, a);
    low_quad<form, 3>(i, planes, bits, a);
    if constexpr (in_halves(form)) {
        scaled(acc, i, scale[0], a);
        UNROLL for (int r = 0; r < R; ++r) i[r] = dots_from(i_times<zero>(i_sub(a.total(r), a.first(r))));
        bits = b_load(planes + 320);
    }
    high_quad<form, 0>(i, planes, bits, a);
    high_quad<form, 1>(i, planes, bits, a);
    high_quad<form, 2>(i, planes, bits, a);
    high_quad<form, 3>(i, planes, bits, a);
    scaled(acc, i, scale[in_halves(form) ? 1 : 0], a);
}

inline void emit(F y, const Out& o, int row, int n, int left) {
    float* to = o.out + size_t(row) * o.stride + n;
    if (o.bias) y = f_add(y, load_upto(o.bias + n, left));
    if (o.kind == Out::Add) y = f_add(load_upto(to, left), y);
    else if (o.kind == Out::Gate) y = f_mul(activate(o.activation, load_upto(to, left)), y);
    store_upto(to, y, left);
}

// The chain over blocks for R rows of a tile, from row `first` on, times one panel.
template <Form form, int R> [[gnu::noinline]] void chain_rows(const uint8_t* unit, const QuantTile& tile, int first, F* result) {
    constexpr FormTraits t = traits(form);
    const int n = kRows == kTile ? R : tile.n, blocks = tile.cols / 32;
    RowsOfTile a{n, reinterpret_cast<const int8_t*>(tile.records) + 32 * first, reinterpret_cast<const float*>(tile.records + 32 * n) + first};
    F acc[R], scale[t.unit][2];
    UNROLL for (int r = 0; r < R; ++r) acc[r] = f_set(0.0f);
    for (int b = 0; b < blocks; b += t.unit, unit += t.unit_bytes()) {
        UNROLL for (int i = 0; i < t.unit; ++i) scales_of<form>(unit, i, scale[i]);
        const int here = blocks - b < t.unit ? blocks - b : t.unit;
        for (int i = 0; i < here; ++i, a.next()) add_block<form, R>(acc, unit + t.scale_bytes + size_t(i) * t.vectors * 64, scale[i], a);
    }
    UNROLL for (int r = 0; r < R; ++r) result[first + r] = acc[r];
}

// The outliers of R rows of a tile.
template <int R> void outlier_rows(const QuantTile& tile, int first, const float* columns, F* result) {
    const uint32_t* at = tile.at + first;
    const float* x = tile.x + first;
    F acc[R];
    UNROLL for (int r = 0; r < R; ++r) acc[r] = result[first + r];
    for (int i = 0; i < tile.slots; ++i, at += tile.n, x += tile.n)
        UNROLL for (int r = 0; r < R; ++r) acc[r] = f_fma(f_load(columns + size_t(at[r]) * kLanes), f_set(x[r]), acc[r]);
    UNROLL for (int r = 0; r < R; ++r) result[first + r] = acc[r];
}

// Rows of the tile from `first` on: kRows at a time, then what is left.
template <Form form, int R> inline void chain(const uint8_t* panel, const QuantTile& tile, int first, F* result) {
    for (; tile.n - first >= R; first += R) chain_rows<form, R>(panel, tile, first, result);
    if constexpr (R > 1) if (first < tile.n) chain<form, R - 1>(panel, tile, first, result);
}

template <int R> inline void outliers(const QuantTile& tile, int first, const float* columns, F* result) {
    for (; tile.n - first >= R; first += R) outlier_rows<R>(tile, first, columns, result);
    if constexpr (R > 1) if (first < tile.n) outliers<R / 2>(tile, first, columns, result);
}

// Column k of a panel as numbers.
template <Form form> inline F column(const uint8_t* panel, int k) {
    constexpr FormTraits t = traits(form);
    const int block = k / 32, i = block % t.unit, j = k % 32 / 4, byte = k % 4;
    const uint8_t* unit = panel + size_t(block / t.unit) * t.unit_bytes();
    const uint8_t* planes = unit + t.scale_bytes + size_t(i) * t.vectors * 64;
    F scale[2];
    scales_of<form>(unit, i, scale);
    auto field = [&](int vector, int shift, int mask) { return i_and(i_shr_by(i_load(planes + 64 * vector), shift), mask); };
    I q;
    if constexpr (form == Form::Q8) q = field(j, 8 * byte, 255);
    else q = field(j % 4, 8 * byte + (j < 4 ? 0 : 4), 15);
    if constexpr (has_bit_plane(form)) q = i_or(q, i_shl<4>(field(4, 8 * byte + j, 1)));
    if constexpr (form == Form::Q6K) q = i_or(q, i_shl<4>(field(4 + j / 4, 8 * byte + 2 * (j % 4), 3)));
    const F d = in_halves(form) && j >= 4 ? scale[1] : scale[0];
    return f_fma(d, f_from_i(i_add(q, i_set(-zero_of(form)))), has_minimum(form) ? scale[1] : f_set(0.0f));
}

// The columns at which some row has an outlier, to columns[k + 1].
template <Form form> [[gnu::noinline]] void used_columns(const uint8_t* panel, const QuantRows& x, float* columns) {
    const int tiles = x.tiles(), words = QuantRows::words(x.cols);
    for (int word = 0; word < words; ++word) {
        uint64_t used = 0;
        for (int t = 0; t < tiles; ++t) used |= x.used[size_t(t) * words + word];
        for (; used; used &= used - 1) {
            const int k = 64 * word + __builtin_ctzll(used);
            f_store(columns + size_t(k + 1) * kLanes, column<form>(panel, k));
        }
    }
}

template <Form form> void linear_form(const Weight& w, int panel, const QuantRows& x, const Out& out, float* columns) {
    const uint8_t* bytes = w.panel(panel);
    for (int t = 0; t < x.tiles(); ++t) {
        const QuantTile tile = x.tile(t);
        F result[kTile];
        chain<form, kRows>(bytes, tile, 0, result);
        // The first chain has brought the panel into the cache, in order.
        if (t == 0) used_columns<form>(bytes, x, columns);
        outliers<kRows>(tile, 0, columns, result);
        for (int r = 0; r < tile.n; ++r) emit(result[r], out, t * kTile + r, panel * kLanes, w.rows - panel * kLanes);
    }
}

void linear_quant(const Weight& w, int panel, const QuantRows& x, const Out& out, float* columns) {
    switch (w.form) {
        case Form::Q4: return linear_form<Form::Q4>(w, panel, x, out, columns);
        case Form::Q4M: return linear_form<Form::Q4M>(w, panel, x, out, columns);
        case Form::Q5: return linear_form<Form::Q5>(w, panel, x, out, columns);
        case Form::Q5M: return linear_form<Form::Q5M>(w, panel, x, out, columns);
        case Form::Q8: return linear_form<Form::Q8>(w, panel, x, out, columns);
        case Form::Q4K: return linear_form<Form::Q4K>(w, panel, x, out, columns);
        case Form::Q5K: return linear_form<Form::Q5K>(w, panel, x, out, columns);
        case Form::Q6K: return linear_form<Form::Q6K>(w, panel, x, out, columns);
        default: return;
    }
}
