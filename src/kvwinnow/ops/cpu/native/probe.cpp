// Asks a level's objects what they were compiled for; for tests and for `kvwinnow doctor`.

#include "levels.h"

#define DECLARE(ns) namespace ns { int32_t probe(int32_t threads, int32_t* compiled, int32_t* running); }
KVW_EACH_LEVEL(DECLARE)
#undef DECLARE

// compiled: the level whose instructions the compiler was allowed; running: how many of the threads asked for there are.
KVW_EXPORT int32_t kvw_probe(int32_t level, int32_t threads, int32_t* compiled, int32_t* running) {
  KVW_DISPATCH(level, probe(threads, compiled, running))
}
