// What one step's batch implies for every layer: validated lengths, and tasks with balanced costs.
//
//   sequence      strips of consecutive queries      splits 0 .. ceil(kv_len / kSplit)
//   chunk    q0 |##                                  a strip of a long prompt: one task per KV head for all
//            q1 |####                                its splits, where that is small beside the whole step
//   decode   q  |#########                           one task per split, a few heads together
//   decode   q  |######---                           splits with the same blocks in several sequences: one
//   decode   q  |######----                          task reads them once for all (shared prefixes)
//
// Which tasks there are changes no result: see common.h. Owns the decisions; computes no attention.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "common.h"

namespace octavo {

struct PlanConfig {
  int block_size;
  int64_t num_blocks;
  int query_heads, kv_heads, dim;
  int window;   // INT32_MAX: none
  int threads;
  bool share;   // read shared blocks once
  bool checked; // validate lengths and block ids
};

// The first thing wrong with a batch. `kind` says what the numbers mean; see octavo/attention/cpu.py.
struct PlanError {
  enum Kind { none, start, falls, end, queries, room, block } kind = none;
  int row = 0;
  int64_t position = 0, found = 0, wanted = 0;
};

class StepPlan {
 public:
  StepPlan(const BatchView& batch, const PlanConfig& config);

  const BatchView batch;
  const PlanConfig config;
  PlanError error;
  std::vector<Strip> strips;
  std::vector<int> members;
  std::vector<Task> tasks;       // most costly first
  int64_t partial_floats = 0;    // of all strips
  int64_t scratch_floats = 0;    // per thread
  int64_t cost = 0;              // of all tasks
  int64_t shared_tasks = 0;
  std::unique_ptr<std::atomic<int>[]> left;  // per strip, tasks not yet done in the running call

 private:
  bool check();
  void make_strips();
  void make_tasks();
  void make_split_tasks(const std::vector<int>& split_up);
  bool may_share(const Strip& strip) const;
  int heads_for(int64_t rows) const;
  void find_shared(std::vector<std::vector<int>>& groups, const std::vector<int>& candidates,
                   int split) const;
  bool same_blocks(const Strip& a, const Strip& b, int split) const;
  void add_task(const int* strip_ids, int count, int split_begin, int split_end, bool whole, int heads);
  int rows_per_head(const Strip& strip) const;
  int64_t strip_cost(const Strip& strip) const;

  int64_t heads_limit_ = 1;  // KV heads that a task may take so that all threads have some
};

}  // namespace octavo
