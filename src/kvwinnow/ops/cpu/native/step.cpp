// One decode step of a layer in one call: the new token to its slot, the query into the space that keys are stored in,
// attention, and the output back into the model's. Each is a function that can be called by itself as well; together they
// are spared what a call from Python costs, which in a short cache is more than the work.

#include "step.h"

#include <cstdlib>

KVW_EXPORT int32_t kvw_write_token(int32_t level, const kvw::Target* sides, int32_t count, const kvw::Places* places,
                                   const kvw::Token* token, int32_t threads);
KVW_EXPORT int32_t kvw_rotate(int32_t level, const kvw::Turn* turn);
KVW_EXPORT int32_t kvw_decode(int32_t level, const kvw::Decode* call, const kvw::Segment* segments);

namespace {

using namespace kvw;

// A thread's memory for what lies between the parts of a step. It is as large as the largest step needed.
struct Scratch {
  float* at = nullptr;
  size_t size = 0;
  ~Scratch() { free(at); }
  float* of(size_t floats) {
    if (floats > size) {
      free(at);
      at = (float*)aligned_alloc(64, sizeof(float) * floats);
      size = at ? floats : 0;
    }
    return at;
  }
};
thread_local Scratch scratch;

// So many floats, and the next ones begin where a line of memory does.
int64_t lines(int64_t floats) { return (floats + 15) / 16 * 16; }

int64_t size_of(int32_t kind) { return kind == FLOAT32 ? 4 : 2; }

void source(Target& side, const Fresh& fresh, int32_t kind) {
  side.source_kind = kind;
  side.source = fresh.at;
  side.source_batch = fresh.batch * size_of(kind), side.source_head = fresh.head * size_of(kind), side.source_token = 0;
}

// A row that has no token looks at nothing new.
void add(float* mass, const float* weights, const Layer& layer, const Step& step) {
  const Places& p = layer.places;
  for (int64_t head = 0; head < p.batch * p.heads; head++) {
    float* to = mass + head * p.slots;
    const float* from = weights + head * p.slots;
    to[step.slots[head]] = 0;
    if (step.position[head / p.heads * step.position_batch] < 0) continue;
    for (int64_t s = 0; s < p.slots; s++) to[s] += from[s];
  }
}

}  // namespace

KVW_EXPORT int32_t kvw_step(int32_t level, const Layer* layer, const Segment* segments, const Step* step) {
  const Places& p = layer->places;
  Target sides[] = {layer->keys, layer->values};
  source(sides[0], step->key, step->key_kind);
  source(sides[1], step->value, step->value_kind);
  const int64_t dim = sides[0].dim, value_dim = sides[1].dim, heads = p.batch * p.heads, all = heads * step->rows;
  const bool own_weights = step->mass && !step->weights;
  const int64_t floats = lines(all * dim) + lines(all * value_dim) + 2 * lines(all) + lines(own_weights ? heads * p.slots : 0);
  float* const queries = scratch.of((size_t)floats);
  if (!queries) return KVW_NO_MEMORY;
  float *const outs = queries + lines(all * dim), *const products = outs + lines(all * value_dim);
  float *const lse = products + lines(all), *const weights = own_weights ? lse + lines(all) : step->weights;

  const Token token = {layer->positions, layer->positions_batch, layer->positions_head,
                       step->position,   step->position_batch,   step->slots};
  if (const int32_t code = kvw_write_token(level, sides, 2, &p, &token, step->threads)) return code;

  const int64_t head = step->query.head * size_of(step->query_kind);
  const Turn there = {p.batch, p.heads, step->rows, dim, step->query_kind, FLOAT32, sides[0].rotation, step->threads,
                      step->query.at, step->query.batch * size_of(step->query_kind), head * step->rows, head,
                      sides[0].mean, (uint8_t*)queries, products};
  if (kvw_rotate(level, &there)) return STORED;
  Decode call = {};
  call.batch = p.batch, call.kv_heads = p.heads, call.rows = step->rows;
  call.dim = dim, call.value_dim = value_dim, call.slots = p.slots;
  call.queries = queries, call.shift = sides[0].mean ? products : nullptr;
  call.positions = layer->positions;
  call.positions_batch = layer->positions_batch, call.positions_head = layer->positions_head;
  call.lowest = step->lowest, call.sinks = step->sinks;
  call.scale = step->scale, call.softcap = step->softcap;
  call.out = outs, call.lse = lse, call.weights = weights;
  call.segment_count = layer->segment_count, call.threads = step->threads;
  if (kvw_decode(level, &call, segments)) return STORED;
  const Turn back = {p.batch, p.heads, step->rows, value_dim, FLOAT32, step->query_kind, sides[1].rotation, step->threads,
                     (const uint8_t*)outs, (int64_t)sizeof(float) * p.heads * step->rows * value_dim,
                     (int64_t)sizeof(float) * step->rows * value_dim, (int64_t)sizeof(float) * value_dim,
                     nullptr, step->out, nullptr};
  if (kvw_rotate(level, &back)) return STORED;
  if (step->mass) add(step->mass, weights, *layer, *step);
  return KVW_SERVED;
}
