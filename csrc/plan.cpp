#include "plan.h"

#include <algorithm>
#include <cstring>

namespace octavo {
namespace {

constexpr int kTasksPerThread = 4;   // enough to even out unequal tasks
constexpr int kRowsPerTask = 64;     // rows over all heads that a task aims at
constexpr int kSharedStripRows = 32; // rows per head up to which a strip's time is mostly reading
constexpr int kKeyCost = 24;         // cost of reading one key of one head, in units of one row's arithmetic

int64_t split_cost(int64_t rows, int64_t keys) { return (rows * 8 + kKeyCost) * keys; }

}  // namespace

StepPlan::StepPlan(const BatchView& batch, const PlanConfig& config) : batch(batch), config(config) {
  if (config.checked && !check()) return;
  make_strips();
  make_tasks();
  left.reset(new std::atomic<int>[strips.size()]());
}

bool StepPlan::check() {
  const int32_t *starts = batch.query_start, *lengths = batch.kv_len;
  const int64_t room = int64_t(batch.columns) * config.block_size;
  const auto fail = [this](PlanError::Kind kind, int row, int64_t position, int64_t found, int64_t wanted) {
    error = PlanError{kind, row, position, found, wanted};
    return false;
  };
  if (starts[0] != 0) return fail(PlanError::start, 0, 0, starts[0], 0);
  for (int row = 0; row < batch.sequences; ++row)
    if (starts[row + 1] < starts[row])
      return fail(PlanError::falls, row, row + 1, starts[row + 1], starts[row]);
  if (starts[batch.sequences] != batch.tokens)
    return fail(PlanError::end, batch.sequences - 1, batch.sequences, starts[batch.sequences], batch.tokens);
  for (int row = 0; row < batch.sequences; ++row) {
    const int64_t queries = starts[row + 1] - starts[row];
    if (queries > lengths[row]) return fail(PlanError::queries, row, lengths[row], queries, lengths[row]);
    if (lengths[row] > room) return fail(PlanError::room, row, room, lengths[row], room);
  }
  for (int row = 0; row < batch.sequences; ++row) {
    const int32_t* table = batch.tables + row * batch.table_stride;
    const int blocks = int((int64_t(lengths[row]) + config.block_size - 1) / config.block_size);
    for (int i = 0; i < blocks; ++i)
      if (table[i] < 0 || table[i] >= config.num_blocks)
        return fail(PlanError::block, row, int64_t(i) * config.block_size, table[i], config.num_blocks);
  }
  return true;
}

int StepPlan::rows_per_head(const Strip& strip) const {
  return (strip.token_end - strip.token_begin) * (config.query_heads / config.kv_heads);
}

int64_t StepPlan::strip_cost(const Strip& strip) const {
  const int64_t keys = strip.position + (strip.token_end - strip.token_begin) - strip.split_begin * kSplit;
  return split_cost(rows_per_head(strip), keys) * config.kv_heads;
}

void StepPlan::make_strips() {
  const int group = config.query_heads / config.kv_heads;
  const int most = std::max(1, kStripRows / group);
  for (int row = 0; row < batch.sequences; ++row) {
    const int begin = batch.query_start[row], end = batch.query_start[row + 1];
    for (int token = begin; token < end; token += most) {
      const int stop = std::min(end, token + most);
      const int position = batch.kv_len[row] - (end - token);
      const int low = position < config.window ? 0 : position - config.window + 1;
      const int high = position + stop - token;
      strips.push_back(
          Strip{row, token, stop, position, low / kSplit, (high + kSplit - 1) / kSplit, 0, 0});
    }
  }
  for (const Strip& strip : strips) cost += strip_cost(strip);
}

bool StepPlan::same_blocks(const Strip& a, const Strip& b, int split) const {
  const int first = split * kSplit / config.block_size;
  const int last = ((split + 1) * kSplit - 1) / config.block_size;
  const int32_t* x = batch.tables + a.sequence * batch.table_stride + first;
  const int32_t* y = batch.tables + b.sequence * batch.table_stride + first;
  return std::memcmp(x, y, sizeof(int32_t) * size_t(last - first + 1)) == 0;
}

// Puts candidates whose blocks over the split are the same into groups, by a hash table of first blocks.
void StepPlan::find_shared(std::vector<std::vector<int>>& groups, const std::vector<int>& candidates,
                           int split) const {
  size_t size = 1;
  while (size < candidates.size() * 2) size *= 2;
  std::vector<int> table(size, -1);
  const int first = split * kSplit / config.block_size;
  groups.clear();
  for (const int index : candidates) {
    const Strip& strip = strips[size_t(index)];
    const uint32_t block = uint32_t(batch.tables[strip.sequence * batch.table_stride + first]);
    size_t place = (block * 2654435769u) & (size - 1);
    while (table[place] >= 0 &&
           !same_blocks(strips[size_t(groups[size_t(table[place])][0])], strip, split))
      place = (place + 1) & (size - 1);
    if (table[place] < 0) {
      table[place] = int(groups.size());
      groups.emplace_back();
    }
    groups[size_t(table[place])].push_back(index);
  }
}

void StepPlan::add_task(const int* strip_ids, int count, int split_begin, int split_end, bool whole,
                        int heads) {
  int64_t rows = 0, keys = 0;
  const int begin = int(members.size());
  for (int i = 0; i < count; ++i) {
    const Strip& strip = strips[size_t(strip_ids[i])];
    members.push_back(strip_ids[i]);
    rows += rows_per_head(strip);
    const int64_t high = strip.position + strip.token_end - strip.token_begin;
    const int64_t end = std::min<int64_t>(high, int64_t(split_end) * kSplit);
    keys = std::max(keys, end - int64_t(split_begin) * kSplit);
  }
  for (int head = 0; head < config.kv_heads; head += heads) {
    const int end = std::min(config.kv_heads, head + heads);
    tasks.push_back(Task{begin, begin + count, head, end, split_begin, split_end, whole,
                         split_cost(rows, keys) * (end - head)});
    scratch_floats = std::max(scratch_floats, octavo::scratch_floats(rows * (end - head), config.dim));
    if (!whole)
      for (int i = 0; i < count; ++i) ++strips[size_t(strip_ids[i])].tasks;
  }
  shared_tasks += count > 1;
}

bool StepPlan::may_share(const Strip& strip) const {
  return config.share && rows_per_head(strip) <= kSharedStripRows;
}

// Heads go together where rows are few, for they lie side by side, but not so that threads run dry.
int StepPlan::heads_for(int64_t rows) const {
  const int64_t together = std::min(heads_limit_, kRowsPerTask / std::max<int64_t>(1, rows));
  return int(std::clamp<int64_t>(together, 1, config.kv_heads));
}

void StepPlan::make_tasks() {
  const int64_t small = cost / (int64_t(config.threads) * kTasksPerThread);
  std::vector<int> split_up;  // strips with a task per split; the others have one for all their splits
  int64_t units = 0;
  for (size_t i = 0; i < strips.size(); ++i) {
    const Strip& strip = strips[i];
    const int splits = strip.split_end - strip.split_begin;
    const bool whole = splits == 1 || (!may_share(strip) && strip_cost(strip) <= small);
    units += whole ? 1 : splits;
    if (!whole) split_up.push_back(int(i));
  }
  heads_limit_ =
      std::max<int64_t>(1, config.kv_heads * units / (int64_t(config.threads) * kTasksPerThread));
  size_t next = 0;
  for (size_t i = 0; i < strips.size(); ++i) {
    if (next < split_up.size() && split_up[next] == int(i)) {
      ++next;
      continue;
    }
    const int id = int(i);
    add_task(&id, 1, strips[i].split_begin, strips[i].split_end, true, heads_for(rows_per_head(strips[i])));
  }
  for (const int index : split_up) {
    Strip& strip = strips[size_t(index)];
    strip.partial = partial_floats;
    partial_floats += int64_t(strip.split_end - strip.split_begin) * (strip.token_end - strip.token_begin) *
                      config.query_heads * octavo::partial_floats(config.dim);
  }
  make_split_tasks(split_up);
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

// A task per split and strip; one for several strips where they have the split's blocks in common.
void StepPlan::make_split_tasks(const std::vector<int>& split_up) {
  const int group = config.query_heads / config.kv_heads;
  std::vector<std::vector<int>> groups;
  std::vector<int> candidates;
  int last = 0;
  for (const int index : split_up) last = std::max(last, strips[size_t(index)].split_end);
  for (int split = 0; split < last; ++split) {
    candidates.clear();
    for (const int index : split_up) {
      const Strip& strip = strips[size_t(index)];
      if (split < strip.split_begin || split >= strip.split_end) continue;
      const int high = strip.position + strip.token_end - strip.token_begin;
      if (may_share(strip) && high >= (split + 1) * kSplit) {
        candidates.push_back(index);
      } else {
        add_task(&index, 1, split, split + 1, false, heads_for(rows_per_head(strip)));
      }
    }
    find_shared(groups, candidates, split);
    for (const std::vector<int>& found : groups) {
      for (size_t at = 0; at < found.size();) {
        int count = 0, rows = 0;
        while (at + size_t(count) < found.size() && (count == 0 || rows < kShareRows - group)) {
          rows += rows_per_head(strips[size_t(found[at + size_t(count)])]);
          ++count;
        }
        add_task(&found[at], count, split, split + 1, false, heads_for(rows));
        at += size_t(count);
      }
    }
  }
}

}  // namespace octavo
