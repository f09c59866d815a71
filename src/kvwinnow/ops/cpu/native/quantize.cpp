#include "quantize.h"

#define DECLARE(ns)                                                                               \
  namespace ns {                                                                                  \
  int32_t write_vectors(const kvw::Target* sides, int32_t count, const kvw::Places& places, int32_t threads); \
  int32_t write_token(const kvw::Target* sides, int32_t count, const kvw::Places& places,         \
                      const kvw::Token& token, int32_t threads);                                  \
  int32_t rotate(const kvw::Turn& turn);                                                          \
  }
KVW_EACH_LEVEL(DECLARE)

// Store any vectors in any slots; nothing is written if one of the places is none.
KVW_EXPORT int32_t kvw_write_vectors(int32_t level, const kvw::Target* sides, int32_t count, const kvw::Places* places,
                                     int32_t threads) {
  KVW_DISPATCH(level, write_vectors(sides, count, *places, threads))
}

// Store one token of each row, keys and values, in the first slot that is empty, and its position. Nothing is
// written if a KV head has no such slot.
KVW_EXPORT int32_t kvw_write_token(int32_t level, const kvw::Target* sides, int32_t count, const kvw::Places* places,
                                   const kvw::Token* token, int32_t threads) {
  KVW_DISPATCH(level, write_token(sides, count, *places, *token, threads))
}

// Vectors rotated by Hadamard matrices.
KVW_EXPORT int32_t kvw_rotate(int32_t level, const kvw::Turn* turn) { KVW_DISPATCH(level, rotate(*turn)) }
