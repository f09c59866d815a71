// Products in whole numbers, for codes of 8 and 4 bits: what makes quantised slots as fast to read as their bytes.
//
// A query, or the weights of a block of slots, becomes fixed point of 24 bits in three bytes, as many as a float has, and
// codes are small integers, so that AMX or VNNI products are exact; scales are applied to their sums. Four queries share
// a tile. Vectors are read where they lie, row by row:
//   keys    A = 16 slots x 64 elements, B = the queries: (16 quads of elements) x (three bytes of each query) x 4
//   values  A = the weights: (three bytes of each query) x 64 slots, B = 4 slots interleaved: (16 quads of slots) x 16 x 4
// With AMX a product is one instruction; without, it is VNNI instructions on the same operands.
//
// A block goes through steps, between which others run while tiles are on their way: expand, multiply and collect for
// keys; interleave, weigh, multiply and collect for values.
#pragma once

#include "pieces.h"

#if KVW_LEVEL >= 2

namespace KVW_NS {
namespace {

using namespace kvw;

constexpr int PLANES = 3;  // bytes of fixed point, from the highest on
constexpr int SHARE = 4;   // queries in a tile
constexpr int SHARES = ROWS / SHARE;

inline int share_of(int rows) { return rows < SHARE ? rows : SHARE; }
inline int shares_of(int rows) { return (rows + SHARE - 1) / SHARE; }

// -- keys -------------------------------------------------------------------------------------------------------------

constexpr float FULL_QUERY = 8323000.0f;  // what three signed bytes hold, less what rounding may add

struct IntegerKeys {
  alignas(64) int8_t query[SHARES][MAX_TERMS][16][16][4];  // (quad of elements, byte and row, element)
  alignas(64) int32_t lifted[SHARES][MAX_TERMS][16];       // what lifting by 128 adds to each product
  alignas(64) float total[SHARES][MAX_GROUPS][SHARE];      // sum of a query's elements in each group
  alignas(64) int8_t plain[MAX_PIECES][BLOCK][PIECE];
  alignas(64) Tile sums[SHARES][MAX_TERMS][4];
  float unit[ROWS];                                        // of a row's fixed point

  void prepare(const Pieces& pieces, const float* q, int stride, int rows, int dim) {
    const int size = dim / pieces.groups;
    for (int s = 0; s < shares_of(rows); s++) {
      memset(query[s], 0, sizeof query[s][0] * pieces.terms);
      memset(lifted[s], 0, sizeof lifted[s][0] * pieces.terms);
      memset(total[s], 0, sizeof total[s][0] * pieces.groups);
    }
    for (int r = 0; r < rows; r++) {
      const float* row = q + r * stride;
      const int share = r / SHARE, column = r % SHARE;
      F16 most = fill(1e-30f), nothing = F16{};
      for (int d = 0; d < dim; d += LANES) {
        const F16 x = load<F16>(row + d);
        most = larger(most, larger(x, -x));
        nothing += x * 0.0f;
      }
      // Fixed point knows neither NaN nor infinity: the unit carries them into every product.
      unit[r] = largest(most) / FULL_QUERY + sum(nothing);
      const __m512 per = _mm512_set1_ps(1.0f / unit[r]);
      int8_t bytes[PLANES][MAX_DIM];
      for (int d = 0; d < dim; d += LANES) {
        const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + d), per));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(32896)), 16);
        const __m512i middle = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
        _mm_storeu_si128((__m128i*)(bytes[0] + d), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((__m128i*)(bytes[1] + d), _mm512_cvtepi32_epi8(middle));
        _mm_storeu_si128((__m128i*)(bytes[2] + d), _mm512_cvtepi32_epi8(x));
      }
      for (int g = 0; g < pieces.groups; g++) {
        const float* of_group = row + g * size;
        F16 sums_of = {};
        const int many = size / LANES * LANES;
        for (int d = 0; d < many; d += LANES) sums_of += load<F16>(of_group + d);
        float all = sum(sums_of);
        for (int d = many; d < size; d++) all += of_group[d];
        total[share][g][column] = all;
      }
      for (int k = 0; k < pieces.terms; k++) {
        const Pieces::Term& term = pieces.term[k];
        const int16_t* element = pieces.element[term.piece];
        int sums_of[PLANES] = {};
        for (int i = 0; i < PIECE; i += 4) {
          const int here = (int)(term.where >> i & 15);
          for (int plane = 0; plane < PLANES && here; plane++) {
            int8_t* to = query[share][k][i / 4][SHARE * plane + column];
            if (here == 15) memcpy(to, bytes[plane] + element[i], 4);  // multiples of 4 elements lie together
            else
              for (int j = 0; j < 4; j++)
                if (here >> j & 1) to[j] = bytes[plane][element[i + j]];
            for (int j = 0; j < 4 && LIFTED; j++) sums_of[plane] += to[j];
          }
        }
        for (int plane = 0; plane < PLANES && LIFTED; plane++)
          lifted[share][k][SHARE * plane + column] = sums_of[plane] * 128;
      }
    }
  }
};

