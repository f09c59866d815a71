// Products of a few vectors with matrices, as fast as memory gives the matrices.
//
// One row after the other, a core gets little more than half of what its memory gives: the processor looks ahead within a
// page of 4 KiB, begins anew in the next one, and waits for too few lines at once. So a thread reads its rows in STREAMS
// places far from each other, and asks for what it will need a little later.

#include "floats.h"
#include "linear.h"

namespace KVW_NS {
namespace {

constexpr int STREAMS = KVW_LEVEL >= 2 ? 8 : 4;
constexpr int TOGETHER = ALL / STREAMS;  // vectors that a row is multiplied with while it lies in registers
constexpr int STEP = 2 * LANES;          // elements
constexpr int64_t AHEAD = 1024;          // bytes
constexpr int64_t ALONE = 1 << 16;       // bytes that are not worth a second thread
constexpr int64_t PORTION = 1 << 20;     // bytes of one piece of work, if there are more than enough for all threads

// Elements of a step come as two vectors: of bfloat16, two of which lie in a word, even ones and odd ones; else the first
// half and the second.
template <int KIND>
KVW_INLINE void two(const uint8_t* from, F16& a, F16& b) {
  if constexpr (KIND == BFLOAT16) {
    const U16 words = load<U16>(from);
    a = bits(words << 16), b = bits(words & 0xffff0000u);
  } else if constexpr (KIND == FLOAT16) {
    a = from_float16(from), b = from_float16(from + 2 * LANES);
  } else {
    a = load<F16>(from), b = load<F16>(from + 4 * LANES);
  }
}

// The sums of R rows, ``gap`` bytes apart, with M vectors: out[m][r].
template <int KIND, int R, int M>
KVW_INLINE void sums_of(const uint8_t* weights, int64_t gap, const float* x, int64_t width, float (*out)[STREAMS]) {
  constexpr int64_t SIZE = size_of(KIND);
  F16 acc[R][M];
  KVW_UNROLL for (int r = 0; r < R; r++) KVW_UNROLL for (int m = 0; m < M; m++) acc[r][m] = F16{};
  for (int64_t k = 0; k < width; k += STEP) {
    F16 first[M], second[M];
    KVW_UNROLL for (int m = 0; m < M; m++) {
      first[m] = load<F16>(x + m * width + k), second[m] = load<F16>(x + m * width + k + LANES);
    }
    KVW_UNROLL for (int r = 0; r < R; r++) {
      const uint8_t* from = weights + r * gap + k * SIZE;
      KVW_UNROLL for (int64_t line = 0; line < STEP * SIZE; line += 64) __builtin_prefetch(from + AHEAD + line);
      F16 a, b;
      two<KIND>(from, a, b);
      KVW_UNROLL for (int m = 0; m < M; m++) acc[r][m] += a * first[m], acc[r][m] += b * second[m];
    }
  }
  KVW_UNROLL for (int r = 0; r < R; r++) KVW_UNROLL for (int m = 0; m < M; m++) out[m][r] = sum(acc[r][m]);
}

// R rows with all vectors: while they are in the caches, with some vectors after the others.
template <int KIND, int R>
void rows(const Linear& call, const Matrix& matrix, int64_t row, int64_t apart, const float* x) {
  const uint8_t* weights = matrix.weights + row * matrix.stride;
  const int64_t gap = apart * matrix.stride, size = size_of(KIND);
  for (int64_t m = 0; m < call.vectors;) {
    float made[TOGETHER][STREAMS];
    int64_t count = TOGETHER;
    if (m + TOGETHER <= call.vectors) {
      sums_of<KIND, R, TOGETHER>(weights, gap, x + m * call.width, call.width, made);
    } else {
      count = 1;
      sums_of<KIND, R, 1>(weights, gap, x + m * call.width, call.width, made);
    }
    for (int64_t i = 0; i < count; i++, m++)
      for (int r = 0; r < R; r++) {
        const int64_t n = row + r * apart;
        float y = made[i][r], bias[LANES];
        if (matrix.bias) take(matrix.bias + n * size, KIND, 1, bias), y += bias[0];
        give(&y, 1, matrix.out + (m * matrix.count + n) * size, KIND);
      }
  }
}

template <int KIND>
void share(const Linear& call, const Matrix& matrix, const float* x, int64_t part, int64_t parts) {
  int64_t row = matrix.count * part / parts;
  const int64_t last = matrix.count * (part + 1) / parts, apart = (last - row) / STREAMS;
  for (int64_t i = 0; i < apart; i++) rows<KIND, STREAMS>(call, matrix, row + i, apart, x);
  for (row += apart * STREAMS; row < last; row++) rows<KIND, 1>(call, matrix, row, 1, x);
}

template <int KIND>
int32_t run(const Linear& call, const Matrix* matrices, float* x) {
  constexpr int64_t SIZE = size_of(KIND);
  for (int64_t i = 0; i < call.vectors * call.width; i += STEP) {
    F16 a, b;
    two<KIND>(call.x + i * SIZE, a, b);
    store(x + i, a), store(x + i + LANES, b);
  }
  int64_t bytes = 0;
  for (int i = 0; i < call.matrices; i++) bytes += matrices[i].count * call.width * SIZE;
  const int64_t threads = bytes < ALONE ? 1 : call.threads;
  // The same number for all, so that they end together; more, so that one that is held up leaves some to the others.
  const int64_t portions = bytes / (threads * PORTION), parts = threads * (portions > 1 ? portions : 1);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t part = 0; part < parts; part++)
    for (int i = 0; i < call.matrices; i++) share<KIND>(call, matrices[i], x, part, parts);
  return KVW_SERVED;
}

}  // namespace

int32_t linear(const Linear& call, const Matrix* matrices, float* x) {
  switch (call.kind) {
    case FLOAT32: return run<FLOAT32>(call, matrices, x);
    case BFLOAT16: return run<BFLOAT16>(call, matrices, x);
    case FLOAT16: return run<FLOAT16>(call, matrices, x);
    default: return KVW_NOT_SERVED;
  }
}

}  // namespace KVW_NS
