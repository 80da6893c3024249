// One call of paged attention, for whoever runs it among other work; see paged_attention.cpp.
#pragma once
#include <cstdint>
#include <vector>

struct Attention {
  const void* query; const void* cache; void* out;
  const int32_t* tables; const int32_t* starts; const int32_t* lens;
  int64_t table_width; int sequences, heads, kv_heads, head_dim, block_size, window; float scale; int bfloat16;
};

// What one thread takes at a time: `count` (row, head) pairs of one sequence, for each kv head. The same for every layer.
struct AttentionTasks {
  struct Tile { int sequence, first, count; };
  std::vector<Tile> tiles;
  int64_t products;
};
AttentionTasks attention_tasks(const Attention& call);

// Inside a parallel region: its threads share the work, and wait for each other at the end.
void attend(const Attention& call, const AttentionTasks& tasks);
