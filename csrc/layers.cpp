#include "layers.h"

namespace octavo {
namespace {

void norm_heads(const Layers& model, const LayersCall& step, float* rows, int heads, int64_t stride,
                const float* weight) {
  NormCall call{};
  call.x = call.out = {reinterpret_cast<char*>(rows), stride, model.dim};
  call.weight = reinterpret_cast<const char*>(weight);
  call.dtype = DType::f32;
  call.outer = step.tokens, call.inner = heads, call.dim = model.dim;
  call.eps = model.eps;
  model.ops->norm(call, step.threads);
}

}  // namespace

int64_t run_layers(const Layers& model, Engine& attention, const std::vector<const CacheView*>& caches,
                   const std::vector<StepPlan*>& plans, const LayersCall& step) {
  const int64_t query_width = int64_t(model.query_heads) * model.dim;
  const int64_t kv_width = int64_t(model.kv_heads) * model.dim, stride = query_width + 2 * kv_width;
  float* key = step.qkv + query_width;
  const Slot slots[3] = {{step.attended, query_width}, {step.hidden, model.hidden_size}, {step.qkv, stride}};

  WriteCall write{};
  write.dtype = DType::f32;
  write.query = reinterpret_cast<char*>(step.qkv);
  write.key = reinterpret_cast<char*>(key);
  write.value = reinterpret_cast<char*>(key + kv_width);
  write.query_token_stride = write.key_token_stride = write.value_token_stride = stride;
  write.query_head_stride = write.key_head_stride = write.value_head_stride = model.dim;
  write.query_heads = model.query_heads;
  write.cos = step.cos, write.sin = step.sin, write.positions = step.positions;
  write.slots = step.slots;

  Call call{};
  call.query = reinterpret_cast<const char*>(step.qkv);
  call.query_token_stride = stride, call.query_head_stride = model.dim;
  call.query_dtype = DType::f32;
  call.out = reinterpret_cast<char*>(step.attended);
  call.query_heads = model.query_heads;
  call.group = model.query_heads / model.kv_heads;
  call.scale = model.scale;

  for (size_t i = 0; i < model.layers.size(); ++i) {
    const Layers::Layer& layer = model.layers[i];
    if (layer.query_norm) {
      norm_heads(model, step, step.qkv, model.query_heads, stride, layer.query_norm);
      norm_heads(model, step, key, model.kv_heads, stride, layer.key_norm);
    }
    write.cache = call.cache = *caches[i];
    const int64_t outside = attention.write(write, step.tokens, step.threads);
    if (outside >= 0) return outside;
    call.batch = plans[i]->batch;
    call.window = plans[i]->config.window;
    attention.attend(*plans[i], call);
    model.linear->run(*layer.chain, slots, step.tokens, step.threads);
  }
  return -1;
}

}  // namespace octavo