template <int KIND>
inline bool lies_as_tiles(const Rows& x, int n) {
  return !LIFTED && KIND == INT8 && n == BLOCK && x.dim % PIECE == 0;
}

template <int KIND, Pieces::Shape SHAPE>
void expand_keys_as(const Rows& x, int n, const Pieces& pieces, IntegerKeys& keys) {
  const __m512i lift = _mm512_set1_epi8(LIFTED && Codes<KIND>::SIGNED ? -128 : 0);
  const int each = pieces.each;
  const int64_t stride = x.stride;
  for (int p = 0; p < each; p++) {
    const __mmask64 whole = pieces.whole[p];
    const uint8_t* row = x.codes + p * PIECE;
    int8_t *low = keys.plain[p][0], *high = keys.plain[each + p][0];
    for (int t = 0; t < n; t++, row += stride, low += PIECE, high += PIECE) {
      if (t % 16 == 0) {
        if (p == 0) x.ask(t / 16, 16);
        stay_awake();
      }
      if constexpr (SHAPE == Pieces::BOTH) {
        const __m512i v = Codes<KIND>::both(_mm256_maskz_loadu_epi8((__mmask32)whole, row));
        _mm512_store_si512(low, _mm512_xor_si512(v, lift));
      } else if constexpr (SHAPE == Pieces::SPLIT) {
        const __m512i v = _mm512_maskz_loadu_epi8(whole, row);
        _mm512_store_si512(low, _mm512_xor_si512(Codes<KIND>::low(v), lift));
        _mm512_store_si512(high, _mm512_xor_si512(Codes<KIND>::high(v), lift));
      } else {
        _mm512_store_si512(low, _mm512_xor_si512(_mm512_maskz_loadu_epi8(whole, row), lift));
      }
    }
  }
  for (int p = 0; p < pieces.count && n < BLOCK; p++) memset(keys.plain[p][n], 0, (size_t)(BLOCK - n) * PIECE);
}

template <int KIND>
void expand_keys(const Rows& x, int n, const Pieces& pieces, IntegerKeys& keys) {
  if (lies_as_tiles<KIND>(x, n)) return;
  if constexpr (KIND == INT8) expand_keys_as<KIND, Pieces::PLAIN>(x, n, pieces, keys);
  else if (pieces.shape == Pieces::BOTH) expand_keys_as<KIND, Pieces::BOTH>(x, n, pieces, keys);
  else expand_keys_as<KIND, Pieces::SPLIT>(x, n, pieces, keys);
}

