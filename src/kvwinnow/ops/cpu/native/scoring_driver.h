// What all levels share: which keys meet which queries, in which order, and on which thread.
//
// Included inside an anonymous namespace by scoring_levels.cpp and scoring_amx.cpp, each of which has a Kernel: how
// a chunk's queries are packed, and how a block of keys is multiplied with them.
//
// The query heads of one KV head and their queries make up* columns*; a chunk of CHUNK columns is packed once and
// meets a panel of keys, KEYS at a time, PAIR columns at a time. A key's sum is kept in LANES partial sums, to which
// its columns are added in the same order whatever the key, the panel and the thread: equal keys that see the same
// queries have bit-equal sums, and no result depends on the number of threads.

constexpr int LANES = 16;
constexpr int KEYS = 32;
constexpr int PAIR = 2 * LANES;
constexpr int QUERY_BLOCK = 64;  // queries of one head that stand side by side as columns
constexpr int64_t PANEL = 1 << 19;  // bytes of keys and of their sums that stay in a cache while all columns pass
constexpr int64_t SPLIT = 1024;  // keys of one partial log-sum-exp
constexpr int64_t MANY = 4096;   // columns of one KV head from which on threads share them and not the keys
constexpr int TURN = 8;          // chunks that share the passage of a panel's keys
constexpr float LOG2E = 1.44269504088896341f;
constexpr float LN2 = 0.693147180559945309f;
constexpr float LEAST = -125.5f;  // 2^LEAST = exp(-87): no denormal arises, and it adds nothing to a sum
constexpr float LOWEST = -3.0e38f;
constexpr int32_t NEVER = INT32_MAX;

