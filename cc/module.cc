// The Python module jax_ring._native: hands XLA's handlers to Python. It links nothing of jaxlib.
#include <nanobind/nanobind.h>

#include <type_traits>

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxRingCopy);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxRingRoom);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxRingAfter);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxRingChunkEncode);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxRingChunkReduce);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxRingChunkDecode);

namespace nb = nanobind;

namespace {

template <typename Handler>
nb::capsule Capsule(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>,
                "not a typed XLA FFI handler");
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict handlers;
  handlers["jax_ring_copy"] = Capsule(JaxRingCopy);
  handlers["jax_ring_room"] = Capsule(JaxRingRoom);
  handlers["jax_ring_after"] = Capsule(JaxRingAfter);
  handlers["jax_ring_chunk_encode"] = Capsule(JaxRingChunkEncode);
  handlers["jax_ring_chunk_reduce"] = Capsule(JaxRingChunkReduce);
  handlers["jax_ring_chunk_decode"] = Capsule(JaxRingChunkDecode);
  return handlers;
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "XLA FFI handlers of jax_ring; see jax_ring.native.";
  module.def("registrations", &Registrations, "Target name to capsule of the handler.");
  module.def(
      "ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "The (major, minor) version of the XLA FFI API this was compiled against.");
}
