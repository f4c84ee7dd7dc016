#include "access.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <atomic>
#include <sstream>

// Of Python, whose headers are not everywhere.
extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Fetch(void**, void**, void**);
void PyErr_Restore(void*, void*, void*);
}

namespace sim {
namespace {

// Puts aside what Python is raising: memory is freed meanwhile, and names of frames need Python.
struct Unraised {
  Unraised() { PyErr_Fetch(&error[0], &error[1], &error[2]); }
  ~Unraised() {
    PyErr_Restore(error[0], error[1], error[2]);
    PyGILState_Release(gil);
  }
  int gil = PyGILState_Ensure();
  void* error[3];
};

std::mutex reports;
std::vector<std::string> waiting;
std::atomic<uint64_t> found{0};

bool overlap(const Bytes& a, const Bytes& b) {
  for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
    if (x->first < y->second && y->first < x->second) return true;
    x->second <= y->second ? ++x : ++y;
  }
  return false;
}

bool covers(const Bytes& a, const Bytes& b) {
  return a.size() == 1 ? !b.empty() && a[0].first <= b.front().first && b.back().second <= a[0].second : a == b;
}

}  // namespace

std::shared_ptr<const Place> here(const std::string& name) {
  auto node = torch::autograd::get_current_node();
  auto place = std::make_shared<Place>();
  place->name = node ? name + " of " + node->name() : name;
  place->stack = torch::CapturedTraceback::gather(true, false, false);
  return place;
}

std::string to_string(const Place& place) {
  std::ostringstream text;
  text << place.name << "\n";
  if (!place.stack) return text.str();
  const Unraised unraised;
  const auto symbols = torch::symbolize({place.stack.get()});
  for (auto index : symbols.tracebacks.at(0)) {
    const auto& frame = symbols.all_frames.at(index);
    text << "    " << frame.filename << ":" << frame.lineno << " " << frame.funcname << "\n";
  }
  return text.str();
}

Bytes bytes_of(const at::Tensor& tensor, size_t most) {
  const size_t item = tensor.itemsize();
  if (tensor.numel() == 0) return {};
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size; the largest stride first
  for (int64_t d = 0; d < tensor.dim(); d++)
    if (tensor.size(d) > 1 && tensor.stride(d) != 0) dims.emplace_back(tensor.stride(d), tensor.size(d));
  std::sort(dims.rbegin(), dims.rend());
  int64_t piece = 1;  // elements in a row without a gap
  while (!dims.empty() && dims.back().first <= piece) {
    piece += (dims.back().second - 1) * dims.back().first;
    dims.pop_back();
  }
  std::vector<int64_t> starts{tensor.storage_offset()};
  for (const auto& [stride, size] : dims) {
    std::vector<int64_t> next;
    for (auto start : starts)
      for (int64_t i = 0; i < size && next.size() < most; i++) next.push_back(start + i * stride);
    starts = std::move(next);
  }
  Bytes bytes;
  for (auto start : starts) bytes.emplace_back(start * item, (start + piece) * item);
  return bytes;
}

const Access* History::conflict(const Access& access, const Clock& seen) const {
  for (const auto& other : accesses_) {
    if (other.queue == access.queue || !(other.is_write || access.is_write)) continue;
    auto known = seen.find(other.queue);
    if (known != seen.end() && known->second >= other.tick) continue;
    if (overlap(other.bytes, access.bytes)) return &other;
  }
  return nullptr;
}

void History::add(Access access) {
  // Whoever comes after this one comes after those, too.
  forget([&](const Access& old) {
    bool is_implied = access.is_write || (old.queue == access.queue && !old.is_write);
    return is_implied && covers(access.bytes, old.bytes);
  });
  accesses_.push_back(std::move(access));
}

const Access* History::unseen(const Queue* own, const Clock& seen) const {
  for (const auto& access : accesses_) {
    auto known = seen.find(access.queue);
    if (access.queue != own && (known == seen.end() || known->second < access.tick)) return &access;
  }
  return nullptr;
}

void report(std::string fault) {
  std::lock_guard<std::mutex> lock(reports);
  found++;
  waiting.push_back(std::move(fault));
}

void raise_reported() {
  std::string all;
  {
    std::lock_guard<std::mutex> lock(reports);
    for (auto& fault : waiting) all += fault;
    waiting.clear();
  }
  TORCH_CHECK(all.empty(), all);
}

bool has_reports() {
  std::lock_guard<std::mutex> lock(reports);
  return !waiting.empty();
}

uint64_t faults() { return found; }

}  // namespace sim
