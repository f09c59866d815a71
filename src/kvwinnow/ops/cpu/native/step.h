// What Python hands over for one decode step of a layer.
#pragma once

#include "quantize.h"

namespace kvw {

// What stays as long as the slots lie where they are.
struct Layer {
  Target keys, values;  // without what is new at each call
  Places places;        // of one token: the shape, and which slots are whose
  int32_t* positions;   // (B, Hkv, S), -1 = empty
  int64_t positions_batch, positions_head;  // strides in elements
  int32_t segment_count;
  int32_t unused;
};

// One new token of each row; the elements of a vector lie side by side.
struct Fresh {
  const uint8_t* at;
  int64_t batch, head;  // strides in elements
};

struct Step {
  Fresh query, key, value;  // (B, Hq, D), (B, Hkv, D) and (B, Hkv, Dv)
  int32_t query_kind, key_kind, value_kind;
  int32_t threads;
  int64_t rows;             // query heads of one KV head
  const int32_t* position;  // the token's own, of each row; -1: the row has none
  int64_t position_batch;
  const int32_t* lowest;    // see Decode
  const float* sinks;       // see Decode
  float scale, softcap;
  int64_t* slots;  // (B, Hkv): where the token went
  uint8_t* out;    // (B, Hq, Dv), contiguous, of the queries' kind
  float* weights;  // (B, Hkv, S), the softmax weights, mean over rows; or null
  float* mass;     // (B, Hkv, S): the weights are added to it, and the new slot's is nothing before; or null
};

constexpr int32_t STORED = 1;  // the token is stored, and attention is left to torch

}  // namespace kvw
