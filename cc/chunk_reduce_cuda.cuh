// What the CUDA kernels share: vectors, rows of a batch, values on the wire, and launches.
#ifndef JAX_RING_CHUNK_REDUCE_CUDA_CUH_
#define JAX_RING_CHUNK_REDUCE_CUDA_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "chunk_reduce.h"
#include "chunk_reduce_cuda.h"

namespace jax_ring {
namespace cuda {

using Byte = std::uint8_t;

constexpr int kWarp = 32;
constexpr int kThreads = 256;

// The widest access; a thread works on this many bytes of the widest type that it touches at a time, so
// that the accesses of a warp are contiguous.
constexpr int kVectorBytes = 16;

// --- Memory -----------------------------------------------------------------------------------------

template <int kBytes>
using Unsigned = std::conditional_t<
    kBytes == 1, std::uint8_t,
    std::conditional_t<kBytes == 2, std::uint16_t,
                       std::conditional_t<kBytes == 4, std::uint32_t, std::uint64_t>>>;

// kCount elements, in words of 32 bits if they fill one: a register for each narrow element would be a
// waste of these. Begins as zeros.
template <typename T, int kCount>
class alignas(sizeof(T) * kCount) Vector {
 public:
  __device__ __forceinline__ T Get(int j) const {
    const auto bits = static_cast<Unsigned<sizeof(T)>>(words_[j / kInWord] >> Shift(j));
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }

  // Once for each j.
  __device__ __forceinline__ void Set(int j, T value) {
    Unsigned<sizeof(T)> bits;
    memcpy(&bits, &value, sizeof bits);
    words_[j / kInWord] |= static_cast<Word>(static_cast<Word>(bits) << Shift(j));
  }

 private:
  static constexpr int kBytes = sizeof(T) * kCount;
  static constexpr int kWordBytes = kBytes < 4 ? kBytes : sizeof(T) < 4 ? 4 : sizeof(T);
  static constexpr int kInWord = kWordBytes / sizeof(T);
  using Word = Unsigned<kWordBytes>;

  static __device__ __forceinline__ int Shift(int j) { return 8 * sizeof(T) * (j % kInWord); }

  Word words_[kBytes / kWordBytes] = {};
};

// Elements [i, i + kCount), in one access: `base` has the alignment of the whole vector.
template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> Load(const T* base, std::int64_t i) {
  return *reinterpret_cast<const Vector<T, kCount>*>(base + i);
}

template <typename T, int kCount>
__device__ __forceinline__ void Store(T* base, std::int64_t i, const Vector<T, kCount>& vector) {
  *reinterpret_cast<Vector<T, kCount>*>(base + i) = vector;
}

template <int kBytes>
__device__ __forceinline__ bool IsAligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kBytes == 0;
}

// --- Operands of a batch ------------------------------------------------------------------------------

// [batch, bytes]: messages, or values.
template <typename B>  // Byte or const Byte.
struct Batch {
  B* first;
  std::int64_t bytes;

  __device__ __forceinline__ B* At(std::int64_t i) const { return first + i * bytes; }
};

// Of each [chunks, bytes] of a batch, the row whose index lies in device memory.
template <typename B>
struct Chunks {
  B* buffer;
  const std::int32_t* index;
  std::int64_t bytes;
  std::int64_t stride;  // From one of the batch to the next; 0: all share one.
  std::int32_t last;

