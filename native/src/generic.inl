// The kernels, once, over the sixteen-lane SIMD layer of the including variant. docs/numerics.md says what each must compute.
//
// Included once per variant, after its simd.h, with MILL_VARIANT naming it. Everything lies in an unnamed namespace and nothing from the
// standard library is called, so that no symbol compiled for a newer CPU can replace one of the baseline.



namespace {

using namespace mill;

constexpr float kLog2e = 1.44269504088896340736f;

// ---- long sums: sixteen lanes, then the tree ----

inline float lane_tree(F x) {
    alignas(64) float t[16];
    f_store(t, x);
    for (int width = 8; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) t[l] = t[l] + t[l + width];
    return t[0];
}

inline float lane_max(F x) {
    alignas(64) float t[16];
    f_store(t, x);
    float m = t[0];
    for (int l = 1; l < 16; ++l) m = t[l] > m ? t[l] : m;
    return m;
}

inline float fma_one(float a, float b, float c) {
    alignas(64) float t[16];
    f_store(t, f_fma(f_set(a), f_set(b), f_set(c)));
    return t[0];
}

inline F load_upto(const float* p, int left) { return left >= 16 ? f_load(p) : f_load_n(p, left); }
inline void store_upto(float* p, F x, int left) { if (left >= 16) f_store(p, x); else f_store_n(p, x, left); }

// ---- elementary functions ----

inline F exp2_lanes(F x) {
    const F clamped = f_max(f_set(-126.0f), f_min(f_set(126.0f), x));   // in this order NaN stays NaN
    const F n = f_round(clamped);
    const F f = f_sub(clamped, n);
    F y = f_set(1.535336188319500e-4f);
    y = f_fma(y, f, f_set(1.339887440266574e-3f));
    y = f_fma(y, f, f_set(9.618437357674640e-3f));
    y = f_fma(y, f, f_set(5.550332471162809e-2f));
    y = f_fma(y, f, f_set(2.402264791363012e-1f));
    y = f_fma(y, f, f_set(6.931472028550421e-1f));
    y = f_fma(y, f, f_set(1.0f));
    return f_unless_lt(x, f_set(-126.0f), f_scale2(y, i_from_f(n)));
}

inline float exp2_one(float x) {
    alignas(64) float t[16];
    f_store(t, exp2_lanes(f_set(x)));
    return t[0];
}

inline uint16_t bf16_round(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t((u >> 16) | 64);  // NaN stays NaN
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline float bf16_widen(uint16_t v) {
    const uint32_t u = uint32_t(v) << 16;
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
}

// ---- rows ----

// Where a row's blocks start in the arrays of QuantRows.
inline QuantRows row_of(const QuantRows& x, int row) {
    const size_t blocks = x.cols / 32, cols = x.cols, r = row;
    return {x.cols, x.q + r * cols, x.d + r * blocks, x.s + r * blocks, x.neg16 + r * blocks * 2, x.neg32 + r * blocks,
            x.wide + r, x.wide_block + r * blocks, x.wide_q + r * cols, x.wide_d + r * blocks, x.wide_neg16 + r * blocks * 2, x.wide_neg32 + r * blocks};
}

inline float mean_square(const float* x, int n) {
    F ss = f_set(0.0f);
    for (int i = 0; i < n; i += 16) {
        const F v = load_upto(x + i, n - i);
        ss = f_fma(v, v, ss);
    }
    return lane_tree(ss) / float(n);
}

bool all_finite(const float* x, int n) {
    F zeros = f_set(0.0f);
    for (int i = 0; i < n; i += 16) zeros = f_add(zeros, f_mul(load_upto(x + i, n - i), f_set(0.0f)));
    return lane_tree(zeros) == 0.0f;
}

// A row that holds an infinity or NaN has no integers; every output of it is NaN.
void quantize_nothing(const QuantRows& to) {
    const int blocks = to.cols / 32;
    for (int b = 0; b < blocks; ++b) to.d[b] = to.s[b] = __builtin_nanf("");
    __builtin_memset(to.q, 0, to.cols);
    __builtin_memset(to.neg16, 0, sizeof(int32_t) * 2 * blocks);
    __builtin_memset(to.neg32, 0, sizeof(int32_t) * blocks);
    *to.wide = 0;
}

constexpr float kWide = 4.0f;

void quantize(const float* x, int row, const QuantRows& rows) {
    const QuantRows to = row_of(rows, row);
    const float square = mean_square(x, to.cols);
    if (!(square < __builtin_inff()) && !all_finite(x, to.cols)) return quantize_nothing(to);
    const float limit = kWide * __builtin_sqrtf(square);
    int wide = 0;
    for (int b = 0; b < to.cols / 32; ++b) {
        const F x0 = f_load(x + 32 * b), x1 = f_load(x + 32 * b + 16);
        const float amax = lane_max(f_max(f_abs(x0), f_abs(x1)));
        const F inv = f_set(amax < 0x1p-100f ? 0.0f : 127.0f / amax);
        const I q0 = i_from_f(f_mul(x0, inv)), q1 = i_from_f(f_mul(x1, inv));
        i_store_s8(to.q + 32 * b, q0);
        i_store_s8(to.q + 32 * b + 16, q1);
        const int32_t sum0 = i_sum(q0), sum1 = i_sum(q1);
        const float d = amax / 127.0f;
        to.d[b] = d;
        to.s[b] = d * float(sum0 + sum1);
        to.neg16[2 * b] = -sum0;
        to.neg16[2 * b + 1] = -sum1;
        to.neg32[b] = -(sum0 + sum1);
        if (!(amax > limit && amax >= 0x1p-100f)) continue;
        const F fine = f_set(254.0f / d);
        const I e0 = i_from_f(f_mul(f_sub(x0, f_mul(f_set(d), f_from_i(q0))), fine));
        const I e1 = i_from_f(f_mul(f_sub(x1, f_mul(f_set(d), f_from_i(q1))), fine));
        i_store_s8(to.wide_q + 32 * wide, e0);
        i_store_s8(to.wide_q + 32 * wide + 16, e1);
        const int32_t fine0 = i_sum(e0), fine1 = i_sum(e1);
        to.wide_d[wide] = d / 254.0f;
        to.s[b] = fma_one(to.wide_d[wide], float(fine0 + fine1), to.s[b]);
        to.wide_neg16[2 * wide] = -fine0;
        to.wide_neg16[2 * wide + 1] = -fine1;
        to.wide_neg32[wide] = -(fine0 + fine1);
        to.wide_block[wide++] = uint16_t(b);
    }
    *to.wide = wide;
}

void rms_norm(const float* x, const float* w, float eps, int n, float* y) {
    const F r = f_set(1.0f / __builtin_sqrtf(mean_square(x, n) + eps));
    for (int i = 0; i < n; i += 16)
        store_upto(y + i, f_mul(f_mul(load_upto(x + i, n - i), r), load_upto(w + i, n - i)), n - i);
}

void add(float* x, const float* y, int n) {
    for (int i = 0; i < n; i += 16) store_upto(x + i, f_add(load_upto(x + i, n - i), load_upto(y + i, n - i)), n - i);
}

void gated(Activation kind, const float* gate, const float* up, int n, float* y) {
    const F one = f_set(1.0f);
    for (int i = 0; i < n; i += 16) {
        const F g = load_upto(gate + i, n - i);
        F e;
        if (kind == Activation::Silu) {
            e = exp2_lanes(f_mul(g, f_set(-kLog2e)));
        } else {
            const F u = f_fma(f_mul(f_mul(f_set(0.044715f), g), g), g, g);
            e = exp2_lanes(f_mul(u, f_set(float(-2.0 * 1.44269504088896340736 * 0.79788456080286535588))));
        }
        const F act = f_div(g, f_add(one, e));
        store_upto(y + i, f_mul(act, load_upto(up + i, n - i)), n - i);
    }
}

// ---- linear: quantised weights ----

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

// ---- linear: dense weights ----

template <Form form> inline F dense_k(const uint8_t* p) {
    if constexpr (form == Form::F32) return f_load(reinterpret_cast<const float*>(p));
    else if constexpr (form == Form::F16) return f_half(p);
    else return f_bf16(p);
}

template <Form form, int R> void dense_rows(const Weight& w, int panel, const float* x, size_t stride, int row, const Out& out) {
    constexpr int step_bytes = form == Form::F32 ? 64 : 32;
    const uint8_t* p = w.panel(panel);
    const float* a[R];
    F acc[R];
    UNROLL for (int r = 0; r < R; ++r) { a[r] = x + size_t(row + r) * stride; acc[r] = f_set(0.0f); }
    for (int k = 0; k < w.cols; ++k) {
        const F v = dense_k<form>(p + size_t(k) * step_bytes);
        UNROLL for (int r = 0; r < R; ++r) acc[r] = f_fma(v, f_set(a[r][k]), acc[r]);
    }
    UNROLL for (int r = 0; r < R; ++r) emit(acc[r], out, row + r, panel * kLanes, w.rows - panel * kLanes);
}

template <Form form> void dense_form(const Weight& w, int panel, int count, const float* x, size_t stride, int row, int rows, const Out& out) {
    for (int p = panel; p < panel + count; ++p) {
        int r = 0;
        for (; r + 8 <= rows; r += 8) dense_rows<form, 8>(w, p, x, stride, row + r, out);
        for (; r + 2 <= rows; r += 2) dense_rows<form, 2>(w, p, x, stride, row + r, out);
        for (; r < rows; ++r) dense_rows<form, 1>(w, p, x, stride, row + r, out);
    }
}

void linear_dense(const Weight& w, int panel, int count, const float* x, size_t stride, int row, int rows, const Out& out) {
    if (w.form == Form::F32) dense_form<Form::F32>(w, panel, count, x, stride, row, rows, out);
    else if (w.form == Form::F16) dense_form<Form::F16>(w, panel, count, x, stride, row, rows, out);
    else dense_form<Form::BF16>(w, panel, count, x, stride, row, rows, out);
}

// ---- rotary embedding, writing keys and values ----

inline void rotate_head(const RotateArgs& a, const float* x, const float* norm, float* y) {
    const int half = a.head_dim / 2;
    float normed[512];
    if (norm) {
        rms_norm(x, norm, a.eps, a.head_dim, normed);
        x = normed;
    }
    for (int i = 0; i < half; i += 16) {
        const int left = half - i;
        F x0, x1;
        if (a.interleaved) {
            alignas(64) float even[16] = {}, odd[16] = {};
            for (int l = 0; l < 16 && l < left; ++l) { even[l] = x[2 * (i + l)]; odd[l] = x[2 * (i + l) + 1]; }
            x0 = f_load(even);
            x1 = f_load(odd);
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
    float turned[512];
    for (int h = 0; h < a.heads; ++h) {
        rotate_head(a, a.qkv + size_t(h) * hd, a.q_norm, turned);
        for (int i = 0; i < hd; ++i) a.q[size_t(h) * hd + i] = bf16_round(turned[i] * a.scale);
    }
    const float* k = a.qkv + size_t(a.heads) * hd;
    const float* v = k + size_t(a.kv_heads) * hd;
    for (int h = 0; h < a.kv_heads; ++h) {
        uint16_t* keys = reinterpret_cast<uint16_t*>(a.frame + size_t(h) * hd * kFrame * 4);
        uint16_t* values = keys + size_t(hd) * kFrame;
        rotate_head(a, k + size_t(h) * hd, a.k_norm, turned);
        for (int i = 0; i < hd; ++i) keys[(i / 2) * (kFrame * 2) + a.slot * 2 + i % 2] = bf16_round(turned[i]);
        for (int i = 0; i < hd; ++i) values[size_t(a.slot / 2) * hd * 2 + 2 * i + a.slot % 2] = bf16_round(v[size_t(h) * hd + i]);
    }
}

// ---- attention over one cut ----

template <int R> void scores(const VisibleRow* rows, const uint8_t* const* frames, int first, int last, int hd, AttendScratch& t) {
    for (int f = first & ~1; f < last; f += 2) {
        // A tile is two frames; a missing one is replaced by its neighbour and never looked at.
        const uint8_t* lower = frames[f < first ? f + 1 : f];
        const uint8_t* upper = frames[f + 1 < last ? f + 1 : f < first ? f + 1 : f];
        F acc[R];
        UNROLL for (int r = 0; r < R; ++r) acc[r] = f_set(0.0f);
        for (int i = 0; i < hd / 2; ++i) {
            const B keys = b_load2(lower + 32 * size_t(i), upper + 32 * size_t(i));
            UNROLL for (int r = 0; r < R; ++r) acc[r] = dot2(acc[r], keys, rows[r].q + 2 * i);
        }
        UNROLL for (int r = 0; r < R; ++r) f_store(&t.score[r][8 * f], acc[r]);
    }
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
    const float m = lane_max(high);
    F sum = f_set(0.0f);
    for (int i = from; i < to; i += 16) {
        alignas(64) float p[16];
        f_store(p, f_select(exp2_lanes(f_sub(f_load(&t.score[r][i]), f_set(m))), lo - i, hi - i, 0.0f));
        for (int l = 0; l < 16; ++l) {
            const uint16_t b = bf16_round(p[l]);
            t.p[r][i + l] = b;
            p[l] = bf16_widen(b);
        }
        sum = f_add(sum, f_load(p));
    }
    out.m[r] = m;
    out.l[r] = lane_tree(sum);
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

template <int R> void weigh_rows(const AttendScratch& t, int row, const uint8_t* const* frames, int from, int to, int hd, float* o) {
    int dim = 0;
    for (; dim + 16 * kValueVectors <= hd; dim += 16 * kValueVectors) weigh<R, kValueVectors>(t, row, frames, from, to, hd, dim, o);
    for (; dim < hd; dim += 16) weigh<R, 1>(t, row, frames, from, to, hd, dim, o);
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
    switch (n) {
        case 1: scores<1>(rows, frames, first, last, hd, t); break;
        case 2: scores<2>(rows, frames, first, last, hd, t); break;
        case 3: scores<3>(rows, frames, first, last, hd, t); break;
        case 4: scores<4>(rows, frames, first, last, hd, t); break;
        case 5: scores<5>(rows, frames, first, last, hd, t); break;
        case 6: scores<6>(rows, frames, first, last, hd, t); break;
        case 7: scores<7>(rows, frames, first, last, hd, t); break;
        default: scores<8>(rows, frames, first, last, hd, t); break;
    }
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
    int r = 0;
    for (; r + kValueRows <= n; r += kValueRows) weigh_rows<kValueRows>(t, r, frames, start, to, hd, out.o);
    for (; r < n; ++r) weigh_rows<1>(t, r, frames, start, to, hd, out.o);
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

void finish(const CutResult& total, int row, int hd, float* out) {
    const F inv = f_set(1.0f / total.l[row]);
    for (int i = 0; i < hd; i += 16) f_store(out + i, f_mul(f_load(total.o + size_t(row) * hd + i), inv));
}

// ---- over a vocabulary ----

float row_max(const float* x, int n) {
    F high = f_set(-__builtin_inff());
    int i = 0;
    for (; i + 16 <= n; i += 16) high = f_max(f_load(x + i), high);
    float m = lane_max(high);
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
        total += double(lane_tree(sum));
    }
    return total;
}

void exp2_scaled(const float* x, int n, float scale, float offset, float* y) {
    for (int i = 0; i < n; i += 16) store_upto(y + i, exp2_lanes(f_fma(load_upto(x + i, n - i), f_set(scale), f_set(offset))), n - i);
}

constexpr Kernels kTable = {
    MILL_VARIANT, kAttendRows, quantize, rms_norm, add, gated, linear_quant, linear_dense, rotate_store, attend_cut, merge_cut, finish,
    row_max, sum_exp, exp2_scaled,
};

}  // namespace
