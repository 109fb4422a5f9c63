// The CUDA kernels in which each element is computed by itself: all but those that find scales.
//
// One kernel runs them all. A task says what is done: At(i) gives the row i of the batch, Load<kCount>
// and Store<kCount> do the work on kCount elements.
#include <cstdint>
#include <type_traits>

#include "chunk_reduce_cuda.cuh"

namespace jax_ring {
namespace cuda {
namespace {

// Vectors that a thread loads before it stores any, to have enough of memory on the way.
constexpr int kUnroll = 2;

// And lone elements, which take a register each, however narrow they are.
constexpr int kSingles = 4;

constexpr int Elements(std::size_t widest) { return kVectorBytes / static_cast<int>(widest); }

constexpr std::size_t Larger(std::size_t a, std::size_t b) { return a > b ? a : b; }

// kCount elements at each first + k * stride; single ones only where they are below n.
template <int kCount, int kRepeats, typename Row>
__device__ __forceinline__ void Step(const Row& row, std::int64_t first, std::int64_t stride,
                                     std::int64_t n) {
  decltype(row.template Load<kCount>(0)) packets[kRepeats];
#pragma unroll
  for (int k = 0; k < kRepeats; ++k) {
    const std::int64_t i = first + k * stride;
    if (kCount > 1 || i < n) packets[k] = row.template Load<kCount>(i);
  }
#pragma unroll
  for (int k = 0; k < kRepeats; ++k) {
    const std::int64_t i = first + k * stride;
    if (kCount > 1 || i < n) row.template Store<kCount>(i, packets[k]);
  }
}

template <typename Task>
__global__ void __launch_bounds__(kThreads)
    Elementwise(const Task task, const std::int64_t n, const std::int64_t batch) {
  constexpr int kVector = Task::kVector;
  constexpr std::int64_t kTile = kThreads * kVector * kUnroll;
  for (std::int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    const auto row = task.At(b);
    const bool aligned = row.IsAligned();
    for (std::int64_t tile = blockIdx.x * kTile; tile < n; tile += gridDim.x * kTile) {
      if (aligned && tile + kTile <= n) {
        Step<kVector, kUnroll>(row, tile + threadIdx.x * kVector, kThreads * kVector, n);
      } else {
        // Element by element, the threads side by side, which suits any alignment.
        constexpr int kAtOnce = kVector < kSingles ? kVector : kSingles;
#pragma unroll 1
        for (int k = 0; k < kUnroll * kVector; k += kAtOnce) {
          Step<1, kAtOnce>(row, tile + k * kThreads + threadIdx.x, kThreads, n);
        }
      }
    }
  }
}

template <typename Task>
cudaError_t LaunchElementwise(cudaStream_t stream, const Task& task, std::int64_t n,
                              std::int64_t batch) {
  if (n == 0 || batch == 0) return cudaSuccess;
  constexpr std::int64_t kTile = kThreads * Task::kVector * kUnroll;
  const std::int64_t tiles = n / kTile + (n % kTile != 0);
  return Launch(stream, Grid(tiles, batch), kThreads, &Elementwise<Task>, task, n, batch);
}

// --- Chunks as they are ---------------------------------------------------------------------------------

template <typename T, Op kOp>
struct CombineTask {
  static constexpr int kVector = Elements(sizeof(T));

  Batch<const Byte> received;
  Chunks<const Byte> chunks;
  Batch<Byte> results;

  template <int kCount>
  struct Packet {
    Vector<T, kCount> received;
    Vector<T, kCount> chunk;
  };

  struct Row {
    const T* received;
    const T* chunk;
    T* result;

    __device__ __forceinline__ bool IsAligned() const {
      return cuda::IsAligned<kVectorBytes>(received) && cuda::IsAligned<kVectorBytes>(chunk) &&
             cuda::IsAligned<kVectorBytes>(result);
    }

    template <int kCount>
    __device__ __forceinline__ Packet<kCount> Load(std::int64_t i) const {
      return {cuda::Load<kCount>(received, i), cuda::Load<kCount>(chunk, i)};
    }

    template <int kCount>
    __device__ __forceinline__ void Store(std::int64_t i, const Packet<kCount>& packet) const {
      Vector<T, kCount> out;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        out.Set(j, jax_ring::Combine<kOp>(packet.received.Get(j), packet.chunk.Get(j)));
      }
      cuda::Store(result, i, out);
    }
  };

