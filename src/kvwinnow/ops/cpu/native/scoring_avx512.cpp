// AVX-512 F, BW, VL and DQ.
#if defined(__AVX512F__)
#define KVW_NAMESPACE kvw_scoring_avx512
#define KVW_WIDTH 16
#include "scoring_vector.h"
#endif
