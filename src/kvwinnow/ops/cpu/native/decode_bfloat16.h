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

// The nearest bfloat16, ties to even.
inline uint16_t to_bfloat16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if (x != x) return 0x7fc0;  // rounding could carry into the sign
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float widened(uint16_t x) {
  const uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
// The same of numbers that are finite: a NaN among the weights is in their sum as well.
inline __m512i to_bfloat16(__m512 x) {
  const __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  return _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
}

struct WideKeys {
  alignas(64) uint16_t query[MAX_WIDE][16][COLUMNS][2];  // (pair of elements, high and low of each row, element)
  alignas(64) uint8_t last[16][2 * MAX_DIM];             // vectors of a block that ends within 16 slots
  alignas(64) float sums[4][16][COLUMNS];

  void prepare(const float* q, int stride, int rows, int dim) {
    memset(query, 0, sizeof query[0] * (dim / WIDE));
    for (int r = 0; r < rows; r++)
      for (int d = 0; d < dim; d++) {
        const float x = q[r * stride + d];
        const uint16_t high = to_bfloat16(x);
        query[d / WIDE][d % WIDE / 2][r][d % 2] = high;
        query[d / WIDE][d % WIDE / 2][ROWS + r][d % 2] = to_bfloat16(x - widened(high));
      }
  }
};

static void multiply_wide_keys(const Rows& x, int n, WideKeys& keys) {
  for (int i = 0; i * 16 < n; i++) {
    const uint8_t* from = x.codes + 16 * i * x.stride;
    int64_t stride = x.stride;
    for (int t = 0; t < 16; t++) ask_for(from + (BLOCK + t) * stride, stride);
    if (n - 16 * i < 16) {
      memset(keys.last, 0, sizeof keys.last);
      for (int t = 16 * i; t < n; t++) memcpy(keys.last[t % 16], x.codes + t * stride, stride);
      from = keys.last[0], stride = sizeof keys.last[0];
    }
    _tile_zero(0);
    for (int p = 0; p < x.dim / WIDE; p++) {
      _tile_loadd(2, from + p * PIECE, stride);
      _tile_loadd(3, keys.query[p], PIECE);
      _tile_dpbf16ps(0, 2, 3);
    }
    _tile_stored(0, keys.sums[i], 64);
  }
}

void collect_wide_keys(int n, const WideKeys& keys, int rows, float (*logits)[BLOCK]) {
  const float unit[SHARE] = {1, 1, 1, 1};
  for (int t = 0; t < n; t += 16)
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

struct WideValues {
  alignas(64) uint16_t pairs[2][MAX_WIDE][2][16][WIDE];  // (half of the block, piece, tile, pair of slots, 16 x 2)
  alignas(64) uint16_t weights[2][COLUMNS][WIDE];        // (half of the block, high and low of each row, slot)
  alignas(64) float sums[MAX_WIDE][2][16][16];
  alignas(64) float mixed[ROWS][MAX_WIDE][2][16];        // the running output

  void clear(int dim) {
    for (int r = 0; r < ROWS; r++) memset(mixed[r], 0, sizeof(float) * dim);
  }
  void decay(int rows, int dim, const float* by) {
    for (int r = 0; r < rows; r++)
      for (int d = 0; d < dim && by[r] != 1.0f; d += LANES) {
        float* x = mixed[r][0][0] + d;
        store(x, load<F16>(x) * by[r]);
      }
  }
  // Lane n of tile j holds element 8 (n / 4) + 4 j + n % 4 of a piece: rows are interleaved within 128 bits.
  void write(float* out, int stride, int rows, int dim) const {
    for (int r = 0; r < rows; r++)
      for (int d = 0; d < dim; d++) out[r * stride + d] = mixed[r][d / WIDE][d % 8 / 4][d % WIDE / 8 * 4 + d % 4];
  }
};

static void interleave_wide_values(const Rows& x, int n, WideValues& values) {
  for (int i = 0; i < BLOCK / 2; i++) {
    const uint8_t* row = x.codes + 2 * i * x.stride;
    for (int p = 0; p < x.dim / WIDE; p++) {
      ask_for(row + BLOCK * x.stride + p * PIECE);
      ask_for(row + (BLOCK + 1) * x.stride + p * PIECE);
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
      const __m512 w = _mm512_loadu_ps(weights[r] + t);
      const __m512i high = to_bfloat16(w);
      const __m512i low = to_bfloat16(_mm512_sub_ps(w, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16))));
      uint16_t(*to)[WIDE] = values.weights[t / WIDE];
      _mm256_store_si256((__m256i*)(to[r] + t % WIDE), _mm512_cvtepi32_epi16(high));
      _mm256_store_si256((__m256i*)(to[rows + r] + t % WIDE), _mm512_cvtepi32_epi16(low));
    }
}

static void multiply_wide_values(int dim, WideValues& values) {
  _tile_loadd(5, values.weights[0], PIECE);
  _tile_loadd(6, values.weights[1], PIECE);
  for (int p = 0; p < dim / WIDE; p++)
    for (int j = 0; j < 2; j++) {
      _tile_zero(4);
      _tile_loadd(7, values.pairs[0][p][j], PIECE);
      _tile_dpbf16ps(4, 5, 7);
      _tile_loadd(7, values.pairs[1][p][j], PIECE);
      _tile_dpbf16ps(4, 6, 7);
      _tile_stored(4, values.sums[p][j], 64);
    }
}

static void collect_wide_values(int dim, int rows, WideValues& values) {
  for (int p = 0; p < dim / WIDE; p++)
    for (int j = 0; j < 2; j++)
      for (int r = 0; r < rows; r++) {
        const __m512 high = _mm512_load_ps(values.sums[p][j][r]), low = _mm512_load_ps(values.sums[p][j][rows + r]);
        float* to = values.mixed[r][p][j];
        _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_add_ps(high, low)));
      }
}

}  // namespace
}  // namespace KVW_NS

#endif
