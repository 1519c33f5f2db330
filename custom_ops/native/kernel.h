// An operator as a class: names and types as constants, attributes in the constructor, `run`.
#pragma once

#include <initializer_list>
#include <new>
#include <type_traits>
#include <vector>

#include "ort.h"

namespace qwen_mtp {

// The runtime's complaint about a call, or ours.
struct Failure {
  ort::Status* status;
  explicit Failure(ort::Status* given) : status(given) {}
  explicit Failure(const char* message)
      : status(ort::call<ort::Status*>(ort::kCreateStatus, 1, message)) {}
};

inline void check(ort::Status* status) {
  if (status != nullptr) throw Failure(status);
}

// The attributes of a node.
class Attributes {
 public:
  explicit Attributes(const ort::KernelInfo* info) : info_(info) {}
  int64_t integer(const char* name) const {
    int64_t value = 0;
    check(ort::call(ort::kKernelInfoGetAttributeInt64, info_, name, &value));
    return value;
  }
  float number(const char* name) const {
    float value = 0;
    check(ort::call(ort::kKernelInfoGetAttributeFloat, info_, name, &value));
    return value;
  }

 private:
  const ort::KernelInfo* info_;
};

// One run of a node.
class Context {
 public:
  explicit Context(ort::KernelContext* context) : context_(context) {}

  // The data of an input; null where it is absent.
  template <class T>
  const T* input(size_t index) const {
    const ort::Value* value = nullptr;
    check(ort::call(ort::kKernelContextGetInput, context_, index, &value));
    void* data = nullptr;
    if (value != nullptr) check(ort::call(ort::kGetTensorMutableData, const_cast<ort::Value*>(value), &data));
    return static_cast<const T*>(data);
  }

  // Dimension `axis` of an input, for the few that are not static.
  int64_t dimension(size_t index, size_t axis) const {
    const ort::Value* value = nullptr;
    check(ort::call(ort::kKernelContextGetInput, context_, index, &value));
    ort::Shape* shape = nullptr;
    check(ort::call(ort::kGetTensorTypeAndShape, value, &shape));
    int64_t dims[8] = {0};
    ort::Status* status = ort::call(ort::kGetDimensions, static_cast<const ort::Shape*>(shape),
                                    static_cast<int64_t*>(dims), axis + 1);
    ort::call<void>(ort::kReleaseTensorTypeAndShapeInfo, shape);
    check(status);
    return dims[axis];
  }

  // The data of an output of the given shape. A state that is bound to one buffer as input and
  // output comes back as the pointer of the input.
  template <class T>
  T* output(size_t index, std::initializer_list<int64_t> dims) const {
    ort::Value* value = nullptr;
    check(ort::call(ort::kKernelContextGetOutput, context_, index, dims.begin(), dims.size(), &value));
    if (value == nullptr) return nullptr;
    void* data = nullptr;
    check(ort::call(ort::kGetTensorMutableData, value, &data));
    return static_cast<T*>(data);
  }

  // Run `task(i)` for i < count on the threads of the session; no order is promised.
  template <class Task>
  void parallel(size_t count, const Task& task) const {
    if (count == 1) {
      task(size_t{0});
      return;
    }
    void (*each)(void*, size_t) = [](void* data, size_t i) { (*static_cast<const Task*>(data))(i); };
    void* data = const_cast<void*>(static_cast<const void*>(&task));
    check(ort::call(ort::kKernelContextParallelFor,
                    static_cast<const ort::KernelContext*>(context_), each, count, size_t{0}, data));
  }

 private:
  ort::KernelContext* context_;
};

// Memory of the calling thread that a kernel may use until it returns; aligned for any vector.
// `slot` tells buffers apart that are in use at the same time.
template <class T>
T* scratch(int slot, size_t count) {
  thread_local std::vector<char> memory[8];
  std::vector<char>& bytes = memory[slot];
  if (bytes.size() < count * sizeof(T) + 64) bytes.resize(count * sizeof(T) + 64);
  const auto start = reinterpret_cast<uintptr_t>(bytes.data());
  return reinterpret_cast<T*>((start + 63) & ~uintptr_t{63});
}

// The structure the runtime reads, made from a kernel class K with
//   static constexpr const char* kName;
//   static constexpr ort::Type kInputs[], kOutputs[];
//   static constexpr uint32_t kOptional;   // bit i: input i may be absent
//   explicit K(const Attributes&);  void run(const Context&);
template <class K>
const ort::CustomOp* operator_of() {
  static const ort::CustomOp op = [] {
    ort::CustomOp o{};
    o.version = ort::kVersion;
    o.get_name = [](const ort::CustomOp*) { return K::kName; };
    o.get_provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
    o.get_input_type = [](const ort::CustomOp*, size_t i) { return K::kInputs[i]; };
    o.get_input_count = [](const ort::CustomOp*) { return std::extent_v<decltype(K::kInputs)>; };
    o.get_output_type = [](const ort::CustomOp*, size_t i) { return K::kOutputs[i]; };
    o.get_output_count = [](const ort::CustomOp*) { return std::extent_v<decltype(K::kOutputs)>; };
    o.destroy = [](void* kernel) { delete static_cast<K*>(kernel); };
    o.get_input_presence = [](const ort::CustomOp*, size_t i) {
      return (K::kOptional >> i) & 1 ? ort::kOptional : ort::kRequired;
    };
    o.get_output_presence = [](const ort::CustomOp*, size_t) { return ort::kRequired; };
    o.get_input_memory = [](const ort::CustomOp*, size_t) { return 0; };
    o.get_variadic_input_arity = [](const ort::CustomOp*) { return 1; };
    o.get_variadic_input_homogeneity = [](const ort::CustomOp*) { return 1; };
    o.get_variadic_output_arity = [](const ort::CustomOp*) { return 1; };
    o.get_variadic_output_homogeneity = [](const ort::CustomOp*) { return 1; };
    o.create_kernel_v2 = [](const ort::CustomOp*, ort::Table, const ort::KernelInfo* info,
                            void** kernel) -> ort::Status* {
      try {
        *kernel = new K(Attributes(info));
        return nullptr;
      } catch (const Failure& failure) {
        return failure.status;
      }
    };
    o.compute_v2 = [](void* kernel, ort::KernelContext* context) -> ort::Status* {
      try {
        static_cast<K*>(kernel)->run(Context(context));
        return nullptr;
      } catch (const Failure& failure) {
        return failure.status;
      } catch (const std::bad_alloc&) {
        return ort::call<ort::Status*>(ort::kCreateStatus, 1, "out of memory");
      }
    };
    o.get_start_version = [](const ort::CustomOp*) { return 1; };
    o.get_end_version = [](const ort::CustomOp*) { return 1 << 30; };
    return o;
  }();
  return &op;
}

}  // namespace qwen_mtp
