#include "stream.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <thread>

#include "memory.h"

namespace sim {
namespace {

struct {
  std::atomic<double> share{0.0};
  std::atomic<int> microseconds{0};
  std::atomic<unsigned> seed{0};
} delays;

std::atomic<bool> started{false}, forked{false};  // a stream; a process that had one
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked = started.load(); });

std::mutex all_mutex;
auto& all = *new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue*>;
c10::StreamId next_stream = 1;  // 0 is the default one of each device

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local c10::StreamId streams_of_thread[DEVICES] = {};

c10::Stream as_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
}

}  // namespace

void Mark::reach() {
  std::lock_guard<std::mutex> lock(mutex_);
  at = std::chrono::steady_clock::now();
  reached_ = true;
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

bool Mark::is_reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reached_;
}

void host_has_seen(const Mark& mark) {
  std::lock_guard<std::mutex> lock(clocks);
  merge(host, mark.seen);
}

Queue::Queue(c10::DeviceIndex device, c10::StreamId id) : device(device), id(id) {
  started = true;
  std::thread([this] { run(); }).detach();
}

void Queue::run() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::set_num_threads(1);  // sums of the CPU's kernels depend on it; a GPU's on no setting of the host
  std::minstd_rand draw(delays.seed * 7919 + device * 1000 + unsigned(id) + 1);
  for (;;) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      came_.wait(lock, [this] { return !jobs_.empty(); });
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    const int most = delays.microseconds;
    if (most > 0 && draw() % 10000 < delays.share * 10000) usleep(draw() % unsigned(most));
    std::exception_ptr raised;
    try {
      job();
    } catch (...) {
      raised = std::current_exception();
    }
    job = nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    if (raised && !failed_) failed_ = raised;
    done_++;
    went_.notify_all();
  }
}

void Queue::push(Job job, Uses uses) {
  TORCH_CHECK(!is_forked(), "Cannot re-initialize the simulated accelerator in a forked process");
  std::unique_lock<std::mutex> of_clocks(clocks);
  merge(seen, host);
  seen[this] = ++tick_;
  for (auto& [block, access] : uses) {
    access.queue = this;
    access.tick = tick_;
    const Access* other = block->history.conflict(access, seen);
    if (!other) continue;
    Access theirs = *other;
    of_clocks.unlock();  // names of frames need Python's lock
    report(c10::str(
        "unordered access: stream ", id, access.is_write ? " writes" : " reads", " memory of sim:", int(block->device),
        ", which stream ", theirs.queue->id, " of sim:", int(theirs.queue->device),
        theirs.is_write ? " writes" : " reads", ", and none waits for the other.\n  now: ", to_string(*access.place),
        "  before: ", to_string(*theirs.place)));
    raise_reported();
  }
  for (auto& [block, access] : uses) block->history.add(std::move(access));
  std::lock_guard<std::mutex> lock(mutex_);
  of_clocks.unlock();
  if (before_.empty()) {
    jobs_.push_back(std::move(job));
  } else {
    jobs_.push_back([first = std::exchange(before_, {}), job = std::move(job)] {
      for (const auto& each : first) each();
      job();
    });
  }
  pushed_++;
  came_.notify_one();
}

void Queue::prepend(Job job) {
  std::lock_guard<std::mutex> lock(mutex_);
  before_.push_back(std::move(job));
}

bool Queue::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == pushed_;
}

void Queue::drain() {
  Clock then;
  {
    std::lock_guard<std::mutex> lock(clocks);
    then = seen;
  }
  {
    std::unique_lock<std::mutex> lock(mutex_);
    went_.wait(lock, [this, until = pushed_] { return done_ >= until; });
    if (auto raised = std::exchange(failed_, nullptr)) {
      lock.unlock();
      std::rethrow_exception(raised);
    }
  }
  std::lock_guard<std::mutex> lock(clocks);
  merge(host, then);
}

MarkPtr Queue::mark() {
  auto mark = std::make_shared<Mark>();
  push([mark] { mark->reach(); });
  std::lock_guard<std::mutex> lock(clocks);
  mark->seen = seen;
  return mark;
}

void Queue::wait_for(const MarkPtr& mark) {
  {
    std::lock_guard<std::mutex> lock(clocks);
    merge(seen, mark->seen);
  }
  push([mark] { mark->wait(); });
}

Queue& queue_of(c10::DeviceIndex device, c10::StreamId id) {
  std::lock_guard<std::mutex> lock(all_mutex);
  auto& queue = all[{device, id}];
  if (!queue) queue = new Queue(device, id);
  return *queue;
}

Queue& queue_of(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }

Queue& queue_of(c10::DeviceIndex device) { return queue_of(device, streams_of_thread[device]); }

void drain(c10::DeviceIndex device) {
  std::vector<Queue*> some;
  {
    std::lock_guard<std::mutex> lock(all_mutex);
    for (auto& [key, queue] : all)
      if (key.first == device) some.push_back(queue);
  }
  for (auto* queue : some) queue->drain();
}

c10::DeviceIndex checked(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < DEVICES, "invalid device ordinal: sim:", int(device), " of ", DEVICES);
  return device;
}

c10::DeviceIndex current_device() { return device_of_thread; }
void set_current_device(c10::DeviceIndex device) { device_of_thread = checked(device); }
c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? checked(device.index()) : device_of_thread;
}

bool is_forked() { return forked; }

void set_delays(double share, int microseconds, unsigned seed) {
  delays.share = share;
  delays.seed = seed;
  delays.microseconds = microseconds;
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(TYPE, device_of_thread); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < DEVICES) device_of_thread = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    auto index = index_of(device);
    return as_stream(index, streams_of_thread[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_stream(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    std::lock_guard<std::mutex> lock(all_mutex);
    return as_stream(index_of(device), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    streams_of_thread[stream.device_index()] = stream.id();
    return old;
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    *static_cast<MarkPtr*>(*event) = queue_of(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) queue_of(stream).wait_for(*static_cast<MarkPtr*>(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& mark = *static_cast<MarkPtr*>(event);
    if (!mark->is_reached()) return false;
    host_has_seen(*mark);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto& mark = *static_cast<MarkPtr*>(event);
    mark->wait();
    host_has_seen(*mark);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto &begin = *static_cast<MarkPtr*>(from), &end = *static_cast<MarkPtr*>(to);
    TORCH_CHECK(begin->is_reached() && end->is_reached(), "Both events must be completed");
    return std::chrono::duration<double, std::milli>(end->at - begin->at).count();
  }

  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  bool queryStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream);
    if (!queue.is_idle()) return false;
    queue.drain();
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { queue_of(stream).drain(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    drain(device < 0 ? device_of_thread : device);
    raise_reported();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    c10::getDeviceAllocator(TYPE)->recordStream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace sim
