// A caching allocator that decides as c10/cuda/CUDACachingAllocator.cpp does: sizes rounded up to 512 bytes, a pool of
// small blocks (up to 1 MiB, in segments of 2 MiB) and one of large (segments of 20 MiB below 10 MiB, else rounded up
// to 2 MiB), the best fit, a block split where the rest is worth keeping, neighbours merged when they are freed. What
// is cached is given back before an allocation fails. Blocks are kept by device, not by stream.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <set>
#include <unordered_map>
#include <vector>

namespace fake {
namespace {

using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kRound = 512, kSmall = 1 << 20, kSmallSegment = 2 << 20, kLargeSegment = 20 << 20;
constexpr size_t kLeastLarge = 10 << 20, kLargeRound = 2 << 20;

struct Block {
  c10::DeviceIndex device;
  bool small;
  size_t size;
  char* data;
  size_t requested = 0;
  bool used = false;
  Block *before = nullptr, *after = nullptr;
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->data < b->data;
  }
};

struct Memory {
  DeviceStats stats;
  std::set<Block*, BySize> free_small, free_large;
  size_t reserved = 0;
  double fraction = 1.0;
};

size_t round_up(size_t size, size_t to) {
  return (size + to - 1) / to * to;
}

std::string tell(size_t bytes) {
  return c10::str(bytes / 1048576, ".", bytes % 1048576 * 100 / 1048576, " MiB");
}

class Allocator final : public c10::DeviceAllocator {
 public:
  Allocator() : memories_(device_count()) {}

  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    void* data = bytes == 0 ? nullptr : take(device, bytes);
    return {data, data, &free_data, c10::Device(c10::kCUDA, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_data; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& memory : memories_) {
      release_cached(memory);
    }
  }

  void recordStream(const c10::DataPtr&, c10::Stream) override { counts().add("record_stream"); }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return memories_.at(device).stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
    auto& stats = memories_.at(device).stats;
    stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {total_bytes() - context_bytes() - memories_.at(device).reserved, total_bytes()};
  }

  double& fraction(c10::DeviceIndex device) { return memories_.at(device).fraction; }

  void put_back(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = blocks_.at(data);
    auto& memory = memories_.at(block->device);
    blocks_.erase(data);
    block->used = false;
    count(memory.stats.allocation, block, -1);
    count(memory.stats.active, block, -1);
    count(memory.stats.allocated_bytes, block, -static_cast<int64_t>(block->size));
    count(memory.stats.active_bytes, block, -static_cast<int64_t>(block->size));
    count(memory.stats.requested_bytes, block, -static_cast<int64_t>(block->requested));
    auto& free = pool(memory, block->small);
    if (block->before && !block->before->used) {
      auto* first = block->before;
      free.erase(first);
      block = merge(first, block);
    }
    if (block->after && !block->after->used) {
      free.erase(block->after);
      merge(block, block->after);
    }
    free.insert(block);
  }

 private:
  static void free_data(void* data) {
    if (data) {
      static_cast<Allocator*>(device_allocator())->put_back(data);
    }
  }

  static std::set<Block*, BySize>& pool(Memory& memory, bool small) {
    return small ? memory.free_small : memory.free_large;
  }

