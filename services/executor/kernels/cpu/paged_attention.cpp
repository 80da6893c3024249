// Paged attention on a CPU: one call serves prefill chunks, decodes and any mix of them.
//
// A pack is 32 bits: one float, or two neighbouring bfloat16 that a dot product takes together (vector.h). Layouts, with
// P values in a pack, B = block_size and D = head_dim multiples of 16:
//   query, out  [T, heads, D]               rows of all sequences, one after another
//   cache       [blocks, kv_heads, 2, B*D]  the keys of a head in a block, then its values: memory likes to be read on
//     keys        [D / P, B, P]             one vector holds a pack of dimensions of 16 positions
//     values      [B / P, D, P]             one vector holds a pack of positions of 16 dimensions
//
// Every (row, head) is reduced over its positions in one fixed order: segments of kSegment positions from position 0
// on, inside a segment one sum from its first pack to its last, then the segments in order. Neither the batch, nor the
// chunk cut, nor the number of threads changes that order, so a row's bits depend on its own sequence alone. Positions
// that a row may not see weigh exactly zero and what lies there never enters a sum: it may be anything, NaN included.
#include "paged_attention.h"

#include "vector.h"

namespace {

constexpr int kSegment = 256;
constexpr int kMaxDim = 256;
constexpr int kTile = 24;  // (query row, head of the group) pairs that one thread takes through the context together
constexpr int64_t kWorthThreads = 1 << 19;  // multiplications, about 30 us: below that waking threads costs more

// One (query row, head) of a tile: which positions it sees, and its weighted values so far, relative to the peak.
struct Pair { int oldest, position; float peak, total; };

// One segment of one sequence and one kv head.
template <typename T>
struct Segment {
  const T* cache; const int32_t* table;
  int64_t block_stride; int block_size, dim, first, last;
  int end;      // of the context: what may be asked for ahead
  float scale;  // of the logarithms to base two

  // Where the sixteen positions from pos on lie, a multiple of 16: all in one block.
  const T* keys_at(int pos) const {
    return cache + table[pos / block_size] * block_stride + pos % block_size * kPack<T>;
  }
  const T* values_at(int pos) const {
    return cache + table[pos / block_size] * block_stride + int64_t(block_size + pos % block_size) * dim;
  }
};

template <typename T>
struct Tile {
  alignas(64) T query[kTile][kMaxDim];
  alignas(64) float sum[kTile][kMaxDim];
  Pair pair[kTile];
};

// Scores of G groups of sixteen positions from first + at on: sums over D in order, each group's on its own, so that G
// only says how much is under way at once.
template <typename T, int M, int G>
inline void score_groups(const Segment<T>& s, const T (*query)[kMaxDim], const Pair* pair, int at, float (*score)[kSegment]) {
  // Blocks lie anywhere in memory, and each is too short for the hardware to foresee the next: the keys of the next
  // groups and the values of these, which are read last, are asked for meanwhile, into the second cache, for the first
  // has few misses under way. Many pairs compute longer than they wait.
  constexpr bool kAhead = M <= 4;
  const T* keys[G]; const T* next_keys[G]; const T* values[G];
  vec sum[G][M];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    const int pos = s.first + at + g * kWidth;
    keys[g] = s.keys_at(pos);
    if constexpr (kAhead) {
      next_keys[g] = pos + G * kWidth < s.end ? s.keys_at(pos + G * kWidth) : keys[g];
      values[g] = s.values_at(pos);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) sum[g][i] = vec{};
  }
  const int64_t stride = s.block_size * kPack<T>;
  for (int d = 0; d < s.dim; d += kPack<T>) {
    uvec key[G];
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      key[g] = load_packs(keys[g]);
      keys[g] += stride;
      if constexpr (kAhead) {
        __builtin_prefetch(next_keys[g], 0, 2);
        __builtin_prefetch(values[g], 0, 2);
        next_keys[g] += stride;
        values[g] += kWidth * kPack<T>;
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const uvec each = uvec{} + pack_at(query[i] + d);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) sum[g][i] = dot(sum[g][i], key[g], each, T{});
    }
  }
  const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const ivec pos = lane + (s.first + at + g * kWidth);
      const ivec hidden = (pos > ivec{} + pair[i].position) | (pos < ivec{} + pair[i].oldest);
      store(&score[i][at + g * kWidth], hidden ? vec{} - INFINITY : sum[g][i]);
    }
}

