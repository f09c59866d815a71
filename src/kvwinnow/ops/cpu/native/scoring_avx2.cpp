// AVX2 with FMA and F16C.
#if defined(__AVX2__)
#define KVW_NAMESPACE kvw_scoring_avx2
#define KVW_WIDTH 8
#include "scoring_vector.h"
#endif
