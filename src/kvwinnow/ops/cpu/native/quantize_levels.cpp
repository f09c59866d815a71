// Codecs, bit for bit those of codecs/*.py: the same operations of IEEE arithmetic in the same order, NaN and signs of
// zero included. Nothing here is a sum of products that could be fused otherwise, but where products are exact.

#include <cmath>

#include "floats.h"
#include "quantize.h"

namespace KVW_NS {
namespace {

using namespace kvw;

constexpr float LARGEST_FP16 = 65504.0f, SMALLEST_FP16 = 0x1p-24f, LARGEST_E4M3 = 448.0f;
constexpr float WHOLE = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even ones
constexpr int64_t PIECE = 64;         // vectors of one unit of work
constexpr int64_t AHEAD = 8;           // vectors on their way from memory
constexpr int64_t ALONE = 1 << 14;    // elements that are not worth a second thread

// What one vector needs on its way; whole lanes beyond the last element may be written.
struct alignas(64) Room {
  float x[MAX_DIM + LANES];
  double wide[MAX_DIM];
  uint8_t codes[MAX_DIM + LANES];
};

// In these comparisons NaN stays NaN.
inline float at_least(float x, float low) { return x < low ? low : x; }
inline float at_most(float x, float high) { return x > high ? high : x; }

// -- the rotation ----------------------------------------------------------------------------------

#if KVW_LEVEL >= 2
typedef double D8 __attribute__((vector_size(64)));
typedef int64_t L8 __attribute__((vector_size(64)));

template <int STEP>
inline D8 crossed(D8 v) {
  typedef L8 I;
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7};
#if defined(__clang__)
  const D8 other = __builtin_shufflevector(v, v, 0 ^ STEP, 1 ^ STEP, 2 ^ STEP, 3 ^ STEP, 4 ^ STEP, 5 ^ STEP, 6 ^ STEP,
                                           7 ^ STEP);
#else
  const D8 other = __builtin_shuffle(v, lane ^ STEP);
#endif
  // The lane below: v + other; the one above: other - v.
  return (lane & STEP) == 0 ? v + other : other - v;
}
#endif

// By the Hadamard matrix of a power of two, block by block, in float64: unless elements are some 2^20 apart the sums are
// exact there, so that neither their order nor the library that takes them is seen (codecs/rotation.py does the same).
void rotate_vector(float* x, double* wide, int64_t dim, int64_t size) {
  for (int64_t i = 0; i < dim; i++) wide[i] = x[i] + 0.0;  // of -0 makes 0
  for (int64_t block = 0; block < dim; block += size) {
    double* d = wide + block;
    int64_t step = 1;
#if KVW_LEVEL >= 2
    if (size >= 8) {
      for (int64_t i = 0; i < size; i += 8) store(d + i, crossed<4>(crossed<2>(crossed<1>(load<D8>(d + i)))));
      step = 8;
    }
#endif
    for (; step < size; step *= 2)
      for (int64_t i = 0; i < size; i += 2 * step)
        for (int64_t j = i; j < i + step; j++) {
          const double a = d[j], b = d[j + step];
          d[j] = a + b;
          d[j + step] = a - b;
        }
  }
  const double unit = 1.0 / std::sqrt((double)size);
  for (int64_t i = 0; i < dim; i++) x[i] = (float)(wide[i] * unit);
}

// -- scales ----------------------------------------------------------------------------------------

struct Ends {
  float low, high;
};

// As torch.aminmax: NaN if there is one, and of zeros the first.
Ends ends(const float* x, int64_t n) {
  float low = x[0], high = x[0];
  bool none = x[0] != x[0];
  int64_t i = 0;
  if (n >= LANES) {
    F16 a = load<F16>(x), b = a;
    I16 nan = a != a;
    for (i = LANES; i + LANES <= n; i += LANES) {
      const F16 v = load<F16>(x + i);
      nan |= v != v;
      a = select(v < a, v, a);
      b = select(v > b, v, b);
    }
    for (int j = 0; j < LANES; j++) {
      low = a[j] < low ? a[j] : low;
      high = b[j] > high ? b[j] : high;
      none |= nan[j] != 0;
    }
  }
  for (; i < n; i++) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    none |= x[i] != x[i];
  }
  if (none) {
    for (i = 0; x[i] == x[i];) i++;
    return {x[i], x[i]};
  }
  if (low == 0.0f) {
    for (i = 0; x[i] != 0.0f;) i++;
    low = x[i];
  }
  return {low, high};
}