// acc[i] = the values of the segment weighted by weight[i], C vectors of dimensions from `dim` on.
template <typename T, int M, int C>
inline void weigh(const Segment<T>& s, const T (*weight)[kSegment], const Pair* pair, int dim, float (*acc)[kMaxDim]) {
  vec out[M][C];
  int seen_from = s.first, seen_to = s.last - 1;  // by all M
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    seen_from = std::max(seen_from, pair[i].oldest);
    seen_to = std::min(seen_to, pair[i].position);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) out[i][c] = vec{};
  }
  for (int group = s.first; group < s.last; group += kWidth) {
    const T* v = s.values_at(group) + dim * kPack<T>;
    const int end = std::min(group + kWidth, s.last);
    const bool all_seen = seen_from <= group && group + kWidth - 1 <= seen_to;
    for (int pos = group; pos < end; pos += kPack<T>, v += int64_t(s.dim) * kPack<T>) {
      uvec value[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) value[c] = load_packs(v + c * kWidth * kPack<T>);
      if (all_seen) {
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
          const uvec each = uvec{} + pack_at(weight[i] + pos - s.first);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) out[i][c] = dot(out[i][c], value[c], each, T{});
        }
        continue;
      }
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        uint32_t seen = 0;  // of the pack
        for (int p = 0; p < kPack<T>; ++p)
          if (pair[i].oldest <= pos + p && pos + p <= pair[i].position) seen |= (~0u >> (32 - 8 * sizeof(T))) << (8 * sizeof(T) * p);
        if (!seen) continue;
        const uvec each = uvec{} + pack_at(weight[i] + pos - s.first);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) out[i][c] = dot(out[i][c], value[c] & seen, each, T{});
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(acc[i] + dim + c * kWidth, out[i][c]);
}

// Turns one pair's scores into weights. This and merge are never inlined: one piece of code rounds for any number of
// pairs, or the compiler may fuse other products with additions for one than for another.
template <typename T>
__attribute__((noinline)) Pair weights_of(const float* score, float scale, int live, T* weight) {
  const int end = (live + kWidth - 1) / kWidth * kWidth;
  vec top = vec{} - INFINITY;
  for (int at = 0; at < end; at += kWidth) { const vec s = load(score + at); top = s > top ? s : top; }
  Pair found = {0, 0, reduce_max(top), 0.0f};
  if (found.peak == -INFINITY) return found;  // it sees nothing of this segment
  vec sum = {};
  for (int at = 0; at < end; at += kWidth) {
    const vec w = exp2_nonpositive((load(score + at) - found.peak) * scale);
    sum += w;
    store(weight + at, w);
  }
  found.total = reduce_sum(sum);
  return found;
}

// Adds a segment's values to one pair's sum so far.
__attribute__((noinline)) void merge(const Pair& found, const float* acc, float scale, int dim, Pair* pair, float* sum) {
  if (found.peak == -INFINITY) return;
  const float top = std::max(pair->peak, found.peak);
  const float old_weight = pair->peak == -INFINITY ? 0.0f : std::exp2((pair->peak - top) * scale);
  const float new_weight = std::exp2((found.peak - top) * scale);
  for (int d = 0; d < dim; d += kWidth) store(sum + d, load(sum + d) * old_weight + load(acc + d) * new_weight);
  pair->total = pair->total * old_weight + found.total * new_weight;
  pair->peak = top;
}

// One segment for M pairs.
template <typename T, int M>
void segment(const Segment<T>& whole, const T (*query)[kMaxDim], Pair* pair, float (*sum)[kMaxDim]) {
  alignas(64) float score[M][kSegment];
  alignas(64) T weight[M][kSegment];
  alignas(64) float acc[M][kMaxDim];
  Segment<T> s = whole;
  s.last = std::min(s.last, pair[M - 1].position + 1);  // the last pair sees furthest
  if (s.last <= s.first) return;
  const int length = s.last - s.first;
  constexpr int kGroups = M <= 3 ? 8 : 4;  // as many sums under way as the registers hold
  constexpr int kFewer = kGroups / 4;
  int at = 0;
  for (; at + kGroups * kWidth <= length; at += kGroups * kWidth) score_groups<T, M, kGroups>(s, query, pair, at, score);
  for (; at + kFewer * kWidth <= length; at += kFewer * kWidth) score_groups<T, M, kFewer>(s, query, pair, at, score);
  for (; at < length; at += kWidth) score_groups<T, M, 1>(s, query, pair, at, score);
  Pair found[M];
  for (int i = 0; i < M; ++i) {
    const int live = std::min(pair[i].position + 1 - s.first, length);
    found[i] = weights_of(score[i], s.scale, std::max(live, 0), weight[i]);
  }
  int dim = 0;
  for (; dim + 4 * kWidth <= s.dim; dim += 4 * kWidth) weigh<T, M, 4>(s, weight, pair, dim, acc);
  for (; dim < s.dim; dim += kWidth) weigh<T, M, 1>(s, weight, pair, dim, acc);
  for (int i = 0; i < M; ++i) merge(found[i], acc[i], s.scale, s.dim, &pair[i], sum[i]);
}

