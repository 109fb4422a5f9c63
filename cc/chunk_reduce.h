// The arithmetic of the chunk kernels: wire formats, their rounding, and reductions of every type.
// Free of XLA; compiled by C++17 compilers for the CPU and by nvcc for both sides, to the same
// bits.
//
// Two things make the bits the same:
//  - No product is contracted with a sum into a fused multiply-add. On the device Multiply and Add
//    are intrinsics that never are; on the host every file that includes this is compiled with
//    -ffp-contract=off (MSVC: /fp:precise), as GCC by default contracts wherever the target can.
//  - Nothing but sums, and products of what users pass, depends on whether subnormals are flushed
//    (XLA:CPU flushes them, CUDA does not). Formats are written in integers, or scaled away from
//    them.
//
// The arithmetic is forced inline: the CPU kernels are compiled several times, for several
// instruction sets, and the linker must have no copy to choose from.
#ifndef JAX_RING_CHUNK_REDUCE_H_
#define JAX_RING_CHUNK_REDUCE_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define JAX_RING_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define JAX_RING_HOST_DEVICE __forceinline
#else
#define JAX_RING_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace jax_ring {

// What a chunk looks like while it travels.
enum class Wire { kIdentity, kBfloat16, kFloat16, kFloat8E4M3FN, kFloat8E5M2, kInt8, kInt4 };

// How two chunks become one.
enum class Op { kSum, kMax, kMin, kProd };

// The types of data.
enum class DataType {
  kFloat32,
  kFloat64,
  kBfloat16,
  kFloat16,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUint8,
  kUint16,
  kUint32,
  kUint64
};

// Floats that C++17 lacks, as bits. Integers, float and double are themselves.
struct Bfloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};
struct Float8E4M3FN {
  std::uint8_t bits;
};
struct Float8E5M2 {
  std::uint8_t bits;
};

// The type of a message's elements; a lossy wire has integers, so that nothing can widen them.
JAX_RING_HOST_DEVICE constexpr DataType MessageType(Wire wire, DataType data) {
  switch (wire) {
    case Wire::kIdentity:
      return data;
    case Wire::kBfloat16:
    case Wire::kFloat16:
      return DataType::kUint16;
    case Wire::kInt8:
      return DataType::kInt8;
    default:
      return DataType::kUint8;
  }
}

JAX_RING_HOST_DEVICE constexpr std::int64_t SizeOf(DataType type) {
  switch (type) {
    case DataType::kFloat64:
    case DataType::kInt64:
    case DataType::kUint64:
      return 8;
    case DataType::kFloat32:
    case DataType::kInt32:
    case DataType::kUint32:
      return 4;
    case DataType::kBfloat16:
    case DataType::kFloat16:
    case DataType::kInt16:
    case DataType::kUint16:
      return 2;
    default:
      return 1;
  }
}

// What a kernel works on: rows of n elements, and how they travel. `block` counts for block-scaled
// wires only.
struct Format {
  Wire wire;
  DataType data;
  std::int64_t n;
  std::int64_t block;
};

// --- What a message looks like
// --------------------------------------------------------------------

// Values of 8 or 4 bits, with a scale for each block.
JAX_RING_HOST_DEVICE constexpr bool IsBlockScaled(Wire wire) {
  return wire == Wire::kInt8 || wire == Wire::kInt4 || wire == Wire::kFloat8E4M3FN ||
         wire == Wire::kFloat8E5M2;
}

JAX_RING_HOST_DEVICE constexpr bool RoundsStochastically(Wire wire) {
  return wire == Wire::kInt8 || wire == Wire::kInt4;
}

// Neither overflows for n up to the largest int64, whatever the block.
JAX_RING_HOST_DEVICE constexpr std::int64_t Blocks(std::int64_t n, std::int64_t block) {
  return n / block + (n % block != 0);
}

JAX_RING_HOST_DEVICE constexpr std::int64_t ValueBytes(Wire wire, std::int64_t n) {
  return wire == Wire::kInt4 ? n / 2 + n % 2 : n;
}

