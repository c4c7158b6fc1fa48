// What a kernel variant offers. Each variant compiles src/generic.inl over its own SIMD layer and fills one table.
#pragma once

#include "page_format.h"
#include "weight_format.h"

namespace mill {

// An element above this many times its row's root mean square is an outlier (docs/numerics.md).
constexpr float kOutlier = 3.5f;

// Rows are taken in tiles of eight, but for a step of few rows, which are one tile: a panel is unpacked once for each tile.
constexpr int kTile = 8, kFewRows = 10;
[[gnu::always_inline]] constexpr inline int tile_height(int rows) { return rows <= kFewRows ? kFewRows : kTile; }
[[gnu::always_inline]] constexpr inline int tiles_of(int rows) { return (rows + tile_height(rows) - 1) / tile_height(rows); }

// A row of floats in runs of 16 columns, `step` floats apart.
struct Row {
    float* x;
    size_t step;
    [[gnu::always_inline]] float* at(size_t col) const { return x + col / kLanes * step; }   // col: a multiple of 16
    [[gnu::always_inline]] Row from(size_t col) const { return {at(col), step}; }
};

// Float activations in tiles, [width / 16][n][16] each: what a panel of weights gives for a tile is one run of memory, and
// so is a step over the columns for all rows of a tile. The width is a multiple of 16. Plain: row after row instead.
struct Rows {
    float* data;
    size_t width;
    bool plain;
    int rows;
    [[gnu::always_inline]] int tiles() const { return tiles_of(rows); }
    [[gnu::always_inline]] int tile_rows(int tile) const {
        const int height = tile_height(rows), left = rows - tile * height;
        return left < height ? left : height;
    }
    [[gnu::always_inline]] float* tile(int tile) const { return data + size_t(tile) * tile_height(rows) * width; }
    [[gnu::always_inline]] Row row(int r) const {
        if (plain) return {data + size_t(r) * width, kLanes};
        const int at = r / tile_height(rows);
        return {tile(at) + r % tile_height(rows) * kLanes, size_t(tile_rows(at)) * kLanes};
    }
};

// A tile of activations, quantised per block of 32 and interleaved, so that a kernel reads it as one stream.
// A record is a block of all n rows: q s8[n][32], d f32[n], s f32[n], and minus the sums of q over the block and over its first half, s32[n] each.
// Outliers are kept apart, ascending; rows with fewer than `slots` are filled up with x = 0 at column 0.
struct QuantTile {
    int n, cols, slots;
    uint8_t* records;      // [cols / 32][n * kRecordBytes]
    uint64_t* used;        // bit k: some row has an outlier at k
    uint32_t* at;          // [n][stride]: 16 (k + 1)
    float* x;              // [n][stride]
    size_t stride;
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
    uint64_t stamp;        // differs from that of all other inputs

