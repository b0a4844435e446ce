// One parallel region per call, on a pool of threads that all kernels of a step share.
#pragma once

namespace octavo {

// Calls body(context, thread) on the calling thread, as 0, and on as many of threads 1..count-1 as come before
// it is through; returns when all of these are. Bodies take their work from shared counters. See parallel.cpp.
void run_on_threads(int count, void (*body)(void*, int), void* context);

template <class Body>
void on_threads(int count, Body& body) {
  run_on_threads(count, [](void* context, int thread) { (*static_cast<Body*>(context))(thread); }, &body);
}

}  // namespace octavo
