// The arithmetic against exact doubles, and the kernels of every instruction set against the
// arithmetic.
#include "chunk_reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "chunk_reduce_cpu.h"
#include "gtest/gtest.h"

namespace jax_ring {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kWhole = std::numeric_limits<std::int64_t>::max() - 1;  // One block; even.

constexpr Wire kLossyWires[] = {Wire::kBfloat16,   Wire::kFloat16, Wire::kFloat8E4M3FN,
                                Wire::kFloat8E5M2, Wire::kInt8,    Wire::kInt4};

std::string NameOf(Wire wire) {
  const char* const names[] = {"identity",    "bfloat16", "float16", "float8_e4m3fn",
                               "float8_e5m2", "int8",     "int4"};
  return names[static_cast<int>(wire)];
}

// --- Conversions
// ------------------------------------------------------------------------------------

// What a float type is, in words that the code under test does not use.
template <typename T>
struct Model;
template <>
struct Model<Bfloat16> {
  static constexpr int kBits = 16, kMantissa = 7, kBias = 127;
  static constexpr bool kHasInfinity = true;
};
template <>
struct Model<Float16> {
  static constexpr int kBits = 16, kMantissa = 10, kBias = 15;
  static constexpr bool kHasInfinity = true;
};
template <>
struct Model<Float8E4M3FN> {
  static constexpr int kBits = 8, kMantissa = 3, kBias = 7;
  static constexpr bool kHasInfinity = false;
};
template <>
struct Model<Float8E5M2> {
  static constexpr int kBits = 8, kMantissa = 2, kBias = 15;
  static constexpr bool kHasInfinity = true;
};

// The value of a bit pattern without its sign.
template <typename T>
double Value(std::uint32_t bits) {
  using M = Model<T>;
  const int exponents = 1 << (M::kBits - 1 - M::kMantissa);
  const int exponent = static_cast<int>(bits >> M::kMantissa);
  const std::uint32_t mantissa = bits & ((1u << M::kMantissa) - 1);
  if (M::kHasInfinity && exponent == exponents - 1) return mantissa == 0 ? kInfinity : kNan;
  if (!M::kHasInfinity && bits == (1u << (M::kBits - 1)) - 1) return kNan;
  const double fraction = std::ldexp(mantissa, -M::kMantissa) + (exponent == 0 ? 0 : 1);
  return std::ldexp(fraction, (exponent == 0 ? 1 : exponent) - M::kBias);
}

// The nearest number to x >= 0, ties to even, by a division in doubles, where all of this is exact.
template <typename T>
double Nearest(double x) {
  using M = Model<T>;
  if (!(x < kInfinity)) return std::isnan(x) || !M::kHasInfinity ? kNan : kInfinity;
  int exponent;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1, std::max(exponent - 1, 1 - M::kBias) - M::kMantissa);
  const double rounded = std::nearbyint(x / unit) * unit;
  const double past = (1u << (M::kBits - 1)) - (M::kHasInfinity ? (1u << M::kMantissa) : 1);
  const double largest = Value<T>(static_cast<std::uint32_t>(past) - 1);
  return rounded > largest ? (M::kHasInfinity ? kInfinity : kNan) : rounded;
}

template <typename T>
void ExpectRounds(float x) {
  const double want = Nearest<T>(std::fabs(x));
  const std::uint32_t got = FromFloat<T>(x).bits;
  const std::uint32_t sign = 1u << (Model<T>::kBits - 1);
  const double value = Value<T>(got & (sign - 1));
  EXPECT_TRUE(value == want || (std::isnan(value) && std::isnan(want)))
      << x << " (" << std::hex << Bits(x) << ") became " << value << ", not " << want;
  EXPECT_EQ((got & sign) != 0, std::signbit(x)) << x;
}

template <typename T>
class Conversion : public testing::Test {};
using NarrowFloats = testing::Types<Bfloat16, Float16, Float8E4M3FN, Float8E5M2>;
TYPED_TEST_SUITE(Conversion, NarrowFloats);