// One segment for all n pairs of a tile, as many at a time as the registers hold.
template <typename T>
void segment(const Segment<T>& s, Tile<T>& t, int n) {
  int i = 0;
  for (; i + 6 <= n; i += 6) segment<T, 6>(s, t.query + i, t.pair + i, t.sum + i);
  switch (n - i) {
    case 5: segment<T, 3>(s, t.query + i, t.pair + i, t.sum + i); i += 3; [[fallthrough]];
    case 2: return segment<T, 2>(s, t.query + i, t.pair + i, t.sum + i);
    case 4: return segment<T, 4>(s, t.query + i, t.pair + i, t.sum + i);
    case 3: return segment<T, 3>(s, t.query + i, t.pair + i, t.sum + i);
    case 1: return segment<T, 1>(s, t.query + i, t.pair + i, t.sum + i);
  }
}

// n pairs from first_pair on, of sequence s and one kv head.
template <typename T>
void tile(const Attention& c, int s, int kv_head, int first_pair, int n) {
  static thread_local Tile<T> t;
  const int D = c.head_dim, group = c.heads / c.kv_heads, rows = c.starts[s + 1] - c.starts[s];
  int64_t offset[kTile];
  for (int i = 0; i < n; ++i) {
    const int row = (first_pair + i) / group, head = kv_head * group + (first_pair + i) % group;
    offset[i] = (int64_t(c.starts[s] + row) * c.heads + head) * D;
    std::memcpy(t.query[i], static_cast<const T*>(c.query) + offset[i], D * sizeof(T));
    std::memset(t.sum[i], 0, D * sizeof(float));
    const int position = c.lens[s] - rows + row;
    t.pair[i] = {c.window ? std::max(0, position - c.window + 1) : 0, position, -INFINITY, 0.0f};
  }
  const int64_t head_stride = int64_t(c.block_size) * D * 2;
  const int end = t.pair[n - 1].position + 1;
  Segment<T> part = {static_cast<const T*>(c.cache) + kv_head * head_stride, c.tables + s * c.table_width,
                     head_stride * c.kv_heads, c.block_size, D, 0, 0, end, c.scale * 1.44269504f};
  for (part.first = t.pair[0].oldest / kSegment * kSegment; part.first < end; part.first = part.last) {
    part.last = std::min(part.first + kSegment, end);
    segment(part, t, n);
  }
  for (int i = 0; i < n; ++i)
    for (int d = 0; d < D; d += kWidth)
      store(static_cast<T*>(c.out) + offset[i] + d, load(t.sum[i] + d) / t.pair[i].total);
}

}  // namespace

AttentionTasks attention_tasks(const Attention& c) {
  AttentionTasks found = {};
  const int group = c.heads / c.kv_heads;
  for (int s = 0; s < c.sequences; ++s) {
    const int pairs = (c.starts[s + 1] - c.starts[s]) * group;
    found.products += int64_t(pairs) * c.kv_heads * c.lens[s] * c.head_dim * 2;
    for (int first = 0; first < pairs; first += kTile) found.tiles.push_back({s, first, std::min(kTile, pairs - first)});
  }
  // The longest first, so that what is left at the end is short.
  const auto cost = [&](const AttentionTasks::Tile& t) { return int64_t(t.count) * c.lens[t.sequence]; };
  std::stable_sort(found.tiles.begin(), found.tiles.end(), [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
  return found;
}

void attend(const Attention& c, const AttentionTasks& tasks) {
  const int64_t count = int64_t(tasks.tiles.size()) * c.kv_heads;
  // A thread that takes all heads of a sequence reads on in memory; few tiles are shared more finely.
  const int64_t chunk = tasks.tiles.size() >= 16 ? c.kv_heads : 1;
#pragma omp for schedule(dynamic, chunk)
  for (int64_t t = 0; t < count; ++t) {
    const auto& each = tasks.tiles[t / c.kv_heads];
    const int kv_head = int(t % c.kv_heads);
    c.bfloat16 ? tile<uint16_t>(c, each.sequence, kv_head, each.first, each.count)
               : tile<float>(c, each.sequence, kv_head, each.first, each.count);
  }
}

extern "C" int paged_attention(const void* query, const void* cache, void* out, const int32_t* tables,
                               int64_t table_width, const int32_t* starts, const int32_t* lens, int sequences, int heads,
                               int kv_heads, int head_dim, int block_size, int window, float scale, int bfloat16) {
  if (head_dim % kWidth || head_dim > kMaxDim) return 1;
  const Attention c{query, cache, out, tables, starts, lens, table_width, sequences, heads, kv_heads, head_dim,
                    block_size, window, scale, bfloat16};
  const AttentionTasks tasks = attention_tasks(c);
#pragma omp parallel if (tasks.products >= kWorthThreads)
  attend(c, tasks);
  return 0;
}
