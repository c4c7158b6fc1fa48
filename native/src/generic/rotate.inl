// Rotary embedding, and writing queries, keys and values.

// A head of a row of q or k, normed if there is a norm, and rotated.
inline void rotate_head(const RotateArgs& a, size_t col, const float* norm, float* y) {
    const int hd = a.page.head_dim, half = hd / 2;
    alignas(64) float x[512 + kLanes];   // pairs are read 16 at a time
    const Row from = a.qkv.from(col);
    for (int i = 0; i < hd; i += kLanes) f_store(x + i, f_load(from.at(i)));
    if (norm) rms_norm(x, norm, a.eps, 1, hd, x);
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
    const PageFormat& page = a.page;
    const int hd = page.head_dim;
    alignas(64) float turned[512];
    for (int h = 0; h < a.heads; ++h) {
        uint8_t* q = a.q + h * page.query_bytes();
        rotate_head(a, size_t(h) * hd, a.q_norm, turned);
        if (page.key == KVType::Bf16) {
            for (int i = 0; i < hd; i += 16) i_store_u16(reinterpret_cast<uint16_t*>(q) + i, bf16_bits(f_mul(f_load(turned + i), f_set(a.scale))));
        } else {
            for (int i = 0; i < hd; i += 16) f_store(turned + i, f_mul(f_load(turned + i), f_set(a.scale)));
            store_query(page, turned, a.factor + size_t(h / (a.heads / a.kv_heads)) * hd, q);
        }
    }
    alignas(64) uint16_t narrow[512];
    for (int h = 0; h < a.kv_heads; ++h) {
        uint8_t* frame = a.frames[h];
        rotate_head(a, size_t(a.heads + h) * hd, a.k_norm, turned);
        if (page.key == KVType::Bf16) {
            for (int i = 0; i < hd; i += 16) i_store_u16(narrow + i, bf16_bits(f_load(turned + i)));
            for (int i = 0; i < hd; i += 2) __builtin_memcpy(frame + i * kFrame * 2 + a.slot * 4, narrow + i, 4);
        } else {
            store_key(page, turned, a.factor + size_t(h) * hd, a.zero + size_t(h) * hd, a.slot, frame);
        }
        const Row v = a.qkv.from(size_t(a.heads + a.kv_heads + h) * hd);
        if (page.value == KVType::Bf16) {
            uint16_t* values = reinterpret_cast<uint16_t*>(frame + page.values_at()) + size_t(a.slot / 2) * hd * 2;
            for (int i = 0; i < hd; i += 16) i_store_alternate(values + 2 * i, bf16_bits(f_load(v.at(i))), a.slot % 2);
        } else {
            for (int i = 0; i < hd; i += 16) f_store(turned + i, f_load(v.at(i)));
            store_value(page, turned, a.slot, frame);
        }
    }
}
