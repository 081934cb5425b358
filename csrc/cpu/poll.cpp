#include "cpu/poll.h"

#include <poll.h>

#include <chrono>

namespace nibblelm {

bool readable_within(int descriptor, int64_t microseconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::microseconds(microseconds);
  pollfd waited{descriptor, POLLIN, 0};
  do {
    if (poll(&waited, 1, 0) != 0) return true;  // an error is for who reads it
  } while (Clock::now() < end);
  return false;
}

}  // namespace nibblelm
