#include "tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace sim {
namespace {

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::ScalarType or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(TYPE, index_of(device.value_or(c10::Device(TYPE)))));
  return at::detail::empty_generic(size, allocator(), KEYS, or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  return new_tensor(size, stride, or_default(dtype), device.value_or(c10::Device(TYPE)));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto count = int64_t(storage.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {count}, {});
}

at::Tensor& set_nothing(at::Tensor& self) {
  at::Storage nothing(at::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return at::native::set_storage_cpu_(self, std::move(nothing), 0, {0}, {});
}

at::Tensor as_wrapped(at::Tensor made, const at::Tensor& from) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

}  // namespace

at::Tensor new_tensor(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, c10::Device device) {
  c10::DeviceGuard guard(c10::Device(TYPE, index_of(device)));
  return at::detail::empty_strided_generic(size, stride, allocator(), KEYS, dtype);
}

void grow(c10::StorageImpl* storage, size_t bytes) {
  if (storage->nbytes() >= bytes) return;
  c10::DeviceGuard guard(storage->device());
  auto data = allocator()->allocate(bytes);
  if (const size_t kept = storage->nbytes())
    queue_of(storage->device().index()).push([to = shadow_of(data.get()), from = shadow_of(storage->data()), kept] {
      memcpy(to, from, kept);
    });
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  if (format) tensor->empty_tensor_restride(*format);
  const size_t bytes = (tensor->storage_offset() + tensor->numel()) * tensor->itemsize();
  if (tensor->numel()) grow(tensor->unsafe_storage().unsafeGetStorageImpl(), bytes);
  return self;
}

at::Tensor on_shadow(const at::Tensor& tensor) {
  if (!is_simulated(tensor)) return tensor;
  auto* start = shadow_of(tensor.const_data_ptr());
  auto options = at::TensorOptions(tensor.scalar_type());
  auto seen = as_wrapped(at::from_blob(start, tensor.sizes(), tensor.strides(), options), tensor);
  if (tensor.is_conj()) seen._set_conj(true);
  if (tensor.is_neg()) seen._set_neg(true);
  return seen;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!is_simulated(tensor)) return tensor;
  auto options = tensor.options().device(at::kMeta);
  return as_wrapped(at::empty_strided(tensor.sizes(), tensor.strides(), options), tensor);
}

void add_use(Uses& uses, const at::Tensor& tensor, bool is_write, const std::shared_ptr<const Place>& place) {
  if (auto* block = block_of(tensor)) uses.push_back({block, Access{bytes_of(tensor), is_write, nullptr, 0, place}});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}

}  // namespace sim