// sums[slot][column] of 16 slots each.
template <int KIND>
void multiply_keys(const Rows& x, int n, const Pieces& pieces, int rows, IntegerKeys& keys) {
  const bool there = lies_as_tiles<KIND>(x, n);
  for (int k = 0; k < pieces.terms; k++) {
    const int piece = pieces.term[k].piece;
    const int8_t* from = there ? (const int8_t*)x.codes + piece * PIECE : keys.plain[piece][0];
    const int64_t stride = there ? x.stride : PIECE;
    for (int s = 0; s < shares_of(rows); s++) {
#if KVW_LEVEL >= 3
      _tile_loadd(0, keys.query[s][k], 64);
#define KVW_SLOTS(i, a, sum)                        \
  if (k == 0 && s == 0) x.ask(4 + i, 16);           \
  _tile_zero(sum);                                  \
  _tile_loadd(a, from + 16 * i * stride, stride);   \
  _tile_dpbssd(sum, a, 0);                          \
  _tile_stored(sum, keys.sums[s][k][i], 64);
      KVW_SLOTS(0, 2, 4)
      KVW_SLOTS(1, 3, 5)
      KVW_SLOTS(2, 2, 4)
      KVW_SLOTS(3, 3, 5)
#undef KVW_SLOTS
#else
      const __m512i none = _mm512_setzero_si512();
      const __m512i start =
          Codes<KIND>::SIGNED ? _mm512_sub_epi32(none, _mm512_load_si512(keys.lifted[s][k])) : none;
      for (int t = 0; t < n; t += 8) {
        __m512i acc[8];
        for (int j = 0; j < 8; j++) acc[j] = start;
        for (int i = 0; i < 16; i++) {
          const __m512i query = _mm512_load_si512(keys.query[s][k][i]);
          for (int j = 0; j < 8; j++) {
            int32_t quad;
            memcpy(&quad, from + (t + j) * stride + 4 * i, 4);
            acc[j] = _mm512_dpbusd_epi32(acc[j], _mm512_set1_epi32(quad), query);
          }
        }
        for (int j = 0; j < 8; j++) _mm512_store_si512(keys.sums[s][k][t / 16][t % 16 + j], acc[j]);
      }
#endif
    }
  }
}

// y[j] holds slots j, 4 + j, 8 + j, 12 + j x 4 rows; row r goes to to[r].
inline void turn(const __m512* y, int rows, const float* unit, float (*to)[BLOCK]) {
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(y[0], y[1])), b = _mm512_castps_pd(_mm512_unpackhi_ps(y[0], y[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(y[2], y[3])), d = _mm512_castps_pd(_mm512_unpackhi_ps(y[2], y[3]));
  const __m512d each[SHARE] = {_mm512_unpacklo_pd(a, c), _mm512_unpackhi_pd(a, c), _mm512_unpacklo_pd(b, d),
                               _mm512_unpackhi_pd(b, d)};
  for (int r = 0; r < rows; r++)
    _mm512_storeu_ps(to[r], _mm512_mul_ps(_mm512_castpd_ps(each[r]), _mm512_set1_ps(unit[r])));
}

// x[j] holds four rows' products with slot j, in four parts of 128 bits that are added up; row r goes to to[r].
inline void add_and_turn(const __m512* x, int rows, const float* unit, float (*to)[BLOCK]) {
  __m512 y[4];  // part i of y[j] is slot 4 i + j
  for (int j = 0; j < 4; j++) {
    const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(x[j], x[4 + j], 0x44), _mm512_shuffle_f32x4(x[j], x[4 + j], 0xee));
    const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x44),
                                   _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xee));
    y[j] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  turn(y, rows, unit, to);
}

template <int KIND>
void collect_keys(const Rows& x, int n, const Pieces& pieces, const IntegerKeys& keys, int rows,
                  float (*logits)[BLOCK]) {
  // What the bytes of fixed point are worth; the fourth part of a row of a tile is empty.
  const __m512 worth = _mm512_insertf32x8(_mm512_set1_ps(0.0f), _mm256_setr_ps(65536, 65536, 65536, 65536, 256, 256, 256, 256), 0);
  const __m512 worths = _mm512_insertf32x4(worth, _mm_set1_ps(1.0f), 2);
  for (int s = 0; s < shares_of(rows); s++) {
    const int share = rows - SHARE * s < SHARE ? rows - SHARE * s : SHARE;
    float unit[SHARE];
    for (int r = 0; r < share; r++) unit[r] = keys.unit[SHARE * s + r] * Codes<KIND>::UNIT;
    for (int t = 0; t < n; t += 16) {
      if (s == 0) x.ask(4 + t / 16, 8);
      stay_awake();
      __m512 y[16];
      for (int k = 0; k < pieces.terms; k++) {
        const float* scale = x.scales + pieces.term[k].group * BLOCK + t;
        const int32_t(*sums)[16] = keys.sums[s][k][t / 16];
        for (int j = 0; j < 16; j++) {
          const __m512 product = _mm512_cvtepi32_ps(_mm512_load_si512(sums[j]));
          y[j] = k ? _mm512_fmadd_ps(product, _mm512_set1_ps(scale[j]), y[j]) : _mm512_mul_ps(product, _mm512_set1_ps(scale[j]));
        }
      }
      for (int j = 0; j < 16; j++) y[j] = _mm512_mul_ps(y[j], worths);
      float(*to)[BLOCK] = (float(*)[BLOCK])(logits[SHARE * s] + t);
      add_and_turn(y, share, unit, to);
      if (KIND == INT4)
        for (int r = 0; r < share; r++) {
          __m512 z = _mm512_loadu_ps(to[r]);
          for (int g = 0; g < pieces.groups; g++)
            z = _mm512_fmadd_ps(_mm512_loadu_ps(x.zeros + g * BLOCK + t), _mm512_set1_ps(keys.total[s][g][r]), z);
          _mm512_storeu_ps(to[r], z);
        }
    }
  }
}