// The largest size, NaN if there is one.
float largest_size(const float* x, int64_t n) {
  uint32_t most = 0;  // sizes are in the order of their bits, NaN above infinity
  int64_t i = 0;
  if (n >= LANES) {
    U16 m = load<U16>(x) & 0x7fffffff;
    for (i = LANES; i + LANES <= n; i += LANES) {
      const U16 v = load<U16>(x + i) & 0x7fffffff;
      m = select(v > m, v, m);
    }
    for (int j = 0; j < LANES; j++) most = m[j] > most ? m[j] : most;
  }
  for (; i < n; i++) {
    const uint32_t v = bits_of(x[i]) & 0x7fffffff;
    most = v > most ? v : most;
  }
  return of_bits(most);
}

inline uint8_t to_e4m3(float x) {
  const uint32_t b = bits_of(x), sign = b >> 24 & 0x80;
  float m = of_bits(b & 0x7fffffff);
  if (m != m) return (uint8_t)(0x7f | sign);
  m = at_most(m, LARGEST_E4M3);
  if (m < 0x1p-6f) return (uint8_t)((bits_of(m + 16384.0f) - bits_of(16384.0f)) | sign);  // in units of 2^-9
  const uint32_t n = bits_of(m);
  return (uint8_t)((((n + 0x7ffff + (n >> 20 & 1)) >> 20) - (120u << 3)) | sign);
}
inline float from_e4m3_byte(uint8_t code) {
  const uint32_t m = (uint32_t)(code & 0x7f) << 20;
  return m < 8u << 20 ? of_bits(m + (121u << 23)) - 0x1p-6f : of_bits(m + (120u << 23));
}

// -- codes, sixteen at once: whole lanes beyond n may be written ------------------------------------

// In [low, high], NaN as 0, to the nearest whole number.
inline U16 whole(F16 v, float low, float high) {
  v = select(v == v, v, F16{});
  v = select(v < fill(low), fill(low), v);
  v = select(v > fill(high), fill(high), v);
  return (U16)(v + fill(WHOLE));
}

void int8_codes(const float* x, int64_t n, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < n; i += LANES) store_bytes(codes + i, whole(load<F16>(x + i) / scale, -127, 127) & 0xff);
}

void int4_codes(const float* x, int64_t n, float zero, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < n; i += LANES)
    store_bytes(codes + i, whole((load<F16>(x + i) - zero) / scale, 0, 15) & 15);
}

// Codes 0 to 4 stand for 0 to 2 in steps of a half, codes 4 to 6 for 2 to 4 in steps of 1, and code 7 for 6.
void e2m1_codes(const float* x, int64_t n, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < n; i += LANES) {
    const F16 v = load<F16>(x + i) / scale;
    F16 m = bits((U16)v & 0x7fffffff);
    m = select(m == m, m, F16{});
    m = select(m > fill(16.0f), fill(16.0f), m);
    const F16 by = fill(WHOLE);
    const F16 low = (m * 2 + by) - by, middle = ((m + by) - by) + 2, high = ((m * 0.5f + by) - by) + 4;
    F16 least = select(low < middle, low, middle);
    least = select(least < high, least, high);
    const U16 code = whole(least, 0, 7) & 7;
    store_bytes(codes + i, code | ((U16)(v < F16{}) & 8));
  }
}