  __device__ __forceinline__ Row At(std::int64_t i) const {
    return {reinterpret_cast<const T*>(received.At(i)), reinterpret_cast<const T*>(chunks.At(i)),
            reinterpret_cast<T*>(results.At(i))};
  }
};

// Sums and products that wrap are the same with a sign and without: one kernel for both.
template <Op kOp, typename T,
          bool kWraps = std::is_integral_v<T> && (kOp == Op::kSum || kOp == Op::kProd)>
struct CombineTaskOf {
  using Type = CombineTask<T, kOp>;
};
template <Op kOp, typename T>
struct CombineTaskOf<kOp, T, true> {
  using Type = CombineTask<std::make_unsigned_t<T>, kOp>;
};

// Moves rows between a buffer and a batch, in words of the elements' size.
template <typename Word, typename From, typename To>
struct MoveTask {
  static constexpr int kVector = Elements(sizeof(Word));

  From from;
  To to;

  struct Row {
    const Word* from;
    Word* to;

    __device__ __forceinline__ bool IsAligned() const {
      return cuda::IsAligned<kVectorBytes>(from) && cuda::IsAligned<kVectorBytes>(to);
    }

    template <int kCount>
    __device__ __forceinline__ Vector<Word, kCount> Load(std::int64_t i) const {
      return cuda::Load<kCount>(from, i);
    }

    template <int kCount>
    __device__ __forceinline__ void Store(std::int64_t i, const Vector<Word, kCount>& v) const {
      cuda::Store(to, i, v);
    }
  };

  __device__ __forceinline__ Row At(std::int64_t i) const {
    return {reinterpret_cast<const Word*>(from.At(i)), reinterpret_cast<Word*>(to.At(i))};
  }
};

template <typename From, typename To>
cudaError_t Move(cudaStream_t stream, const Format& format, const Rows& rows, From from, To to) {
  const auto launch = [&](auto word) {
    return LaunchElementwise(stream, MoveTask<decltype(word), From, To>{from, to}, format.n,
                             rows.batch);
  };
  switch (SizeOf(format.data)) {
    case 1:
      return launch(std::uint8_t());
    case 2:
      return launch(std::uint16_t());
    case 4:
      return launch(std::uint32_t());
    default:
      return launch(std::uint64_t());
  }
}

// --- Messages of lossy wires --------------------------------------------------------------------------------

// Finds the block of an element; most sizes are powers of two, which saves a division.
struct BlockFinder {
  std::int64_t size;
  int shift;  // Negative: the size is no power of two.

  explicit BlockFinder(const Format& format) : size(format.block), shift(0) {
    while (shift < 62 && (std::int64_t{1} << shift) < size) ++shift;
    if ((std::int64_t{1} << shift) != size) shift = -1;
  }

  __device__ __forceinline__ std::int64_t operator()(std::int64_t i) const {
    return shift >= 0 ? i >> shift : i / size;
  }
};

// A message that is read. Its Packet<kCount> are values [i, i + kCount), of one block if it has blocks.
template <Wire kWire, bool kBlocks = IsBlockScaled(kWire)>
struct Message;

template <Wire kWire>
struct Message<kWire, false> {
  const std::uint16_t* codes;

  __device__ __forceinline__ Message(const Byte* bytes, std::int64_t, const BlockFinder&)
      : codes(reinterpret_cast<const std::uint16_t*>(bytes)) {}

  template <int kCount>
  struct Packet {
    Vector<std::uint16_t, kCount> codes;

    __device__ __forceinline__ float Value(int j) const {
      return DecodeCast<kWire>(codes.Get(j));
    }
  };

  template <int kCount>
  __device__ __forceinline__ bool IsAligned() const {
    return cuda::IsAligned<sizeof(Packet<kCount>)>(codes);
  }

  template <int kCount>
  __device__ __forceinline__ Packet<kCount> Load(std::int64_t i) const {
    return {cuda::Load<kCount>(codes, i)};
  }
};

template <Wire kWire>
struct Message<kWire, true> {
  const Byte* codes;
  const std::uint16_t* scales;
  BlockFinder block_of;

  __device__ __forceinline__ Message(const Byte* bytes, std::int64_t n, const BlockFinder& finder)
      : codes(bytes),
        scales(reinterpret_cast<const std::uint16_t*>(bytes + ScalesOffset(kWire, n))),
        block_of(finder) {}

  template <int kCount>
  struct Packet {
    Codes<kWire, kCount> codes;
    std::uint16_t scale;
    int odd;

    __device__ __forceinline__ float Value(int j) const {
      if constexpr (kCount == 1 && IsPacked(kWire)) {  // Either half of a byte.
        return Multiply(Dequantized<kWire>(codes.Get(0) >> (odd * 4)), ScaleFromBits(scale));
      }
      return Multiply(Decoded<kWire>(codes, j), ScaleFromBits(scale));
    }
  };

  template <int kCount>
  __device__ __forceinline__ bool IsAligned() const {
    return block_of.size % kCount == 0 && cuda::IsAligned<kCodeBytes<kWire, kCount>>(codes);
  }

