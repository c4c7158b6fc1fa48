// The other half of attention: weights times values.

template <int R, int V> void weigh(const AttendScratch& t, int row, const Cut& cut, const Spans& spans, const PageFormat& page, int dim, float* o) {
    const size_t hd = page.head_dim, at = page.values_at() + 4 * dim;
    F acc[R][V];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int v = 0; v < V; ++v) acc[r][v] = f_set(0.0f);
    for (const Span& span : spans) {
        const unsigned end = span.to;
        // The position before an odd one was written by this sequence, and has p = 0 over finite values.
        for (unsigned pos = span.from & ~1; pos < end; pos += 2) {
            const uint8_t* values = cut.frames[pos / kFrame] + at + pos % kFrame / 2 * hd * 4;
            UNROLL for (int v = 0; v < V; ++v) {
                B x = b_load(values + 64 * v);
                if (pos + 1 == end) x = b_even_only(x);
                UNROLL for (int r = 0; r < R; ++r) acc[r][v] = dot2(acc[r][v], x, &t.p[row + r][pos]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int v = 0; v < V; ++v) f_store(o + (row + r) * hd + dim + 16 * v, acc[r][v]);
}

// Rows from `row` to n: R at a time, then what is left.
template <int R> void weigh_rows(const AttendScratch& t, int row, int n, const Cut& cut, const Spans& spans, const PageFormat& page, float* o) {
    for (; n - row >= R; row += R) {
        int dim = 0;
        for (; dim + 16 * kValueVectors <= page.head_dim; dim += 16 * kValueVectors) weigh<R, kValueVectors>(t, row, cut, spans, page, dim, o);
        for (; dim < page.head_dim; dim += 16) weigh<R, 1>(t, row, cut, spans, page, dim, o);
    }
    if constexpr (R > 1) if (row < n) weigh_rows<R - 1>(t, row, n, cut, spans, page, o);
}

// Of a group of dims, each row's weights: where their digits are (AttendScratch::p), what these sums begin with, and how to scale them.
struct GroupWeights {
    int32_t zero[kMaxAttendRows][2];
    float step[kMaxAttendRows], minimum[kMaxAttendRows];
};

// Scales and minima of a group's values, 0 outside of spans. Returns 0, or NaN if one is no number.
template <KVType type> float spread_scales(const PageFormat& page, const Cut& cut, const Spans& spans, int group, AttendScratch& t) {
    const size_t scales = page.value_scales_at() + group * page.value_scale_bytes();
    F nothing = f_set(0.0f);
    for (const Span& span : spans)
        for (int i = span.from & ~15; i < span.to; i += 16) {
            const Tile tile = tile_of(cut, i / kFrame, span.first(), span.last());
            const F scale = f_select(f_bf16_of(tile.lower + scales, tile.upper + scales), span.from - i, span.to - i, 0.0f);
            f_store(t.scale + i, scale);
            nothing = f_fma(scale, f_set(0.0f), nothing);
            if constexpr (type == KVType::Int4) f_store(t.minimum + i, f_select(f_bf16_of(tile.lower + scales + 16, tile.upper + scales + 16), span.from - i, span.to - i, 0.0f));
        }
    return f_tree(nothing);
}

// p times the scales of a group's values, and its digits. p is 0 where a row sees nothing.
template <KVType type> void split_weights(const PageFormat& page, int n, const Cut& cut, const Spans& spans, int group, AttendScratch& t, GroupWeights& w) {
    const float nothing = spread_scales<type>(page, cut, spans, group, t);
    for (int r = 0; r < n; ++r) {
        F high = f_set(0.0f), minimum = high;
        for (const Span& span : spans)
            for (int i = span.from & ~15; i < span.to; i += 16) {
                const F p = f_load(&t.score[r][i]);
                high = f_max(high, f_mul(p, f_load(t.scale + i)));
                if constexpr (type == KVType::Int4) minimum = f_fma(p, f_load(t.minimum + i), minimum);
            }
        const Digits of(f_highest(high) + nothing);
        int8_t* digits = reinterpret_cast<int8_t*>(t.p[r]);
        I sum[2] = {i_set(0), i_set(0)}, first, second;
        for (const Span& span : spans)
            for (int i = span.from & ~15; i < span.to; i += 16) {
                of.split(f_mul(f_load(&t.score[r][i]), f_load(t.scale + i)), first, second);
                i_store_s8(digits + i, first);
                i_store_s8(digits + kCut + i, second);
                if constexpr (value_zero(type) != 0) {
                    sum[0] = i_add(sum[0], first);
                    sum[1] = i_add(sum[1], second);
                }
            }
        w.step[r] = of.step;
        w.minimum[r] = f_tree(minimum);
        for (int digit = 0; digit < 2; ++digit) w.zero[r][digit] = int32_t(uint32_t(-value_zero(type)) * uint32_t(i_sum(sum[digit])));
    }
}

// Quad j of a tile, of the 16 dims v of a block of 32.
template <KVType type, int j> inline B value_quad(const uint8_t* values, size_t value_row, int dim, int v) {
    if constexpr (type == KVType::Int8) {
        return b_load(values + j % 2 * value_row + 4 * dim + 64 * v);
    } else {
        const B both = b_load(values + j % 2 * value_row + 2 * dim);
        return v ? b_high(both) : b_low(both);
    }
}

template <KVType type, int j, int R, int V> inline void add_values(Dots (&high)[R][V], Dots (&low)[R][V], const AttendScratch& t, int row, const uint8_t* values, size_t value_row, int dim, int pos) {
    UNROLL for (int v = 0; v < V; ++v) {
        const B x = value_quad<type, j>(values, value_row, dim, v);
        UNROLL for (int r = 0; r < R; ++r) {
            const int8_t* digits = reinterpret_cast<const int8_t*>(t.p[row + r]) + pos + 4 * j;
            add_quad<type, j>(high[r][v], x, digits);
            add_quad<type, j>(low[r][v], x, digits + kCut);
        }
    }
}

template <KVType type, int R, int V> void weigh_group(const AttendScratch& t, int row, const Cut& cut, const Spans& spans, const PageFormat& page, int dim, const GroupWeights& w, float* o) {
    const size_t at = page.values_at(), value_row = page.value_row();
    Dots high[R][V], low[R][V];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int v = 0; v < V; ++v) {
        high[r][v] = dots_from(i_set(w.zero[row + r][0]));
        low[r][v] = dots_from(i_set(w.zero[row + r][1]));
    }
    for (const Span& span : spans)
        for (int pos = span.from & ~15; pos < span.to; pos += 16) {
            const Tile tile = tile_of(cut, pos / kFrame, span.first(), span.last());
            add_values<type, 0>(high, low, t, row, tile.lower + at, value_row, dim, pos);
            add_values<type, 1>(high, low, t, row, tile.lower + at, value_row, dim, pos);
            add_values<type, 2>(high, low, t, row, tile.upper + at, value_row, dim, pos);
            add_values<type, 3>(high, low, t, row, tile.upper + at, value_row, dim, pos);
        }
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int v = 0; v < V; ++v)
        f_store(o + size_t(row + r) * page.head_dim + dim + 16 * v, f_fma(join(high[r][v], low[r][v]), f_set(w.step[row + r]), f_set(w.minimum[row + r])));
}

