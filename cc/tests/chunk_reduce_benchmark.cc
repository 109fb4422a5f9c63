// Times the CPU kernels on one thread against memcpy of as many bytes; prints a table, judges
// nothing.
//
//   chunk_reduce_benchmark [largest data in MiB, 256 if left out]
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "chunk_reduce.h"
#include "chunk_reduce_cpu.h"

namespace jax_ring {
namespace {

constexpr std::int64_t kBlock = 256;
constexpr int kRounds = 15;

struct Case {
  const char* name;
  Wire wire;
};
constexpr Case kCases[] = {
    {"int8", Wire::kInt8},
    {"int4", Wire::kInt4},
    {"float8_e4m3fn", Wire::kFloat8E4M3FN},
    {"float8_e5m2", Wire::kFloat8E5M2},
    {"bfloat16", Wire::kBfloat16},
    {"float16", Wire::kFloat16},
};

// Memory that begins at a page, as large arrays of XLA do; how fast memcpy is depends on that.
class Memory {
 public:
  explicit Memory(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes) + kPage, 1) {}

  void* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return bytes_.data() + (kPage - address % kPage);
  }

 private:
  static constexpr std::size_t kPage = 4096;
  std::vector<unsigned char> bytes_;
};

// Keeps the compiler from leaving out writes that nobody reads.
void Use(Memory& memory) { asm volatile("" : : "r"(memory.data()) : "memory"); }

// Seconds of one call of f, repeated over about 16 MiB of `bytes`.
template <typename F>
double Seconds(std::int64_t bytes, F f) {
  const std::int64_t calls = std::max<std::int64_t>(1, (std::int64_t{16} << 20) / bytes);
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < calls; ++i) f();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / static_cast<double>(calls);
}

// What a reduction of n floats reads and writes.
std::int64_t Traffic(const Format& format) {
  const std::int64_t message = MessageSize(format.wire, format.n, format.block) *
                               SizeOf(MessageType(format.wire, format.data));
  return 2 * message + 4 * format.n;
}

void Time(const Case& test, std::int64_t data_bytes) {
  const Format format = {test.wire, DataType::kFloat32, data_bytes / 4, kBlock};
  const std::int64_t traffic = Traffic(format);
  const std::int64_t message_bytes = traffic / 2 - 2 * format.n;
  Memory data(data_bytes), received(message_bytes), result(message_bytes);
  Memory from(traffic / 2), to(traffic / 2);
  auto* values = static_cast<float*>(data.data());
  for (std::int64_t i = 0; i < format.n; ++i) {
    values[i] = static_cast<float>(static_cast<std::int32_t>(Mix(static_cast<std::uint32_t>(i))));
  }
  BestKernels().encode(format, data.data(), 1.0f, nullptr, received.data());

  // All take turns, so that what else the machine does meets all alike. The best of each counts.
  double copy = 1e9;
  std::vector<double> reduce;
  for (int round = 0; round < kRounds; ++round) {
    copy = std::min(copy, Seconds(traffic, [&] {
                      std::memcpy(to.data(), from.data(), static_cast<std::size_t>(traffic / 2));
                      Use(to);
                    }));
    for (int i = 0; KernelsAt(i) != nullptr; ++i) {
      reduce.resize(std::max(reduce.size(), static_cast<std::size_t>(i) + 1), 1e9);
      const double seconds = Seconds(traffic, [&] {
        KernelsAt(i)->reduce(format, received.data(), data.data(), 1.0f, nullptr, result.data());
        Use(result);
      });
      reduce[static_cast<std::size_t>(i)] = std::min(reduce[static_cast<std::size_t>(i)], seconds);
    }
  }
  const double bytes = static_cast<double>(traffic) / 1e9;
  std::printf("%-14s %8lld  %7.1f", test.name, static_cast<long long>(data_bytes >> 10),
              bytes / copy);
  for (double seconds : reduce)
    std::printf("  %7.1f (%3.0f%%)", bytes / seconds, 100 * copy / seconds);
  std::printf("\n");
}

}  // namespace
}  // namespace jax_ring

int main(int argc, char** argv) {
  const std::int64_t largest = (argc > 1 ? std::atoll(argv[1]) : 256) << 20;
  std::printf("GB/s read and written; of memcpy's in brackets\n%-14s %8s  %7s", "wire", "KiB",
              "memcpy");
  for (int i = 0; jax_ring::KernelsAt(i) != nullptr; ++i) {
    std::printf("  %14s", jax_ring::KernelsAt(i)->name);
  }
  std::printf("\n");
  for (const jax_ring::Case& test : jax_ring::kCases) {
    for (std::int64_t bytes = 64 << 10; bytes <= largest; bytes *= 4) jax_ring::Time(test, bytes);
  }
}
