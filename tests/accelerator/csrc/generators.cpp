// Random generators of the simulated device, and the hooks by which torch finds the device.
//
// A generator is a seed and a count of the operations that drew from it, which the host keeps. Each
// operation draws from a generator of the CPU with a seed that is computed from both.
#include "simulated.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <vector>

namespace simulated {
namespace {

constexpr uint64_t kFirstSeed = 67280421310721;
bool is_as_host = false;

struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    num_drawn_ = 0;
  }
  void set_offset(uint64_t offset) override {
    num_drawn_ = offset;
  }
  uint64_t get_offset() const override {
    return num_drawn_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    auto* bytes = state.mutable_data_ptr<uint8_t>();
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &num_drawn_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.is_cpu(), "simulated device: no state of a generator");
    const auto* bytes = static_cast<const uint8_t*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&num_drawn_, bytes + 8, 8);
  }
  GeneratorImpl* clone_impl() const override {
    auto* made = new GeneratorImpl(device().index());
    made->seed_ = seed_;
    made->num_drawn_ = num_drawn_;
    return made;
  }
  // splitmix64
  uint64_t next() {
    uint64_t x = seed_ + 0x9E3779B97F4A7C15ULL * ++num_drawn_;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
  }

 private:
  uint64_t seed_ = kFirstSeed;
  uint64_t num_drawn_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  at::Device getDeviceFromPtr(void* address) const override {
    const auto device = device_of(address);
    TORCH_CHECK(device >= 0, "not memory of a simulated device");
    return {kType, device};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

const bool is_registered = [] {
  register_allocators();
  register_guard();
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace

bool draws_as_host() {
  return is_as_host;
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<GeneratorImpl>(device < 0 ? current_device() : device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      made->push_back(new_generator(index));
    }
    return made;
  }();
  const auto index = device < 0 ? current_device() : device;
  TORCH_CHECK(index < device_count(), "invalid device ordinal: simulated:", int(index));
  return (*all)[index];
}

uint64_t next_seed(at::Generator generator) {
  TORCH_CHECK(
      generator.device().type() == kType, "Expected a 'simulated' device type for generator but found '",
      generator.device().type(), "'");
  std::lock_guard<std::mutex> guard(generator.mutex());
  return generator.get<GeneratorImpl>()->next();
}

} // namespace simulated

extern "C" {

void simulated_draw_as_host(bool is_wanted) {
  simulated::is_as_host = is_wanted;
}

void simulated_get_state(int device, uint64_t* state) {
  const auto& generator = simulated::default_generator(device);
  state[0] = generator.current_seed();
  state[1] = generator.get<simulated::GeneratorImpl>()->get_offset();
}

void simulated_set_state(int device, const uint64_t* state) {
  at::Generator generator = simulated::default_generator(device);
  generator.set_current_seed(state[0]);
  generator.set_offset(state[1]);
}
}
