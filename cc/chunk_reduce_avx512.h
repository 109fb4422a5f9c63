// The reduction of wire int8 with float32 data and blocks of the default size, by hand for AVX-512:
// half of the instructions of chunk_reduce_avx2.h. Included by chunk_reduce_cpu.inc where the
// target has AVX-512 F, BW, DQ and VL.
//
// Four blocks are summed at a time, so that their four scales are one computation.
#ifndef JAX_RING_CHUNK_REDUCE_AVX512_H_
#define JAX_RING_CHUNK_REDUCE_AVX512_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "chunk_reduce_avx2.h"

namespace jax_ring {
namespace JAX_RING_ISA {
namespace {

// The block that the loops below take, and how many of them.
constexpr int kInt8Block = 256;
constexpr int kInt8Group = 4;
constexpr int kInt8Lanes = 16;

// Blocks that are summed, and wait to be rounded.
struct alignas(64) Int8Group {
  float values[kInt8Group * kInt8Block];
  float inverse[kInt8Group];  // Of their scales.
};

// values = codes * scale + local, of a block. Products are exact, as for SumInt8. Returns 16
// magnitudes, of which the largest is the block's, but for NaN, which range drops.
JAX_RING_HOST_DEVICE __m512i SumInt8Block(const unsigned char* codes, float scale,
                                          const unsigned char* local, float* values) {
  const __m512 unit = _mm512_set1_ps(scale);
  const auto sum = [&](int i) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    const __m512 sixteen = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), unit,
                                           _mm512_loadu_ps(local + 4 * i));
    _mm512_store_ps(values + i, sixteen);
    return sixteen;
  };
  constexpr int kLargestMagnitude = 0b1011;
  __m512i largest = {};
#pragma GCC unroll 8
  for (int i = 0; i < kInt8Block; i += 2 * kInt8Lanes) {
    const __m512 both = _mm512_range_ps(sum(i), sum(i + kInt8Lanes), kLargestMagnitude);
    largest = _mm512_max_epi32(largest, _mm512_castps_si512(both));
  }
  return largest;
}

// The largest of each of four vectors.
JAX_RING_HOST_DEVICE __m128i LargestOfEach(const __m512i (&vectors)[kInt8Group]) {
  const auto of_pairs = [](__m512i a, __m512i b) {
    return _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const __m512i ab = of_pairs(vectors[0], vectors[1]);
  const __m512i cd = of_pairs(vectors[2], vectors[3]);
  const __m512i four =
      _mm512_max_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half =
      _mm256_max_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
  return _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Sums a group of blocks. Writes their scales as ScaleOf makes them, but for values that are not
// finite.
JAX_RING_HOST_DEVICE void SumInt8Group(const unsigned char* codes, const float (&units)[kInt8Group],
                                       const unsigned char* local, Int8Group& group,
                                       unsigned char* scales) {
  using Int8 = BlockFormat<Wire::kInt8>;
  __m512i largest[kInt8Group];
#pragma GCC unroll 4
  for (int j = 0; j < kInt8Group; ++j) {
    const int first = j * kInt8Block;
    largest[j] =
        SumInt8Block(codes + first, units[j], local + 4 * first, group.values + first);
  }
  const __m128 amax = _mm_castsi128_ps(LargestOfEach(largest));
  const __m128i product = _mm_castps_si128(_mm_mul_ps(amax, _mm_set1_ps(1.0f / Int8::kLargest)));
  const __m128i up = _mm_srli_epi32(_mm_add_epi32(product, _mm_set1_epi32(0xffff)), 16);
  const __m128i bits = _mm_max_epi32(up, _mm_set1_epi32(Int8::kFloor >> 16));
  _mm_store_ps(group.inverse,
               _mm_div_ps(_mm_set1_ps(1.0f), _mm_castsi128_ps(_mm_slli_epi32(bits, 16))));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(scales), _mm_packus_epi32(bits, bits));
}

// Makes zeros of the blocks in which a value is not finite, and NaN of their scales.
[[gnu::noinline, gnu::cold]] void MarkInt8Group(const Int8Group& group, unsigned char* codes,
                                                unsigned char* scales) {
  for (int j = 0; j < kInt8Group; ++j) {
    std::uint32_t largest = 0;
    for (int i = 0; i < kInt8Block; ++i) {
      const std::uint32_t magnitude = Magnitude(group.values[j * kInt8Block + i]);
      largest = magnitude > largest ? magnitude : largest;
    }
    const Scale scale = ScaleOf<Wire::kInt8>(largest);
    if (scale.finite) continue;
    std::memset(codes + j * kInt8Block, 0, kInt8Block);
    std::memcpy(scales + 2 * j, &scale.bits, sizeof(scale.bits));
  }
}

// codes = values / scale, rounded, of a group.
JAX_RING_HOST_DEVICE void QuantizeInt8Group(const Int8Group& group, unsigned char* codes,
                                            unsigned char* scales) {
  // Packing works in each quarter by itself, and leaves groups of four in this order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i least = {};
  for (int j = 0; j < kInt8Group; ++j) {
    const __m512 factor = _mm512_set1_ps(group.inverse[j]);
    const auto rounded = [&](const float* sixteen) {
      return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(sixteen), factor));
    };
#pragma GCC unroll 4
    for (int i = j * kInt8Block; i < (j + 1) * kInt8Block; i += 4 * kInt8Lanes) {
      const float* values = group.values + i;
      const __m512i first = _mm512_packs_epi32(rounded(values), rounded(values + 16));
      const __m512i second = _mm512_packs_epi32(rounded(values + 32), rounded(values + 48));
      const __m512i packed = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(first, second));
      least = _mm512_min_epi8(least, packed);
      _mm512_storeu_si512(codes + i, packed);
    }
  }
  // NaN, as of a value or as infinity by infinity, becomes the least code, which no number does.
  if (__builtin_expect(_mm512_cmpeq_epi8_mask(least, _mm512_set1_epi8(-128)) != 0, 0)) {
    MarkInt8Group(group, codes, scales);
  }
}

}  // namespace
}  // namespace JAX_RING_ISA
}  // namespace jax_ring

#endif  // JAX_RING_CHUNK_REDUCE_AVX512_H_
