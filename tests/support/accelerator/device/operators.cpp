// Operators that torch asks of this kind of device by names or ways of their own.
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "generator.h"
#include "kernel.h"
#include "tensor.h"

namespace sim {
namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const OperatorHandle&, Stack* stack) {
  static const auto op = find("aten::convolution");
  auto is_last = [](const at::Tensor& tensor) {
    return tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  };
  const bool channels_last =
      is_last(stack->at(stack->size() - 9).toTensor()) || is_last(stack->at(stack->size() - 8).toTensor());
  kernel(op, stack);
  // Meta does not know that the kernels of CPUs and GPUs keep this.
  if (channels_last) stack->back() = stack->back().toTensor().contiguous(at::MemoryFormat::ChannelsLast);
}

// Its arguments are those of convolution_backward without `bias_sizes`, which comes after the weight.
void convolution_backward(const OperatorHandle&, Stack* stack) {
  static const auto op = find("aten::convolution_backward");
  const auto weight = stack->at(stack->size() - 8).toTensor();
  const bool is_transposed = stack->at(stack->size() - 4).toBool();
  const auto groups = stack->at(stack->size() - 2).toInt();
  const int64_t outputs = is_transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{outputs}));
  kernel(op, stack);
}

// It has no generator among its arguments: by the fallback it would draw from the CPU's own.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
  auto noise = at::empty_like(input);
  noise.bernoulli_(1 - p, default_generator(input.device().index()));
  auto mask = noise.to(at::kBool);
  return {input.mul(noise.div_(1 - p)), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("native_dropout", &native_dropout);
}

}  // namespace
}  // namespace sim
