// bfloat16 slots through AMX: what is stored goes into the products as it lies, and queries and weights, which are
// float32, as the sum of two bfloat16 numbers, high and low (17 bits).
//
// The steps are those of decode_integer.h. Only head dimensions that are multiples of 32 come here.
#pragma once

#include "decode_integer.h"

#if KVW_LEVEL >= 3

namespace KVW_NS {
namespace {

using namespace kvw;

constexpr int WIDE = PIECE / 2;  // elements of a piece
constexpr int MAX_WIDE = MAX_DIM / WIDE;

// The nearest bfloat16, ties to even, in the low half of each lane. NaN stays NaN: rounding could carry into its sign.
inline __m512i to_bfloat16(__m512 x) {
  const __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  return _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}

// The sum of two of them that is nearest, high and low. Of infinity, and of what rounds to it, all is high.
inline void as_two(__m512 x, __m256i& high, __m256i& low) {
  const __m512i near = to_bfloat16(x);
  const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(near, 16));
  const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(wide), _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
  high = _mm512_cvtepi32_epi16(near);
  low = _mm512_cvtepi32_epi16(to_bfloat16(_mm512_maskz_sub_ps(finite, x, wide)));
}

struct WideKeys {
  alignas(64) uint16_t query[MAX_WIDE][16][COLUMNS][2];  // (pair of elements, high and low of each row, element)
  alignas(64) uint8_t last[16][2 * MAX_DIM];             // vectors of a block that ends within 16 slots
  alignas(64) float sums[4][16][COLUMNS];

  void prepare(const float* q, int stride, int rows, int dim) {
    memset(query, 0, sizeof query[0] * (dim / WIDE));
    for (int r = 0; r < rows; r++)
      for (int d = 0; d < dim; d += LANES) {
        __m256i high, low;
        as_two(_mm512_loadu_ps(q + r * stride + d), high, low);
        alignas(32) uint32_t pairs[2][LANES / 2];
        _mm256_store_si256((__m256i*)pairs[0], high);
        _mm256_store_si256((__m256i*)pairs[1], low);
        for (int i = 0; i < LANES / 2; i++) {
          memcpy(query[d / WIDE][d % WIDE / 2 + i][r], pairs[0] + i, 4);
          memcpy(query[d / WIDE][d % WIDE / 2 + i][ROWS + r], pairs[1] + i, 4);
        }
      }
  }
};

static void multiply_wide_keys(const Rows& x, int n, WideKeys& keys) {
  for (int i = 0; i * 16 < n; i += 2) {  // two at once
    const uint8_t* from[2] = {x.codes + 16 * i * x.stride, x.codes + 16 * (i + 1) * x.stride};
    int64_t stride[2] = {x.stride, x.stride};
    for (int j = 0; j < 2 && n - 16 * i < 32; j++) {
      const int left = n - 16 * (i + j);
      if (left >= 16) continue;
      if (left <= 0) {
        from[j] = from[0], stride[j] = stride[0];
        continue;
      }
      memset(keys.last, 0, sizeof keys.last);
      for (int t = 0; t < left; t++) memcpy(keys.last[t], from[j] + t * x.stride, x.stride);
      from[j] = keys.last[0], stride[j] = sizeof keys.last[0];
    }
    _tile_zero(4);
    _tile_zero(5);
    for (int p = 0; p < x.dim / WIDE; p++) {
      if (p < 2) x.ask(i + p, 8);
      _tile_loadd(0, keys.query[p], PIECE);
      _tile_loadd(2, from[0] + p * PIECE, stride[0]);
      _tile_dpbf16ps(4, 2, 0);
      _tile_loadd(3, from[1] + p * PIECE, stride[1]);
      _tile_dpbf16ps(5, 3, 0);
    }
    _tile_stored(4, keys.sums[i], 64);
    _tile_stored(5, keys.sums[i + 1], 64);
  }
}

void collect_wide_keys(const Rows& x, int n, const WideKeys& keys, int rows, float (*logits)[BLOCK]) {
  const float unit[SHARE] = {1, 1, 1, 1};
  for (int t = 0; t < n; t += 16) {
    x.ask(4 + t / 16, 8);
    stay_awake();
    for (int first = 0; first < rows; first += SHARE) {
      const auto four = [&](int slot) {
        const float* sums = keys.sums[t / 16][slot] + first;
        return _mm_add_ps(_mm_load_ps(sums), _mm_load_ps(sums + ROWS));
      };
      __m512 y[4];
      for (int j = 0; j < 4; j++) {
        y[j] = _mm512_castps128_ps512(four(j));
        y[j] = _mm512_insertf32x4(y[j], four(4 + j), 1);
        y[j] = _mm512_insertf32x4(y[j], four(8 + j), 2);
        y[j] = _mm512_insertf32x4(y[j], four(12 + j), 3);
      }
      turn(y, rows - first < SHARE ? rows - first : SHARE, unit, (float(*)[BLOCK])(logits[first] + t));
    }
  }
}

struct WideValues {
  alignas(64) uint16_t pairs[2][MAX_WIDE][2][16][WIDE];  // (half of the block, piece, tile, pair of slots, 16 x 2)
  alignas(64) uint16_t weights[2][COLUMNS][WIDE];        // (half of the block, high and low of each row, slot)
  alignas(64) float sums[MAX_WIDE][2][16][16];
  alignas(64) float mixed[ROWS][MAX_WIDE][2][16];        // the running output

