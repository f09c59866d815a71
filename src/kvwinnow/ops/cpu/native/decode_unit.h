// A unit of work of decode attention: a run of slots of one KV head, whose keys and values may be of different kinds.
#pragma once

#include <cmath>

#include "decode_bfloat16.h"
#include "decode_float.h"
#include "decode_fp4.h"
#include "decode_fp8.h"
#include "decode_integer.h"

namespace KVW_NS {
namespace {

using namespace kvw;

#if KVW_LEVEL < 2
inline void stay_awake() {}
#endif

constexpr float LOWEST = -1e30f;  // maximum where no slot is visible: exp(-inf - LOWEST) is 0, not NaN

// Scales (or zero points) of n slots from their stored form (n, groups) to float32 (groups, BLOCK).
template <int SIZE, F16 (*DECODE)(const uint8_t*)>
void decode_scales_as(const uint8_t* from, int n, int groups, float* to) {
  const int count = n * groups;
  int slot = 0, group = 0;
  for (int i = 0; i < count; i += LANES) {
    uint8_t few[2 * LANES] = {};
    const uint8_t* x = from + (int64_t)i * SIZE;
    __builtin_prefetch(x + (int64_t)BLOCK * groups * SIZE);
    if (count - i < LANES) {
      memcpy(few, x, (size_t)((count - i) * SIZE));
      x = few;
    }
    const F16 v = DECODE(x);
    if (groups == 1) {
      store(to + i, v);
      continue;
    }
#if KVW_LEVEL >= 2
    if (groups == 2) {  // slots i / 2 to i / 2 + 7
      const __m512i even = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
      const __m512 apart = _mm512_permutexvar_ps(even, (__m512)v);
      _mm256_storeu_ps(to + i / 2, _mm512_castps512_ps256(apart));
      _mm256_storeu_ps(to + BLOCK + i / 2, _mm512_extractf32x8_ps(apart, 1));
      continue;
    }
#endif
    float each[LANES];
    store(each, v);
    for (int j = 0; j < LANES && i + j < count; j++) {
      to[group * BLOCK + slot] = each[j];
      if (++group == groups) group = 0, slot++;
    }
  }
}

void decode_scales(int kind, const uint8_t* from, int n, int groups, float* to) {
  if (kind == FP4_NV) decode_scales_as<1, from_e4m3>(from, n, groups, to);
  else if (kind == FP4_MX) decode_scales_as<1, from_e8m0>(from, n, groups, to);
  else decode_scales_as<2, from_float16>(from, n, groups, to);
}

inline int element_bits(int kind) {
  return kind == FLOAT32 ? 32 : kind == BFLOAT16 || kind == FLOAT16 ? 16 : kind == INT8 || kind == FP8 ? 8 : 4;
}

// The slots of one KV head in one segment.
struct Place {
  const Storage& storage;
  const uint8_t *codes, *scales, *zeros;
  int64_t stride, scale_stride;
  int dim, group, groups;
  float factor;  // on all of them

  Place(const Storage& s, int64_t b, int64_t h, int64_t heads, int dimension)
      : storage(s),
        codes(s.codes + b * s.codes_batch + h * s.codes_head),
        scales(s.scales ? s.scales + b * s.scales_batch + h * s.scales_head : nullptr),
        zeros(s.zeros ? s.zeros + b * s.zeros_batch + h * s.zeros_head : nullptr),
        stride((int64_t)dimension * element_bits(s.kind) / 8),
        dim(dimension),
        group(s.group ? s.group : dimension),
        groups(s.group ? dimension / s.group : 0),
        factor(s.tensor_scale ? s.tensor_scale[b * heads + h] : 1.0f) {
    scale_stride = (int64_t)groups * (s.kind == FP4_NV || s.kind == FP4_MX ? 1 : 2);
  }
  // A block of them; where its scales will be, there is room for MAX_GROUPS x BLOCK numbers.
  Rows block(int64_t start, float* scale, float* zero) const {
    const uint8_t* at = codes + start * stride;
    return {storage.kind, at, stride, dim, group, groups, scale, zero, at + AHEAD * BLOCK * stride, (uint32_t)(BLOCK * stride)};
  }
  // Scales and zero points in the order (groups, BLOCK); those of slots beyond n are 0.
  void decode(int64_t start, int n, float* scale, float* zero) const {
    if (!groups) return;
    const size_t all = sizeof(float) * BLOCK * groups;
    if (n < BLOCK) memset(scale, 0, all), memset(zero, 0, all);
    decode_scales(storage.kind, scales + start * scale_stride, n, groups, scale);
    if (storage.kind == INT4) decode_scales(INT4, zeros + start * scale_stride, n, groups, zero);
  }
  // Scales as they lie.
  void decode_in_place(int64_t start, int n, float* scale) const {
    decode_scales(storage.kind, scales + start * scale_stride, n * groups, 1, scale);
  }
};

// What one thread computes with.
struct Workspace {
  alignas(64) float q[ROWS][MAX_DIM];
  alignas(64) float logits[BLOCKS][ROWS][BLOCK];  // and then the weights
  alignas(64) float mix[ROWS][MAX_DIM];
  alignas(64) float scales[2][BLOCK * MAX_GROUPS + LANES], zeros[2][BLOCK * MAX_GROUPS + LANES];  // even and odd blocks
  const Segment* prepared;           // whose keys, and which rows of queries, q and the keys' part are for
  int64_t prepared_row;
  bool keys_fit, values_fit;

