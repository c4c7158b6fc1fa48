// Loops that do one thing as fast as this machine can: what benchmarks hold kernels against. Timing them is the caller's.
#pragma once

#include "pool.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace mill {

// Each thread multiplies and adds `rounds` times in registers, with the instructions that the variant uses. Return operations done by all
// threads together, a multiplication and an addition counting as two.
double run_int8(Pool& pool, const std::string& variant, int64_t rounds);
double run_bf16(Pool& pool, const std::string& variant, int64_t rounds);

// All threads together read the bytes (a multiple of 256) once. Returns a checksum, so that nobody can leave the reading out.
uint64_t run_read(Pool& pool, const std::string& variant, const uint8_t* data, size_t bytes);

}  // namespace mill
