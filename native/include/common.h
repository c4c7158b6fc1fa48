// Small conversions and containers that every native file uses. No SIMD here: this header is compiled for the baseline CPU only. Nor functions of
// the standard library where a kernel variant would leave its own copy of them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

namespace mill {

constexpr int kLanes = 16;   // outputs of a weight panel, partial sums of a long reduction
constexpr int kFrame = 8;    // token positions of a KV frame
constexpr int kCut = 512;    // token positions of an attention cut

[[gnu::always_inline]] inline float bf16_to_f32(uint16_t v) { return __builtin_bit_cast(float, uint32_t(v) << 16); }

[[gnu::always_inline]] inline float f16_to_f32(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 31;
    const uint32_t mantissa = h & 0x3ff;
    if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7f800000 | (mantissa << 13));
    if (exponent != 0) return __builtin_bit_cast(float, sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float magnitude = float(mantissa) * 0x1p-24f;  // subnormal: exact
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, magnitude));
}

// Zeroed memory, backed by 2 MiB pages where the system grants them. Pages become resident when first touched.
class Memory {
public:
    Memory() = default;
    explicit Memory(size_t bytes) : bytes_(bytes) {
        if (bytes) map(MAP_PRIVATE | MAP_ANONYMOUS, -1);
    }
    // Memory with a descriptor, by which other processes can map it for reading; the system's setting for shared memory says whether it gets
    // large pages. Nobody can resize it, nor map it for writing again. Throws std::system_error, std::bad_alloc.
    static Memory shared(size_t bytes);
    Memory(Memory&& other) noexcept { swap(other); }
    Memory& operator=(Memory&& other) noexcept { swap(other); return *this; }
    Memory(const Memory&) = delete;
    ~Memory() {
        if (data_) munmap(data_, mapped());
        if (descriptor_ >= 0) close(descriptor_);
    }

    [[gnu::always_inline]] uint8_t* data() const { return data_; }
    size_t size() const { return bytes_; }
    int descriptor() const { return descriptor_; }   // -1 unless it is shared
    template <class T> T* as() const { return reinterpret_cast<T*>(data_); }

private:
    static constexpr size_t kHuge = size_t(2) << 20;
    size_t mapped() const { return bytes_ >= kHuge ? (bytes_ + kHuge - 1) / kHuge * kHuge : bytes_; }
    void map(int flags, int descriptor) {
        void* p = mmap(nullptr, mapped(), PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, descriptor, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<uint8_t*>(p);
#ifdef MADV_HUGEPAGE
        if (bytes_ >= kHuge) madvise(data_, mapped(), MADV_HUGEPAGE);
#endif
    }
    void swap(Memory& o) { std::swap(data_, o.data_); std::swap(bytes_, o.bytes_); std::swap(descriptor_, o.descriptor_); }
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
    int descriptor_ = -1;
};

}  // namespace mill
