// Memory of the devices: addresses that the host cannot touch, and an allocator as CUDA's.
//
// Behind the addresses of a device, which tensors hold, there is nothing: a touch by the host is a
// segmentation fault, always. At a fixed distance lies the shadow, with the bytes, for kernels.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <set>

#include "stream.h"

namespace sim {

// A piece of memory that tensors have, or had: it is used again on the stream that it was made for.
struct Block {
  size_t offset, size;
  size_t requested;
  c10::DeviceIndex device;
  c10::StreamId stream;
  std::set<c10::StreamId> recorded;  // by record_stream
  std::vector<MarkPtr> until;        // which have to be reached before it is used again
  History history;                   // guarded by `clocks`
};

void* shadow_of(const void* address);
c10::DeviceIndex device_of(const void* address);
Block* block_of(const at::Tensor& tensor);  // null for memory of another allocator
void set_limit(c10::DeviceIndex device, size_t bytes);
void set_fraction(c10::DeviceIndex device, double fraction);
double fraction(c10::DeviceIndex device);
size_t capacity();  // of each device, without a limit
c10::DeviceAllocator* allocator();

}  // namespace sim