  static void count(c10::CachingAllocator::StatArray& stats, const Block* block, int64_t by) {
    for (auto type : {StatType::AGGREGATE, block->small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
      auto& stat = stats[static_cast<size_t>(type)];
      by < 0 ? stat.decrease(-by) : stat.increase(by);
    }
  }

  template <class Function>
  void each_stat(c10::DeviceIndex device, Function function) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& s = memories_.at(device).stats;
    for (auto* stats : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes,
                        &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes}) {
      for (auto& stat : *stats) {
        function(stat);
      }
    }
  }

  void* take(c10::DeviceIndex device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& memory = memories_.at(device);
    const auto size = round_up(bytes, kRound);
    const bool small = size <= kSmall;
    auto& free = pool(memory, small);
    Block wanted{device, small, size, nullptr};
    auto found = free.lower_bound(&wanted);
    Block* block = found == free.end() ? new_segment(memory, device, size, bytes) : *found;
    free.erase(block);
    const auto rest = block->size - size;
    if (small ? rest >= kRound : rest > kSmall) {
      free.insert(split(block, size));
    }
    block->used = true;
    block->requested = bytes;
    blocks_[block->data] = block;
    count(memory.stats.allocation, block, 1);
    count(memory.stats.active, block, 1);
    count(memory.stats.allocated_bytes, block, block->size);
    count(memory.stats.active_bytes, block, block->size);
    count(memory.stats.requested_bytes, block, bytes);
    return block->data;
  }

  Block* new_segment(Memory& memory, c10::DeviceIndex device, size_t size, size_t bytes) {
    const bool small = size <= kSmall;
    const auto segment = small ? kSmallSegment : size < kLeastLarge ? kLargeSegment : round_up(size, kLargeRound);
    if (!fits(memory, segment)) {
      ++memory.stats.num_alloc_retries;
      release_cached(memory);
      if (!fits(memory, segment)) {
        ++memory.stats.num_ooms;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", tell(bytes), ". GPU ", int(device),
            " has a total capacity of ", tell(total_bytes()), " of which ",
            tell(total_bytes() - context_bytes() - memory.reserved), " is free. ",
            memory.fraction < 1.0 ? c10::str(tell(allowed(memory)), " allowed; ") : "", "Of the allocated memory ",
            tell(memory.stats.allocated_bytes[0].current), " is allocated by PyTorch.");
      }
    }
    auto* data = static_cast<char*>(std::aligned_alloc(4096, segment));
    TORCH_CHECK(data, "the host has no ", tell(segment), " for the fake device");
    auto* block = new Block{device, small, segment, data};
    memory.reserved += segment;
    ++memory.stats.num_device_alloc;
    count(memory.stats.segment, block, 1);
    count(memory.stats.reserved_bytes, block, segment);
    return block;
  }

  static size_t allowed(const Memory& memory) { return static_cast<size_t>(memory.fraction * total_bytes()); }

  static bool fits(const Memory& memory, size_t segment) {
    const auto after = memory.reserved + segment;
    return after + context_bytes() <= total_bytes() && after <= allowed(memory);
  }

  void release_cached(Memory& memory) {
    for (auto* free : {&memory.free_small, &memory.free_large}) {
      for (auto one = free->begin(); one != free->end();) {
        auto* block = *one;
        if (block->before || block->after) {
          ++one;
          continue;
        }
        one = free->erase(one);
        memory.reserved -= block->size;
        ++memory.stats.num_device_free;
        count(memory.stats.segment, block, -1);
        count(memory.stats.reserved_bytes, block, -static_cast<int64_t>(block->size));
        std::free(block->data);
        delete block;
      }
    }
  }

  static Block* split(Block* block, size_t size) {
    auto* rest = new Block{block->device, block->small, block->size - size, block->data + size};
    rest->before = block;
    rest->after = block->after;
    if (rest->after) {
      rest->after->before = rest;
    }
    block->after = rest;
    block->size = size;
    return rest;
  }

  static Block* merge(Block* first, Block* second) {
    first->size += second->size;
    first->after = second->after;
    if (first->after) {
      first->after->before = first;
    }
    delete second;
    return first;
  }

  std::mutex mutex_;
  std::vector<Memory> memories_;
  std::unordered_map<void*, Block*> blocks_;
};

std::mutex pinned_mutex;
std::map<const char*, size_t>& pinned_blocks() {
  static auto* blocks = new std::map<const char*, size_t>();
  return *blocks;
}

void free_pinned(void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned_blocks().erase(static_cast<char*>(data));
  std::free(data);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = std::aligned_alloc(4096, round_up(std::max<size_t>(bytes, 1), 4096));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks()[static_cast<char*>(data)] = bytes;
    counts().add("pinned allocations");
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override { counts().add("pinned cache emptied"); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Allocator& allocator() {
  static auto* one = new Allocator();
  return *one;
}

} // namespace

c10::DeviceAllocator* device_allocator() {
  return &allocator();
}

void set_memory_fraction(c10::DeviceIndex device, double fraction) {
  TORCH_CHECK(0.0 <= fraction && fraction <= 1.0, "invalid fraction:", fraction, ". Please set within [0, 1].");
  allocator().fraction(device) = fraction;
}

double memory_fraction(c10::DeviceIndex device) {
  return allocator().fraction(device);
}

c10::Allocator* pinned_allocator() {
  static auto* one = new PinnedAllocator();
  return one;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto* at = static_cast<const char*>(pointer);
  auto after = pinned_blocks().upper_bound(at);
  if (after == pinned_blocks().begin()) {
    return false;
  }
  --after;
  return at < after->first + std::max<size_t>(after->second, 1);
}

} // namespace fake
