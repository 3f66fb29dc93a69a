// Runs a function on the threads of torch's own OpenMP runtime, which are awake while torch computes.
// Null until threads.py has set them.

#pragma once

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using ThreadNumber = int (*)();

namespace lent {
extern Parallel parallel;
extern ThreadNumber thread_number;
}  // namespace lent

constexpr int MAX_THREADS = 256;
