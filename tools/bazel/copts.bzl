"""How the C++ of jax_ring is compiled: as in cc/chunk_reduce.cmake."""

# Products and sums are never contracted, so that every backend gives the same bits.
COPTS = select({
    "@platforms//os:windows": [
        "/std:c++17",
        "/fp:precise",
    ],
    "//conditions:default": [
        "-std=c++17",
        "-ffp-contract=off",
    ],
})

# In every compilation mode: a loop that is not made of vectors is of no use.
KERNEL_COPTS = COPTS + select({
    "@platforms//os:windows": ["/O2"],
    "//conditions:default": [
        "-O3",
        "-fno-math-errno",
        "-fno-trapping-math",  # Else GCC makes no vectors where a value is chosen among two sums.
    ],
})

def if_x86_64(values):
    """Values for the CPUs of which the compiler's library can tell at run time what they have.

    Args:
      values: a list.

    Returns:
      A select of the list, or of nothing.
    """
    return select({
        "//tools/bazel:linux_x86_64": values,
        "//tools/bazel:macos_x86_64": values,
        "//conditions:default": [],
    })