// Where the scales of a block-scaled message begin, in bytes. They are little-endian bfloat16s, and
// as a row may begin at any even address, even here.
JAX_RING_HOST_DEVICE constexpr std::int64_t ScalesOffset(Wire wire, std::int64_t n) {
  return ValueBytes(wire, n) + ValueBytes(wire, n) % 2;
}

// Elements of the message for n elements of data; bytes, if it is block-scaled.
JAX_RING_HOST_DEVICE constexpr std::int64_t MessageSize(Wire wire, std::int64_t n,
                                                        std::int64_t block) {
  return IsBlockScaled(wire) ? ScalesOffset(wire, n) + 2 * Blocks(n, block) : n;
}

JAX_RING_HOST_DEVICE std::int64_t MessageBytes(const Format& format) {
  return MessageSize(format.wire, format.n, format.block) *
         SizeOf(MessageType(format.wire, format.data));
}

// Row index[i] of entry i of a buffer [batch, chunks, n]. The indices may lie on a device, and
// outside [0, chunks).
struct Rows {
  const std::int32_t* index;
  std::int64_t batch;
  std::int64_t chunks;
  bool shared;  // The buffer is [1, chunks, n], and serves all of the batch.
};

// --- float32
// --------------------------------------------------------------------------------------

JAX_RING_HOST_DEVICE std::uint32_t Bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

JAX_RING_HOST_DEVICE float FromBits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The magnitude as an integer, ordered as numbers < infinity < NaN.
JAX_RING_HOST_DEVICE std::uint32_t Magnitude(float x) { return Bits(x) & 0x7fffffff; }

JAX_RING_HOST_DEVICE float Multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

JAX_RING_HOST_DEVICE float Add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

JAX_RING_HOST_DEVICE float Divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// The nearest integer, ties to even, of |x| < 2^22: the sum with 1.5 * 2^23 has it in its low bits.
JAX_RING_HOST_DEVICE std::int32_t RoundToInt(float x) {
  constexpr std::uint32_t kShift = 0x4b400000;
  return static_cast<std::int32_t>(Bits(Add(x, FromBits(kShift))) - kShift);
}

// --- Small floats: from float32 to the nearest, ties to even, and back
// ------------------------------

// kMantissa bits of mantissa, an exponent biased by kBias, and the sign, in kBits.
template <int kMantissa, int kBias, int kBits>
struct SmallFloat {
  static constexpr std::uint32_t kSign = 1u << (kBits - 1);
  static constexpr int kDropped = 23 - kMantissa;
  static constexpr std::uint32_t kRebase = 127 - kBias;  // float32's bias is 127.

  // The bits of a magnitude without regard to the largest value: the exponent may run over.
  static JAX_RING_HOST_DEVICE std::uint32_t FromMagnitude(std::uint32_t u) {
    constexpr std::uint32_t kHalf = 1u << (kDropped - 1);
    const std::uint32_t normal =
        ((u + (kHalf - 1) + ((u >> kDropped) & 1)) >> kDropped) - (kRebase << kMantissa);
    // A power of two whose unit in the last place is the least subnormal: adding it rounds to that.
    constexpr std::uint32_t kMagic = static_cast<std::uint32_t>(127 + 24 - kBias - kMantissa) << 23;
    const std::uint32_t subnormal = Bits(Add(FromBits(u), FromBits(kMagic))) - kMagic;
    return u >= ((kRebase + 1) << 23) ? normal : subnormal;
  }

  // The exact value of a magnitude, without arithmetic on float32's subnormals, as if the format
  // had neither infinity nor NaN.
  static JAX_RING_HOST_DEVICE std::uint32_t ToMagnitude(std::uint32_t magnitude) {
    constexpr std::uint32_t kLeast = static_cast<std::uint32_t>(128 - kBias - kMantissa) << 23;
    const std::uint32_t normal = (magnitude << kDropped) + (kRebase << 23);
    const std::uint32_t subnormal =
        Bits(Multiply(static_cast<float>(static_cast<std::int32_t>(magnitude)), FromBits(kLeast)));
    return magnitude < (1u << kMantissa) ? subnormal : normal;
  }

