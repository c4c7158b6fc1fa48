// Weights of 4 bits out of wider ones.
#include "pool.h"
#include "weight_format.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

namespace mill {
namespace {

constexpr int kBlock = 32;

uint16_t f16_of(float v) { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(v)); }

// To the nearest integer, for |v| < 2^22.
inline float rounded(float v) { return (v + 0x1.8p23f) - 0x1.8p23f; }

inline float quant(float v) { return std::min(7.0f, std::max(-8.0f, rounded(v))); }

inline float sum(const float* x) {
    float lanes[4] = {};
    for (int i = 0; i < kBlock; i += 4)
        for (int lane = 0; lane < 4; ++lane) lanes[lane] += x[i + lane];
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

// A block of Q4_0: its values are scale * (quant - 8). Of several scales around the one that just reaches the extreme value, the one of the
// least squared error is taken, and large values weigh more, as they do in a product.
void narrow_block(const float* x, uint8_t* out) {
    float extreme = 0;
    for (int i = 0; i < kBlock; ++i)
        if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
    float best = 0, scale = 0, along[kBlock], square[kBlock];
    for (float reach = 7.0f; reach <= 9.0f && extreme != 0; reach += 0.25f) {
        const float inverse = -reach / extreme;
        for (int i = 0; i < kBlock; ++i) {
            const float q = quant(x[i] * inverse), weighted = x[i] * x[i] * q;
            along[i] = weighted * x[i];
            square[i] = weighted * q;
        }
        const float xq = sum(along), qq = sum(square);
        if (qq > 0 && xq * xq > best * qq) {
            best = xq * xq / qq;
            scale = xq / qq;
        }
    }
    const uint16_t stored = f16_of(scale);
    scale = f16_to_f32(stored);
    std::memcpy(out, &stored, 2);
    for (int i = 0; i < kBlock; ++i) along[i] = scale == 0 ? 8 : quant(x[i] / scale) + 8;
    for (int i = 0; i < kBlock / 2; ++i) out[2 + i] = uint8_t(int(along[i]) | int(along[i + kBlock / 2]) << 4);
}

}  // namespace

Weight narrow_weight(const Weight& w, Pool& pool) {
    const int bytes = traits(Form::Q4).file_bytes;
    if (w.cols % kBlock != 0) throw std::invalid_argument("[narrow] needs columns in multiples of 32, not " + std::to_string(w.cols));
    const size_t row_bytes = size_t(w.cols) / kBlock * bytes;
    std::vector<uint8_t> file(row_bytes * w.rows);
    pool.parallel(w.rows, [&](int begin, int end) {
        std::vector<float> row(w.cols);
        for (int r = begin; r < end; ++r) {
            dequantize_row(w, r, row.data());
            for (int block = 0; block < w.cols / kBlock; ++block) narrow_block(row.data() + block * kBlock, file.data() + r * row_bytes + size_t(block) * bytes);
        }
    });
    return pack_weight(Form::Q4, w.rows, w.cols, file.data(), file.size(), pool);
}

}  // namespace mill
