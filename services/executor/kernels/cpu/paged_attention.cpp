// Paged attention on a CPU: one call serves prefill chunks, decodes and any mix of them.
//
// Layouts (block_size a multiple of 16, D = head_dim a multiple of 16):
//   query, out   [T, heads, D]                         rows of all sequences, one after another
//   key cache    [blocks, kv_heads, D, block_size]     transposed, so that one vector holds 16 neighbouring positions
//   value cache  [blocks, kv_heads, block_size, D]
//
// Every (row, head) is reduced over its positions in one fixed order: segments of kSegment positions from position 0
// on, inside a segment 16 positions at a time, then the segments in order. Neither the batch, nor the chunk cut, nor the
// number of threads changes that order, so a row's bits depend on its own sequence alone. Positions past the row's own
// are masked to a weight of exactly zero, and a wholly masked group of 16 is skipped, which leaves the same bits.
#include <vector>

#include "vector.h"

namespace {

constexpr int kSegment = 256;
constexpr int kTile = 8;  // (query row, head of the group) pairs that share one read of the keys and values

constexpr int64_t kWorthThreads = 1 << 19;  // multiplications, about 30 us: below that waking threads costs more

struct Partial { float peak, total; };

// One segment of one sequence and one kv head, as N (row, head) pairs see it. position[i] is pair i's own position,
// oldest[i] the first one it may see.
template <typename T>
struct Segment {
  const T* keys; const T* values; const int32_t* table; const int* position; const int* oldest;
  int block_size; int64_t block_stride; int first, last;

  // Where the sixteen positions from pos on lie, a multiple of 16: all in one block.
  int64_t block(int pos) const { return table[pos / block_size] * block_stride; }
};

// Scores of G groups of sixteen positions from first + at on: sums over D in order, each group's on its own, so that G
// only says how much is under way at once.
template <typename T, int D, int N, int G>
inline void score_groups(const Segment<T>& s, const float (*q)[D], int at, float (*score)[kSegment]) {
  // Blocks lie anywhere in memory, and each is too short for the hardware to foresee the next: the keys of the next
  // groups and the values of these, which are read last, are asked for meanwhile. Tiles of many pairs compute longer
  // than they wait.
  constexpr bool kAhead = N <= 4;
  const T* keys[G]; const T* next_keys[G]; const T* values[G];
  vec sum[G][N];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    const int pos = s.first + at + g * kWidth;
    keys[g] = s.keys + s.block(pos) + pos % s.block_size;
    if constexpr (kAhead) {
      const int next = pos + G * kWidth < s.last ? pos + G * kWidth : pos;
      next_keys[g] = s.keys + s.block(next) + next % s.block_size;
      values[g] = s.values + s.block(pos) + int64_t(pos % s.block_size) * D;
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) sum[g][i] = vec{};
  }
  for (int d = 0; d < D; ++d) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const vec key = load(keys[g] + int64_t(d) * s.block_size);
      if (kAhead && (sizeof(T) == 4 || d % 2 == 0)) {
        __builtin_prefetch(next_keys[g] + int64_t(d) * s.block_size);
        __builtin_prefetch(values[g] + d * kWidth);
      }
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) sum[g][i] += key * q[i][d];
    }
  }
  const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      const ivec pos = lane + (s.first + at + g * kWidth);
      const ivec masked = (pos > ivec{} + s.position[i]) | (pos < ivec{} + s.oldest[i]);
      store(&score[i][at + g * kWidth], masked ? vec{} - INFINITY : sum[g][i]);
    }
}

