#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace simulated {

// Plans, queues and later runs an operator with the CPU's kernel; the results replace the arguments.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace simulated
