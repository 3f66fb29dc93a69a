// Layers that torch leaves to a device: convolutions, cells of recurrent layers, attention.
#include "operators.h"
#include "simulated.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

namespace simulated {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename... Arguments>
torch::jit::Stack run(const char* name, Arguments&&... arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack{c10::IValue(std::forward<Arguments>(arguments))...};
  run_operator(op, &stack);
  return stack;
}

Tensor convolution(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  return run(
      "aten::convolution", x, weight, bias, stride, padding, dilation, transposed, output_padding,
      groups)[0].toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  const c10::List<int64_t> bias_sizes({weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)});
  c10::List<bool> wanted;
  for (const bool item : mask) {
    wanted.push_back(item);
  }
  const auto found = run(
      "aten::convolution_backward", grad, x, weight, bias_sizes, stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  const auto at = [&](size_t place) {
    return found[place].isTensor() ? found[place].toTensor() : Tensor();
  };
  return {at(0), at(1), at(2)};
}

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

Tensor or_zeros(const OptionalTensor& grad, const Tensor& like) {
  return grad.has_value() && grad->defined() ? *grad : at::zeros_like(like);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto parts =
      (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const Tensor i = parts[0].sigmoid();
  const Tensor f = parts[1].sigmoid();
  const Tensor g = parts[2].tanh();
  const Tensor o = parts[3].sigmoid();
  const Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const Tensor& cx,
    const Tensor& cy, const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  const Tensor d_hy = or_zeros(grad_hy, cy);
  const Tensor t = cy.tanh();
  const Tensor d_cy = d_hy * o * (1 - t * t) + or_zeros(grad_cy, cy);
  const Tensor gates = at::cat(
      {d_cy * g * i * (1 - i), d_cy * cx * f * (1 - f), d_cy * i * (1 - g * g),
       d_hy * t * o * (1 - o)}, 1);
  return {gates, d_cy * f, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto in = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor r = (in[0] + hidden[0]).sigmoid();
  const Tensor z = (in[1] + hidden[1]).sigmoid();
  const Tensor n = (in[2] + r * hidden[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const Tensor &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &hn = parts[4];
  const Tensor d_n = grad * (1 - z) * (1 - n * n);
  const Tensor d_r = d_n * hn * r * (1 - r);
  const Tensor d_z = grad * (hx - n) * z * (1 - z);
  const Tensor in = at::cat({d_r, d_z, d_n}, 1);
  const Tensor hidden = at::cat({d_r, d_z, d_n * r}, 1);
  const Tensor none;
  return {in, hidden, grad * z, has_bias ? in.sum(0) : none, has_bias ? hidden.sum(0) : none};
}

int64_t attention_choice(
    const Tensor& /*query*/, const Tensor& /*key*/, const Tensor& /*value*/,
    const OptionalTensor& /*mask*/, double /*dropout_p*/, bool /*is_causal*/,
    std::optional<double> /*scale*/, bool /*enable_gqa*/) {
  return 0; // plain operations
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  m.impl("_fused_sdp_choice", &attention_choice);
}

} // namespace
} // namespace simulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simulated::attention_choice)
}