  // The sign of a float32 in its place here, and back.
  static JAX_RING_HOST_DEVICE std::uint32_t SignFrom(float x) {
    return (Bits(x) >> (32 - kBits)) & kSign;
  }
  static JAX_RING_HOST_DEVICE std::uint32_t SignTo(std::uint32_t bits) {
    return (bits & kSign) << (32 - kBits);
  }
};

using Half = SmallFloat<10, 15, 16>;
using E4M3 = SmallFloat<3, 7, 8>;
using E5M2 = SmallFloat<2, 15, 8>;

JAX_RING_HOST_DEVICE float ToFloat(float x) { return x; }

JAX_RING_HOST_DEVICE float ToFloat(Bfloat16 x) {
  return FromBits(static_cast<std::uint32_t>(x.bits) << 16);
}

JAX_RING_HOST_DEVICE float ToFloat(Float16 x) {
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  const std::uint32_t special = 0x7f800000u | (magnitude << Half::kDropped);
  return FromBits(Half::SignTo(x.bits) |
                  (magnitude >= 0x7c00 ? special : Half::ToMagnitude(magnitude)));
}

JAX_RING_HOST_DEVICE float ToFloat(Float8E4M3FN x) {
  const std::uint32_t magnitude = x.bits & 0x7fu;
  return FromBits(E4M3::SignTo(x.bits) |
                  (magnitude == 0x7f ? 0x7fc00000u : E4M3::ToMagnitude(magnitude)));
}

JAX_RING_HOST_DEVICE float ToFloat(Float8E5M2 x) {
  const std::uint32_t magnitude = x.bits & 0x7fu;
  const std::uint32_t special = 0x7f800000u | (magnitude << E5M2::kDropped);
  return FromBits(E5M2::SignTo(x.bits) |
                  (magnitude >= 0x7c ? special : E5M2::ToMagnitude(magnitude)));
}

// From float32 to T, nearest, ties to even. Beyond the largest value lies infinity, in
// Float8E4M3FN, which has none, NaN.
template <typename T>
JAX_RING_HOST_DEVICE T FromFloat(float x);

template <>
JAX_RING_HOST_DEVICE float FromFloat<float>(float x) {
  return x;
}

template <>
JAX_RING_HOST_DEVICE Bfloat16 FromFloat<Bfloat16>(float x) {
  const std::uint32_t u = Bits(x);
  const std::uint32_t nearest = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const std::uint32_t quiet = (u >> 16) | 0x40;
  return {static_cast<std::uint16_t>(Magnitude(x) > 0x7f800000 ? quiet : nearest)};
}

template <>
JAX_RING_HOST_DEVICE Float16 FromFloat<Float16>(float x) {
  const std::uint32_t u = Magnitude(x);
  const std::uint32_t rounded = Half::FromMagnitude(u);
  const std::uint32_t finite = rounded < 0x7c00 ? rounded : 0x7c00;
  return {static_cast<std::uint16_t>(Half::SignFrom(x) | (u > 0x7f800000 ? 0x7e00 : finite))};
}

template <>
JAX_RING_HOST_DEVICE Float8E4M3FN FromFloat<Float8E4M3FN>(float x) {
  const std::uint32_t rounded = E4M3::FromMagnitude(Magnitude(x));
  return {static_cast<std::uint8_t>(E4M3::SignFrom(x) | (rounded < 0x7f ? rounded : 0x7f))};
}

template <>
JAX_RING_HOST_DEVICE Float8E5M2 FromFloat<Float8E5M2>(float x) {
  const std::uint32_t u = Magnitude(x);
  const std::uint32_t rounded = E5M2::FromMagnitude(u);
  const std::uint32_t finite = rounded < 0x7c ? rounded : 0x7c;
  return {static_cast<std::uint8_t>(E5M2::SignFrom(x) | (u > 0x7f800000 ? 0x7e : finite))};
}

