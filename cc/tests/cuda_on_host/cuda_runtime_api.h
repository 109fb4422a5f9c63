// As much of the CUDA runtime as the chunk kernels and their driver use, on the CPU: the kernels' sources,
// compiled as C++ with this folder first among those of headers, run thread after thread. For tests where
// there is no GPU; it shows wrong indices and, with -fsanitize=address, accesses out of bounds, but neither
// speed nor races.
#ifndef JAX_RING_TESTS_CUDA_ON_HOST_H_
#define JAX_RING_TESTS_CUDA_ON_HOST_H_

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

// --- The threads of a thread block -----------------------------------------------------------------------

namespace cuda_on_host {

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(256 << 10);
  bool done = false;
};

// Threads wait here until all that are meant have come.
struct Barrier {
  unsigned arrived = 0;
  unsigned passed = 0;
};

struct Block {
  ucontext_t scheduler;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Barrier> warps;
  std::vector<std::uint32_t> words;  // What the lanes of a warp show each other.
  Barrier all;
  unsigned running = 0;
  void (*call)(void*) = nullptr;
  void* argument = nullptr;
};

inline Block block;

inline void Enter() {
  block.call(block.argument);
  block.threads[block.running]->done = true;
  swapcontext(&block.threads[block.running]->context, &block.scheduler);
}

inline void Wait(Barrier& barrier, unsigned threads) {
  const unsigned generation = barrier.passed;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.passed;
  }
  while (barrier.passed == generation) {
    swapcontext(&block.threads[block.running]->context, &block.scheduler);
  }
}

inline void RunBlock(unsigned threads, void (*call)(void*), void* argument) {
  block.call = call;
  block.argument = argument;
  block.warps.assign(threads / 32, Barrier());
  block.words.assign(threads, 0);
  block.all = Barrier();
  while (block.threads.size() < threads) block.threads.push_back(std::make_unique<Thread>());
  for (unsigned t = 0; t < threads; ++t) {
    Thread& thread = *block.threads[t];
    thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &block.scheduler;
    makecontext(&thread.context, Enter, 0);
  }
  for (bool waiting = true; waiting;) {
    waiting = false;
    for (unsigned t = 0; t < threads; ++t) {
      if (block.threads[t]->done) continue;
      block.running = t;
      threadIdx = dim3(t, 0, 0);
      swapcontext(&block.scheduler, &block.threads[t]->context);
      waiting = waiting || !block.threads[t]->done;
    }
  }
}

// All words of this thread's warp, once all its lanes have come.
template <typename F>
auto WithWarp(std::uint32_t word, F f) {
  const unsigned warp = block.running / 32;
  block.words[block.running] = word;
  Wait(block.warps[warp], 32);
  const auto result = f(&block.words[warp * 32], block.running % 32);
  Wait(block.warps[warp], 32);
  return result;
}

}  // namespace cuda_on_host

inline void __syncthreads() { cuda_on_host::Wait(cuda_on_host::block.all, blockDim.x); }

inline std::uint32_t __shfl_xor_sync(unsigned, std::uint32_t word, int mask) {
  return cuda_on_host::WithWarp(word, [=](const std::uint32_t* words, unsigned lane) {
    return words[lane ^ static_cast<unsigned>(mask)];
  });
}

inline std::uint32_t __reduce_max_sync(unsigned, std::uint32_t word) {
  return cuda_on_host::WithWarp(word, [](const std::uint32_t* words, unsigned) {
    std::uint32_t largest = 0;
    for (int i = 0; i < 32; ++i) largest = max(largest, words[i]);
    return largest;
  });
}

// --- The runtime -----------------------------------------------------------------------------------------

using cudaStream_t = struct CUstream_st*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
};

template <typename... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Parameters... arguments) {
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  auto call = [&] { kernel(arguments...); };
  for (unsigned y = 0; y < gridDim.y; ++y) {
    for (unsigned x = 0; x < gridDim.x; ++x) {
      blockIdx = dim3(x, y, 0);
      cuda_on_host::RunBlock(
          blockDim.x, [](void* f) { (*static_cast<decltype(call)*>(f))(); }, &call);
    }
  }
  return cudaSuccess;
}

inline cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *pointer != nullptr ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }

#endif  // JAX_RING_TESTS_CUDA_ON_HOST_H_
