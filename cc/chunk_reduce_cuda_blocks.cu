// The CUDA kernels that write block-scaled messages: they find the scale of each block, and round to it,
// in one pass. The values of a block wait in registers for its scale; those of a block of more than
// kMostThreads * kValues elements, which do not fit, are computed again.
//
// In place of a received message this is safe: each value is read and written by one thread, and the
// search for the largest, in which all threads of a block take part, lies between the reading of its old
// scale and the writing of the new.
#include <cstdint>

#include "chunk_reduce_cuda.cuh"

namespace jax_ring {
namespace cuda {
namespace {

// Values that a thread holds.
constexpr int kValues = 16;

// Of a thread block that works on one block.
constexpr int kMostThreads = 512;

// Thread blocks of kThreads that a multiprocessor is to hold: as many as leave each thread the registers it
// needs (tools/kernel_report.sh).
template <Wire kWire>
constexpr int kResident = kWire == Wire::kInt8 ? 3 : 2;

constexpr unsigned kAllLanes = 0xffffffff;

// Some blocks of a row, or as much of one as is held in registers at a time.
template <typename T>
struct Part {
  const Byte* received;
  const T* chunk;
  Byte* result;
  std::uint32_t index;  // Of the first element in its row, modulo 2^32.
  int left;             // Elements up to the end of the row; if that is far, more than is asked for.
  int size;             // Of a block.
  int step;             // Elements from one block to the next.

  __device__ __forceinline__ int Count(int block) const { return min(size, left - block * step); }
};

// What does not differ between the blocks of a row.
struct Rounding {
  float factor;
  bool random;
  Seed seed;
};

// How the threads that work on a block take its elements, side by side.
enum class Access {
  kFull,     // In vectors, of which the block has one for each of their turns: nothing to check.
  kVectors,  // In vectors.
  kFewest    // As few at a time as fill a byte, whatever the alignment.
};

// The kernels of a wire for data of type T. kReduce: messages are received, and added to the data.
// `lanes` threads work on a block, this one is number `lane` of them.
template <Wire kOfWire, typename T, bool kReduce>
struct Quantizer {
  using Data = T;
  static constexpr Wire kWire = kOfWire;
  static constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));

  template <Access kAccess>
  static constexpr int kElements = kAccess != Access::kFewest ? kVector : IsPacked(kWire) ? 2 : 1;

  Batch<const Byte> received;
  Chunks<const Byte> chunks;
  Batch<Byte> results;
  const Seed* seeds;
  float factor;
  std::int64_t n;
  std::int64_t block;
  std::int64_t blocks;

  struct Row {
    const Byte* received;
    const T* chunk;
    Byte* result;
    Rounding rounding;

    // Whether parts that begin with a block can be taken in vectors.
    __device__ __forceinline__ bool IsAligned(std::int64_t block) const {
      constexpr int kBytes = kCodeBytes<kWire, kVector>;
      return block % kVector == 0 && cuda::IsAligned<kVectorBytes>(chunk) &&
             (!kReduce || cuda::IsAligned<kBytes>(received)) && cuda::IsAligned<kBytes>(result);
    }

    // From element `first` on, of which the row has `left`.
    __device__ __forceinline__ Part<T> PartAt(std::int64_t first, std::int64_t left, int size,
                                              int step) const {
      constexpr std::int64_t kFar = 1 << 30;
      const std::int64_t offset = CodeOffset<kWire>(first);
      return {received + offset,
              chunk + first,
              result + offset,
              static_cast<std::uint32_t>(first),
              static_cast<int>(left < kFar ? left : kFar),
              size,
              step};
    }

    __device__ __forceinline__ float ReceivedScale(std::int64_t n, std::int64_t block) const {
      if constexpr (!kReduce) return 0.0f;
      return ScaleFromBits(
          reinterpret_cast<const std::uint16_t*>(received + ScalesOffset(kWire, n))[block]);
    }

    __device__ __forceinline__ void StoreScale(std::int64_t n, std::int64_t block,
                                               Scale scale) const {
      reinterpret_cast<std::uint16_t*>(result + ScalesOffset(kWire, n))[block] = scale.bits;
    }

    __device__ __forceinline__ void StorePadding(std::int64_t n) const {
      const std::int64_t bytes = ValueBytes(kWire, n);
      if (bytes % 2 != 0) result[bytes] = 0;
    }
  };

  __device__ __forceinline__ Row At(std::int64_t i) const {
    const bool random = RoundsStochastically(kWire) && seeds != nullptr;
    return {kReduce ? received.At(i) : nullptr, reinterpret_cast<const T*>(chunks.At(i)),
            results.At(i), {factor, random, random ? seeds[i] : Seed()}};
  }

