// All layers of a step in one call: what the decoder's loop does, without going back to Python between.
//
//   qkv --(norms of heads), rotate, write--> cache --attend--> attended --chain--> hidden, next qkv
#pragma once

#include <vector>

#include "engine.h"
#include "linear.h"
#include "ops.h"

namespace octavo {

// What does not change from step to step. Owns nothing.
struct Layers {
  struct Layer {
    const Chain* chain;
    const float* query_norm;  // [dim], or null
    const float* key_norm;
  };
  LinearEngine* linear;
  const Ops* ops;
  std::vector<Layer> layers;
  int query_heads, kv_heads, dim;
  int64_t hidden_size;
  float scale, eps;
};

// One step's tensors, float32 and dense by rows.
struct LayersCall {
  float* hidden;    // [tokens, hidden_size]
  float* qkv;       // [tokens, (query_heads + 2 kv_heads) * dim]
  float* attended;  // [tokens, query_heads * dim]
  const float* cos;  // [positions, dim / 2]
  const float* sin;
  const int64_t* positions;  // [tokens]: rows of cos and sin
  const int64_t* slots;  // [tokens]
  int64_t tokens;
  int threads;
};

// caches, plans: by layer. Returns the first token whose slot is outside a cache, before anything is written
// to that, or -1.
int64_t run_layers(const Layers& model, Engine& attention, const std::vector<const CacheView*>& caches,
                   const std::vector<StepPlan*>& plans, const LayersCall& call);

}  // namespace octavo