TYPED_TEST(Conversion, EveryPatternHasItsValue) {
  const std::uint32_t sign = 1u << (Model<TypeParam>::kBits - 1);
  for (std::uint32_t bits = 0; bits < 2 * sign; ++bits) {
    const auto pattern = static_cast<decltype(TypeParam::bits)>(bits);
    const float got = ToFloat(TypeParam{pattern});
    const double want = Value<TypeParam>(bits & (sign - 1));
    EXPECT_TRUE(std::fabs(got) == want || (std::isnan(got) && std::isnan(want))) << bits;
    EXPECT_EQ(std::signbit(got), (bits & sign) != 0) << bits;
    // And back.
    const std::uint32_t again = FromFloat<TypeParam>(got).bits;
    EXPECT_TRUE(again == bits || std::isnan(want)) << bits << " " << again;
    EXPECT_EQ(std::isnan(ToFloat(FromFloat<TypeParam>(got))), std::isnan(want)) << bits;
  }
}

TYPED_TEST(Conversion, RoundsAroundEveryTie) {
  const std::uint32_t sign = 1u << (Model<TypeParam>::kBits - 1);
  for (std::uint32_t bits = 0; bits + 1 < sign; ++bits) {
    const double low = Value<TypeParam>(bits);
    const double high = Value<TypeParam>(bits + 1);
    if (!std::isfinite(low)) continue;
    // Beyond the largest: where the next number would be.
    const double next = std::isfinite(high) ? high : 2 * low - Value<TypeParam>(bits - 1);
    const auto tie = static_cast<float>((low + next) / 2);
    for (float x :
         {static_cast<float>(low), std::nextafterf(tie, 0.0f), tie, std::nextafterf(tie, kInfinity),
          std::nextafterf(static_cast<float>(next), 0.0f)}) {
      ExpectRounds<TypeParam>(x);
      ExpectRounds<TypeParam>(-x);
    }
  }
}

TYPED_TEST(Conversion, RoundsAnything) {
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 4099) {
    ExpectRounds<TypeParam>(FromBits(static_cast<std::uint32_t>(bits)));
  }
}

TEST(RoundToInt, RoundsTiesToEven) {
  for (float x : {0.0f, 0.5f, 1.5f, 2.5f, 126.5f, 127.0f, 4161536.0f, 0.49999997f, 1e-40f}) {
    EXPECT_EQ(RoundToInt(x), static_cast<std::int32_t>(std::nearbyint(x))) << x;
    EXPECT_EQ(RoundToInt(-x), static_cast<std::int32_t>(std::nearbyint(-x))) << x;
  }
}

// --- Messages
// -----------------------------------------------------------------------------------------

TEST(MessageSize, IsEvenAndHoldsTheScales) {
  EXPECT_EQ(MessageSize(Wire::kInt8, 512, 256), 516);
  EXPECT_EQ(MessageSize(Wire::kInt8, 513, 256), 514 + 6);
  EXPECT_EQ(MessageSize(Wire::kInt4, 513, 256), 258 + 6);
  EXPECT_EQ(MessageSize(Wire::kInt4, 1, 2), 2 + 2);
  EXPECT_EQ(MessageSize(Wire::kFloat16, 513, 0), 513);
  EXPECT_EQ(MessageSize(Wire::kInt8, 0, 256), 0);
  EXPECT_EQ(MessageSize(Wire::kInt8, std::int64_t{1} << 40, kWhole), (std::int64_t{1} << 40) + 2);
}

template <Wire kWire>
void ExpectScale(float amax) {
  const Scale scale = ScaleOf<kWire>(Magnitude(amax));
  const float value = ScaleFromBits(scale.bits);
  ASSERT_TRUE(scale.finite);
  EXPECT_EQ(scale.inverse, 1.0f / value);
  // Up to two roundings short of amax / largest, and never much above.
  const double least = static_cast<double>(amax) / BlockFormat<kWire>::kLargest;
  EXPECT_GE(value, least * (1 - 1e-7)) << amax;
  const double floor = FromBits(BlockFormat<kWire>::kFloor);
  EXPECT_LE(value, std::max(floor, least * (1 + 1.0 / 127))) << amax;
}

