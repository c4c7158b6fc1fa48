// Numbers as integers times a step: keys, values, queries and weights of attention (docs/numerics.md).

// The highest |x| of n numbers (a multiple of 16), or NaN if one is not finite.
inline float highest_magnitude(const float* x, int n) {
    F high = f_set(0.0f), nothing = f_set(0.0f);
    for (int i = 0; i < n; i += kLanes) {
        const F v = f_load(x + i);
        high = f_max(high, f_abs(v));
        nothing = f_add(nothing, f_mul(v, f_set(0.0f)));
    }
    return f_highest(high) + f_tree(nothing);
}

inline uint32_t bits_of_float(float x) { return __builtin_bit_cast(uint32_t, x); }

// The next bf16 that is not below x, or not above it; NaN stays NaN. Of numbers that are not too large.
inline uint16_t bf16_above(float x) {
    if (!(x < __builtin_inff())) return 0x7fc0;
    return uint16_t((bits_of_float(x) + (x < 0.0f ? 0 : 0xffff)) >> 16);
}
inline uint16_t bf16_below(float x) { return uint16_t((bits_of_float(x) + (x < 0.0f ? 0xffff : 0)) >> 16); }

// A scale and what to multiply by instead of dividing by it. What is next to nothing becomes nothing.
struct Scale {
    uint16_t bits;
    float inverse;
    Scale(float range, int steps) : bits(0), inverse(0.0f) {
        if (range < 0x1p-100f) return;
        bits = bf16_above(range / float(steps));
        inverse = 1.0f / bf16_to_f32(bits);
    }
};

inline int32_t i_sum(I x) {
    alignas(64) int32_t t[kLanes];
    i_store(t, x);
    uint32_t sum = 0;   // of what is no number the sum wraps
    for (int l = 0; l < kLanes; ++l) sum += uint32_t(t[l]);
    return int32_t(sum);
}

// Numbers up to `top` in magnitude as two signed digits: x is close to (high + low / 254) * step.
struct Digits {
    float step, inverse;
    explicit Digits(float top) : step(top / 127.0f), inverse(top < 0x1p-100f ? 0.0f : 127.0f / top) {}
    void split(F x, I& high, I& low) const {
        high = i_from_f(f_mul(x, f_set(inverse)));
        low = i_from_f(f_mul(f_fma(f_from_i(high), f_set(-step), x), f_set(inverse * 254.0f)));
    }
};

inline F join(Dots high, Dots low) { return f_fma(f_from_i(total_of(low)), f_set(1.0f / 254.0f), f_from_i(total_of(high))); }

// What add_dot expects to be taken off for each unit of the signed operand.
constexpr int key_zero(KVType type) { return type == KVType::Int8 ? kZero8 : 8; }
constexpr int value_zero(KVType type) { return type == KVType::Int8 ? kZero8 : 0; }

// Of a tile of 16 positions quad j of 4 is added; nibbles count as 5 bits, of which add_dot collects 4 quads.
template <KVType type, int j> inline void add_quad(Dots& d, B x, const int8_t* a) { add_dot<type == KVType::Int8 ? 8 : 5, j>(d, x, a); }

// x: of head_dim numbers, which are changed.
void store_query(const PageFormat& page, float* x, const float* factor, uint8_t* to) {
    const int hd = page.head_dim, groups = page.groups();
    int8_t* digits = reinterpret_cast<int8_t*>(to);
    float* steps = reinterpret_cast<float*>(to + 2 * hd);
    int32_t* zeros = reinterpret_cast<int32_t*>(steps + groups);
    for (int i = 0; i < hd; i += kLanes) f_store(x + i, f_mul(f_load(x + i), f_load(factor + i)));
    for (int g = 0; g < groups; ++g) {
        const int first = g * page.group, end = first + page.group < hd ? first + page.group : hd;
        const Digits of(highest_magnitude(x + first, end - first));
        I sum[2] = {i_set(0), i_set(0)}, high, low;
        for (int i = first; i < end; i += kLanes) {
            of.split(f_load(x + i), high, low);
            i_store_s8(digits + i, high);
            i_store_s8(digits + hd + i, low);
            sum[0] = i_add(sum[0], high);
            sum[1] = i_add(sum[1], low);
        }
        steps[g] = of.step;
        for (int digit = 0; digit < 2; ++digit) zeros[2 * g + digit] = int32_t(uint32_t(-key_zero(page.key)) * uint32_t(i_sum(sum[digit])));
    }
}

