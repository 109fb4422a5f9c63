// Compares the CUDA kernels with those for the CPU, bit for bit: every wire and type, sizes with and without
// tails, every alignment, in place, batches. Built by nvcc it runs on a GPU, and is quick enough for
// compute-sanitizer; built by a C++ compiler with cuda_on_host/ it runs anywhere.
//
//   chunk_reduce_cuda_driver [elements of the largest case] [run only every k-th case]
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "chunk_reduce.h"
#include "chunk_reduce_cpu.h"
#include "chunk_reduce_cuda.h"

namespace jax_ring {
namespace {

using Bytes = std::vector<std::uint8_t>;

int failures = 0;
int checks = 0;

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

// Memory on the device that begins `offset` bytes after an aligned address, and ends where the data does.
class Device {
 public:
  Device(const Bytes& bytes, std::int64_t offset) : offset_(offset), size_(bytes.size()) {
    Check(cudaMalloc(&memory_, size_ + static_cast<std::size_t>(offset_) + 1), "cudaMalloc");
    Check(cudaMemcpy(get(), bytes.data(), size_, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~Device() { Check(cudaFree(memory_), "cudaFree"); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void* get() const { return static_cast<std::uint8_t*>(memory_) + offset_; }

  Bytes Read() const {
    Bytes bytes(size_);
    Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    Check(cudaMemcpy(bytes.data(), get(), size_, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return bytes;
  }

 private:
  void* memory_ = nullptr;
  std::int64_t offset_;
  std::size_t size_;
};

struct Case {
  Format format;
  std::int64_t batch;
  std::int64_t chunks;
  bool shared;
  std::int64_t offset;  // Of each buffer from an aligned address, in elements.
  bool in_place;
  bool random;
  float factor;
};

std::uint32_t NextRandom() {
  static std::uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<std::uint32_t>(state >> 32);
}

Bytes RandomBytes(std::int64_t count) {
  Bytes bytes(static_cast<std::size_t>(count));
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(NextRandom());
  return bytes;
}

// Data for lossy wires: numbers of all sizes, and now and then a special one. Sums of two NaNs differ
// between processors, so that only data whose NaNs leave no trace in the message have any.
Bytes RandomData(const Format& format, std::int64_t elements) {
  if (format.wire == Wire::kIdentity) return RandomBytes(elements * SizeOf(format.data));
  Bytes bytes;
  for (std::int64_t i = 0; i < elements; ++i) {
    const std::uint32_t kind = NextRandom() % 4096;
    std::uint32_t bits = (NextRandom() & 0x80ffffff) | (100 + NextRandom() % 40) << 23;
    if (kind == 0) bits = 0x7f800000;
    if (kind == 1 && IsBlockScaled(format.wire)) bits = 0x7fc00000;
    if (kind == 2) bits = NextRandom() & 0x807fffff;
    if (kind < 40 && kind > 4) bits = 0;
    std::uint8_t raw[4];
    std::memcpy(raw, &bits, 4);
    const bool narrow = format.data == DataType::kBfloat16;
    bytes.insert(bytes.end(), raw + (narrow ? 2 : 0), raw + 4);
  }
  return bytes;
}

void Compare(const Case& c, const char* what, const Bytes& got, const Bytes& wanted) {
  ++checks;
  if (got == wanted) return;
  ++failures;
  std::size_t at = 0;
  while (got[at] == wanted[at]) ++at;
  std::printf("FAILED %s: wire %d data %d n %lld block %lld batch %lld shared %d offset %lld in place %d "
              "random %d factor %g: byte %zu is %02x, but %02x is wanted\n",
              what, static_cast<int>(c.format.wire), static_cast<int>(c.format.data),
              static_cast<long long>(c.format.n), static_cast<long long>(c.format.block),
              static_cast<long long>(c.batch), c.shared, static_cast<long long>(c.offset), c.in_place,
              c.random, static_cast<double>(c.factor), at, got[at], wanted[at]);
}

// One case: its operands, and what the kernels for the CPU make of them row by row.
class Runner {
 public:
  explicit Runner(const Case& c)
      : c_(c),
        row_bytes_(c.format.n * SizeOf(c.format.data)),
        message_bytes_(MessageBytes(c.format)),
        entries_(c.shared ? 1 : c.batch),
        buffer_(RandomData(c.format, entries_ * c.chunks * c.format.n)),
        seeds_(static_cast<std::size_t>(c.batch)) {
    for (std::int64_t i = 0; i < c.batch; ++i) {
      // Some lie outside, and count as the nearest.
      index_.push_back(static_cast<std::int32_t>(NextRandom() % (c.chunks + 2)) - 1);
      seeds_[static_cast<std::size_t>(i)] = {{NextRandom(), NextRandom()}};
    }
  }

  void Run() {
    const Bytes messages = Messages();
    if (c_.format.wire == Wire::kIdentity) {
      Combine();
      Move();
    } else {
      Encode(messages);
      Reduce(messages);
      ReduceToFloat(messages);
      Decode(messages);
    }
  }

 private:
  static constexpr std::int64_t kOps = 4;

  const Kernels& kernels() const { return BestKernels(); }

  std::int64_t RowOffset(std::int64_t i) const {
    std::int64_t row = index_[static_cast<std::size_t>(i)];
    row = row < 0 ? 0 : row >= c_.chunks ? c_.chunks - 1 : row;
    return ((c_.shared ? 0 : i) * c_.chunks + row) * row_bytes_;
  }

  const Seed* SeedAt(std::int64_t i) const {
    return c_.random ? &seeds_[static_cast<std::size_t>(i)] : nullptr;
  }

  std::int64_t Offset(std::int64_t element_bytes) const { return c_.offset * element_bytes; }

  std::int64_t MessageOffset() const {
    return Offset(IsBlockScaled(c_.format.wire)
                      ? 2  // Such messages are an even number of bytes each.
                      : SizeOf(MessageType(c_.format.wire, c_.format.data)));
  }

  // Messages of other data.
  Bytes Messages() const {
    if (c_.format.wire == Wire::kIdentity) return RandomBytes(c_.batch * row_bytes_);
    const Bytes data = RandomData(c_.format, c_.batch * c_.format.n);
    Bytes messages(static_cast<std::size_t>(c_.batch * message_bytes_));
    for (std::int64_t i = 0; i < c_.batch; ++i) {
      kernels().encode(c_.format, &data[static_cast<std::size_t>(i * row_bytes_)], 1.0f, nullptr,
                       &messages[static_cast<std::size_t>(i * message_bytes_)]);
    }
    return messages;
  }

  Device OnDevice(const std::vector<std::int32_t>& index) const {
    Bytes bytes(index.size() * 4);
    std::memcpy(bytes.data(), index.data(), bytes.size());
    return Device(bytes, 0);
  }

  Device SeedsOnDevice() const {
    Bytes bytes(seeds_.size() * sizeof(Seed));
    std::memcpy(bytes.data(), seeds_.data(), bytes.size());
    return Device(bytes, 0);
  }

  Rows RowsWith(const Device& index) const {
    return {static_cast<const std::int32_t*>(index.get()), c_.batch, c_.chunks, c_.shared};
  }

  const Seed* Seeds(const Device& seeds) const {
    return c_.random ? static_cast<const Seed*>(seeds.get()) : nullptr;
  }

  void Encode(const Bytes& like) {
    Bytes wanted(like.size());
    for (std::int64_t i = 0; i < c_.batch; ++i) {
      kernels().encode(c_.format, &buffer_[static_cast<std::size_t>(RowOffset(i))], c_.factor,
                       SeedAt(i), &wanted[static_cast<std::size_t>(i * message_bytes_)]);
    }
    const Device index = OnDevice(index_), seeds = SeedsOnDevice();
    const Device buffer(buffer_, Offset(SizeOf(c_.format.data)));
    const Device result(RandomBytes(static_cast<std::int64_t>(like.size())), MessageOffset());
    Check(cuda::Encode(nullptr, c_.format, RowsWith(index), buffer.get(), c_.factor, Seeds(seeds),
                       result.get()),
          "Encode");
    Compare(c_, "encode", result.Read(), wanted);
  }

  void Reduce(const Bytes& messages) {
    Bytes wanted(messages.size());
    for (std::int64_t i = 0; i < c_.batch; ++i) {
      const auto at = static_cast<std::size_t>(i * message_bytes_);
      kernels().reduce(c_.format, &messages[at], &buffer_[static_cast<std::size_t>(RowOffset(i))],
                       c_.factor, SeedAt(i), &wanted[at]);
    }
    const Device index = OnDevice(index_), seeds = SeedsOnDevice();
    const Device buffer(buffer_, Offset(SizeOf(c_.format.data)));
    const Device received(messages, MessageOffset());
    const Device apart(RandomBytes(static_cast<std::int64_t>(messages.size())), MessageOffset());
    const Device& result = c_.in_place ? received : apart;
    Check(cuda::Reduce(nullptr, c_.format, RowsWith(index), received.get(), buffer.get(), c_.factor,
                       Seeds(seeds), result.get()),
          "Reduce");
    Compare(c_, "reduce", result.Read(), wanted);
  }

  void ReduceToFloat(const Bytes& messages) {
    Bytes wanted(static_cast<std::size_t>(c_.batch * c_.format.n * 4));
    for (std::int64_t i = 0; i < c_.batch; ++i) {
      kernels().reduce_to_float(
          c_.format, &messages[static_cast<std::size_t>(i * message_bytes_)],
          &buffer_[static_cast<std::size_t>(RowOffset(i))], c_.factor,
          &wanted[static_cast<std::size_t>(i * c_.format.n * 4)]);
    }
    const Device index = OnDevice(index_);
    const Device buffer(buffer_, Offset(SizeOf(c_.format.data)));
    const Device received(messages, MessageOffset());
    const Device apart(RandomBytes(static_cast<std::int64_t>(wanted.size())), Offset(4));
    const bool in_place = c_.in_place && c_.chunks == 1 && !c_.shared &&
                          c_.format.data == DataType::kFloat32;
    const Device& result = in_place ? buffer : apart;
    Check(cuda::ReduceToFloat(nullptr, c_.format, RowsWith(index), received.get(), buffer.get(),
                              c_.factor, static_cast<float*>(result.get())),
          "ReduceToFloat");
    Compare(c_, "reduce to float", OneNan(result.Read()), OneNan(wanted));
  }

  // Float32s with all NaNs alike.
  static Bytes OneNan(Bytes bytes) {
    for (std::size_t i = 0; i < bytes.size(); i += 4) {
      float x;
      std::memcpy(&x, &bytes[i], 4);
      if (x != x) std::memset(&bytes[i], 0xff, 4);
    }
    return bytes;
  }

  void Decode(const Bytes& messages) {
    if (c_.shared) return;
    Bytes wanted = buffer_;
    for (std::int64_t i = 0; i < c_.batch; ++i) {
      kernels().decode(c_.format, &messages[static_cast<std::size_t>(i * message_bytes_)],
                       &wanted[static_cast<std::size_t>(RowOffset(i))]);
    }
    const Device index = OnDevice(index_);
    const Device buffer(buffer_, Offset(SizeOf(c_.format.data)));
    const Device received(messages, MessageOffset());
    Check(cuda::Decode(nullptr, c_.format, RowsWith(index), received.get(), buffer.get()), "Decode");
    const bool narrow = c_.format.data == DataType::kBfloat16;
    Compare(c_, "decode", narrow ? Widened(buffer.Read()) : OneNan(buffer.Read()),
            narrow ? Widened(wanted) : OneNan(wanted));
  }

  // Bfloat16s as float32s with all NaNs alike.
  static Bytes Widened(const Bytes& bytes) {
    Bytes wide;
    for (std::size_t i = 0; i < bytes.size(); i += 2) {
      wide.insert(wide.end(), {0, 0, bytes[i], bytes[i + 1]});
    }
    return OneNan(wide);
  }

  void Combine() {
    for (std::int64_t op = 0; op < kOps; ++op) {
      const Bytes received_bytes = Numbers(RandomBytes(c_.batch * row_bytes_));
      const Bytes buffer_bytes = Numbers(buffer_);
      Bytes wanted(received_bytes.size());
      for (std::int64_t i = 0; i < c_.batch; ++i) {
        const auto at = static_cast<std::size_t>(i * row_bytes_);
        kernels().combine(c_.format, static_cast<Op>(op), &received_bytes[at],
                          &buffer_bytes[static_cast<std::size_t>(RowOffset(i))], &wanted[at]);
      }
      const std::int64_t offset = Offset(SizeOf(c_.format.data));
      const Device index = OnDevice(index_);
      const Device buffer(buffer_bytes, offset), received(received_bytes, offset);
      const Device apart(RandomBytes(static_cast<std::int64_t>(wanted.size())), offset);
      const Device& result = c_.in_place ? received : apart;
      Check(cuda::Combine(nullptr, c_.format, RowsWith(index), static_cast<Op>(op), received.get(),
                          buffer.get(), result.get()),
            "Combine");
      Compare(c_, "combine", result.Read(), wanted);
    }
  }

  // Without NaNs, and without what sums or products could make NaNs of: of each element the highest bit of
  // the exponent is cleared.
  Bytes Numbers(Bytes bytes) const {
    const auto size = static_cast<std::size_t>(SizeOf(c_.format.data));
    for (std::size_t i = size - 1; i < bytes.size(); i += size) bytes[i] &= 0xbf;
    return bytes;
  }

  void Move() {
    const std::int64_t offset = Offset(SizeOf(c_.format.data));
    Bytes wanted(static_cast<std::size_t>(c_.batch * row_bytes_));
    for (std::int64_t i = 0; i < c_.batch; ++i) {
      std::memcpy(&wanted[static_cast<std::size_t>(i * row_bytes_)],
                  &buffer_[static_cast<std::size_t>(RowOffset(i))],
                  static_cast<std::size_t>(row_bytes_));
    }
    const Device index = OnDevice(index_);
    const Device buffer(buffer_, offset);
    const Device result(RandomBytes(static_cast<std::int64_t>(wanted.size())), offset);
    Check(cuda::TakeRows(nullptr, c_.format, RowsWith(index), buffer.get(), result.get()),
          "TakeRows");
    Compare(c_, "take rows", result.Read(), wanted);
    if (c_.shared) return;
    const Bytes values = RandomBytes(c_.batch * row_bytes_);
    Bytes changed = buffer_;
    for (std::int64_t i = 0; i < c_.batch; ++i) {
      std::memcpy(&changed[static_cast<std::size_t>(RowOffset(i))],
                  &values[static_cast<std::size_t>(i * row_bytes_)],
                  static_cast<std::size_t>(row_bytes_));
    }
    const Device from(values, offset);
    Check(cuda::PutRows(nullptr, c_.format, RowsWith(index), from.get(), buffer.get()), "PutRows");
    Compare(c_, "put rows", buffer.Read(), changed);
  }

  Case c_;
  std::int64_t row_bytes_;
  std::int64_t message_bytes_;
  std::int64_t entries_;
  Bytes buffer_;
  std::vector<std::int32_t> index_;
  std::vector<Seed> seeds_;
};

// Runs a case, or passes over it.
void Run(const Case& c, int every) {
  static int seen = 0;
  if (seen++ % every == 0) Runner(c).Run();
}

// Runs a format of n elements in several settings.
void RunSettings(const Format& format, int every) {
  const bool lossy = format.wire != Wire::kIdentity;
  const bool random = RoundsStochastically(format.wire);
  const float half = lossy ? 0.5f : 1.0f;
  Run({format, 1, 1, false, 0, true, false, 1.0f}, every);
  Run({format, 1, 3, false, 0, false, random, half}, every);
  Run({format, 3, 2, false, 1, true, random, half}, every);
  Run({format, 2, 3, true, 2, false, false, half}, every);
}

int Main(std::int64_t largest, int every) {
  // About the sizes of a vector, of a warp's and a thread block's tiles, and beyond.
  std::vector<std::int64_t> sizes = {1, 2, 3, 8, 31, 100, 256, 1000, 2048, 4097};
  sizes.push_back(largest);
  for (int type = 0; type <= static_cast<int>(DataType::kUint64); ++type) {
    for (const std::int64_t n : sizes) {
      RunSettings({Wire::kIdentity, static_cast<DataType>(type), n, 0}, every);
    }
  }
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
    for (const Wire wire : {Wire::kBfloat16, Wire::kFloat16}) {
      for (const std::int64_t n : sizes) RunSettings({wire, type, n, 0}, every);
    }
    for (const Wire wire : {Wire::kFloat8E4M3FN, Wire::kFloat8E5M2, Wire::kInt8, Wire::kInt4}) {
      for (const std::int64_t block :
           {1, 2, 4, 6, 8, 32, 64, 100, 128, 256, 384, 512, 1000, 1024, 4096, 8192, 20000}) {
        if (wire == Wire::kInt4 && block % 2 != 0) continue;
        for (const std::int64_t n : sizes) RunSettings({wire, type, n, block}, every);
      }
    }
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_ring

int main(int argc, char** argv) {
  const long long largest = argc > 1 ? std::atoll(argv[1]) : 50001;
  const int every = argc > 2 ? std::atoi(argv[2]) : 1;
  if (largest < 1 || every < 1) {
    std::fprintf(stderr, "usage: %s [elements of the largest case] [run only every k-th]\n", argv[0]);
    return 2;
  }
  return jax_ring::Main(largest, every);
}
