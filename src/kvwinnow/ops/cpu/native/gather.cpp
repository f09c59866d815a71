// Per-head compaction: of each KV head the rows that an index names, in its order.

#include "gather.h"

#define DECLARE(ns) namespace ns { int32_t gather_rows(const Gather& g, int32_t threads); }
KVW_EACH_LEVEL(DECLARE)
#undef DECLARE

// For every batch b, head h and i < keep: row i of dst[b, h] becomes row index[b, h, i] of src[b, h]. Strides are in bytes.
// An index outside [0, src_rows) is not served; what dst holds then is undefined.
KVW_EXPORT int32_t kvw_gather_rows(int32_t level, const void* src, int64_t src_batch, int64_t src_head, int64_t src_row,
                                   int64_t src_rows, const int64_t* index, void* dst, int64_t dst_batch, int64_t dst_head,
                                   int64_t dst_row, int64_t batch, int64_t heads, int64_t keep, int64_t bytes,
                                   int32_t threads) {
  if (bytes <= 0 || threads <= 0) return KVW_NOT_SERVED;
  const Gather g = {static_cast<const char*>(src), src_batch, src_head, src_row, src_rows, index,
                    static_cast<char*>(dst),       dst_batch, dst_head, dst_row, batch,    heads, keep, bytes};
  KVW_DISPATCH(level, gather_rows(g, threads))
}
