// What the FFI handlers of the chunk kernels share, for the CPU and CUDA: reading and checking a
// call. Nothing here touches data, which may lie on a device. A call that is right allocates
// nothing.
#ifndef JAX_RING_CHUNK_REDUCE_FFI_H_
#define JAX_RING_CHUNK_REDUCE_FFI_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "chunk_reduce.h"
#include "ffi_text.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring {

namespace ffi = xla::ffi;

// --- What a call asks for, once it is checked
// -------------------------------------------------------

// messages[i] = encode(row * factor).
struct EncodeCall {
  Format format;
  Rows rows;
  float factor;
  const void* buffer;
  const Seed* seeds;  // One for each of the batch; null: round to nearest.
  void* messages;
};

// results[i] = (decode(received[i]) + row) * factor, encoded or (`to_float`) as it is; on the
// identity wire op(received[i], row).
struct ReduceCall {
  Format format;
  Rows rows;
  Op op;
  float factor;
  bool to_float;
  const void* received;
  const void* buffer;
  const Seed* seeds;  // As above; without meaning for what is not encoded.
  void* results;
};

// result = buffer, with decode(messages[i]) in place of the rows.
struct DecodeCall {
  Format format;
  Rows rows;
  const void* messages;
  const void* buffer;
  void* result;  // Perhaps the buffer itself.
};

inline bool IsEmpty(const Format& format, const Rows& rows) {
  return format.n == 0 || rows.batch == 0;
}

// --- Names
// --------------------------------------------------------------------------------------------

constexpr std::pair<std::string_view, Wire> kWires[] = {
    {"identity", Wire::kIdentity},
    {"bfloat16", Wire::kBfloat16},
    {"float16", Wire::kFloat16},
    {"float8_e4m3fn", Wire::kFloat8E4M3FN},
    {"float8_e5m2", Wire::kFloat8E5M2},
    {"int8", Wire::kInt8},
    {"int4", Wire::kInt4},
};

constexpr std::pair<std::string_view, Op> kOps[] = {
    {"sum", Op::kSum}, {"max", Op::kMax}, {"min", Op::kMin}, {"prod", Op::kProd}};

constexpr std::pair<ffi::DataType, DataType> kDataTypes[] = {
    {ffi::DataType::F32, DataType::kFloat32},
    {ffi::DataType::F64, DataType::kFloat64},
    {ffi::DataType::BF16, DataType::kBfloat16},
    {ffi::DataType::F16, DataType::kFloat16},
    {ffi::DataType::F8E4M3FN, DataType::kFloat8E4M3FN},
    {ffi::DataType::F8E5M2, DataType::kFloat8E5M2},
    {ffi::DataType::S8, DataType::kInt8},
    {ffi::DataType::S16, DataType::kInt16},
    {ffi::DataType::S32, DataType::kInt32},
    {ffi::DataType::S64, DataType::kInt64},
    {ffi::DataType::U8, DataType::kUint8},
    {ffi::DataType::U16, DataType::kUint16},
    {ffi::DataType::U32, DataType::kUint32},
    {ffi::DataType::U64, DataType::kUint64},
};

// What `key` stands for in one of the tables above, or what stands for it.
template <typename Key, typename Value, std::size_t kSize>
std::optional<Value> Find(const std::pair<Key, Value> (&table)[kSize], Key key) {
  for (const auto& [name, value] : table) {
    if (name == key) return value;
  }
  return std::nullopt;
}

template <typename Key, typename Value, std::size_t kSize>
Key NameOf(const std::pair<Key, Value> (&table)[kSize], Value value) {
  for (const auto& [name, entry] : table) {
    if (entry == value) return name;
  }
  return Key();
}

// "identity, bfloat16, ...".
template <typename Value, std::size_t kSize>
std::string Names(const std::pair<std::string_view, Value> (&table)[kSize]) {
  std::string names;
  for (const auto& [name, value] : table) names.append(names.empty() ? "" : ", ").append(name);
  return names;
}

// --- Checks
// -------------------------------------------------------------------------------------------

