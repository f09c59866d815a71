// Attention of a few queries over slots, in one pass over memory ("flash decoding"): each unit of work is a run of slots
// of one KV head (decode_unit.h), and units are merged by their log-sum-exp.
// Compiled once for each level, see levels.h.

#include <cstdlib>

#include "decode_unit.h"

namespace KVW_NS {
namespace {

using namespace kvw;

constexpr int64_t ALONE = 1 << 19;  // bytes that are not worth a second thread

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

// Memory that calls leave to later ones, of any thread: what is new to the process comes a page at a time, each with a
// fault, and those took longer than attention over a short cache.
template <size_t SIZE>
struct Shelf {
  static constexpr int PLACES = 128;
  static void* places[PLACES];

  static void* take() {
    for (void*& place : places)
      if (void* found = __atomic_exchange_n(&place, nullptr, __ATOMIC_ACQUIRE)) return found;
    return aligned_alloc(64, SIZE);
  }
  static void give(void* room) {
    for (void*& place : places) {
      void* empty = nullptr;
      if (__atomic_compare_exchange_n(&place, &empty, room, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) return;
    }
    free(room);
  }
};
template <size_t SIZE>
void* Shelf<SIZE>::places[PLACES];

typedef Shelf<(sizeof(Workspace) + 63) / 64 * 64> Workspaces;
constexpr size_t SMALL = 1 << 18;
typedef Shelf<SMALL> Rooms;

// Memory of its own, not initialised.
struct Room {
  const size_t size;
  char* const at;
  explicit Room(size_t bytes) : size((bytes + 64) / 64 * 64), at((char*)(small() ? Rooms::take() : aligned_alloc(64, size))) {}
  ~Room() {
    if (small() && at) Rooms::give(at);
    else free(at);
  }
  Room(const Room&) = delete;

 private:
  bool small() const { return size <= SMALL; }
};

static int32_t run(const Decode& call, const Segment* segments) {
  if (const int32_t code = served(call, segments)) return code;
  int64_t per_rows = 0;
  for (int i = 0; i < call.segment_count; i++) per_rows += (segments[i].count + CHUNK - 1) / CHUNK;
  const int64_t row_groups = (call.rows + ROWS - 1) / ROWS, heads = call.batch * call.kv_heads;
  const int64_t sets = heads * row_groups, count = sets * per_rows;
  const size_t of_jobs = (sizeof(Job) * count + 63) / 64 * 64, of_partials = sizeof(Partial) * count;
  const size_t of_outs = sizeof(float) * count * ROWS * call.value_dim;
  const Room room(of_jobs + of_partials + of_outs);
  const Room kept_logits(call.weights ? sizeof(float) * heads * call.rows * call.slots : 0);
  if (!room.at || !kept_logits.at) return KVW_NO_MEMORY;
  Job* const jobs = (Job*)room.at;
  Partial* const partials = (Partial*)(room.at + of_jobs);
  float* const outs = (float*)(room.at + of_jobs + of_partials);
  float* const logits = (float*)kept_logits.at;
  int64_t bytes = 0;
  for (int i = 0; i < call.segment_count; i++) {
    const Segment& x = segments[i];
    bytes += heads * x.count * (call.dim * element_bits(x.keys.kind) + call.value_dim * element_bits(x.values.kind)) / 8;
  }
  const int threads = call.threads > 1 && bytes >= ALONE ? call.threads : 1;
  Job* job = jobs;
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
  int32_t code = 0;
#pragma omp parallel num_threads(threads)
  {
    Workspace* const w = (Workspace*)Workspaces::take();
    if (w) w->start();
    else __atomic_store_n(&code, KVW_NO_MEMORY, __ATOMIC_RELAXED);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < count; i++) {
      if (!w) continue;
      const Job& x = jobs[i];
      const Segment& segment = segments[x.segment];
      const int64_t row = ((int64_t)x.b * call.kv_heads + x.h) * call.rows + x.row0;
      float* kept = call.weights ? logits + row * call.slots + segment.first : nullptr;
      unit(call, segment, x.b, x.h, x.row0, x.rows, x.start, x.stop, *w, partials[i],
           outs + i * ROWS * call.value_dim, kept ? kept + x.start : nullptr);
    }
#if KVW_LEVEL >= 2
    release_tiles();
#endif
    if (w) Workspaces::give(w);
  }
  if (code) return code;
  // Threads wait for each other once: where another program has a core, each wait lasts until the system takes turns.
  for (int64_t set = 0; set < sets && per_rows; set++) {
    const int64_t from = set * per_rows;
    merge(call, jobs + from, per_rows, partials + from, outs + from * ROWS * call.value_dim);
  }
  if (call.weights) {
#pragma omp parallel for num_threads(heads * call.rows * call.slots >= ALONE ? threads : 1) schedule(static)
    for (int64_t i = 0; i < heads * chunks; i++) {
      const int64_t start = i % chunks * CHUNK, stop = start + CHUNK < call.slots ? start + CHUNK : call.slots;
      weigh(call, i / chunks, start, stop, logits);
    }
  }
  return 0;
}

}  // namespace

int32_t decode(const Decode& call, const Segment* segments) { return run(call, segments); }

}  // namespace KVW_NS
