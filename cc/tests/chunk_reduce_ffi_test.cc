// The FFI handlers themselves, called as XLA calls them, from many threads: no state may be shared,
// and an error belongs to its call. (tests/test_chunk_reduce_ffi.py drives every error, through
// JAX.)
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "xla/ffi/api/c_api.h"

// What XLA hands over and what it takes back, as far as handlers without a stream use it.
struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};

extern "C" {
XLA_FFI_Error* JaxRingChunkEncode(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* JaxRingChunkReduce(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* JaxRingChunkDecode(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* JaxRingCopy(XLA_FFI_CallFrame* frame);
}

namespace jax_ring {
namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message, args->errc};
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = CreateError;
  return api;
}

const XLA_FFI_Api kApi = MakeApi();

class Buffer {
 public:
  template <typename T>
  Buffer(XLA_FFI_DataType type, std::vector<std::int64_t> dimensions, std::vector<T>& data)
      : dimensions_(std::move(dimensions)) {
    buffer_ = {XLA_FFI_Buffer_STRUCT_SIZE,
               nullptr,
               type,
               data.data(),
               static_cast<std::int64_t>(dimensions_.size()),
               nullptr};
  }

  XLA_FFI_Buffer* get() {
    buffer_.dims = dimensions_.data();
    return &buffer_;
  }

 private:
  std::vector<std::int64_t> dimensions_;
  XLA_FFI_Buffer buffer_;
};

struct Attributes {
  std::string wire;
  std::int64_t block = 0;
  float factor = 1;
  std::string op = "sum";
};

// The names that a handler has, sorted, as XLA sends them.
const std::vector<std::string> kEncodeNames = {"block", "factor", "wire"};
const std::vector<std::string> kReduceNames = {"block", "factor", "op", "wire"};
const std::vector<std::string> kDecodeNames = {"block", "wire"};

// Calls a handler; returns the message of its error, or nothing.
std::string Call(XLA_FFI_Handler* handler, const std::vector<std::string>& attribute_names,
                 std::vector<Buffer> operands, Buffer result, Attributes attributes) {
  std::vector<void*> args;
  for (Buffer& operand : operands) args.push_back(operand.get());
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  void* ret = result.get();
  XLA_FFI_RetType ret_type = XLA_FFI_RetType_BUFFER;

  XLA_FFI_Scalar block = {XLA_FFI_DataType_S64, &attributes.block};
  XLA_FFI_Scalar factor = {XLA_FFI_DataType_F32, &attributes.factor};
  XLA_FFI_ByteSpan wire = {attributes.wire.data(), attributes.wire.size()};
  XLA_FFI_ByteSpan op = {attributes.op.data(), attributes.op.size()};
  const std::map<std::string, std::pair<XLA_FFI_AttrType, void*>> all = {
      {"block", {XLA_FFI_AttrType_SCALAR, &block}},
      {"factor", {XLA_FFI_AttrType_SCALAR, &factor}},
      {"op", {XLA_FFI_AttrType_STRING, &op}},
      {"wire", {XLA_FFI_AttrType_STRING, &wire}}};
  std::vector<XLA_FFI_ByteSpan> spans;
  std::vector<XLA_FFI_AttrType> attribute_types;
  std::vector<void*> values;
  for (const std::string& name : attribute_names) {
    spans.push_back({name.data(), name.size()});
    attribute_types.push_back(all.at(name).first);
    values.push_back(all.at(name).second);
  }
  std::vector<XLA_FFI_ByteSpan*> names;
  for (XLA_FFI_ByteSpan& span : spans) names.push_back(&span);

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &kApi;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<std::int64_t>(args.size()),
                arg_types.data(), args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 1, &ret_type, &ret};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,      static_cast<std::int64_t>(names.size()),
                 attribute_types.data(),    names.data(), values.data()};
  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return "";
  const std::string message = error->message;
  EXPECT_EQ(error->code, XLA_FFI_Error_Code_INVALID_ARGUMENT) << message;
  delete error;
  return message;
}

constexpr std::int64_t kBatch = 2, kChunks = 3, kN = 1000, kBlock = 256, kMessage = kN + 2 * 4;

