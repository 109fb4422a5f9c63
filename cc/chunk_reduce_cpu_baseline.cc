// The chunk kernels for what every CPU of the target has.
#define JAX_RING_ISA baseline
#include "chunk_reduce_cpu.inc"
