// The XLA FFI handlers of the chunk kernels on the CPU: they check, and hand row after row to them.
#include "chunk_reduce_ffi.h"

#include <cstdint>
#include <cstring>
#include <string_view>

#include "chunk_reduce.h"
#include "chunk_reduce_cpu.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring {
namespace {

ffi::Error CheckIndices(const char* target, const Rows& rows) {
  Checker check(target);
  for (std::int64_t i = 0; i < rows.batch && check.ok(); ++i) {
    if (rows.index[i] < 0 || rows.index[i] >= rows.chunks) {
      check.Fail("row[", i, "] is ", rows.index[i], ", but buffer has ", rows.chunks, " chunks");
    }
  }
  return check.error();
}

// Where row rows.index[i] of a buffer begins, in bytes.
std::int64_t RowOffset(const Format& format, const Rows& rows, std::int64_t i) {
  const std::int64_t entry = rows.shared ? 0 : i;
  return (entry * rows.chunks + rows.index[i]) * format.n * SizeOf(format.data);
}

const void* At(const void* base, std::int64_t bytes) {
  return static_cast<const unsigned char*>(base) + bytes;
}
void* At(void* base, std::int64_t bytes) { return static_cast<unsigned char*>(base) + bytes; }

void Copy(const void* source, std::int64_t bytes, void* target) {
  std::memcpy(target, source, static_cast<std::size_t>(bytes));
}

const Seed* SeedOf(const Seed* seeds, std::int64_t i) {
  return seeds == nullptr ? nullptr : seeds + i;
}

// --- The work, row by row
// ---------------------------------------------------------------------------

void RunEncode(const Kernels& kernels, const EncodeCall& call) {
  const std::int64_t bytes = MessageBytes(call.format);
  for (std::int64_t i = 0; i < call.rows.batch; ++i) {
    const void* chunk = At(call.buffer, RowOffset(call.format, call.rows, i));
    void* message = At(call.messages, i * bytes);
    if (call.format.wire == Wire::kIdentity) {
      Copy(chunk, bytes, message);
    } else {
      kernels.encode(call.format, chunk, call.factor, SeedOf(call.seeds, i), message);
    }
  }
}

void RunReduce(const Kernels& kernels, const ReduceCall& call) {
  const std::int64_t bytes = MessageBytes(call.format);
  const std::int64_t result_bytes = call.to_float ? 4 * call.format.n : bytes;
  for (std::int64_t i = 0; i < call.rows.batch; ++i) {
    const void* received = At(call.received, i * bytes);
    const void* chunk = At(call.buffer, RowOffset(call.format, call.rows, i));
    void* result = At(call.results, i * result_bytes);
    if (call.format.wire == Wire::kIdentity) {
      kernels.combine(call.format, call.op, received, chunk, result);
    } else if (call.to_float) {
      kernels.reduce_to_float(call.format, received, chunk, call.factor, result);
    } else {
      kernels.reduce(call.format, received, chunk, call.factor, SeedOf(call.seeds, i), result);
    }
  }
}

void RunDecode(const Kernels& kernels, const DecodeCall& call) {
  const Format& format = call.format;
  const std::int64_t bytes = MessageBytes(format);
  const std::int64_t row_bytes = format.n * SizeOf(format.data);
  if (call.result != call.buffer) {
    Copy(call.buffer, call.rows.batch * call.rows.chunks * row_bytes, call.result);
  }
  for (std::int64_t i = 0; i < call.rows.batch; ++i) {
    const void* message = At(call.messages, i * bytes);
    void* chunk = At(call.result, RowOffset(format, call.rows, i));
    if (format.wire == Wire::kIdentity) {
      Copy(message, bytes, chunk);
    } else {
      kernels.decode(format, message, chunk);
    }
  }
}

// --- Handlers
// ---------------------------------------------------------------------------------------

template <typename Call>
ffi::Error Run(const char* target, const ffi::ErrorOr<Call>& checked,
               void (*run)(const Kernels&, const Call&)) {
  if (!checked) return checked.error();
  const Call& call = *checked;
  if (IsEmpty(call.format, call.rows)) return ffi::Error::Success();
  ffi::Error error = CheckIndices(target, call.rows);
  if (error.failure()) return error;
  run(BestKernels(), call);
  return ffi::Error::Success();
}

ffi::Error Encode(ffi::AnyBuffer buffer, ffi::AnyBuffer row, ffi::RemainingArgs rest,
                  ffi::Result<ffi::AnyBuffer> message, std::string_view wire, std::int64_t block,
                  float factor) {
  return Run("jax_ring_chunk_encode", CheckEncode(buffer, row, rest, message, wire, block, factor),
             RunEncode);
}

ffi::Error Reduce(ffi::AnyBuffer received, ffi::AnyBuffer buffer, ffi::AnyBuffer row,
                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, std::string_view wire,
                  std::int64_t block, std::string_view op, float factor) {
  return Run("jax_ring_chunk_reduce",
             CheckReduce(received, buffer, row, rest, out, wire, block, op, factor), RunReduce);
}

ffi::Error Decode(ffi::AnyBuffer message, ffi::AnyBuffer buffer, ffi::AnyBuffer row,
                  ffi::Result<ffi::AnyBuffer> out, std::string_view wire, std::int64_t block) {
  return Run("jax_ring_chunk_decode", CheckDecode(message, buffer, row, out, wire, block),
             RunDecode);
}

}  // namespace
}  // namespace jax_ring

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxRingChunkEncode, jax_ring::Encode,
                              jax_ring::BindEncode(xla::ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxRingChunkReduce, jax_ring::Reduce,
                              jax_ring::BindReduce(xla::ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxRingChunkDecode, jax_ring::Decode,
                              jax_ring::BindDecode(xla::ffi::Ffi::Bind()));
