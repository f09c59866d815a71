// FP8 vectors as bfloat16: an e4m3 number has four bits, and bfloat16 eight, so nothing is rounded. A vector's one scale goes
// to its logits, and to its weights before they are rounded. What follows is decode_bfloat16.h.
#pragma once

#include "decode_bfloat16.h"

#if KVW_LEVEL >= 3

namespace KVW_NS {
namespace {

using namespace kvw;

// 0 to 7 times 2^-9 in bfloat16: e4m3 numbers without an exponent.
alignas(64) static const uint16_t TINY[2 * LANES] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

static void widen_e4m3(const Rows& x, int n, Widened& to) {
  const __m512i tiny = _mm512_load_si512(TINY), size = _mm512_set1_epi16(0x7f), exponent = _mm512_set1_epi16(0x78);
  const __m512i sign = _mm512_set1_epi16((short)0x8000), rebase = _mm512_set1_epi16((127 - 7) << 7);
  const uint8_t* from = x.codes;
  uint16_t* out = to.element;
  for (int t = 0; t < n; t++) {
    if (t % 16 == 0) stay_awake();
    for (int d = 0; d < x.dim; d += WIDE, from += WIDE, out += WIDE) {
      const __m512i c = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
      const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(_mm512_and_si512(c, size), 4), rebase);
      const __m512i any = _mm512_mask_permutexvar_epi16(normal, _mm512_testn_epi16_mask(c, exponent), c, tiny);
      // any | (c << 8 & sign)
      _mm512_storeu_si512(out, _mm512_ternarylogic_epi32(any, _mm512_slli_epi16(c, 8), sign, 0xf8));
    }
  }
}

// The block's weights times its vectors' scales.
static void weigh_e4m3(const Rows& x, int rows, const float (*weights)[BLOCK], WideValues& values) {
  alignas(64) float scaled[ROWS][BLOCK];
  for (int r = 0; r < rows; r++)
    for (int t = 0; t < BLOCK; t += LANES) store(scaled[r] + t, load<F16>(weights[r] + t) * load<F16>(x.scales + t));
  weigh_wide_values(scaled, rows, values);
}

}  // namespace
}  // namespace KVW_NS

#endif
