#include "kernels.h"
#include "simd.h"

#define MILL_VARIANT "avx512"
#include "../generic.inl"

const mill::Kernels& mill::avx512_kernels() { return kTable; }
