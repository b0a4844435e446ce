// Binds Ops into the module octavo.attention._cpu: addresses, sizes and strides that octavo/ops has checked.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "ops.h"

namespace nb = nanobind;

namespace octavo {
namespace {

using TwoStrides = std::tuple<int64_t, int64_t>;
// row, temperature, top_k, top_p, min_p, seed, branch, position
using DrawTuple = std::tuple<int64_t, float, int64_t, double, double, uint64_t, uint64_t, uint64_t>;

char* bytes_at(uintptr_t address) { return reinterpret_cast<char*>(address); }

Draw make_draw(const DrawTuple& given, uintptr_t logits, int64_t row_stride) {
  const auto& [row, temperature, top_k, top_p, min_p, seed, branch, position] = given;
  return {reinterpret_cast<const float*>(logits) + row * row_stride,
          temperature, top_k, top_p, min_p, seed, branch, position};
}

void run_norm(const Ops& ops, int dtype, std::tuple<int64_t, int64_t, int64_t> shape, uintptr_t x,
              TwoStrides x_strides, uintptr_t out, TwoStrides out_strides, uintptr_t delta, uintptr_t weight,
              float eps, int threads) {
  NormCall call{};
  call.x = {bytes_at(x), std::get<0>(x_strides), std::get<1>(x_strides)};
  call.out = {bytes_at(out), std::get<0>(out_strides), std::get<1>(out_strides)};
  call.delta = bytes_at(delta);
  call.weight = bytes_at(weight);
  call.dtype = DType(dtype);
  std::tie(call.outer, call.inner, call.dim) = shape;
  call.eps = eps;
  nb::gil_scoped_release release;
  ops.norm(call, threads);
}

void run_swiglu(const Ops& ops, int dtype, int64_t rows, int64_t dim, uintptr_t gate, int64_t gate_stride,
                uintptr_t up, int64_t up_stride, uintptr_t out, int64_t out_stride, int threads) {
  const SwigluCall call{bytes_at(gate), bytes_at(up), bytes_at(out), DType(dtype), rows,
                        dim,            gate_stride,  up_stride,     out_stride};
  nb::gil_scoped_release release;
  ops.swiglu(call, threads);
}

std::vector<int64_t> run_sample(const Ops& ops, uintptr_t logits, int64_t row_stride, int64_t vocab,
                                const std::vector<DrawTuple>& draws, int threads) {
  std::vector<Draw> made;
  made.reserve(draws.size());
  for (const DrawTuple& draw : draws) made.push_back(make_draw(draw, logits, row_stride));
  nb::gil_scoped_release release;
  return ops.sample(made, vocab, threads);
}

}  // namespace

void bind_ops(nb::module_& module) {
  module.def("ops_isas", &ops_isas);
  nb::class_<Ops>(module, "Ops")
      .def(nb::init<const std::string&>())
      .def_prop_ro("isa", [](const Ops& ops) { return std::string(ops.isa()); })
      .def("norm", &run_norm)
      .def("swiglu", &run_swiglu)
      .def("sample", &run_sample)
      .def("candidates", [](const Ops& ops, uintptr_t logits, int64_t vocab, const DrawTuple& draw,
                            uintptr_t ids, uintptr_t weights) {
        nb::gil_scoped_release release;
        return ops.candidates(make_draw(draw, logits, 0), vocab, reinterpret_cast<int64_t*>(ids),
                              reinterpret_cast<int64_t*>(weights));
      });
}

}  // namespace octavo