void e4m3_codes(const float* x, int64_t n, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < n; i += LANES) {
    const U16 b = (U16)(load<F16>(x + i) / scale), sign = b >> 24 & 0x80;
    F16 m = bits(b & 0x7fffffff);
    const I16 nan = m != m;
    m = select(m > fill(LARGEST_E4M3), fill(LARGEST_E4M3), m);
    const U16 k = (U16)m;
    const U16 tiny = (U16)(m + 16384.0f) - bits_of(16384.0f);
    const U16 normal = ((k + 0x7ffff + (k >> 20 & 1)) >> 20) - (120u << 3);
    U16 code = select(m < fill(0x1p-6f), tiny, normal);
    code = select(nan, U16{} + 0x7f, code);
    store_bytes(codes + i, code | sign);
  }
}

// -- one vector ------------------------------------------------------------------------------------

// Codes of Room::x to Room::codes, one a byte; scales and zero points to where they lie.
void encode(Room& room, int32_t kind, int64_t dim, int64_t group, uint8_t* scales, uint8_t* zeros) {
  for (int64_t g = 0, at = 0; at < dim; g++, at += group) {
    const float* x = room.x + at;
    uint8_t* codes = room.codes + at;
    if (kind == INT4) {
      Ends e = ends(x, group);
      const uint16_t low = to_half(at_most(at_least(e.low, -LARGEST_FP16), LARGEST_FP16));
      const float zero = from_half(low);
      const uint16_t scale = to_half(at_most(at_least((e.high - zero) / 15, 0), LARGEST_FP16));
      memcpy(scales + 2 * g, &scale, 2);
      memcpy(zeros + 2 * g, &low, 2);
      int4_codes(x, group, zero, at_least(from_half(scale), SMALLEST_FP16), codes);
      continue;
    }
    const float most = largest_size(x, group);
    if (kind == INT8) {
      const uint16_t scale = to_half(at_most(most / 127, LARGEST_FP16));
      memcpy(scales + 2 * g, &scale, 2);
      int8_codes(x, group, at_least(from_half(scale), SMALLEST_FP16), codes);
    } else if (kind == FP8) {
      const uint16_t scale = to_half(at_most(at_least(most / LARGEST_E4M3, SMALLEST_FP16), LARGEST_FP16));
      memcpy(scales + 2 * g, &scale, 2);
      e4m3_codes(x, group, from_half(scale), codes);
    } else if (kind == FP4_NV) {
      scales[g] = to_e4m3(at_least(most / 6, 0x1p-9f));
      e2m1_codes(x, group, from_e4m3_byte(scales[g]), codes);
    } else {  // the exponent that brings the largest into [4, 8); that of NaN is 0 (of frexp)
      const uint32_t exponent = bits_of(at_most(most, 0x1.fffffep127f)) >> 23;
      scales[g] = most != most ? 124 : exponent > 3 ? (uint8_t)(exponent - 2) : 1;
      e2m1_codes(x, group, of_bits((uint32_t)scales[g] << 23), codes);
    }
  }
}

void pack(const uint8_t* codes, int64_t half, uint8_t* to) {
  for (int64_t j = 0; j < half; j++) to[j] = (uint8_t)(codes[j] | codes[j + half] << 4);
}