// Keeps the first thing that is wrong with a call; what is checked after that counts no more, and
// may be nonsense.
class Checker {
 public:
  explicit Checker(const char* target) : target_(target) {}
  // A call whose row has rank 0 is for one chunk: none of its operands has the batch dimension.
  Checker(const char* target, ffi::AnyBuffer row)
      : target_(target), batched_(row.dimensions().size() != 0) {}

  bool ok() const { return error_.success(); }
  ffi::Error error() const { return error_; }

  template <typename... Parts>
  void Fail(const Parts&... parts) {
    if (ok()) error_ = ffi::Error::InvalidArgument(Concatenate(target_, ": ", parts...));
  }

  void Type(const char* name, ffi::AnyBuffer buffer, ffi::DataType wanted) {
    if (buffer.element_type() == wanted) return;
    Fail(name, " has dtype ", buffer.element_type(), ", but ", wanted, " is wanted");
  }

  // `shape` tells people what the dimensions are.
  void Rank(const char* name, ffi::AnyBuffer buffer, std::size_t wanted, const char* shape) {
    const std::size_t rank = buffer.dimensions().size();
    if (!batched_) --wanted;
    if (rank == wanted) return;
    Fail(name, " has rank ", rank, ", but ", wanted, " is wanted: ", shape,
         batched_ ? "" : " without batch, as row has rank 0");
  }

  // The size of an axis of the batched form. Call it for axes that Rank has found to be there.
  std::int64_t Size(ffi::AnyBuffer buffer, std::size_t axis) const {
    if (batched_) return buffer.dimensions()[axis];
    return axis == 0 ? 1 : buffer.dimensions()[axis - 1];
  }

  // Call it for axes that Rank has found to be there.
  void Dimension(const char* name, ffi::AnyBuffer buffer, std::size_t axis, const char* axis_name,
                 std::int64_t wanted) {
    if (!ok()) return;
    const std::int64_t size = Size(buffer, axis);
    if (size != wanted) Fail(name, " has ", axis_name, " ", size, ", but ", wanted, " is wanted");
  }

  Wire WireNamed(std::string_view name) {
    const std::optional<Wire> wire = Find(kWires, name);
    if (!wire) Fail("wire is '", name, "', but one of ", Names(kWires), " is wanted");
    return wire.value_or(Wire::kIdentity);
  }

  Op OpNamed(std::string_view name, Wire wire) {
    const std::optional<Op> op = Find(kOps, name);
    if (!op) Fail("op is '", name, "', but one of ", Names(kOps), " is wanted");
    if (wire != Wire::kIdentity && op.value_or(Op::kSum) != Op::kSum) {
      Fail("op is '", name, "', but wire ", NameOf(kWires, wire), " takes sum only");
    }
    return op.value_or(Op::kSum);
  }

  void Block(Wire wire, std::int64_t block) {
    if (!IsBlockScaled(wire)) return;
    if (block < 1) Fail("block is ", block, ", but at least 1 is wanted");
    if (wire == Wire::kInt4 && block % 2 != 0) {
      Fail("block is ", block, ", but wire int4 wants an even one");
    }
  }

  void Factor(Wire wire, float factor) {
    if (wire == Wire::kIdentity && factor != 1.0f) {
      Fail("factor is ", factor, ", but wire identity wants 1");
    }
  }

  // Checks a buffer [batch, chunks, n] and its wire.
  Format FormatOf(ffi::AnyBuffer buffer, std::string_view wire_name, std::int64_t block) {
    Rank("buffer", buffer, 3, "[batch, chunks, n]");
    const Wire wire = WireNamed(wire_name);
    Block(wire, block);
    const std::optional<DataType> type = Find(kDataTypes, buffer.element_type());
    const bool lossy_type = type == DataType::kFloat32 || type == DataType::kBfloat16;
    if (wire != Wire::kIdentity && !lossy_type) {
      Fail("buffer has dtype ", buffer.element_type(), ", but wire ", wire_name,
           " carries F32 and BF16 only");
    } else if (!type) {
      Fail("buffer has dtype ", buffer.element_type(),
           ", but an integer of 8 to 64 bits or one of F64, F32, BF16, F16, F8E4M3FN, F8E5M2 is "
           "wanted");
    }
    if (!ok()) return {};
    return {wire, *type, Size(buffer, 2), block};
  }

