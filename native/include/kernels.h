// What a kernel variant offers. Each variant compiles src/generic.inl over its own SIMD layer and fills one table.
#pragma once

#include "page_format.h"
#include "weight_format.h"

namespace mill {

// An element above this many times its row's root mean square is an outlier (docs/numerics.md).
constexpr float kOutlier = 3.5f;

// A tile of up to kTile rows of activations, quantised per block of 32 and interleaved, so that a kernel reads it as one stream.
// A record is a block of all n rows: q s8[n][32], d f32[n], s f32[n], and minus the sums of q over the block and over its first half, s32[n] each.
// Outliers are kept apart: slot i holds the i-th of every row, rows with fewer being filled up with x = 0 at column 0.
constexpr int kTile = 8;
struct QuantTile {
    int n, cols, slots;
    uint8_t* records;      // [cols / 32][n * kRecordBytes]
    uint64_t* used;        // bit k: some row has an outlier at k
    uint32_t* at;          // [slots][n]: k + 1
    float* x;              // [slots][n]
};
constexpr int kRecordBytes = 32 + 4 + 4 + 4 + 4;

// All rows of a linear op's input, in tiles.
struct QuantRows {
    int rows, cols;
    uint8_t* records;
    uint64_t* used;
    uint32_t* at;
    float* x;
    int* slots;            // [tiles]

    // More outliers than this would by themselves exceed the row's sum of squares.
    [[gnu::always_inline]] static constexpr int max_slots(int cols) { return cols / 12 + 1; }
    [[gnu::always_inline]] static constexpr int words(int cols) { return (cols + 63) / 64; }
    [[gnu::always_inline]] int tiles() const { return (rows + kTile - 1) / kTile; }
    [[gnu::always_inline]] QuantTile tile(int t) const {
        const size_t row = size_t(t) * kTile, slot = row * max_slots(cols);
        return {rows - int(row) < kTile ? rows - int(row) : kTile, cols, slots[t], records + row * (cols / 32) * kRecordBytes,
                used + size_t(t) * words(cols), at + slot, x + slot};
    }
};
static_assert(kOutlier * kOutlier > 12);

enum class Activation : int { Silu, GeluTanh };

// What becomes of a linear op's result y: out[row * stride + n] for output n.
struct Out {
    enum Kind { Store, Add, Gate };   // y, old + y, activation(old) * y
    float* out;
    size_t stride;
    const float* bias;                // per output, or null
    Kind kind;
    Activation activation;
};

struct VisibleRow {
    const uint16_t* q;   // bf16 [head_dim]
    int lo, hi;          // sees absolute positions [lo, hi)
};

// Result of a cut for up to kMaxAttendRows rows. l is 0 where a row sees nothing of the cut.
constexpr int kMaxAttendRows = 8;
struct CutResult {
    float m[kMaxAttendRows], l[kMaxAttendRows];
    float* o;            // [rows][head_dim]
};

struct AttendScratch {
    alignas(64) float score[kMaxAttendRows][kCut];
    alignas(64) uint16_t p[kMaxAttendRows][kCut];
};

struct RotateArgs {
    const float* qkv;            // one row [q | k | v]
    const float *cos, *sin;      // [head_dim / 2]
    const float *q_norm, *k_norm; // [head_dim] or null
    float eps, scale;
    int heads, kv_heads, head_dim;
    bool interleaved;
    uint16_t* q;                 // bf16 [heads][head_dim]
    uint8_t* frame;              // the layer's frame that holds the row's position
    int slot;                    // position within the frame
};

// Where a column of a weight lies in a panel of its form, as byte offsets and shifts. high: of the plane with the fifth and sixth bits.
struct ColumnPlace {
    uint32_t unit, vector, high;
    uint8_t shift, high_shift, block, half;   // block: within its unit
};

// For a thread's linear ops, whose inputs have up to `cols` elements.
struct LinearScratch {
    float* columns;        // [1 + cols][16]: a panel's columns with outliers, one after the other; the first stays 0
    ColumnPlace* places;   // [cols]: of those columns in a panel
    uint32_t* number;      // [1 + cols]: which column holds element k, at k + 1; the first stays 0
};

struct Kernels {
    const char* name;
    int attend_rows;             // rows that attend_cut likes to take at once, at most kMaxAttendRows

    // Row r of a tile. Its outliers go to slots 0… of the row; returns how many there are.
    int (*quantize)(const float* x, int r, const QuantTile& to);
    void (*rms_norm)(const float* x, const float* w, float eps, int n, float* y);
    void (*add)(float* x, const float* y, int n);
    // Panels [panel, end) of a weight for all rows of x.
    void (*linear_quant)(const Weight& w, int panel, int end, const QuantRows& x, const Out& out, const LinearScratch& scratch);
    void (*linear_dense)(const Weight& w, int panel, int end, const float* x, size_t x_stride, int rows, const Out& out);
    void (*rotate_store)(const RotateArgs& a);
    // One cut for `rows` rows of one kv head. frames[i] is the head's bytes of the cut's frame i; those outside [lo, hi) are not read.
    void (*attend_cut)(const VisibleRow* rows, int n, const uint8_t* const* frames, int cut, int head_dim, AttendScratch& scratch, CutResult& out);
    // Folds `cut` into `total` (rows x head_dim); a total with l = 0 is empty.
    void (*merge_cut)(CutResult& total, const CutResult& cut, int rows, int head_dim);
    void (*finish)(const CutResult& total, int row, int head_dim, float* out);

    float (*row_max)(const float* x, int n);
    double (*sum_exp)(const float* x, int n, float high);     // of exp(x - high)
    void (*exp2_scaled)(const float* x, int n, float scale, float offset, float* y);   // exp2(x * scale + offset)
};

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

}  // namespace mill
