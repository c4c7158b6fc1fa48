#include "ceilings.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mill {
namespace {

// Independent chains: more than any current core needs to hide the latency of its multiply-add.
constexpr int kChains = 12;

// Operations of one loop are written down by it, so that a variant may do more of them per round than another.
struct Loop {
    const char* variant;
    int64_t operations;   // per round
    void (*run)(int64_t rounds);
};

template <class T> inline void keep(const T& value) { asm volatile("" : : "m"(value) : "memory"); }

#if defined(__x86_64__)

#define CHAIN _Pragma("GCC unroll 12") for (int i = 0; i < kChains; ++i)
// Hides a register's value from the compiler, which otherwise sees that all chains are the same, or a sum that it knows.
#define HIDE(x) { auto hidden = x; asm volatile("" : "+v"(hidden)); x = hidden; }

[[gnu::target("avx512f,avx512vnni")]] void int8_avx512(int64_t rounds) {
    __m512i acc[kChains], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
    CHAIN { acc[i] = _mm512_setzero_si512(); HIDE(acc[i]) }
    for (int64_t r = 0; r < rounds; ++r) {
        HIDE(a)
        CHAIN acc[i] = _mm512_dpbusd_epi32(acc[i], a, b);
    }
    CHAIN HIDE(acc[i])
}

[[gnu::target("avx512f,avx512bf16")]] void bf16_avx512(int64_t rounds) {
    __m512i a = _mm512_set1_epi16(0x3f80), b = _mm512_set1_epi16(0x3c00);   // 1 and 2^-7
    __m512 acc[kChains];
    CHAIN { acc[i] = _mm512_setzero_ps(); HIDE(acc[i]) }
    for (int64_t r = 0; r < rounds; ++r) {
        HIDE(a)
        CHAIN acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)a, (__m512bh)b);
    }
    CHAIN HIDE(acc[i])
}

[[gnu::target("avx2")]] void int8_avx2(int64_t rounds) {
    __m256i acc[kChains], a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5);
    const __m256i ones = _mm256_set1_epi16(1);
    CHAIN acc[i] = _mm256_setzero_si256();
    for (int64_t r = 0; r < rounds; ++r) CHAIN {
        HIDE(a)
        acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    }
    CHAIN HIDE(acc[i])
}

[[gnu::target("avx2,fma")]] void bf16_avx2(int64_t rounds) {
    __m256 acc[kChains], a = _mm256_set1_ps(1), b = _mm256_set1_ps(0.0078125f);
    CHAIN { acc[i] = _mm256_setzero_ps(); HIDE(acc[i]) }
    for (int64_t r = 0; r < rounds; ++r) {
        HIDE(a)
        CHAIN acc[i] = _mm256_fmadd_ps(a, b, acc[i]);
    }
    CHAIN HIDE(acc[i])
}

#undef HIDE
#undef CHAIN

#endif

constexpr int kBytes = 1024, kFloats = 32;

void int8_portable(int64_t rounds) {
    alignas(64) int8_t a[kBytes], b[kBytes];
    std::memset(a, 3, sizeof a);
    std::memset(b, 5, sizeof b);
    int32_t sum = 0;
    for (int64_t r = 0; r < rounds; ++r) {
        keep(a);
        for (int i = 0; i < kBytes; ++i) sum += a[i] * b[i];
        sum &= 0xffff;
    }
    keep(sum);
}

void bf16_portable(int64_t rounds) {
    float acc[kFloats] = {}, a = 1, b = 0.0078125f;
    for (int64_t r = 0; r < rounds; ++r) {
        asm volatile("" : "+m"(a), "+m"(b));
        for (int k = 0; k < 64; ++k)
            for (float& x : acc) x = x * a + b;
    }
    keep(acc);
}

constexpr Loop kInt8[] = {
#if defined(__x86_64__)
    {"avx512", kChains * 64 * 2, int8_avx512},
    {"avx2", kChains * 32 * 2, int8_avx2},
#endif
    {"portable", kBytes * 2, int8_portable},
};

constexpr Loop kBf16[] = {
#if defined(__x86_64__)
    {"avx512", kChains * 32 * 2, bf16_avx512},
    {"avx2", kChains * 8 * 2, bf16_avx2},
#endif
    {"portable", kFloats * 64 * 2, bf16_portable},
};

struct Narrow { typedef uint64_t Vector __attribute__((vector_size(16), aligned(1), may_alias)); };
struct Wide { typedef uint64_t Vector __attribute__((vector_size(32), aligned(1), may_alias)); };
struct Widest { typedef uint64_t Vector __attribute__((vector_size(64), aligned(1), may_alias)); };

// Wider registers read a little faster. What is left at the end of the data (less than 256 bytes) is not read.
template <class Register> [[gnu::always_inline]] inline uint64_t fold(const uint8_t* data, size_t bytes) {
    using V = typename Register::Vector;
    constexpr int kVectors = 4;
    V sum[kVectors] = {};
    for (size_t at = 0; at + sizeof sum <= bytes; at += sizeof sum) {
        _Pragma("GCC unroll 4") for (int i = 0; i < kVectors; ++i) sum[i] ^= *reinterpret_cast<const V*>(data + at + i * sizeof(V));
    }
    uint64_t lanes[sizeof sum / 8], all = 0;
    std::memcpy(lanes, &sum, sizeof sum);
    for (uint64_t lane : lanes) all ^= lane;
    return all;
}

uint64_t read_portable(const uint8_t* data, size_t bytes) { return fold<Narrow>(data, bytes); }
#if defined(__x86_64__)
[[gnu::target("avx2")]] uint64_t read_avx2(const uint8_t* data, size_t bytes) { return fold<Wide>(data, bytes); }
[[gnu::target("avx512f")]] uint64_t read_avx512(const uint8_t* data, size_t bytes) { return fold<Widest>(data, bytes); }
#endif

struct Reading {
    const char* variant;
    uint64_t (*run)(const uint8_t* data, size_t bytes);
};

constexpr Reading kRead[] = {
#if defined(__x86_64__)
    {"avx512", read_avx512},
    {"avx2", read_avx2},
#endif
    {"portable", read_portable},
};

template <class T, size_t n> const T& of_variant(const T (&loops)[n], const std::string& variant) {
    for (const T& loop : loops)
        if (variant == loop.variant) return loop;
    throw std::invalid_argument("[ceilings] no loop for the kernel variant '" + variant + "'");
}

double multiply(const Loop& loop, Pool& pool, int64_t rounds) {
    pool.parallel(pool.threads(), [&](int begin, int end) {
        for (int i = begin; i < end; ++i) loop.run(rounds);
    });
    return double(loop.operations) * double(rounds) * pool.threads();
}

}  // namespace

double run_int8(Pool& pool, const std::string& variant, int64_t rounds) { return multiply(of_variant(kInt8, variant), pool, rounds); }
double run_bf16(Pool& pool, const std::string& variant, int64_t rounds) { return multiply(of_variant(kBf16, variant), pool, rounds); }

uint64_t run_read(Pool& pool, const std::string& variant, const uint8_t* data, size_t bytes) {
    constexpr size_t kChunk = size_t(1) << 20;
    const Reading& reading = of_variant(kRead, variant);
    std::atomic<uint64_t> sum{0};
    pool.parallel(int((bytes + kChunk - 1) / kChunk), [&](int begin, int end) {
        const size_t from = size_t(begin) * kChunk, to = std::min(bytes, size_t(end) * kChunk);
        sum.fetch_xor(reading.run(data + from, to - from), std::memory_order_relaxed);
    });
    return sum;
}

}  // namespace mill