  // The values to be sent of kBlocks blocks, and zeros beyond their ends.
  template <Access kAccess, int kBlocks, int kHeld>
  static __device__ __forceinline__ void Compute(const Part<T>& part,
                                                 const float (&scales)[kBlocks], float factor,
                                                 int lanes, int lane,
                                                 float (&values)[kBlocks][kHeld]) {
    constexpr int kCount = kElements<kAccess>;
    constexpr int kPackets = kBlocks * kHeld / kCount;
    // As many loads before their use as there are vectors, to have enough of memory on the way.
    constexpr int kBatch = kBlocks * kHeld / kVector;
#pragma unroll
    for (int first = 0; first < kPackets; first += kBatch) {
      Vector<T, kCount> local[kBatch];
      Codes<kWire, kCount> codes[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int block = (first + k) * kCount / kHeld;
        const int i = ((first + k) % (kHeld / kCount) * lanes + lane) * kCount;
        LoadPacket<kAccess>(part, block, i, local[k], codes[k]);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int block = (first + k) * kCount / kHeld;
        const int held = (first + k) * kCount % kHeld;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          float value = ToFloat(local[k].Get(j));
          if constexpr (kReduce) {
            value = Add(Multiply(Decoded<kWire>(codes[k], j), scales[block]), value);
          }
          values[block][held + j] = Multiply(value, factor);  // A product with 1 changes no number.
        }
      }
    }
  }

  // Elements [i, i + kCount) of a block, or as many as it has, and zeros.
  template <Access kAccess, int kCount>
  static __device__ __forceinline__ void LoadPacket(const Part<T>& part, int block, int i,
                                                    Vector<T, kCount>& local,
                                                    Codes<kWire, kCount>& codes) {
    local = {};
    codes = {};
    const int count = part.Count(block) - i;
    if (kAccess != Access::kFull && count <= 0) return;
    const int at = block * part.step + i;
    if constexpr (kReduce) {
      codes = Load<kCodeBytes<kWire, kCount>>(part.received, CodeOffset<kWire>(at));
    }
    if constexpr (kAccess != Access::kFewest) {
      local = Load<kCount>(part.chunk, at);
    } else {
      local.Set(0, part.chunk[at]);
      if constexpr (kCount == 2) {
        if (count > 1) {
          local.Set(1, part.chunk[at + 1]);
        } else {  // Whatever the message had in the half that is not used.
          const Byte lower = codes.Get(0) & 15;
          codes = {};
          codes.Set(0, lower);
        }
      }
    }
  }

  template <Access kAccess, int kHeld>
  static __device__ __forceinline__ void StoreCodes(const Part<T>& part, int block, Scale scale,
                                                    const Rounding& rounding, int lanes, int lane,
                                                    const float (&values)[kHeld]) {
    constexpr int kCount = kElements<kAccess>;
#pragma unroll
    for (int k = 0; k < kHeld / kCount; ++k) {
      const int i = (k * lanes + lane) * kCount;
      if (kAccess != Access::kFull && i >= part.Count(block)) continue;
      const int at = block * part.step + i;
      Codes<kWire, kCount> codes;
      const auto code = [&](int j) {
        const std::uint32_t index = part.index + static_cast<std::uint32_t>(at + j);
        return Code(values[k * kCount + j], scale.inverse, rounding, index);
      };
#pragma unroll
      for (int j = 0; j < kCodeBytes<kWire, kCount>; ++j) {
        const std::uint32_t byte =
            IsPacked(kWire) ? code(2 * j) | code(2 * j + 1) << 4 : code(j);
        codes.Set(j, static_cast<Byte>(byte));
      }
      if (!scale.finite) codes = {};
      Store(part.result, CodeOffset<kWire>(at), codes);
    }
  }

  static __device__ __forceinline__ std::uint32_t Code(float value, float inverse,
                                                       const Rounding& rounding,
                                                       std::uint32_t index) {
    if constexpr (RoundsStochastically(kWire)) {
      if (rounding.random) {
        return QuantizeStochastic<kWire>(value, inverse, rounding.seed, index);
      }
    }
    return Quantize<kWire>(value, inverse);
  }
};

template <int kHeld>
__device__ __forceinline__ std::uint32_t Largest(const float (&values)[kHeld]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) largest = max(largest, Magnitude(values[i]));
  return largest;
}

// --- Blocks that fit into a warp ----------------------------------------------------------------------

