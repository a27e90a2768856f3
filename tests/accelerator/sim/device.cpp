// The simulated device as torch sees it: guard, allocator, hooks, generator.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>

namespace sim {
namespace {

struct Event {
  HappeningPtr last;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override { return of(exchange_device(device.index())); }
  c10::Device getDevice() const override { return of(current_device()); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "there is no device ", device);
    if (device.has_index()) exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device device) const override { return torch_stream(current_stream(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return torch_stream(default_stream(index(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return torch_stream(pooled_stream(index(device))); }
  c10::Stream getNewStream(c10::Device device, int) const override { return torch_stream(pooled_stream(index(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return torch_stream(exchange_stream(stream.device_index(), number_of(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(number_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_stream(number_of(stream), "stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { wait_device(device, "synchronize"); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->last = sim::record(number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_event(number_of(stream), static_cast<Event*>(event)->last);
  }
  bool queryEvent(void* event) const override {
    bool done = !event || is_done(static_cast<Event*>(event)->last);
    if (done) raise_device_error();  // as a real device does: whoever asks it anything is told
    return done;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_host(static_cast<Event*>(event)->last, "event.synchronize");
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto a = static_cast<Event*>(first)->last, b = static_cast<Event*>(second)->last;
    TORCH_CHECK(is_done(a) && is_done(b), "elapsed_time of an event that has not happened yet");
    return (b->when - a->when) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get_context()) (*static_cast<BlockPtr*>(data.get_context()))->recorded.insert(number_of(stream));
  }

 private:
  static c10::Device of(int device) { return {kSim, static_cast<c10::DeviceIndex>(device)}; }
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void let_go(void* context) {
  auto* block = static_cast<BlockPtr*>(context);
  release(*block);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    auto* block = new BlockPtr(sim::allocate(bytes, current_stream(device)));
    return {(*block)->data, block, &let_go, c10::Device(kSim, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kSim, &device_allocator);

std::mutex pinned_mutex;
std::map<const char*, size_t>& pinned() {
  static auto* all = new std::map<const char*, size_t>;
  return *all;
}

void unpin(void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned().erase(static_cast<const char*>(data));
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = static_cast<char*>(std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64)));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned()[data] = bytes;
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
PinnedAllocator pinned_allocator;

// Random numbers: each random kernel gets a generator of the CPU, seeded with the device's seed and the number of the draw.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset = 0;

  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl({kSim, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset = 0; }
  void set_offset(uint64_t to) override { offset = to; }
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.is_cpu(), "the state of a generator is 16 bytes on the CPU");
    auto* numbers = static_cast<const uint64_t*>(state.data());
    seed_ = numbers[0], offset = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto* numbers = reinterpret_cast<uint64_t*>(state.data_ptr());
    numbers[0] = seed_, numbers[1] = offset;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->offset = offset;
    return copy;
  }
};

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all->at(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return at::make_generator<Generator>(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto old = *static_cast<BlockPtr*>(storage.data_ptr().get_context());
    int stream = current_stream(current_device());
    auto* fresh = new BlockPtr(sim::allocate(bytes, stream));
    size_t kept = std::min(bytes, old->bytes);
    if (kept && old->written) {
      enqueue(stream, "resize", [to = *fresh, old, kept] { std::memcpy(to->data, old->data, kept); },
              {{old, 0, kept, false}, {*fresh, 0, kept, true}});
    }
    storage.set_data_ptr_noswap({(*fresh)->data, fresh, &let_go, storage.device()});
    storage.set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto* wanted = static_cast<const char*>(data);
  auto after = pinned().upper_bound(wanted);
  if (after == pinned().begin()) return false;
  auto& [start, bytes] = *std::prev(after);
  return wanted < start + std::max<size_t>(bytes, 1);
}

at::Generator draw(const std::optional<at::Generator>& given) {
  const auto& chosen = given.has_value() && given->device().is_privateuseone() ? *given : default_generator(-1);
  auto* generator = static_cast<Generator*>(chosen.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> lock(generator->mutex_);
  return at::make_generator<at::CPUGeneratorImpl>(generator->seed_ * 1000003 + generator->offset++);
}

BlockPtr block_of(const at::Tensor& tensor) {
  auto* context = tensor.storage().data_ptr().get_context();
  return context ? *static_cast<BlockPtr*>(context) : nullptr;
}

c10::Stream torch_stream(int number) {
  int device = device_of(number);
  auto id = number == default_stream(device) ? 0 : number;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, static_cast<c10::DeviceIndex>(device)), id);
}

int number_of(const c10::Stream& stream) {
  return stream.id() == 0 ? default_stream(stream.device_index()) : static_cast<int>(stream.id());
}

}  // namespace sim