  void start() {
    prepared = nullptr;
#if KVW_LEVEL >= 2
    key_pieces.forget(), value_pieces.forget(), shape = 0;
#endif
  }
#if KVW_LEVEL >= 2
  Pieces key_pieces, value_pieces;
  int shape;  // of tiles, 0: none
  IntegerKeys keys;
  IntegerValues values;
#endif
#if KVW_LEVEL >= 3
  WideKeys wide_keys;
  WideValues wide_values;
  Widened widened;
#endif
};

// Running maximum, sum and output of the rows in one unit of work.
struct Partial {
  float most[ROWS], total[ROWS][LANES];  // the sum in 16 parts
};

// How keys and values of a kind go through a block, see decode_integer.h. What has no steps between does it all in
// ``multiply``.
struct Steps {
  void (*decode)(const Place&, int64_t, int, float*, float*);
  bool (*prepare_keys)(const Place&, int, Workspace&);
  void (*expand_keys)(const Rows&, int, Workspace&);
  void (*multiply_keys)(const Rows&, int, int, int, Workspace&);
  void (*collect_keys)(const Rows&, int, int, int, Workspace&);
  bool (*lay_out_values)(const Place&, Workspace&);
  void (*clear_values)(const Place&, Workspace&);
  void (*weigh_values)(const Rows&, int, int, Workspace&);
  void (*interleave_values)(const Rows&, int, Workspace&);
  void (*multiply_values)(const Rows&, int, int, int, Workspace&);
  void (*collect_values)(const Rows&, int, int, Workspace&);
  void (*write_values)(const Place&, int, Workspace&);
};

static const Steps& in_floats() {
  static constexpr Steps steps = {
      [](const Place& x, int64_t start, int n, float* scale, float* zero) { x.decode(start, n, scale, zero); },
      [](const Place&, int, Workspace&) { return true; },
      [](const Rows&, int, Workspace&) {},
      [](const Rows& x, int n, int block, int rows, Workspace& w) {
        find_products(x.kind, rows)(x, n, w.q[0], MAX_DIM, w.logits[block]);
      },
      [](const Rows&, int, int, int, Workspace&) {},
      [](const Place&, Workspace&) { return true; },
      [](const Place& x, Workspace& w) {
        for (int r = 0; r < ROWS; r++) memset(w.mix[r], 0, sizeof(float) * x.dim);
      },
      [](const Rows&, int, int, Workspace&) {},
      [](const Rows&, int, Workspace&) {},
      [](const Rows& x, int n, int block, int rows, Workspace& w) {
        find_mixture(x.kind, rows)(x, n, w.logits[block], w.mix[0], MAX_DIM);
      },
      [](const Rows&, int, int, Workspace&) {},
      [](const Place&, int, Workspace&) {},
  };
  return steps;
}

#if KVW_LEVEL >= 2
template <int KIND>
static const Steps& in_integers() {
  static constexpr Steps steps = {
      [](const Place& x, int64_t start, int n, float* scale, float* zero) { x.decode(start, n, scale, zero); },
      [](const Place& x, int rows, Workspace& w) {
        if (!w.key_pieces.prepare(KIND, x.dim, x.group)) return false;
        w.keys.prepare(w.key_pieces, w.q[0], MAX_DIM, rows, x.dim);
        return true;
      },
      [](const Rows& x, int n, Workspace& w) { expand_keys<KIND>(x, n, w.key_pieces, w.keys); },
      [](const Rows& x, int n, int, int rows, Workspace& w) { multiply_keys<KIND>(x, n, w.key_pieces, rows, w.keys); },
      [](const Rows& x, int n, int block, int rows, Workspace& w) {
        collect_keys<KIND>(x, n, w.key_pieces, w.keys, rows, w.logits[block]);
      },
      [](const Place& x, Workspace& w) { return w.value_pieces.prepare(KIND, x.dim, x.group); },
      [](const Place&, Workspace& w) { w.values.clear(w.value_pieces); },
      [](const Rows& x, int block, int rows, Workspace& w) {
        weigh_values<KIND>(x, w.value_pieces, w.logits[block], rows, block % 2, w.values);
      },
      [](const Rows& x, int n, Workspace& w) { interleave_values<KIND>(x, n, w.value_pieces, w.values); },
      [](const Rows& x, int, int, int rows, Workspace& w) { multiply_values(x, w.value_pieces, rows, w.values); },
      [](const Rows& x, int block, int rows, Workspace& w) {
        collect_values(x, w.value_pieces, rows, block % 2, w.values);
      },
      [](const Place& x, int rows, Workspace& w) {
        w.values.write(w.mix[0], MAX_DIM, rows, x.group, w.value_pieces);
      },
  };
  return steps;
}
#endif

#if KVW_LEVEL >= 3
static constexpr Steps IN_BFLOAT16 = {
    [](const Place&, int64_t, int, float*, float*) {},
    [](const Place& x, int rows, Workspace& w) {
      if (x.dim % WIDE) return false;
      w.wide_keys.prepare(w.q[0], MAX_DIM, rows, x.dim);
      return true;
    },
    [](const Rows&, int, Workspace&) {},
    [](const Rows& x, int n, int, int, Workspace& w) { multiply_wide_keys(x, n, w.wide_keys); },
    [](const Rows& x, int n, int block, int rows, Workspace& w) {
      collect_wide_keys(x, n, w.wide_keys, rows, w.logits[block]);
    },
    [](const Place& x, Workspace&) { return x.dim % WIDE == 0; },
    [](const Place& x, Workspace& w) { w.wide_values.clear(x.dim); },
    [](const Rows&, int block, int rows, Workspace& w) { weigh_wide_values(w.logits[block], rows, w.wide_values); },
    [](const Rows& x, int n, Workspace& w) { interleave_wide_values(x, n, w.wide_values); },
    [](const Rows& x, int, int, int, Workspace& w) { multiply_wide_values(x, w.wide_values); },
    [](const Rows& x, int, int rows, Workspace& w) { collect_wide_values(x, rows, w.wide_values); },
    [](const Place& x, int rows, Workspace& w) { w.wide_values.write(w.mix[0], MAX_DIM, rows, x.dim); },
};
// That of bfloat16, of vectors that are widened to it first.
template <void (*WIDEN)(const Rows&, int, Widened&)>
static constexpr Steps in_widened() {
  Steps steps = IN_BFLOAT16;
  steps.expand_keys = [](const Rows& x, int n, Workspace& w) { WIDEN(x, n, w.widened); };
  steps.multiply_keys = [](const Rows& x, int n, int, int, Workspace& w) {
    multiply_wide_keys(as_wide(x, w.widened), n, w.wide_keys);
  };
  steps.interleave_values = [](const Rows& x, int n, Workspace& w) {
    WIDEN(x, n, w.widened);
    interleave_wide_values(as_wide(x, w.widened), n, w.wide_values);
  };
  return steps;
}

static constexpr Steps in_widened_fp4() {
  Steps steps = in_widened<widen>();
  steps.decode = [](const Place& x, int64_t start, int n, float* scale, float*) { x.decode_in_place(start, n, scale); };
  steps.prepare_keys = [](const Place& x, int rows, Workspace& w) {
    if (x.dim % WIDE) return false;
    alignas(64) float q[ROWS][MAX_DIM];
    for (int r = 0; r < rows; r++)
      for (int d = 0; d < x.dim; d++) q[r][d] = w.q[r][halves_at(d, x.dim)];
    w.wide_keys.prepare(q[0], MAX_DIM, rows, x.dim);
    return true;
  };
  steps.write_values = [](const Place& x, int rows, Workspace& w) {
    alignas(64) float mix[ROWS][MAX_DIM];
    w.wide_values.write(mix[0], MAX_DIM, rows, x.dim);
    for (int r = 0; r < rows; r++)
      for (int d = 0; d < x.dim; d++) w.mix[r][halves_at(d, x.dim)] = mix[r][d];
  };
  return steps;
}
static constexpr Steps IN_WIDENED_FP4 = in_widened_fp4();

static constexpr Steps in_widened_fp8() {
  Steps steps = in_widened<widen_e4m3>();
  steps.decode = [](const Place& x, int64_t start, int n, float* scale, float* zero) { x.decode(start, n, scale, zero); };
  steps.collect_keys = [](const Rows& x, int n, int block, int rows, Workspace& w) {
    collect_wide_keys(x, n, w.wide_keys, rows, w.logits[block]);
    for (int r = 0; r < rows; r++)
      for (int t = 0; t < n; t += LANES) {
        float* logits = w.logits[block][r] + t;
        store(logits, load<F16>(logits) * load<F16>(x.scales + t));
      }
  };
  steps.weigh_values = [](const Rows& x, int block, int rows, Workspace& w) {
    weigh_e4m3(x, rows, w.logits[block], w.wide_values);
  };
  return steps;
}
static constexpr Steps IN_WIDENED_FP8 = in_widened_fp8();
#endif

static const Steps& steps_for(const Place& x) {
  const int kind = x.storage.kind;
#if KVW_LEVEL >= 3
  if (kind == BFLOAT16) return IN_BFLOAT16;
  // Four groups in a piece of 64 elements would want four products.
  if ((kind == FP4_NV || kind == FP4_MX) && x.group == LANES) return IN_WIDENED_FP4;
  if (kind == FP8 && x.groups == 1) return IN_WIDENED_FP8;
#endif
#if KVW_LEVEL >= 2
  if (kind == INT8) return in_integers<INT8>();
  if (kind == INT4) return in_integers<INT4>();
  if (kind == FP4_NV || kind == FP4_MX) return in_integers<FP4_NV>();
#endif
  (void)kind;
  return in_floats();
}

inline F16 capped(F16 x, float cap) {
  // tanh(y) = 1 - 2 / (exp(2 y) + 1), from the side on which exp stays small.
  const F16 y = x * (1.0f / cap), size = select(y < F16{}, -y, y);
  const F16 e = exponential(size * -2.0f);
  const F16 t = (1.0f - e) / (1.0f + e);
  return select(y < F16{}, -t, t) * cap;
}

// From logits to weights, for ``count`` slots of the rows; ``kept`` gets the logits as the softmax sees them.
static void soften(const Decode& call, int64_t row, int rows, const int32_t* positions, int32_t lowest, int count,
                   const Rows& values, float factor, bool tiles, Workspace& w, Partial& partial, float* kept) {
  const F16 hidden = fill(-INFINITY);
  F16 most[ROWS];
  float shift[ROWS];
  for (int r = 0; r < rows; r++) most[r] = fill(LOWEST), shift[r] = call.shift ? call.shift[row + r] : 0.0f;
  const int64_t lines = AHEAD * values.stride;
  for (int at = 0; at < count; at += LANES) {
    const int left = count - at;
    if (at % BLOCK == 0) {
      for (int64_t i = lines * at / CHUNK; i < lines * (at + BLOCK) / CHUNK; i++) __builtin_prefetch(values.codes + i * 64, 0, 2);
      if (tiles) stay_awake();
    }
    const I16 where = left >= LANES ? load<I16>(positions + at) : load_some(positions + at, left, I16{} - 1);
    for (int r = 0; r < rows; r++) {
      float* logits = w.logits[at / BLOCK][r] + at % BLOCK;
      F16 x = (load<F16>(logits) * factor + shift[r]) * call.scale;
      if (call.softcap > 0) x = capped(x, call.softcap);
      x = select(where > lowest, x, hidden);
      most[r] = larger(most[r], x);
      store(logits, x);
      if (kept && left >= LANES) store(kept + r * call.slots + at, x);
      else if (kept) store_some(kept + r * call.slots + at, x, left);
    }
  }
  const int blocks = (count + BLOCK - 1) / BLOCK;
  for (int r = 0; r < ROWS; r++) {
    const float top = partial.most[r] = r < rows ? largest(most[r]) : LOWEST;
    F16 total = {};
    for (int i = 0; i < blocks; i++) {
      float* x = w.logits[i][r];
      if (r >= rows) {
        if (r < padded(rows)) memset(x, 0, sizeof w.logits[i][r]);
        continue;
      }
      const int n = count - i * BLOCK < BLOCK ? count - i * BLOCK : BLOCK;
      if (tiles) stay_awake();
      for (int t = 0; t < BLOCK; t += LANES) {
        const F16 weight = t < n ? exponential(load<F16>(x + t) - top) : F16{};
        total += weight;
        store(x + t, weight);
      }
    }
    store(partial.total[r], total);
  }
}

// Slots [start, stop) of a segment, CHUNK at most, for the rows [row0, row0 + rows) of one KV head: all keys, then the
// softmax, then all values. The steps of neighbouring blocks alternate, so that what one has stored is there before it
// is loaded as a tile.
static void unit(const Decode& call, const Segment& segment, int64_t b, int64_t h, int row0, int rows, int64_t start,
                 int64_t stop, Workspace& w, Partial& partial, float* out, float* kept) {
  const int64_t head = b * call.kv_heads + h;
  const Place keys(segment.keys, b, h, call.kv_heads, (int)call.dim);
  const Place values(segment.values, b, h, call.kv_heads, (int)call.value_dim);
  const int64_t row = head * call.rows + row0;
  const Steps *of_keys = &steps_for(keys), *of_values = &steps_for(values);
  const bool tiles = of_keys != &in_floats() || of_values != &in_floats();
#if KVW_LEVEL >= 2
  // One for both, since what shaping costs is the waking of the unit that multiplies tiles.
  const int shape = 2 * rows > PLANES * share_of(rows) ? 2 * rows : PLANES * share_of(rows);
  if (tiles && w.shape != shape) shape_tiles(w.shape = shape);
  if (tiles) stay_awake();
#endif
  if (w.prepared != &segment || w.prepared_row != row) {
    w.prepared = &segment, w.prepared_row = row;
    for (int r = 0; r < ROWS; r++) {
      if (r < rows) memcpy(w.q[r], call.queries + (row + r) * call.dim, sizeof(float) * call.dim);
      else memset(w.q[r], 0, sizeof(float) * call.dim);
    }
    w.keys_fit = of_keys->prepare_keys(keys, rows, w);
    w.values_fit = of_values->lay_out_values(values, w);
  }
  if (!w.keys_fit) of_keys = &in_floats();
  if (!w.values_fit) of_values = &in_floats();
  const int count = (int)(stop - start), blocks = (count + BLOCK - 1) / BLOCK;
  const auto filled = [&](int i) { return count - i * BLOCK < BLOCK ? count - i * BLOCK : BLOCK; };

  for (int i = 0; i <= blocks; i++) {
    const int64_t at = start + i * BLOCK;
    const Rows k = keys.block(at, w.scales[i % 2], w.zeros[i % 2]);
    if (i < blocks) {
      of_keys->decode(keys, at, filled(i), w.scales[i % 2], w.zeros[i % 2]);
      of_keys->expand_keys(k, filled(i), w);
    }
    if (i > 0) {
      const Rows before = keys.block(at - BLOCK, w.scales[1 - i % 2], w.zeros[1 - i % 2]);
      of_keys->collect_keys(before, filled(i - 1), i - 1, rows, w);
    }
    if (i < blocks) of_keys->multiply_keys(k, filled(i), i, rows, w);
  }

  const int32_t* positions = call.positions + b * call.positions_batch + h * call.positions_head + segment.first + start;
  soften(call, row, rows, positions, call.lowest ? call.lowest[head] : -1, count, values.block(start, nullptr, nullptr), keys.factor, tiles, w,
         partial, kept);

  of_values->clear_values(values, w);
  for (int i = 0; i <= blocks; i++) {
    const int64_t at = start + i * BLOCK;
    const Rows v = values.block(at, w.scales[0], w.zeros[0]);
    if (i < blocks) {
      of_values->decode(values, at, filled(i), w.scales[0], w.zeros[0]);
      of_values->weigh_values(v, i, rows, w);
      of_values->interleave_values(v, filled(i), w);
    }
    if (i > 0) of_values->collect_values(v, i - 1, rows, w);
    if (i < blocks) of_values->multiply_values(v, filled(i), i, rows, w);
  }
  of_values->write_values(values, rows, w);
  for (int r = 0; r < rows; r++)
    for (int d = 0; d < values.dim; d += LANES) store(out + r * call.value_dim + d, load<F16>(w.mix[r] + d) * values.factor);
}

}  // namespace
}  // namespace KVW_NS