// Encodes a row of each, reduces it with another in place, and decodes that into the buffer in
// place. Returns the buffer.
std::vector<float> RoundTrip(float offset) {
  std::vector<float> buffer;
  for (int i = 0; i < kBatch * kChunks * kN; ++i) {
    buffer.push_back(offset + 0.01f * static_cast<float>(i));
  }
  std::vector<std::int32_t> first = {0, 2}, second = {1, 0};
  std::vector<std::uint32_t> seed = {1, 2, 3, 4};
  std::vector<std::int8_t> message(kBatch * kMessage);
  const Buffer data(XLA_FFI_DataType_F32, {kBatch, kChunks, kN}, buffer);
  const Buffer first_row(XLA_FFI_DataType_S32, {kBatch}, first);
  const Buffer second_row(XLA_FFI_DataType_S32, {kBatch}, second);
  const Buffer seeds(XLA_FFI_DataType_U32, {kBatch, 2}, seed);
  const Buffer messages(XLA_FFI_DataType_S8, {kBatch, kMessage}, message);
  const Attributes int8 = {"int8", kBlock};
  EXPECT_EQ(Call(JaxRingChunkEncode, kEncodeNames, {data, first_row, seeds}, messages, int8), "");
  EXPECT_EQ(
      Call(JaxRingChunkReduce, kReduceNames, {messages, data, second_row, seeds}, messages, int8),
      "");
  EXPECT_EQ(Call(JaxRingChunkDecode, kDecodeNames, {messages, data, second_row}, data, int8), "");
  return buffer;
}

TEST(Handlers, ReduceChunks) {
  const std::vector<float> buffer = RoundTrip(0);
  for (int i = 0; i < kN; ++i) {
    const float first = 0.01f * static_cast<float>(i);
    const float second = 0.01f * static_cast<float>(kN + i);
    EXPECT_EQ(buffer[static_cast<std::size_t>(i)], first);
    EXPECT_NEAR(buffer[static_cast<std::size_t>(kN + i)], first + second, 0.5);
  }
}

TEST(Handlers, SayWhatIsWrong) {
  std::vector<float> buffer(kBatch * kChunks * kN);
  std::vector<std::int32_t> row = {0, 3};
  std::vector<std::int8_t> message(kBatch * kMessage);
  const Buffer data(XLA_FFI_DataType_F32, {kBatch, kChunks, kN}, buffer);
  const Buffer rows(XLA_FFI_DataType_S32, {kBatch}, row);
  const Buffer messages(XLA_FFI_DataType_S8, {kBatch, kMessage}, message);
  EXPECT_EQ(Call(JaxRingChunkEncode, kEncodeNames, {data, rows}, messages, {"int8", kBlock}),
            "jax_ring_chunk_encode: row[1] is 3, but buffer has 3 chunks");
  EXPECT_EQ(
      Call(JaxRingChunkEncode, kEncodeNames, {data, rows}, messages, {"int8", 100}),
      "jax_ring_chunk_encode: message has 1008 elements a row, but 1000 elements in blocks of 100 "
      "on wire int8 make 1020");
}

TEST(Handlers, MayRunAllAtOnce) {
  constexpr int kThreads = 8, kRounds = 50;
  const std::vector<float> want = RoundTrip(1);
  std::vector<float> shared(kChunks * kN, 1.5f);  // All read it.
  std::atomic<int> wrong{0};
  const auto work = [&] {
    std::vector<std::int32_t> row = {1, 2}, bad = {0, -1};
    std::vector<std::uint16_t> received(kBatch * kN, 0x3f80), out(kBatch * kN);
    for (int round = 0; round < kRounds; ++round) {
      wrong += RoundTrip(1) != want;
      const Buffer data(XLA_FFI_DataType_F32, {1, kChunks, kN}, shared);
      const Buffer messages(XLA_FFI_DataType_U16, {kBatch, kN}, received);
      const Buffer result(XLA_FFI_DataType_U16, {kBatch, kN}, out);
      for (auto* rows : {&row, &bad}) {
        const std::string error = Call(
            JaxRingChunkReduce, kReduceNames,
            {messages, data, Buffer(XLA_FFI_DataType_S32, {kBatch}, *rows)}, result, {"bfloat16"});
        wrong += error.empty() != (rows == &row);
      }
      wrong += Call(JaxRingCopy, {}, {messages}, result, {}) != "";
      wrong += out != received;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace jax_ring
