// Waiting for a descriptor without letting the processor sleep.
#pragma once

#include <cstdint>

namespace nibblelm {

// Whether `descriptor` can be read, or has failed, within so many microseconds. Asks again and again: a thread that
// sleeps would see it later, and then compute on a processor that has to wake up.
bool readable_within(int descriptor, int64_t microseconds);

}  // namespace nibblelm
