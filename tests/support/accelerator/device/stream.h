// Streams: a thread and a queue of jobs each; events; the device and the streams of each thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "access.h"
#include "clock.h"

namespace sim {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 4;

struct Block;

// One moment of one stream: what an event holds.
class Mark {
 public:
  void reach();
  void wait();
  bool is_reached();

  Clock seen;
  std::chrono::steady_clock::time_point at;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};
using MarkPtr = std::shared_ptr<Mark>;

void host_has_seen(const Mark& mark);

using Job = std::function<void()>;
using Uses = std::vector<std::pair<Block*, Access>>;

// A stream. It is never deleted, as its number can be named for ever.
struct Queue {
  Queue(c10::DeviceIndex device, c10::StreamId id);

  // Add a job; raise if it uses memory in no order with a job of another stream.
  void push(Job job, Uses uses = {});
  // Run a job together with the next one.
  void prepend(Job job);
  MarkPtr mark();
  void wait_for(const MarkPtr& mark);
  bool is_idle();
  // Wait for all jobs; raise what one has raised, as a GPU does.
  void drain();

  const c10::DeviceIndex device;
  const c10::StreamId id;
  Clock seen;  // guarded by `clocks`

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable came_, went_;
  std::deque<Job> jobs_;
  std::vector<Job> before_;
  uint64_t pushed_ = 0, done_ = 0, tick_ = 0;
  std::exception_ptr failed_;
};

Queue& queue_of(const c10::Stream& stream);
Queue& queue_of(c10::DeviceIndex device);  // the current one
Queue& queue_of(c10::DeviceIndex device, c10::StreamId id);
void drain(c10::DeviceIndex device);

c10::DeviceIndex checked(c10::DeviceIndex device);
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::DeviceIndex index_of(c10::Device device);  // of "sim", the current one

bool is_forked();  // a child has no threads, and so no streams

// Of all jobs, which share sleeps before it runs, and for how long at most.
void set_delays(double share, int microseconds, unsigned seed);

}  // namespace sim
