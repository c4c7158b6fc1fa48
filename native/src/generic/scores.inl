// Scores of attention: queries times keys, a tile of 16 positions in 16 lanes.

// Quad j of the 16 dims from `dim` on, of integer keys.
template <KVType type, int j> inline B key_quad(const Tile& tile, int dim) {
    if constexpr (type == KVType::Int8) {
        const size_t at = size_t(dim) * kFrame + 32 * j;
        return b_load2(tile.lower + at, tile.upper + at);
    } else {
        const size_t at = size_t(dim) * (kFrame / 2) + 32 * (j / 2);
        const B both = b_load2(tile.lower + at, tile.upper + at);
        return j % 2 ? b_high(both) : b_low(both);
    }
}

template <KVType type, int j, int R, int T> inline void add_keys(Dots (&high)[T][R], Dots (&low)[T][R], const Tile (&tile)[T], const VisibleRow* rows, int dim, int hd) {
    UNROLL for (int t = 0; t < T; ++t) {
        const B keys = key_quad<type, j>(tile[t], dim);
        UNROLL for (int r = 0; r < R; ++r) {
            const int8_t* digits = reinterpret_cast<const int8_t*>(rows[r].q) + dim + 4 * j;
            add_quad<type, j>(high[t][r], keys, digits);
            add_quad<type, j>(low[t][r], keys, digits + hd);
        }
    }
}

template <KVType type, int R, int T> inline void add_scores(F (&acc)[T][R], const PageFormat& page, const VisibleRow* rows, const Tile (&tile)[T], FrameFetch& fetch) {
    const int hd = page.head_dim;
    if constexpr (type == KVType::Bf16) {
        for (int i = 0; i < hd / 2; i += 2) {
            fetch.lines(4 * T);
            UNROLL for (int pair = 0; pair < 2; ++pair) {
                B keys[T];
                UNROLL for (int t = 0; t < T; ++t) keys[t] = b_load2(tile[t].lower + 32 * size_t(i + pair), tile[t].upper + 32 * size_t(i + pair));
                UNROLL for (int r = 0; r < R; ++r)
                    UNROLL for (int t = 0; t < T; ++t) acc[t][r] = dot2(acc[t][r], keys[t], reinterpret_cast<const uint16_t*>(rows[r].q) + 2 * (i + pair));
            }
        }
    } else {
        const int groups = page.groups(), lines = T * (int(page.head_bytes()) / (2 * hd) / 4 * 4 + 4);
        for (int g = 0; g < groups; ++g) {
            const int first = g * page.group, end = first + page.group < hd ? first + page.group : hd;
            Dots high[T][R], low[T][R];
            UNROLL for (int r = 0; r < R; ++r) {
                const int32_t* zeros = reinterpret_cast<const int32_t*>(rows[r].q + 2 * hd) + groups + 2 * g;
                UNROLL for (int t = 0; t < T; ++t) {
                    high[t][r] = dots_from(i_set(zeros[0]));
                    low[t][r] = dots_from(i_set(zeros[1]));
                }
            }
            for (int dim = first; dim < end; dim += kLanes) {
                fetch.lines(lines);
                add_keys<type, 0>(high, low, tile, rows, dim, hd);
                add_keys<type, 1>(high, low, tile, rows, dim, hd);
                add_keys<type, 2>(high, low, tile, rows, dim, hd);
                add_keys<type, 3>(high, low, tile, rows, dim, hd);
            }
            const size_t scales = page.key_scales_at() + 16 * g;
            UNROLL for (int t = 0; t < T; ++t) {
                const F scale = f_bf16_of(tile[t].lower + scales, tile[t].upper + scales);
                UNROLL for (int r = 0; r < R; ++r) {
                    const float step = reinterpret_cast<const float*>(rows[r].q + 2 * hd)[g];
                    acc[t][r] = f_fma(join(high[t][r], low[t][r]), f_mul(scale, f_set(step)), acc[t][r]);
                }
            }
        }
    }
}

// R rows, T tiles from frame f on. Meanwhile as much is fetched, values and all.
template <KVType type, int R, int T> inline void score_tiles(const PageFormat& page, const VisibleRow* rows, const Cut& cut, int f, int first, int last, FrameFetch& fetch, AttendScratch& t) {
    Tile tile[T];
    UNROLL for (int i = 0; i < T; ++i) tile[i] = tile_of(cut, f + 2 * i, first, last);
    F acc[T][R];
    UNROLL for (int i = 0; i < T; ++i) UNROLL for (int r = 0; r < R; ++r) acc[i][r] = f_set(0.0f);
    add_scores<type, R, T>(acc, page, rows, tile, fetch);
    UNROLL for (int i = 0; i < T; ++i) UNROLL for (int r = 0; r < R; ++r) f_store(&t.score[r][8 * f + 16 * i], acc[i][r]);
}

// Few rows need several tiles at once for enough independent chains. Integer keys have two chains for each.
constexpr int score_tiles_of(KVType type, int rows) {
    if (type == KVType::Bf16) return rows <= 2 ? 2 * kScoreTiles : kScoreTiles;
    return rows == 1 ? 2 * kScoreTiles : rows <= 4 ? kScoreTiles : 1;
}

template <KVType type, int R> void scores(const PageFormat& page, const VisibleRow* rows, int n, const Cut& cut, const Spans& spans, const Span& span, AttendScratch& t) {
    if constexpr (R > 1) if (n < R) return scores<type, R - 1>(page, rows, n, cut, spans, span, t);
    constexpr int tiles = score_tiles_of(type, R);
    const int first = span.first(), last = span.last();
    // Heads of one token read what nobody has read before; rows of a prompt, what their neighbours have just read.
    const bool fetching = rows[0].hi == rows[n - 1].hi;
    FrameFetch fetch{cut.frames + first, fetching ? last - first : 0, page.head_bytes()};
    fetch.lines(Cut::kAhead / 64);
    int f = first & ~1;
    for (; f + 2 * tiles <= last + 1; f += 2 * tiles) score_tiles<type, R, tiles>(page, rows, cut, f, first, last, fetch, t);
    for (; f < last; f += 2) score_tiles<type, R, 1>(page, rows, cut, f, first, last, fetch, t);
}

void all_scores(const PageFormat& page, const VisibleRow* rows, int n, const Cut& cut, const Spans& spans, AttendScratch& t) {
    for (const Span& span : spans) {
        switch (page.key) {
            case KVType::Bf16: scores<KVType::Bf16, kMaxAttendRows>(page, rows, n, cut, spans, span, t); break;
            case KVType::Int8: scores<KVType::Int8, kMaxAttendRows>(page, rows, n, cut, spans, span, t); break;
            case KVType::Int4: scores<KVType::Int4, kMaxAttendRows>(page, rows, n, cut, spans, span, t); break;
        }
    }
}
