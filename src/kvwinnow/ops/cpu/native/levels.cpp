// What the library was built with, and what of it the processor can run.

#include "levels.h"

#if defined(__x86_64__) || defined(__i386__)
#define KVW_X86 1
#include <cpuid.h>
#endif
#if defined(KVW_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern const char kvw_sources_text[];
extern const char kvw_info_text[];

namespace {

constexpr int32_t kAbi = 1;  // library.py expects the same; raised when an exported function changes its arguments

#if defined(KVW_X86)

// The state that the operating system saves for each thread: registers that it does not know must not be touched.
uint64_t saved_state() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

constexpr uint64_t kAvxState = 0x6, kAvx512State = 0xe6, kTileState = 0x60000;

bool has(uint32_t word, int bit) { return (word >> bit) & 1; }

bool all(uint64_t state, uint64_t wanted) { return (state & wanted) == wanted; }

// Linux gives a process the eight kilobytes of tile registers only if it asks; the permission holds for all its threads.
bool tiles_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#endif

int32_t find_supported() {
  int32_t found = 1 << KVW_PORTABLE;
#if defined(KVW_X86)
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return found;  // 27: XGETBV may be used
  const uint64_t state = saved_state();
  const bool fma = has(c, 12), avx = has(c, 28), f16c = has(c, 29);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  const uint32_t b7 = b, c7 = c, d7 = d, subleaves = a;
  if (!(all(state, kAvxState) && avx && fma && f16c && has(b7, 5))) return found;
  found |= 1 << KVW_AVX2;
  const bool avx512 = has(b7, 16) && has(b7, 30) && has(b7, 17) && has(b7, 31);  // F, BW, DQ, VL
  if (!(all(state, kAvx512State) && avx512 && has(c7, 11))) return found;         // 11: VNNI
  found |= 1 << KVW_AVX512;
  const bool bf16 = subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, 5);
  const bool amx = has(d7, 24) && has(d7, 25) && has(d7, 22);  // TILE, INT8, BF16
  if (all(state, kTileState) && bf16 && amx && tiles_permitted()) found |= 1 << KVW_AMX;
#endif
  return found;
}

constexpr int32_t kBuilt = (1 << KVW_PORTABLE) KVW_IF_AVX2(| (1 << KVW_AVX2)) KVW_IF_AVX512(| (1 << KVW_AVX512))
    KVW_IF_AMX(| (1 << KVW_AMX));

}  // namespace

KVW_EXPORT int32_t kvw_abi_version() { return kAbi; }

// One bit for each level that was built.
KVW_EXPORT int32_t kvw_levels() { return kBuilt; }

// One bit for each level whose instructions this processor and its operating system serve, built or not.
KVW_EXPORT int32_t kvw_supported() {
  static const int32_t found = find_supported();
  return found;
}

// The best level that is both.
KVW_EXPORT int32_t kvw_best_level() {
  const int32_t usable = kBuilt & kvw_supported();
  int32_t best = KVW_PORTABLE;
  for (int32_t level = KVW_PORTABLE; level <= KVW_AMX; ++level)
    if ((usable >> level) & 1) best = level;
  return best;
}

// SHA-256 of the sources, as library.py computes it from a source tree.
KVW_EXPORT const char* kvw_sources() { return kvw_sources_text; }

// The compiler, the threads and the levels, to be read by people.
KVW_EXPORT const char* kvw_build_info() { return kvw_info_text; }