// --- Block-scaled wires
// ---------------------------------------------------------------------------

// kLargest: the largest value. kFloor: the least scale, as bits of a float32; divided by it,
// float32's subnormals round to zero whether or not they were flushed before.
template <Wire kWire>
struct BlockFormat;
template <>
struct BlockFormat<Wire::kInt8> {
  static constexpr float kLargest = 127.0f;
  static constexpr std::uint32_t kFloor = 0x01000000;
};
template <>
struct BlockFormat<Wire::kInt4> {
  static constexpr float kLargest = 7.0f;
  static constexpr std::uint32_t kFloor = 0x01000000;
};
template <>
struct BlockFormat<Wire::kFloat8E4M3FN> {
  static constexpr float kLargest = 448.0f;
  static constexpr std::uint32_t kFloor = 0x05800000;
};
template <>
struct BlockFormat<Wire::kFloat8E5M2> {
  static constexpr float kLargest = 57344.0f;
  static constexpr std::uint32_t kFloor = 0x09000000;
};

struct Scale {
  std::uint16_t bits;  // As it travels: a bfloat16; NaN where the block holds a NaN or an infinity.
  float inverse;
  bool finite;  // Else all values of the block are zero on the wire: they decode to NaN.
};

// The scale of a block whose largest Magnitude is `amax`, rounded up to a bfloat16: the largest
// value of the block never overflows, and 8 bits of value times 8 of scale are exact.
template <Wire kWire>
JAX_RING_HOST_DEVICE Scale ScaleOf(std::uint32_t amax) {
  constexpr float kInverse = 1.0f / BlockFormat<kWire>::kLargest;
  constexpr std::uint32_t kFloor = BlockFormat<kWire>::kFloor;
  const bool finite = amax < 0x7f800000;
  const std::uint32_t up = (Bits(Multiply(FromBits(amax), kInverse)) + 0xffff) & 0xffff0000;
  const std::uint32_t floored = up < kFloor ? kFloor : up;
  const std::uint32_t scale = finite ? floored : 0x7fc00000;
  return {static_cast<std::uint16_t>(scale >> 16), Divide(1.0f, FromBits(scale)), finite};
}

JAX_RING_HOST_DEVICE float ScaleFromBits(std::uint16_t bits) { return ToFloat(Bfloat16{bits}); }

// One value on the wire, in the low 8 bits (of int4: 4 bits) as it travels, of a block whose scale
// is finite.
template <Wire kWire>
JAX_RING_HOST_DEVICE std::uint32_t Quantize(float x, float inverse) {
  static_assert(IsBlockScaled(kWire), "not a block-scaled wire");
  const float y = Multiply(x, inverse);
  if constexpr (kWire == Wire::kInt8 || kWire == Wire::kInt4) {
    // No clamp: the scale is rounded up, so |y| exceeds the largest value by roundings of 2^-24 at
    // most.
    return static_cast<std::uint32_t>(RoundToInt(y)) & (kWire == Wire::kInt8 ? 0xff : 0xf);
  } else {
    using Small = std::conditional_t<kWire == Wire::kFloat8E4M3FN, E4M3, E5M2>;
    const float a = FromBits(Magnitude(y));
    const float bounded = a < BlockFormat<kWire>::kLargest ? a : BlockFormat<kWire>::kLargest;
    return Small::SignFrom(y) | Small::FromMagnitude(Bits(bounded));
  }
}

// A bijection in which each bit of the result depends on all of the argument's.
JAX_RING_HOST_DEVICE std::uint32_t Mix(std::uint32_t h) {
  h = (h ^ (h >> 16)) * 0x7feb352du;
  h = (h ^ (h >> 15)) * 0x846ca68bu;
  return h ^ (h >> 16);
}

struct Seed {
  std::uint32_t words[2];
};

