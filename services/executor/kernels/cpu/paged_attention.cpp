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

struct Partial { float peak, total; };

// Attention of n <= kTile (row, head) pairs of one kv head over positions [first, last) of one sequence.
// position[i] is pair i's own position, oldest[i] the first position it may see; acc[i][D] receives the weighted values.
template <typename T, int D>
void segment(const float (*q)[D], const int* position, const int* oldest, int n, const T* keys, const T* values, const int32_t* table,
             int block_size, int64_t block_stride, int first, int last, float* acc, Partial* partial) {
  alignas(64) float score[kTile][kSegment];
  const int length = last - first, padded = (length + kWidth - 1) / kWidth * kWidth;
  const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int at = 0; at < padded; at += kWidth) {
    const int pos = first + at;
    const T* k = keys + table[pos / block_size] * block_stride + pos % block_size;
    vec sum[kTile] = {};
    for (int d = 0; d < D; ++d) {
      const vec key = load(k + int64_t(d) * block_size);
      for (int i = 0; i < n; ++i) sum[i] += key * q[i][d];
    }
    for (int i = 0; i < n; ++i) {
      const ivec masked = (lane + pos > ivec{} + position[i]) | (lane + pos < ivec{} + oldest[i]);
      store(&score[i][at], masked ? vec{} - INFINITY : sum[i]);
    }
  }
  for (int i = 0; i < n; ++i) {
    const int live = std::min(position[i] + 1 - first, length);
    const int end = live <= 0 ? 0 : (live + kWidth - 1) / kWidth * kWidth;
    vec top = vec{} - INFINITY;
    for (int at = 0; at < end; at += kWidth) { vec s = load(&score[i][at]); top = s > top ? s : top; }
    partial[i] = {end ? reduce_max(top) : -INFINITY, 0.0f};
    if (partial[i].peak == -INFINITY) continue;  // it sees nothing of this segment
    vec sum = {};
    for (int at = 0; at < end; at += kWidth) {
      const vec weight = exp_nonpositive(load(&score[i][at]) - partial[i].peak);
      sum += weight;
      store(&score[i][at], weight);
    }
    partial[i].total = reduce_sum(sum);
  }
  constexpr int kVecs = D / kWidth;
  for (int i = 0; i < n; i += 4) {
    const int m = std::min(4, n - i);
    vec out[4][kVecs] = {};
    for (int at = 0; at < length; ++at) {
      const int pos = first + at;
      const T* v = values + table[pos / block_size] * block_stride + int64_t(pos % block_size) * D;
      vec value[kVecs];
      for (int c = 0; c < kVecs; ++c) value[c] = load(v + c * kWidth);
      for (int j = 0; j < m; ++j)
        if (oldest[i + j] <= pos && pos <= position[i + j])  // what lies in other slots may be anything
          for (int c = 0; c < kVecs; ++c) out[j][c] += value[c] * score[i + j][at];
    }
    for (int j = 0; j < m; ++j) for (int c = 0; c < kVecs; ++c) store(acc + (i + j) * D + c * kWidth, out[j][c]);
  }
}

}  // namespace

namespace {

struct Call {
  const void* query; const void* keys; const void* values; void* out;
  const int32_t* tables; const int32_t* starts; const int32_t* lens;
  int64_t table_width; int sequences, heads, kv_heads, block_size, window; float scale;
};

// One tile: pairs first_pair.. of sequence s and one kv head.
template <typename T, int D>
void tile(const Call& c, int s, int kv_head, int first_pair, int n) {
  const int group = c.heads / c.kv_heads;
  const int rows = c.starts[s + 1] - c.starts[s];
  const T* query = static_cast<const T*>(c.query);
  T* out = static_cast<T*>(c.out);
  const int64_t head_stride = int64_t(c.block_size) * D, block_stride = head_stride * c.kv_heads;
  const T* keys = static_cast<const T*>(c.keys) + kv_head * head_stride;
  const T* values = static_cast<const T*>(c.values) + kv_head * head_stride;
  alignas(64) float q[kTile][D], acc[kTile][D], sum[kTile][D];
  int position[kTile] = {}, oldest[kTile] = {};
  int64_t offset[kTile];
  float peak[kTile], total[kTile];
  for (int i = 0; i < n; ++i) {
    const int row = (first_pair + i) / group, head = kv_head * group + (first_pair + i) % group;
    offset[i] = (int64_t(c.starts[s] + row) * c.heads + head) * D;
    for (int d = 0; d < D; ++d) q[i][d] = widen(query[offset[i] + d]) * c.scale;
    position[i] = c.lens[s] - rows + row;
    oldest[i] = c.window ? std::max(0, position[i] - c.window + 1) : 0;
    peak[i] = -INFINITY; total[i] = 0;
    std::memset(sum[i], 0, sizeof sum[i]);
  }
  const int end = position[n - 1] + 1;
  Partial partial[kTile];
  for (int first = oldest[0] / kSegment * kSegment; first < end; first += kSegment) {
    segment<T, D>(q, position, oldest, n, keys, values, c.tables + s * c.table_width, c.block_size, block_stride, first,
                  std::min(first + kSegment, end), &acc[0][0], partial);
    for (int i = 0; i < n; ++i) {
      if (partial[i].peak == -INFINITY) continue;
      const float top = std::max(peak[i], partial[i].peak);
      const float old_weight = peak[i] == -INFINITY ? 0.0f : std::exp(peak[i] - top);
      const float new_weight = std::exp(partial[i].peak - top);
      for (int d = 0; d < D; ++d) sum[i][d] = sum[i][d] * old_weight + acc[i][d] * new_weight;
      total[i] = total[i] * old_weight + partial[i].total * new_weight;
      peak[i] = top;
    }
  }
  for (int i = 0; i < n; ++i)
    for (int d = 0; d < D; ++d) out[offset[i] + d] = narrow(sum[i][d] / total[i], T{});
}

template <typename T, int D>
void run(const Call& c) {
  const int group = c.heads / c.kv_heads;
  struct Task { int sequence, kv_head, first, n; };
  std::vector<Task> tasks;
  for (int s = 0; s < c.sequences; ++s) {
    const int pairs = (c.starts[s + 1] - c.starts[s]) * group;
    for (int h = 0; h < c.kv_heads; ++h)
      for (int first = 0; first < pairs; first += kTile) tasks.push_back({s, h, first, std::min(kTile, pairs - first)});
  }
  const int64_t count = int64_t(tasks.size());
#pragma omp parallel for schedule(dynamic, 1) if (count > 1)
  for (int64_t t = 0; t < count; ++t) tile<T, D>(c, tasks[t].sequence, tasks[t].kv_head, tasks[t].first, tasks[t].n);
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
