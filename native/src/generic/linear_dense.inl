// Dense weights times float rows.

template <Form form> inline F dense_k(const uint8_t* p) {
    if constexpr (form == Form::F32) return f_load(reinterpret_cast<const float*>(p));
    else if constexpr (form == Form::F16) return f_half(p);
    else return f_bf16(p);
}

// R rows of a tile, from row `first` on.
template <Form form, int R> void dense_rows(const Weight& w, int panel, const Rows& x, int tile, int first, const Out& out) {
    constexpr int step_bytes = form == Form::F32 ? 64 : 32;
    const uint8_t* p = w.panel(panel);
    const TileRows rows(x.tile(tile), x.tile_rows(tile), first);
    F acc[R];
    UNROLL for (int r = 0; r < R; ++r) acc[r] = f_set(0.0f);
    for (int k = 0; k < w.cols; k += kLanes) {
        const int end = w.cols - k < kLanes ? w.cols - k : kLanes;
        const float* a = rows.at(k, 0);
        for (int i = 0; i < end; ++i, p += step_bytes) {
            const F v = dense_k<form>(p);
            UNROLL for (int r = 0; r < R; ++r) acc[r] = f_fma(v, f_set(a[kLanes * r + i]), acc[r]);
        }
    }
    const int n = panel * kLanes;
    emit(acc, R, out, Target(out, tile, n), first, n, w.rows - n);
}

template <Form form> void dense_form(const Weight& w, int panel, int end, const Rows& x, const Out& out) {
    for (; panel < end; ++panel)
        for (int tile = 0; tile < x.tiles(); ++tile) {
            const int n = x.tile_rows(tile);
            int r = 0;
            for (; r + 8 <= n; r += 8) dense_rows<form, 8>(w, panel, x, tile, r, out);
            for (; r + 2 <= n; r += 2) dense_rows<form, 2>(w, panel, x, tile, r, out);
            for (; r < n; ++r) dense_rows<form, 1>(w, panel, x, tile, r, out);
        }
}

void linear_dense(const Weight& w, int panel, int end, const Rows& x, const Out& out) {
    if (w.form == Form::F32) dense_form<Form::F32>(w, panel, end, x, out);
    else if (w.form == Form::F16) dense_form<Form::F16>(w, panel, end, x, out);
    else dense_form<Form::BF16>(w, panel, end, x, out);
}
