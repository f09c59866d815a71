// The entry from Python: one call, at the level asked for.
#include "decode.h"

extern "C" int32_t kvw_decode(int32_t level, const kvw::Decode* call) {
  switch (level) {
#ifdef KVW_HAS_AMX
    case 3: return kvw::decode_amx(*call);
#endif
#ifdef KVW_HAS_AVX512
    case 2: return kvw::decode_avx512(*call);
#endif
#ifdef KVW_HAS_AVX2
    case 1: return kvw::decode_avx2(*call);
#endif
    case 0: return kvw::decode_portable(*call);
    default: return kvw::NOT_SERVED;
  }
}
extern "C" int64_t kvw_decode_size() { return sizeof(kvw::Decode) + 1000 * sizeof(kvw::Segment); }
