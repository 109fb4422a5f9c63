// The chunk kernels for AVX2 and FMA.
#define JAX_RING_ISA avx2
#include "chunk_reduce_cpu.inc"
