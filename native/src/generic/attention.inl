// Rotary embedding, writing keys and values, and attention over one cut.

// A head of a row of q or k, normed if there is a norm, and rotated.
inline void rotate_head(const RotateArgs& a, size_t col, const float* norm, float* y) {
    const int half = a.head_dim / 2;
    alignas(64) float x[512 + kLanes];   // pairs are read 16 at a time
    const Row from = a.qkv.from(col);
    for (int i = 0; i < a.head_dim; i += kLanes) f_store(x + i, f_load(from.at(i)));
    if (norm) rms_norm(x, norm, a.eps, 1, a.head_dim, x);
    for (int i = 0; i < half; i += 16) {
        const int left = half - i;
        F x0, x1;
        if (a.interleaved) {
            f_load_pairs(x + 2 * i, x0, x1);
        } else {
            x0 = load_upto(x + i, left);
            x1 = load_upto(x + half + i, left);
        }
        const F c = load_upto(a.cos + i, left), s = load_upto(a.sin + i, left);
        const F y0 = f_fma(x0, c, f_sub(f_set(0.0f), f_mul(x1, s)));
        const F y1 = f_fma(x1, c, f_mul(x0, s));
        // Both layouts are kept as halves from here on: q and k are permuted alike, which no dot product can see.
        store_upto(y + i, y0, left);
        store_upto(y + half + i, y1, left);
    }
}

void rotate_store(const RotateArgs& a) {
    const int hd = a.head_dim;
    alignas(64) float turned[512];
    for (int h = 0; h < a.heads; ++h) {
        rotate_head(a, size_t(h) * hd, a.q_norm, turned);
        for (int i = 0; i < hd; i += 16) i_store_u16(a.q + size_t(h) * hd + i, bf16_bits(f_mul(f_load(turned + i), f_set(a.scale))));
    }
    alignas(64) uint16_t narrow[512];
    for (int h = 0; h < a.kv_heads; ++h) {
        uint16_t* keys = reinterpret_cast<uint16_t*>(a.frame + size_t(h) * hd * kFrame * 4);
        uint16_t* values = keys + size_t(hd) * kFrame + size_t(a.slot / 2) * hd * 2;
        rotate_head(a, size_t(a.heads + h) * hd, a.k_norm, turned);
        for (int i = 0; i < hd; i += 16) i_store_u16(narrow + i, bf16_bits(f_load(turned + i)));
        for (int i = 0; i < hd; i += 2) __builtin_memcpy(keys + i * kFrame + a.slot * 2, narrow + i, 4);
        const Row v = a.qkv.from(size_t(a.heads + a.kv_heads + h) * hd);
        for (int i = 0; i < hd; i += 16) i_store_alternate(values + 2 * i, bf16_bits(f_load(v.at(i))), a.slot % 2);
    }
}

// Fetches a head's keys and values of some frames in the order in which they lie in memory, a few lines at a time.
struct FrameFetch {
    const uint8_t* const* frames;
    int left;              // frames
    size_t bytes;          // of the head in a frame
    size_t done = 0;
    void lines(int n) {    // a multiple of 4
        for (int i = 0; i < n && left > 0; i += 4) {
            const uint8_t* p = *frames + done;
            UNROLL for (int line = 0; line < 4; ++line) __builtin_prefetch(p + 64 * line, 0, 2);
            if ((done += 256) < bytes) continue;
            done = 0;
            ++frames;
            --left;
        }
    }
};