// As Quantize, rounded up or down at random such that the mean is x / scale; `index` is the
// element's in its row, modulo 2^32.
template <Wire kWire>
JAX_RING_HOST_DEVICE std::uint32_t QuantizeStochastic(float x, float inverse, Seed seed,
                                                      std::uint32_t index) {
  static_assert(RoundsStochastically(kWire), "a wire that rounds to nearest only");
  constexpr std::int32_t kLargest = static_cast<std::int32_t>(BlockFormat<kWire>::kLargest);
  // Subnormals are zero here, as where they are flushed: the floor of the scale hides them from
  // rounding to nearest only.
  const float normal = Magnitude(x) < 0x00800000 ? 0.0f : x;
  // In fixed point: 15 bits of fraction, of which the hash decides.
  const std::int32_t fixed = RoundToInt(Multiply(Multiply(normal, inverse), 32768.0f));
  const std::uint32_t h = Mix(Mix(index + seed.words[0]) + seed.words[1]);
  const std::int32_t q = (fixed + static_cast<std::int32_t>(h >> 17)) >> 15;
  const std::int32_t below = q < kLargest ? q : kLargest;
  const std::int32_t clamped = below > -kLargest ? below : -kLargest;
  return static_cast<std::uint32_t>(clamped) & (kWire == Wire::kInt8 ? 0xff : 0xf);
}

// The value of the low 8 bits (of int4: 4 bits) of `bits`, without the scale; times the scale it is
// exact.
template <Wire kWire>
JAX_RING_HOST_DEVICE float Dequantize(std::uint32_t bits) {
  static_assert(IsBlockScaled(kWire), "not a block-scaled wire");
  if constexpr (kWire == Wire::kInt8) {
    return static_cast<float>(static_cast<std::int8_t>(bits));
  } else if constexpr (kWire == Wire::kInt4) {
    return static_cast<float>(static_cast<std::int32_t>(bits << 28) >> 28);
  } else if constexpr (kWire == Wire::kFloat8E4M3FN) {
    return ToFloat(Float8E4M3FN{static_cast<std::uint8_t>(bits)});
  } else {
    return ToFloat(Float8E5M2{static_cast<std::uint8_t>(bits)});
  }
}

// --- Wires that round each value by itself
// ----------------------------------------------------------

template <Wire kWire>
using CastType = std::conditional_t<kWire == Wire::kBfloat16, Bfloat16, Float16>;

template <Wire kWire>
JAX_RING_HOST_DEVICE std::uint16_t EncodeCast(float x) {
  static_assert(kWire == Wire::kBfloat16 || kWire == Wire::kFloat16, "not a 16-bit float");
  return FromFloat<CastType<kWire>>(x).bits;
}

template <Wire kWire>
JAX_RING_HOST_DEVICE float DecodeCast(std::uint16_t bits) {
  static_assert(kWire == Wire::kBfloat16 || kWire == Wire::kFloat16, "not a 16-bit float");
  return ToFloat(CastType<kWire>{bits});
}

// --- Reductions
// -----------------------------------------------------------------------------------

// Integers wrap.
template <Op kOp, typename T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
JAX_RING_HOST_DEVICE T Combine(T a, T b) {
  // Unsigned, and no narrower than what C++ computes in, so that nothing overflows.
  using Wide = std::conditional_t<(sizeof(T) < 4), std::uint32_t, std::make_unsigned_t<T>>;
  if constexpr (kOp == Op::kSum) {
    return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
  } else if constexpr (kOp == Op::kProd) {
    return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
  } else if constexpr (kOp == Op::kMax) {
    return a > b ? a : b;
  } else {
    return a < b ? a : b;
  }
}

template <Op kOp, typename T, std::enable_if_t<std::is_floating_point_v<T>, int> = 0>
JAX_RING_HOST_DEVICE T Combine(T a, T b) {
  if constexpr (kOp == Op::kSum) {
    return a + b;
  } else if constexpr (kOp == Op::kProd) {
    return a * b;
  } else if constexpr (kOp == Op::kMax) {
    return a > b || a != a ? a : b;  // With a NaN in either, that.
  } else {
    return a < b || a != a ? a : b;
  }
}