enum Sight { HIDDEN, MASKED, FULL };

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t parts(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t size_of(int32_t dtype) { return dtype == KVW_FLOAT32 ? 4 : 2; }

// KEYS keys' positions, NEVER for empty ones and for the padding of the last block.
struct alignas(64) KeyBlock {
  int32_t where[KEYS];
  int32_t first, last;  // least and most of them; NEVER for ``first`` if all are empty

  void fill(const int32_t* positions, int64_t count) {
    first = NEVER;
    last = -1;
    for (int i = 0; i < KEYS; i++) {
      where[i] = i < count && positions[i] >= 0 ? positions[i] : NEVER;
      if (where[i] < first) first = where[i];
      if (where[i] > last) last = where[i];
    }
  }
};

// CHUNK columns: where their queries lie, what they see, and what is added to their logits.
template <int CHUNK>
struct alignas(64) Columns {
  float bias[CHUNK];      // added to log2(e) * logit: the negative log-sum-exp, and the shift if nothing is capped
  float shift[CHUNK];     // added to the scaled product before it is capped
  int32_t last[CHUNK];    // position of the query, -1: there is none
  int32_t before[CHUNK];  // position of the last key that is out of a sliding layer's reach, -1: none
  const char* query[CHUNK];
  int64_t index[CHUNK];  // of lse, shift and out within the KV head
  int32_t low[CHUNK / PAIR], high[CHUNK / PAIR];  // least and most of ``last``, -1 where there is no query
  int32_t reach[CHUNK / PAIR];  // least of ``before``
  int32_t sure[CHUNK / PAIR];   // most of ``before``
  int pairs;  // that have any column

  void fill(const kvw_scoring& a, int64_t batch, int64_t head, int64_t start) {
    const int64_t total = a.group * a.queries, base = (batch * a.kv_heads + head) * total;
    const int32_t* positions = a.query_positions + batch * a.queries;
    const char* q = static_cast<const char*>(a.q) +
                    (batch * a.q_strides[0] + head * a.group * a.q_strides[1]) * size_of(a.q_dtype);
    pairs = static_cast<int>(parts(least(CHUNK, total - start), PAIR));
    int64_t block = start / (a.group * QUERY_BLOCK) * QUERY_BLOCK, width = least(QUERY_BLOCK, a.queries - block);
    int64_t g = (start - block * a.group) / width, i = (start - block * a.group) % width;
    for (int j = 0; j < pairs * PAIR; j++) {
      if (start + j < total) {
        put(a, j, q, g, block + i, base, positions[block + i]);
      } else {
        bias[j] = shift[j] = 0.0f;
        last[j] = before[j] = -1;
        query[j] = nullptr;
        index[j] = -1;
      }
      if (++i < width) continue;
      i = 0;
      if (++g < a.group) continue;
      g = 0;
      block += QUERY_BLOCK;
      width = least(QUERY_BLOCK, a.queries - block);
    }
    for (int p = 0; p < pairs; p++) {
      low[p] = reach[p] = NEVER;
      high[p] = sure[p] = -1;
      for (int j = p * PAIR; j < (p + 1) * PAIR; j++) {
        if (last[j] < low[p]) low[p] = last[j];
        if (last[j] > high[p]) high[p] = last[j];
        // A column without a query is out of every key's reach and hides nothing from the others.
        if (last[j] >= 0 && before[j] < reach[p]) reach[p] = before[j];
        if (before[j] > sure[p]) sure[p] = before[j];
      }
    }
  }

  // Column j is the g-th head's i-th query.
  void put(const kvw_scoring& a, int j, const char* q, int64_t g, int64_t i, int64_t base, int32_t position) {
    query[j] = q + (g * a.q_strides[1] + i * a.q_strides[2]) * size_of(a.q_dtype);
    index[j] = g * a.queries + i;
    last[j] = position < 0 ? -1 : position;
    before[j] = a.sliding > 0 && position >= a.sliding ? position - a.sliding : -1;
    const float moved = a.shift == nullptr ? 0.0f : a.shift[base + index[j]] * a.scale;
    shift[j] = a.softcap > 0.0f ? moved : 0.0f;
    bias[j] = a.softcap > 0.0f ? 0.0f : moved * LOG2E;
    if (a.lse == nullptr) return;
    const float lse = a.lse[base + index[j]];
    if (lse == -INFINITY) {
      last[j] = -1;
    } else {
      bias[j] -= lse * LOG2E;
    }
  }

  Sight sight(int p, const KeyBlock& keys) const {
    if (high[p] < keys.first || (keys.last != NEVER && reach[p] >= keys.last)) return HIDDEN;
    return low[p] >= keys.last && sure[p] < keys.first ? FULL : MASKED;
  }

  bool sees(const KeyBlock* blocks, int64_t count) const {
    for (int64_t i = 0; i < count; i++)
      for (int p = 0; p < pairs; p++)
        if (sight(p, blocks[i]) != HIDDEN) return true;
    return false;
  }
};

// Memory of one thread, carved from one allocation.
struct Arena {
  char* next;

  // Bytes that ``take`` uses.
  template <class T>
  static int64_t room(int64_t count) {
    return parts(count * static_cast<int64_t>(sizeof(T)), 64) * 64;
  }

  template <class T>
  T* take(int64_t count) {
    T* here = reinterpret_cast<T*>(next);
    next += room<T>(count);
    return here;
  }
};

inline int thread_index() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

inline int thread_count(const kvw_scoring& a, int64_t items) {
  return static_cast<int>(most(1, least(a.threads, items)));
}

inline const char* key_row(const kvw_scoring& a, int64_t batch, int64_t head, int64_t key) {
  return static_cast<const char*>(a.k) +
         (batch * a.k_strides[0] + head * a.k_strides[1] + key * a.k_strides[2]) * size_of(a.k_dtype);
}

inline const int32_t* key_places(const kvw_scoring& a, int64_t batch, int64_t head, int64_t key) {
  return a.key_positions + batch * a.position_strides[0] + head * a.position_strides[1] + key;
}

inline void fill_blocks(const kvw_scoring& a, int64_t batch, int64_t head, int64_t start, int64_t stop,
                        KeyBlock* blocks) {
  for (int64_t key = start; key < stop; key += KEYS)
    blocks[(key - start) / KEYS].fill(key_places(a, batch, head, key), stop - key);
}

// Keys [start, stop) as rows at an even distance, padded with zeros to whole blocks of KEYS. They are copied where they
// are no such rows, or lie so far apart, with other heads' between them, that they share the few sets of a cache.
inline const char* key_rows(const kvw_scoring& a, int64_t batch, int64_t head, int64_t start, int64_t stop, char* copy,
                            int64_t* stride) {
  const char* rows = key_row(a, batch, head, start);
  const int64_t size = a.dim * size_of(a.k_dtype), apart = a.k_strides[2] * size_of(a.k_dtype), count = stop - start;
  *stride = size;
  if (apart == size && count % KEYS == 0) return rows;
  for (int64_t i = 0; i < count; i++) memcpy(copy + i * size, rows + i * apart, static_cast<size_t>(size));
  memset(copy + count * size, 0, static_cast<size_t>((parts(count, KEYS) * KEYS - count) * size));
  return copy;
}

// How many keys a panel holds, whole blocks of them.
inline int64_t panel_keys(const kvw_scoring& a) {
  const int64_t keys = most(PANEL / (a.dim * size_of(a.k_dtype) + LANES * 4), 8 * KEYS);
  return parts(least(keys, a.keys), KEYS) * KEYS;
}

// The same, or fewer where threads would go without work.
inline int64_t shared_panel_keys(const kvw_scoring& a) {
  const int64_t share = a.threads < 2 ? a.keys : a.keys * a.batch * a.kv_heads / (8 * int64_t{a.threads});
  return least(panel_keys(a), parts(most(8 * KEYS, share), KEYS) * KEYS);
}

template <class Kernel>
int32_t run_column_sums(const kvw_scoring& a) {
  constexpr int CHUNK = Kernel::CHUNK;
  const int64_t panel = shared_panel_keys(a), panels = parts(a.keys, panel), heads = a.batch * a.kv_heads;
  const int64_t items = panels * heads, columns = a.group * a.queries;
  const int threads = thread_count(a, items);
  const int64_t bytes = Arena::room<float>(panel * LANES) + Arena::room<KeyBlock>(panel / KEYS) +
                        Arena::room<Columns<CHUNK>>(1) + Arena::room<char>(panel * a.dim * size_of(a.k_dtype)) +
                        Kernel::bytes(a, 1);
  char* memory = static_cast<char*>(aligned_alloc(64, static_cast<size_t>(bytes * threads)));
  if (memory == nullptr) return KVW_NOT_SERVED;
#pragma omp parallel num_threads(threads)
  {
    Arena arena{memory + bytes * thread_index()};
    float* sums = arena.take<float>(panel * LANES);
    KeyBlock* blocks = arena.take<KeyBlock>(panel / KEYS);
    Columns<CHUNK>* chunk = arena.take<Columns<CHUNK>>(1);
    char* copy = arena.take<char>(panel * a.dim * size_of(a.k_dtype));
    Kernel kernel(a, arena, 1);
    // The first panels are seen by the most queries, so the longest items come first.
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < items; item++) {
      const int64_t start = item / heads * panel, stop = least(start + panel, a.keys);
      const int64_t batch = item % heads / a.kv_heads, head = item % a.kv_heads, count = parts(stop - start, KEYS);
      int64_t stride;
      const char* rows = key_rows(a, batch, head, start, stop, copy, &stride);
      fill_blocks(a, batch, head, start, stop, blocks);
      memset(sums, 0, static_cast<size_t>(count * KEYS * LANES * 4));
      for (int64_t column = 0; column < columns; column += CHUNK) {
        chunk->fill(a, batch, head, column);
        if (!chunk->sees(blocks, count)) continue;
        kernel.pack(*chunk, 0);
        for (int64_t i = 0; i < count; i++) {
          kernel.add_sums(*chunk, blocks[i], rows + i * KEYS * stride, stride, sums + i * KEYS * LANES);
        }
        kernel.finish_sums();
      }
      float* out = a.out + (batch * a.kv_heads + head) * a.keys;
      for (int64_t key = start; key < stop; key++) {
        float lanes[LANES];
        memcpy(lanes, sums + (key - start) * LANES, sizeof lanes);
        for (int half = LANES / 2; half > 0; half /= 2)
          for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
        out[key] = lanes[0];
      }
    }
  }
  free(memory);
  return KVW_SERVED;
}

