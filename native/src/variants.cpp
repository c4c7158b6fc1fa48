#include "variants.h"

#include <stdexcept>

namespace mill {

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (avx2 && avx512) found.push_back(&avx512_kernels());
    if (avx2) found.push_back(&avx2_kernels());
#endif
    found.push_back(&portable_kernels());
    return found;
}

const Kernels& kernels_named(const std::string& name) {
    for (const Kernels* k : usable_kernels())
        if (name == k->name) return *k;
    throw std::invalid_argument("kernel variant '" + name + "' does not exist or this CPU cannot run it");
}

}  // namespace mill