template <KVType type, int R> void weigh_group_rows(const AttendScratch& t, int row, int n, const Cut& cut, const Spans& spans, const PageFormat& page, int first, const GroupWeights& w, float* o) {
    const int end = first + page.group < page.head_dim ? first + page.group : page.head_dim;
    for (; n - row >= R; row += R)
        for (int dim = first; dim < end; dim += 32) {
            if (end - dim > 16) weigh_group<type, R, 2>(t, row, cut, spans, page, dim, w, o);
            else weigh_group<type, R, 1>(t, row, cut, spans, page, dim, w, o);
        }
    if constexpr (R > 1) if (row < n) weigh_group_rows<type, R - 1>(t, row, n, cut, spans, page, first, w, o);
}

template <KVType type> void weigh_integers(const PageFormat& page, int n, const Cut& cut, const Spans& spans, AttendScratch& t, float* o) {
    GroupWeights w;
    for (int g = 0; g < page.groups(); ++g) {
        split_weights<type>(page, n, cut, spans, g, t, w);
        weigh_group_rows<type, kValueRows>(t, 0, n, cut, spans, page, g * page.group, w, o);
    }
}

void all_weigh(const PageFormat& page, int n, const Cut& cut, const Spans& spans, AttendScratch& t, float* o) {
    switch (page.value) {
        case KVType::Bf16: return weigh_rows<kValueRows>(t, 0, n, cut, spans, page, o);
        case KVType::Int8: return weigh_integers<KVType::Int8>(page, n, cut, spans, t, o);
        case KVType::Int4: return weigh_integers<KVType::Int4>(page, n, cut, spans, t, o);
    }
}
