// What these kernels need of ONNX Runtime's C interface, declared from scratch.
//
// The interface is a table of function pointers that only ever grows at its end, so a function is
// its place in that table. `CustomOp` is the structure the runtime reads an operator from; it is
// the layout of version 18 and later, whose last fields are read whatever version is claimed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t kVersion = 18;

struct Status;
struct Value;
struct Shape;
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct Domain;
using Table = void* const*;

struct Base {
  Table (*get_api)(uint32_t version);
  const char* (*get_version)();
};

enum Place : int {
  kCreateStatus = 0,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kKernelInfoGetAttributeFloat = 85,
  kKernelInfoGetAttributeInt64 = 86,
  kKernelContextGetInputCount = 88,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorTypeAndShapeInfo = 99,
  kKernelContextParallelFor = 274,
};

enum Type : int { kAny = 0, kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kHalf = 10 };
enum Presence : int { kRequired = 0, kOptional = 1 };

struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, Table, const KernelInfo*);
  const char* (*get_name)(const CustomOp*);
  const char* (*get_provider)(const CustomOp*);
  Type (*get_input_type)(const CustomOp*, size_t);
  size_t (*get_input_count)(const CustomOp*);
  Type (*get_output_type)(const CustomOp*, size_t);
  size_t (*get_output_count)(const CustomOp*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  Presence (*get_input_presence)(const CustomOp*, size_t);
  Presence (*get_output_presence)(const CustomOp*, size_t);
  int (*get_input_memory)(const CustomOp*, size_t);
  int (*get_variadic_input_arity)(const CustomOp*);
  int (*get_variadic_input_homogeneity)(const CustomOp*);
  int (*get_variadic_output_arity)(const CustomOp*);
  int (*get_variadic_output_homogeneity)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, Table, const KernelInfo*, void**);
  Status* (*compute_v2)(void*, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, void*);
  int (*get_start_version)(const CustomOp*);
  int (*get_end_version)(const CustomOp*);
  size_t (*get_may_inplace)(int**, int**);
  void (*release_may_inplace)(int*, int*);
  size_t (*get_alias_map)(int**, int**);
  void (*release_alias_map)(int*, int*);
};

inline Table g_table = nullptr;  // one runtime in a process

template <class Result = Status*, class... Args>
inline Result call(Place place, Args... args) {
  return reinterpret_cast<Result (*)(Args...)>(g_table[place])(args...);
}

}  // namespace ort
