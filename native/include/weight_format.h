// How a weight matrix lies in memory.
//
// A panel is 16 outputs; panels follow each other, and a panel is one ascending stream of units, since a processor fetches one stream ahead
// far better than two. A unit is its scales and then the planes of its blocks, both 64-byte aligned. A vector is 64 bytes: 16 outputs x 4
// consecutive k (a quad), one byte each, which is what a 4-way byte dot product takes. A block of 32 k is 8 quads, j = 0…7.
//
//   low plane   4 vectors a block: vector j holds quad j in the low nibbles and quad j + 4 in the high ones
//   bit plane   1 vector a block (5-bit forms): bit j of a byte is bit 4 of quad j's value
//   crumb plane 2 vectors a block (6-bit form): bits 2(j % 4)…+1 of vector j / 4 are bits 4…5 of quad j's value
//   byte plane  8 vectors a block (8-bit form): vector j is quad j, value + 128
//
// Scales of a unit:  Q4, Q5, Q8    2 blocks: d f16[2][16]
//                    Q4M, Q5M      1 block:  d f16[16], m f16[16]
//                    Q4K, Q5K      8 blocks: d f16[16], dmin f16[16], 12 rows of packed 6-bit scales as in the file, u8[12][16]
//                    Q6K           8 blocks: d f16[16], sub-scales s8[16][16] (a row per 16 k), 32 bytes unused
// The last unit of a panel ends with its last block. Dense forms have no scales: [k][16] values.
//
// Every form takes the bytes its file type takes, but for padding to 64 bytes and to 16 outputs.
#pragma once

#include "common.h"

namespace mill {

enum class Form : int { F32, F16, BF16, Q4, Q4M, Q5, Q5M, Q8, Q4K, Q5K, Q6K };

struct FormTraits {
    const char* name;      // of the GGUF type it is packed from
    int group;             // k per file block (1 for dense)
    int file_bytes;        // bytes per file block and output
    int unit;              // blocks of 32 per unit (0 for dense)
    int scale_bytes;       // of a unit
    int vectors;           // per block
    [[gnu::always_inline]] constexpr bool dense() const { return group == 1; }
    [[gnu::always_inline]] constexpr int unit_bytes() const { return scale_bytes + unit * vectors * 64; }
};

constexpr FormTraits kForms[] = {
    {"F32", 1, 4, 0, 0, 0},        {"F16", 1, 2, 0, 0, 0},        {"BF16", 1, 2, 0, 0, 0},
    {"Q4_0", 32, 18, 2, 64, 4},    {"Q4_1", 32, 20, 1, 64, 4},    {"Q5_0", 32, 22, 2, 64, 5},
    {"Q5_1", 32, 24, 1, 64, 5},    {"Q8_0", 32, 34, 2, 64, 8},    {"Q4_K", 256, 144, 8, 256, 4},
    {"Q5_K", 256, 176, 8, 256, 5}, {"Q6_K", 256, 210, 8, 320, 6},
};

[[gnu::always_inline]] constexpr inline const FormTraits& traits(Form f) { return kForms[int(f)]; }

struct Weight {
    Form form;
    int rows;              // outputs
    int cols;              // k
    Memory memory;

    [[gnu::always_inline]] int panels() const { return (rows + kLanes - 1) / kLanes; }
    [[gnu::always_inline]] size_t panel_bytes() const {
        const FormTraits& t = traits(form);
        if (t.dense()) return (size_t(cols) * t.file_bytes * kLanes + 63) / 64 * 64;
        const int blocks = cols / 32;
        return size_t((blocks + t.unit - 1) / t.unit) * t.scale_bytes + size_t(blocks) * t.vectors * 64;
    }
    [[gnu::always_inline]] uint8_t* panel(int p) const { return memory.data() + p * panel_bytes(); }
    [[gnu::always_inline]] uint8_t* scales(int panel_number, int block) const {
        return panel(panel_number) + size_t(block / traits(form).unit) * traits(form).unit_bytes();
    }
    [[gnu::always_inline]] uint8_t* planes(int panel_number, int block) const {
        const FormTraits& t = traits(form);
        return scales(panel_number, block) + t.scale_bytes + size_t(block % t.unit) * t.vectors * 64;
    }
};

class Pool;

// Packs file bytes (rows x cols of the GGUF type, row after row). Throws std::invalid_argument on a size that does not fit.
Weight pack_weight(Form form, int rows, int cols, const uint8_t* data, size_t bytes, Pool& pool);

// As Q4_0, at a loss. Throws std::invalid_argument if the columns are not in blocks of 32.
Weight narrow_weight(const Weight& w, Pool& pool);

// out[cols] = row `row`, dequantised as docs/numerics.md says.
void dequantize_row(const Weight& w, int row, float* out);

}  // namespace mill
