// What Python hands over to store new keys and values in slots, as their codecs store them.
#pragma once

#include "decode.h"

namespace kvw {

// The keys or the values of new tokens, and the slots of one layer that they go to. Strides are in bytes; the elements of a
// vector lie side by side, and so do the slots of one KV head. A slot's vector begins in a byte of its own in every part, and
// two elements that share a byte (j and j + dim / 2, see Kind) are of one vector: whatever else lies there survives.
struct Target {
  // What is new at each call.
  int32_t source_kind;  // FLOAT32, BFLOAT16 or FLOAT16
  int32_t unused;
  const uint8_t* source;
  int64_t source_batch, source_head, source_token;
  // What stays as long as the slots lie where they are.
  int32_t kind;        // how slots from ``tail`` on are stored
  int32_t exact_kind;  // how slots before ``edge`` are
  int32_t group;       // elements that share a scale; 0 where there are no scales
  int32_t rotation;    // vectors are rotated by Hadamard matrices of that size; 0: they are not
  int32_t cut;         // whether what is larger than a float16 is stored as the largest there
  int32_t unused_too;
  int64_t dim;
  const float* mean;          // (B, Hkv, D), taken off before the rotation; or null
  const float* tensor_scale;  // (B, Hkv), divided by after it; or null
  uint8_t* exact;
  int64_t exact_batch, exact_head;
  uint8_t* codes;
  int64_t codes_batch, codes_head;
  uint8_t* scales;
  int64_t scales_batch, scales_head;
  uint8_t* zeros;
  int64_t zeros_batch, zeros_head;
};

// Vectors to store: of the i-th, which (batch, head) pair it is of, counted over B * Hkv, which of the source's tokens, and
// which slot. Null stands for i / each, i % each and i % each.
struct Places {
  int64_t batch, heads, tokens, slots;
  int64_t edge, tail;  // slots between belong to others too and are not written to
  int64_t count, each;
  const int64_t *rows, *columns, *places;
};

// One new token: it goes into the first empty slot of each KV head.
struct Token {
  int32_t* positions;  // (B, Hkv, S), -1 = empty
  int64_t positions_batch, positions_head;  // strides in elements
  const int32_t* position;  // the token's own, of each row
  int64_t position_batch;
  int64_t* slots;  // (B, Hkv): where it went
};

// Vectors from one place and format to another, rotated in between.
struct Turn {
  int64_t batch, heads, rows, dim;
  int32_t source_kind, out_kind;
  int32_t rotation, threads;
  const uint8_t* source;
  int64_t source_batch, source_head, source_row;  // in bytes
  const float* mean;  // (B, heads, D); or null
  uint8_t* out;       // (B, heads, rows, D)
  float* products;    // (B, heads, rows): of the source with the mean; where there is one
};

}  // namespace kvw
