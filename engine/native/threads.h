// How torch's own OpenMP runtime runs a function on its threads, which are awake while it computes.
// Null until threads.py has lent them.

#pragma once

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using ThreadNumber = int (*)();

namespace lent {
extern Parallel parallel;
extern ThreadNumber thread_number;
}  // namespace lent

constexpr int MAX_THREADS = 256;
