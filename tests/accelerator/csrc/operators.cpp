// Every operator of the simulated device: planned on torch's meta device, queued, and run by the
// CPU's kernel when the queue comes to it. What cannot be planned, because its shape depends on
// values or it has no meta kernel, waits for the queue as on other devices.
#include "operators.h"

#include "simulated.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

namespace simulated {
namespace {

using c10::IValue;
using torch::jit::Stack;

// The plan of these has other shapes than the CPU's kernel.
const std::set<std::string> kNotPlanned = {"aten::_embedding_bag", "aten::_embedding_bag_forward_only"};
// These take indices of the host, or need their lengths there.
const std::set<std::string> kTakeHostTensors = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put"};
const std::set<std::string> kNeedHostTensors = {
    "aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward"};

// Kernels are called without autograd, autocast and Python's modes.
struct Plain {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{at::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_modes{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

template <typename Change>
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      made.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      const bool is_there = tensor.has_value() && tensor->defined();
      made.push_back(is_there ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    }
    return made;
  }
  return value;
}

template <typename Visit>
void each_tensor(const IValue& value, const Visit& visit) {
  changed(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

struct Call {
  c10::OperatorHandle op;
  Stack arguments;
  c10::Device device{kType, -1};
  std::optional<uint64_t> seed;
  at::Tensor host_state; // of the CPU's generator, if its numbers are drawn

  const c10::FunctionSchema& schema() const {
    return op.schema();
  }

  void find_device() {
    for (const IValue& value : arguments) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (device.index() < 0 && tensor.is_privateuseone()) {
          device = tensor.device();
        }
      });
    }
    for (const IValue& value : arguments) {
      if (device.index() < 0 && value.isDevice()) {
        const auto given = value.toDevice();
        device = {kType, given.has_index() ? given.index() : current_device()};
      }
    }
    if (device.index() < 0) {
      device = {kType, current_device()};
    }
  }

  // Raises if tensors are mixed; a number on the host may be an operand.
  void check_devices() {
    const std::string& name = schema().name();
    for (IValue& value : arguments) {
      value = changed(value, [&](const at::Tensor& tensor) {
        if (tensor.device() == device || (tensor.is_cpu() && tensor.dim() == 0)) {
          return tensor;
        }
        if (tensor.is_cpu() && kNeedHostTensors.count(name) != 0) {
          return tensor;
        }
        if (tensor.is_cpu() && kTakeHostTensors.count(name) != 0) {
          return tensor.to(device);
        }
        TORCH_CHECK(
            false, "Expected all tensors to be on the same device, but found at least two devices, ",
            device, " and ", tensor.device(), "! (", name, ")");
      });
    }
  }

  void draw_seed() {
    bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
    at::Generator generator = default_generator(device.index());
    for (size_t place = 0; place < arguments.size(); ++place) {
      if (arguments[place].isGenerator()) {
        generator = arguments[place].toGenerator();
        draws = true;
      }
    }
    if (draws) {
      seed = next_seed(generator);
    }
    if (draws && draws_as_host() && generator == default_generator(device.index())) {
      host_state = at::detail::getDefaultCPUGenerator().get_state();
      Stack stack = scratch_arguments(); // draws as many numbers as the queued call will
      const Plain plain;
      op.callBoxed(stack);
    }
  }

  Stack scratch_arguments() const {
    Stack made;
    for (const IValue& value : arguments) {
      if (value.isDevice()) {
        made.emplace_back(c10::Device(c10::kCPU));
      } else if (value.isGenerator()) {
        made.emplace_back();
      } else {
        made.push_back(changed(value, [](const at::Tensor& tensor) -> at::Tensor {
          const at::Tensor copy = at::detail::empty_strided_cpu(
              tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
          return copy.fill_(0.5);
        }));
      }
    }
    return made;
  }

  bool is_generator(size_t place) const {
    return schema().arguments()[place].real_type()->str().rfind("Generator", 0) == 0;
  }

  Stack planned_arguments() const {
    Stack made;
    for (size_t place = 0; place < arguments.size(); ++place) {
      const IValue& value = arguments[place];
      if (value.isDevice()) {
        made.emplace_back(c10::Device(c10::kMeta));
      } else if (value.isGenerator()) {
        made.emplace_back();
      } else {
        made.push_back(changed(value, [](const at::Tensor& tensor) -> at::Tensor {
          if (tensor.is_cpu()) {
            return tensor;
          }
          return at::detail::empty_strided_meta(
              tensor.sizes(), tensor.strides(), tensor.scalar_type());
        }));
      }
    }
    return made;
  }

  // What is only written to is a new tensor: some kernels resize it on the way.
  Stack host_arguments() const {
    Stack made;
    for (size_t place = 0; place < arguments.size(); ++place) {
      const IValue& value = arguments[place];
      const bool is_out = schema().arguments()[place].is_out();
      if (value.isDevice()) {
        made.emplace_back(c10::Device(c10::kCPU));
      } else if (host_state.defined() && is_generator(place)) {
        made.emplace_back();
      } else if (seed.has_value() && is_generator(place)) {
        made.emplace_back(at::Generator(at::detail::createCPUGenerator(*seed)));
      } else {
        made.push_back(changed(value, [&](const at::Tensor& tensor) -> at::Tensor {
          if (tensor.is_cpu()) {
            return tensor.dim() == 0 ? kept(tensor) : tensor;
          }
          if (is_out) {
            return at::detail::empty_cpu({0}, tensor.scalar_type());
          }
          return on_host(tensor);
        }));
      }
    }
    return made;
  }

  static at::Tensor kept(const at::Tensor& number) {
    at::Tensor copy = number.clone();
    copy.unsafeGetTensorImpl()->set_wrapped_number(number.unsafeGetTensorImpl()->is_wrapped_number());
    return copy;
  }

  // Which argument is returned as result `number`; -1: it is a new tensor.
  int64_t returned_argument(size_t number) const {
    const auto* alias = schema().returns()[number].alias_info();
    if (alias == nullptr) {
      return -1;
    }
    for (size_t place = 0; place < arguments.size(); ++place) {
      const auto* own = schema().arguments()[place].alias_info();
      if (own != nullptr && own->beforeSets() == alias->beforeSets()) {
        TORCH_CHECK_NOT_IMPLEMENTED(
            own->isWrite(), "simulated device: no view is known for ", schema().name());
        return static_cast<int64_t>(place);
      }
    }
    return -1;
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
  at::Generator shared = at::detail::getDefaultCPUGenerator();
  const at::Tensor before = shared.get_state();
  if (host_state.defined()) {
    shared.set_state(host_state);
  } else {
    shared.set_current_seed(*seed);
  }
  op.callBoxed(stack);
  shared.set_state(before);
}

void deliver(const std::string& name, const IValue& result, const IValue& target) {
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