  // Checks the indices [batch] for a buffer that FormatOf has found to be one.
  Rows RowsOf(ffi::AnyBuffer row, ffi::AnyBuffer buffer, std::int64_t batch) {
    Type("row", row, ffi::DataType::S32);
    Rank("row", row, 1, "[batch]");
    Dimension("row", row, 0, "batch", batch);
    if (!ok()) return {};
    return {static_cast<const std::int32_t*>(row.untyped_data()), batch, Size(buffer, 1),
            Size(buffer, 0) != batch};
  }

  const Seed* Seeds(const ffi::RemainingArgs& rest, Wire wire, std::int64_t batch) {
    if (rest.size() > 1)
      Fail(rest.size(), " operands follow row, but at most one, seed, is wanted");
    if (rest.size() == 0 || !ok()) return nullptr;
    const ffi::ErrorOr<ffi::AnyBuffer> seed = rest.get<ffi::AnyBuffer>(0);
    if (!seed) {
      Fail("seed: ", seed.error().message());
      return nullptr;
    }
    if (!RoundsStochastically(wire)) {
      Fail("a seed is given, but wire ", NameOf(kWires, wire),
           " does not round at random: int8 and int4 do");
    }
    Type("seed", *seed, ffi::DataType::U32);
    Rank("seed", *seed, 2, "[batch, 2]");
    Dimension("seed", *seed, 0, "batch", batch);
    Dimension("seed", *seed, 1, "words", 2);
    return static_cast<const Seed*>(seed->untyped_data());
  }

  // Checks sums: [batch, 1, n], the shape of a buffer whose place they can take, or [batch, n].
  void Sums(const char* name, ffi::AnyBuffer sums, std::int64_t batch, std::int64_t n) {
    const std::size_t rank = sums.dimensions().size() == (batched_ ? 2 : 1) ? 2 : 3;
    Rank(name, sums, rank, "[batch, 1, n] or [batch, n]");
    Dimension(name, sums, 0, "batch", batch);
    if (rank == 3) Dimension(name, sums, 1, "chunks", 1);
    Dimension(name, sums, rank - 1, "n", n);
  }

  // Checks messages [batch, elements] of a format.
  void Messages(const char* name, ffi::AnyBuffer messages, const Format& format,
                std::int64_t batch) {
    if (!ok()) return;
    Type(name, messages, NameOf(kDataTypes, MessageType(format.wire, format.data)));
    Rank(name, messages, 2, "[batch, elements of a message]");
    Dimension(name, messages, 0, "batch", batch);
    if (!ok()) return;
    const std::int64_t size = Size(messages, 1);
    const std::int64_t wanted = MessageSize(format.wire, format.n, format.block);
    if (size == wanted) return;
    const std::string blocks =
        IsBlockScaled(format.wire) ? Concatenate(" in blocks of ", format.block) : "";
    Fail(name, " has ", size, " elements a row, but ", format.n, " elements", blocks, " on wire ",
         NameOf(kWires, format.wire), " make ", wanted);
  }

 private:
  const char* target_;
  bool batched_ = true;
  ffi::Error error_;
};

inline ffi::ErrorOr<EncodeCall> CheckEncode(ffi::AnyBuffer buffer, ffi::AnyBuffer row,
                                            ffi::RemainingArgs rest,
                                            ffi::Result<ffi::AnyBuffer> message,
                                            std::string_view wire, std::int64_t block,
                                            float factor) {
  Checker check("jax_ring_chunk_encode", row);
  EncodeCall call = {};
  call.format = check.FormatOf(buffer, wire, block);
  check.Factor(call.format.wire, factor);
  const std::int64_t batch = check.ok() ? check.Size(buffer, 0) : 0;
  call.rows = check.RowsOf(row, buffer, batch);
  call.seeds = check.Seeds(rest, call.format.wire, batch);
  check.Messages("message", *message, call.format, batch);
  if (!check.ok()) return ffi::Unexpected(check.error());
  call.factor = factor;
  call.buffer = buffer.untyped_data();
  call.messages = message->untyped_data();
  return call;
}

