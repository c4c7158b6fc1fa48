// How keys and values lie in the KV pool.
//
// The pool is [slot][frame][bytes of a head's frame]: each (layer, kv head) pair of a group has a slot, and frames of a page are consecutive, so
// that a page is one contiguous run per pair. A head's frame holds 8 positions: keys, values, then scales.
//   keys    bf16  [head_dim / 2][8 positions][2 dims]               one load gives a pair of dims for 8 positions
//           int8  [head_dim / 4][8 positions][4 dims]               128 is added
//           int4  [head_dim / 8][8 positions][4 dims]               8 is added; dims 8i to 8i + 3 in the low nibbles, 8i + 4 to 8i + 7 in the high ones
//   values  bf16  [4 pairs of positions][head_dim][2 positions]
//           int8  [2 quads of positions][head_dim][4 positions]     128 is added
//           int4  [2 quads of positions][blocks of 32 dims][16][4 positions]   the first half of a block in the low nibbles
//   scales  bf16  keys: [groups][8 positions]; values: [groups][8 positions], of int4 [groups][scale, minimum][8 positions]
#pragma once

#include "common.h"

namespace mill {

enum class KVType : int { Bf16, Int8, Int4 };

#define MILL_INLINE [[gnu::always_inline]]

struct PageFormat {
    int head_dim;
    KVType key, value;
    int group;               // dims that share a scale: a multiple of 32, or head_dim if that is less

    MILL_INLINE int groups() const { return (head_dim + group - 1) / group; }
    MILL_INLINE size_t value_row() const { return value == KVType::Int4 ? size_t(head_dim + 31) / 32 * 64 : size_t(head_dim) * 4; }   // of a quad of positions; not for bf16
    MILL_INLINE size_t values_at() const { return size_t(head_dim) * (key == KVType::Bf16 ? 16 : key == KVType::Int8 ? 8 : 4); }
    MILL_INLINE size_t key_scales_at() const { return values_at() + (value == KVType::Bf16 ? size_t(head_dim) * 16 : 2 * value_row()); }
    MILL_INLINE size_t value_scales_at() const { return key_scales_at() + (key == KVType::Bf16 ? 0 : size_t(groups()) * 16); }
    MILL_INLINE size_t value_scale_bytes() const { return value == KVType::Bf16 ? 0 : value == KVType::Int8 ? 16 : 32; }              // of a group
    MILL_INLINE size_t head_bytes() const { return value_scales_at() + groups() * value_scale_bytes(); }

    // A head of a query: bf16, or for integer keys two digits s8 [2][head_dim], steps f32 [groups] and what sums of products begin with, s32 [groups][2].
    MILL_INLINE size_t query_bytes() const { return key == KVType::Bf16 ? size_t(head_dim) * 2 : (size_t(head_dim) * 2 + size_t(groups()) * 12 + 15) / 16 * 16; }
};

}  // namespace mill
