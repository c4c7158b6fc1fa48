// Quantised weights times quantised rows: the chain over blocks of docs/numerics.md.

// What the chain needs to know of a form once its bytes are unpacked.
enum class Chain { Zero8, Zero16, Min, Wide, Halves };

constexpr Chain chain_of(Form f) {
    switch (f) {
        case Form::Q4: return Chain::Zero8;
        case Form::Q5: return Chain::Zero16;
        case Form::Q8: return Chain::Wide;
        case Form::Q6K: return Chain::Halves;
        default: return Chain::Min;
    }
}

constexpr int scales_per_block(Chain c) { return c == Chain::Halves || c == Chain::Min ? 2 : 1; }

struct Block {
    B q[8];
    F scale[2];   // Min: d, m. Halves: d of each half. Otherwise: d.
};

struct PanelView {
    const uint8_t* scales;
    const uint8_t* quants;
};

inline PanelView panel_view(const Weight& w, int panel) {
    const uint8_t* p = w.panel(panel);
    return {p, p + w.scale_bytes()};
}

constexpr int vectors_of(Form form) {
    return form == Form::Q8 ? 8 : form == Form::Q6K ? 6 : form == Form::Q5 || form == Form::Q5M || form == Form::Q5K ? 5 : 4;
}

template <Form form> inline void load_block(const PanelView& p, int b, Block& out) {
    constexpr int vectors = vectors_of(form);
    const uint8_t* planes = p.quants + size_t(b) * vectors * 64;
    if constexpr (form == Form::Q8) {
        UNROLL for (int j = 0; j < 8; ++j) out.q[j] = b_load(planes + 64 * j);
    } else {
        UNROLL for (int j = 0; j < 4; ++j) {
            const B both = b_load(planes + 64 * j);
            out.q[j] = b_low(both);
            out.q[j + 4] = b_high(both);
        }
    }
    if constexpr (vectors == 5) {
        const B bits = b_load(planes + 256);
        out.q[0] = b_or(out.q[0], b_bit<0>(bits)); out.q[1] = b_or(out.q[1], b_bit<1>(bits));
        out.q[2] = b_or(out.q[2], b_bit<2>(bits)); out.q[3] = b_or(out.q[3], b_bit<3>(bits));
        out.q[4] = b_or(out.q[4], b_bit<4>(bits)); out.q[5] = b_or(out.q[5], b_bit<5>(bits));
        out.q[6] = b_or(out.q[6], b_bit<6>(bits)); out.q[7] = b_or(out.q[7], b_bit<7>(bits));
    }
    if constexpr (form == Form::Q6K) {
        UNROLL for (int h = 0; h < 2; ++h) {
            const B crumbs = b_load(planes + 256 + 64 * h);
            out.q[4 * h] = b_or(out.q[4 * h], b_crumb<0>(crumbs));
            out.q[4 * h + 1] = b_or(out.q[4 * h + 1], b_crumb<1>(crumbs));
            out.q[4 * h + 2] = b_or(out.q[4 * h + 2], b_crumb<2>(crumbs));
            out.q[4 * h + 3] = b_or(out.q[4 * h + 3], b_crumb<3>(crumbs));
        }
    }
    if constexpr (form == Form::Q4 || form == Form::Q5 || form == Form::Q8) {
        out.scale[0] = f_half(p.scales + 32 * size_t(b));
    } else if constexpr (form == Form::Q4M || form == Form::Q5M) {
        out.scale[0] = f_half(p.scales + 64 * size_t(b));
        out.scale[1] = f_half(p.scales + 64 * size_t(b) + 32);
    } else if constexpr (form == Form::Q6K) {
        const uint8_t* area = p.scales + 288 * size_t(b / 8);
        const F d = f_half(area);
        const uint8_t* subs = area + 32 + 32 * (b % 8);
        out.scale[0] = f_mul(d, f_from_i(i_s8(subs)));
        out.scale[1] = f_mul(d, f_from_i(i_s8(subs + 16)));
    } else {
        const uint8_t* area = p.scales + 256 * size_t(b / 8);
        const uint8_t* rows = area + 64;
        const int s = b % 8;
        I sub, min;
        if (s < 4) {
            sub = i_and(i_u8(rows + 16 * s), 63);
            min = i_and(i_u8(rows + 16 * (s + 4)), 63);
        } else {
            const I low = i_u8(rows + 16 * (s + 4));
            sub = i_or(i_and(low, 15), i_shl<4>(i_shr<6>(i_u8(rows + 16 * (s - 4)))));
            min = i_or(i_shr<4>(low), i_shl<4>(i_shr<6>(i_u8(rows + 16 * s))));
        }
        out.scale[0] = f_mul(f_half(area), f_from_i(sub));
        out.scale[1] = f_sub(f_set(0.0f), f_mul(f_half(area + 32), f_from_i(min)));
    }
}

// One block of a row of activations, of the first or the second term.
struct ActBlock {
    const int8_t* q;
    float d;
    const int32_t *neg16, *neg32;
};

