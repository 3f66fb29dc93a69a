// Every operator of the simulated device: planned on torch's meta device, queued, and run by the
// CPU's kernel when the queue comes to it. What cannot be planned, because its shape depends on
// values or it has no meta kernel, waits for the queue as on other devices.
#include "operators.h"

#include "call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

namespace simulated {
namespace {

// The plan of these has other shapes than the CPU's kernel.
const std::set<std::string> kNotPlanned = {"aten::_embedding_bag", "aten::_embedding_bag_forward_only"};

// Gives the CPU's generator back the state that it had.
struct Borrowed {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  at::Tensor before = generator.get_state();
  ~Borrowed() {
    generator.set_state(before);
  }
};

// Runs the CPU's kernel; the results replace the arguments.
void run_kernel(
    const c10::OperatorHandle& op, Stack& stack, const std::optional<uint64_t>& seed,
    const at::Tensor& host_state) {
  const Plain plain;
  bool has_generator = false;
  for (const IValue& value : stack) {
    has_generator = has_generator || value.isGenerator();
  }
  if (!seed.has_value() || has_generator) {
    op.callBoxed(stack);
    return;
  }
  Borrowed shared;
  if (host_state.defined()) {
    shared.generator.set_state(host_state);
  } else {
    shared.generator.set_current_seed(*seed);
  }
  op.callBoxed(stack);
}

void deliver(const std::string& name, const IValue& result, const IValue& target) {
  if (result.isTensor() && !result.toTensor().defined()) {
    return; // a gradient that was not asked for
  }
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  each_tensor(result, [&](const at::Tensor& tensor) { from.push_back(tensor); });
  each_tensor(target, [&](const at::Tensor& tensor) { to.push_back(tensor); });
  TORCH_CHECK(from.size() == to.size(), "simulated device: ", name, " was planned otherwise");
  for (size_t number = 0; number < from.size(); ++number) {
    if (from[number].numel() == 0) {
      continue; // the CPU leaves out what only other kernels need, as a batch norm's statistics
    }
    TORCH_CHECK(
        from[number].sizes() == to[number].sizes() && from[number].dtype() == to[number].dtype(),
        "simulated device: ", name, " was planned as ", to[number].dtype(), to[number].sizes(),
        " and is ", from[number].dtype(), from[number].sizes());
    to[number].copy_(from[number]);
  }
}

enum class Plan { kShapes, kNoKernel, kNone };

// Runs the meta kernel; `stack` then has the shapes of the results.
Plan plan(const Call& call, Stack& stack) {
  if (kNotPlanned.count(call.schema().name()) != 0) {
    return Plan::kNone;
  }
  try {
    const Plain plain;
    call.op.callBoxedForDispatchKey(c10::DispatchKey::Meta, stack);
    return Plan::kShapes;
  } catch (const c10::NotImplementedError&) {
    return Plan::kNoKernel;
  } catch (const std::exception&) { // the CPU's kernel says what is wrong, if anything is
    return Plan::kNone;
  }
}

void resize_written(const Call& call, const Stack& planned) {
  for (size_t place = 0; place < planned.size(); ++place) {
    if (!is_written(call.schema().arguments()[place]) || !planned[place].isTensor()) {
      continue;
    }
    const at::Tensor& shape = planned[place].toTensor();
    const at::Tensor& tensor = call.arguments[place].toTensor();
    if (shape.defined() && shape.sizes() != tensor.sizes()) {
      tensor.resize_(shape.sizes());
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
    }
  }
}

bool is_of_meta(const Stack& results) {
  bool all = true;
  for (const IValue& value : results) {
    each_tensor(value, [&](const at::Tensor& tensor) { all = all && tensor.is_meta(); });
    all = all && (value.isNone() || value.isTensor() || value.isTensorList());
  }
  return all;
}

// Queues the call; returns the results, whose values come later.
Stack queued(const Call& call, const Stack& shapes) {
  Stack results;
  std::vector<std::pair<size_t, IValue>> targets;
  for (size_t number = 0; number < call.schema().returns().size(); ++number) {
    const int64_t place = call.returned_argument(number);
    if (place >= 0) {
      results.push_back(call.arguments[place]);
      if (call.schema().arguments()[place].is_out()) {
        targets.emplace_back(number, changed(results.back(), on_host));
      }
      continue;
    }
    results.push_back(changed(shapes[number], [&](const at::Tensor& shape) {
      return empty_like_plan(shape, call.device.index());
    }));
    targets.emplace_back(number, changed(results.back(), on_host));
  }
  enqueue(
      current_stream(call.device.index()),
      {call.schema().name(),
       [op = call.op, seed = call.seed, host_state = call.host_state, stack = call.host_arguments(), targets]() mutable {
         run_kernel(op, stack, seed, host_state);
         const Plain plain;
         for (const auto& [number, target] : targets) {
           deliver(op.schema().name(), stack[number], target);
         }
         stack.clear();
       }});
  return results;
}

// Runs the call after everything that is queued.
Stack at_once(const Call& call) {
  synchronize_device(call.device.index());
  Stack stack = call.host_arguments();
  run_kernel(call.op, stack, call.seed, call.host_state);
  const Plain plain;
  Stack results;
  for (size_t number = 0; number < stack.size(); ++number) {
    const int64_t place = call.returned_argument(number);
    if (place < 0) {
      results.push_back(changed(stack[number], [&](const at::Tensor& found) {
        const at::Tensor made = empty_like_plan(found, call.device.index());
        on_host(made).copy_(found);
        return made;
      }));
      continue;
    }
    if (call.schema().arguments()[place].is_out()) {
      const at::Tensor& out = call.arguments[place].toTensor();
      out.resize_(stack[number].toTensor().sizes());
      on_host(out).copy_(stack[number].toTensor());
    }
    results.push_back(call.arguments[place]);
  }
  return results;
}

bool keeps_shapes(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.is_out()) {
      return false;
    }
  }
  for (const auto& result : schema.returns()) {
    if (result.alias_info() == nullptr) {
      return false;
    }
  }
  return true;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  run_operator(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  const size_t number = op.schema().arguments().size();
  Call call{op, torch::jit::last(*stack, number).vec()};
  torch::jit::drop(*stack, number);
  call.find_device();
  const c10::DeviceGuard guard(call.device);
  call.check_devices();
  call.draw_seed();
  Stack planned = call.planned_arguments();
  const Stack written = planned;
  const Plan found = plan(call, planned);
  Stack results;
  if (found == Plan::kShapes && is_of_meta(planned)) {
    resize_written(call, written);
    results = queued(call, planned);
  } else if (found == Plan::kNoKernel && keeps_shapes(op.schema())) {
    results = queued(call, {});
  } else {
    results = at_once(call);
  }
  for (IValue& value : results) {
    stack->push_back(std::move(value));
  }
}

} // namespace simulated
