#include "cpu/team.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace nibblelm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin{std::chrono::microseconds(100)};      // before a worker goes to sleep
constexpr auto kAwakeSpin{std::chrono::milliseconds(20)};  // the same while a program runs
constexpr auto kTaken{std::chrono::microseconds(50)};      // a longer yield: another thread had the core meanwhile
constexpr auto kSitOut{std::chrono::milliseconds(2)};      // how long a worker then leaves its share to the others
constexpr int kPiecesPerThread{16};                        // pieces of a long loop: cores differ in speed

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A loop is open from its publication until the caller found no more items. Workers join only an open loop, so one
// that wakes late, or is not scheduled at all, never holds the caller up.
class Team {
 public:
  explicit Team(int count) : count_(count), shares_(new Share[static_cast<size_t>(count)]) {
    try {
      for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {  // no more threads to be had: those there are do it all
      count_ = 1 + static_cast<int>(workers_.size());
    }
  }
  ~Team() {
    stop_ = true;
    gate_.fetch_add(kEpoch);
    wake();
    for (auto& worker : workers_) worker.join();
  }

  int count() const { return count_; }

  void run(int64_t items, int64_t grain, LoopBody body, const void* context) {
    const int64_t pieces = (items + grain - 1) / grain;
    if (count_ == 1 || pieces <= 1) {
      if (items > 0) body(context, 0, items);
      return;
    }
    body_ = body;
    context_ = context;
    piece_ = grain * std::max<int64_t>(1, pieces / (static_cast<int64_t>(count_) * kPiecesPerThread));
    for (int i = 0; i < count_; ++i) {
      shares_[i].next.store(pieces * i / count_ * grain, std::memory_order_relaxed);
      shares_[i].end = i + 1 < count_ ? pieces * (i + 1) / count_ * grain : items;
    }
    // seq_cst here and around sleepers_: a worker either sees the new epoch or is seen as sleeping.
    gate_.store((gate_.load(std::memory_order_relaxed) & ~kLow) + kEpoch + kOpen);
    wake();
    claim(0);
    gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; (gate_.load(std::memory_order_acquire) & kJoined) != 0; ++spins) {
      relax();
      if (spins > 500) sched_yield();  // a worker lost its core in the middle of a piece
    }
  }

  std::atomic<int> awake{0};

 private:
  // gate_: workers inside the loop (30 bits), the open flag, then the loop's number.
  static constexpr uint64_t kJoined{(1u << 30) - 1}, kOpen{1u << 30}, kLow{(1u << 31) - 1}, kEpoch{1u << 31};

  // First one's own share, front to back, so that what is prefetched at the end of a piece is one's own next piece;
  // then what the others have not begun.
  void claim(int self) {
    for (int i = 0; i < count_; ++i) {
      Share& share = shares_[(self + i) % count_];
      for (;;) {
        const int64_t begin = share.next.fetch_add(piece_, std::memory_order_relaxed);
        if (begin >= share.end) break;
        body_(context_, begin, std::min(begin + piece_, share.end));
      }
    }
  }

  void wake() {
    if (sleepers_.load() == 0) return;
    {
      const std::lock_guard lock(sleep_mutex_);
    }  // one that counts itself as sleeping is really waiting then
    woken_.notify_all();
  }

  void work(int self) {
    uint64_t done = 0;  // not what gate_ holds now: a thread that starts late must not miss the team's end
    for (;;) {
      uint64_t gate = wait_for_other_than(done);
      if (stop_.load(std::memory_order_acquire)) return;
      while ((gate & kOpen) != 0 && !gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
      }
      done = gate & ~kLow;
      if ((gate & kOpen) == 0) continue;
      claim(self);
      gate_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  uint64_t wait_for_other_than(uint64_t done) {
    auto start = Clock::now();
    for (unsigned spins = 0;; ++spins) {
      uint64_t gate = gate_.load(std::memory_order_acquire);
      if ((gate & ~kLow) != done) return gate;
      relax();
      if (spins % 64 != 63) continue;
      const auto now = Clock::now();
      sched_yield();
      // Spinning on a core that others want takes it from their work, perhaps from the very thread waited for; and
      // waking up for every loop costs both more than the loop is worth.
      if (Clock::now() - now > kTaken) {
        std::this_thread::sleep_for(kSitOut);
        start = Clock::now();
        continue;
      }
      if (now - start < (awake.load(std::memory_order_relaxed) > 0 ? kAwakeSpin : kSpin)) continue;
      std::unique_lock lock(sleep_mutex_);
      sleepers_.fetch_add(1);
      woken_.wait(lock, [&] { return (gate_.load() & ~kLow) != done; });
      sleepers_.fetch_sub(1);
      start = Clock::now();
    }
  }

  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end{0};
  };

  int count_;
  const std::unique_ptr<Share[]> shares_;
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex sleep_mutex_;
  std::condition_variable woken_;  // not atomic::wait, which loses wake-ups in the libstdc++ of GCC 12
  LoopBody body_{nullptr};
  const void* context_{nullptr};
  int64_t piece_{1};
  std::vector<std::thread> workers_;
};

// Never destroyed: its threads may outlive static destructors. A forked child has no workers and perhaps a locked
// mutex, so it leaves the parent's state alone and makes a new one.
struct State {
  std::recursive_mutex mutex;
  Team* team{nullptr};
  int wanted{0};
  void* scratch{nullptr};
  size_t scratch_bytes{0};
};
std::atomic<State*> current{nullptr};

State& state() {
  State* existing = current.load(std::memory_order_acquire);
  if (existing != nullptr) return *existing;
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] {
      const State* parent = current.load();
      auto* child = new State;
      if (parent != nullptr) child->wanted = parent->wanted;
      current.store(child);
    });
  });
  auto* fresh = new State;
  if (current.compare_exchange_strong(existing, fresh)) return *fresh;
  delete fresh;
  return *existing;
}

