// The entry point the runtime looks for: adds the domain and its operators to a session.
#include "attention.h"
#include "attention_project.h"
#include "delta.h"
#include "embedding.h"
#include "linear.h"
#include "norm.h"
#include "rejection.h"
#include "swiglu.h"

namespace {

template <class... Kernels>
ort::Status* add(ort::SessionOptions* options) {
  // The runtime keeps pointers into the domain for as long as a session lives.
  static ort::Domain* domain = nullptr;
  if (domain == nullptr) {
    if (ort::Status* s = ort::call(ort::kCreateCustomOpDomain, "qwen_mtp", &domain)) return s;
    const ort::CustomOp* ops[] = {qwen_mtp::operator_of<Kernels>()...};
    for (const ort::CustomOp* op : ops) {
      if (ort::Status* s = ort::call(ort::kCustomOpDomainAdd, domain, op)) return s;
    }
  }
  return ort::call(ort::kAddCustomOpDomain, options, domain);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::Base* base) {
  ort::g_table = base->get_api(ort::kVersion);
  using namespace qwen_mtp;
  return add<AddNorm, ArgMaxRows, AttentionProject, DeltaChunk, DeltaRound, EmbeddingInt4, EmbeddingInt8, KvWrite<float>, KvWrite<Half>,
             LinearInt4, LinearInt8, PagedAttention<float>, PagedAttention<Half>, RejectionSample, RMSNorm,
             SwiGLU>(options);
}
