// Tensors of the devices: how they are made, and how kernels and shapes see them.
#pragma once

#include <ATen/core/Tensor.h>

#include "memory.h"

namespace sim {

at::Tensor new_tensor(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, c10::Device device);
const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format);
void grow(c10::StorageImpl* storage, size_t bytes);

inline bool is_simulated(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

// The same bytes for a kernel of the CPU. It owns nothing, so memory that is freed too early shows.
at::Tensor on_shadow(const at::Tensor& tensor);
at::Tensor on_meta(const at::Tensor& tensor);

// What a job does with tensors: of those that are no memory of the devices, nothing.
void add_use(Uses& uses, const at::Tensor& tensor, bool is_write, const std::shared_ptr<const Place>& place);

}  // namespace sim