TEST(ScaleOf, IsTheLeastThatCoversTheBlock) {
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) {
    const float amax = FromBits(static_cast<std::uint32_t>(random() % 0x7f800000));
    ExpectScale<Wire::kInt8>(amax);
    ExpectScale<Wire::kInt4>(amax);
    ExpectScale<Wire::kFloat8E4M3FN>(amax);
    ExpectScale<Wire::kFloat8E5M2>(amax);
  }
}

TEST(ScaleOf, IsNanForABlockThatIsNotFinite) {
  for (float amax : {kInfinity, kNan}) {
    const Scale scale = ScaleOf<Wire::kInt8>(Magnitude(amax));
    EXPECT_FALSE(scale.finite);
    EXPECT_TRUE(std::isnan(ScaleFromBits(scale.bits)));
  }
}

TEST(QuantizeStochastic, HasTheValueForItsMean) {
  constexpr int kDraws = 100000;
  for (float x : {0.25f, -0.25f, 3.7f, -126.99f, 127.0f, 1e-3f, 0.0f}) {
    double sum = 0;
    for (std::uint32_t i = 0; i < kDraws; ++i) {
      const auto q =
          static_cast<std::int8_t>(QuantizeStochastic<Wire::kInt8>(x, 1.0f, {{7, 9}}, i));
      EXPECT_LE(std::fabs(q - x), 1.0f);
      sum += q;
    }
    EXPECT_NEAR(sum / kDraws, x, 5 * 0.5 / std::sqrt(kDraws)) << x;
  }
}

// --- Kernels
// ------------------------------------------------------------------------------------------

// Memory of exactly its size, so that AddressSanitizer sees every step beyond; at an odd address,
// as kernels must take any.
class Memory {
 public:
  explicit Memory(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes)), memory_(new unsigned char[bytes_ + 1]) {
    std::memset(data(), 0xcd, bytes_);
  }
  Memory(const Memory& other) : Memory(static_cast<std::int64_t>(other.bytes_)) {
    std::memcpy(data(), other.data(), bytes_);
  }

  unsigned char* data() { return memory_.get() + 1; }
  const unsigned char* data() const { return memory_.get() + 1; }
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_); }

  template <typename T>
  T Get(std::int64_t i) const {
    T value;
    std::memcpy(&value, data() + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    return value;
  }
  template <typename T>
  void Set(std::int64_t i, T value) {
    std::memcpy(data() + i * static_cast<std::int64_t>(sizeof(T)), &value, sizeof(T));
  }

 private:
  std::size_t bytes_;
  std::unique_ptr<unsigned char[]> memory_;
};

bool SameFloat(float a, float b) { return Bits(a) == Bits(b) || (std::isnan(a) && std::isnan(b)); }

// Equal bytes; of 16-bit floats and float32 any two NaNs are equal.
void ExpectSame(const Memory& got, const Memory& want, Wire floats) {
  ASSERT_EQ(got.bytes(), want.bytes());
  if (std::memcmp(got.data(), want.data(), static_cast<std::size_t>(got.bytes())) == 0) return;
  for (std::int64_t i = 0; i < got.bytes() / 2; ++i) {
    const auto a = got.Get<std::uint16_t>(i), b = want.Get<std::uint16_t>(i);
    const bool half = floats == Wire::kFloat16;
    const float x = half ? ToFloat(Float16{a}) : ToFloat(Bfloat16{a});
    const float y = half ? ToFloat(Float16{b}) : ToFloat(Bfloat16{b});
    const bool is_float = half || floats == Wire::kBfloat16;
    ASSERT_TRUE(a == b || (is_float && SameFloat(x, y)))
        << "at byte " << 2 * i << ": " << a << " " << b;
  }
  const std::int64_t last =
      got.bytes() - 1;  // Of an odd number of bytes it is still to be compared.
  ASSERT_EQ(got.data()[last], want.data()[last]);
}

