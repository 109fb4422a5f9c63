// The chunk kernels for CPUs: pure functions of memory, free of XLA.
//
// One thread, no locks, no allocation; a few kilobytes of stack, whatever the block. Pointers need
// no alignment. A result may be the very memory of an operand of the same size; else they are
// apart.
#ifndef JAX_RING_CHUNK_REDUCE_CPU_H_
#define JAX_RING_CHUNK_REDUCE_CPU_H_

#include "chunk_reduce.h"

namespace jax_ring {

// The kernels as compiled for one instruction set. Each works on one row, of format.n elements.
// Every set gives the same bits, but for the payload of a NaN that a sum of two NaNs has.
struct Kernels {
  const char* name;

  // message = encode(chunk * factor), of a lossy wire. `seed` may be null: round to nearest.
  void (*encode)(const Format& format, const void* chunk, float factor, const Seed* seed,
                 void* message) noexcept;

  // result = encode((decode(received) + chunk) * factor), of a lossy wire.
  void (*reduce)(const Format& format, const void* received, const void* chunk, float factor,
                 const Seed* seed, void* result) noexcept;

  // result = (decode(received) + chunk) * factor, of a lossy wire, in float32.
  void (*reduce_to_float)(const Format& format, const void* received, const void* chunk,
                          float factor, void* result) noexcept;

  // chunk = decode(message), of a lossy wire, rounded to the type of the data.
  void (*decode)(const Format& format, const void* message, void* chunk) noexcept;

  // result = op(received, chunk) in the type of the data.
  void (*combine)(const Format& format, Op op, const void* received, const void* chunk,
                  void* result) noexcept;
};

// Those of the widest vectors that this CPU has.
const Kernels& BestKernels() noexcept;

// All that this build has and this CPU can run, narrowest first; null beyond the last.
const Kernels* KernelsAt(int index) noexcept;

}  // namespace jax_ring

#endif  // JAX_RING_CHUNK_REDUCE_CPU_H_
