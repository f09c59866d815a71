#include "decode.h"

#define DECLARE(ns)                                                          \
  namespace ns {                                                             \
  int32_t decode(const kvw::Decode& call, const kvw::Segment* segments);     \
  }
KVW_EACH_LEVEL(DECLARE)

// Attention of a few queries over slots; see decode.h.
KVW_EXPORT int32_t kvw_decode(int32_t level, const kvw::Decode* call, const kvw::Segment* segments) {
  KVW_DISPATCH(level, decode(*call, segments))
}