void ExpectSameFloats(const Memory& got, const Memory& want) {
  ASSERT_EQ(got.bytes(), want.bytes());
  for (std::int64_t i = 0; i < got.bytes() / 4; ++i) {
    ASSERT_TRUE(SameFloat(got.Get<float>(i), want.Get<float>(i)))
        << "at " << i << ": " << got.Get<float>(i) << " " << want.Get<float>(i);
  }
}

// The kernels, an element at a time. Volatile products and sums cannot be contracted.
float Times(float a, float b) {
  volatile float product = a * b;
  return product;
}
float Plus(float a, float b) {
  volatile float sum = a + b;
  return sum;
}

float Read(const Format& format, const Memory& data, std::int64_t i) {
  return format.data == DataType::kFloat32 ? data.Get<float>(i) : ToFloat(data.Get<Bfloat16>(i));
}

template <Wire kWire>
std::uint32_t ReferenceQuantize(float x, float inverse, const Seed* seed, std::int64_t i) {
  if constexpr (RoundsStochastically(kWire)) {
    if (seed != nullptr) {
      return QuantizeStochastic<kWire>(x, inverse, *seed, static_cast<std::uint32_t>(i));
    }
    const float rounded = std::nearbyintf(Times(x, inverse));
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(rounded)) &
           (kWire == Wire::kInt4 ? 0xf : 0xff);
  } else {
    return Quantize<kWire>(x, inverse);
  }
}

// Bits [4 i, 4 i + 4) of int4, bytes of the others.
std::uint32_t GetCode(Wire wire, const Memory& message, std::int64_t i) {
  if (wire != Wire::kInt4) return message.data()[i];
  return (message.data()[i / 2] >> (4 * (i % 2))) & 0xf;
}
void SetCode(Wire wire, Memory& message, std::int64_t i, std::uint32_t code) {
  if (wire != Wire::kInt4) {
    message.data()[i] = static_cast<unsigned char>(code);
  } else if (i % 2 == 0) {
    message.data()[i / 2] = static_cast<unsigned char>(code);  // The high half is zero so far.
  } else {
    message.data()[i / 2] |= static_cast<unsigned char>(code << 4);
  }
}

template <Wire kWire>
Memory ReferenceEncode(const Format& format, const std::vector<float>& values, const Seed* seed) {
  Memory message(MessageSize(kWire, format.n, format.block) * (IsBlockScaled(kWire) ? 1 : 2));
  if constexpr (!IsBlockScaled(kWire)) {
    for (std::int64_t i = 0; i < format.n; ++i) {
      message.Set(i, EncodeCast<kWire>(values[static_cast<std::size_t>(i)]));
    }
  } else {
    const std::int64_t scales = ScalesOffset(kWire, format.n);
    for (std::int64_t i = ValueBytes(kWire, format.n); i < scales; ++i) message.data()[i] = 0;
    for (std::int64_t block = 0; block < Blocks(format.n, format.block); ++block) {
      const std::int64_t first = block == 0 ? 0 : block * format.block;
      const std::int64_t size = std::min(format.block, format.n - first);
      std::uint32_t amax = 0;
      for (std::int64_t i = first; i < first + size; ++i) {
        amax = std::max(amax, Magnitude(values[static_cast<std::size_t>(i)]));
      }
      const Scale scale = ScaleOf<kWire>(amax);
      for (std::int64_t i = first; i < first + size; ++i) {
        const float x = values[static_cast<std::size_t>(i)];
        SetCode(kWire, message, i,
                scale.finite ? ReferenceQuantize<kWire>(x, scale.inverse, seed, i) : 0);
      }
      message.Set(scales / 2 + block, scale.bits);
    }
  }
  return message;
}

template <Wire kWire>
std::vector<float> ReferenceDecode(const Format& format, const Memory& message) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < format.n; ++i) {
    if constexpr (!IsBlockScaled(kWire)) {
      values.push_back(DecodeCast<kWire>(message.Get<std::uint16_t>(i)));
    } else {
      const std::int64_t scales = ScalesOffset(kWire, format.n) / 2;
      const auto scale = message.Get<std::uint16_t>(scales + i / format.block);
      values.push_back(Times(Dequantize<kWire>(GetCode(kWire, message, i)), ScaleFromBits(scale)));
    }
  }
  return values;
}

