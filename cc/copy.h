// The work of the copy handler, free of XLA, so that it can be built and tested alone.
#ifndef JAX_RING_COPY_H_
#define JAX_RING_COPY_H_

#include <cstdint>
#include <cstring>

namespace jax_ring {

// Copies `source` to `target` if both hold the same number of bytes, else touches nothing and
// returns false. The two may be the same buffer, or overlap.
inline bool CopyBytes(const void* source, std::int64_t source_bytes, void* target,
                      std::int64_t target_bytes) noexcept {
  if (source_bytes != target_bytes || source_bytes < 0) return false;
  if (source_bytes == 0) return true;  // A null pointer is allowed here.
  if (source == nullptr || target == nullptr) return false;
  std::memmove(target, source, static_cast<std::uint64_t>(source_bytes));
  return true;
}

}  // namespace jax_ring

#endif  // JAX_RING_COPY_H_
