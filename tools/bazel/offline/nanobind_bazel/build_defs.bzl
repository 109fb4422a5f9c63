"""What nanobind_bazel's rule of the same name does, as far as jax_ring uses it."""

load("@rules_cc//cc:defs.bzl", "cc_binary")

def nanobind_extension(name, copts = [], deps = [], visibility = None, **kwargs):
    """A Python module `name`.so, under the alias `name`."""
    cc_binary(
        name = name + ".so",
        copts = copts + [
            "-std=c++17",
            "-fvisibility=hidden",
        ],
        linkshared = True,
        visibility = visibility,
        deps = deps + ["@nanobind_bazel//:nanobind"],
        **kwargs
    )
    native.alias(name = name, actual = name + ".so", visibility = visibility)
