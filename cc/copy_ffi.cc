// The XLA FFI handler `jax_ring_copy`: its result is its operand.
#include <cstdint>

#include "copy.h"
#include "ffi_text.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring {
namespace {

namespace ffi = xla::ffi;

template <typename T>
ffi::Error Mismatch(const char* what, const T& operand, const T& result) {
  return ffi::Error::InvalidArgument(
      Concatenate("jax_ring_copy: the operand has ", what, " ", operand, ", the result ", result));
}

std::int64_t Bytes(const ffi::AnyBuffer& buffer) {
  return static_cast<std::int64_t>(buffer.size_bytes());
}

bool SameShape(ffi::AnyBuffer::Dimensions a, ffi::AnyBuffer::Dimensions b) {
  if (a.size() != b.size()) return false;
  for (std::uint64_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

ffi::Error Copy(ffi::AnyBuffer operand, ffi::Result<ffi::AnyBuffer> result) {
  if (operand.element_type() != result->element_type()) {
    return Mismatch("dtype", operand.element_type(), result->element_type());
  }
  if (!SameShape(operand.dimensions(), result->dimensions())) {
    return Mismatch("shape", Text(operand.dimensions()), Text(result->dimensions()));
  }
  if (!CopyBytes(operand.untyped_data(), Bytes(operand), result->untyped_data(), Bytes(*result))) {
    return Mismatch("size in bytes", Bytes(operand), Bytes(*result));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_ring

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxRingCopy, jax_ring::Copy,
    xla::ffi::Ffi::Bind().Arg<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>());