// acc[i][D] = the values of the segment weighted by score[i], for pairs from..from + M - 1.
template <typename T, int D, int M>
inline void weigh(const Segment<T>& s, int from, const float (*score)[kSegment], float (*acc)[D]) {
  constexpr int kVecs = D / kWidth;
  vec out[M][kVecs];
  int seen_from = 0, seen_to = s.last - 1;  // by all M
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    seen_from = std::max(seen_from, s.oldest[from + i]);
    seen_to = std::min(seen_to, s.position[from + i]);
#pragma GCC unroll 16
    for (int c = 0; c < kVecs; ++c) out[i][c] = vec{};
  }
  for (int group = s.first; group < s.last; group += kWidth) {
    const T* v = s.values + s.block(group) + int64_t(group % s.block_size) * D;
    const int end = std::min(group + kWidth, s.last);
    const bool all_seen = seen_from <= group && end - 1 <= seen_to;
    for (int pos = group; pos < end; ++pos, v += D) {
      vec value[kVecs];
#pragma GCC unroll 16
      for (int c = 0; c < kVecs; ++c) value[c] = load(v + c * kWidth);
      if (all_seen) {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
          for (int c = 0; c < kVecs; ++c) out[i][c] += value[c] * score[from + i][pos - s.first];
      } else {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i)
          if (s.oldest[from + i] <= pos && pos <= s.position[from + i])  // what lies in other slots may be anything
#pragma GCC unroll 16
            for (int c = 0; c < kVecs; ++c) out[i][c] += value[c] * score[from + i][pos - s.first];
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
    for (int c = 0; c < kVecs; ++c) store(acc[from + i] + c * kWidth, out[i][c]);
}

// Turns one pair's scores into weights. This and merge are never inlined: one piece of code rounds for tiles of every
// size, or the compiler may fuse other products with additions in one than in another.
__attribute__((noinline)) Partial weights_of(float* score, int live) {
  const int end = live <= 0 ? 0 : (live + kWidth - 1) / kWidth * kWidth;
  vec top = vec{} - INFINITY;
  for (int at = 0; at < end; at += kWidth) { const vec s = load(score + at); top = s > top ? s : top; }
  Partial partial = {end ? reduce_max(top) : -INFINITY, 0.0f};
  if (partial.peak == -INFINITY) return partial;  // it sees nothing of this segment
  vec sum = {};
  for (int at = 0; at < end; at += kWidth) {
    const vec weight = exp_nonpositive(load(score + at) - partial.peak);
    sum += weight;
    store(score + at, weight);
  }
  partial.total = reduce_sum(sum);
  return partial;
}

// Adds a segment's values to one pair's sum so far.
template <int D>
__attribute__((noinline)) void merge(const Partial& partial, const float* acc, Partial* all, float* sum) {
  if (partial.peak == -INFINITY) return;
  const float top = std::max(all->peak, partial.peak);
  const float old_weight = all->peak == -INFINITY ? 0.0f : std::exp(all->peak - top);
  const float new_weight = std::exp(partial.peak - top);
  for (int d = 0; d < D; ++d) sum[d] = sum[d] * old_weight + acc[d] * new_weight;
  *all = {top, all->total * old_weight + partial.total * new_weight};
}

// acc[i][D] receives the weighted values of the segment, partial[i] their peak and total weight.
template <typename T, int D, int N>
void segment(const Segment<T>& s, const float (*q)[D], float (*acc)[D], Partial* partial) {
  constexpr int kGroups = N <= 4 ? 4 : 2;                  // enough sums under way to hide an addition's latency
  constexpr int kPairs = std::max(1, 16 / (D / kWidth));  // what fits the registers
  alignas(64) float score[N][kSegment];
  const int length = s.last - s.first, padded = (length + kWidth - 1) / kWidth * kWidth;
  int at = 0;
  for (; at + kGroups * kWidth <= padded; at += kGroups * kWidth) score_groups<T, D, N, kGroups>(s, q, at, score);
  for (; at < padded; at += kWidth) score_groups<T, D, N, 1>(s, q, at, score);
  for (int i = 0; i < N; ++i) partial[i] = weights_of(score[i], std::min(s.position[i] + 1 - s.first, length));
  constexpr int kWhole = N / kPairs * kPairs;
  for (int i = 0; i < kWhole; i += kPairs) weigh<T, D, kPairs>(s, i, score, acc);
  if constexpr (kWhole < N) weigh<T, D, N - kWhole>(s, kWhole, score, acc);
}

struct Call {
  const void* query; const void* keys; const void* values; void* out;
  const int32_t* tables; const int32_t* starts; const int32_t* lens;
  int64_t table_width; int sequences, heads, kv_heads, block_size, window; float scale;
};

// One tile: N pairs from first_pair on, of sequence s and one kv head.
template <typename T, int D, int N>
void tile(const Call& c, int s, int kv_head, int first_pair) {
  const int group = c.heads / c.kv_heads;
  const int rows = c.starts[s + 1] - c.starts[s];
  const T* query = static_cast<const T*>(c.query);
  T* out = static_cast<T*>(c.out);
  const int64_t head_stride = int64_t(c.block_size) * D, block_stride = head_stride * c.kv_heads;
  const T* keys = static_cast<const T*>(c.keys) + kv_head * head_stride;
  const T* values = static_cast<const T*>(c.values) + kv_head * head_stride;
  alignas(64) float q[N][D], acc[N][D], sum[N][D];
  int position[N] = {}, oldest[N] = {};
  int64_t offset[N];
  Partial all[N];
  for (int i = 0; i < N; ++i) {
    const int row = (first_pair + i) / group, head = kv_head * group + (first_pair + i) % group;
    offset[i] = (int64_t(c.starts[s] + row) * c.heads + head) * D;
    for (int d = 0; d < D; ++d) q[i][d] = widen(query[offset[i] + d]) * c.scale;
    position[i] = c.lens[s] - rows + row;
    oldest[i] = c.window ? std::max(0, position[i] - c.window + 1) : 0;
    all[i] = {-INFINITY, 0.0f};
    std::memset(sum[i], 0, sizeof sum[i]);
  }
  const int end = position[N - 1] + 1;
  Partial partial[N];
  for (int first = oldest[0] / kSegment * kSegment; first < end; first += kSegment) {
    segment<T, D, N>({keys, values, c.tables + s * c.table_width, position, oldest, c.block_size, block_stride, first,
                      std::min(first + kSegment, end)}, q, acc, partial);
    for (int i = 0; i < N; ++i) merge<D>(partial[i], acc[i], &all[i], sum[i]);
  }
  for (int i = 0; i < N; ++i)
    for (int d = 0; d < D; ++d) out[offset[i] + d] = narrow(sum[i][d] / all[i].total, T{});
}

template <typename T, int D>
void any_tile(const Call& c, int s, int kv_head, int first, int n) {
  switch (n) {
    case 1: return tile<T, D, 1>(c, s, kv_head, first);
    case 2: return tile<T, D, 2>(c, s, kv_head, first);
    case 3: return tile<T, D, 3>(c, s, kv_head, first);
    case 4: return tile<T, D, 4>(c, s, kv_head, first);
    case 8: return tile<T, D, 8>(c, s, kv_head, first);
  }
}

// The largest tile that is compiled and not larger than what is left.
inline int tile_size(int pairs) { return pairs >= kTile ? kTile : std::min(pairs, 4); }

template <typename T, int D>
void run(const Call& c) {
  const int group = c.heads / c.kv_heads;
  struct Task { int sequence, kv_head, first, n; };
  std::vector<Task> tasks;
  int64_t work = 0;
  for (int s = 0; s < c.sequences; ++s) {
    const int pairs = (c.starts[s + 1] - c.starts[s]) * group;
    work += int64_t(pairs) * c.kv_heads * c.lens[s] * D * 2;
    for (int h = 0; h < c.kv_heads; ++h)
      for (int first = 0, n; first < pairs; first += n) tasks.push_back({s, h, first, n = tile_size(pairs - first)});
  }
  const int64_t count = int64_t(tasks.size());
#pragma omp parallel for schedule(dynamic, 1) if (count > 1 && work >= kWorthThreads)
  for (int64_t t = 0; t < count; ++t)
    any_tile<T, D>(c, tasks[t].sequence, tasks[t].kv_head, tasks[t].first, tasks[t].n);
}

template <typename T>
int dispatch(const Call& c, int head_dim) {
  switch (head_dim) {
    case 16: run<T, 16>(c); return 0;
    case 32: run<T, 32>(c); return 0;
    case 64: run<T, 64>(c); return 0;
    case 80: run<T, 80>(c); return 0;
    case 96: run<T, 96>(c); return 0;
    case 128: run<T, 128>(c); return 0;
    case 256: run<T, 256>(c); return 0;
  }
  return 1;
}

}  // namespace

extern "C" int paged_attention(const void* query, const void* keys, const void* values, void* out, const int32_t* tables,
                               int64_t table_width, const int32_t* starts, const int32_t* lens, int sequences, int heads,
                               int kv_heads, int head_dim, int block_size, int window, float scale, int bfloat16) {
  const Call c{query, keys, values, out, tables, starts, lens, table_width, sequences, heads, kv_heads, block_size, window, scale};
  return bfloat16 ? dispatch<uint16_t>(c, head_dim) : dispatch<float>(c, head_dim);
}
