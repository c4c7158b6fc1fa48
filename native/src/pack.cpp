// File blocks -> panels (weight_format.h), and back for single rows.
#include "pool.h"
#include "weight_format.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace mill {
namespace {

inline uint32_t load_u32(const uint8_t* p) { uint32_t v; std::memcpy(&v, p, 4); return v; }

void unpack_nibbles_32(const uint8_t* qs, uint8_t* q) {
    for (int i = 0; i < 16; ++i) { q[i] = qs[i] & 15; q[i + 16] = qs[i] >> 4; }
}

void unpack_nibbles_256(const uint8_t* qs, uint8_t* q) {
    for (int c = 0; c < 4; ++c)
        for (int i = 0; i < 32; ++i) {
            q[64 * c + i] = qs[32 * c + i] & 15;
            q[64 * c + 32 + i] = qs[32 * c + i] >> 4;
        }
}

void unpack_values(Form form, const uint8_t* b, uint8_t* q) {
    switch (form) {
        case Form::Q4: unpack_nibbles_32(b + 2, q); return;
        case Form::Q4M: unpack_nibbles_32(b + 4, q); return;
        case Form::Q5:
        case Form::Q5M: {
            const uint8_t* high = b + (form == Form::Q5 ? 2 : 4);
            unpack_nibbles_32(high + 4, q);
            const uint32_t bits = load_u32(high);
            for (int i = 0; i < 32; ++i) q[i] |= ((bits >> i) & 1) << 4;
            return;
        }
        case Form::Q8:
            for (int i = 0; i < 32; ++i) q[i] = uint8_t(b[2 + i] + 128);
            return;
        case Form::Q4K: unpack_nibbles_256(b + 16, q); return;
        case Form::Q5K:
            unpack_nibbles_256(b + 48, q);
            for (int s = 0; s < 8; ++s)
                for (int i = 0; i < 32; ++i) q[32 * s + i] |= ((b[16 + i] >> s) & 1) << 4;
            return;
        case Form::Q6K:
            for (int h = 0; h < 2; ++h) {
                const uint8_t* low = b + 64 * h;
                const uint8_t* high = b + 128 + 32 * h;
                uint8_t* out = q + 128 * h;
                for (int i = 0; i < 32; ++i) {
                    out[i] = (low[i] & 15) | ((high[i] & 3) << 4);
                    out[i + 32] = (low[i + 32] & 15) | (((high[i] >> 2) & 3) << 4);
                    out[i + 64] = (low[i] >> 4) | (((high[i] >> 4) & 3) << 4);
                    out[i + 96] = (low[i + 32] >> 4) | (((high[i] >> 6) & 3) << 4);
                }
            }
            return;
        default: return;
    }
}

// `at`: which of its unit's blocks the file block begins with.
void place_scales(Form form, const uint8_t* b, uint8_t* area, int at, int lane) {
    auto put16 = [&](int offset, const uint8_t* from) { std::memcpy(area + offset + 2 * lane, from, 2); };
    switch (form) {
        case Form::Q4: case Form::Q5: case Form::Q8: put16(32 * at, b); return;
        case Form::Q4M: case Form::Q5M: put16(0, b); put16(32, b + 2); return;
        case Form::Q4K: case Form::Q5K:
            put16(0, b);
            put16(32, b + 2);
            for (int i = 0; i < 12; ++i) area[64 + 16 * i + lane] = b[4 + i];
            return;
        case Form::Q6K:
            put16(0, b + 208);
            for (int i = 0; i < 16; ++i) area[32 + 16 * i + lane] = b[192 + i];
            return;
        default: return;
    }
}

// The planes of one block of 32 (values q) of one lane.
void place_values(Form form, const uint8_t* q, uint8_t* planes, int lane) {
    auto put = [&](int vector, uint32_t quad) { std::memcpy(planes + 64 * vector + 4 * lane, &quad, 4); };
    uint32_t quad[8];
    for (int j = 0; j < 8; ++j) quad[j] = load_u32(q + 4 * j);
    if (form == Form::Q8) {
        for (int j = 0; j < 8; ++j) put(j, quad[j]);
        return;
    }
    for (int j = 0; j < 4; ++j) put(j, (quad[j] & 0x0f0f0f0f) | ((quad[j + 4] & 0x0f0f0f0f) << 4));
    if (form == Form::Q5 || form == Form::Q5M || form == Form::Q5K) {
        uint32_t bits = 0;
        for (int j = 0; j < 8; ++j) bits |= ((quad[j] >> 4) & 0x01010101) << j;
        put(4, bits);
    } else if (form == Form::Q6K) {
        for (int h = 0; h < 2; ++h) {
            uint32_t crumbs = 0;
            for (int j = 0; j < 4; ++j) crumbs |= ((quad[4 * h + j] >> 4) & 0x03030303) << (2 * j);
            put(4 + h, crumbs);
        }
    }
}

uint8_t value_at(Form form, const uint8_t* planes, int lane, int k) {
    const int j = k / 4, at = 4 * lane + k % 4;
    if (form == Form::Q8) return planes[64 * j + at];
    uint8_t v = (planes[64 * (j % 4) + at] >> (j < 4 ? 0 : 4)) & 15;
    if (form == Form::Q5 || form == Form::Q5M || form == Form::Q5K) v |= ((planes[64 * 4 + at] >> j) & 1) << 4;
    if (form == Form::Q6K) v |= ((planes[64 * (4 + j / 4) + at] >> (2 * (j % 4))) & 3) << 4;
    return v;
}

int zero_of(Form form) {
    switch (form) {
        case Form::Q4: return 8;
        case Form::Q5: return 16;
        case Form::Q8: return 128;
        case Form::Q6K: return 32;
        default: return 0;
    }
}

}  // namespace

