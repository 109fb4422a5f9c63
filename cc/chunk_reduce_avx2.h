// The two loops of wire int8 with float32 data, the most common case, by hand: g++ makes 61 vector
// instructions for 32 elements of them, here are 34. Included by chunk_reduce_cpu.inc where the
// target has AVX2 and FMA.
#ifndef JAX_RING_CHUNK_REDUCE_AVX2_H_
#define JAX_RING_CHUNK_REDUCE_AVX2_H_

#include <immintrin.h>

#include <cstdint>

#include "chunk_reduce.h"

namespace jax_ring {
namespace JAX_RING_ISA {
namespace {

// Elements that one turn of the loops below takes.
constexpr std::int64_t kInt8Step = 32;

// Whether SumInt8 is exact for this scale: 2^-24 of it is normal, and 128 times it is finite. So it
// is but for blocks of tiny numbers, blocks that reach the largest floats, and what no encoder
// writes.
JAX_RING_HOST_DEVICE bool CanSumInt8(float scale) {
  return scale >= FromBits((127 - 102) << 23) && scale < FromBits((127 + 120) << 23);
}

// values[i] = codes[i] * scale + local[i], of `count` elements, a multiple of kInt8Step. Returns
// their largest Magnitude. The products are exact, so that fusing them with the sums changes no
// bit.
JAX_RING_HOST_DEVICE std::int32_t SumInt8(const unsigned char* codes, float scale,
                                          const unsigned char* local, std::int64_t count,
                                          float* values) {
  // Each byte goes to the top of a word, which is then 2^24 times its value: one shuffle and one
  // conversion, where a sign extension over 128 bits alone takes two.
  const __m256i low =
      _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1, 3,  //
                       -1, -1, -1, 4, -1, -1, -1, 5, -1, -1, -1, 6, -1, -1, -1, 7);
  const __m256i high =
      _mm256_setr_epi8(-1, -1, -1, 8, -1, -1, -1, 9, -1, -1, -1, 10, -1, -1, -1, 11,  //
                       -1, -1, -1, 12, -1, -1, -1, 13, -1, -1, -1, 14, -1, -1, -1, 15);
  const __m256 unit = _mm256_set1_ps(scale * FromBits((127 - 24) << 23));
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  constexpr int kVectors = kInt8Step / 8;
  __m256i largest[kVectors] = {};
  for (std::int64_t i = 0; i < count; i += kInt8Step) {
    for (int j = 0; j < kVectors; ++j) {
      const auto* sixteen = reinterpret_cast<const __m128i*>(codes + i + j / 2 * 16);
      const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(sixteen));
      const __m256i words = _mm256_shuffle_epi8(both, j % 2 == 0 ? low : high);
      const __m256 sum =
          _mm256_fmadd_ps(_mm256_cvtepi32_ps(words), unit,
                          _mm256_loadu_ps(reinterpret_cast<const float*>(local + 4 * (i + 8 * j))));
      _mm256_storeu_ps(values + i + 8 * j, sum);
      largest[j] = _mm256_max_epi32(largest[j], _mm256_castps_si256(_mm256_and_ps(sum, magnitude)));
    }
  }
  const __m256i eight = _mm256_max_epi32(_mm256_max_epi32(largest[0], largest[1]),
                                         _mm256_max_epi32(largest[2], largest[3]));
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, _MM_SHUFFLE(1, 0, 3, 2)));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, _MM_SHUFFLE(2, 3, 0, 1)));
  return _mm_cvtsi128_si32(most);
}

// codes[i] = Quantize<Wire::kInt8>(values[i], inverse), of `count` elements, a multiple of
// kInt8Step.
JAX_RING_HOST_DEVICE void QuantizeInt8(const float* values, float inverse, std::int64_t count,
                                       unsigned char* codes) {
  const __m256 factor = _mm256_set1_ps(inverse);
  const auto rounded = [&](const float* eight) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(eight), factor));
  };
  // Packing works in each half by itself, and leaves groups of four in this order.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (std::int64_t i = 0; i < count; i += kInt8Step) {
    const __m256i first = _mm256_packs_epi32(rounded(values + i), rounded(values + i + 8));
    const __m256i second = _mm256_packs_epi32(rounded(values + i + 16), rounded(values + i + 24));
    const __m256i packed = _mm256_packs_epi16(first, second);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                        _mm256_permutevar8x32_epi32(packed, order));
  }
}

}  // namespace
}  // namespace JAX_RING_ISA
}  // namespace jax_ring

#endif  // JAX_RING_CHUNK_REDUCE_AVX2_H_
