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

// Where output n (a multiple of 16) of a tile's rows goes, `step` floats from row to row.
struct Target {
    float* to;
    size_t step;
    Target(const Out& o, int tile, int n) {
        const size_t col = o.first + n;
        to = o.to.plain ? o.to.tile(tile) + col : o.to.tile(tile) + col * o.to.tile_rows(tile);
        step = o.to.plain ? o.to.width : size_t(kLanes);
    }
};

// What becomes of the results y of rows row… of a tile, outputs n…n + 15, of which `left` exist.
inline void emit(F* y, int rows, const Out& o, const Target& target, int row, int n, int left) {
    float* to = target.to + row * target.step;
    if (o.bias) {
        const F bias = load_upto(o.bias + n, left);
        for (int r = 0; r < rows; ++r) y[r] = f_add(y[r], bias);
    }
    if (o.kind == Out::Add) for (int r = 0; r < rows; ++r) y[r] = f_add(load_upto(to + r * target.step, left), y[r]);
    if (o.kind == Out::Gate) for (int r = 0; r < rows; ++r) y[r] = f_mul(activate(o.activation, load_upto(to + r * target.step, left)), y[r]);
    for (int r = 0; r < rows; ++r) store_upto(to + r * target.step, y[r], left);
}

// Memory to be fetched during a chain: some lines for each block.
struct Ahead {
    const uint8_t* from;
    int lines;
    bool near;             // into the first cache level; else into the second
    void next() {
        if (near) for (int line = 0; line < lines; ++line, from += 64) __builtin_prefetch(from);
        else for (int line = 0; line < lines; ++line, from += 64) __builtin_prefetch(from, 0, 2);
    }
};

// The chain over blocks for R rows of a tile, from row `first` on, times one panel.
template <Form form, int R> [[gnu::noinline]] void chain_rows(const uint8_t* unit, const QuantTile& tile, int first, Ahead ahead, F* result) {
    constexpr FormTraits t = traits(form);
    const int n = kChainRows == kFewRows ? R : tile.n, blocks = tile.cols / 32;
    RowsOfTile a{n, reinterpret_cast<const int8_t*>(tile.records) + 32 * first, reinterpret_cast<const float*>(tile.records + 32 * n) + first};
    F acc[R], scale[t.unit][2];
    UNROLL for (int r = 0; r < R; ++r) acc[r] = f_set(0.0f);
    for (int b = 0; b < blocks; b += t.unit, unit += t.unit_bytes()) {
        UNROLL for (int i = 0; i < t.unit; ++i) scales_of<form>(unit, i, scale[i]);
        const int here = blocks - b < t.unit ? blocks - b : t.unit;
        for (int i = 0; i < here; ++i, a.next()) {
            const uint8_t* planes = unit + t.scale_bytes + size_t(i) * t.vectors * 64;
            ahead.next();
            add_block<form, R>(acc, planes, scale[i], a);
        }
    }
    UNROLL for (int r = 0; r < R; ++r) result[first + r] = acc[r];
}

// The outliers of R rows of a tile.
template <int R> void outlier_rows(const QuantTile& tile, int first, const LinearScratch& s, F* result) {
    const uint32_t* at = tile.at + first * tile.stride;
    const float* x = tile.x + first * tile.stride;
    F acc[R];
    UNROLL for (int r = 0; r < R; ++r) acc[r] = result[first + r];
    for (int i = 0; i < tile.slots; ++i, ++at, ++x)
        UNROLL for (int r = 0; r < R; ++r) acc[r] = f_fma(f_load(s.columns + at[r * tile.stride]), f_set(x[r * tile.stride]), acc[r]);
    UNROLL for (int r = 0; r < R; ++r) result[first + r] = acc[r];
}

// Rows of the tile from `first` on: kChainRows at a time, then what is left.
template <Form form, int R> inline void chain(const uint8_t* panel, const QuantTile& tile, int first, Ahead ahead, F* result) {
    for (; tile.n - first >= R; first += R, ahead = {}) chain_rows<form, R>(panel, tile, first, ahead, result);
    if constexpr (R > 1) if (first < tile.n) chain<form, R - 1>(panel, tile, first, ahead, result);
}

template <int R> inline void outliers(const QuantTile& tile, int first, const LinearScratch& s, F* result) {
    for (; tile.n - first >= R; first += R) outlier_rows<R>(tile, first, s, result);
    if constexpr (R > 1) if (first < tile.n) outliers<R / 2>(tile, first, s, result);
}

// Where the columns lie at which some row has an outlier.
template <Form form> void place_columns(const QuantRows& x, LinearScratch& s) {
    if (s.form == form && s.stamp == x.stamp) return;
    constexpr FormTraits t = traits(form);
    const int tiles = x.tiles(), words = QuantRows::words(x.cols);
    int count = 0;
    s.form = form;
    s.stamp = x.stamp;
    for (int word = 0; word < words; ++word) {
        uint64_t used = 0;
        for (int i = 0; i < tiles; ++i) used |= x.used[size_t(i) * words + word];
        for (; used; used &= used - 1) {
            const uint32_t k = 64 * word + __builtin_ctzll(used), block = k / 32, i = block % t.unit, j = k % 32 / 4, byte = k % 4;
            const uint32_t unit = block / t.unit * t.unit_bytes(), planes = unit + t.scale_bytes + i * t.vectors * 64;
            ColumnPlace& p = s.places[count++];
            p = {k, unit, planes + 64 * (form == Form::Q8 ? j : j % 4), planes + 256, uint8_t(8 * byte), 0, uint8_t(i), uint8_t(j / 4)};
            if (form != Form::Q8 && j >= 4) p.shift += 4;
            if (has_bit_plane(form)) p.high_shift = uint8_t(8 * byte + j);
            if (form == Form::Q6K) {
                p.high += 64 * (j / 4);
                p.high_shift = uint8_t(8 * byte + 2 * (j % 4));
            }
        }
    }
    s.count = count;
}

