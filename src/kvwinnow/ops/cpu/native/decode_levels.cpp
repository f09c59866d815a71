// Attention of a few queries over slots, in one pass over memory ("flash decoding"): each unit of work is a run of slots
// of one KV head; it keeps a running maximum, sum and output, and units are merged by their log-sum-exp.
// Compiled once for each level, see levels.h.

#ifdef _OPENMP
#include <omp.h>
#endif

#include <cmath>
#include <cstdlib>

#include "decode_bfloat16.h"
#include "decode_float.h"
#include "decode_integer.h"

namespace KVW_NS {
namespace {

using namespace kvw;

constexpr int64_t ALONE = 1 << 19;  // bytes that are not worth a second thread
constexpr float LOWEST = -1e30f;  // running maximum before the first visible slot: exp(-inf - LOWEST) is 0, not NaN

// Scales (or zero points) of n slots from their stored form (n, groups) to float32 (groups, BLOCK).
template <int SIZE, F16 (*DECODE)(const uint8_t*)>
void decode_scales_as(const uint8_t* from, int n, int groups, float factor, float* to) {
  const int count = n * groups;
  int slot = 0, group = 0;
  for (int i = 0; i < count; i += LANES) {
    uint8_t few[2 * LANES] = {};
    const uint8_t* x = from + (int64_t)i * SIZE;
    if (count - i < LANES) {
      memcpy(few, x, (size_t)((count - i) * SIZE));
      x = few;
    }
    const F16 v = DECODE(x) * factor;
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

void decode_scales(int kind, const uint8_t* from, int n, int groups, float factor, float* to) {
  if (kind == FP4_NV) decode_scales_as<1, from_e4m3>(from, n, groups, factor, to);
  else if (kind == FP4_MX) decode_scales_as<1, from_e8m0>(from, n, groups, factor, to);
  else decode_scales_as<2, from_float16>(from, n, groups, factor, to);
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
  float factor;  // on the scales

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
  // A block of them; ``scale`` and ``zero`` have room for MAX_GROUPS x BLOCK numbers.
  Rows block(int64_t start, int n, float* scale, float* zero) const {
    if (groups) {
      const size_t all = sizeof(float) * BLOCK * groups;
      if (n < BLOCK) memset(scale, 0, all), memset(zero, 0, all);
      decode_scales(storage.kind, scales + start * scale_stride, n, groups, factor, scale);
      if (storage.kind == INT4) decode_scales(INT4, zeros + start * scale_stride, n, groups, factor, zero);
    }
    return {storage.kind, codes + start * stride, stride, dim, group, groups, scale, zero};
  }
};

// What one thread computes with.
struct Workspace {
  alignas(64) float q[ROWS][MAX_DIM];
  alignas(64) float logits[ROWS][BLOCK];
  alignas(64) float mix[ROWS][MAX_DIM];
  alignas(64) float key_scales[BLOCK * MAX_GROUPS + LANES], key_zeros[BLOCK * MAX_GROUPS + LANES];
  alignas(64) float value_scales[BLOCK * MAX_GROUPS + LANES], value_zeros[BLOCK * MAX_GROUPS + LANES];
  float most[ROWS];                  // largest weight of the block at hand
  const Segment* prepared;           // whose keys, and which rows of queries, q and the keys' part are for
  int64_t prepared_row;
  bool keys_fit, values_fit;
#if KVW_LEVEL >= 2
  Pieces key_pieces, value_pieces;
  IntegerKeys keys;
  IntegerValues values;
#endif
#if KVW_LEVEL >= 3
  WideKeys wide_keys;
  WideValues wide_values;
#endif
};

// Running maximum, sum and output of the rows in one unit of work.
struct Partial {
  float most[ROWS], total[ROWS][LANES];  // the sum in 16 parts
};

// How keys and values of a kind go through a block, see decode_integer.h. Without tiles ``multiply`` alone does it all.
struct Steps {
  bool (*prepare_keys)(const Place&, int, Workspace&);
  void (*expand_keys)(const Rows&, int, Workspace&);
  void (*multiply_keys)(const Rows&, int, int, Workspace&);
  void (*collect_keys)(const Rows&, int, int, Workspace&);
  bool (*lay_out_values)(const Place&, Workspace&);
  void (*clear_values)(const Place&, Workspace&);
  void (*interleave_values)(const Rows&, int, Workspace&);
  void (*multiply_values)(const Rows&, int, int, const float*, Workspace&);
  void (*collect_values)(int, int, Workspace&);
  void (*write_values)(const Place&, int, Workspace&);
  int (*weight_rows)(int);
};

static const Steps& in_floats() {
  static constexpr Steps steps = {
      [](const Place&, int, Workspace&) { return true; },
      [](const Rows&, int, Workspace&) {},
      [](const Rows& x, int n, int rows, Workspace& w) { find_products(x.kind, rows)(x, n, w.q[0], MAX_DIM, w.logits); },
      [](const Rows&, int, int, Workspace&) {},
      [](const Place&, Workspace&) { return true; },
      [](const Place& x, Workspace& w) {
        for (int r = 0; r < ROWS; r++) memset(w.mix[r], 0, sizeof(float) * x.dim);
      },
      [](const Rows&, int, Workspace&) {},
      [](const Rows& x, int n, int rows, const float* decay, Workspace& w) {
        find_mixture(x.kind, rows)(x, n, w.logits, decay, w.mix[0], MAX_DIM);
      },
      [](int, int, Workspace&) {},
      [](const Place&, int, Workspace&) {},
      [](int) { return 1; },
  };
  return steps;
}

#if KVW_LEVEL >= 2
template <int KIND>
static const Steps& in_integers() {
  static constexpr Steps steps = {
      [](const Place& x, int rows, Workspace& w) {
        if (!w.key_pieces.prepare(KIND, x.dim, x.group)) return false;
        w.keys.prepare(w.key_pieces, w.q[0], MAX_DIM, rows, x.dim);
        return true;
      },
      [](const Rows& x, int n, Workspace& w) { expand_keys<KIND>(x, n, w.key_pieces, w.keys); },
      [](const Rows& x, int n, int rows, Workspace& w) { multiply_keys<KIND>(x, n, w.key_pieces, rows, w.keys); },
      [](const Rows& x, int n, int rows, Workspace& w) {
        collect_keys<KIND>(x, n, w.key_pieces, w.keys, rows, w.logits);
      },
      [](const Place& x, Workspace& w) { return w.value_pieces.prepare(KIND, x.dim, x.group); },
      [](const Place&, Workspace& w) { w.values.clear(w.value_pieces); },
      [](const Rows& x, int n, Workspace& w) { interleave_values<KIND>(x, n, w.value_pieces, w.values); },
      [](const Rows& x, int, int rows, const float* decay, Workspace& w) {
        w.values.decay(rows, w.value_pieces, decay);
        weigh_values<KIND>(x, w.value_pieces, w.logits, w.most, rows, w.values);
        multiply_values(w.value_pieces, rows, w.values);
      },
      [](int, int rows, Workspace& w) { collect_values(w.value_pieces, rows, w.values); },
      [](const Place& x, int rows, Workspace& w) {
        w.values.write(w.mix[0], MAX_DIM, rows, x.group, w.value_pieces);
      },
      [](int rows) { return PLANES * share_of(rows); },
  };
  return steps;
}
#endif

#if KVW_LEVEL >= 3
static const Steps& in_bfloat16() {
  static constexpr Steps steps = {
      [](const Place& x, int rows, Workspace& w) {
        if (x.dim % WIDE) return false;
        w.wide_keys.prepare(w.q[0], MAX_DIM, rows, x.dim);
        return true;
      },
      [](const Rows&, int, Workspace&) {},
      [](const Rows& x, int n, int, Workspace& w) { multiply_wide_keys(x, n, w.wide_keys); },
      [](const Rows&, int n, int rows, Workspace& w) { collect_wide_keys(n, w.wide_keys, rows, w.logits); },
      [](const Place& x, Workspace&) { return x.dim % WIDE == 0; },
      [](const Place& x, Workspace& w) { w.wide_values.clear(x.dim); },
      [](const Rows& x, int n, Workspace& w) { interleave_wide_values(x, n, w.wide_values); },
      [](const Rows& x, int, int rows, const float* decay, Workspace& w) {
        w.wide_values.decay(rows, x.dim, decay);
        weigh_wide_values(w.logits, rows, w.wide_values);
        multiply_wide_values(x.dim, w.wide_values);
      },
      [](int dim, int rows, Workspace& w) { collect_wide_values(dim, rows, w.wide_values); },
      [](const Place& x, int rows, Workspace& w) { w.wide_values.write(w.mix[0], MAX_DIM, rows, x.dim); },
      [](int rows) { return 2 * rows; },
  };
  return steps;
}
#endif

static const Steps& steps_for(int kind) {
#if KVW_LEVEL >= 3
  if (kind == BFLOAT16) return in_bfloat16();
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

// Slots [start, stop) of a segment for the rows [row0, row0 + rows) of one KV head.
static void unit(const Decode& call, const Segment& segment, int64_t b, int64_t h, int row0, int rows, int64_t start,
                 int64_t stop, Workspace& w, Partial& partial, float* out, float* kept) {
  const int64_t head = b * call.kv_heads + h;
  const Place keys(segment.keys, b, h, call.kv_heads, (int)call.dim);
  const Place values(segment.values, b, h, call.kv_heads, (int)call.value_dim);
  const int64_t row = head * call.rows + row0;
  const Steps *of_keys = &steps_for(keys.storage.kind), *of_values = &steps_for(values.storage.kind);
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
  of_values->clear_values(values, w);
  for (int r = 0; r < ROWS; r++) {
    partial.most[r] = LOWEST;
    store(partial.total[r], F16{});
  }
#if KVW_LEVEL >= 2
  shape_tiles(of_values->weight_rows(rows));
#endif
  const int32_t* positions = call.positions + b * call.positions_batch + h * call.positions_head + segment.first;
  const I16 lowest = I16{} + (call.lowest ? call.lowest[head] : -1);
  const F16 hidden = fill(-INFINITY);

  for (int64_t at = start; at < stop; at += BLOCK) {
    const int n = stop - at < BLOCK ? (int)(stop - at) : BLOCK;
    const Rows k = keys.block(at, n, w.key_scales, w.key_zeros), v = values.block(at, n, w.value_scales, w.value_zeros);
    of_keys->expand_keys(k, n, w);
    if (at > start) of_values->collect_values(values.dim, rows, w);
    of_keys->multiply_keys(k, n, rows, w);
    of_values->interleave_values(v, n, w);
    of_keys->collect_keys(k, n, rows, w);

    I16 where[BLOCK / LANES];
    for (int i = 0; i < BLOCK / LANES; i++) {
      const int left = n - i * LANES;
      const int32_t* from = positions + at + i * LANES;
      where[i] = left >= LANES ? load<I16>(from) : left > 0 ? load_some(from, left, I16{} - 1) : I16{} - 1;
      where[i] = where[i] > lowest;
    }
    float now[ROWS];
    for (int r = 0; r < rows; r++) {
      const float shift = call.shift ? call.shift[row + r] : 0.0f;
      F16 x[BLOCK / LANES], most = fill(LOWEST);
      for (int i = 0; i < BLOCK / LANES; i++) {
        x[i] = (load<F16>(w.logits[r] + i * LANES) + shift) * call.scale;
        if (call.softcap > 0) x[i] = capped(x[i], call.softcap);
        x[i] = select(where[i], x[i], hidden);
        most = larger(most, x[i]);
      }
      if (kept) {
        float* to = kept + r * call.slots + at;
        for (int i = 0; i < BLOCK / LANES; i++) {
          const int left = n - i * LANES;
          if (left >= LANES) store(to + i * LANES, x[i]);
          else if (left > 0) store_some(to + i * LANES, x[i], left);
        }
      }
      for (int i = 0; i < BLOCK / LANES; i++) store(w.logits[r] + i * LANES, x[i]);
      now[r] = largest(most);
    }
    // How far outputs so far decay, and what the largest weight of the block is.
    float power[LANES] = {};
    for (int r = 0; r < rows; r++) {
      const float before = partial.most[r], top = now[r] > before ? now[r] : before;
      power[r] = before - top;
      power[ROWS + r] = now[r] - top;
      partial.most[r] = top;
    }
    store(power, exponential(load<F16>(power)));
    float decay[ROWS];
    for (int r = 0; r < ROWS; r++) decay[r] = power[r], w.most[r] = power[ROWS + r];
    for (int r = 0; r < rows; r++) {
      F16 total = load<F16>(partial.total[r]) * decay[r];
      for (int i = 0; i < BLOCK / LANES; i++) {
        const F16 weight = exponential(load<F16>(w.logits[r] + i * LANES) - partial.most[r]);
        total += weight;
        store(w.logits[r] + i * LANES, weight);
      }
      store(partial.total[r], total);
    }
    for (int r = rows; r < ROWS; r++) memset(w.logits[r], 0, sizeof w.logits[r]);

    of_values->multiply_values(v, n, rows, decay, w);
  }
  of_values->collect_values(values.dim, rows, w);
  of_values->write_values(values, rows, w);
  for (int r = 0; r < rows; r++) memcpy(out + r * call.value_dim, w.mix[r], sizeof(float) * call.value_dim);
}

static int32_t served(const Decode& call, const Segment* segments) {
  if (call.dim % LANES || call.value_dim % LANES || call.dim > MAX_DIM || call.value_dim > MAX_DIM) return KVW_NOT_SERVED;
  for (int i = 0; i < call.segment_count; i++) {
    const Storage* both[] = {&segments[i].keys, &segments[i].values};
    for (const Storage* x : both) {
      if (x->kind < 0 || x->kind > FP4_MX) return KVW_NOT_SERVED;
      if ((x->kind >= INT8) != (x->group > 0) || (x->group && x->group < LANES)) return KVW_NOT_SERVED;
    }
  }
  return 0;
}

struct Job {
  int segment;
  int32_t b, h, row0, rows;
  int64_t start, stop;
};

static void merge(const Decode& call, const Job* jobs, int64_t count, const Partial* partials, const float* outs) {
  const int64_t dim = call.value_dim;
  // Jobs of the same queries lie one behind the other, in a fixed order.
  const Job& first = jobs[0];
  for (int r = 0; r < first.rows; r++) {
    const int64_t row = ((int64_t)first.b * call.kv_heads + first.h) * call.rows + first.row0 + r;
    float* out = call.out + row * dim;
    const float sink = call.sinks ? call.sinks[first.h * call.rows + first.row0 + r] : -INFINITY;
    float most = sink > LOWEST ? sink : LOWEST;
    for (int64_t i = 0; i < count; i++) most = partials[i].most[r] > most ? partials[i].most[r] : most;
    float total = call.sinks ? __builtin_expf(sink - most) : 0.0f;
    memset(out, 0, sizeof(float) * dim);
    for (int64_t i = 0; i < count; i++) {
      const float part = sum(load<F16>(partials[i].total[r]));
      if (part == 0) continue;  // a sum of NaN goes on: what overflowed must not look like a result
      const float weight = __builtin_expf(partials[i].most[r] - most);
      total += weight * part;
      const float* from = outs + (i * ROWS + r) * dim;
      for (int64_t d = 0; d < dim; d += LANES) store(out + d, load<F16>(out + d) + load<F16>(from + d) * weight);
    }
    const float part = total == 0 ? 0.0f : 1.0f / total;
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, load<F16>(out + d) * part);
    call.lse[row] = total == 0 ? -INFINITY : most + __builtin_logf(total);
  }
}

// Mean over the rows of exp(logit - log-sum-exp), for slots [start, stop) of one KV head.
static void weigh(const Decode& call, int64_t head, int64_t start, int64_t stop, const float* logits) {
  const float* lse = call.lse + head * call.rows;
  float* to = call.weights + head * call.slots;
  const float part = 1.0f / (float)call.rows;
  for (int64_t s = start; s < stop; s += LANES) {
    const int64_t left = stop - s;
    F16 total = {};
    for (int64_t r = 0; r < call.rows; r++) {
      const float* from = logits + (head * call.rows + r) * call.slots + s;
      const F16 x = left >= LANES ? load<F16>(from) : load_some(from, left, fill(-INFINITY));
      if (lse[r] != -INFINITY) total += exponential(x - lse[r]);
    }
    total *= part;
    if (left >= LANES) store(to + s, total);
    else store_some(to + s, total, left);
  }
}

// Memory of its own, not initialised.
template <class T>
struct Room {
  T* const at;
  explicit Room(int64_t count)
      : at((T*)aligned_alloc(64, ((size_t)(count > 0 ? count : 1) * sizeof(T) + 63) / 64 * 64)) {}
  ~Room() { free(at); }
  Room(const Room&) = delete;
};

static int32_t run(const Decode& call, const Segment* segments) {
  if (const int32_t code = served(call, segments)) return code;
  int64_t per_rows = 0;
  for (int i = 0; i < call.segment_count; i++) per_rows += (segments[i].count + CHUNK - 1) / CHUNK;
  const int64_t row_groups = (call.rows + ROWS - 1) / ROWS, heads = call.batch * call.kv_heads;
  const int64_t sets = heads * row_groups, count = sets * per_rows;
  const Room<Job> jobs(count);
  const Room<Partial> partials(count);
  const Room<float> outs(count * ROWS * call.value_dim);
  const Room<float> logits(call.weights ? heads * call.rows * call.slots : 0);
  int64_t bytes = 0;
  for (int i = 0; i < call.segment_count; i++) {
    const Segment& x = segments[i];
    bytes += heads * x.count * (call.dim * element_bits(x.keys.kind) + call.value_dim * element_bits(x.values.kind)) / 8;
  }
  const int threads = call.threads > 1 && bytes >= ALONE ? call.threads : 1;
  const Room<Workspace> spaces(threads);
  if (!jobs.at || !partials.at || !outs.at || !logits.at || !spaces.at) return KVW_NO_MEMORY;
  Job* job = jobs.at;
  for (int64_t set = 0; set < sets; set++) {
    const int32_t row0 = (int32_t)(set % row_groups * ROWS), head = (int32_t)(set / row_groups);
    const int32_t rows = call.rows - row0 < ROWS ? (int32_t)(call.rows - row0) : ROWS;
    for (int i = 0; i < call.segment_count; i++)
      for (int64_t start = 0; start < segments[i].count; start += CHUNK) {
        const int64_t stop = start + CHUNK < segments[i].count ? start + CHUNK : segments[i].count;
        *job++ = {i, head / (int32_t)call.kv_heads, head % (int32_t)call.kv_heads, row0, rows, start, stop};
      }
  }
  const int64_t chunks = (call.slots + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(threads)
  {
#ifdef _OPENMP
    Workspace& w = spaces.at[omp_get_thread_num()];
#else
    Workspace& w = *spaces.at;
#endif
    w.prepared = nullptr;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < count; i++) {
      const Job& x = jobs.at[i];
      const Segment& segment = segments[x.segment];
      const int64_t row = ((int64_t)x.b * call.kv_heads + x.h) * call.rows + x.row0;
      float* kept = call.weights ? logits.at + row * call.slots + segment.first : nullptr;
      unit(call, segment, x.b, x.h, x.row0, x.rows, x.start, x.stop, w, partials.at[i],
           outs.at + i * ROWS * call.value_dim, kept);
    }
#if KVW_LEVEL >= 2
    release_tiles();
#endif
  }
  // Threads wait for each other once: where another program has a core, each wait lasts until the system takes turns.
  for (int64_t set = 0; set < sets && per_rows; set++) {
    const int64_t from = set * per_rows;
    merge(call, jobs.at + from, per_rows, partials.at + from, outs.at + from * ROWS * call.value_dim);
  }
  if (call.weights) {
#pragma omp parallel for num_threads(heads * call.rows * call.slots >= ALONE ? threads : 1) schedule(static)
    for (int64_t i = 0; i < heads * chunks; i++) {
      const int64_t start = i % chunks * CHUNK, stop = start + CHUNK < call.slots ? start + CHUNK : call.slots;
      weigh(call, i / chunks, start, stop, logits.at);
    }
  }
  return 0;
}

}  // namespace

int32_t decode(const Decode& call, const Segment* segments) { return run(call, segments); }

}  // namespace KVW_NS
