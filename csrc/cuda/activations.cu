// silu, gelu (tanh and erf), their gated forms (Hendrycks & Gimpel 2016; Shazeer 2020) softcap, relu and scale, in
// fp32.
#include <algorithm>

#include "activations.h"
#include "gates.cuh"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{256};

template <Activation kForm>
__device__ __forceinline__ float activation(float x, float cap) {
  if constexpr (kForm == Activation::silu) {
    return silu(x);
  } else if constexpr (kForm == Activation::gelu_tanh) {
    return gelu_tanh(x);
  } else if constexpr (kForm == Activation::gelu_erf) {
    return gelu_erf(x);
  } else if constexpr (kForm == Activation::softcap) {
    return cap * tanhf(x / cap);
  } else if constexpr (kForm == Activation::relu) {
    return relu(x);
  } else {
    return cap * x;
  }
}

// Gated: the up of a gate is `columns` further, or, in pairs, 8 columns behind every 8 gates.
template <class T, int V, Activation kForm, bool kGated>
__global__ void activate_kernel(const T* x, T* y, int64_t columns, int64_t x_stride, float cap, bool pairs) {
  dependency_wait();
  dependency_release();
  const int64_t row = blockIdx.y, column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (column >= columns) return;
  x += row * x_stride + column + (pairs ? column / 8 * 8 : 0);
  float gate[V];
  load(x, gate);
#pragma unroll
  for (int i = 0; i < V; ++i) gate[i] = activation<kForm>(gate[i], cap);
  if constexpr (kGated) {
    float up[V];
    load(x + (pairs ? 8 : columns), up);
#pragma unroll
    for (int i = 0; i < V; ++i) gate[i] *= up[i];
  }
  store(y + row * columns + column, gate);
}

template <class T, int V, Activation kForm>
auto* kernel(bool gated) {
  if constexpr (kForm <= Activation::gelu_erf) {
    if (gated) return activate_kernel<T, V, kForm, true>;
  }
  return activate_kernel<T, V, kForm, false>;
}

template <class T, int V>
auto* kernel(Activation form, bool gated) {
  switch (form) {
    case Activation::silu:
      return kernel<T, V, Activation::silu>(gated);
    case Activation::gelu_tanh:
      return kernel<T, V, Activation::gelu_tanh>(gated);
    case Activation::gelu_erf:
      return kernel<T, V, Activation::gelu_erf>(gated);
    case Activation::softcap:
      return kernel<T, V, Activation::softcap>(gated);
    case Activation::relu:
      return kernel<T, V, Activation::relu>(gated);
    default:
      return kernel<T, V, Activation::scale>(gated);
  }
}

}  // namespace

void activate(const void* x, void* y, int64_t rows, int64_t columns, int64_t x_stride, Activation form, float cap,
              bool gated, bool pairs, DType dtype, const Launch& launch) {
  constexpr int64_t kGridRows{65535};
  if (gated && form > Activation::gelu_erf) {
    throw std::invalid_argument("activation: gates are of silu and gelu (forms 0 to 2); got form " +
                                std::to_string(static_cast<int>(form)));
  }
  with_activation(dtype, "activation", [&]<class T>() {
    const int64_t size = sizeof(T);
    const bool wide = aligned16(x, x_stride * size) && aligned16(y, columns * size);
    const auto run = wide ? kernel<T, kWide<T>>(form, gated) : kernel<T, 1>(form, gated);
    for (int64_t first = 0; first < rows; first += kGridRows) {
      const int count = static_cast<int>(std::min(kGridRows, rows - first));
      const auto what = [&] {
        return "activation rows=" + std::to_string(rows) + " columns=" + std::to_string(columns) + " " + name(dtype);
      };
      launch_kernel(launch, what, run, dim3(ceil_div(columns, kThreads * (wide ? kWide<T> : 1)), count), dim3(kThreads),
                    0, static_cast<const T*>(x) + first * x_stride, static_cast<T*>(y) + first * columns, columns,
                    x_stride, cap, pairs);
    }
  });
}

}  // namespace nibblelm::cuda
