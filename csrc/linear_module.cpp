// The classes of linear.h in Python. Addresses and sizes have been checked by octavo/ops/linear.py.
#include "linear_module.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "layers.h"
#include "linear.h"

NB_MAKE_OPAQUE(octavo::Chain)  // a class of its own in Python, not a list

namespace nb = nanobind;

namespace octavo {
namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void add_stage(Chain& chain, std::shared_ptr<Linear> linear, uintptr_t norm, float eps, int epilogue, int in,
               int out) {
  Stage stage{std::move(linear), nullptr, eps, Epilogue(epilogue), in, out};
  if (norm)
    stage.norm = std::make_shared<std::vector<float>>(at<float>(norm), at<float>(norm) + stage.linear->inputs);
  chain.push_back(std::move(stage));
}

// Three slots are enough for a decoder: what attention gave, the hidden states, and what attention takes.
void run_chain(LinearEngine& engine, const Chain& chain, uintptr_t slot0, int64_t stride0, uintptr_t slot1,
               int64_t stride1, uintptr_t slot2, int64_t stride2, int64_t rows, int threads) {
  const Slot slots[3] = {{at<float>(slot0), stride0}, {at<float>(slot1), stride1}, {at<float>(slot2), stride2}};
  nb::gil_scoped_release release;
  engine.run(chain, slots, rows, threads);
}

// norms: addresses of each layer's two, or none at all. sizes: query heads, KV heads, dim, hidden size.
Layers make_layers(LinearEngine& linear, const Ops& ops, nb::list chains,
                    const std::vector<std::tuple<uintptr_t, uintptr_t>>& norms,
                    std::tuple<int, int, int, int64_t> sizes, float scale, float eps) {
  Layers model{};
  model.linear = &linear, model.ops = &ops;
  for (size_t i = 0; i < nb::len(chains); ++i) {
    Layers::Layer layer{nb::cast<const Chain*>(chains[i]), nullptr, nullptr};
    if (!norms.empty())
      layer.query_norm = at<float>(std::get<0>(norms.at(i))), layer.key_norm = at<float>(std::get<1>(norms.at(i)));
    model.layers.push_back(layer);
  }
  std::tie(model.query_heads, model.kv_heads, model.dim, model.hidden_size) = sizes;
  model.scale = scale, model.eps = eps;
  return model;
}

using Addresses = std::tuple<uintptr_t, uintptr_t, uintptr_t>;

// tensors: hidden, qkv, attended. inputs: cos, sin, positions, slots. caches and plans are as many as the layers.
int64_t run_all_layers(const Layers& model, Engine& attention, const std::vector<const CacheView*>& caches,
                       const std::vector<StepPlan*>& plans, Addresses tensors,
                       std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t> inputs, int64_t tokens, int threads) {
  if (caches.size() != model.layers.size() || plans.size() != model.layers.size())
    throw std::invalid_argument("caches and plans must be as many as the layers");
  LayersCall call{};
  const auto [hidden, qkv, attended] = tensors;
  const auto [cos, sin, positions, slots] = inputs;
  call.hidden = at<float>(hidden), call.qkv = at<float>(qkv), call.attended = at<float>(attended);
  call.cos = at<float>(cos), call.sin = at<float>(sin);
  call.positions = at<int64_t>(positions), call.slots = at<int64_t>(slots);
  call.tokens = tokens, call.threads = threads;
  nb::gil_scoped_release release;
  return run_layers(model, attention, caches, plans, call);
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.attr("scratch") = kScratch;
  module.def("linear_isas", &linear_isas);
  nb::class_<Linear>(module, "Linear")
      .def("__init__", [](Linear* self, int weights, int64_t outputs, int64_t inputs, bool paired) {
        new (self) Linear(Weights(weights), outputs, inputs, paired);
      })
      .def_prop_ro("bytes", &Linear::bytes)
      .def("fill", [](Linear& self, int64_t first, int64_t count, uintptr_t rows) {
        nb::gil_scoped_release release;
        self.fill(first, count, at<char>(rows));
      })
      .def("set_bias", [](Linear& self, uintptr_t values) { self.set_bias(at<float>(values)); })
      .def("read_rows", [](const Linear& self, uintptr_t ids, int64_t count, uintptr_t out) {
        nb::gil_scoped_release release;
        self.read_rows(at<int64_t>(ids), count, at<float>(out));
      });
  nb::class_<Chain>(module, "Chain").def(nb::init<>()).def("add", &add_stage);
  nb::class_<LinearEngine>(module, "LinearEngine")
      .def(nb::init<const std::string&>())
      .def_prop_ro("isa", [](const LinearEngine& engine) { return std::string(engine.kernels().name); })
      .def("run", &run_chain);
  nb::class_<Layers>(module, "Layers")
      .def("__init__", [](Layers* self, LinearEngine& linear, const Ops& ops, nb::list chains,
                          const std::vector<std::tuple<uintptr_t, uintptr_t>>& norms,
                          std::tuple<int, int, int, int64_t> sizes, float scale, float eps) {
        new (self) Layers(make_layers(linear, ops, chains, norms, sizes, scale, eps));
      }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("run", &run_all_layers);
}

}  // namespace octavo
