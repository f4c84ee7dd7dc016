// Pinned memory of the host, which late copies read and write.
#pragma once

#include "stream.h"

namespace at {
struct HostAllocator;
}

namespace sim {

at::HostAllocator* pinned_memory();
bool is_pinned(const void* address);
// Keep a piece from being used again before a copy is over.
void keep_until(const void* address, MarkPtr mark);

}  // namespace sim
