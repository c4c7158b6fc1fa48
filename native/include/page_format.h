// How keys and values lie in the KV pool.
//
// The pool is [layer][frame][kv head][bytes of a head's frame]; frames of a page are consecutive, so a page is one contiguous run
// per layer. A head's frame holds 8 positions, bf16:
//   keys    [head_dim / 2][8 positions][2 dims]      one load gives a pair of dims for 8 positions
//   values  [4 pairs of positions][head_dim][2 positions]
#pragma once

#include "common.h"

namespace mill {

struct PageFormat {
    int layers, kv_heads, head_dim;

    size_t key_bytes() const { return size_t(kFrame) * head_dim * 2; }
    size_t head_bytes() const { return 2 * key_bytes(); }
    size_t frame_bytes() const { return head_bytes() * kv_heads; }       // of one layer
    size_t layer_bytes(int frames) const { return frame_bytes() * frames; }
};

}  // namespace mill
