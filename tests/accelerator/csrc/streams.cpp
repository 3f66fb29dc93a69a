// Streams, events and the guard of the simulated device. Nothing runs before somebody waits for it.
#include "simulated.h"

#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>

namespace simulated {
namespace {

constexpr size_t kMaxQueued = 2048;
constexpr int kMaxDevices = 16;

struct Queue {
  std::deque<Task> tasks;
  double clock_ms = 0; // how long tasks have run
  uint64_t num_queued = 0;
  uint64_t num_done = 0;
  uint64_t seen = 0; // how many were queued when the host last asked and the answer was no
};

struct Event {
  c10::Stream stream;
  bool is_timed;
  uint64_t version = 0; // of the last record
  uint64_t reached = 0; // of the last record that the stream has come to
  double at_ms = 0;
};
using EventPtr = std::shared_ptr<Event>;

std::recursive_mutex lock;
std::map<std::pair<int, c10::StreamId>, Queue> queues;
std::string first_error;
std::atomic<uint64_t> num_run{0};
std::atomic<uint64_t> num_waits{0}; // for work that had not run
std::atomic<c10::StreamId> num_streams{0};
thread_local std::array<c10::StreamId, kMaxDevices> current_streams{};
thread_local c10::DeviceIndex current_index = 0;

Queue& queue_of(const c10::Stream& stream) {
  return queues[{stream.device_index(), stream.id()}];
}

void keep_error(const std::string& name, const std::string& text) {
  if (first_error.empty()) {
    first_error = name + ": " + text;
  }
}

void run_oldest(Queue& queue) {
  Task task = std::move(queue.tasks.front());
  queue.tasks.pop_front();
  const auto began = std::chrono::steady_clock::now();
  try {
    task.run();
  } catch (const c10::Error& error) {
    keep_error(task.name, error.what_without_backtrace());
  } catch (const std::exception& error) {
    keep_error(task.name, error.what());
  }
  num_run += 1;
  queue.num_done += 1;
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
  queue.clock_ms += took.count();
}

void raise_error() {
  if (!first_error.empty()) {
    std::string text;
    std::swap(text, first_error);
    TORCH_CHECK(false, "device-side assert triggered in ", text);
  }
}

void run_until_reached(const EventPtr& event, uint64_t version) {
  Queue& queue = queue_of(event->stream);
  while (event->reached < version && !queue.tasks.empty()) {
    run_oldest(queue);
  }
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, exchange_device(device.index())};
  }
  c10::Device getDevice() const override {
    return {kType, current_index};
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_index = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override {
    return c10::DeviceCapability();
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_index);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/ = 0) const override {
    const auto index = device.has_index() ? device.index() : current_index;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), ++num_streams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/ = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    return queue_of(stream).tasks.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_index : device);
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex device,
      const c10::EventFlag flag) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(), "an event of device ", int(device),
        " cannot be recorded on a stream of device ", int(stream.device_index()));
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (*event == nullptr) {
      const bool is_timed = flag == c10::EventFlag::BACKEND_DEFAULT;
      *event = new EventPtr(new Event{stream, is_timed});
    }
    const EventPtr recorded = *static_cast<EventPtr*>(*event);
    recorded->stream = stream;
    const uint64_t version = ++recorded->version;
    enqueue(stream, {"event", [recorded, version] {
      recorded->reached = version;
      recorded->at_ms = queue_of(recorded->stream).clock_ms;
    }});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) {
      return;
    }
    std::lock_guard<std::recursive_mutex> guard(lock);
    const EventPtr awaited = *static_cast<EventPtr*>(event);
    const uint64_t version = awaited->version;
    enqueue(stream, {"wait", [awaited, version] { run_until_reached(awaited, version); }});
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    std::lock_guard<std::recursive_mutex> guard(lock);
    const EventPtr asked = *static_cast<EventPtr*>(event);
    Queue& queue = queue_of(asked->stream);
    // A device continues meanwhile: what was queued at the last such question has run by now.
    while (asked->reached < asked->version && queue.num_done < queue.seen) {
      run_oldest(queue);
    }
    const bool is_reached = asked->reached == asked->version;
    if (!is_reached) {
      queue.seen = queue.num_queued;
    }
    return is_reached;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) {
      return;
    }
    std::lock_guard<std::recursive_mutex> guard(lock);
    const EventPtr awaited = *static_cast<EventPtr*>(event);
    num_waits += awaited->reached < awaited->version;
    run_until_reached(awaited, awaited->version);
    raise_error();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex /*device*/) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "both events must be recorded");
    std::lock_guard<std::recursive_mutex> guard(lock);
    const EventPtr began = *static_cast<EventPtr*>(from);
    const EventPtr ended = *static_cast<EventPtr*>(to);
    TORCH_CHECK(began->is_timed && ended->is_timed, "both events must have enable_timing=True");
    TORCH_CHECK(
        began->reached == began->version && ended->reached == ended->version,
        "device not ready: both events must have completed");
    return ended->at_ms - began->at_ms;
  }
};

} // namespace

c10::DeviceIndex device_count() {
  return 2;
}

c10::DeviceIndex current_device() {
  return current_index;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  const auto before = current_index;
  if (device >= 0) {
    TORCH_CHECK(
        device < device_count(), "invalid device ordinal: simulated:", int(device),
        " does not exist, there are ", int(device_count()), " devices");
    current_index = device;
  }
  return before;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), current_streams[device]);
}

void enqueue(const c10::Stream& stream, Task task) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  Queue& queue = queue_of(stream);
  queue.tasks.push_back(std::move(task));
  queue.num_queued += 1;
  while (queue.tasks.size() > kMaxQueued) {
    run_oldest(queue);
  }
}

void synchronize_stream(const c10::Stream& stream) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  Queue& queue = queue_of(stream);
  num_waits += !queue.tasks.empty();
  while (!queue.tasks.empty()) {
    run_oldest(queue);
  }
  raise_error();
}

void synchronize_device(c10::DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  for (auto& [place, queue] : queues) {
    num_waits += place.first == device && !queue.tasks.empty();
    while (place.first == device && !queue.tasks.empty()) {
      run_oldest(queue);
    }
  }
  raise_error();
}

void register_guard() {
  c10::impl::registerDeviceGuard(kType, new Guard());
}

} // namespace simulated

extern "C" {

size_t simulated_num_queued(int device) {
  std::lock_guard<std::recursive_mutex> guard(simulated::lock);
  size_t number = 0;
  for (const auto& [place, queue] : simulated::queues) {
    number += place.first == device ? queue.tasks.size() : 0;
  }
  return number;
}

uint64_t simulated_num_run() {
  return simulated::num_run;
}

uint64_t simulated_num_waits() {
  return simulated::num_waits;
}
}