inline ffi::ErrorOr<ReduceCall> CheckReduce(ffi::AnyBuffer received, ffi::AnyBuffer buffer,
                                            ffi::AnyBuffer row, ffi::RemainingArgs rest,
                                            ffi::Result<ffi::AnyBuffer> out, std::string_view wire,
                                            std::int64_t block, std::string_view op, float factor) {
  Checker check("jax_ring_chunk_reduce", row);
  ReduceCall call = {};
  call.format = check.FormatOf(buffer, wire, block);
  call.op = check.OpNamed(op, call.format.wire);
  check.Factor(call.format.wire, factor);
  check.Rank("received", received, 2, "[batch, elements of a message]");
  const std::int64_t batch = check.ok() ? check.Size(received, 0) : 0;
  const std::int64_t buffers = check.ok() ? check.Size(buffer, 0) : batch;
  if (buffers != batch && buffers != 1) {
    check.Fail("buffer has batch ", buffers, ", but received has ", batch,
               ", and that or 1 is wanted");
  }
  call.rows = check.RowsOf(row, buffer, batch);
  call.seeds = check.Seeds(rest, call.format.wire, batch);
  check.Messages("received", received, call.format, batch);
  if (!check.ok()) return ffi::Unexpected(check.error());

  const ffi::DataType type = out->element_type();
  const ffi::DataType travels = received.element_type();
  call.to_float = call.format.wire != Wire::kIdentity && type == ffi::DataType::F32;
  if (call.to_float) {
    check.Sums("out", *out, batch, call.format.n);
  } else if (type == travels || call.format.wire == Wire::kIdentity) {
    check.Messages("out", *out, call.format, batch);
  } else {
    check.Fail("out has dtype ", type, ", but ", travels, ", to travel on, or F32 is wanted");
  }
  if (!check.ok()) return ffi::Unexpected(check.error());
  call.factor = factor;
  call.received = received.untyped_data();
  call.buffer = buffer.untyped_data();
  call.results = out->untyped_data();
  return call;
}

inline ffi::ErrorOr<DecodeCall> CheckDecode(ffi::AnyBuffer message, ffi::AnyBuffer buffer,
                                            ffi::AnyBuffer row, ffi::Result<ffi::AnyBuffer> out,
                                            std::string_view wire, std::int64_t block) {
  Checker check("jax_ring_chunk_decode", row);
  DecodeCall call = {};
  call.format = check.FormatOf(buffer, wire, block);
  const std::int64_t batch = check.ok() ? check.Size(buffer, 0) : 0;
  call.rows = check.RowsOf(row, buffer, batch);
  check.Messages("message", message, call.format, batch);
  check.Type("out", *out, buffer.element_type());
  check.Rank("out", *out, 3, "[batch, chunks, n]");
  check.Dimension("out", *out, 0, "batch", batch);
  check.Dimension("out", *out, 1, "chunks", call.rows.chunks);
  check.Dimension("out", *out, 2, "n", call.format.n);
  if (!check.ok()) return ffi::Unexpected(check.error());
  call.messages = message.untyped_data();
  call.buffer = buffer.untyped_data();
  call.result = out->untyped_data();
  return call;
}

// --- Bindings
// -----------------------------------------------------------------------------------------

// What the handlers take, after what `context` binds already: on CUDA the stream.
template <typename Binding>
auto BindEncode(Binding context) {
  return std::move(context)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Attr<std::string_view>("wire")
      .template Attr<std::int64_t>("block")
      .template Attr<float>("factor");
}

template <typename Binding>
auto BindReduce(Binding context) {
  return std::move(context)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Attr<std::string_view>("wire")
      .template Attr<std::int64_t>("block")
      .template Attr<std::string_view>("op")
      .template Attr<float>("factor");
}

template <typename Binding>
auto BindDecode(Binding context) {
  return std::move(context)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Attr<std::string_view>("wire")
      .template Attr<std::int64_t>("block");
}

}  // namespace jax_ring

#endif  // JAX_RING_CHUNK_REDUCE_FFI_H_
