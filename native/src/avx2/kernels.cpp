#include "kernels.h"
#include "simd.h"

#define MILL_VARIANT "avx2"
#include "../generic.inl"

const mill::Kernels& mill::avx2_kernels() { return kTable; }
