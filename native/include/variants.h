// Which kernel variants this CPU can run.
#pragma once

#include "kernels.h"

#include <string>
#include <vector>

namespace mill {

std::vector<const Kernels*> usable_kernels();   // fastest first
const Kernels& kernels_named(const std::string& name);

}  // namespace mill
