#include "linear.h"

#include <cstdlib>

#define DECLARE(ns)                                                                \
  namespace ns {                                                                   \
  int32_t linear(const kvw::Linear& call, const kvw::Matrix* matrices, float* x);  \
  }
KVW_EACH_LEVEL(DECLARE)

namespace {

int32_t run(int32_t level, const kvw::Linear& call, const kvw::Matrix* matrices, float* x) {
  KVW_DISPATCH(level, linear(call, matrices, x))
}

}  // namespace

// Products of a few vectors with some matrices, each of which is read once.
KVW_EXPORT int32_t kvw_linear(int32_t level, const kvw::Linear* call, const kvw::Matrix* matrices) {
  if (call->width % 32 || call->vectors < 0 || call->threads < 1) return KVW_NOT_SERVED;
  float* x = (float*)aligned_alloc(64, sizeof(float) * (size_t)(call->vectors * call->width) + 64);
  if (!x) return KVW_NO_MEMORY;
  const int32_t code = run(level, *call, matrices, x);
  free(x);
  return code;
}