// Scales and numbers, from -most to most, of n of a position's dims.
inline uint16_t quantize_signed(const float* x, int n, int most, int8_t* q) {
    const Scale scale(highest_magnitude(x, n), most);
    for (int i = 0; i < n; i += kLanes) i_store_s8(q + i, i_from_f(f_mul(f_load(x + i), f_set(scale.inverse))));
    return scale.bits;
}

// Numbers from 0 to 15, above a minimum.
inline uint16_t quantize_above(const float* x, int n, uint16_t* minimum, int8_t* q) {
    F high = f_set(-__builtin_inff()), low = high, nothing = f_set(0.0f);
    for (int i = 0; i < n; i += kLanes) {
        const F v = f_load(x + i);
        high = f_max(high, v);
        low = f_max(low, f_sub(f_set(0.0f), v));
        nothing = f_add(nothing, f_mul(v, f_set(0.0f)));
    }
    *minimum = bf16_below(0.0f - f_highest(low));
    const float from = bf16_to_f32(*minimum);
    const Scale scale(f_highest(high) + f_tree(nothing) - from, 15);
    for (int i = 0; i < n; i += kLanes) i_store_s8(q + i, i_from_f(f_mul(f_sub(f_load(x + i), f_set(from)), f_set(scale.inverse))));
    return scale.bits;
}

// x: a key, which is changed.
void store_key(const PageFormat& page, float* x, const float* factor, const float* zero, int slot, uint8_t* frame) {
    const int hd = page.head_dim;
    alignas(64) int8_t q[512];
    uint16_t* scales = reinterpret_cast<uint16_t*>(frame + page.key_scales_at()) + slot;
    for (int i = 0; i < hd; i += kLanes) f_store(x + i, f_div(f_sub(f_load(x + i), f_load(zero + i)), f_load(factor + i)));
    for (int first = 0; first < hd; first += page.group, scales += kFrame)
        *scales = quantize_signed(x + first, first + page.group < hd ? page.group : hd - first, page.key == KVType::Int8 ? 127 : 7, q + first);
    uint32_t quad[2];
    if (page.key == KVType::Int8) {
        for (int i = 0; i < hd; i += 4) {
            __builtin_memcpy(quad, q + i, 4);
            quad[0] ^= 0x80808080u;
            __builtin_memcpy(frame + i * kFrame + slot * 4, quad, 4);
        }
    } else {
        for (int i = 0; i < hd; i += 8) {
            __builtin_memcpy(quad, q + i, 8);
            quad[0] = ((quad[0] & 0x0f0f0f0fu) | (quad[1] & 0x0f0f0f0fu) << 4) ^ 0x88888888u;
            __builtin_memcpy(frame + i * (kFrame / 2) + slot * 4, quad, 4);
        }
    }
}

void store_value(const PageFormat& page, const float* x, int slot, uint8_t* frame) {
    const int hd = page.head_dim;
    alignas(64) int8_t q[512 + kLanes] = {};
    uint16_t* scales = reinterpret_cast<uint16_t*>(frame + page.value_scales_at()) + slot;
    uint8_t* to = frame + page.values_at() + slot / 4 * page.value_row() + slot % 4;
    for (int first = 0; first < hd; first += page.group, scales += page.value_scale_bytes() / 2) {
        const int n = first + page.group < hd ? page.group : hd - first;
        if (page.value == KVType::Int8) *scales = quantize_signed(x + first, n, 127, q + first);
        else *scales = quantize_above(x + first, n, scales + kFrame, q + first);
    }
    if (page.value == KVType::Int8) {
        for (int i = 0; i < hd; ++i) to[4 * i] = uint8_t(q[i]) ^ 0x80;
    } else {
        for (int block = 0; block < hd; block += 32, to += 64)
            for (int l = 0; l < kLanes; ++l) to[4 * l] = uint8_t((q[block + l] & 15) | q[block + kLanes + l] << 4);
    }
}