inline ActBlock block_of(const QuantRows& a, int b) { return {a.q + 32 * b, a.d[b], a.neg16 + 2 * b, a.neg32 + b}; }
inline ActBlock wide_of(const QuantRows& a, int i) { return {a.wide_q + 32 * i, a.wide_d[i], a.wide_neg16 + 2 * i, a.wide_neg32 + i}; }

template <Chain chain> inline I start(const ActBlock& a, int half) {
    if constexpr (chain == Chain::Halves) return i_shl<5>(i_set(a.neg16[half]));
    else if constexpr (chain == Chain::Zero8) return i_shl<3>(i_set(*a.neg32));
    else if constexpr (chain == Chain::Zero16) return i_shl<4>(i_set(*a.neg32));
    else if constexpr (chain == Chain::Wide && kZero8 != 0) return i_shl<7>(i_set(*a.neg32));
    else return i_set(0);
}

template <Chain chain> inline I dot_of(I acc, B w, const int8_t* a) {
    if constexpr (chain == Chain::Wide) return dot8(acc, w, a);
    else return dot(acc, w, a);
}

// acc + float(i) * d_w * d_x for one row and 16 outputs: a step of the chain of numerics.md.
template <Chain chain> inline F step(F acc, const Block& w, const ActBlock& a) {
    const F d = f_set(a.d);
    I i0 = start<chain>(a, 0), i1 = chain == Chain::Halves ? start<chain>(a, 1) : i_set(0);
    UNROLL for (int j = 0; j < 4; ++j) {
        i0 = dot_of<chain>(i0, w.q[j], a.q + 4 * j);
        i1 = dot_of<chain>(i1, w.q[j + 4], a.q + 4 * j + 16);
    }
    if constexpr (chain == Chain::Halves) {
        acc = f_fma(f_mul(f_from_i(i0), w.scale[0]), d, acc);
        return f_fma(f_mul(f_from_i(i1), w.scale[1]), d, acc);
    }
    return f_fma(f_mul(f_from_i(i_add(i0, i1)), w.scale[0]), d, acc);
}

inline void emit(F acc, const Out& o, int row, int n, int left) {
    float* to = o.out + size_t(row) * o.stride + n;
    if (o.bias) acc = f_add(acc, load_upto(o.bias + n, left));
    if (o.accumulate) acc = f_add(load_upto(to, left), acc);
    store_upto(to, acc, left);
}

