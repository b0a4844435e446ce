// The classes of linear.h in Python. Addresses and sizes have been checked by octavo/ops/linear.py.
#include "linear_module.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "linear.h"

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
}

}  // namespace octavo
