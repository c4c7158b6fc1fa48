// What a kernel variant offers. Each variant compiles src/generic.inl over its own SIMD layer and fills one table.
#pragma once

#include "page_format.h"
#include "weight_format.h"

namespace mill {

// Rows of activations, quantised per block of 32 (docs/numerics.md). neg sums are minus the sums of q over 16 and 32 elements.
// Wide blocks have a second term; they are listed in order, and only as many entries as the row has wide blocks are meaningful.
struct QuantRows {
    int cols;
    int8_t* q;             // [rows][cols]
    float *d, *s;          // [rows][cols / 32]
    int32_t *neg16, *neg32;      // [rows][cols / 16], [rows][cols / 32]
    int32_t* wide;         // [rows]: number of wide blocks
    uint16_t* wide_block;  // [rows][cols / 32]: which
    int8_t* wide_q;        // [rows][cols]
    float* wide_d;         // [rows][cols / 32]
    int32_t *wide_neg16, *wide_neg32;
};

// Where a linear op's results go: out[row * stride + n] for output n.
struct Out {
    float* out;
    size_t stride;
    const float* bias;   // per output, or null
    bool accumulate;
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

enum class Activation : int { Silu, GeluTanh };

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

struct Kernels {
    const char* name;
    int attend_rows;             // rows that attend_cut likes to take at once, at most kMaxAttendRows

    void (*quantize)(const float* x, int row, const QuantRows& to);
    void (*rms_norm)(const float* x, const float* w, float eps, int n, float* y);
    void (*add)(float* x, const float* y, int n);
    void (*gated)(Activation kind, const float* gate, const float* up, int n, float* y);
    // Panels [panel, panel + count), count <= 2, of a quantised weight for rows [row, row + rows). scratch: scratch_bytes(cols).
    void (*linear_quant)(const Weight& w, int panel, int count, const QuantRows& x, int row, int rows, const Out& out, uint8_t* scratch);
    void (*linear_dense)(const Weight& w, int panel, int count, const float* x, size_t x_stride, int row, int rows, const Out& out);
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

inline size_t scratch_bytes(int cols) { return 2 * (size_t(cols) * 16 + size_t(cols / 16) * 64 * 2); }

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

}  // namespace mill