// Vector ``token`` of (b, h) to a slot.
void write(const Target& t, Room& room, int64_t b, int64_t h, int64_t heads, int64_t token, int64_t slot, int64_t edge,
           int64_t tail) {
  const uint8_t* source = t.source + b * t.source_batch + h * t.source_head + token * t.source_token;
  const int64_t dim = t.dim;
  const bool exact = slot < edge;
  const int32_t kind = exact ? t.exact_kind : t.kind;
  uint8_t* to = exact ? t.exact + b * t.exact_batch + h * t.exact_head + slot * dim * size_of(kind) : nullptr;
  if (!exact && is_float(kind)) to = t.codes + b * t.codes_batch + h * t.codes_head + (slot - tail) * dim * size_of(kind);
  if (to && kind == t.source_kind && !t.mean && !t.rotation && !t.cut) {
    memcpy(to, source, (size_t)(dim * size_of(kind)));
    return;
  }
  float* x = room.x;
  take(source, t.source_kind, dim, x);
  if (t.mean) {
    const float* mean = t.mean + (b * heads + h) * dim;
    for (int64_t i = 0; i < dim; i++) x[i] -= mean[i];
  }
  if (t.rotation) rotate_vector(x, room.wide, dim, t.rotation);
  if (to) {
    if (t.cut)
      for (int64_t i = 0; i < dim; i++) x[i] = at_most(at_least(x[i], -LARGEST_FP16), LARGEST_FP16);
    give(x, dim, to, kind);
    return;
  }
  if (t.tensor_scale) {
    const float scale = t.tensor_scale[b * heads + h];
    for (int64_t i = 0; i < dim; i++) x[i] /= scale;
  }
  const bool two = kind == INT4 || kind == FP4_NV || kind == FP4_MX;
  const int64_t groups = dim / t.group, row = slot - tail, width = kind == FP4_NV || kind == FP4_MX ? 1 : 2;
  uint8_t* scales = t.scales + b * t.scales_batch + h * t.scales_head + row * groups * width;
  uint8_t* zeros = t.zeros ? t.zeros + b * t.zeros_batch + h * t.zeros_head + row * groups * width : nullptr;
  uint8_t* codes = t.codes + b * t.codes_batch + h * t.codes_head + row * (two ? dim / 2 : dim);
  encode(room, kind, dim, t.group, scales, zeros);
  if (two)
    pack(room.codes, dim / 2, codes);
  else
    memcpy(codes, room.codes, (size_t)dim);
}

bool serves(const Target& t) {
  if (!is_float(t.source_kind) || t.dim <= 0 || t.dim > MAX_DIM) return false;
  if (t.rotation && (t.rotation < 0 || (t.rotation & (t.rotation - 1)) || t.dim % t.rotation)) return false;
  if (t.exact && !is_float(t.exact_kind)) return false;
  if (is_float(t.kind)) return true;
  if (t.kind < INT8 || t.kind > FP4_MX || t.group <= 0 || t.dim % t.group) return false;
  return t.kind == INT8 || t.kind == FP8 || t.dim % 2 == 0;
}

// Of a model's keys the next token's lies behind those of all other heads, where no processor looks for it by itself.
inline void fetch(const Target& t, int64_t b, int64_t h, int64_t token) {
  const uint8_t* vector = t.source + b * t.source_batch + h * t.source_head + token * t.source_token;
  for (int64_t i = 0; i < t.dim * size_of(t.source_kind); i += 64) __builtin_prefetch(vector + i);
}

// Whether all places are there, and none is another's.
bool fits(const Places& p) {
  const int64_t pairs = p.batch * p.heads;
  const bool shares = p.edge < p.tail;
  if (!p.rows && p.count > pairs * p.each) return false;
  if (!p.columns && p.each > p.tokens) return false;
  if (!p.places && p.each > (shares ? p.edge : p.slots)) return false;
  bool wrong = false;
  for (int64_t i = 0; p.rows && i < p.count; i++) wrong |= (uint64_t)p.rows[i] >= (uint64_t)pairs;
  for (int64_t i = 0; p.columns && i < p.count; i++) wrong |= (uint64_t)p.columns[i] >= (uint64_t)p.tokens;
  for (int64_t i = 0; p.places && i < p.count; i++) {
    const int64_t slot = p.places[i];
    wrong |= (uint64_t)slot >= (uint64_t)p.slots || (shares && slot >= p.edge && slot < p.tail);
  }
  return !wrong;
}

}  // namespace