// The largest logit of each column so far, times log2(e), and the sum of 2^(that of any less the largest).
template <int CHUNK>
struct alignas(64) Tops {
  float top[CHUNK];
  float sum[CHUNK];
};

// Writes the log-sum-exp of a chunk's columns over the parts into which the keys were split. Sums are 0 or more, or NaN.
template <int CHUNK>
void write_log_sum_exp(const kvw_scoring& a, const Columns<CHUNK>& chunk, const Tops<CHUNK>* tops,
                       int64_t splits, int64_t apart, int64_t pair) {
  float* out = a.out + pair * a.group * a.queries;
  for (int j = 0; j < chunk.pairs * PAIR; j++) {
    if (chunk.index[j] < 0) continue;
    float top = LOWEST, sum = 0.0f;
    for (int64_t s = 0; s < splits; s++)
      if (tops[s * apart].sum[j] != 0.0f && tops[s * apart].top[j] > top) top = tops[s * apart].top[j];
    for (int64_t s = 0; s < splits; s++)
      if (tops[s * apart].sum[j] != 0.0f) sum += tops[s * apart].sum[j] * exp2f(tops[s * apart].top[j] - top);
    out[chunk.index[j]] = sum != 0.0f ? (top + log2f(sum)) * LN2 : -INFINITY;
  }
}

