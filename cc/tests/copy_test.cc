#include "copy.h"

#include <array>
#include <cstdint>

#include "gtest/gtest.h"

namespace jax_ring {
namespace {

using Bytes = std::array<std::uint8_t, 4>;

TEST(CopyBytes, Copies) {
  const Bytes source = {1, 2, 3, 4};
  Bytes target = {};
  EXPECT_TRUE(CopyBytes(source.data(), 4, target.data(), 4));
  EXPECT_EQ(target, source);
}

TEST(CopyBytes, RefusesAnotherSizeAndTouchesNothing) {
  const Bytes source = {1, 2, 3, 4};
  Bytes target = {5, 6, 7, 8};
  EXPECT_FALSE(CopyBytes(source.data(), 4, target.data(), 3));
  EXPECT_FALSE(CopyBytes(source.data(), 3, target.data(), 4));
  EXPECT_FALSE(CopyBytes(source.data(), -1, target.data(), -1));
  EXPECT_EQ(target, (Bytes{5, 6, 7, 8}));
}

TEST(CopyBytes, TakesNullOnlyForNothing) {
  Bytes bytes = {1, 2, 3, 4};
  EXPECT_TRUE(CopyBytes(nullptr, 0, nullptr, 0));
  EXPECT_FALSE(CopyBytes(nullptr, 4, bytes.data(), 4));
  EXPECT_FALSE(CopyBytes(bytes.data(), 4, nullptr, 4));
  EXPECT_EQ(bytes, (Bytes{1, 2, 3, 4}));
}

TEST(CopyBytes, MayOverlap) {
  std::array<std::uint8_t, 5> bytes = {1, 2, 3, 4, 5};
  EXPECT_TRUE(CopyBytes(bytes.data(), 5, bytes.data(), 5));
  EXPECT_EQ(bytes, (std::array<std::uint8_t, 5>{1, 2, 3, 4, 5}));
  EXPECT_TRUE(CopyBytes(bytes.data(), 4, bytes.data() + 1, 4));
  EXPECT_EQ(bytes, (std::array<std::uint8_t, 5>{1, 1, 2, 3, 4}));
}

}  // namespace
}  // namespace jax_ring