// Scores of R rows for T tiles of 16 positions, from frame f on. A tile is two frames; one that is not in [first, last) is replaced by its
// neighbour and never looked at. Meanwhile the next tiles are fetched, values and all, if asked.
template <int R, int T> inline void score_tiles(const VisibleRow* rows, const uint8_t* const* frames, int f, int first, int last, bool fetching, int hd, AttendScratch& t) {
    const uint8_t* frame[2 * T];
    UNROLL for (int i = 0; i < 2 * T; ++i) frame[i] = frames[f + i < first ? f + i + 1 : f + i < last ? f + i : f + i - 1];
    const int next = f + 2 * T;
    FrameFetch fetch{frames + next, !fetching ? 0 : last - next < 2 * T ? last - next : 2 * T, size_t(hd) * kFrame * 4};
    F acc[T][R];
    UNROLL for (int i = 0; i < T; ++i) UNROLL for (int r = 0; r < R; ++r) acc[i][r] = f_set(0.0f);
    for (int i = 0; i < hd / 2; i += 2) {
        fetch.lines(4 * T);
        UNROLL for (int pair = 0; pair < 2; ++pair) {
            B keys[T];
            UNROLL for (int j = 0; j < T; ++j) keys[j] = b_load2(frame[2 * j] + 32 * size_t(i + pair), frame[2 * j + 1] + 32 * size_t(i + pair));
            UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < T; ++j) acc[j][r] = dot2(acc[j][r], keys[j], rows[r].q + 2 * (i + pair));
        }
    }
    UNROLL for (int j = 0; j < T; ++j) UNROLL for (int r = 0; r < R; ++r) f_store(&t.score[r][8 * f + 16 * j], acc[j][r]);
}

template <int R> void scores(const VisibleRow* rows, int n, const uint8_t* const* frames, int first, int last, int hd, AttendScratch& t) {
    if constexpr (R > 1) if (n < R) return scores<R - 1>(rows, n, frames, first, last, hd, t);
    // Few rows need several tiles at once for enough independent chains.
    constexpr int tiles = R <= 2 ? 2 * kScoreTiles : kScoreTiles;
    // Heads of one token read what nobody has read before; rows of a prompt, what their neighbours have just read.
    const bool fetching = rows[0].hi == rows[n - 1].hi;
    if (fetching) FrameFetch{frames + first, last - first < 2 * tiles ? last - first : 2 * tiles, size_t(hd) * kFrame * 4}.lines(tiles * hd);
    int f = first & ~1;
    for (; f + 2 * tiles <= last + 1; f += 2 * tiles) score_tiles<R, tiles>(rows, frames, f, first, last, fetching, hd, t);
    for (; f < last; f += 2) score_tiles<R, 1>(rows, frames, f, first, last, fetching, hd, t);
}

// Turns the scores of one row into p, from tile-aligned `from` to `to` (positions within the cut), visible [lo, hi).
void soften(AttendScratch& t, int r, int from, int to, int lo, int hi, CutResult& out) {
    constexpr float none = -__builtin_inff();
    F high = f_set(none);
    for (int i = from; i < to; i += 16) {
        const F s = f_select(f_load(&t.score[r][i]), lo - i, hi - i, none);
        f_store(&t.score[r][i], s);
        high = f_max(high, s);
    }
    const float m = f_highest(high);
    F sum = f_set(0.0f);
    for (int i = from; i < to; i += 16) {
        const F p = f_select(exp2_lanes(f_sub(f_load(&t.score[r][i]), f_set(m))), lo - i, hi - i, 0.0f);
        sum = f_add(sum, store_bf16(&t.p[r][i], p));
    }
    out.m[r] = m;
    out.l[r] = f_tree(sum);
}

template <int R, int V> void weigh(const AttendScratch& t, int row, const uint8_t* const* frames, int from, int to, int hd, int dim, float* o) {
    F acc[R][V];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int v = 0; v < V; ++v) acc[r][v] = f_set(0.0f);
    for (int pos = from; pos < to; pos += 2) {
        const uint8_t* values = frames[pos / 8] + size_t(hd) * 16 + (size_t(pos % 8 / 2) * hd + dim) * 4;
        UNROLL for (int v = 0; v < V; ++v) {
            B x = b_load(values + 64 * v);
            if (pos + 1 == to) x = b_even_only(x);
            UNROLL for (int r = 0; r < R; ++r) acc[r][v] = dot2(acc[r][v], x, &t.p[row + r][pos]);
        }
    }
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int v = 0; v < V; ++v) f_store(o + size_t(row + r) * hd + dim + 16 * v, acc[r][v]);
}

