// Dense weights times float rows.

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
    emit(acc, R, out, row, panel * kLanes, w.rows - panel * kLanes);
}

template <Form form> void dense_form(const Weight& w, int panel, int end, const float* x, size_t stride, int rows, const Out& out) {
    for (; panel < end; ++panel) {
        int r = 0;
        for (; r + 8 <= rows; r += 8) dense_rows<form, 8>(w, panel, x, stride, r, out);
        for (; r + 2 <= rows; r += 2) dense_rows<form, 2>(w, panel, x, stride, r, out);
        for (; r < rows; ++r) dense_rows<form, 1>(w, panel, x, stride, r, out);
    }
}

void linear_dense(const Weight& w, int panel, int end, const float* x, size_t stride, int rows, const Out& out) {
    if (w.form == Form::F32) dense_form<Form::F32>(w, panel, end, x, stride, rows, out);
    else if (w.form == Form::F16) dense_form<Form::F16>(w, panel, end, x, stride, rows, out);
    else dense_form<Form::BF16>(w, panel, end, x, stride, rows, out);
}
