"""The rules of Bazel 4 under the names that rules_cc gives them. (Debian's rules_cc needs Bazel 5.)"""

cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
