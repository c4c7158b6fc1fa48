// Keys back from the pool as numbers: what calibration looks at.
#include "tape.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace mill {
namespace {

// Dim i of the key at position p of a frame, before factor and zero.
float key_at(const PageFormat& page, const uint8_t* frame, int p, int i) {
    if (page.key == KVType::Bf16) {
        uint16_t bits;
        std::memcpy(&bits, frame + (i / 2 * kFrame + p) * 4 + i % 2 * 2, 2);
        return bf16_to_f32(bits);
    }
    uint16_t scale;
    std::memcpy(&scale, frame + page.key_scales_at() + (i / page.group * kFrame + p) * 2, 2);
    int q;
    if (page.key == KVType::Int8) {
        q = frame[(i / 4 * kFrame + p) * 4 + i % 4] - 128;
    } else {
        const int both = frame[(i / 8 * kFrame + p) * 4 + i % 4];
        q = (i % 8 < 4 ? both & 15 : both >> 4) - 8;
    }
    return float(q) * bf16_to_f32(scale);
}

}  // namespace

void Tape::read_keys(std::span<const PageTable> tables, std::span<const int32_t> frames, std::span<const int32_t> starts, int count, float* out) const {
    pool_->require_idle();
    const auto refuse = [](const std::string& what) { throw std::invalid_argument("[tape] keys: " + what); };
    if (tables.size() != shape_.groups.size()) refuse("there are " + std::to_string(tables.size()) + " page tables, but " + std::to_string(shape_.groups.size()) + " KV groups");
    if (frames.size() != starts.size()) refuse("extents differ in length");
    const PageFormat& page = shape_.page;
    std::vector<int64_t> at((count + kFrame - 1) / kFrame);   // where in a group each of the sequence's frames is
    for (size_t g = 0; g < tables.size(); ++g) {
        const PageTable& t = tables[g];
        if (t.extent < 0 || t.extents < 0 || size_t(t.extent) + t.extents > frames.size()) refuse("a page table lies outside");
        int e = -1;
        for (int f = 0; f < int(at.size()); ++f) {
            while (e + 1 < t.extents && starts[t.extent + e + 1] <= f) ++e;
            if (e < 0 || frames[t.extent + e] == -1) refuse("frame " + std::to_string(f) + " of the sequence is not there");
            at[f] = int64_t(frames[t.extent + e]) + f - starts[t.extent + e];
            if (at[f] < 0 || at[f] >= shape_.frames) refuse("an extent lies outside the pool");
        }
        for (const Pair& pair : shape_.groups[g].pairs) {
            const LayerPlace& place = layers_[pair.layer];
            const size_t width = page.head_dim, head = pair.kv_head * width;
            float* to = out + (size_t(pair.layer) * shape_.kv_heads + pair.kv_head) * count * width;
            for (int p = 0; p < count; ++p) {
                const uint8_t* frame = place.slots[pair.kv_head] + size_t(at[p / kFrame]) * page.head_bytes();
                for (size_t i = 0; i < width; ++i, ++to) {
                    *to = key_at(page, frame, p % kFrame, int(i));
                    if (page.key != KVType::Bf16) *to = *to * place.factor[head + i] + place.zero[head + i];
                }
            }
        }
    }
}

}  // namespace mill
