// All decoder layers of a step in one call and one parallel region. The pieces are those that can also be called one by
// one, so the numbers are the same; what is saved is a hundred calls a step, and waking threads for each.
#include <algorithm>
#include <chrono>
#include <type_traits>
#include <vector>

#include "elementwise.h"
#include "paged_attention.h"
#include "products.h"

namespace {

// Both structures are also written by Python: decoder.py.
struct Layer {
  const void* input_norm; const void* query_norm; const void* key_norm; const void* mlp_norm;
  Product qkv, out, gate_up, down;
  int64_t window;
  float qk_norm_eps;
};

struct Decoder {
  const Layer* layers; const float* cos; const float* sin;
  int64_t num_layers, hidden, inner, heads, kv_heads, head_dim, int8;
  float norm_eps, scale;
};

struct Step {
  const int32_t* positions; const int64_t* slots; const int32_t* tables; const int32_t* starts; const int32_t* lens;
  void* const* caches;
  void* residual;  // [rows, hidden], read and written
  void* added;     // [rows, hidden], written: what the last layer adds to the residual
  int64_t* ns;     // [kParts], added to
  int64_t rows, sequences, table_width, block_size;
};

enum Part { kProducts, kAttention, kRotary, kNorms, kActivation, kParts };

// Adds the time since the last call to a part of the work. Of one thread's, for all threads end a part together.
class Clock {
 public:
  explicit Clock(int64_t* ns) : ns_(ns), last_(std::chrono::steady_clock::now()) {}
  void ends(Part part) {
#pragma omp master
    {
      const auto now = std::chrono::steady_clock::now();
      ns_[part] += std::chrono::nanoseconds(now - last_).count();
      last_ = now;
    }
  }

 private:
  int64_t* ns_;
  std::chrono::steady_clock::time_point last_;
};

// What the layers pass on, for one step: kept, since fresh memory costs more than the work on it.
template <typename T>
struct Room {
  std::vector<T> normed, qkv, query, attended, gate_up, activated;
  std::vector<uint8_t> quantized;
  std::vector<float> scales;

  void fit(const Decoder& d, int64_t rows) {
    const int64_t query_width = d.heads * d.head_dim, deepest = std::max({d.hidden, d.inner, query_width});
    grow(normed, rows * d.hidden);
    grow(qkv, rows * (d.heads + 2 * d.kv_heads) * d.head_dim);
    grow(query, rows * query_width);
    grow(attended, rows * query_width);
    grow(gate_up, rows * 2 * d.inner);
    grow(activated, rows * d.inner);
    if (d.int8) { grow(quantized, rows * (deepest + 3)); grow(scales, rows); }
  }

 private:
  template <typename V> static void grow(std::vector<V>& room, int64_t size) {
    if (int64_t(room.size()) < size) room.resize(size);
  }
};

template <typename T>
void product(const Decoder& d, const Product& p, const T* x, T* out, int64_t rows, Room<T>& room) {
  if (d.int8) return int8_rows(p, x, out, rows, {room.quantized.data(), room.scales.data()});
  if constexpr (std::is_same_v<T, uint16_t>) bfloat16_rows(p, x, out, rows);
}

template <typename T>
Attention attention_of(const Decoder& d, const Step& s, Room<T>& room, int64_t layer) {
  return {room.query.data(), s.caches[layer], room.attended.data(), s.tables, s.starts, s.lens, s.table_width,
          int(s.sequences), int(d.heads), int(d.kv_heads), int(d.head_dim), int(s.block_size),
          int(d.layers[layer].window), d.scale, std::is_same_v<T, uint16_t>};
}

// Called by every thread of a region.
template <typename T>
void run_layer(const Decoder& d, const Step& s, int64_t layer, const AttentionTasks& tasks, Room<T>& room, Clock& clock) {
  const Layer& l = d.layers[layer];
  T* residual = static_cast<T*>(s.residual);
  T* added = static_cast<T*>(s.added);
  T* normed = room.normed.data();
  const auto norm = [&](const T* x, T* sum, const void* weight) {
    add_rms_norm_rows(x, sum, static_cast<const T*>(weight), normed, s.rows, d.hidden, d.norm_eps);
    clock.ends(kNorms);
  };
  const auto linear = [&](const Product& p, const T* x, T* out) {
    product(d, p, x, out, s.rows, room);
    clock.ends(kProducts);
  };
  norm(layer ? added : residual, layer ? residual : nullptr, l.input_norm);
  linear(l.qkv, normed, room.qkv.data());
  rotary_write_rows<T>({room.qkv.data(), d.cos, d.sin, s.positions, s.slots, l.query_norm, l.key_norm, room.query.data(),
                        s.caches[layer], s.rows, d.heads, d.kv_heads, d.head_dim, s.block_size, l.qk_norm_eps});
  clock.ends(kRotary);
  attend(attention_of(d, s, room, layer), tasks);
  clock.ends(kAttention);
  linear(l.out, room.attended.data(), added);
  norm(added, residual, l.mlp_norm);
  linear(l.gate_up, normed, room.gate_up.data());
  silu_mul_rows(room.gate_up.data(), room.activated.data(), s.rows, d.inner);
  clock.ends(kActivation);
  linear(l.down, room.activated.data(), added);
}

template <typename T>
void run(const Decoder& d, const Step& s) {
  static thread_local Room<T> kept;
  kept.fit(d, s.rows);
  Room<T>& room = kept;  // the calling thread's, for all
  const AttentionTasks tasks = attention_tasks(attention_of(d, s, room, 0));
  Clock clock(s.ns);
#pragma omp parallel if (worth_threads(d.layers[0].gate_up))
  for (int64_t layer = 0; layer < d.num_layers; ++layer) run_layer(d, s, layer, tasks, room, clock);
}

}  // namespace

extern "C" void decode(const Decoder* decoder, const Step* step, int bfloat16) {
  bfloat16 ? run<uint16_t>(*decoder, *step) : run<float>(*decoder, *step);
}
