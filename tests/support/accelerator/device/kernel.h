// One kernel for all operators: the CPU's, on the shadow, as a job of the stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace sim {

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Where torch has one kernel for every device beside the CPU's, as for layer norm, that one goes
// before a fallback, and computes other bits: put this one in its place. Call when all others are.
void take_the_cpus_kernels();

struct Counts {
  uint64_t late = 0, in_step = 0;  // calls that became jobs, and that the host waited for
};
Counts counts();

}  // namespace sim
