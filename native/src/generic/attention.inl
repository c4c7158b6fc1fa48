// Attention over one cut, merging cuts, and what attention weighs frames.

// Lanes of the tile at position i that a row sees, `other` elsewhere.
inline F seen_of(F x, const Seen& seen, int i, float other) {
    return seen.lo <= i && i + 16 <= seen.hi ? x : f_select(x, seen.lo - i, seen.hi - i, other);
}

// Turns the scores of one row into p, 0 where it sees nothing: bf16 numbers for bf16 values, otherwise floats in place of the scores. Meanwhile what is read next is fetched.
template <bool narrow> void soften(const VisibleRow& row, int r, const Spans& spans, FrameFetch& fetch, AttendScratch& t, CutResult& out) {
    constexpr float none = -__builtin_inff();
    bool sees = false;
    F high = f_set(none);
    for (const Span& span : spans) {
        const Seen seen(row, span, spans.base);
        sees = sees || seen.lo < seen.hi;
        for (int i = span.from & ~15; i < span.to; i += 16) high = f_max(high, seen_of(f_load(&t.score[r][i]), seen, i, none));
    }
    const float m = f_highest(high);
    F sum = f_set(0.0f);
    for (const Span& span : spans) {
        const Seen seen(row, span, spans.base);
        for (int i = span.from & ~15; i < span.to; i += 16) {
            fetch.lines(4);
            F p = seen_of(exp2_lanes(f_sub(f_load(&t.score[r][i]), f_set(m))), seen, i, 0.0f);
            if constexpr (narrow) p = store_bf16(&t.p[r][i], p);
            else f_store(&t.score[r][i], p);
            sum = f_add(sum, p);
        }
    }
    out.m[r] = m;
    out.l[r] = sees ? f_tree(sum) : 0.0f;
}

void attend_cut(const PageFormat& page, const VisibleRow* rows, int n, const Cut& cut, AttendScratch& t, CutResult& out) {
    const Spans spans(rows, n, cut);
    all_scores(page, rows, n, cut, spans, t);
    FrameFetch fetch{&cut.next, cut.next ? 1 : 0, Cut::kAhead};
    for (int r = 0; r < n; ++r) {
        if (page.value == KVType::Bf16) soften<true>(rows[r], r, spans, fetch, t, out);
        else soften<false>(rows[r], r, spans, fetch, t, out);
    }
    if (spans.n) all_weigh(page, n, cut, spans, t, out.o);
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

void weigh_frames(const PageFormat& page, const VisibleRow* rows, int n, const Cut& cut, AttendScratch& t, const float* m, const float* l, int64_t* frames) {
    const Spans spans(rows, n, cut);
    all_scores(page, rows, n, cut, spans, t);
    for (int r = 0; r < n; ++r) {
        const float inverse = 1.0f / l[r];
        for (const Span& span : spans) {
            const Seen seen(rows[r], span, spans.base);
            for (int i = span.from & ~15; i < span.to; i += 16)
                f_store(&t.score[r][i], f_select(exp2_lanes(f_sub(f_load(&t.score[r][i]), f_set(m[r]))), seen.lo - i, seen.hi - i, 0.0f));
            for (int f = span.first(); f < span.last(); ++f) {
                float sum = 0.0f;
                for (int i = 0; i < kFrame; ++i) sum += t.score[r][f * kFrame + i];
                // Products with a power of two are exact; what is no number counts nothing.
                const double share = double(sum * inverse) * 4294967296.0;
                if (share >= 0.0) frames[f] += int64_t(share + 0.5);
            }
        }
    }
}