// Works on blocks first, first + step, ... of a row, kBlocks of them at once, kHeld values of each to a
// thread. All threads of a warp come here together.
template <Access kAccess, int kBlocks, int kHeld, typename Q>
__device__ __forceinline__ void QuantizeInWarp(const Q& task, const typename Q::Row& row,
                                               std::int64_t first, int step, int lanes, int lane) {
  constexpr bool kFull = kAccess == Access::kFull;
  const int size = static_cast<int>(task.block);
  const std::int64_t begin = first * size;
  // Full blocks side by side fill all lanes.
  const auto part =
      row.PartAt(begin, task.n - begin, size, kFull ? kWarp * kHeld : step * size);
  float scales[kBlocks];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const bool there = kFull || part.Count(i) > 0;
    scales[i] = there ? row.ReceivedScale(task.n, first + i * step) : 0.0f;
  }
  float values[kBlocks][kHeld];
  Q::template Compute<kAccess>(part, scales, row.rounding.factor, lanes, lane, values);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    std::uint32_t largest = Largest(values[i]);
    if (lanes == kWarp) {
      largest = __reduce_max_sync(kAllLanes, largest);
    } else {
      for (int distance = lanes / 2; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
      }
    }
    const Scale scale = ScaleOf<Q::kWire>(largest);
    Q::template StoreCodes<kAccess>(part, i, scale, row.rounding, lanes, lane, values[i]);
    const bool there = kFull || part.Count(i) > 0;
    if (lane == 0 && there) row.StoreScale(task.n, first + i * step, scale);
  }
}

// A thread takes kPackets vectors of a block: one, where 1, 2, 4, ... or 32 threads work on it, or
// several, where 32 do; and of as many blocks as make kValues.
template <typename Q, int kPackets>
__global__ void __launch_bounds__(kThreads, kResident<Q::kWire>)
    QuantizeByWarps(const Q task, const std::int64_t batch, const int threads_of_block) {
  constexpr int kHeld = kPackets * Q::kVector;
  constexpr int kBlocks = kValues / kHeld;
  constexpr int kWarps = kThreads / kWarp;
  const int lanes = kPackets > 1 ? kWarp : threads_of_block;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int side_by_side = kWarp / lanes;
  const int taken = kBlocks * side_by_side;  // Blocks, by a warp at a time.
  const int size = static_cast<int>(task.block);
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kWarps * taken;

  for (std::int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    const typename Q::Row row = task.At(b);
    const bool aligned = row.IsAligned(size);
    for (std::int64_t first = warp * taken; first < task.blocks; first += stride) {
      const std::int64_t mine = first + static_cast<int>(threadIdx.x) % kWarp / lanes;
      const bool whole = (first + taken) * size <= task.n;
      if (aligned && whole && size == lanes * kHeld) {
        QuantizeInWarp<Access::kFull, kBlocks, kHeld>(task, row, mine, side_by_side, lanes, lane);
      } else if (aligned && (whole || task.n % Q::kVector == 0)) {
        QuantizeInWarp<Access::kVectors, kBlocks, kHeld>(task, row, mine, side_by_side, lanes,
                                                         lane);
      } else {
#pragma unroll 1
        for (int i = 0; i < kBlocks; ++i) {
          QuantizeInWarp<Access::kFewest, 1, kHeld>(task, row, mine + i * side_by_side, 0, lanes,
                                                    lane);
        }
      }
      if (first == 0 && threadIdx.x == 0) row.StorePadding(task.n);
    }
  }
}

// --- Larger blocks --------------------------------------------------------------------------------------

// The largest of a thread block. All threads have come here before any goes on.
__device__ __forceinline__ std::uint32_t LargestOfThreadBlock(std::uint32_t value) {
  __shared__ std::uint32_t of_warps[kMostThreads / kWarp];
  const std::uint32_t of_warp = __reduce_max_sync(kAllLanes, value);
  __syncthreads();  // Until all have read what was here before.
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  const unsigned lane = threadIdx.x % kWarp;
  return __reduce_max_sync(kAllLanes, lane < blockDim.x / kWarp ? of_warps[lane] : 0);
}

// Works on a block, kValues to a thread at a time. All threads of a thread block come here together.
template <Access kAccess, typename Q>
__device__ __forceinline__ void QuantizeInThreadBlock(const Q& task, const typename Q::Row& row,
                                                      std::int64_t block) {
  const int lanes = static_cast<int>(blockDim.x);
  const int lane = static_cast<int>(threadIdx.x);
  const int held = lanes * kValues;
  const std::int64_t begin = block * task.block;
  const std::int64_t end = task.n - begin < task.block ? task.n : begin + task.block;
  const float scales[1] = {row.ReceivedScale(task.n, block)};
  float values[1][kValues];

  std::uint32_t largest = 0;
#pragma unroll 1
  for (std::int64_t first = begin; first < end; first += held) {
    const auto part = row.PartAt(first, end - first, held, 0);
    Q::template Compute<kAccess>(part, scales, row.rounding.factor, lanes, lane, values);
    largest = max(largest, Largest(values[0]));
  }
  const Scale scale = ScaleOf<Q::kWire>(LargestOfThreadBlock(largest));
#pragma unroll 1
  for (std::int64_t first = begin; first < end; first += held) {
    const auto part = row.PartAt(first, end - first, held, 0);
    if (end - begin > held) {
      Q::template Compute<kAccess>(part, scales, row.rounding.factor, lanes, lane, values);
    }
    Q::template StoreCodes<kAccess>(part, 0, scale, row.rounding, lanes, lane, values[0]);
  }
  if (lane == 0) row.StoreScale(task.n, block, scale);
}

