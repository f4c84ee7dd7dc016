// Cells of LSTM and GRU, which torch fuses on accelerators. The equations are torch.nn.LSTM's and GRU's.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

namespace sim {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Maybe& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// d of sigmoid and tanh, by their values.
Tensor by_sigmoid(const Tensor& grad, const Tensor& value) { return grad * value * (1 - value); }
Tensor by_tanh(const Tensor& grad, const Tensor& value) { return grad * (1 - value * value); }

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                        const Maybe& input_bias, const Maybe& hidden_bias) {
  auto parts = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  const auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_backward(const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx,
                                                 const Tensor& cy, const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const auto &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  const auto of_cy = cy.tanh();
  const auto none = at::zeros_like(cy);
  const auto grad_out = grad_hy && grad_hy->defined() ? *grad_hy : none;
  const auto grad_cell = by_tanh(grad_out * out, of_cy) + (grad_cy && grad_cy->defined() ? *grad_cy : none);
  const auto gates = at::cat({by_sigmoid(grad_cell * cell, in), by_sigmoid(grad_cell * cx, forget),
                              by_tanh(grad_cell * in, cell), by_sigmoid(grad_out * of_cy, out)},
                             1);
  return {gates, grad_cell * forget, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                               const Maybe& input_bias, const Maybe& hidden_bias) {
  const auto in = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (in[0] + hidden[0]).sigmoid(), update = (in[1] + hidden[1]).sigmoid();
  const auto fresh = (in[2] + reset * hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden = parts[4];
  const auto of_fresh = by_tanh(grad_hy * (1 - update), fresh);
  const auto of_update = by_sigmoid(grad_hy * (hx - fresh), update);
  const auto of_reset = by_sigmoid(of_fresh * hidden, reset);
  const auto input_gates = at::cat({of_reset, of_update, of_fresh}, 1);
  const auto hidden_gates = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {input_gates, hidden_gates, grad_hy * update, has_bias ? input_gates.sum(0) : Tensor(),
          has_bias ? hidden_gates.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_backward);
  m.impl("_thnn_fused_gru_cell", &gru);
  m.impl("_thnn_fused_gru_cell_backward", &gru_backward);
}

}  // namespace
}  // namespace sim
