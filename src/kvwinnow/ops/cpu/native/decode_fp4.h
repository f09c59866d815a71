// FP4 vectors with many scales, as bfloat16: an e2m1 number times an e4m3 scale, or a power of two, has six bits at most,
// and bfloat16 has eight, so nothing is rounded. What follows is decode_bfloat16.h.
#pragma once

#include "decode_bfloat16.h"

#if KVW_LEVEL >= 3

namespace KVW_NS {
namespace {

using namespace kvw;

// The two halves of a byte, elements half a vector apart, lie side by side once they are widened.
// Which element lies at place i.
inline int halves_at(int i, int dim) { return i / 2 + i % 2 * (dim / 2); }

static const float E2M1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, -.5f, -1, -1.5f, -2, -3, -4, -6};

// The scales of a slot lie one behind the other here.
static void widen(const Rows& x, int n, Widened& to) {
  const __m512 table = _mm512_loadu_ps(E2M1);
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  const int half = x.dim / 2, steps = half / LANES;
  int low_group[MAX_DIM / 2 / LANES], high_group[MAX_DIM / 2 / LANES];
  for (int i = 0; i < steps; i++) low_group[i] = i * LANES / x.group, high_group[i] = (half + i * LANES) / x.group;
  const uint8_t* row = x.codes;
  const float* scale = x.scales;
  uint16_t* out = to.element;
  for (int t = 0; t < n; t++, row += x.stride, scale += x.groups) {
    if (t % 16 == 0) stay_awake();
    for (int i = 0; i < steps; i++, out += 2 * LANES) {
      const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(row + i * LANES)));  // 4 bits count
      const __m512 low = _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), _mm512_set1_ps(scale[low_group[i]]));
      const __m512 high = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table),
                                        _mm512_set1_ps(scale[high_group[i]]));
      const __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
      // lower | (high & upper)
      _mm512_storeu_si512(out, _mm512_ternarylogic_epi32(lower, _mm512_castps_si512(high), upper, 0xf8));
    }
  }
}

}  // namespace
}  // namespace KVW_NS

#endif
