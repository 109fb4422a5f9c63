// The reduction of wire int8 with float32 data and blocks of the default size, by hand for AVX-512:
// half of the instructions of chunk_reduce_avx2.h. Included by chunk_reduce_cpu.inc where the
// target has AVX-512 F, BW, DQ and VL.
#ifndef JAX_RING_CHUNK_REDUCE_AVX512_H_
#define JAX_RING_CHUNK_REDUCE_AVX512_H_

#include <immintrin.h>

#include <cstdint>

#include "chunk_reduce_avx2.h"

namespace jax_ring {
namespace JAX_RING_ISA {
namespace {

// The block that the loops below take.
constexpr int kInt8Block = 256;
constexpr int kInt8Lanes = 16;

// values = codes * scale + local, of a block. Returns the largest Magnitude. Products are exact, as
// for SumInt8.
JAX_RING_HOST_DEVICE std::uint32_t SumInt8Block(const unsigned char* codes, float scale,
                                                const unsigned char* local, float* values) {
  const __m512 unit = _mm512_set1_ps(scale);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  constexpr int kChains = 4;  // The largest so far, each found by itself.
  __m512i largest[kChains] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kInt8Block; i += kInt8Lanes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), unit,
                                       _mm512_loadu_ps(local + 4 * i));
    _mm512_store_ps(values + i, sum);
    __m512i& most = largest[i / kInt8Lanes % kChains];
    most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(sum), magnitude));
  }
  return static_cast<std::uint32_t>(
      _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_max_epi32(largest[0], largest[1]),
                                               _mm512_max_epi32(largest[2], largest[3]))));
}

// codes = values / scale, rounded, of a block; zero if the scale is not finite.
JAX_RING_HOST_DEVICE void QuantizeInt8Block(const float* values, const Scale& scale,
                                            unsigned char* codes) {
  const __m512 factor = _mm512_set1_ps(scale.inverse);
  const __mmask16 kept = scale.finite ? 0xffff : 0;
  const auto rounded = [&](const float* sixteen) {
    return _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(_mm512_load_ps(sixteen), factor));
  };
  // Packing works in each quarter by itself, and leaves groups of four in this order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 4
  for (int i = 0; i < kInt8Block; i += 4 * kInt8Lanes) {
    const __m512i first = _mm512_packs_epi32(rounded(values + i), rounded(values + i + 16));
    const __m512i second = _mm512_packs_epi32(rounded(values + i + 32), rounded(values + i + 48));
    _mm512_storeu_si512(codes + i,
                        _mm512_permutexvar_epi32(order, _mm512_packs_epi16(first, second)));
  }
}

}  // namespace
}  // namespace JAX_RING_ISA
}  // namespace jax_ring

#endif  // JAX_RING_CHUNK_REDUCE_AVX512_H_