template <typename Q>
__global__ void __launch_bounds__(kMostThreads, 1)
    QuantizeByThreadBlocks(const Q task, const std::int64_t batch) {
  for (std::int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    const typename Q::Row row = task.At(b);
    const bool aligned = row.IsAligned(task.block);
    for (std::int64_t block = blockIdx.x; block < task.blocks; block += gridDim.x) {
      if (aligned && (task.n % Q::kVector == 0 || block < task.blocks - 1)) {
        QuantizeInThreadBlock<Access::kVectors>(task, row, block);
      } else {
        QuantizeInThreadBlock<Access::kFewest>(task, row, block);
      }
      if (block == 0 && threadIdx.x == 0) row.StorePadding(task.n);
    }
  }
}

// --- Launches -------------------------------------------------------------------------------------------

int PowerOfTwoFrom(std::int64_t count) {
  int power = 1;
  while (power < count) power *= 2;
  return power;
}

template <typename Q, int kPackets>
cudaError_t LaunchByWarps(cudaStream_t stream, const Q& task, std::int64_t batch, int lanes) {
  constexpr int kBlocks = kValues / (kPackets * Q::kVector);
  const std::int64_t taken = kThreads / lanes * kBlocks;
  const std::int64_t tiles = task.blocks / taken + (task.blocks % taken != 0);
  return Launch(stream, Grid(tiles, batch), kThreads, &QuantizeByWarps<Q, kPackets>, task, batch,
                lanes);
}

template <typename Q>
cudaError_t LaunchQuantizer(cudaStream_t stream, const Q& task, std::int64_t batch) {
  const std::int64_t vectors = task.block / Q::kVector + (task.block % Q::kVector != 0);
  if (vectors <= kWarp) {
    return LaunchByWarps<Q, 1>(stream, task, batch, PowerOfTwoFrom(vectors));
  }
  if (vectors <= 2 * kWarp) return LaunchByWarps<Q, 2>(stream, task, batch, kWarp);
  if constexpr (Q::kVector <= 4) {
    if (vectors <= 4 * kWarp) return LaunchByWarps<Q, 4>(stream, task, batch, kWarp);
  }
  const std::int64_t warps = task.block / (kWarp * kValues) + 1;
  const int threads = static_cast<int>(warps < kMostThreads / kWarp ? warps * kWarp : kMostThreads);
  return Launch(stream, Grid(task.blocks, batch), threads, &QuantizeByThreadBlocks<Q>, task, batch);
}

template <bool kReduce>
cudaError_t Quantize(cudaStream_t stream, const Format& format, const Rows& rows,
                     const void* received, const void* buffer, float factor, const Seed* seeds,
                     void* results) {
  if (format.n == 0 || rows.batch == 0) return cudaSuccess;
  cudaError_t error = cudaErrorInvalidValue;
  WithLossyWire(format.wire, format.data, [&](auto wire, auto type) {
    constexpr Wire kWire = decltype(wire)::value;
    if constexpr (IsBlockScaled(kWire)) {
      const std::int64_t bytes = MessageBytes(format);
      const std::int64_t block = format.block < format.n ? format.block : format.n;
      const Quantizer<kWire, typename decltype(type)::Type, kReduce> task = {
          BatchOf(bytes, received), ChunksOf(format, rows, buffer), BatchOf(bytes, results), seeds,
          factor, format.n, block, Blocks(format.n, block)};
      error = LaunchQuantizer(stream, task, rows.batch);
    }
  });
  return error;
}

}  // namespace

cudaError_t EncodeBlocks(cudaStream_t stream, const Format& format, const Rows& rows,
                         const void* buffer, float factor, const Seed* seeds, void* messages) {
  const void* none = nullptr;
  return Quantize<false>(stream, format, rows, none, buffer, factor, seeds, messages);
}

cudaError_t ReduceBlocks(cudaStream_t stream, const Format& format, const Rows& rows,
                         const void* received, const void* buffer, float factor,
                         const Seed* seeds, void* results) {
  return Quantize<true>(stream, format, rows, received, buffer, factor, seeds, results);
}

}  // namespace cuda
}  // namespace jax_ring
