// The chunk kernels for AVX-512 F, BW, DQ and VL.
#define JAX_RING_ISA avx512
#include "chunk_reduce_cpu.inc"