// Numbers of many sizes; the last blocks of a long row hold what is special.
std::vector<float> Numbers(std::int64_t n, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values;
  for (std::int64_t i = 0; i < n; ++i) {
    const int exponent = static_cast<int>((i / 256 + seed) % 7) * 8 - 24;
    values.push_back(std::ldexp(normal(random), exponent));
  }
  const float specials[] = {0.0f, -0.0f, 1e-40f, -1e-40f, 3e38f, -3.4028235e38f, kInfinity, kNan};
  for (int i = 0; i < 8 && n > 8 * 600; ++i) {
    values[static_cast<std::size_t>(n - 600 * (i + 1))] =
        specials[(i + static_cast<int>(seed)) % 8];
  }
  return values;
}

Memory Store(const Format& format, const std::vector<float>& values) {
  Memory data(format.n * SizeOf(format.data));
  for (std::int64_t i = 0; i < format.n; ++i) {
    const float x = values[static_cast<std::size_t>(i)];
    if (format.data == DataType::kFloat32) {
      data.Set(i, x);
    } else {
      data.Set(i, FromFloat<Bfloat16>(x));
    }
  }
  return data;
}

Memory StoreFloats(std::int64_t n, const std::vector<float>& values) {
  return Store({Wire::kIdentity, DataType::kFloat32, n, 0}, values);
}

// One kernel of one format, against the reference, apart and in place.
template <Wire kWire>
void CheckLossy(const Kernels& kernels, const Format& format, float factor, const Seed* seed) {
  SCOPED_TRACE(std::string(kernels.name) + ", " + NameOf(kWire) + ", n " +
               std::to_string(format.n) + ", block " + std::to_string(format.block) + ", " +
               (format.data == DataType::kFloat32 ? "float32" : "bfloat16") + ", factor " +
               std::to_string(factor) + (seed == nullptr ? "" : ", stochastic"));
  const Memory sent = Store(format, Numbers(format.n, 0));
  const Memory local = Store(format, Numbers(format.n, 3));

  std::vector<float> scaled;
  for (std::int64_t i = 0; i < format.n; ++i) {
    const float x = Read(format, sent, i);
    scaled.push_back(factor == 1.0f ? x : Times(x, factor));
  }
  const Memory want = ReferenceEncode<kWire>(format, scaled, seed);
  Memory message(want.bytes());
  kernels.encode(format, sent.data(), factor, seed, message.data());
  ExpectSame(message, want, kWire);

  const std::vector<float> decoded = ReferenceDecode<kWire>(format, want);
  Memory stored(sent.bytes());
  kernels.decode(format, want.data(), stored.data());
  if (format.data == DataType::kFloat32) {
    ExpectSameFloats(stored, Store(format, decoded));
  } else {
    ExpectSame(stored, Store(format, decoded), Wire::kBfloat16);
  }

  std::vector<float> sums;
  for (std::int64_t i = 0; i < format.n; ++i) {
    const float sum = Plus(decoded[static_cast<std::size_t>(i)], Read(format, local, i));
    sums.push_back(Times(sum, factor));
  }
  Memory values(4 * format.n);
  kernels.reduce_to_float(format, want.data(), local.data(), factor, values.data());
  ExpectSameFloats(values, StoreFloats(format.n, sums));
  if (format.data == DataType::kFloat32) {
    Memory in_place(local);
    kernels.reduce_to_float(format, want.data(), in_place.data(), factor, in_place.data());
    ExpectSameFloats(in_place, values);
  }

  const Memory reduced = ReferenceEncode<kWire>(format, sums, seed);
  Memory result(want.bytes());
  kernels.reduce(format, want.data(), local.data(), factor, seed, result.data());
  ExpectSame(result, reduced, kWire);
  Memory in_place(want);
  kernels.reduce(format, in_place.data(), local.data(), factor, seed, in_place.data());
  ExpectSame(in_place, reduced, kWire);
}