template <Form form, int R> void few_rows(const Weight& w, int panel, const QuantRows& x, int row, const Out& out) {
    const PanelView view = panel_view(w, panel);
    const int blocks = w.cols / 32;
    QuantRows a[R];
    F acc[R];
    UNROLL for (int r = 0; r < R; ++r) { a[r] = row_of(x, row + r); acc[r] = f_set(0.0f); }
    constexpr Chain chain = chain_of(form);
    constexpr int stride = vectors_of(form) * 64;
    for (int b = 0; b < blocks; ++b) {
        UNROLL for (int line = 0; line < stride; line += 64) __builtin_prefetch(view.quants + size_t(b) * stride + line + 4096);
        Block block;
        load_block<form>(view, b, block);
        UNROLL for (int r = 0; r < R; ++r) {
            if constexpr (chain == Chain::Min) acc[r] = f_fma(block.scale[1], f_set(a[r].s[b]), acc[r]);
            acc[r] = step<chain>(acc[r], block, block_of(a[r], b));
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < *a[r].wide; ++i) {
            Block block;
            load_block<form>(view, a[r].wide_block[i], block);
            acc[r] = step<chain>(acc[r], block, wide_of(a[r], i));
        }
    const int left = w.rows - panel * kLanes;
    UNROLL for (int r = 0; r < R; ++r) emit(acc[r], out, row + r, panel * kLanes, left);
}

// A panel unpacked to one byte per value and float scales, for many rows.
struct Unpacked {
    uint8_t* q;      // [blocks][8][64]
    float* scale;    // [blocks][scales_per_block][16]
};

template <Form form> void unpack(const Weight& w, int panel, const Unpacked& to) {
    constexpr int scales = scales_per_block(chain_of(form));
    const PanelView view = panel_view(w, panel);
    for (int b = 0; b < w.cols / 32; ++b) {
        Block block;
        load_block<form>(view, b, block);
        UNROLL for (int j = 0; j < 8; ++j) b_store(to.q + (size_t(b) * 8 + j) * 64, block.q[j]);
        UNROLL for (int i = 0; i < scales; ++i) f_store(to.scale + (size_t(b) * scales + i) * 16, block.scale[i]);
    }
}

// Block b of R rows x P panels: the integer parts, scaled and added to acc.
template <Chain chain, int R, int P> inline void tile_block(F (&acc)[R][P], const Unpacked* u, int b, const ActBlock (&a)[R]) {
    constexpr int scales = scales_per_block(chain), halves = chain == Chain::Halves ? 2 : 1;
    UNROLL for (int h = 0; h < halves; ++h) {
        I i[R][P];
        UNROLL for (int r = 0; r < R; ++r) {
            const I first = start<chain>(a[r], h);
            UNROLL for (int p = 0; p < P; ++p) i[r][p] = first;
        }
        UNROLL for (int j = h * 4; j < (halves == 2 ? h * 4 + 4 : 8); ++j) {
            B q[P];
            UNROLL for (int p = 0; p < P; ++p) q[p] = b_load(u[p].q + (size_t(b) * 8 + j) * 64);
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (int p = 0; p < P; ++p) i[r][p] = dot_of<chain>(i[r][p], q[p], a[r].q + 4 * j);
        }
        UNROLL for (int p = 0; p < P; ++p) {
            const F d = f_load(u[p].scale + (size_t(b) * scales + (chain == Chain::Halves ? h : 0)) * 16);
            UNROLL for (int r = 0; r < R; ++r) acc[r][p] = f_fma(f_mul(f_from_i(i[r][p]), d), f_set(a[r].d), acc[r][p]);
        }
    }
}

template <Chain chain, int R, int P> void tile(const Weight& w, int panel, const Unpacked* u, const QuantRows& x, int row, const Out& out) {
    const int blocks = w.cols / 32;
    QuantRows a[R];
    F acc[R][P];
    UNROLL for (int r = 0; r < R; ++r) {
        a[r] = row_of(x, row + r);
        UNROLL for (int p = 0; p < P; ++p) acc[r][p] = f_set(0.0f);
    }
    for (int b = 0; b < blocks; ++b) {
        if constexpr (chain == Chain::Min) UNROLL for (int p = 0; p < P; ++p) {
            const F m = f_load(u[p].scale + (size_t(b) * 2 + 1) * 16);
            UNROLL for (int r = 0; r < R; ++r) acc[r][p] = f_fma(m, f_set(a[r].s[b]), acc[r][p]);
        }
        ActBlock at[R];
        UNROLL for (int r = 0; r < R; ++r) at[r] = block_of(a[r], b);
        tile_block<chain, R, P>(acc, u, b, at);
    }
    UNROLL for (int r = 0; r < R; ++r) {
        F one[1][P];
        UNROLL for (int p = 0; p < P; ++p) one[0][p] = acc[r][p];
        for (int i = 0; i < *a[r].wide; ++i) {
            const ActBlock at[1] = {wide_of(a[r], i)};
            tile_block<chain, 1, P>(one, u, a[r].wide_block[i], at);
        }
        UNROLL for (int p = 0; p < P; ++p) emit(one[0][p], out, row + r, (panel + p) * kLanes, w.rows - (panel + p) * kLanes);
    }
}

template <Chain chain, int P> void many_rows(const Weight& w, int panel, const Unpacked* u, const QuantRows& x, int row, int rows, const Out& out) {
    int r = 0;
    for (; r + kRows <= rows; r += kRows) tile<chain, kRows, P>(w, panel, u, x, row + r, out);
    for (; r < rows; ++r) tile<chain, 1, P>(w, panel, u, x, row + r, out);
}

template <Form form> void linear_form(const Weight& w, int panel, int count, const QuantRows& x, int row, int rows, const Out& out, uint8_t* scratch) {
    if (rows <= 4) {
        for (int p = panel; p < panel + count; ++p) switch (rows) {
            case 1: few_rows<form, 1>(w, p, x, row, out); break;
            case 2: few_rows<form, 2>(w, p, x, row, out); break;
            case 3: few_rows<form, 3>(w, p, x, row, out); break;
            default: few_rows<form, 4>(w, p, x, row, out); break;
        }
        return;
    }
    constexpr Chain chain = chain_of(form);
    Unpacked u[2];
    for (int p = 0; p < count; ++p) {
        u[p].q = scratch + p * (size_t(w.cols) * 16);
        u[p].scale = reinterpret_cast<float*>(scratch + 2 * size_t(w.cols) * 16) + p * size_t(w.cols / 16) * 16;
        unpack<form>(w, panel + p, u[p]);
    }
    if (kPanels == 2 && count == 2) many_rows<chain, kPanels>(w, panel, u, x, row, rows, out);
    else for (int p = 0; p < count; ++p) many_rows<chain, 1>(w, panel + p, u + p, x, row, rows, out);
}

void linear_quant(const Weight& w, int panel, int count, const QuantRows& x, int row, int rows, const Out& out, uint8_t* scratch) {
    switch (w.form) {
        case Form::Q4: return linear_form<Form::Q4>(w, panel, count, x, row, rows, out, scratch);
        case Form::Q4M: return linear_form<Form::Q4M>(w, panel, count, x, row, rows, out, scratch);
        case Form::Q5: return linear_form<Form::Q5>(w, panel, count, x, row, rows, out, scratch);
        case Form::Q5M: return linear_form<Form::Q5M>(w, panel, count, x, row, rows, out, scratch);
        case Form::Q8: return linear_form<Form::Q8>(w, panel, count, x, row, rows, out, scratch);
        case Form::Q4K: return linear_form<Form::Q4K>(w, panel, count, x, row, rows, out, scratch);
        case Form::Q5K: return linear_form<Form::Q5K>(w, panel, count, x, row, rows, out, scratch);
        case Form::Q6K: return linear_form<Form::Q6K>(w, panel, count, x, row, rows, out, scratch);
        default: return;
    }
}