// -- values -----------------------------------------------------------------------------------------------------------

constexpr float FULL_WEIGHT = 16777000.0f;  // what three bytes hold, less what rounding may add

struct IntegerValues {
  alignas(64) int8_t quads[MAX_PIECES][4][16][PIECE];        // 16 bytes of a piece each: (quad of slots, element, slot)
  alignas(64) uint8_t weights[MAX_GROUPS][SHARES][16][PIECE];  // (group, share, byte from the highest on and row, slot)
  alignas(64) Tile sums[MAX_PIECES][4][SHARES];
  alignas(64) float mixed[ROWS][MAX_PIECES][4][16];          // the running output, less the zero points' part
  alignas(64) float moved[ROWS][MAX_GROUPS][16];             // and that, in 16 parts
  float unit[2][MAX_GROUPS][ROWS];                           // of the weights of even and odd blocks

  void clear(const Pieces& pieces) {
    for (int r = 0; r < ROWS; r++) memset(mixed[r], 0, sizeof mixed[r][0] * pieces.count);
    for (int r = 0; r < ROWS; r++) memset(moved[r], 0, sizeof moved[r][0] * pieces.groups);
  }
  void write(float* out, int stride, int rows, int size, const Pieces& pieces) const {
    for (int r = 0; r < rows; r++) {
      float of_group[MAX_GROUPS];
      for (int g = 0; g < pieces.groups; g++) of_group[g] = sum(load<F16>(moved[r][g]));
      for (int p = 0; p < pieces.count; p++)
        for (int j = 0; j < 4; j++) {
          if (pieces.group[p][j] < 0) continue;
          const int16_t* d = pieces.element[p] + 16 * j;
          const F16 x = load<F16>(mixed[r][p][j]) + of_group[d[0] / size];
          if (d[15] == d[0] + 15) {
            store(out + r * stride + d[0], x);
            continue;
          }
          float each[LANES];
          store(each, x);
          for (int i = 0; i < LANES; i++)
            if (d[i] >= 0) out[r * stride + d[i]] = each[i];
        }
    }
  }
};

// Which four slots of a block weights 4 i to 4 i + 3 belong to, so that bytes are parted within lanes of 128 bits.
inline int quad_of(int i) { return i % 4 * 4 + i / 4; }

// The same 64 bytes of four slots' vectors to a row of four tiles: tile j gets bytes 16 j to 16 j + 15, a slot at a time.
inline void interleave(const __m512i* v, __m512i* tiles) {
  // Dword 4 j + L goes to place j of lane L of 128 bits, whence unpacking brings it to lane L of tile j.
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  __m512i w[4];
  for (int i = 0; i < 4; i++) w[i] = _mm512_permutexvar_epi32(order, v[i]);
  const __m512i a = _mm512_unpacklo_epi8(w[0], w[1]), b = _mm512_unpackhi_epi8(w[0], w[1]);
  const __m512i c = _mm512_unpacklo_epi8(w[2], w[3]), d = _mm512_unpackhi_epi8(w[2], w[3]);
  tiles[0] = _mm512_unpacklo_epi16(a, c);
  tiles[1] = _mm512_unpackhi_epi16(a, c);
  tiles[2] = _mm512_unpacklo_epi16(b, d);
  tiles[3] = _mm512_unpackhi_epi16(b, d);
}

