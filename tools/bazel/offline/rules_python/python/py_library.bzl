"""The rule of Bazel 4 under the name that rules_python gives it."""

py_library = native.py_library
