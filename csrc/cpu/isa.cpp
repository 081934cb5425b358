#include "cpu/isa.h"

#include <atomic>
#include <stdexcept>

namespace nibblelm {

#if defined(NIBBLE_X86)
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avxvnni {
void quantized_linear(const QuantizedLinearArgs&);  // everything else is AVX2's
}
#endif
namespace portable {
extern const Kernels kernels;
}

namespace {

struct Isa {
  const char* name;
  Kernels table;
};

#if defined(NIBBLE_X86)
// __builtin_cpu_supports does not know AVX-VNNI in every compiler that we build with: CPUID 7.1, EAX bit 4.
bool has_avx_vnni() {
  uint32_t eax = 7, ebx = 0, ecx = 1, edx = 0;
  asm volatile("cpuid" : "+a"(eax), "+b"(ebx), "+c"(ecx), "+d"(edx));
  return (eax >> 4 & 1) != 0;
}
#endif

const std::vector<Isa>& isas() {
  static const std::vector<Isa> found = [] {
    std::vector<Isa> list;
#if defined(NIBBLE_X86)
    // These builtins check that the operating system saves the registers too.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    if (avx512) list.push_back({"avx512", avx512::kernels});
    if (avx2 && has_avx_vnni()) {
      list.push_back({"avxvnni", avx2::kernels});
      list.back().table.quantized_linear = avxvnni::quantized_linear;
    }
    if (avx2) list.push_back({"avx2", avx2::kernels});
#endif
    list.push_back({"portable", portable::kernels});
    return list;
  }();
  return found;
}

std::atomic<const Isa*> chosen{nullptr};

const Isa& current() {
  const Isa* isa = chosen.load(std::memory_order_acquire);
  return isa != nullptr ? *isa : isas().front();
}

}  // namespace

const Kernels& kernels() { return current().table; }

std::string isa() { return current().name; }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas()) names.emplace_back(isa.name);
  return names;
}

void set_isa(const std::string& name) {
  for (const Isa& isa : isas()) {
    if (name == isa.name) {
      chosen.store(&isa, std::memory_order_release);
      return;
    }
  }
  std::string known;
  for (const Isa& isa : isas()) known += std::string(known.empty() ? "" : ", ") + isa.name;
  throw std::invalid_argument("instruction set '" + name + "' is not available here; there are: " + known);
}

}  // namespace nibblelm
