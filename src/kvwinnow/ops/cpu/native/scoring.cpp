// Checks what the kernels of prefill scoring are given and calls those of a level.

#include "scoring.h"

namespace {

constexpr int64_t MOST_DIM = 1024;
constexpr int64_t TILE = 32;  // the fewest dimensions that AMX takes

bool known(int32_t dtype) { return dtype == KVW_FLOAT32 || dtype == KVW_BFLOAT16 || dtype == KVW_FLOAT16; }

bool served(const kvw_scoring& a) {
  return a.batch > 0 && a.kv_heads > 0 && a.group > 0 && a.queries > 0 && a.keys > 0 && a.dim > 0 &&
         a.dim % 16 == 0 && a.dim <= MOST_DIM && a.scale > 0.0f && a.softcap >= 0.0f && a.sliding >= 0 &&
         a.threads > 0 && known(a.q_dtype) && known(a.k_dtype);
}

bool in_tiles(const kvw_scoring& a) {
  return a.q_dtype == KVW_BFLOAT16 && a.k_dtype == KVW_BFLOAT16 && a.dim >= TILE;
}

}  // namespace

// out[key] = sum over the group's query heads and the queries of exp(logit - lse); what is hidden adds exactly nothing,
// and what is less than about exp(-87) that much or nothing. A query whose lse is -inf adds nothing. Arguments for which
// there is no memory are not served.
KVW_EXPORT int32_t kvw_column_sums(int32_t level, const kvw_scoring* args) {
  if (!served(*args)) return KVW_NOT_SERVED;
  KVW_IF_AMX(if (level == KVW_AMX && in_tiles(*args)) return kvw_amx::tile_column_sums(*args);)
  KVW_DISPATCH(level, column_sums(*args))
}

// out[query] = log(sum over keys of exp(logit)), -inf where it sees none.
KVW_EXPORT int32_t kvw_log_sum_exp(int32_t level, const kvw_scoring* args) {
  if (!served(*args)) return KVW_NOT_SERVED;
  KVW_IF_AMX(if (level == KVW_AMX && in_tiles(*args)) return kvw_amx::tile_log_sum_exp(*args);)
  KVW_DISPATCH(level, log_sum_exp(*args))
}
