// The XLA FFI handlers that do no arithmetic: `jax_ring_room`, whose result is whatever lies in the
// memory that it gets, and `jax_ring_after`, whose result is its first operand, in place.
#include <cstddef>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace jax_ring {
namespace {

namespace ffi = xla::ffi;

// New memory comes in pages of 4 KiB, each of which costs a fault. Where the kernel gives huge ones
// to those who ask, there are 512 times fewer. Only a hint: if it fails, nothing is lost.
void AskForHugePages(void* data, std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr std::uintptr_t kHuge = std::uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge;
  const std::uintptr_t last = (begin + bytes) / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// The operands only say what must have been computed before the memory is taken.
ffi::Error Room(ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result) {
  AskForHugePages(result->untyped_data(), result->size_bytes());
  return ffi::Error::Success();
}

ffi::Error After(ffi::AnyBuffer value, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result) {
  if (value.untyped_data() != result->untyped_data()) {
    return ffi::Error::InvalidArgument("jax_ring_after: its result must alias its first operand");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_ring

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxRingRoom, jax_ring::Room,
    xla::ffi::Ffi::Bind().RemainingArgs().Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxRingAfter, jax_ring::After,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>());
