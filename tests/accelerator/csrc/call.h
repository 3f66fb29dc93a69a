// One call of an operator on the simulated device: its arguments, device and random numbers.
#pragma once

#include "simulated.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>

namespace simulated {

using c10::IValue;
using torch::jit::Stack;

// Kernels are called without autograd, autocast and Python's modes.
struct Plain {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{at::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_modes{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// The value with each of its tensors replaced.
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

inline bool is_written(const c10::Argument& argument) {
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
  void find_device();
  // Raises if tensors are mixed; a number on the host may be an operand.
  void check_devices();
  // Takes the numbers of the call from its generator now, as later calls may change its state.
  void draw_seed();
  // For the meta kernel.
  Stack planned_arguments() const;
  // For the CPU's kernel. What is only written to is a new tensor: some kernels resize it on the way.
  Stack host_arguments() const;
  // Which argument is returned as result `number`; -1: it is a new tensor.
  int64_t returned_argument(size_t number) const;
};

} // namespace simulated
