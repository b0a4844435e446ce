// Adds the products of linear.h to the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void bind_linear(nanobind::module_& module);

}  // namespace octavo
