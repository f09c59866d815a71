// How a stored vector is cut into rows of 64 bytes, which is what tiles and VNNI take.
#pragma once

#include "decode_float.h"

#if KVW_LEVEL >= 2

namespace KVW_NS {
namespace {

using namespace kvw;

constexpr int PIECE = 64;
constexpr int MAX_PIECES = MAX_DIM / (PIECE / 2);  // bfloat16 has 32 elements in a piece
constexpr int MAX_TERMS = MAX_GROUPS + MAX_PIECES;
constexpr int COLUMNS = 2 * ROWS;  // of bfloat16 queries: high and low

// Which elements a vector's pieces hold, and which products they need.
struct Pieces {
  enum Shape { PLAIN, SPLIT, BOTH } shape;  // one element a byte; low halves, then high ones; both in one piece
  int count, each;                          // pieces; SPLIT: pieces of low halves
  int16_t element[MAX_PIECES][PIECE];       // -1: nothing
  __mmask64 whole[MAX_PIECES];              // bytes of a piece that lie in the vector
  int groups;
  int16_t group[MAX_PIECES][4];             // that of the elements in each 16 bytes; -1: nothing
  int terms;                                // pairs of a piece and a group that has elements in it
  struct Term {
    int16_t piece, group;
    bool fresh;       // no earlier term is of this group
    __mmask64 where;  // its bytes in the piece
  } term[MAX_TERMS];

  int of[3];  // what they are laid out for
  bool fit;

  void forget() { of[0] = -1; }
  // False if 16 bytes of a piece would hold elements of two groups.
  bool prepare(int kind, int dim, int size) {
    if (of[0] == kind && of[1] == dim && of[2] == size) return fit;
    of[0] = kind, of[1] = dim, of[2] = size;
    return fit = lay_out(kind, dim, size);
  }

 private:
  bool lay_out(int kind, int dim, int size) {
    const int half = dim / 2;
    memset(element, -1, sizeof element);
    groups = dim / size;
    if (kind == INT8) {
      shape = PLAIN;
      count = each = (dim + PIECE - 1) / PIECE;
      for (int i = 0; i < dim; i++) element[i / PIECE][i % PIECE] = (int16_t)i;
    } else if (half <= PIECE / 2) {
      shape = BOTH;
      count = each = 1;
      for (int i = 0; i < half; i++) element[0][i] = (int16_t)i, element[0][PIECE / 2 + i] = (int16_t)(half + i);
    } else {
      shape = SPLIT;
      each = (half + PIECE - 1) / PIECE;
      count = 2 * each;
      for (int i = 0; i < half; i++) {
        element[i / PIECE][i % PIECE] = (int16_t)i;
        element[each + i / PIECE][i % PIECE] = (int16_t)(half + i);
      }
    }
    terms = 0;
    for (int p = 0; p < count; p++) {
      whole[p] = 0;
      for (int i = 0; i < PIECE; i++) {
        if (element[p][i] < 0) continue;
        whole[p] |= (__mmask64)1 << i;
        const int16_t g = (int16_t)(element[p][i] / size);
        int k = 0;
        while (k < terms && (term[k].piece != p || term[k].group != g)) k++;
        if (k == terms) {
          bool fresh = true;
          for (int j = 0; j < terms; j++) fresh = fresh && term[j].group != g;
          term[terms++] = {(int16_t)p, g, fresh, 0};
        }
        term[k].where |= (__mmask64)1 << i;
      }
      for (int j = 0; j < 4; j++) {
        group[p][j] = -1;
        for (int i = 16 * j; i < 16 * j + 16; i++) {
          if (element[p][i] < 0) continue;
          const int16_t g = (int16_t)(element[p][i] / size);
          if (group[p][j] >= 0 && group[p][j] != g) return false;
          group[p][j] = g;
        }
      }
    }
    return true;
  }
};

static const int8_t TWICE_E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Codes as small integers. FP4 codes are twice the numbers; keys are lifted by 128 where VNNI wants them unsigned.
template <int KIND>
struct Codes {
  static constexpr bool SIGNED = KIND != INT4;
  static constexpr float UNIT = KIND == FP4_NV ? 0.5f : 1.0f;  // stands for FP4_MX too

  static inline __m512i low(__m512i packed) { return number(_mm512_and_si512(packed, _mm512_set1_epi8(15))); }
  static inline __m512i high(__m512i packed) { return low(_mm512_srli_epi16(packed, 4)); }
  // 32 bytes of pairs: low halves, then high halves.
  static inline __m512i both(__m256i packed) {
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    return low(_mm512_srlv_epi16(_mm512_broadcast_i64x4(packed), shifts));
  }

 private:
  static inline __m512i number(__m512i codes) {
    if (KIND != FP4_NV) return codes;
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)TWICE_E2M1));
    return _mm512_shuffle_epi8(table, codes);
  }
};

typedef int32_t Tile[16][16];

#if KVW_LEVEL >= 3
struct TileShapes {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};
// Tile 0: queries; 1: weights; 2 and 3: what is read; 4 and 5: sums of keys; 6 and 7: sums of values. ``rows`` are those
// of weights and of sums of values.
inline void shape_tiles(int rows) {
  TileShapes shapes = {};
  shapes.palette = 1;
  for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = (uint8_t)(i == 1 || i >= 6 ? rows : 16);
  _tile_loadconfig(&shapes);
}
inline void release_tiles() { _tile_release(); }
// Without products for some 300 ns, the unit that makes them falls asleep, and waking it takes as long again. So longer
// steps without tiles have a product now and then whose result nobody reads.
inline void stay_awake() { _tile_dpbssd(4, 2, 3); }
constexpr bool LIFTED = false;
#else
inline void shape_tiles(int) {}
inline void release_tiles() {}
inline void stay_awake() {}
constexpr bool LIFTED = true;
#endif

}  // namespace
}  // namespace KVW_NS

#endif
