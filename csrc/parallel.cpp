#include "parallel.h"

#ifdef OCTAVO_STD_THREADS
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

namespace octavo {

void run_on_threads(int count, void (*body)(void*, int), void* context) {
  if (count <= 1) return body(context, 0);
#ifdef OCTAVO_STD_THREADS
  // For ThreadSanitizer, which cannot see how libgomp's threads wait for each other.
  std::vector<std::thread> others;
  for (int i = 1; i < count; ++i) others.emplace_back(body, context, i);
  body(context, 0);
  for (std::thread& other : others) other.join();
#else
  // libgomp may give fewer threads than asked for; bodies take work from a shared counter, so that is fine.
#pragma omp parallel num_threads(count)
  body(context, omp_get_thread_num());
#endif
}

}  // namespace octavo
