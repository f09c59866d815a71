#pragma once

#include "levels.h"

struct Gather {
  const char* src;
  int64_t src_batch, src_head, src_row, src_rows;
  const int64_t* index;  // (batch, heads, keep)
  char* dst;
  int64_t dst_batch, dst_head, dst_row;
  int64_t batch, heads, keep, bytes;
};
