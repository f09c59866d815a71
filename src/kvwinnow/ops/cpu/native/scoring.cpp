// Checks what the kernels of prefill scoring are given and calls those of a level.
#include "scoring.h"

namespace {

enum Level : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2, AMX = 3 };

constexpr int64_t MOST_DIM = 1024;
constexpr int64_t TILE = 32;  // the fewest dimensions that AMX takes

bool known(int32_t dtype) { return dtype == KVW_FLOAT32 || dtype == KVW_BFLOAT16 || dtype == KVW_FLOAT16; }

bool served(const kvw_scoring &a) {
    return a.batch > 0 && a.kv_heads > 0 && a.group > 0 && a.queries > 0 && a.keys > 0 && a.dim > 0 &&
           a.dim % 16 == 0 && a.dim <= MOST_DIM && a.scale > 0.0f && a.softcap >= 0.0f && a.sliding >= 0 &&
           a.threads > 0 && known(a.q_dtype) && known(a.k_dtype);
}

bool tiles(const kvw_scoring &a) {
    return a.q_dtype == KVW_BFLOAT16 && a.k_dtype == KVW_BFLOAT16 && a.dim >= TILE;
}

}  // namespace

#if defined(__x86_64__)
#define KVW_SCORING_CALL(what)                                                            \
    if (level == AMX && tiles(*args)) return kvw_scoring_amx::what(*args);                \
    if (level == AMX || level == AVX512) return kvw_scoring_avx512::what(*args);          \
    if (level == AVX2) return kvw_scoring_avx2::what(*args);
#else
#define KVW_SCORING_CALL(what)
#endif

extern "C" int32_t kvw_column_sums(int32_t level, const kvw_scoring *args) {
    if (!served(*args)) return -1;
    KVW_SCORING_CALL(column_sums)
    return level == PORTABLE ? kvw_scoring_portable::column_sums(*args) : -1;
}

extern "C" int32_t kvw_log_sum_exp(int32_t level, const kvw_scoring *args) {
    if (!served(*args)) return -1;
    KVW_SCORING_CALL(log_sum_exp)
    return level == PORTABLE ? kvw_scoring_portable::log_sum_exp(*args) : -1;
}