template <int KIND, Pieces::Shape SHAPE>
void interleave_values_as(const Rows& x, int n, const Pieces& pieces, IntegerValues& values) {
  const int each = pieces.each;
  const int64_t stride = x.stride;
  for (int p = 0; p < each; p++) {
    const __mmask64 whole = pieces.whole[p];
    const uint8_t* row = x.codes + p * PIECE;
    for (int quad = 0; quad < 16; quad++) {
      const int i = quad_of(quad);  // its own inverse
      if (quad % 4 == 0) {
        if (p == 0) x.ask(quad / 4, 16);
        stay_awake();
      }
      __m512i v[4];
      for (int j = 0; j < 4; j++, row += stride) {
        const __mmask64 there = 4 * quad + j < n ? whole : 0;
        if constexpr (SHAPE == Pieces::BOTH) v[j] = Codes<KIND>::both(_mm256_maskz_loadu_epi8((__mmask32)there, row));
        else v[j] = _mm512_maskz_loadu_epi8(there, row);
      }
      __m512i tiles[4];
      interleave(v, tiles);
      for (int j = 0; j < 4; j++) {
        if constexpr (SHAPE == Pieces::SPLIT) {  // pairs of elements have stayed together until now
          _mm512_store_si512(values.quads[p][j][i], Codes<KIND>::low(tiles[j]));
          _mm512_store_si512(values.quads[each + p][j][i], Codes<KIND>::high(tiles[j]));
        } else {
          _mm512_store_si512(values.quads[p][j][i], tiles[j]);
        }
      }
    }
  }
}

template <int KIND>
void interleave_values(const Rows& x, int n, const Pieces& pieces, IntegerValues& values) {
  if constexpr (KIND == INT8) interleave_values_as<KIND, Pieces::PLAIN>(x, n, pieces, values);
  else if (pieces.shape == Pieces::BOTH) interleave_values_as<KIND, Pieces::BOTH>(x, n, pieces, values);
  else interleave_values_as<KIND, Pieces::SPLIT>(x, n, pieces, values);
}

// The bytes of 64 numbers, each byte to a row of its own, in the order of ``quad_of``.
inline void part(const __m512i* x, uint8_t* low, uint8_t* middle, uint8_t* high) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __m512i y[4];
  for (int i = 0; i < 4; i++) y[i] = _mm512_shuffle_epi8(x[i], order);
  const __m512i a = _mm512_unpacklo_epi32(y[0], y[1]), b = _mm512_unpacklo_epi32(y[2], y[3]);
  const __m512i c = _mm512_unpackhi_epi32(y[0], y[1]), d = _mm512_unpackhi_epi32(y[2], y[3]);
  _mm512_store_si512(low, _mm512_unpacklo_epi64(a, b));
  _mm512_store_si512(middle, _mm512_unpackhi_epi64(a, b));
  _mm512_store_si512(high, _mm512_unpacklo_epi64(c, d));
}
// Weights times scales in fixed point; weights of slots beyond the block's are 0.
template <int KIND>
static void weigh_values(const Rows& x, const Pieces& pieces, const float (*weights)[BLOCK], int rows, int turn,
                         IntegerValues& values) {
  const int share = share_of(rows);
  for (int g = 0; g < pieces.groups; g++) {
    stay_awake();
    __m512 scale[4], zero[4];
    for (int i = 0; i < 4; i++) {
      scale[i] = _mm512_loadu_ps(x.scales + g * BLOCK + 16 * i);
      if (KIND == INT4) zero[i] = _mm512_loadu_ps(x.zeros + g * BLOCK + 16 * i);
    }
    for (int r = 0; r < rows; r++) {
      __m512 moved = KIND == INT4 ? _mm512_load_ps(values.moved[r][g]) : _mm512_setzero_ps(), product[4];
      for (int i = 0; i < 4; i++) {
        const __m512 p = _mm512_loadu_ps(weights[r] + 16 * i);
        if (KIND == INT4) moved = _mm512_fmadd_ps(p, zero[i], moved);
        product[i] = _mm512_mul_ps(p, scale[i]);
      }
      // Each block and row has its own unit, by the largest product: a small weight of a long tail must not round to
      // nothing, nor must any because a slot without weight, an evicted one perhaps, has a large scale. The largest of
      // numbers may be none of them where one is NaN, as it is with values that were NaN; sums are not.
      const __m512 all = _mm512_add_ps(_mm512_add_ps(product[0], product[1]), _mm512_add_ps(product[2], product[3]));
      const __m512 most = _mm512_max_ps(_mm512_max_ps(product[0], product[1]), _mm512_max_ps(product[2], product[3]));
      const float largest = _mm512_cmp_ps_mask(all, all, _CMP_UNORD_Q) ? NAN : _mm512_reduce_max_ps(most);
      const float top = largest <= 1e-30f ? 1e-30f : largest;
      values.unit[turn][g][r] = top * (Codes<KIND>::UNIT / FULL_WEIGHT);
      const __m512 per = _mm512_set1_ps(FULL_WEIGHT / top);
      uint8_t(*to)[PIECE] = values.weights[g][r / share] + r % share;
      __m512i fixed[4];
      for (int i = 0; i < 4; i++) fixed[i] = _mm512_cvtps_epi32(_mm512_mul_ps(product[i], per));
      part(fixed, to[2 * share], to[share], to[0]);
      if (KIND == INT4) _mm512_store_ps(values.moved[r][g], moved);
    }
  }
}

