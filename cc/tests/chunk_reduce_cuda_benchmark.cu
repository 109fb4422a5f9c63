// Times the CUDA kernels against copies, on the device, of as many bytes as they read and write. Prints a
// line of JSON for each; benchmarks/gpu_kernels.py makes a table of them.
//
//   chunk_reduce_cuda_benchmark [MiB of data ...]      by default 1 4 16 64 256
//
// Kernel and copy take turns, each some launches long, over more memory than any cache holds.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "chunk_reduce.h"
#include "chunk_reduce_cuda.h"

namespace jax_ring {
namespace {

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::int64_t kMemory = 1024 * kMiB;  // Each of three pools: operands and results go round in it.
constexpr std::int64_t kBlock = 256;
constexpr int kLaunches = 10;
constexpr int kRounds = 25;

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(2);
}

enum class Kind { kEncode, kReduce, kReduceToFloat, kDecode };

struct Case {
  const char* name;
  Wire wire;
  DataType data;
  Kind kind;
};

constexpr Case kCases[] = {
    {"sum float32", Wire::kIdentity, DataType::kFloat32, Kind::kReduce},
    {"sum bfloat16", Wire::kIdentity, DataType::kBfloat16, Kind::kReduce},
    {"reduce bfloat16 wire", Wire::kBfloat16, DataType::kFloat32, Kind::kReduce},
    {"reduce float16 wire", Wire::kFloat16, DataType::kFloat32, Kind::kReduce},
    {"reduce float8_e4m3fn wire", Wire::kFloat8E4M3FN, DataType::kFloat32, Kind::kReduce},
    {"reduce float8_e5m2 wire", Wire::kFloat8E5M2, DataType::kFloat32, Kind::kReduce},
    {"reduce int8 wire", Wire::kInt8, DataType::kFloat32, Kind::kReduce},
    {"reduce int8 wire, bfloat16 data", Wire::kInt8, DataType::kBfloat16, Kind::kReduce},
    {"reduce int4 wire", Wire::kInt4, DataType::kFloat32, Kind::kReduce},
    {"reduce int8 wire to float32", Wire::kInt8, DataType::kFloat32, Kind::kReduceToFloat},
    {"encode int8 wire", Wire::kInt8, DataType::kFloat32, Kind::kEncode},
    {"decode int8 wire", Wire::kInt8, DataType::kFloat32, Kind::kDecode},
};

class Pool {
 public:
  Pool() {
    Check(cudaMalloc(&memory_, kMemory));
    Check(cudaMemset(memory_, 0, kMemory));
  }
  ~Pool() { cudaFree(memory_); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // `bytes` of it, not those of the last calls.
  void* Next(std::int64_t bytes) {
    const std::int64_t size = (bytes + 255) / 256 * 256;
    if (at_ + size > kMemory) at_ = 0;
    void* result = static_cast<std::uint8_t*>(memory_) + at_;
    at_ += size;
    return result;
  }

 private:
  void* memory_ = nullptr;
  std::int64_t at_ = 0;
};

struct Pools {
  Pool a, b, c;
};

// Microseconds that a launch takes.
template <typename F>
double Time(cudaStream_t stream, cudaEvent_t start, cudaEvent_t stop, F launch) {
  Check(cudaEventRecord(start, stream));
  for (int i = 0; i < kLaunches; ++i) Check(launch());
  Check(cudaEventRecord(stop, stream));
  Check(cudaEventSynchronize(stop));
  float milliseconds = 0;
  Check(cudaEventElapsedTime(&milliseconds, start, stop));
  return milliseconds * 1e3 / kLaunches;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Run(const Case& c, std::int64_t mib, const Rows& rows, cudaStream_t stream, Pools& pools) {
  const Format format = {c.wire, c.data, mib * kMiB / SizeOf(c.data), kBlock};
  const std::int64_t data = format.n * SizeOf(format.data);
  const std::int64_t message = MessageBytes(format);
  std::int64_t bytes = data + message;  // Read and written.
  if (c.kind == Kind::kReduce) bytes += message;
  if (c.kind == Kind::kReduceToFloat) bytes += 4 * format.n;

  const auto launch = [&] {
    const void* buffer = pools.a.Next(data);
    const void* received = pools.b.Next(message);
    switch (c.kind) {
      case Kind::kEncode:
        return cuda::Encode(stream, format, rows, buffer, 1.0f, nullptr, pools.c.Next(message));
      case Kind::kReduceToFloat:
        return cuda::ReduceToFloat(stream, format, rows, received, buffer, 1.0f,
                                   static_cast<float*>(pools.c.Next(4 * format.n)));
      case Kind::kDecode:
        return cuda::Decode(stream, format, rows, received, pools.a.Next(data));
      case Kind::kReduce:
        break;
    }
    void* result = pools.c.Next(message);
    if (c.wire == Wire::kIdentity) {
      return cuda::Combine(stream, format, rows, Op::kSum, received, buffer, result);
    }
    return cuda::Reduce(stream, format, rows, received, buffer, 1.0f, nullptr, result);
  };
  const std::int64_t half = bytes / 2;
  const auto copy = [&] {
    return cudaMemcpyAsync(pools.c.Next(half), pools.a.Next(half), half, cudaMemcpyDeviceToDevice,
                           stream);
  };

  cudaEvent_t start, stop;
  Check(cudaEventCreate(&start));
  Check(cudaEventCreate(&stop));
  Time(stream, start, stop, launch);
  Time(stream, start, stop, copy);
  std::vector<double> kernel_us, copy_us;
  for (int round = 0; round < kRounds; ++round) {
    kernel_us.push_back(Time(stream, start, stop, launch));
    copy_us.push_back(Time(stream, start, stop, copy));
  }
  Check(cudaEventDestroy(start));
  Check(cudaEventDestroy(stop));
  std::printf("{\"kernel\": \"%s\", \"mib\": %lld, \"bytes\": %lld, \"kernel_us\": %.2f, \"copy_us\": %.2f}\n",
              c.name, static_cast<long long>(mib), static_cast<long long>(bytes), Median(kernel_us),
              Median(copy_us));
  std::fflush(stdout);
}

int Main(const std::vector<std::int64_t>& sizes) {
  Pools pools;
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  std::int32_t* index;
  Check(cudaMalloc(reinterpret_cast<void**>(&index), sizeof *index));
  Check(cudaMemset(index, 0, sizeof *index));
  for (const std::int64_t mib : sizes) {
    for (const Case& c : kCases) Run(c, mib, {index, 1, 1, false}, stream, pools);
  }
  Check(cudaFree(index));
  Check(cudaStreamDestroy(stream));
  return 0;
}

}  // namespace
}  // namespace jax_ring

int main(int argc, char** argv) {
  std::vector<std::int64_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  if (sizes.empty()) sizes = {1, 4, 16, 64, 256};
  for (const std::int64_t mib : sizes) {
    if (mib < 1 || mib * jax_ring::kMiB > jax_ring::kMemory / 4) {
      std::fprintf(stderr, "%s: sizes are 1 to 256 MiB\n", argv[0]);
      return 2;
    }
  }
  return jax_ring::Main(sizes);
}
