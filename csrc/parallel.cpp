// The pool: threads that wait for work briefly with their eyes open, then asleep.
//
//   idle --sleep--> sleeping        a worker that found nothing for kAwake
//   idle | sleeping --post--> posted --take--> running --> idle
//   posted --withdraw--> idle       the caller has finished before the worker came
//
// A caller posts its body to the workers, runs it too, and then waits only for those that have begun: whoever
// comes late, because another process has its core, finds the work done. Bodies take work from shared
// counters, so any number of threads will do. Only one caller at a time has the workers; another one that
// comes meanwhile does its work alone.
#include "parallel.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

// Longer than what lies between two parallel regions of a step, and short beside a scheduler's slice.
constexpr std::chrono::microseconds kAwake{150};
constexpr int kLooks = 64;  // between two looks at the clock

void breathe() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

struct Job {
  void (*body)(void*, int);
  void* context;
};

class Worker {
 public:
  explicit Worker(int number) : number_(number), thread_([this] { work(); }) { thread_.detach(); }

  void post(const Job& job) {
    job_ = job;
    if (state_.exchange(kPosted, std::memory_order_acq_rel) == kSleeping) state_.notify_one();
  }

  // Takes the job back, or waits until it is done.
  void finish() {
    int expected = kPosted;
    if (state_.compare_exchange_strong(expected, kIdle, std::memory_order_acq_rel)) return;
    for (int i = 0; state_.load(std::memory_order_acquire) == kRunning; ++i) {
      if (i < 4096) {
        breathe();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  enum State : int { kIdle, kPosted, kRunning, kSleeping };

  [[noreturn]] void work() {
    for (;;) {
      wait();
      int expected = kPosted;
      if (!state_.compare_exchange_strong(expected, kRunning, std::memory_order_acq_rel)) continue;
      job_.body(job_.context, number_);
      state_.store(kIdle, std::memory_order_release);
    }
  }

  void wait() {
    const Clock::time_point until = Clock::now() + kAwake;
    for (;;) {
      for (int i = 0; i < kLooks; ++i) {
        if (state_.load(std::memory_order_acquire) == kPosted) return;
        breathe();
      }
      if (Clock::now() < until) continue;
      int expected = kIdle;
      if (state_.compare_exchange_strong(expected, kSleeping, std::memory_order_acq_rel))
        state_.wait(kSleeping, std::memory_order_acquire);
      return;
    }
  }

  alignas(64) std::atomic<int> state_{kIdle};
  Job job_{};
  const int number_;
  std::thread thread_;
};

struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Worker>> workers;
};

// Never freed: workers outlive everything. A forked child has no workers, so it gets a pool of its own.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
  static const bool once = [] {
    the_pool.store(new Pool);
    pthread_atfork(nullptr, nullptr, [] { the_pool.store(new Pool); });
    return true;
  }();
  (void)once;
  return *the_pool.load();
}

}  // namespace

void run_on_threads(int count, void (*body)(void*, int), void* context) {
  if (count <= 1) return body(context, 0);
  Pool& all = pool();
  const std::unique_lock<std::mutex> lock(all.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return body(context, 0);
  while (int(all.workers.size()) < count - 1)
    all.workers.push_back(std::make_unique<Worker>(int(all.workers.size()) + 1));
  for (int i = 0; i < count - 1; ++i) all.workers[size_t(i)]->post({body, context});
  body(context, 0);
  for (int i = 0; i < count - 1; ++i) all.workers[size_t(i)]->finish();
}

}  // namespace octavo