  void clear(int dim) {
    for (int r = 0; r < ROWS; r++) memset(mixed[r], 0, sizeof(float) * dim);
  }
  // Lane n of tile j holds element 8 (n / 4) + 4 j + n % 4 of a piece: rows are interleaved within 128 bits.
  void write(float* out, int stride, int rows, int dim) const {
    for (int r = 0; r < rows; r++)
      for (int d = 0; d < dim; d += 4)
        memcpy(out + r * stride + d, mixed[r][d / WIDE][d % 8 / 4] + d % WIDE / 8 * 4, 4 * sizeof(float));
  }
};

static void interleave_wide_values(const Rows& x, int n, WideValues& values) {
  for (int i = 0; i < BLOCK / 2; i++) {
    const uint8_t* row = x.codes + 2 * i * x.stride;
    if (i % 4 == 0) x.ask(i / 4, 16), stay_awake();
    for (int p = 0; p < x.dim / WIDE; p++) {
      const __m512i none = _mm512_setzero_si512();
      const __m512i a = 2 * i < n ? _mm512_loadu_si512(row + p * PIECE) : none;
      const __m512i b = 2 * i + 1 < n ? _mm512_loadu_si512(row + x.stride + p * PIECE) : none;
      _mm512_store_si512(values.pairs[i / 16][p][0][i % 16], _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(values.pairs[i / 16][p][1][i % 16], _mm512_unpackhi_epi16(a, b));
    }
  }
}

static void weigh_wide_values(const float (*weights)[BLOCK], int rows, WideValues& values) {
  for (int r = 0; r < rows; r++)
    for (int t = 0; t < BLOCK; t += 16) {
      __m256i high, low;
      as_two(_mm512_loadu_ps(weights[r] + t), high, low);
      uint16_t(*to)[WIDE] = values.weights[t / WIDE];
      _mm256_store_si256((__m256i*)(to[r] + t % WIDE), high);
      _mm256_store_si256((__m256i*)(to[rows + r] + t % WIDE), low);
    }
}

static void multiply_wide_values(const Rows& x, WideValues& values) {
  for (int p = 0; p < x.dim / WIDE; p++) {
    if (p < 2) x.ask(4 + p, 8);
    _tile_zero(6);
    _tile_zero(7);
    for (int half = 0; half < 2; half++) {
      _tile_loadd(1, values.weights[half], PIECE);
      _tile_loadd(2, values.pairs[half][p][0], PIECE);
      _tile_dpbf16ps(6, 1, 2);
      _tile_loadd(3, values.pairs[half][p][1], PIECE);
      _tile_dpbf16ps(7, 1, 3);
    }
    _tile_stored(6, values.sums[p][0], 64);
    _tile_stored(7, values.sums[p][1], 64);
  }
}

void collect_wide_values(const Rows& x, int rows, WideValues& values) {
  for (int p = 0; p < x.dim / WIDE; p++)
    for (int j = 0; j < 2; j++)
      for (int r = 0; r < rows; r++) {
        if (p == 0 && r == 0) x.ask(6 + j, 8);
        if (r == 0) stay_awake();
        const __m512 high = _mm512_load_ps(values.sums[p][j][r]), low = _mm512_load_ps(values.sums[p][j][rows + r]);
        float* to = values.mixed[r][p][j];
        _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_add_ps(high, low)));
      }
}

// The vectors of a block of another kind, as bfloat16.
struct Widened {
  alignas(64) uint16_t element[BLOCK * MAX_DIM];
};

inline Rows as_wide(const Rows& x, const Widened& from) {
  Rows wide = x;
  wide.kind = BFLOAT16, wide.codes = (const uint8_t*)from.element, wide.stride = 2 * x.dim;
  return wide;
}

}  // namespace
}  // namespace KVW_NS

#endif