  template <int kCount>
  __device__ __forceinline__ Packet<kCount> Load(std::int64_t i) const {
    return {cuda::Load<kCodeBytes<kWire, kCount>>(codes, CodeOffset<kWire>(i)),
            scales[block_of(i)], static_cast<int>(i % 2)};
  }
};

template <Wire kWire, typename T>
struct EncodeTask {
  static constexpr int kVector = Elements(Larger(sizeof(T), 2));

  Chunks<const Byte> chunks;
  Batch<Byte> messages;
  float factor;

  struct Row {
    const T* chunk;
    std::uint16_t* message;
    float factor;

    __device__ __forceinline__ bool IsAligned() const {
      return cuda::IsAligned<kVector * sizeof(T)>(chunk) &&
             cuda::IsAligned<kVector * 2>(message);
    }

    template <int kCount>
    __device__ __forceinline__ Vector<T, kCount> Load(std::int64_t i) const {
      return cuda::Load<kCount>(chunk, i);
    }

    template <int kCount>
    __device__ __forceinline__ void Store(std::int64_t i, const Vector<T, kCount>& packet) const {
      Vector<std::uint16_t, kCount> out;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float x = ToFloat(packet.Get(j));
        // A product, even with 1, changes the bits of a NaN.
        out.Set(j, EncodeCast<kWire>(factor == 1.0f ? x : Multiply(x, factor)));
      }
      cuda::Store(message, i, out);
    }
  };

  __device__ __forceinline__ Row At(std::int64_t i) const {
    return {reinterpret_cast<const T*>(chunks.At(i)),
            reinterpret_cast<std::uint16_t*>(messages.At(i)), factor};
  }
};

// Out: uint16, for the wire again, or float.
template <Wire kWire, typename T, typename Out>
struct ReduceTask {
  static constexpr int kVector = Elements(Larger(sizeof(T), sizeof(Out)));

  std::int64_t n;
  BlockFinder block_of;
  Batch<const Byte> received;
  Chunks<const Byte> chunks;
  Batch<Byte> results;
  float factor;

  template <int kCount>
  struct Packet {
    typename Message<kWire>::template Packet<kCount> received;
    Vector<T, kCount> chunk;
  };

  struct Row {
    Message<kWire> received;
    const T* chunk;
    Out* result;
    float factor;

    __device__ __forceinline__ bool IsAligned() const {
      return received.template IsAligned<kVector>() &&
             cuda::IsAligned<kVector * sizeof(T)>(chunk) &&
             cuda::IsAligned<kVector * sizeof(Out)>(result);
    }

    template <int kCount>
    __device__ __forceinline__ Packet<kCount> Load(std::int64_t i) const {
      return {received.template Load<kCount>(i), cuda::Load<kCount>(chunk, i)};
    }

    template <int kCount>
    __device__ __forceinline__ void Store(std::int64_t i, const Packet<kCount>& packet) const {
      Vector<Out, kCount> out;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        // A product with 1 changes no sum.
        const float sum = Multiply(
            Add(packet.received.Value(j), ToFloat(packet.chunk.Get(j))), factor);
        if constexpr (std::is_same_v<Out, float>) {
          out.Set(j, sum);
        } else {
          out.Set(j, EncodeCast<kWire>(sum));
        }
      }
      cuda::Store(result, i, out);
    }
  };

  __device__ __forceinline__ Row At(std::int64_t i) const {
    return {Message<kWire>(received.At(i), n, block_of), reinterpret_cast<const T*>(chunks.At(i)),
            reinterpret_cast<Out*>(results.At(i)), factor};
  }
};

template <Wire kWire, typename T>
struct DecodeTask {
  static constexpr int kVector = Elements(Larger(sizeof(T), 2));

  std::int64_t n;
  BlockFinder block_of;
  Batch<const Byte> messages;
  Chunks<Byte> chunks;

  struct Row {
    Message<kWire> message;
    T* chunk;

    __device__ __forceinline__ bool IsAligned() const {
      return message.template IsAligned<kVector>() &&
             cuda::IsAligned<kVector * sizeof(T)>(chunk);
    }

    template <int kCount>
    __device__ __forceinline__ auto Load(std::int64_t i) const {
      return message.template Load<kCount>(i);
    }

    template <int kCount, typename Packet>
    __device__ __forceinline__ void Store(std::int64_t i, const Packet& packet) const {
      Vector<T, kCount> out;
#pragma unroll
      for (int j = 0; j < kCount; ++j) out.Set(j, FromFloat<T>(packet.Value(j)));
      cuda::Store(chunk, i, out);
    }
  };

