// What happened before what, among the jobs of all streams.
//
// Vector clocks (Mattern 1989): a job comes after those jobs of each stream that its clock names.
// Streams learn of each other by events, and all threads of the host share one clock: what only the
// order of host threads keeps apart may pass, and nothing is accused that is in order.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

namespace sim {

struct Queue;
using Clock = std::map<const Queue*, uint64_t>;  // the last job of each stream that came before

inline std::mutex clocks;  // held by whoever reads or writes a clock, or an access
inline Clock host;         // what threads of the host have waited for

inline void merge(Clock& into, const Clock& from) {
  for (const auto& [queue, tick] : from) {
    auto& known = into[queue];
    if (known < tick) known = tick;
  }
}

}  // namespace sim
