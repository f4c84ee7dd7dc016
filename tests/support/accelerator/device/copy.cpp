// Copies: late where CUDA's are, between pinned memory and a device, and between two devices.
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include "pinned.h"
#include "tensor.h"

namespace sim {
namespace {

// The source's stream copies, between two events with the destination's, as on CUDA.
void between(const at::Tensor& from, const at::Tensor& to) {
  auto &source = queue_of(from.device().index()), &target = queue_of(to.device().index());
  Uses uses;
  auto place = here("copy_");
  add_use(uses, from, false, place);
  add_use(uses, to, true, place);
  if (&source != &target) source.wait_for(target.mark());
  source.push([from = on_shadow(from), to = on_shadow(to)]() mutable { to.copy_(from); }, std::move(uses));
  if (&source != &target) target.wait_for(source.mark());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  raise_reported();
  if (to.numel() == 0) return to;
  if (is_simulated(from) && is_simulated(to)) {
    between(from, to);
    return to;
  }
  const bool upload = is_simulated(to);
  const at::Tensor &host = upload ? from : to, &device = upload ? to : from;
  const void* start = host.const_data_ptr();
  auto& queue = queue_of(device.device().index());
  const bool is_late = non_blocking && is_pinned(start);
  at::Tensor other = host;
  if (is_late)  // owns nothing, as a copy engine
    other = at::from_blob(host.data_ptr(), host.sizes(), host.strides(), at::TensorOptions(host.scalar_type()));
  else if (non_blocking && upload)
    other = from.clone();  // pageable memory is staged
  Uses uses;
  add_use(uses, device, upload, here("copy_"));
  if (upload)
    queue.push([other, to = on_shadow(to)]() mutable { to.copy_(other); }, std::move(uses));
  else
    queue.push([other, from = on_shadow(from)]() mutable { other.copy_(from); }, std::move(uses));
  if (is_late) keep_until(start, queue.mark());
  if (!is_late && !(non_blocking && upload)) queue.drain();
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (is_simulated(to)) resize_(to, from.sizes(), {});
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  auto& queue = queue_of(tensor.device().index());
  Uses uses;
  add_use(uses, tensor, false, here("item"));
  queue.push([] {}, std::move(uses));
  queue.drain();
  return on_shadow(tensor).item();
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  allocator()->recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
}

// Else torch makes a copy that is not conjugated first, by this operator.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace sim
