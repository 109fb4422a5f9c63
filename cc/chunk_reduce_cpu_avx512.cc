// The chunk kernels for AVX-512 F, BW, DQ and VL.

// g++ 12 takes what its own headers leave undefined on purpose for a mistake.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define JAX_RING_ISA avx512
#include "chunk_reduce_cpu.inc"
