// Prefill scoring: how much attention each key receives, and the log-sum-exp of each query.
//
// One call serves one run of keys: the slots of a cache, or the new tokens of a prompt. Query i sees key j where
// key_positions[j] >= 0, key_positions[j] <= query_positions[i] and, in a sliding layer, key_positions[j] >
// query_positions[i] - sliding. Logits are scale * (q.k + shift), soft-capped if asked for. Nothing is ever
// queries x keys: memory is linear in both.
#pragma once

#include "levels.h"

enum kvw_dtype : int32_t { KVW_FLOAT32 = 0, KVW_BFLOAT16 = 1, KVW_FLOAT16 = 2 };

// Strides count elements; the last dimension of q and k is contiguous.
struct kvw_scoring {
  const void* q;                   // (batch, kv_heads * group, queries, dim)
  const void* k;                   // (batch, kv_heads, keys, dim)
  const float* lse;                // (batch, kv_heads, group, queries), contiguous; column sums only
  const float* shift;              // the same shape, contiguous, or null
  const int32_t* query_positions;  // (batch, queries), contiguous; negative: no query
  const int32_t* key_positions;    // (batch, kv_heads or 1, keys), last dimension contiguous; negative: empty
  float* out;                      // column sums: (batch, kv_heads, keys); log-sum-exp: as lse; contiguous
  int64_t batch, kv_heads, group, queries, keys, dim;
  int64_t q_strides[3];         // batch, query head, query
  int64_t k_strides[3];         // batch, KV head, key
  int64_t position_strides[2];  // of key_positions: batch, KV head (0: shared)
  float scale;
  float softcap;  // 0: none
  int32_t sliding;  // 0: none
  int32_t q_dtype, k_dtype;
  int32_t threads;
};

#define KVW_DECLARE_SCORING(ns) \
  namespace ns { \
  int32_t column_sums(const kvw_scoring& args); \
  int32_t log_sum_exp(const kvw_scoring& args); \
  int32_t tile_column_sums(const kvw_scoring& args); \
  int32_t tile_log_sum_exp(const kvw_scoring& args); \
 }
KVW_EACH_LEVEL(KVW_DECLARE_SCORING)
