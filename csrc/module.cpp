// The Python module octavo.attention._cpu. Tensors come as addresses, sizes and strides, which
// octavo/attention/cpu.py has checked, and reads from torch faster than DLPack would. Nothing here keeps a
// tensor alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "engine.h"
#include "linear_module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

void bind_ops(nb::module_& module);  // ops_module.cpp

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using FourStrides = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // block, slot, head, dim

Strides strides_of(FourStrides from) {
  const auto [block, slot, head, dim] = from;
  return Strides{block, slot, head, dim};
}

CacheView make_cache(std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t> addresses, int dtype,
                     std::tuple<int64_t, int, int, int> shape, FourStrides keys, FourStrides values,
                     FourStrides scales) {
  CacheView view;
  view.key = at<char>(std::get<0>(addresses));
  view.value = at<char>(std::get<1>(addresses));
  view.key_scale = at<float>(std::get<2>(addresses));
  view.value_scale = at<float>(std::get<3>(addresses));
  view.dtype = DType(dtype);
  std::tie(view.num_blocks, view.block_size, view.heads, view.dim) = shape;
  view.keys = strides_of(keys);
  view.values = strides_of(values);
  view.scales = strides_of(scales);
  return view;
}

StepPlan* make_plan(uintptr_t tables, int64_t table_stride, uintptr_t query_start, uintptr_t kv_len,
                    int sequences, int columns, int tokens, int block_size, int64_t num_blocks,
                    int query_heads, int kv_heads, int dim, int window, int threads, bool share,
                    bool checked) {
  const BatchView batch{at<int32_t>(tables), table_stride, at<int32_t>(query_start), at<int32_t>(kv_len),
                        sequences, columns, tokens};
  const PlanConfig config{block_size, num_blocks, query_heads, kv_heads, dim,
                          window,     threads,    share,       checked};
  nb::gil_scoped_release release;
  return new StepPlan(batch, config);
}

void run_attention(Engine& engine, StepPlan& plan, const CacheView& cache, uintptr_t query,
                   int64_t token_stride, int64_t head_stride, int query_dtype, uintptr_t out, float scale,
                   float softcap, uintptr_t sinks, uintptr_t alibi, uintptr_t lse) {
  Call call{};
  call.batch = plan.batch;
  call.cache = cache;
  call.query = at<char>(query);
  call.query_token_stride = token_stride;
  call.query_head_stride = head_stride;
  call.query_dtype = DType(query_dtype);
  call.out = at<char>(out);
  call.lse = at<float>(lse);
  call.query_heads = plan.config.query_heads;
  call.group = plan.config.query_heads / plan.config.kv_heads;
  call.window = plan.config.window;
  call.scale = scale;
  call.softcap = softcap;
  call.sinks = at<float>(sinks);
  call.alibi = at<float>(alibi);
  nb::gil_scoped_release release;
  engine.attend(plan, call);
}

using TwoStrides = std::tuple<int64_t, int64_t>;  // token, head

int64_t write_rows(Engine& engine, const CacheView& cache, int dtype, uintptr_t key, TwoStrides key_strides,
                   uintptr_t value, TwoStrides value_strides, uintptr_t slots, int64_t tokens, int threads,
                   uintptr_t query, TwoStrides query_strides, int query_heads, uintptr_t cos,
                   uintptr_t sin) {
  WriteCall call{};
  call.cache = cache;
  call.dtype = DType(dtype);
  call.query = at<char>(query);
  call.key = at<char>(key);
  call.value = at<char>(value);
  std::tie(call.query_token_stride, call.query_head_stride) = query_strides;
  std::tie(call.key_token_stride, call.key_head_stride) = key_strides;
  std::tie(call.value_token_stride, call.value_head_stride) = value_strides;
  call.query_heads = query_heads;
  call.cos = at<float>(cos);
  call.sin = at<float>(sin);
  call.slots = at<int64_t>(slots);
  nb::gil_scoped_release release;
  return engine.write(call, tokens, threads);
}

void copy_blocks(Engine& engine, const CacheView& cache,
                 const std::vector<std::tuple<int64_t, int64_t, int>>& copies) {
  std::vector<Copy> list;
  list.reserve(copies.size());
  for (const auto& [src, dst, count] : copies) list.push_back(Copy{src, dst, count});
  nb::gil_scoped_release release;
  engine.copy_blocks(cache, list);
}

}  // namespace
}  // namespace octavo

NB_MODULE(_cpu, module) {
  using namespace octavo;
  nb::set_leak_warnings(false);  // a backend may live as long as the interpreter
  module.attr("split") = kSplit;
  module.attr("max_head_dim") = kMaxDim;
  module.attr("lanes") = kAlign;
  module.def("available_isas", &available_isas);
  bind_linear(module);
  bind_ops(module);
  nb::class_<CacheView>(module, "Cache").def("__init__",
      [](CacheView* self, std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t> addresses, int dtype,
         std::tuple<int64_t, int, int, int> shape, FourStrides keys, FourStrides values, FourStrides scales) {
        new (self) CacheView(make_cache(addresses, dtype, shape, keys, values, scales));
      })
      .def_prop_ro("shape", [](const CacheView& view) {
        return std::make_tuple(view.num_blocks, view.block_size, view.heads, view.dim);
      });
  nb::class_<StepPlan>(module, "Plan")
      .def(nb::new_(&make_plan))
      .def_prop_ro("error",
                   [](const StepPlan& plan) {
                     const PlanError& e = plan.error;
                     return std::make_tuple(int(e.kind), e.row, e.position, e.found, e.wanted);
                   })
      .def_prop_ro("tasks", [](const StepPlan& plan) { return plan.tasks.size(); })
      .def_prop_ro("shared_tasks", [](const StepPlan& plan) { return plan.shared_tasks; });
  nb::class_<Engine>(module, "Engine")
      .def(nb::init<const std::string&>())
      .def_prop_ro("isa", [](const Engine& engine) { return std::string(engine.kernels().name); })
      .def("attend", &run_attention)
      .def("write", &write_rows)
      .def("copy_blocks", &copy_blocks)
      .def("move_blocks", [](Engine& engine, const CacheView& cache, uintptr_t ids, int64_t count,
                             const CacheView& dense, bool into_cache, int threads) {
        nb::gil_scoped_release release;
        engine.move_blocks(cache, at<int64_t>(ids), count, dense, into_cache, threads);
      });
}