void CheckAllLossy(Wire wire, std::int64_t n, std::int64_t block) {
  const Seed seed = {{123, 4000000000u}};
  WithLossyWire(wire, DataType::kFloat32, [&](auto constant, auto) {
    constexpr Wire kWire = decltype(constant)::value;
    for (DataType data : {DataType::kFloat32, DataType::kBfloat16}) {
      const Format format = {wire, data, n, block};
      for (int i = 0; const Kernels* kernels = KernelsAt(i); ++i) {
        CheckLossy<kWire>(*kernels, format, 1.0f, nullptr);
        CheckLossy<kWire>(*kernels, format, 0.3f, nullptr);
        if (RoundsStochastically(wire)) CheckLossy<kWire>(*kernels, format, 1.0f, &seed);
      }
    }
  });
}

TEST(Kernels, ShortRows) {
  for (Wire wire : kLossyWires) {
    for (std::int64_t n = 1; n <= 67; ++n) {
      for (std::int64_t block : {std::int64_t{2}, std::int64_t{6}, std::int64_t{32}, kWhole}) {
        CheckAllLossy(wire, n, block);
      }
    }
  }
}

TEST(Kernels, OddBlocks) {
  for (Wire wire : {Wire::kInt8, Wire::kFloat8E4M3FN, Wire::kFloat8E5M2}) {
    for (std::int64_t block : {1, 3, 33, 1025}) CheckAllLossy(wire, 2100, block);
  }
}

TEST(Kernels, RowsAroundABlock) {
  for (Wire wire : kLossyWires) {
    for (std::int64_t n : {255, 256, 257, 1023, 1024, 1025, 2049}) {
      for (std::int64_t block : {std::int64_t{64}, std::int64_t{256}, std::int64_t{1026}, kWhole}) {
        CheckAllLossy(wire, n, block);
      }
    }
  }
}

TEST(Kernels, LongRows) {
  for (Wire wire : kLossyWires) {
    WithLossyWire(wire, DataType::kFloat32, [&](auto constant, auto) {
      for (int i = 0; const Kernels* kernels = KernelsAt(i); ++i) {
        const Format format = {wire, DataType::kFloat32, 1000003, 256};
        CheckLossy<decltype(constant)::value>(*kernels, format, 1.0f, nullptr);
      }
    });
  }
}

// A message of wire int8, with these scales, whose codes are of all kinds.
Memory MessageOf(const Format& format, const std::vector<std::uint16_t>& scales) {
  Memory message(MessageSize(format.wire, format.n, format.block));
  for (std::int64_t i = 0; i < format.n; ++i) {
    message.data()[i] = static_cast<unsigned char>(4 * i + 3);
  }
  for (std::size_t i = 0; i < scales.size(); ++i) {
    message.Set(format.n / 2 + static_cast<std::int64_t>(i), scales[i]);
  }
  return message;
}

// All kernels, against the reference.
void CheckInt8(const Format& format, const Memory& message, const Memory& local) {
  std::vector<float> sums = ReferenceDecode<Wire::kInt8>(format, message);
  for (std::int64_t i = 0; i < format.n; ++i) {
    float& sum = sums[static_cast<std::size_t>(i)];
    sum = Plus(sum, local.Get<float>(i));
  }
  const Memory want = ReferenceEncode<Wire::kInt8>(format, sums, nullptr);
  for (int i = 0; const Kernels* kernels = KernelsAt(i); ++i) {
    Memory result(want.bytes());
    kernels->reduce(format, message.data(), local.data(), 1.0f, nullptr, result.data());
    ASSERT_EQ(std::memcmp(result.data(), want.data(), static_cast<std::size_t>(want.bytes())), 0)
        << kernels->name;
  }
}

