// Devices, streams, events and generators, registered where libtorch_cuda registers its own.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdlib>
#include <vector>

#include "generator.h"

namespace fake {
namespace {

size_t from_environment(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

struct StreamState {
  int64_t launched = 0, done = 0;
};

std::mutex streams_mutex;
std::vector<std::vector<StreamState>>& streams() {
  static auto* all = new std::vector<std::vector<StreamState>>(device_count(), std::vector<StreamState>(1));
  return *all;
}

thread_local c10::DeviceIndex this_device = 0;
thread_local std::vector<c10::StreamId> this_stream;

StreamState& state_of(c10::Stream stream) {
  return streams().at(stream.device_index()).at(stream.id());
}

// An event holds the time at which the device reached it. The fake works while the host waits, so that is the host's.
struct Event {
  c10::Stream stream;
  int64_t after;
  std::chrono::steady_clock::time_point at;
  bool timed;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { this_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    set_current_stream(stream);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    delete static_cast<Event*>(*event);
    std::lock_guard<std::mutex> lock(streams_mutex);
    *event = new Event{stream, state_of(stream).launched, std::chrono::steady_clock::now(),
                       flag == c10::EventFlag::BACKEND_DEFAULT};
    counts().add("events");
  }
  void block(void*, const c10::Stream&) const override { counts().add("stream waits"); }
  bool queryEvent(void* event) const override {
    const auto* one = static_cast<Event*>(event);
    std::lock_guard<std::mutex> lock(streams_mutex);
    return !one || state_of(one->stream).done >= one->after;
  }
  void synchronizeEvent(void* event) const override {
    if (event) {
      wait_for_stream(static_cast<Event*>(event)->stream, "event");
    }
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto *early = static_cast<Event*>(first), *late = static_cast<Event*>(second);
    TORCH_CHECK_VALUE(early && late, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(early->timed && late->timed, "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(late->at - early->at).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> lock(streams_mutex);
    return state_of(stream).done >= state_of(stream).launched;
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for_stream(stream, "stream"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { wait_for_device(device, "device"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return fake::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return fake::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = fake::current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(c10::DeviceIndex device) const override { wait_for_device(device, "device"); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? fake::current_device() : device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::kCUDA, fake::current_device()}; }
  std::string showConfig() const override { return "the fake GPU of autotune's tests"; }
};

} // namespace

int device_count() {
  static const int count = static_cast<int>(from_environment("FAKE_GPU_COUNT", 1));
  return count;
}

size_t total_bytes() {
  static const size_t bytes = from_environment("FAKE_GPU_MEMORY", size_t{4} << 30);
  return bytes;
}

size_t context_bytes() {
  static const size_t bytes = from_environment("FAKE_GPU_CONTEXT", size_t{256} << 20);
  return bytes;
}

void Counts::add(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counts_[name];
}

std::map<std::string, int64_t> Counts::take(bool reset) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = counts_;
  if (reset) {
    counts_.clear();
  }
  return found;
}

Counts& counts() {
  static auto* one = new Counts();
  return *one;
}

c10::DeviceIndex current_device() {
  return this_device;
}

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(0 <= device && device < device_count(), "CUDA error: invalid device ordinal");
  this_device = device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  device = device < 0 ? this_device : device;
  this_stream.resize(device_count(), 0);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), this_stream.at(device));
}

void set_current_stream(c10::Stream stream) {
  this_stream.resize(device_count(), 0);
  this_stream.at(stream.device_index()) = stream.id();
}

c10::Stream new_stream(c10::DeviceIndex device) {
  device = device < 0 ? this_device : device;
  std::lock_guard<std::mutex> lock(streams_mutex);
  auto& own = streams().at(device);
  own.emplace_back();
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), static_cast<c10::StreamId>(own.size() - 1));
}

void launch(c10::DeviceIndex device) {
  counts().add("launches");
  const auto stream = current_stream(device);
  std::lock_guard<std::mutex> lock(streams_mutex);
  ++state_of(stream).launched;
}

int64_t pending(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  int64_t found = 0;
  for (const auto& state : streams().at(device)) {
    found += state.launched - state.done;
  }
  return found;
}

void wait_for_stream(c10::Stream stream, const std::string& reason) {
  counts().add("sync:" + reason);
  std::lock_guard<std::mutex> lock(streams_mutex);
  state_of(stream).done = state_of(stream).launched;
}

void wait_for_device(c10::DeviceIndex device, const std::string& reason) {
  counts().add("sync:" + reason);
  std::lock_guard<std::mutex> lock(streams_mutex);
  for (auto& state : streams().at(device < 0 ? this_device : device)) {
    state.done = state.launched;
  }
}

int sync_debug_mode = 0;

void implicit_wait(c10::DeviceIndex device, const std::string& reason) {
  wait_for_stream(current_stream(device), reason);
  if (sync_debug_mode == 1) {
    TORCH_WARN("called a synchronizing CUDA operation");
  }
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation");
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < device_count(); ++index) {
      made->push_back(at::make_generator<GeneratorImpl>(static_cast<c10::DeviceIndex>(index)));
      made->back().seed();
    }
    return made;
  }();
  return all->at(device < 0 ? this_device : device);
}

using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
static c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, CUDAHooksArgs> registered_hooks(
    "CUDAHooks",
    CUDAHooksRegistry(),
    c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, CUDAHooksArgs>::DefaultCreator<Hooks>);
static const bool registered_allocator = [] {
  c10::SetAllocator(c10::kCUDA, device_allocator(), 255);
  at::setHostAllocator(c10::kCUDA, static_cast<at::HostAllocator*>(pinned_allocator()), 255);
  return true;
}();

} // namespace fake
