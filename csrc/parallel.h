// One parallel region per call, on the OpenMP threads that torch has already started.
#pragma once

namespace octavo {

// Calls body(context, thread) on threads 0..count-1 and waits for all of them.
void run_on_threads(int count, void (*body)(void*, int), void* context);

template <class Body>
void on_threads(int count, Body& body) {
  run_on_threads(count, [](void* context, int thread) { (*static_cast<Body*>(context))(thread); }, &body);
}

}  // namespace octavo