// Those columns of a panel as numbers. Columns of one block follow each other.
template <Form form> [[gnu::noinline]] void fill_columns(const uint8_t* panel, const LinearScratch& s) {
    float* const columns = s.columns;
    F scale[2];
    uint32_t block = ~0u;
    for (const ColumnPlace *p = s.places, *end = p + s.count; p < end; ++p) {
        if (p->k / 32 != block) {
            block = p->k / 32;
            scales_of<form>(panel + p->unit, p->block, scale);
        }
        I q = i_and(i_shr_by(i_load(panel + p->vector), p->shift), form == Form::Q8 ? 255 : 15);
        if constexpr (has_bit_plane(form)) q = i_or(q, i_shl<4>(i_and(i_shr_by(i_load(panel + p->high), p->high_shift), 1)));
        if constexpr (form == Form::Q6K) q = i_or(q, i_shl<4>(i_and(i_shr_by(i_load(panel + p->high), p->high_shift), 3)));
        const F d = in_halves(form) && p->half ? scale[1] : scale[0];
        f_store(columns + size_t(p->k + 1) * kLanes, f_fma(d, f_from_i(i_add(q, i_set(-zero_of(form)))), has_minimum(form) ? scale[1] : f_set(0.0f)));
    }
}

// Bytes. Much nearer, a line is often still under way when it is needed, which is slower than not fetching it.
constexpr int kFetchAhead = 6144;

// What is fetched while tile t is computed. One or two tiles wait for memory or nearly so: with the first goes the weights' own stream. More leave
// memory time: with the last few goes the next panel, spread so that memory keeps up. With the others goes what attention reads next. For one or two
// rows the processor does it best by itself.
inline Ahead ahead_of(const Weight& w, int panel, int t, const QuantRows& x, const Fetch& fetch) {
    if (x.rows <= 2) return {};
    const int tiles = x.tiles(), blocks = w.cols / 32, lines = int(w.panel_bytes() / blocks + 63) / 64;
    const bool own = tiles <= 2;
    if (own && t == 0) return {w.panel(panel) + kFetchAhead, lines, false};
    const int most = own ? 0 : fetch.count ? (tiles + 1) / 2 : tiles, parts = most < 3 ? most : 3, part = t - (tiles - parts);
    if (part < 0) {
        const uint8_t* source = fetch.source(panel * w.panel_bytes(), own ? t - 1 : t);
        return {source, source ? lines : 0, true};
    }
    const int each = (lines + parts - 1) / parts, before = part * each;
    return {w.panel(panel + 1) + size_t(64) * blocks * before, lines - before < each ? lines - before : each, true};
}

template <Form form> void linear_form(const Weight& w, int panel, int end, const QuantRows& x, const Out& out, const Fetch& fetch, LinearScratch& scratch) {
    const int tiles = x.tiles();
    place_columns<form>(x, scratch);
    for (; panel < end; ++panel) {
        const uint8_t* bytes = w.panel(panel);
        const int n = panel * kLanes;
        for (int t = 0; t < tiles; ++t) {
            const QuantTile tile = x.tile(t);
            F result[kFewRows];
            const Target target(out, t, n);
            // Fetched for writing while the chain runs.
            for (int r = 0; r < tile.n; ++r) __builtin_prefetch(target.to + r * target.step, 1);
            chain<form, kChainRows>(bytes, tile, 0, ahead_of(w, panel, t, x, fetch), result);
            // The first chain has brought the panel into the cache, in order.
            if (t == 0) fill_columns<form>(bytes, scratch);
            if (tile.slots) outliers<kRows>(tile, 0, scratch, result);
            emit(result, tile.n, out, target, 0, n, w.rows - n);
        }
    }
}

void linear_quant(const Weight& w, int panel, int end, const QuantRows& x, const Out& out, const Fetch& fetch, LinearScratch& scratch) {
    switch (w.form) {
        case Form::Q4: return linear_form<Form::Q4>(w, panel, end, x, out, fetch, scratch);
        case Form::Q4M: return linear_form<Form::Q4M>(w, panel, end, x, out, fetch, scratch);
        case Form::Q5: return linear_form<Form::Q5>(w, panel, end, x, out, fetch, scratch);
        case Form::Q5M: return linear_form<Form::Q5M>(w, panel, end, x, out, fetch, scratch);
        case Form::Q8: return linear_form<Form::Q8>(w, panel, end, x, out, fetch, scratch);
        case Form::Q4K: return linear_form<Form::Q4K>(w, panel, end, x, out, fetch, scratch);
        case Form::Q5K: return linear_form<Form::Q5K>(w, panel, end, x, out, fetch, scratch);
        case Form::Q6K: return linear_form<Form::Q6K>(w, panel, end, x, out, fetch, scratch);
        default: return;
    }
}