Team& team() {
  State& s = state();
  if (s.team == nullptr) s.team = new Team(s.wanted > 0 ? s.wanted : usable_cores());
  return *s.team;
}

// The numbers at the start of a small file; those that are not there stay 0 ("max" is no number). C's own reader: with
// a second copy of the C++ library in the process, linked statically by somebody, streams mix the locales of the two.
void read_numbers(const std::string& path, double& first, double& second) {
  if (std::FILE* file = std::fopen(path.c_str(), "r")) {
    if (std::fscanf(file, "%lf %lf", &first, &second) < 1) first = 0;
    std::fclose(file);
  }
}

// Cores' worth of CPU time that the control groups of this process allow; 0 when they do not limit it.
double cgroup_quota() {
  double least = 0;
  const auto consider = [&least](double quota, double period) {
    if (quota > 0 && period > 0) least = least == 0 ? quota / period : std::min(least, quota / period);
  };
  std::FILE* groups = std::fopen("/proc/self/cgroup", "r");
  for (char buffer[4096]; groups != nullptr && std::fgets(buffer, sizeof(buffer), groups) != nullptr;) {
    std::string line(buffer);
    if (line.ends_with('\n')) line.pop_back();
    const auto controllers = line.find(':'), path_at = line.find(':', controllers + 1);
    if (path_at == std::string::npos) continue;
    const bool unified = line.compare(controllers, 2, "::") == 0;
    if (!unified && line.find("cpu", controllers) >= path_at) continue;
    std::string path = line.substr(path_at + 1);
    for (;; path.erase(path.find_last_of('/'))) {  // a limit on any ancestor holds too
      if (path == "/") path.clear();
      double quota = 0, period = 0, ignored = 0;
      if (unified) {
        read_numbers("/sys/fs/cgroup" + path + "/cpu.max", quota, period);
      } else {
        read_numbers("/sys/fs/cgroup/cpu" + path + "/cpu.cfs_quota_us", quota, ignored);
        read_numbers("/sys/fs/cgroup/cpu" + path + "/cpu.cfs_period_us", period, ignored);
      }
      consider(quota, period);
      if (path.find('/') == std::string::npos) break;
    }
  }
  if (groups != nullptr) std::fclose(groups);
  return least;
}

struct Scratch {
  void* memory{nullptr};
  size_t bytes{0};
  ~Scratch() { std::free(memory); }
};

void* grow(void*& memory, size_t& bytes, size_t wanted) {
  if (wanted > bytes) {
    std::free(memory);
    bytes = 0;
    const size_t rounded = (wanted + wanted / 4 + 4095) / 4096 * 4096;
    memory = std::aligned_alloc(4096, rounded);
    if (memory == nullptr) throw std::bad_alloc();
    bytes = rounded;
  }
  return memory;
}

}  // namespace

int usable_cores() {
  int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = std::max(1, CPU_COUNT(&set));
  if (const double quota = cgroup_quota(); quota > 0)
    cores = static_cast<int>(std::clamp(quota + 0.5, 1.0, static_cast<double>(cores)));
#endif
  return cores;
}

std::unique_lock<std::recursive_mutex> lock_team() { return std::unique_lock(state().mutex); }

void set_threads(int count) {
  const auto lock = lock_team();
  State& s = state();
  s.wanted = std::min(count, usable_cores());  // more would only wait for each other
  delete s.team;
  s.team = nullptr;
}

int threads() {
  const auto lock = lock_team();
  return team().count();
}

KeepAwake::KeepAwake() { ++team().awake; }
KeepAwake::~KeepAwake() { --team().awake; }

void run_loop(int64_t items, int64_t grain, LoopBody body, const void* context) {
  team().run(items, std::max<int64_t>(grain, 1), body, context);
}

void* shared_scratch(size_t bytes) { return grow(state().scratch, state().scratch_bytes, bytes); }

void* local_scratch(size_t bytes) {
  static thread_local Scratch scratch;
  return grow(scratch.memory, scratch.bytes, bytes);
}

}  // namespace nibblelm
