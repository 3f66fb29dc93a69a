// What is done with the arguments of an operator before it is queued.
#include "call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>

#include <set>

namespace simulated {
namespace {

// These take indices of the host, or need their lengths there.
const std::set<std::string> kTakeHostTensors = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put"};
const std::set<std::string> kNeedHostTensors = {
    "aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward"};

bool is_generator(const Call& call, size_t place) {
  return call.schema().arguments()[place].real_type()->str().rfind("Generator", 0) == 0;
}

// Draws as many numbers as the call will, of no other use.
Stack scratch_arguments(const Call& call) {
  Stack made;
  for (const IValue& value : call.arguments) {
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

at::Tensor kept(const at::Tensor& number) {
  at::Tensor copy = number.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(number.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

} // namespace

void Call::find_device() {
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

void Call::check_devices() {
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

void Call::draw_seed() {
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
    Stack stack = scratch_arguments(*this); // draws as many numbers as the queued call will
    const Plain plain;
    op.callBoxed(stack);
  }
}

Stack Call::planned_arguments() const {
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

Stack Call::host_arguments() const {
  Stack made;
  for (size_t place = 0; place < arguments.size(); ++place) {
    const IValue& value = arguments[place];
    const bool is_out = schema().arguments()[place].is_out();
    if (value.isDevice()) {
      made.emplace_back(c10::Device(c10::kCPU));
    } else if (host_state.defined() && is_generator(*this, place)) {
      made.emplace_back();
    } else if (seed.has_value() && is_generator(*this, place)) {
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

int64_t Call::returned_argument(size_t number) const {
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

} // namespace simulated