// One block of a message has any scale, the others have 1. What is added to each is about as large.
void CheckScale(std::int64_t n, std::int64_t block, std::int64_t which, std::uint32_t bits) {
  const Format format = {Wire::kInt8, DataType::kFloat32, n, block};
  std::vector<std::uint16_t> scales(static_cast<std::size_t>((n + block - 1) / block), 0x3f80);
  scales[static_cast<std::size_t>(which)] = static_cast<std::uint16_t>(bits);
  Memory local(4 * n);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint16_t scale = scales[static_cast<std::size_t>(i / block)];
    local.Set(i, Times(-0.7f * static_cast<float>(i % 64), ScaleFromBits(scale)));
  }
  SCOPED_TRACE(testing::Message() << "scale bits " << bits << " of block " << which);
  CheckInt8(format, MessageOf(format, scales), local);
}

// Scales at which a product overflows or is subnormal, and such as no encoder writes.
TEST(Kernels, AnyScale) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) CheckScale(64, 64, 0, bits);
}

// As above, in any place among blocks that are reduced together.
TEST(Kernels, AnyScaleAmongOthers) {
  for (std::uint32_t bits = 0; bits < 0x10000; bits += 61) {
    CheckScale(9 * 256, 256, bits % 9, bits);
  }
}

// What is no number, or so large that a sum is none, in any place among blocks that are.
TEST(Kernels, SpecialsAmongOthers) {
  const Format format = {Wire::kInt8, DataType::kFloat32, 9 * 256, 256};
  const Memory message = MessageOf(format, std::vector<std::uint16_t>(9, 0x7300));  // 2^103.
  const float largest = std::numeric_limits<float>::max();
  for (float special : {kNan, -kNan, kInfinity, -kInfinity, largest, -largest, 0.0f, 1e-40f}) {
    for (std::int64_t place = 0; place < format.n; place += 37) {
      Memory local(4 * format.n);
      for (std::int64_t i = 0; i < format.n; ++i) local.Set(i, 0.5f * static_cast<float>(i));
      local.Set(place, special);
      SCOPED_TRACE(testing::Message() << special << " at " << place);
      CheckInt8(format, message, local);
    }
  }
}

#if defined(__SSE__)
// Sets flush-to-zero and denormals-are-zero, as XLA:CPU does.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

TEST(Kernels, EncodeTheSameWithoutSubnormals) {
  const std::int64_t n = 4096;
  std::vector<float> tiny;
  std::mt19937 random(5);
  for (std::int64_t i = 0; i < n; ++i) {
    // Up to 2^-106, where the scales of all formats leave their floors, and both signs.
    tiny.push_back(FromBits(static_cast<std::uint32_t>(random() % 0x0a800000) |
                            static_cast<std::uint32_t>(random() & 0x80000000)));
  }
  const Seed seed = {{1, 2}};
  for (Wire wire : kLossyWires) {
    for (std::int64_t block : {2, 256}) {
      const Format format = {wire, DataType::kFloat32, n, block};
      const Memory data = Store(format, tiny);
      for (int i = 0; const Kernels* kernels = KernelsAt(i); ++i) {
        for (const Seed* seeds : {static_cast<const Seed*>(nullptr), &seed}) {
          Memory want(MessageSize(wire, n, block) * (IsBlockScaled(wire) ? 1 : 2));
          Memory got(want.bytes());
          Memory want_values(4 * n), got_values(4 * n);
          kernels->encode(format, data.data(), 1.0f, seeds, want.data());
          kernels->decode(format, want.data(), want_values.data());
          {
            const FlushSubnormals flush;
            kernels->encode(format, data.data(), 1.0f, seeds, got.data());
            kernels->decode(format, want.data(), got_values.data());
          }
          SCOPED_TRACE(std::string(kernels->name) + ", " + NameOf(wire));
          ExpectSame(got, want, wire);
          ExpectSameFloats(got_values, want_values);
        }
      }
    }
  }
}
#endif

// --- Reductions of every type
// -------------------------------------------------------------------------