// Narrow floats are computed in float32 and rounded once; max and min choose.
template <Op kOp, typename T, std::enable_if_t<std::is_class_v<T>, int> = 0>
JAX_RING_HOST_DEVICE T Combine(T a, T b) {
  const float x = ToFloat(a);
  const float y = ToFloat(b);
  if constexpr (kOp == Op::kSum || kOp == Op::kProd) {
    return FromFloat<T>(Combine<kOp>(x, y));
  } else if constexpr (kOp == Op::kMax) {
    return x > y || x != x ? a : b;
  } else {
    return x < y || x != x ? a : b;
  }
}

// --- From values to types, on the host
// --------------------------------------------------------------

template <typename T>
struct TypeTag {
  using Type = T;
};

// Calls f with a TypeTag<T> of the data's type.
template <typename F>
inline void WithDataType(DataType type, F f) {
  switch (type) {
    case DataType::kFloat32:
      return f(TypeTag<float>());
    case DataType::kFloat64:
      return f(TypeTag<double>());
    case DataType::kBfloat16:
      return f(TypeTag<Bfloat16>());
    case DataType::kFloat16:
      return f(TypeTag<Float16>());
    case DataType::kFloat8E4M3FN:
      return f(TypeTag<Float8E4M3FN>());
    case DataType::kFloat8E5M2:
      return f(TypeTag<Float8E5M2>());
    case DataType::kInt8:
      return f(TypeTag<std::int8_t>());
    case DataType::kInt16:
      return f(TypeTag<std::int16_t>());
    case DataType::kInt32:
      return f(TypeTag<std::int32_t>());
    case DataType::kInt64:
      return f(TypeTag<std::int64_t>());
    case DataType::kUint8:
      return f(TypeTag<std::uint8_t>());
    case DataType::kUint16:
      return f(TypeTag<std::uint16_t>());
    case DataType::kUint32:
      return f(TypeTag<std::uint32_t>());
    case DataType::kUint64:
      return f(TypeTag<std::uint64_t>());
  }
}

// Calls f with an integral_constant of the op.
template <typename F>
inline void WithOp(Op op, F f) {
  switch (op) {
    case Op::kSum:
      return f(std::integral_constant<Op, Op::kSum>());
    case Op::kMax:
      return f(std::integral_constant<Op, Op::kMax>());
    case Op::kMin:
      return f(std::integral_constant<Op, Op::kMin>());
    case Op::kProd:
      return f(std::integral_constant<Op, Op::kProd>());
  }
}

// Calls f with an integral_constant of a lossy wire, and a TypeTag of the data it can carry.
template <typename F>
inline void WithLossyWire(Wire wire, DataType type, F f) {
  const auto with_type = [&](auto constant) {
    if (type == DataType::kBfloat16) return f(constant, TypeTag<Bfloat16>());
    return f(constant, TypeTag<float>());
  };
  switch (wire) {
    case Wire::kIdentity:
      return;
    case Wire::kBfloat16:
      return with_type(std::integral_constant<Wire, Wire::kBfloat16>());
    case Wire::kFloat16:
      return with_type(std::integral_constant<Wire, Wire::kFloat16>());
    case Wire::kFloat8E4M3FN:
      return with_type(std::integral_constant<Wire, Wire::kFloat8E4M3FN>());
    case Wire::kFloat8E5M2:
      return with_type(std::integral_constant<Wire, Wire::kFloat8E5M2>());
    case Wire::kInt8:
      return with_type(std::integral_constant<Wire, Wire::kInt8>());
    case Wire::kInt4:
      return with_type(std::integral_constant<Wire, Wire::kInt4>());
  }
}

}  // namespace jax_ring

#endif  // JAX_RING_CHUNK_REDUCE_H_
