# Builds libjax_ring_cuda.so, the chunk kernels for CUDA: a plain shared library with the CUDA runtime in it,
# which loads without a driver and without a CUDA toolkit, and knows nothing of Python.
#
# Included where the native module has been dealt with. Takes `native`, `reason` and `ffi_include` from there;
# sets `cuda` to whether the target jax_ring_cuda is built, and `cuda_reason` to why not. As with the native
# module, whatever is missing is a warning, and an install without it.
include(CheckLanguage)

option(JAX_RING_CUDA "Build the CUDA kernels (at install: JAX_RING_CUDA=1)" OFF)
set(JAX_RING_CUDA_ARCHITECTURES "" CACHE STRING
    "What to compile the CUDA kernels for, as in CMAKE_CUDA_ARCHITECTURES; empty: 8.0, 9.0, 10.0 and PTX")

# The last also as PTX, for what comes after it.
set(JAX_RING_CUDA_ALL 80-real 90-real 100)
set(JAX_RING_CUDA_ALL_BEFORE_12_8 80-real 90)  # That do not know of 10.0.
set(JAX_RING_CUDA_MINIMUM 12.0)

function(jax_ring_cuda_target ffi_include)
  set(architectures "${JAX_RING_CUDA_ARCHITECTURES}")
  if(NOT architectures AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    set(architectures ${JAX_RING_CUDA_ALL_BEFORE_12_8})
  elseif(NOT architectures)
    set(architectures ${JAX_RING_CUDA_ALL})
  endif()

  set(folder "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../cc")
  add_library(jax_ring_cuda SHARED
    "${folder}/chunk_reduce_cuda_blocks.cu"
    "${folder}/chunk_reduce_cuda_elementwise.cu"
    "${folder}/chunk_reduce_cuda_ffi.cc")
  set_target_properties(jax_ring_cuda PROPERTIES
    CUDA_ARCHITECTURES "${architectures}"
    CUDA_RUNTIME_LIBRARY Static
    CUDA_STANDARD 17
    CUDA_STANDARD_REQUIRED ON
    CXX_STANDARD 17
    CXX_STANDARD_REQUIRED ON
    LINK_DEPENDS "${folder}/chunk_reduce_cuda.map")
  target_include_directories(jax_ring_cuda PRIVATE "${folder}")
  target_include_directories(jax_ring_cuda SYSTEM PRIVATE
    "${ffi_include}" ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  # -fmad=false: no product may be contracted with a sum, as the bits are to be those of the CPU.
  # --threads: the architectures are compiled at the same time.
  target_compile_options(jax_ring_cuda PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;--threads=0;-Xcompiler=-Wall>
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>)
  target_link_options(jax_ring_cuda PRIVATE
    "LINKER:--version-script=${folder}/chunk_reduce_cuda.map" "LINKER:-z,defs")
  install(TARGETS jax_ring_cuda LIBRARY DESTINATION jax_ring)
  message(STATUS "jax_ring: CUDA kernels with nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${architectures}")
endfunction()

set(cuda false)
set(cuda_reason "")
if(NOT native)
  set(cuda_reason "there is no native module: ${reason}")
elseif(NOT JAX_RING_CUDA)
  set(cuda_reason "JAX_RING_CUDA=1 was not set at install")
elseif(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(cuda_reason "JAX runs on CUDA under Linux only, and this is ${CMAKE_SYSTEM_NAME}")
else()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90)  # To find the compiler; CMake's own choice may be gone from it.
  endif()
  # CMake learns where the CUDA runtime lies by linking a program.
  set(CMAKE_TRY_COMPILE_TARGET_TYPE EXECUTABLE)
  check_language(CUDA)  # Tries nvcc in a project of its own, so a broken one stops nothing.
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS JAX_RING_CUDA_MINIMUM)
      set(cuda_reason "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old; it needs ${JAX_RING_CUDA_MINIMUM}")
    endif()
  else()
    set(cuda_reason "no working nvcc was found; it needs CUDA ${JAX_RING_CUDA_MINIMUM} or newer, in PATH or named by CUDACXX")
  endif()
endif()

if(NOT cuda_reason)
  # One small file that asks of nvcc what the real ones do.
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  file(WRITE "${CMAKE_BINARY_DIR}/probe.cu" "#include <cuda_runtime.h>\n#include <type_traits>\n__global__ void probe(unsigned* x) { *x = __reduce_max_sync(~0u, *x); }\nint main() {}\n")
  try_compile(JAX_RING_CUDA_PROBE "${CMAKE_BINARY_DIR}/probe_cuda" "${CMAKE_BINARY_DIR}/probe.cu"
              OUTPUT_VARIABLE output)
  if(NOT JAX_RING_CUDA_PROBE)
    message(STATUS "${output}")
    set(cuda_reason "nvcc ${CMAKE_CUDA_COMPILER_VERSION} cannot compile C++17 with the C++ compiler it found")
  endif()
endif()

if(NOT cuda_reason)
  set(cuda true)
  jax_ring_cuda_target("${ffi_include}")
elseif(JAX_RING_CUDA)
  message(WARNING "jax_ring: installing without the CUDA kernels: ${cuda_reason}")
endif()