int32_t write_vectors(const Target* sides, int32_t count, const Places& p, int32_t threads) {
  for (int32_t side = 0; side < count; side++)
    if (!serves(sides[side])) return KVW_NOT_SERVED;
  if (threads <= 0 || p.each <= 0) return KVW_NOT_SERVED;
  if (!fits(p)) return KVW_NOT_SERVED;
  int64_t elements = 0;
  for (int32_t side = 0; side < count; side++) elements += p.count * sides[side].dim;
  if (elements < ALONE) threads = 1;
  const int64_t pieces = (p.count + PIECE - 1) / PIECE;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t work = 0; work < pieces * count; work++) {
    Room room;
    const Target& t = sides[work / pieces];
    const int64_t first = work % pieces * PIECE, last = first + PIECE < p.count ? first + PIECE : p.count;
    int64_t row = first / p.each, within = first % p.each;
    for (int64_t i = first; i < last; i++) {
      const int64_t pair = p.rows ? p.rows[i] : row, column = p.columns ? p.columns[i] : within;
      const int64_t next = p.columns ? p.columns[i + AHEAD < last ? i + AHEAD : i] : column + AHEAD;
      fetch(t, pair / p.heads, pair % p.heads, next < p.tokens ? next : column);
      write(t, room, pair / p.heads, pair % p.heads, p.heads, column, p.places ? p.places[i] : within, p.edge, p.tail);
      if (++within == p.each) within = 0, row++;
    }
  }
  (void)threads;
  return KVW_SERVED;
}

int32_t write_token(const Target* sides, int32_t count, const Places& p, const Token& token, int32_t threads) {
  for (int32_t side = 0; side < count; side++)
    if (!serves(sides[side])) return KVW_NOT_SERVED;
  for (int64_t row = 0; row < p.batch * p.heads; row++) {
    const int32_t* positions =
        token.positions + row / p.heads * token.positions_batch + row % p.heads * token.positions_head;
    int64_t slot = 0;
    while (slot < p.slots && (positions[slot] >= 0 || (slot >= p.edge && slot < p.tail))) slot++;
    if (slot == p.slots) return KVW_NOT_SERVED;
    token.slots[row] = slot;
  }
  Places places = p;
  places.count = p.batch * p.heads;
  places.each = 1;
  places.rows = places.columns = nullptr;
  places.places = token.slots;
  const int32_t result = write_vectors(sides, count, places, threads);
  if (result != KVW_SERVED) return result;
  for (int64_t row = 0; row < p.batch * p.heads; row++) {
    const int64_t b = row / p.heads, h = row % p.heads;
    token.positions[b * token.positions_batch + h * token.positions_head + token.slots[row]] =
        token.position[b * token.position_batch];
  }
  return KVW_SERVED;
}

int32_t rotate(const Turn& t) {
  if (!is_float(t.source_kind) || !is_float(t.out_kind) || t.dim <= 0 || t.dim > MAX_DIM) return KVW_NOT_SERVED;
  if (t.rotation < 0 || (t.rotation & (t.rotation - 1)) || (t.rotation && t.dim % t.rotation)) return KVW_NOT_SERVED;
  const int64_t all = t.batch * t.heads * t.rows;
  const int32_t threads = all * t.dim < ALONE ? 1 : t.threads;
  if (threads <= 0) return KVW_NOT_SERVED;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < all; i++) {
    Room room;
    const int64_t row = i % t.rows, head = i / t.rows, b = head / t.heads, h = head % t.heads;
    take(t.source + b * t.source_batch + h * t.source_head + row * t.source_row, t.source_kind, t.dim, room.x);
    if (t.mean) {
      const float* mean = t.mean + head * t.dim;
      float product = 0;
      for (int64_t j = 0; j < t.dim; j++) product += room.x[j] * mean[j];
      t.products[i] = product;
    }
    if (t.rotation) rotate_vector(room.x, room.wide, t.dim, t.rotation);
    give(room.x, t.dim, t.out + i * t.dim * size_of(t.out_kind), t.out_kind);
  }
  (void)threads;
  return KVW_SERVED;
}

}  // namespace KVW_NS