Weight pack_weight(Form form, int rows, int cols, const uint8_t* data, size_t bytes, Pool& pool) {
    const FormTraits& t = traits(form);
    if (rows <= 0 || cols <= 0 || cols % t.group != 0)
        throw std::invalid_argument(std::string("[pack] ") + t.name + " needs columns in multiples of " + std::to_string(t.group) +
                                    ", not " + std::to_string(rows) + " x " + std::to_string(cols));
    const size_t row_bytes = size_t(cols) / t.group * t.file_bytes;
    if (bytes != row_bytes * rows)
        throw std::invalid_argument(std::string("[pack] ") + t.name + " of " + std::to_string(rows) + " x " + std::to_string(cols) +
                                    " needs " + std::to_string(row_bytes * rows) + " bytes, not " + std::to_string(bytes));
    Weight w{form, rows, cols, {}};
    w.memory = Memory(w.panel_bytes() * w.panels());
    pool.parallel(w.panels(), [&](int begin, int end) {
        uint8_t values[256];
        for (int p = begin; p < end; ++p)
            for (int lane = 0; lane < kLanes && p * kLanes + lane < rows; ++lane) {
                const uint8_t* from = data + size_t(p * kLanes + lane) * row_bytes;
                if (t.dense()) {
                    for (int k = 0; k < cols; ++k) std::memcpy(w.panel(p) + (size_t(k) * kLanes + lane) * t.file_bytes, from + size_t(k) * t.file_bytes, t.file_bytes);
                    continue;
                }
                for (int block = 0; block < cols / 32; block += t.group / 32, from += t.file_bytes) {
                    place_scales(form, from, w.scales(p, block), block % t.unit, lane);
                    unpack_values(form, from, values);
                    for (int b = 0; b < t.group / 32; ++b) place_values(form, values + 32 * b, w.planes(p, block + b), lane);
                }
            }
    });
    return w;
}

void dequantize_row(const Weight& w, int row, float* out) {
    const FormTraits& t = traits(w.form);
    const int panel = row / kLanes, lane = row % kLanes;
    if (t.dense()) {
        for (int k = 0; k < w.cols; ++k) {
            const uint8_t* p = w.panel(panel) + (size_t(k) * kLanes + lane) * t.file_bytes;
            uint16_t h;
            if (w.form == Form::F32) std::memcpy(out + k, p, 4);
            else std::memcpy(&h, p, 2), out[k] = w.form == Form::F16 ? f16_to_f32(h) : bf16_to_f32(h);
        }
        return;
    }
    const int zero = zero_of(w.form);
    for (int block = 0; block < w.cols / 32; ++block) {
        const uint8_t* area = w.scales(panel, block);
        const uint8_t* planes = w.planes(panel, block);
        const int b = block % t.unit;
        auto half = [&](int offset) { uint16_t h; std::memcpy(&h, area + offset + 2 * lane, 2); return f16_to_f32(h); };
        for (int k = 0; k < 32; ++k) {
            float d = half(t.unit == 2 ? 32 * b : 0), m = 0;
            if (w.form == Form::Q4M || w.form == Form::Q5M) m = half(32);
            if (w.form == Form::Q4K || w.form == Form::Q5K) {
                auto packed = [&](int i) { return int(area[64 + 16 * i + lane]); };
                const int sc = b < 4 ? packed(b) & 63 : (packed(b + 4) & 15) | ((packed(b - 4) >> 6) << 4);
                const int mn = b < 4 ? packed(b + 4) & 63 : (packed(b + 4) >> 4) | ((packed(b) >> 6) << 4);
                m = -(half(32) * float(mn));
                d *= float(sc);
            }
            if (w.form == Form::Q6K) d *= float(int8_t(area[32 + 16 * (2 * b + k / 16) + lane]));
            // The product is exact, so fused and unfused agree.
            out[32 * block + k] = d * float(int(value_at(w.form, planes, lane, k)) - zero) + m;
        }
    }
}

}  // namespace mill
