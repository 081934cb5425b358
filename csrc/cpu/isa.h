// Choice of instruction set at run time.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace nibblelm {

const Kernels& kernels();  // of the chosen instruction set

// Best first: "avx512" (with VNNI), "avxvnni" (AVX2 with VNNI), "avx2" (with FMA), "portable".
std::vector<std::string> available_isas();
std::string isa();
void set_isa(const std::string& name);  // throws std::invalid_argument if it is not available

}  // namespace nibblelm
