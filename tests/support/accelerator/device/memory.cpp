#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstring>

namespace sim {
namespace {

constexpr size_t SPACE = size_t(1) << 37;  // addresses of one device
constexpr size_t PAGE = 4096;
constexpr int TOTAL = 0;  // of a statistic, among its parts

size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

char* map(int protection) {
  void* start = mmap(nullptr, SPACE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(start != MAP_FAILED, "no addresses for the memory of the simulated accelerator");
  return static_cast<char*>(start);
}

struct Memory {
  void open() {
    if (base) return;
    shadow = map(PROT_READ | PROT_WRITE);
    base = map(PROT_NONE);
  }
  // Make free what was freed while other streams had it, as far as they are done.
  void collect() {
    std::erase_if(waiting, [this](Block* block) {
      std::erase_if(block->until, [](const MarkPtr& mark) { return mark->is_reached(); });
      if (!block->until.empty()) return false;
      stats.active_bytes[TOTAL].decrease(block->size);
      free[block->stream].emplace(block->size, block);
      return true;
    });
  }
  void empty_cache() {
    collect();
    for (auto& [stream, blocks] : free)
      for (auto& [size, block] : blocks) {
        madvise(shadow + block->offset, size, MADV_DONTNEED);
        stats.reserved_bytes[TOTAL].decrease(size);
        delete block;
      }
    free.clear();
  }
  // Return a free block of the stream, or a new one; null: the bound is reached.
  Block* take(size_t size, c10::DeviceIndex device, c10::StreamId stream) {
    collect();
    auto& mine = free[stream];
    // Of equal ones the last that came is used first: reuse is as early as it can be.
    auto after = mine.upper_bound(size);
    if (after != mine.begin() && std::prev(after)->first == size) --after;
    if (after != mine.end() && after->first <= size + size / 4) {
      auto* block = after->second;
      mine.erase(after);
      return block;
    }
    if (size_t(stats.reserved_bytes[TOTAL].current) + size > fraction * double(limit)) return nullptr;
    TORCH_CHECK(top + size <= SPACE, "the addresses of the simulated accelerator are used up");
    auto* block = new Block{top, size, 0, device, stream, {}, {}, {}};
    top += rounded(size, PAGE);  // pages of its own: they can be given back
    stats.reserved_bytes[TOTAL].increase(size);
    return block;
  }

  std::mutex mutex;
  char *base = nullptr, *shadow = nullptr;
  size_t top = 0, limit = SPACE;
  double fraction = 1;  // of the limit, that this process may take
  std::map<c10::StreamId, std::multimap<size_t, Block*>> free;
  std::vector<Block*> waiting;
  c10::CachingDeviceAllocator::DeviceStats stats;
};
Memory* const memories = new Memory[DEVICES];

void require_no_use(Block* block) {
  std::unique_lock<std::mutex> lock(clocks);
  auto& own = queue_of(block->device, block->stream);
  Clock seen = own.seen;
  merge(seen, host);
  block->history.forget(
      [&](const Access& access) { return block->recorded.count(access.queue->id) && access.queue->device == block->device; });
  const Access* unseen = block->history.unseen(&own, seen);
  if (unseen) {
    auto theirs = *unseen;
    block->history = {};
    lock.unlock();
    report(c10::str(
        "unordered free: memory of stream ", block->stream, " of sim:", int(block->device), " is freed while stream ",
        theirs.queue->id, " of sim:", int(theirs.queue->device), " may still ", theirs.is_write ? "write" : "read",
        " it, and record_stream was not called.\n  use: ", to_string(*theirs.place)));
  } else {
    block->history = {};
  }
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t requested) override {
    const auto device = current_device();
    if (requested == 0) return {nullptr, c10::Device(TYPE, device)};
    auto& memory = memories[device];
    auto& queue = queue_of(device);
    size_t size = rounded(requested, 512);
    if (size >= 1 << 20) size = rounded(size, 1 << 16);
    Block* block = nullptr;
    for (bool again = false; !block; again = true) {
      if (again) sim::drain(device);
      std::lock_guard<std::mutex> lock(memory.mutex);
      memory.open();
      if (again) {
        memory.stats.num_alloc_retries++;
        memory.empty_cache();
      }
      block = memory.take(size, device, queue.id);
      if (!block && again) {
        memory.stats.num_ooms++;
        C10_THROW_ERROR(
            OutOfMemoryError,
            c10::str("SIM out of memory. Tried to allocate ", requested, " bytes. sim:", int(device), " has ",
                     size_t(memory.fraction * double(memory.limit)), " bytes for this process, of which ", memory.stats.allocated_bytes[TOTAL].current,
                     " are allocated."));
      }
      if (block) {
        block->requested = requested;
        memory.stats.allocated_bytes[TOTAL].increase(block->size);
        memory.stats.active_bytes[TOTAL].increase(block->size);
        memory.stats.requested_bytes[TOTAL].increase(requested);
      }
    }
    // Who reads it before it is written reads NaN, or -1.
    queue.prepend([start = memory.shadow + block->offset, requested] { memset(start, 0xFF, requested); });
    return {memory.base + block->offset, block, &release, c10::Device(TYPE, device)};
  }

  static void release(void* context) {
    if (is_forked()) return;
    auto* block = static_cast<Block*>(context);
    require_no_use(block);
    auto& memory = memories[block->device];
    std::vector<MarkPtr> until;
    for (auto stream : block->recorded) until.push_back(queue_of(block->device, stream).mark());
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.stats.allocated_bytes[TOTAL].decrease(block->size);
    memory.stats.requested_bytes[TOTAL].decrease(block->requested);
    block->until = std::move(until);
    block->recorded.clear();
    memory.waiting.push_back(block);
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    queue_of(current_device()).push([to = shadow_of(to), from = shadow_of(from), size] { memcpy(to, from, size); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < DEVICES; device++) {
      std::lock_guard<std::mutex> lock(memories[device].mutex);
      if (memories[device].base) memories[device].empty_cache();
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (!data.get()) return;
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard<std::mutex> lock(memories[block->device].mutex);
    if (stream.id() != block->stream) block->recorded.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memories[device].mutex);
    return memories[device].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_statistic(device, [](auto& statistic) { statistic.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each_statistic(device, [](auto& statistic) { statistic.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto& memory = memories[device];
    std::lock_guard<std::mutex> lock(memory.mutex);
    return {memory.limit - memory.stats.reserved_bytes[TOTAL].current, memory.limit};
  }

 private:
  template <class F>
  void each_statistic(c10::DeviceIndex device, F act) {
    std::lock_guard<std::mutex> lock(memories[device].mutex);
    auto& stats = memories[device].stats;
    for (auto* one : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      act((*one)[TOTAL]);
  }
};

}  // namespace

c10::DeviceAllocator* allocator() {
  static auto* one = new Allocator;
  return one;
}

c10::DeviceIndex device_of(const void* address) {
  for (int device = 0; device < DEVICES; device++) {
    auto* base = memories[device].base;
    if (base && address >= base && address < base + SPACE) return c10::DeviceIndex(device);
  }
  TORCH_CHECK(false, "not an address of the simulated accelerator: ", address);
}

void* shadow_of(const void* address) {
  if (!address) return nullptr;
  auto& memory = memories[device_of(address)];
  return memory.shadow + (static_cast<const char*>(address) - memory.base);
}

Block* block_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != TYPE || !tensor.has_storage()) return nullptr;
  const auto& data = tensor.storage().data_ptr();
  return data.get_deleter() == &Allocator::release ? static_cast<Block*>(data.get_context()) : nullptr;
}

void set_limit(c10::DeviceIndex device, size_t bytes) {
  std::lock_guard<std::mutex> lock(memories[checked(device)].mutex);
  memories[device].limit = bytes;
}

void set_fraction(c10::DeviceIndex device, double fraction) {
  std::lock_guard<std::mutex> lock(memories[checked(device)].mutex);
  memories[device].fraction = fraction;
}

double fraction(c10::DeviceIndex device) { return memories[checked(device)].fraction; }

size_t capacity() { return SPACE; }

}  // namespace sim
