#include "kernels.h"
#include "simd.h"

#define MILL_VARIANT "portable"
#include "../generic.inl"

const mill::Kernels& mill::portable_kernels() { return kTable; }
