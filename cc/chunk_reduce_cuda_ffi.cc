// The XLA FFI handlers of the chunk kernels for CUDA: they check a call, and launch its kernels on XLA's
// stream. Compiled by the C++ compiler, so that nvcc sees no header of XLA.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "chunk_reduce.h"
#include "chunk_reduce_cuda.h"
#include "chunk_reduce_ffi.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring {
namespace {

cudaError_t RunEncode(cudaStream_t stream, const EncodeCall& call) {
  if (call.format.wire == Wire::kIdentity) {
    return cuda::TakeRows(stream, call.format, call.rows, call.buffer, call.messages);
  }
  return cuda::Encode(stream, call.format, call.rows, call.buffer, call.factor, call.seeds,
                      call.messages);
}

cudaError_t RunReduce(cudaStream_t stream, const ReduceCall& call) {
  if (call.format.wire == Wire::kIdentity) {
    return cuda::Combine(stream, call.format, call.rows, call.op, call.received, call.buffer,
                         call.results);
  }
  if (call.to_float) {
    return cuda::ReduceToFloat(stream, call.format, call.rows, call.received, call.buffer,
                               call.factor, static_cast<float*>(call.results));
  }
  return cuda::Reduce(stream, call.format, call.rows, call.received, call.buffer, call.factor,
                      call.seeds, call.results);
}

cudaError_t RunDecode(cudaStream_t stream, const DecodeCall& call) {
  if (call.result != call.buffer) {
    const std::int64_t bytes =
        call.rows.batch * call.rows.chunks * call.format.n * SizeOf(call.format.data);
    const cudaError_t error =
        cudaMemcpyAsync(call.result, call.buffer, static_cast<std::size_t>(bytes),
                        cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  if (call.format.wire == Wire::kIdentity) {
    return cuda::PutRows(stream, call.format, call.rows, call.messages, call.result);
  }
  return cuda::Decode(stream, call.format, call.rows, call.messages, call.result);
}

template <typename Call>
ffi::Error Run(const char* target, cudaStream_t stream, const ffi::ErrorOr<Call>& checked,
               cudaError_t (*run)(cudaStream_t, const Call&)) {
  if (!checked) return checked.error();
  const Call& call = *checked;
  if (IsEmpty(call.format, call.rows)) return ffi::Error::Success();
  if (call.rows.chunks == 0) {  // There is no row that an index could be clamped to.
    return ffi::Error::InvalidArgument(
        Concatenate(target, ": buffer has 0 chunks, but at least 1 is wanted"));
  }
  const cudaError_t error = run(stream, call);
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(Concatenate(target, ": CUDA: ", cudaGetErrorString(error), " (",
                                          cudaGetErrorName(error), ")"));
}

ffi::Error Encode(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::AnyBuffer row,
                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> message,
                  std::string_view wire, std::int64_t block, float factor) {
  return Run("jax_ring_chunk_encode", stream,
             CheckEncode(buffer, row, rest, message, wire, block, factor), RunEncode);
}

ffi::Error Reduce(cudaStream_t stream, ffi::AnyBuffer received, ffi::AnyBuffer buffer,
                  ffi::AnyBuffer row, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                  std::string_view wire, std::int64_t block, std::string_view op, float factor) {
  return Run("jax_ring_chunk_reduce", stream,
             CheckReduce(received, buffer, row, rest, out, wire, block, op, factor), RunReduce);
}

ffi::Error Decode(cudaStream_t stream, ffi::AnyBuffer message, ffi::AnyBuffer buffer,
                  ffi::AnyBuffer row, ffi::Result<ffi::AnyBuffer> out, std::string_view wire,
                  std::int64_t block) {
  return Run("jax_ring_chunk_decode", stream, CheckDecode(message, buffer, row, out, wire, block),
             RunDecode);
}

auto OnStream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace
}  // namespace jax_ring

// A command buffer is a CUDA graph: what a handler launches is recorded once, and replayed.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxRingCudaChunkEncode, jax_ring::Encode,
                              jax_ring::BindEncode(jax_ring::OnStream()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxRingCudaChunkReduce, jax_ring::Reduce,
                              jax_ring::BindReduce(jax_ring::OnStream()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxRingCudaChunkDecode, jax_ring::Decode,
                              jax_ring::BindDecode(jax_ring::OnStream()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