// Rows from `row` to n: R at a time, then what is left.
template <int R> void weigh_rows(const AttendScratch& t, int row, int n, const uint8_t* const* frames, int from, int to, int hd, float* o) {
    for (; n - row >= R; row += R) {
        int dim = 0;
        for (; dim + 16 * kValueVectors <= hd; dim += 16 * kValueVectors) weigh<R, kValueVectors>(t, row, frames, from, to, hd, dim, o);
        for (; dim < hd; dim += 16) weigh<R, 1>(t, row, frames, from, to, hd, dim, o);
    }
    if constexpr (R > 1) if (row < n) weigh_rows<R - 1>(t, row, n, frames, from, to, hd, o);
}

void attend_cut(const VisibleRow* rows, int n, const uint8_t* const* frames, int cut, int hd, AttendScratch& t, CutResult& out) {
    const int base = cut * kCut;
    int lo[kMaxAttendRows], hi[kMaxAttendRows], from = kCut, to = 0;
    for (int r = 0; r < n; ++r) {
        lo[r] = rows[r].lo > base ? rows[r].lo - base : 0;
        hi[r] = rows[r].hi < base + kCut ? rows[r].hi - base : kCut;
        if (lo[r] >= hi[r]) continue;
        from = lo[r] < from ? lo[r] : from;
        to = hi[r] > to ? hi[r] : to;
    }
    if (from >= to) {
        for (int r = 0; r < n; ++r) out.l[r] = 0.0f;
        return;
    }
    const int first = from / kFrame, last = (to + kFrame - 1) / kFrame;
    scores<kMaxAttendRows>(rows, n, frames, first, last, hd, t);
    const int aligned = from & ~15;
    for (int r = 0; r < n; ++r) {
        if (lo[r] < hi[r]) {
            soften(t, r, aligned, to, lo[r], hi[r], out);
        } else {
            out.l[r] = 0.0f;
            __builtin_memset(&t.p[r][aligned], 0, sizeof(uint16_t) * ((to - aligned + 15) / 16 * 16));
        }
    }
    // Positions of the first frame before `from` were written by this sequence or have p = 0 over finite values.
    const int start = from & ~1;
    weigh_rows<kValueRows>(t, 0, n, frames, start, to, hd, out.o);
}

void merge_cut(CutResult& total, const CutResult& cut, int rows, int hd) {
    for (int r = 0; r < rows; ++r) {
        float* to = total.o + size_t(r) * hd;
        const float* o = cut.o + size_t(r) * hd;
        if (cut.l[r] == 0.0f) continue;
        if (total.l[r] == 0.0f) {
            total.m[r] = cut.m[r];
            total.l[r] = cut.l[r];
            __builtin_memcpy(to, o, sizeof(float) * hd);
            continue;
        }
        const float m = cut.m[r] > total.m[r] ? cut.m[r] : total.m[r];
        const float a = exp2_one(total.m[r] - m), b = exp2_one(cut.m[r] - m);
        alignas(64) float l[16];
        f_store(l, f_fma(f_set(total.l[r]), f_set(a), f_set(cut.l[r] * b)));
        total.m[r] = m;
        total.l[r] = l[0];
        for (int i = 0; i < hd; i += 16) f_store(to + i, f_fma(f_load(to + i), f_set(a), f_mul(f_load(o + i), f_set(b))));
    }
}

void finish(const CutResult& total, int row, int hd, const Row& out) {
    const F inv = f_set(1.0f / total.l[row]);
    for (int i = 0; i < hd; i += 16) f_store(out.at(i), f_mul(f_load(total.o + size_t(row) * hd + i), inv));
}
