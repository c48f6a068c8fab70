// What the fake device counts, and its memory.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <map>
#include <mutex>
#include <string>

namespace fake {

// Read once from the environment: FAKE_GPU_COUNT devices of FAKE_GPU_MEMORY bytes each.
int device_count();
size_t total_bytes();

// Bytes that something else than the allocator holds on every device: the context, FAKE_GPU_CONTEXT bytes.
size_t context_bytes();

// How often each thing has happened since the process began or the counts were reset: "launches", "sync:item",
// "copy:host-to-device:pinned:asynchronous" and so on.
struct Counts {
  void add(const std::string& name);
  std::map<std::string, int64_t> take(bool reset);

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
};
Counts& counts();

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
void set_current_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);

// A kernel goes into the current stream: it is pending until something waits for the stream.
void launch(c10::DeviceIndex device);
int64_t pending(c10::DeviceIndex device);
void wait_for_device(c10::DeviceIndex device, const std::string& reason);
void wait_for_stream(c10::Stream stream, const std::string& reason);

// How a synchronising operation is met: 0 silently, 1 with a warning, 2 with an error (cuda's sync debug mode).
extern int sync_debug_mode;
// What an operation that makes the host wait does, e.g. ".item()".
void implicit_wait(c10::DeviceIndex device, const std::string& reason);

c10::DeviceAllocator* device_allocator();
void set_memory_fraction(c10::DeviceIndex device, double fraction);
double memory_fraction(c10::DeviceIndex device);

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

} // namespace fake