// Threads share the columns where these are many, else also the keys, in parts whose number is that of no thread.
template <class Kernel>
int32_t run_log_sum_exp(const kvw_scoring& a) {
  constexpr int CHUNK = Kernel::CHUNK;
  using Chunk = Columns<CHUNK>;
  using Top = Tops<CHUNK>;
  const int64_t columns = a.group * a.queries, heads = a.batch * a.kv_heads;
  const int64_t chunks = parts(columns, CHUNK), turns = parts(chunks, TURN);
  const int64_t split = columns >= MANY ? most(a.keys, 1) : SPLIT, splits = most(1, parts(a.keys, split));
  const int64_t panel = least(panel_keys(a), parts(split, KEYS) * KEYS), items = heads * turns * splits;
  const int threads = thread_count(a, items);
  const int64_t bytes = Arena::room<KeyBlock>(panel / KEYS) + Arena::room<Chunk>(TURN) +
                        Arena::room<char>(panel * a.dim * size_of(a.k_dtype)) + Kernel::bytes(a, TURN);
  const int64_t partial = heads * splits * chunks * static_cast<int64_t>(sizeof(Top));
  char* memory = static_cast<char*>(aligned_alloc(64, static_cast<size_t>(partial + bytes * threads)));
  if (memory == nullptr) return KVW_NOT_SERVED;
  Top* tops = reinterpret_cast<Top*>(memory);
#pragma omp parallel num_threads(threads)
  {
    Arena arena{memory + partial + bytes * thread_index()};
    KeyBlock* blocks = arena.take<KeyBlock>(panel / KEYS);
    Chunk* own = arena.take<Chunk>(TURN);
    char* copy = arena.take<char>(panel * a.dim * size_of(a.k_dtype));
    Kernel kernel(a, arena, TURN);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < items; item++) {
      // The last queries see the most keys, so the longest items come first.
      const int64_t first = (turns - 1 - item / (heads * splits)) * TURN, part = item % splits;
      const int64_t pair = item / splits % heads, batch = pair / a.kv_heads, head = pair % a.kv_heads;
      const int count = static_cast<int>(least(TURN, chunks - first));
      Top* top = tops + (pair * splits + part) * chunks + first;
      for (int c = 0; c < count; c++) {
        own[c].fill(a, batch, head, (first + c) * CHUNK);
        kernel.pack(own[c], c);
        for (int j = 0; j < CHUNK; j++) {
          top[c].top[j] = LOWEST;
          top[c].sum[j] = 0.0f;
        }
      }
      const int64_t end = least((part + 1) * split, a.keys);
      for (int64_t start = part * split; start < end; start += panel) {
        const int64_t stop = least(start + panel, end), size = parts(stop - start, KEYS);
        int64_t stride;
        const char* rows = key_rows(a, batch, head, start, stop, copy, &stride);
        fill_blocks(a, batch, head, start, stop, blocks);
        for (int c = 0; c < count; c++) {
          for (int64_t i = 0; i < size; i++) {
            kernel.add_tops(own[c], c, blocks[i], rows + i * KEYS * stride, stride, top[c]);
          }
        }
      }
    }
#pragma omp for schedule(static)
    for (int64_t item = 0; item < heads * chunks; item++) {
      const int64_t pair = item / chunks, chunk = item % chunks;
      own->fill(a, pair / a.kv_heads, pair % a.kv_heads, chunk * CHUNK);
      write_log_sum_exp(a, *own, tops + pair * splits * chunks + chunk, splits, chunks, pair);
    }
  }
  free(memory);
  return KVW_SERVED;
}
