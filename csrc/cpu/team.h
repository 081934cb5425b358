// The thread team: the caller and N - 1 workers share loops of which each claims pieces, its own share first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace nibblelm {

// Number of threads by default: the cores this process may run on, within its cgroup's CPU quota.
int usable_cores();

void set_threads(int count);  // at most usable_cores(); 0 restores the default; waits for running ops
int threads();

// One op at a time runs on the team; every op holds this for its whole length. Recursive, so that a recorded
// program can hold it across its ops.
std::unique_lock<std::recursive_mutex> lock_team();

// While one of these lives the workers spin between loops instead of going to sleep.
class KeepAwake {
 public:
  KeepAwake();
  ~KeepAwake();
  KeepAwake(const KeepAwake&) = delete;
  KeepAwake& operator=(const KeepAwake&) = delete;
};

using LoopBody = void (*)(const void* context, int64_t begin, int64_t end);
void run_loop(int64_t items, int64_t grain, LoopBody body, const void* context);

// Calls body(begin, end) over [0, items) in pieces of at least `grain` items (the last may be shorter), possibly on
// several threads at once; returns when all are done. At most one grain of items runs on the caller alone.
// The body must not throw. The caller holds lock_team().
template <typename Body>
void parallel_for(int64_t items, int64_t grain, const Body& body) {
  run_loop(
      items, grain,
      [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); }, &body);
}

// Uninitialised memory, 64-byte aligned, that stays valid until the next call with the same slot (shared: for the
// op that holds the team; local: for the calling thread). Grows as needed and is kept.
void* shared_scratch(size_t bytes);
void* local_scratch(size_t bytes);

}  // namespace nibblelm
