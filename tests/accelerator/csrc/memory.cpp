// Memory of the simulated device: blocks with two addresses, a limit, statistics; pinned memory.
#include "simulated.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

namespace simulated {
namespace {

constexpr size_t kArena = size_t{1} << 36; // addresses only, no memory
constexpr size_t kAlign = 64;
constexpr int kMaxDevices = 16;

std::mutex lock;
char* arena = nullptr;
size_t arena_used = 0;
std::map<char*, Block*> blocks; // by their shown address
std::map<const char*, size_t> pinned; // size by address

struct Account {
  c10::CachingDeviceAllocator::DeviceStats stats;
  size_t capacity = size_t{4} << 30;
  double fraction = 1.0;
};
std::array<Account, kMaxDevices> accounts;

size_t rounded(size_t size) {
  return (size + kAlign - 1) / kAlign * kAlign;
}

int64_t in_use(const Account& account) {
  return account.stats.allocated_bytes[0].current;
}

std::string in_units(double size) {
  std::ostringstream text;
  text.precision(2);
  text << std::fixed << size / (1 << 20) << " MiB";
  return text.str();
}

// The next range of addresses that nobody can read; they begin anew when all were given out.
char* next_address(size_t size) {
  if (arena == nullptr) {
    void* made = mmap(
        nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(made != MAP_FAILED, "simulated device: no address space");
    arena = static_cast<char*>(made);
  }
  if (arena_used + size > kArena) {
    arena_used = 0;
  }
  char* address = arena + arena_used;
  arena_used += size;
  return address;
}

bool fits(c10::DeviceIndex device, size_t size) {
  const Account& account = accounts[device];
  const auto limit = static_cast<int64_t>(account.fraction * account.capacity);
  return in_use(account) + static_cast<int64_t>(size) <= limit;
}

void check_fits(c10::DeviceIndex device, size_t size) {
  {
    std::lock_guard<std::mutex> guard(lock);
    if (fits(device, size)) {
      return;
    }
  }
  synchronize_device(device); // what queued operations hold becomes free
  std::lock_guard<std::mutex> guard(lock);
  Account& account = accounts[device];
  if (!fits(device, size)) {
    account.stats.num_ooms += 1;
    const double free = static_cast<double>(account.capacity) - in_use(account);
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "Simulated device out of memory. Tried to allocate ",
        in_units(size), ". Device ", static_cast<int>(device), " has a total capacity of ",
        in_units(account.capacity), " of which ", in_units(free), " is free.");
  }
}

BlockPtr new_block(size_t size, c10::DeviceIndex device) {
  const size_t room = rounded(size);
  check_fits(device, room);
  void* real = std::aligned_alloc(kAlign, room);
  TORCH_CHECK(real != nullptr, "simulated device: the host has no memory left");
  std::memset(real, kPoison, room);
  std::lock_guard<std::mutex> guard(lock);
  char* shown = next_address(room);
  BlockPtr block(new Block{real, shown, room, device});
  blocks[shown] = block.get();
  auto& stats = accounts[device].stats;
  stats.allocated_bytes[0].increase(room);
  stats.reserved_bytes[0].increase(room);
  stats.allocation[0].increase(1);
  return block;
}

void drop_block(void* held) {
  delete static_cast<BlockPtr*>(held);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t size) override {
    const auto index = current_device();
    const c10::Device device(kType, index);
    if (size == 0) {
      return {nullptr, nullptr, &drop_block, device};
    }
    auto* held = new BlockPtr(new_block(size, index));
    return {(*held)->shown, held, &drop_block, device};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &drop_block;
  }
  void copy_data(void* /*to*/, const void* /*from*/, size_t /*count*/) const override {
    TORCH_CHECK(false, "simulated device: copies are queued, and not done by the allocator");
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {}
  void recordStream(const at::DataPtr& /*ptr*/, c10::Stream /*stream*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    return accounts[device].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    accounts[device].stats.allocated_bytes[0].reset_peak();
  }
};

void drop_pinned(void* address) {
  {
    std::lock_guard<std::mutex> guard(lock);
    pinned.erase(static_cast<char*>(address));
  }
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t size) override {
    const size_t room = rounded(std::max<size_t>(size, 1));
    void* made = std::aligned_alloc(kAlign, room);
    TORCH_CHECK(made != nullptr, "simulated device: no memory can be pinned");
    std::memset(made, kPoison, room);
    std::lock_guard<std::mutex> guard(lock);
    pinned[static_cast<char*>(made)] = room;
    return {made, made, &drop_pinned, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &drop_pinned;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};

DeviceAllocator device_memory;
PinnedAllocator pinned_memory;

} // namespace

Block::~Block() {
  std::lock_guard<std::mutex> guard(lock);
  const auto found = blocks.find(static_cast<char*>(shown));
  if (found != blocks.end() && found->second == this) {
    blocks.erase(found);
  }
  auto& stats = accounts[device].stats;
  stats.allocated_bytes[0].decrease(size);
  stats.reserved_bytes[0].decrease(size);
  stats.allocation[0].decrease(1);
  std::memset(real, kPoison, std::min<size_t>(size, 4096)); // a use after free shows
  std::free(real);
}

BlockPtr block_of(const c10::Storage& storage) {
  void* held = storage.data_ptr().get_context();
  return held == nullptr ? nullptr : *static_cast<BlockPtr*>(held);
}

void resize_storage(const c10::Storage& storage, size_t size) {
  const c10::Device device = storage.device();
  const auto before = exchange_device(device.index());
  at::DataPtr made = device_memory.allocate(size);
  exchange_device(before);
  const BlockPtr from = block_of(storage);
  if (from != nullptr && size != 0) {
    const BlockPtr to = *static_cast<BlockPtr*>(made.get_context());
    const size_t count = std::min<size_t>(storage.nbytes(), size);
    enqueue(current_stream(device.index()), {"resize", [from, to, count] {
      std::memcpy(to->real, from->real, count);
    }});
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

c10::Allocator* pinned_allocator() {
  return &pinned_memory;
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(lock);
  const auto* wanted = static_cast<const char*>(address);
  auto after = pinned.upper_bound(wanted);
  return after != pinned.begin() && wanted < (--after)->first + after->second;
}

c10::DeviceIndex device_of(const void* shown) {
  std::lock_guard<std::mutex> guard(lock);
  char* wanted = static_cast<char*>(const_cast<void*>(shown));
  auto after = blocks.upper_bound(wanted);
  if (after == blocks.begin() || wanted >= (--after)->first + after->second->size) {
    return -1;
  }
  return after->second->device;
}

void register_allocators() {
  c10::SetAllocator(kType, &device_memory);
}

} // namespace simulated

extern "C" {

void simulated_set_memory(int device, size_t capacity, double fraction) {
  std::lock_guard<std::mutex> guard(simulated::lock);
  simulated::accounts[device].capacity = capacity;
  simulated::accounts[device].fraction = fraction;
}

size_t simulated_capacity(int device) {
  return simulated::accounts[device].capacity;
}

double simulated_fraction(int device) {
  return simulated::accounts[device].fraction;
}

size_t simulated_allocated(int device) {
  std::lock_guard<std::mutex> guard(simulated::lock);
  return simulated::in_use(simulated::accounts[device]);
}
}
