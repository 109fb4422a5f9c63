# The sources of the chunk kernels for the CPU, with the flags that each needs. Included by the build of
# the module and by that of the tests.
include(CheckCXXCompilerFlag)
include(CheckCXXSourceCompiles)

# jax_ring_chunk_reduce_sources(<variable>): sets the variable to the sources. Whatever instruction set the
# compiler or the target lacks is left out: what is there at run time is chosen among the rest.
function(jax_ring_chunk_reduce_sources variable)
  # Products and sums must not be contracted: the bits are to be the same everywhere. Without
  # -fno-trapping-math g++ makes no vectors where a value is chosen among two sums.
  set(flags "")
  foreach(flag -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math)
    string(MAKE_C_IDENTIFIER "JAX_RING_HAS_${flag}" has)
    check_cxx_compiler_flag(${flag} ${has})
    if(${has})
      list(APPEND flags ${flag})
    endif()
  endforeach()

  set(folder "${CMAKE_CURRENT_FUNCTION_LIST_DIR}")
  set(sources "${folder}/chunk_reduce_cpu.cc" "${folder}/chunk_reduce_cpu_baseline.cc")
  set_source_files_properties("${folder}/chunk_reduce_cpu_baseline.cc" PROPERTIES COMPILE_OPTIONS "${flags}")

  set(avx2_flags -mavx2 -mfma)
  set(avx512_flags ${avx2_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  set(definitions "")
  foreach(isa avx2 avx512)
    string(TOUPPER "${isa}" upper)
    list(JOIN ${isa}_flags " " CMAKE_REQUIRED_FLAGS)
    check_cxx_source_compiles("
#if !defined(__x86_64__) || !defined(__GNUC__)
#error \"not x86-64, or without __builtin_cpu_supports\"
#endif
int main() { return __builtin_cpu_supports(\"avx2\") ? 0 : 1; }" JAX_RING_HAS_${upper})
    if(JAX_RING_HAS_${upper})
      list(APPEND sources "${folder}/chunk_reduce_cpu_${isa}.cc")
      list(APPEND definitions JAX_RING_HAS_${upper})
      set_source_files_properties("${folder}/chunk_reduce_cpu_${isa}.cc" PROPERTIES
                                  COMPILE_OPTIONS "${flags};${${isa}_flags}")
    endif()
  endforeach()
  set_source_files_properties("${folder}/chunk_reduce_cpu.cc" PROPERTIES COMPILE_DEFINITIONS "${definitions}")
  set(${variable} "${sources}" PARENT_SCOPE)
endfunction()