  __device__ __forceinline__ B* At(std::int64_t i) const {
    const std::int32_t row = min(max(index[i], 0), last);
    return buffer + i * stride + row * bytes;
  }
};

inline std::int64_t RowBytes(const Format& format) { return format.n * SizeOf(format.data); }

template <typename Pointer>  // void* or const void*.
auto ChunksOf(const Format& format, const Rows& rows, Pointer buffer) {
  using B = std::conditional_t<std::is_same_v<Pointer, void*>, Byte, const Byte>;
  // XLA's dimensions fit into 32 bits wherever an index into them does.
  const std::int64_t last = rows.chunks - 1 < INT32_MAX ? rows.chunks - 1 : INT32_MAX;
  return Chunks<B>{static_cast<B*>(buffer), rows.index, RowBytes(format),
                   rows.shared ? 0 : rows.chunks * RowBytes(format),
                   static_cast<std::int32_t>(last)};
}

template <typename Pointer>
auto BatchOf(std::int64_t bytes, Pointer first) {
  using B = std::conditional_t<std::is_same_v<Pointer, void*>, Byte, const Byte>;
  return Batch<B>{static_cast<B*>(first), bytes};
}

// --- Values of block-scaled wires -----------------------------------------------------------------------

JAX_RING_HOST_DEVICE constexpr bool IsPacked(Wire wire) { return wire == Wire::kInt4; }

// Of kCount values, each of 8 bits, or two in a byte; a lone value of these has a byte, half of which is
// another's.
template <Wire kWire, int kCount>
constexpr int kCodeBytes = IsPacked(kWire) ? (kCount + 1) / 2 : kCount;

template <Wire kWire, int kCount>
using Codes = Vector<Byte, kCodeBytes<kWire, kCount>>;

template <Wire kWire>
__device__ __forceinline__ std::int64_t CodeOffset(std::int64_t i) {
  return IsPacked(kWire) ? i / 2 : i;
}

// What Dequantize gives. An integer of few bits is put, as an offset from the least, into the mantissa of a
// power of two, which is then subtracted: that is exact, and faster than a conversion.
template <Wire kWire>
__device__ __forceinline__ float Dequantized(std::uint32_t code) {
  if constexpr (kWire == Wire::kInt8 || kWire == Wire::kInt4) {
    constexpr std::uint32_t kMask = kWire == Wire::kInt8 ? 0xff : 0xf;
    constexpr std::uint32_t kOffset = (kMask + 1) / 2;
    constexpr std::uint32_t kPower = 0x4b000000;  // 2^23.
    return FromBits((code & kMask) ^ (kPower | kOffset)) - (8388608.0f + kOffset);
  } else {
    return Dequantize<kWire>(code & 0xff);
  }
}

// Value j of the codes, without the scale.
template <Wire kWire, typename C>
__device__ __forceinline__ float Decoded(const C& codes, int j) {
  if constexpr (IsPacked(kWire)) return Dequantized<kWire>(codes.Get(j / 2) >> (j % 2 * 4));
  return Dequantized<kWire>(codes.Get(j));
}

// --- Block-scaled messages, in chunk_reduce_cuda_blocks.cu ---------------------------------------------

cudaError_t EncodeBlocks(cudaStream_t stream, const Format& format, const Rows& rows,
                         const void* buffer, float factor, const Seed* seeds, void* messages);
cudaError_t ReduceBlocks(cudaStream_t stream, const Format& format, const Rows& rows,
                         const void* received, const void* buffer, float factor,
                         const Seed* seeds, void* results);

// --- Launches -------------------------------------------------------------------------------------------

// Each thread block takes one tile, which balances the load of itself, up to this many thread blocks;
// beyond, they stride over the grid. A rule that asks no device for its size.
constexpr std::int64_t kMostBlocksX = 1 << 16;
constexpr std::int64_t kMostBlocksY = 65535;  // CUDA's limit.

inline dim3 Grid(std::int64_t tiles, std::int64_t batch) {
  return dim3(static_cast<unsigned>(tiles < kMostBlocksX ? tiles : kMostBlocksX),
              static_cast<unsigned>(batch < kMostBlocksY ? batch : kMostBlocksY));
}

// Unlike <<<>>>, it returns its own error, and not what an earlier call of anybody left behind.
template <typename... Parameters>
cudaError_t Launch(cudaStream_t stream, dim3 grid, int threads, void (*kernel)(Parameters...),
                   Parameters... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace cuda
}  // namespace jax_ring

#endif  // JAX_RING_CHUNK_REDUCE_CUDA_CUH_
