// How a weight matrix lies in memory.
//
// A panel is 16 outputs. Its bytes are a scale area and a quant area, both 64-byte aligned; panels follow each other. A vector is
// 64 bytes: 16 outputs x 4 consecutive k (a quad), one byte each, which is what a 4-way byte dot product takes. A block of 32 k is
// 8 quads, j = 0…7.
//
//   low plane   4 vectors a block: vector j holds quad j in the low nibbles and quad j + 4 in the high ones
//   bit plane   1 vector a block (5-bit forms): bit j of a byte is bit 4 of quad j's value
//   crumb plane 2 vectors a block (6-bit form): bits 2(j % 4)…+1 of vector j / 4 are bits 4…5 of quad j's value
//   byte plane  8 vectors a block (8-bit form): vector j is quad j, value + 128
//
// Scale area, per block of 32:           d f16[16], and m f16[16] for the forms with a minimum
// K forms, per superblock of 256:        Q4K, Q5K: d f16[16], dmin f16[16], 12 rows of packed 6-bit scales as in the file, u8[12][16]
//                                        Q6K: d f16[16], sub-scales s8[16][16] (one row of 16 outputs per 16 k)
// Dense forms have no scale area: [k][16] values.
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
    int scale_bytes;       // scale area per group and panel
    int quant_bytes;       // quant area per group and panel
    bool dense() const { return group == 1; }
};

constexpr FormTraits kForms[] = {
    {"F32", 1, 4, 0, 64},        {"F16", 1, 2, 0, 32},        {"BF16", 1, 2, 0, 32},
    {"Q4_0", 32, 18, 32, 256},   {"Q4_1", 32, 20, 64, 256},   {"Q5_0", 32, 22, 32, 320},
    {"Q5_1", 32, 24, 64, 320},   {"Q8_0", 32, 34, 32, 512},   {"Q4_K", 256, 144, 256, 2048},
    {"Q5_K", 256, 176, 256, 2560}, {"Q6_K", 256, 210, 288, 3072},
};

[[gnu::always_inline]] inline const FormTraits& traits(Form f) { return kForms[int(f)]; }

struct Weight {
    Form form;
    int rows;              // outputs
    int cols;              // k
    Memory memory;

    [[gnu::always_inline]] int panels() const { return (rows + kLanes - 1) / kLanes; }
    [[gnu::always_inline]] int groups() const { return cols / traits(form).group; }
    [[gnu::always_inline]] size_t scale_bytes() const { return (size_t(groups()) * traits(form).scale_bytes + 63) / 64 * 64; }
    [[gnu::always_inline]] size_t panel_bytes() const { return (scale_bytes() + size_t(groups()) * traits(form).quant_bytes + 63) / 64 * 64; }
    [[gnu::always_inline]] const uint8_t* panel(int p) const { return memory.data() + p * panel_bytes(); }
};

class Pool;

// Packs file bytes (rows x cols of the GGUF type, row after row). Throws std::invalid_argument on a size that does not fit.
Weight pack_weight(Form form, int rows, int cols, const uint8_t* data, size_t bytes, Pool& pool);

// out[cols] = row `row`, dequantised as docs/numerics.md says.
void dequantize_row(const Weight& w, int row, float* out);

}  // namespace mill