  __device__ __forceinline__ Row At(std::int64_t i) const {
    return {Message<kWire>(messages.At(i), n, block_of), reinterpret_cast<T*>(chunks.At(i))};
  }
};

}  // namespace

cudaError_t TakeRows(cudaStream_t stream, const Format& format, const Rows& rows,
                     const void* buffer, void* results) {
  return Move(stream, format, rows, ChunksOf(format, rows, buffer),
              BatchOf(RowBytes(format), results));
}

cudaError_t PutRows(cudaStream_t stream, const Format& format, const Rows& rows,
                    const void* values, void* buffer) {
  return Move(stream, format, rows, BatchOf(RowBytes(format), values),
              ChunksOf(format, rows, buffer));
}

cudaError_t Combine(cudaStream_t stream, const Format& format, const Rows& rows, Op op,
                    const void* received, const void* buffer, void* results) {
  cudaError_t error = cudaErrorInvalidValue;
  WithDataType(format.data, [&](auto type) {
    WithOp(op, [&](auto constant) {
      using Task = typename CombineTaskOf<decltype(constant)::value,
                                          typename decltype(type)::Type>::Type;
      const std::int64_t bytes = RowBytes(format);
      const Task task = {BatchOf(bytes, received), ChunksOf(format, rows, buffer),
                         BatchOf(bytes, results)};
      error = LaunchElementwise(stream, task, format.n, rows.batch);
    });
  });
  return error;
}

cudaError_t Encode(cudaStream_t stream, const Format& format, const Rows& rows, const void* buffer,
                   float factor, const Seed* seeds, void* messages) {
  if (IsBlockScaled(format.wire)) {
    return EncodeBlocks(stream, format, rows, buffer, factor, seeds, messages);
  }
  cudaError_t error = cudaErrorInvalidValue;
  WithLossyWire(format.wire, format.data, [&](auto wire, auto type) {
    constexpr Wire kWire = decltype(wire)::value;
    if constexpr (!IsBlockScaled(kWire)) {
      using Task = EncodeTask<kWire, typename decltype(type)::Type>;
      const Task task = {ChunksOf(format, rows, buffer), BatchOf(MessageBytes(format), messages),
                         factor};
      error = LaunchElementwise(stream, task, format.n, rows.batch);
    }
  });
  return error;
}

cudaError_t Reduce(cudaStream_t stream, const Format& format, const Rows& rows,
                   const void* received, const void* buffer, float factor, const Seed* seeds,
                   void* results) {
  if (IsBlockScaled(format.wire)) {
    return ReduceBlocks(stream, format, rows, received, buffer, factor, seeds, results);
  }
  cudaError_t error = cudaErrorInvalidValue;
  WithLossyWire(format.wire, format.data, [&](auto wire, auto type) {
    constexpr Wire kWire = decltype(wire)::value;
    if constexpr (!IsBlockScaled(kWire)) {
      using Task = ReduceTask<kWire, typename decltype(type)::Type, std::uint16_t>;
      const std::int64_t bytes = MessageBytes(format);
      const Task task = {format.n, BlockFinder(format), BatchOf(bytes, received), ChunksOf(format, rows, buffer),
                         BatchOf(bytes, results), factor};
      error = LaunchElementwise(stream, task, format.n, rows.batch);
    }
  });
  return error;
}

cudaError_t ReduceToFloat(cudaStream_t stream, const Format& format, const Rows& rows,
                          const void* received, const void* buffer, float factor, float* results) {
  cudaError_t error = cudaErrorInvalidValue;
  WithLossyWire(format.wire, format.data, [&](auto wire, auto type) {
    using Task = ReduceTask<decltype(wire)::value, typename decltype(type)::Type, float>;
    const Task task = {format.n, BlockFinder(format), BatchOf(MessageBytes(format), received),
                       ChunksOf(format, rows, buffer),
                       BatchOf(format.n * static_cast<std::int64_t>(sizeof(float)),
                               static_cast<void*>(results)),
                       factor};
    error = LaunchElementwise(stream, task, format.n, rows.batch);
  });
  return error;
}

cudaError_t Decode(cudaStream_t stream, const Format& format, const Rows& rows,
                   const void* messages, void* buffer) {
  cudaError_t error = cudaErrorInvalidValue;
  WithLossyWire(format.wire, format.data, [&](auto wire, auto type) {
    using Task = DecodeTask<decltype(wire)::value, typename decltype(type)::Type>;
    const Task task = {format.n, BlockFinder(format), BatchOf(MessageBytes(format), messages),
                       ChunksOf(format, rows, buffer)};
    error = LaunchElementwise(stream, task, format.n, rows.batch);
  });
  return error;
}

}  // namespace cuda
}  // namespace jax_ring
