// A simulated accelerator: what its parts know of each other.
//
// Device memory has two addresses: `shown`, which tensors report and which nobody may read or write,
// and `real`, which only operations that a queue runs use. Operations are queued on a stream. They
// run when somebody waits for them: a synchronize, an event, a blocking copy.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <string>

namespace simulated {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr unsigned char kPoison = 0xFF; // NaN as a floating point number, -1 as an integer

// --- devices (devices.cpp) ---------------------------------------------------------------------

c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
// Raises "invalid device ordinal" for an index that does not exist.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);

// --- memory (memory.cpp) -----------------------------------------------------------------------

struct Block {
  void* real;
  void* shown;
  size_t size;
  c10::DeviceIndex device;
  ~Block();
};
using BlockPtr = std::shared_ptr<Block>;

// The block of a storage of this device; null if the storage has no memory.
BlockPtr block_of(const c10::Storage& storage);
void resize_storage(const c10::Storage& storage, size_t size);
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
c10::DeviceIndex device_of(const void* shown); // -1: none
void register_allocators();

// --- streams (streams.cpp) ---------------------------------------------------------------------

struct Task {
  std::string name;
  std::function<void()> run;
};

// Queues a task. A stream holds a bounded number of them: at the limit, the oldest run.
void enqueue(const c10::Stream& stream, Task task);
// Runs what is queued. Raises the first error of a task that has run since the last call.
void synchronize_stream(const c10::Stream& stream);
void synchronize_device(c10::DeviceIndex device);
void register_guard();

// --- random numbers (generators.cpp) -----------------------------------------------------------

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
// The seed of the next operation that draws. As on other devices, the host counts them.
uint64_t next_seed(at::Generator generator);
// Whether default generators draw the numbers of the CPU's, so that results equal those of the CPU.
bool draws_as_host();

// --- tensors (tensors.cpp) ---------------------------------------------------------------------

// The same elements as a CPU tensor over the real memory, which it keeps alive.
at::Tensor on_host(const at::Tensor& tensor);
at::Tensor empty_like_plan(const at::Tensor& plan, c10::DeviceIndex device);

} // namespace simulated
