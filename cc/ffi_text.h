// Texts of errors. Made only where a call fails: one that works allocates nothing.
#ifndef JAX_RING_FFI_TEXT_H_
#define JAX_RING_FFI_TEXT_H_

#include <cstdint>
#include <sstream>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_ring {

// "[2,3]".
inline std::string Text(xla::ffi::AnyBuffer::Dimensions dimensions) {
  std::string text = "[";
  for (std::int64_t dimension : dimensions) {
    if (text.size() > 1) text += ',';
    text += std::to_string(dimension);
  }
  return text + "]";
}

// All parts, as << prints them, one after the other.
template <typename... Parts>
std::string Concatenate(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace jax_ring

#endif  // JAX_RING_FFI_TEXT_H_
