// What Python hands over for attention of a few queries over slots, and how a kernel of any level is called.
#pragma once

#include "levels.h"

namespace kvw {

// How the elements of a vector lie in memory. A code times its scale (plus its zero point) is the element.
enum Kind : int32_t {
  FLOAT32 = 0,
  BFLOAT16 = 1,
  FLOAT16 = 2,
  INT8 = 3,      // int8 codes, a float16 scale per group
  INT4 = 4,      // two uint4 codes a byte (byte j: element j low, element j + dim / 2 high), float16 scale and zero point
  FP8 = 5,       // e4m3 codes, a float16 scale per group
  FP4_NV = 6,    // two e2m1 codes a byte, an e4m3 scale per group, a float32 scale for each row and KV head
  FP4_MX = 7,    // two e2m1 codes a byte, a power of two per group (e8m0)
};

// The keys or the values of some slots; strides are in bytes, and the slots of one KV head lie one behind the other.
struct Storage {
  int32_t kind;
  int32_t group;  // elements that share a scale; 0 where there are no scales
  const uint8_t* codes;
  int64_t codes_batch, codes_head;
  const uint8_t* scales;
  int64_t scales_batch, scales_head;
  const uint8_t* zeros;
  int64_t zeros_batch, zeros_head;
  const float* tensor_scale;  // (B, Hkv), or null
};

// Slots [first, first + count) of a layer.
struct Segment {
  Storage keys, values;
  int64_t first, count;
};

// One call. All float tensors are contiguous.
struct Decode {
  int64_t batch, kv_heads, rows, dim, value_dim, slots;
  const float* queries;      // (B, Hkv, rows, D): the queries that share a KV head
  const float* shift;        // (B, Hkv, rows), added to q.k before the scale; or null
  const int32_t* positions;  // (B, Hkv, S), -1 = empty
  int64_t positions_batch, positions_head;  // strides in elements
  const int32_t* lowest;     // (B, Hkv): slots of this position or a lower one are hidden; null: empty ones only
  const float* sinks;        // (Hkv, rows), one more logit of each query; or null
  float scale, softcap;      // softcap 0: none
  float* out;                // (B, Hkv, rows, Dv)
  float* lse;                // (B, Hkv, rows), sinks included
  float* weights;            // (B, Hkv, S), mean over rows of the softmax weights; or null
  int32_t segment_count;
  int32_t threads;
};

constexpr int ROWS = 8;         // queries that go through the slots together
constexpr int BLOCK = 64;       // slots that go through the steps of a kernel together
constexpr int64_t CHUNK = 1024;  // slots of one unit of work: sums do not depend on the number of threads
constexpr int BLOCKS = CHUNK / BLOCK;
constexpr int MAX_DIM = 512;
constexpr int MAX_GROUPS = MAX_DIM / 16;

}  // namespace kvw
