// Chooses among the copies of the chunk kernels. The build says which ones there are.
#include "chunk_reduce_cpu.h"

namespace jax_ring {

namespace baseline {
extern const Kernels kKernels;
}
#if defined(JAX_RING_HAS_AVX2)
namespace avx2 {
extern const Kernels kKernels;
}
#endif
#if defined(JAX_RING_HAS_AVX512)
namespace avx512 {
extern const Kernels kKernels;
}
#endif

// __builtin_cpu_supports also asks whether the system saves the wide registers. It reads words that
// were set before main: no lock, nothing to initialise.
const Kernels* KernelsAt(int index) noexcept {
  if (index == 0) return &baseline::kKernels;
#if defined(JAX_RING_HAS_AVX2)
  if (--index == 0) {
    const bool all = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return all ? &avx2::kKernels : nullptr;
  }
#endif
#if defined(JAX_RING_HAS_AVX512)
  if (--index == 0) {
    const bool all = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return all ? &avx512::kKernels : nullptr;
  }
#endif
  return nullptr;
}

const Kernels& BestKernels() noexcept {
  int last = 0;
  while (KernelsAt(last + 1) != nullptr) ++last;
  return *KernelsAt(last);
}

}  // namespace jax_ring
