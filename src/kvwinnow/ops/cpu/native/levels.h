// Levels: one set of kernels for each set of instructions, in one library.
//
// Files NAME_levels.cpp are compiled once for each level, files NAME_LEVEL.cpp for one (see CMakeLists.txt), with KVW_LEVEL
// set to its number and KVW_NS to its namespace:
//
//   #include "levels.h"
//   namespace KVW_NS {
//   namespace {            // everything that is not called from other files
//   ...
//   }
//   int32_t decode(...) { ... }
//   }
//
// and NAME.cpp, compiled for any machine, declares them and picks one:
//
//   #define DECLARE(ns) namespace ns { int32_t decode(const float* q, int64_t n); }
//   KVW_EACH_LEVEL(DECLARE)
//   KVW_EXPORT int32_t kvw_decode(int32_t level, const float* q, int64_t n) { KVW_DISPATCH(level, decode(q, n)) }
//
// The trap. Whatever is inline or a template and has external linkage is emitted by every object that uses it, under
// one name; the linker keeps any one of them. If that is the one compiled for AVX-512, a machine without it dies in code
// of the portable level. So objects of levels hold nothing of that kind: own code lies in KVW_NS, what is inline in an
// anonymous namespace inside it (headers for kernels too), and of the standard library they use only what leaves no
// symbol behind: types, memcpy, std::min where it is inlined; no containers, no std::function, no std::sort. Buffers
// come from the caller or from malloc. Nor do they hold static objects with constructors, which run when the library is
// loaded. no_shared_code.cmake checks the objects.

#pragma once

#include <cstdint>

// Every exported function is called kvw_WHAT, takes the level first, and returns one of these.
enum : int32_t {
  KVW_SERVED = 0,
  KVW_NOT_SERVED = -1,  // the arguments are none that this function serves: torch does
  KVW_NO_LEVEL = -2,    // the library was built without that level
};

enum : int32_t { KVW_PORTABLE = 0, KVW_AVX2 = 1, KVW_AVX512 = 2, KVW_AMX = 3 };

#define KVW_EXPORT extern "C" __attribute__((visibility("default")))

#if defined(KVW_HAS_AVX2)
#define KVW_IF_AVX2(...) __VA_ARGS__
#else
#define KVW_IF_AVX2(...)
#endif
#if defined(KVW_HAS_AVX512)
#define KVW_IF_AVX512(...) __VA_ARGS__
#else
#define KVW_IF_AVX512(...)
#endif
#if defined(KVW_HAS_AMX)
#define KVW_IF_AMX(...) __VA_ARGS__
#else
#define KVW_IF_AMX(...)
#endif

#define KVW_EACH_LEVEL(X) X(kvw_portable) KVW_IF_AVX2(X(kvw_avx2)) KVW_IF_AVX512(X(kvw_avx512)) KVW_IF_AMX(X(kvw_amx))

#define KVW_DISPATCH(level, ...)                                         \
  switch (level) {                                                       \
    case KVW_PORTABLE:                                                   \
      return kvw_portable::__VA_ARGS__;                                  \
    KVW_IF_AVX2(case KVW_AVX2 : return kvw_avx2::__VA_ARGS__;)           \
    KVW_IF_AVX512(case KVW_AVX512 : return kvw_avx512::__VA_ARGS__;)     \
    KVW_IF_AMX(case KVW_AMX : return kvw_amx::__VA_ARGS__;)              \
    default:                                                             \
      return KVW_NO_LEVEL;                                               \
  }
