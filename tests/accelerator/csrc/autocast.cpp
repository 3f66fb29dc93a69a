// Mixed precision of the simulated device: torch's lists of operators for CUDA.
#include "operators.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <algorithm>

namespace simulated {
namespace {

using c10::IValue;

const c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

bool takes_part(const at::Tensor& tensor) {
  return tensor.defined() && at::autocast::is_eligible(tensor, kDevice) &&
      tensor.scalar_type() != at::kDouble;
}

template <typename Visit>
void each(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  }
}

IValue cast(const IValue& value, at::ScalarType dtype) {
  const auto one = [&](const at::Tensor& tensor) {
    return takes_part(tensor) ? at::autocast::cached_cast(dtype, tensor, kDevice) : tensor;
  };
  if (value.isTensor()) {
    return one(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      made.push_back(one(tensor));
    }
    return made;
  }
  return value;
}

void run_in(at::ScalarType dtype, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const size_t number = op.schema().arguments().size();
  for (auto place = stack->end() - number; place != stack->end(); ++place) {
    *place = cast(*place, dtype);
  }
  op.callBoxed(stack);
}

void lower(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_in(at::autocast::get_autocast_dtype(kDevice), op, stack);
}

void float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_in(at::kFloat, op, stack);
}

void widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool has_float32 = false;
  const size_t number = op.schema().arguments().size();
  for (auto place = stack->end() - number; place != stack->end(); ++place) {
    each(*place, [&](const at::Tensor& tensor) {
      has_float32 = has_float32 || (takes_part(tensor) && tensor.scalar_type() == at::kFloat);
    });
  }
  run_in(has_float32 ? at::kFloat : at::autocast::get_autocast_dtype(kDevice), op, stack);
}

// "softmax, int" is the overload softmax.int
std::string name_of(std::string written) {
  written.erase(std::remove(written.begin(), written.end(), ' '), written.end());
  std::replace(written.begin(), written.end(), ',', '.');
  return written;
}

#define NAME(...) name_of(#__VA_ARGS__),
#define SECOND(first, second, ...) std::string(second),

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const std::string& name : {AT_FORALL_LOWER_PRECISION_FP(NAME)}) {
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&lower>());
  }
  for (const std::string& name :
       {AT_FORALL_FP32(NAME) AT_FORALL_FP32_SET_OPT_DTYPE(NAME)
        AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(SECOND)}) {
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&float32>());
  }
  for (const std::string& name : {AT_FORALL_PROMOTE(NAME)}) {
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&widest>());
  }
}

} // namespace
} // namespace simulated