    // More outliers than cols / 12 would by themselves exceed the row's sum of squares; they are written 16 at a time.
    [[gnu::always_inline]] static constexpr int stride(int cols) { return cols / 12 + 1 + kLanes; }
    [[gnu::always_inline]] static constexpr int words(int cols) { return (cols + 63) / 64; }
    [[gnu::always_inline]] int tiles() const { return tiles_of(rows); }
    [[gnu::always_inline]] QuantTile tile(int t) const {
        const int height = tile_height(rows), left = rows - t * height;
        const size_t row = size_t(t) * height, slot = row * stride(cols);
        return {left < height ? left : height, cols, slots[t], records + row * (cols / 32) * kRecordBytes,
                used + size_t(t) * words(cols), at + slot, x + slot, size_t(stride(cols))};
    }
};
static_assert(kOutlier * kOutlier > 12);

enum class Activation : int { Silu, GeluTanh };

// What becomes of a linear op's result y for output n: column first + n of `to`.
struct Out {
    enum Kind { Store, Add, Gate };   // y, old + y, activation(old) * y
    Rows to;
    size_t first;
    const float* bias;                // per output, or null
    Kind kind;
    Activation activation;
};

// A row of attention at absolute position hi - 1. It sees positions [lo, hi) in early runs and [recent, hi) in the others.
struct VisibleRow {
    const uint8_t* q;    // a head of a query (page_format.h)
    int lo, recent, hi;
};

// Frames [first, last) of a cut, all of which are there. A tile of 16 positions, which is two frames, is never part of two runs.
struct Run {
    int first, last;
    bool early;          // before the gap of a streaming head
};

// What there is of a cut for the rows of a kv head.
struct Cut {
    static constexpr int kFrames = kCut / kFrame, kAhead = 8192;
    int number, runs;
    const uint8_t* next;              // kAhead bytes that are likely to be read after the cut, or null
    Run run[kFrames / 2 + 2];
    const uint8_t* frames[kFrames];   // a head's bytes; only those in runs
};

// Result of a cut for up to kMaxAttendRows rows. l is 0 where a row sees nothing of the cut.
constexpr int kMaxAttendRows = 8;
struct CutResult {
    float m[kMaxAttendRows], l[kMaxAttendRows];
    float* o;            // [rows][head_dim]
};

struct AttendScratch {
    alignas(64) float score[kMaxAttendRows][kCut];   // p, in the end, if values are integers
    alignas(64) uint16_t p[kMaxAttendRows][kCut];    // or digits of weights, s8 [2][kCut]
    alignas(64) float scale[kCut], minimum[kCut];    // of integer values of a group
};

struct RotateArgs {
    PageFormat page;
    Row qkv;                     // [q | k | v]
    const float *cos, *sin;      // [head_dim / 2]
    const float *q_norm, *k_norm; // [head_dim] or null
    const float *factor, *zero;  // [kv_heads][head_dim], of integer keys
    float eps, scale;
    int heads, kv_heads;
    bool interleaved;
    uint8_t* q;                  // [heads]
    uint8_t* const* frames;      // [kv_heads]: that which holds the row's position
    int slot;                    // position within the frame
};

// Where a column of a weight lies in a panel of its form, as byte offsets and shifts. high: of the plane with the fifth and sixth bits.
struct ColumnPlace {
    uint32_t k, unit, vector, high;
    uint8_t shift, high_shift, block, half;   // block: within its unit
};

// For a thread's linear ops, whose inputs have up to `cols` elements.
struct LinearScratch {
    float* columns;        // [1 + cols][16]: a panel's columns with outliers, that of element k at k + 1; the first stays 0
    ColumnPlace* places;   // [cols]: of those columns in a panel of `form`, for the input with that stamp
    int count = 0;
    Form form = Form::F32;
    uint64_t stamp = 0;
};

// Frames that the next attention reads, which a linear op of many rows fetches while it computes: it waits for arithmetic, and attention for
// memory. The panels of all linear ops up to the attention make a run of `span` bytes, in which this op's begin at `begin`; in a tile of rows that
// leaves memory time for it (ahead_of in linear_quant.inl), a panel fetches as many bytes of the frames as it has itself.
struct FetchFrame {
    int32_t head, frame;
};

struct Fetch {
    uint8_t* const* slots;       // of each kv head
    const FetchFrame* frames;
    int count;
    size_t head_bytes, begin, span;
    // What byte `at` of the op's panels fetches for the t-th of those tiles, or null: nothing.
    [[gnu::always_inline]] const uint8_t* source(size_t at, int t) const {
        const size_t byte = t * span + begin + at;
        if (byte >= count * head_bytes) return nullptr;
        const FetchFrame& f = frames[byte / head_bytes];
        return slots[f.head] + size_t(f.frame) * head_bytes + byte % head_bytes / 64 * 64;
    }
};

struct Kernels {
    const char* name;
    int attend_rows;             // rows that attend_cut likes to take at once, at most kMaxAttendRows

    // A tile of activations, normed first if there is a norm; returns the number of slots of outliers.
    int (*quantize)(const float* x, const float* norm, float eps, const QuantTile& to);
    // Of a tile of n rows; y may be x.
    void (*rms_norm)(const float* x, const float* w, float eps, int n, int cols, float* y);
    void (*add)(float* x, const float* y, int n);
    // Panels [panel, end) of a weight for all rows of x.
    void (*linear_quant)(const Weight& w, int panel, int end, const QuantRows& x, const Out& out, const Fetch& fetch, LinearScratch& scratch);
    void (*linear_dense)(const Weight& w, int panel, int end, const Rows& x, const Out& out);
    void (*rotate_store)(const RotateArgs& a);
    // One cut for n rows of one kv head.
    void (*attend_cut)(const PageFormat& page, const VisibleRow* rows, int n, const Cut& cut, AttendScratch& scratch, CutResult& out);
    // Adds to frames[i] what the rows, whose maximum and sum over all cuts are m and l, weigh the positions of the cut's frame i.
    void (*weigh_frames)(const PageFormat& page, const VisibleRow* rows, int n, const Cut& cut, AttendScratch& scratch, const float* m, const float* l, int64_t* frames);
    // Folds `cut` into `total` (rows x head_dim); a total with l = 0 is empty.
    void (*merge_cut)(CutResult& total, const CutResult& cut, int rows, int head_dim);
    void (*finish)(const CutResult& total, int row, int head_dim, const Row& out);

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
