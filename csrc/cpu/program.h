// A recorded sequence of ops, the CPU's counterpart of a CUDA graph: replayed in one call, without Python.
#pragma once

#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cpu/isa.h"
#include "cpu/team.h"

namespace nibblelm {

class Program {
 public:
  Program() = default;
  ~Program() { end(); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void replay() const {
    const auto lock = lock_team();
    const KeepAwake awake;
    for (const auto& step : steps_) step();
  }
  size_t size() const { return steps_.size(); }

  // What run() runs on this thread is also recorded, until end().
  void begin() {
    if (recording() != nullptr) throw std::runtime_error("a program is being recorded on this thread already");
    recording() = this;
  }
  void end() {
    if (recording() == this) recording() = nullptr;
  }

  template <typename Args>
  static void run(void (*Kernels::*kernel)(const Args&), const Args& args) {
    {
      const auto lock = lock_team();
      (kernels().*kernel)(args);
    }
    if (recording() != nullptr) {
      recording()->steps_.push_back([kernel, args] { (kernels().*kernel)(args); });
    }
  }

 private:
  static Program*& recording() {
    static thread_local Program* program = nullptr;
    return program;
  }
  std::vector<std::function<void()>> steps_;
};

}  // namespace nibblelm
