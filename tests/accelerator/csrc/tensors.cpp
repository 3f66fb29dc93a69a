// Tensors of the simulated device: memory for them, views, copies between it and the host.
#include "simulated.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace simulated {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device chosen(std::optional<c10::Device> device) {
  const auto given = device.value_or(c10::Device(kType));
  return {kType, given.has_index() ? given.index() : current_device()};
}

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(c10::kStrided) == c10::kStrided, "simulated device: only dense tensors");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> format) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(
      size, c10::GetAllocator(kType), kKeys, at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kType), kKeys, at::dtype_or_default(dtype));
}

void ensure_room(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const size_t needed = at::detail::computeStorageNbytes(
      impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  if (impl->numel() != 0 && tensor.storage().nbytes() < needed) {
    resize_storage(tensor.storage(), needed);
  }
}

const at::Tensor& resize(
    const at::Tensor& self, at::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->generic_set_sizes_contiguous(c10::fromIntArrayRefSlow(size));
  }
  if (format.has_value()) {
    impl->empty_tensor_restride(*format);
  }
  ensure_room(self);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  ensure_room(self);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// --- copies ------------------------------------------------------------------------------------

at::Tensor kept_alive(const at::Tensor& host) {
  if (host.numel() == 0) {
    return host.detach();
  }
  return at::from_blob(
      host.mutable_data_ptr(), host.sizes(), host.strides(),
      [storage = host.storage()](void*) {}, at::TensorOptions(host.scalar_type()));
}

bool is_in_pinned_memory(const at::Tensor& host) {
  return host.numel() != 0 && is_pinned(host.const_data_ptr());
}

void poison(const at::Tensor& host) {
  if (host.is_non_overlapping_and_dense()) {
    std::memset(host.mutable_data_ptr(), kPoison, host.nbytes());
  }
}

void queue_copy(c10::DeviceIndex device, const at::Tensor& from, const at::Tensor& to) {
  enqueue(current_stream(device), {"copy", [from, to] {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  }});
}

void to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto index = to.device().index();
  if (!non_blocking) {
    queue_copy(index, kept_alive(from), on_host(to));
    synchronize_stream(current_stream(index));
    return;
  }
  // Memory that is not pinned is read before the call returns.
  queue_copy(index, is_in_pinned_memory(from) ? kept_alive(from) : from.clone(), on_host(to));
}

void to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto index = from.device().index();
  const bool is_later = non_blocking && is_in_pinned_memory(to);
  if (is_later) {
    poison(to);
  }
  queue_copy(index, on_host(from), kept_alive(to));
  if (!is_later) {
    synchronize_stream(current_stream(index));
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!to.device().is_privateuseone()) {
    to_host(from, to, non_blocking);
  } else if (!from.device().is_privateuseone()) {
    to_device(from, to, non_blocking);
  } else if (from.device() == to.device()) {
    queue_copy(to.device().index(), on_host(from), on_host(to));
  } else {
    synchronize_device(from.device().index());
    queue_copy(to.device().index(), on_host(from), on_host(to));
    synchronize_stream(current_stream(to.device().index()));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize_stream(current_stream(self.device().index()));
  return at::_local_scalar_dense(on_host(self));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("as_strided", &as_strided);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
}

} // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  const BlockPtr block = block_of(tensor.storage());
  const at::TensorOptions options(tensor.scalar_type());
  if (block == nullptr || tensor.numel() == 0) {
    return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), options);
  }
  auto* start = static_cast<char*>(block->real) + tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(start, tensor.sizes(), tensor.strides(), [block](void*) {}, options);
}

at::Tensor empty_like_plan(const at::Tensor& plan, c10::DeviceIndex device) {
  return empty_strided(
      plan.sizes(), plan.strides(), plan.scalar_type(), c10::kStrided, c10::Device(kType, device),
      false);
}

} // namespace simulated