template <typename T>
T Anything(std::mt19937_64& random) {
  const std::uint64_t bits = random();
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The exact result, rounded once: in long integers that wrap, in doubles, or in the type's own.
template <typename T>
T ReferenceCombine(Op op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
    switch (op) {
      case Op::kSum:
        return static_cast<T>(x + y);
      case Op::kProd:
        return static_cast<T>(x * y);
      case Op::kMax:
        return std::max(a, b);
      case Op::kMin:
        return std::min(a, b);
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    switch (op) {
      case Op::kSum:
        return a + b;
      case Op::kProd:
        return a * b;
      case Op::kMax:
        return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN()
                                              : std::max(a, b);
      case Op::kMin:
        return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN()
                                              : std::min(a, b);
    }
  }
  return T();
}

template <typename T>
bool SameNumber(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a == b;
  } else {
    return a == b || (std::isnan(a) && std::isnan(b));  // The sign of zero is free.
  }
}

template <typename T>
void ExpectCombined(Op op, T a, T b, T got) {
  if constexpr (std::is_class_v<T>) {
    const float want = ReferenceCombine(op, ToFloat(a), ToFloat(b));
    const double rounded = Nearest<T>(std::fabs(want));
    const float value = ToFloat(got);
    const bool same = std::isnan(rounded)
                          ? std::isnan(value)
                          : value == std::copysign(static_cast<float>(rounded), want);
    ASSERT_TRUE(same) << ToFloat(a) << ", " << ToFloat(b) << ": " << value << ", not " << rounded;
  } else {
    const T want = ReferenceCombine(op, a, b);
    ASSERT_TRUE(SameNumber(got, want)) << +a << ", " << +b << ": " << +got << ", not " << +want;
  }
}

template <typename T>
void CheckCombine(const Kernels& kernels, const Format& format, Op op) {
  const auto size = static_cast<std::int64_t>(sizeof(T));
  std::mt19937_64 random(static_cast<std::uint64_t>(format.n));
  Memory a(format.n * size), b(format.n * size), result(format.n * size);
  for (std::int64_t i = 0; i < format.n; ++i) {
    a.Set(i, Anything<T>(random));
    b.Set(i, Anything<T>(random));
  }
  kernels.combine(format, op, a.data(), b.data(), result.data());
  for (std::int64_t i = 0; i < format.n; ++i) {
    ExpectCombined(op, a.Get<T>(i), b.Get<T>(i), result.Get<T>(i));
  }
  Memory in_place(a);
  kernels.combine(format, op, in_place.data(), b.data(), in_place.data());
  for (std::int64_t i = 0; i < format.n; ++i) {
    ExpectCombined(op, a.Get<T>(i), b.Get<T>(i), in_place.Get<T>(i));
  }
}

class EveryType : public testing::TestWithParam<DataType> {};

TEST_P(EveryType, EveryOp) {
  WithDataType(GetParam(), [](auto type) {
    using T = typename decltype(type)::Type;
    std::vector<std::int64_t> sizes = {255, 256, 257, 1000003};
    for (std::int64_t n = 1; n <= 67; ++n) sizes.push_back(n);
    for (std::int64_t n : sizes) {
      for (Op op : {Op::kSum, Op::kMax, Op::kMin, Op::kProd}) {
        for (int i = 0; const Kernels* kernels = KernelsAt(i); ++i) {
          SCOPED_TRACE(std::string(kernels->name) + ", n " + std::to_string(n) + ", op " +
                       std::to_string(static_cast<int>(op)));
          CheckCombine<T>(*kernels, {Wire::kIdentity, GetParam(), n, 0}, op);
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Types, EveryType,
                         testing::Values(DataType::kFloat32, DataType::kFloat64,
                                         DataType::kBfloat16, DataType::kFloat16,
                                         DataType::kFloat8E4M3FN, DataType::kFloat8E5M2,
                                         DataType::kInt8, DataType::kInt16, DataType::kInt32,
                                         DataType::kInt64, DataType::kUint8, DataType::kUint16,
                                         DataType::kUint32, DataType::kUint64));

TEST(BestKernels, AreTheLastOfAll) {
  int count = 0;
  while (KernelsAt(count) != nullptr) ++count;
  ASSERT_GE(count, 1);
  EXPECT_EQ(&BestKernels(), KernelsAt(count - 1));
}

}  // namespace
}  // namespace jax_ring
