#include "levels.h"

namespace KVW_NS {

int32_t probe(int32_t threads, int32_t* compiled, int32_t* running) {
#if defined(__AMX_INT8__)
  *compiled = KVW_AMX;
#elif defined(__AVX512VNNI__)
  *compiled = KVW_AVX512;
#elif defined(__AVX2__)
  *compiled = KVW_AVX2;
#else
  *compiled = KVW_PORTABLE;
#endif
  int32_t number = 0;
#pragma omp parallel num_threads(threads)
  {
#pragma omp atomic
    ++number;
  }
  *running = number;
  (void)threads;
  return KVW_SERVED;
}

}  // namespace KVW_NS