void multiply_values(const Rows& x, const Pieces& pieces, int rows, IntegerValues& values) {
  for (int i = 0; i < shares_of(rows); i++) {
#if KVW_LEVEL >= 3
    int loaded = -1;
#else
    const int used = PLANES * share_of(rows);
#endif
    for (int p = 0; p < pieces.count; p++)
      for (int j = 0; j < 4; j++) {
        const int group = pieces.group[p][j];
        if (i == 0 && p == 0) x.ask(4 + j, 16);
        if (group < 0) continue;
#if KVW_LEVEL >= 3
        if (loaded != group) _tile_loadd(1, values.weights[group][i], PIECE);
        loaded = group;
        if (j % 2 == 0) {
          _tile_zero(6);
          _tile_loadd(2, values.quads[p][j], PIECE);
          _tile_dpbusd(6, 1, 2);
          _tile_stored(6, values.sums[p][j][i], 64);
        } else {
          _tile_zero(7);
          _tile_loadd(3, values.quads[p][j], PIECE);
          _tile_dpbusd(7, 1, 3);
          _tile_stored(7, values.sums[p][j][i], 64);
        }
#else
        for (int r = 0; r < used; r += PLANES) {
          __m512i acc[PLANES];
          for (int k = 0; k < PLANES; k++) acc[k] = _mm512_setzero_si512();
          for (int quad = 0; quad < 16; quad++) {
            const __m512i v = _mm512_load_si512(values.quads[p][j][quad]);
            for (int k = 0; k < PLANES; k++) {
              int32_t w;
              memcpy(&w, values.weights[group][i][r + k] + 4 * quad, 4);
              acc[k] = _mm512_dpbusd_epi32(acc[k], _mm512_set1_epi32(w), v);
            }
          }
          for (int k = 0; k < PLANES; k++) _mm512_store_si512(values.sums[p][j][i][r + k], acc[k]);
        }
#endif
      }
  }
}

void collect_values(const Rows& x, const Pieces& pieces, int rows, int turn, IntegerValues& values) {
  const int share = share_of(rows);
  for (int p = 0; p < pieces.count; p++)
    for (int j = 0; j < 4; j++) {
      const int group = pieces.group[p][j];
      if (p == 0) x.ask(4 + j, 8);
      if (j % 2 == 0) stay_awake();
      if (group < 0) continue;
      for (int r = 0; r < rows; r++) {
        const int32_t(*sums)[16] = values.sums[p][j][r / share] + r % share;
        const __m512i high = _mm512_load_si512(sums[0]), middle = _mm512_load_si512(sums[share]);
        const __m512 upper = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), middle));
        const __m512 lower = _mm512_cvtepi32_ps(_mm512_load_si512(sums[2 * share]));
        const __m512 whole = _mm512_fmadd_ps(upper, _mm512_set1_ps(256.0f), lower);
        float* to = values.mixed[r][p][j];
        _mm512_store_ps(to, _mm512_fmadd_ps(whole, _mm512_set1_ps(values.unit[turn][group][r]), _mm512_load_ps(to)));
      }
    }
}

}  // namespace
}  // namespace KVW_NS

#endif
