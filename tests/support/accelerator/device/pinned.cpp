#include "pinned.h"

#include <ATen/core/CachingHostAllocator.h>

#include <cstdlib>
#include <cstring>

namespace sim {
namespace {

struct Piece {
  char* start;
  size_t size;
  std::vector<MarkPtr> until;
  bool is_free;
};

struct Pinned final : at::HostAllocator {
  c10::DataPtr allocate(size_t requested) override {
    if (requested == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    const size_t size = (requested + 4095) / 4096 * 4096;
    std::lock_guard<std::mutex> lock(mutex);
    Piece* found = nullptr;
    for (auto& [start, piece] : pieces) {
      std::erase_if(piece->until, [](const MarkPtr& mark) { return mark->is_reached(); });
      if (piece->is_free && piece->until.empty() && piece->size == size) found = piece;
    }
    if (!found) {
      found = new Piece{static_cast<char*>(std::aligned_alloc(4096, size)), size, {}, true};
      TORCH_CHECK(found->start, "no ", size, " bytes for pinned memory");
      pieces[found->start] = found;
    }
    found->is_free = false;
    return {found->start, found, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* piece);
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool record_event(void* address, void*, c10::Stream stream) override {
    keep_until(address, queue_of(stream).mark());
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  Piece* find(const void* address) {  // with the mutex held
    auto after = pieces.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == pieces.begin()) return nullptr;
    auto* piece = std::prev(after)->second;
    return address < piece->start + piece->size ? piece : nullptr;
  }

  std::mutex mutex;
  std::map<char*, Piece*> pieces;
};

Pinned& pinned() {
  static auto* one = new Pinned;
  return *one;
}

void Pinned::release(void* piece) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  static_cast<Piece*>(piece)->is_free = true;
}

}  // namespace

at::HostAllocator* pinned_memory() { return &pinned(); }

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  return pinned().find(address) != nullptr;
}

void keep_until(const void* address, MarkPtr mark) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  if (auto* piece = pinned().find(address)) piece->until.push_back(std::move(mark));
}

}  // namespace sim
