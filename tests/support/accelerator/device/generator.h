// Random numbers of the devices: the CPU's generator and kernels, in the order of the calls.
#pragma once

#include <ATen/core/Generator.h>

#include "stream.h"

namespace sim {

at::Generator new_generator(c10::DeviceIndex device);  // -1: of the current device
const at::Generator& default_generator(c10::DeviceIndex device);

// The CPU's generator behind one of a device. Wait with `settle` where the host uses it.
at::Generator inner(const at::Generator& generator);
void settle(const at::Generator& generator);
// Have the next job of `queue` draw after all draws of before, whatever their streams.
void drawing(const at::Generator& generator, Queue& queue);
void drawn(const at::Generator& generator, Queue& queue);

}  // namespace sim
