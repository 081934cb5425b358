// How this process gets memory from the system.
#pragma once

namespace nibblelm {

// Keep freed blocks for the next allocation instead of handing them back. A prefill frees and allocates the same large
// activations layer after layer; without this the C library returns each to the kernel, and a fifth of the time goes
// into page faults (512 tokens of a 1.1 B model, two cores). Only glibc has the setting; elsewhere nothing happens.
void keep_freed_memory();

}  // namespace nibblelm
