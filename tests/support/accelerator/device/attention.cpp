// Attention as the CPU computes it: its flash attention, where the CPU would choose that.
#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "kernel.h"

namespace sim {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

int64_t choice(const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& mask, double dropout_p,
               bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const auto cpus = at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
  const bool is_flash = cpus == static_cast<int64_t>(at::SDPBackend::flash_attention);
  return static_cast<int64_t>(is_flash ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

template <class... Arguments>
torch::jit::Stack call(const char* name, Arguments... arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack;
  (stack.emplace_back(arguments), ...);
  kernel(op, &stack);
  return stack;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& mask, double dropout_p, bool is_causal,
    bool, std::optional<double> scale) {
  const auto made =
      call("aten::_scaled_dot_product_flash_attention_for_cpu", query, key, value, dropout_p, is_causal, mask, scale);
  return {made[0].toTensor(), made[1].toTensor(), Tensor(), Tensor(), query.sym_size(2), key.sym_size(2), Tensor(),
          Tensor(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
    std::array<bool, 4>, const Tensor& out, const Tensor& logsumexp, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double dropout_p, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  const auto made = call("aten::_scaled_dot_product_flash_attention_for_cpu_backward", grad, query, key, value, out,
                         logsumexp, dropout_p, is_causal, mask.defined() ? Maybe(mask) : Maybe(), scale);
  return {made[0].toTensor(), made[1].toTensor(), made[2].toTensor(), Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", &choice);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &forward);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &backward);
}

}  // namespace
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choice);
}
