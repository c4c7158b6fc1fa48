#include "bind.h"

NB_MODULE(_native, m) {
    m.doc() = "tokenmill's kernels: packed weights, the paged forward pass, the thread pool.";
    bind_pool(m);
    bind_weight(m);
    bind_tape(m);
    bind_sample(m);
    bind_ceilings(m);
    bind_suffix(m);
    bind_frames(m);
}
