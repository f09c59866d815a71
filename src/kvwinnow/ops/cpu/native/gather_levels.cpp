#include <cstring>

#include "gather.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace KVW_NS {
namespace {

constexpr int64_t kRows = 512;        // of one head, one piece of work
constexpr int64_t kLine = 64;         // bytes
constexpr int64_t kFlight = 4096;     // bytes on their way from memory while others are copied; 16 to 64 rows
constexpr int64_t kAlone = 1 << 18;   // bytes that are not worth a second thread
constexpr int64_t kStream = 1 << 21;  // bytes of output that would push more out of the caches than they are worth

inline void fetch(uintptr_t row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(reinterpret_cast<const char*>(row + uintptr_t(at)));
}

// Without reading the lines that are overwritten. Rows and their places are multiples of kVector.
#if defined(__AVX512F__)
constexpr int64_t kVector = 64;
inline void stream(char* to, const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kVector)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
}
inline void finish() { _mm_sfence(); }
#elif defined(__AVX2__)
constexpr int64_t kVector = 32;
inline void stream(char* to, const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kVector)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at)));
}
inline void finish() { _mm_sfence(); }
#elif defined(__SSE2__)
constexpr int64_t kVector = 16;
inline void stream(char* to, const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kVector)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
}
inline void finish() { _mm_sfence(); }
#else
constexpr int64_t kVector = 16;
inline void stream(char* to, const char* from, int64_t bytes) { memcpy(to, from, size_t(bytes)); }
inline void finish() {}
#endif

struct Any {
  int64_t bytes;
  void operator()(char* to, const char* from) const { memcpy(to, from, size_t(bytes)); }
};

struct Streamed {
  int64_t bytes;
  void operator()(char* to, const char* from) const { stream(to, from, bytes); }
};

template <int N>
struct Fixed {
  void operator()(char* to, const char* from) const { memcpy(to, from, N); }
};

// Rows [first, last) of one head; false if an index is none of a row. Memory answers in about as long as it takes to copy
// ``ahead`` rows.
template <class Copy>
bool piece(const Gather& g, int64_t b, int64_t h, int64_t first, int64_t last, int64_t ahead, Copy copy) {
  const char* src = g.src + b * g.src_batch + h * g.src_head;
  char* dst = g.dst + b * g.dst_batch + h * g.dst_head;
  const int64_t* index = g.index + (b * g.heads + h) * g.keep;
  bool wrong = false;
  for (int64_t i = first; i < last; ++i) wrong |= uint64_t(index[i]) >= uint64_t(g.src_rows);
  if (wrong) return false;
  for (int64_t i = first; i < last; ++i) {
    const int64_t next = index[i + ahead < g.keep ? i + ahead : i];
    fetch(uintptr_t(src) + uintptr_t(next) * uintptr_t(g.src_row), g.bytes);  // an address that is none does no harm
    copy(dst + i * g.dst_row, src + index[i] * g.src_row);
  }
  finish();
  return true;
}

template <class Copy>
int32_t run(const Gather& g, int32_t threads, Copy copy) {
  const int64_t pieces = (g.keep + kRows - 1) / kRows, all = g.batch * g.heads * pieces;
  int32_t wrong = 0;
  const int64_t ahead = g.bytes <= kFlight / 64 ? 64 : g.bytes >= kFlight / 16 ? 16 : kFlight / g.bytes;
  if (g.batch * g.heads * g.keep * g.bytes < kAlone) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : wrong)
  for (int64_t work = 0; work < all; ++work) {
    const int64_t first = work % pieces * kRows, last = first + kRows < g.keep ? first + kRows : g.keep;
    const int64_t head = work / pieces;
    wrong |= !piece(g, head / g.heads, head % g.heads, first, last, ahead, copy);
  }
  (void)threads;
  return wrong ? KVW_NOT_SERVED : KVW_SERVED;
}

bool streams(const Gather& g) {
  if (g.batch * g.heads * g.keep * g.bytes < kStream) return false;
  const int64_t together = int64_t(reinterpret_cast<uintptr_t>(g.dst)) | g.dst_batch | g.dst_head | g.dst_row | g.bytes;
  return together % kVector == 0;
}

}  // namespace

int32_t gather_rows(const Gather& g, int32_t threads) {
  if (streams(g)) return run(g, threads, Streamed{g.bytes});
  switch (g.bytes) {  // scales, and statistics of slots
    case 1: return run(g, threads, Fixed<1>());
    case 2: return run(g, threads, Fixed<2>());
    case 4: return run(g, threads, Fixed<4>());
    case 8: return run(g, threads, Fixed<8>());
    case 16: return run(g, threads, Fixed<16>());
    case 32: return run(g, threads, Fixed<32>());
    case 64: return run(g, threads, Fixed<64>());
    case 128: return run(g, threads, Fixed<128>());
    default: return run(g, threads, Any{g.bytes});
  }
}

}  // namespace KVW_NS
