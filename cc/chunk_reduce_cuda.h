// The chunk kernels for CUDA: functions that launch them, free of XLA.
//
// Each launches on the given stream and returns at once: it neither waits, allocates, asks the device
// anything, nor picks one, so that a stream that is being captured takes it too. Indices of rows, and
// seeds, lie in device memory; an index outside [0, chunks) counts as the nearest inside. Rows need no
// alignment beyond their elements'; where they have 16 bytes, accesses are that wide. A result may be the very
// memory of an operand of the same size; else they are apart.
#ifndef JAX_RING_CHUNK_REDUCE_CUDA_H_
#define JAX_RING_CHUNK_REDUCE_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "chunk_reduce.h"

namespace jax_ring {
namespace cuda {

// messages[i] = encode(chunk[i] * factor), of a lossy wire. `seeds`, on the device, may be null: round
// to nearest.
cudaError_t Encode(cudaStream_t stream, const Format& format, const Rows& rows, const void* buffer,
                   float factor, const Seed* seeds, void* messages);

// results[i] = encode((decode(received[i]) + chunk[i]) * factor), of a lossy wire.
cudaError_t Reduce(cudaStream_t stream, const Format& format, const Rows& rows,
                   const void* received, const void* buffer, float factor, const Seed* seeds,
                   void* results);

// results[i] = (decode(received[i]) + chunk[i]) * factor, of a lossy wire, in float32.
cudaError_t ReduceToFloat(cudaStream_t stream, const Format& format, const Rows& rows,
                          const void* received, const void* buffer, float factor, float* results);

// chunk[i] = decode(messages[i]), of a lossy wire, rounded to the type of the data.
cudaError_t Decode(cudaStream_t stream, const Format& format, const Rows& rows,
                   const void* messages, void* buffer);

// results[i] = op(received[i], chunk[i]) in the type of the data.
cudaError_t Combine(cudaStream_t stream, const Format& format, const Rows& rows, Op op,
                    const void* received, const void* buffer, void* results);

// results[i] = chunk[i], and chunk[i] = values[i], as they are.
cudaError_t TakeRows(cudaStream_t stream, const Format& format, const Rows& rows,
                     const void* buffer, void* results);
cudaError_t PutRows(cudaStream_t stream, const Format& format, const Rows& rows,
                    const void* values, void* buffer);

}  // namespace cuda
}  // namespace jax_ring

#endif  // JAX_RING_CHUNK_REDUCE_CUDA_H_
