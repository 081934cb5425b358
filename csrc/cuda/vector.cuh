// V values at a time to and from fp32 (one 16-byte access, or a scalar for odd sizes), and dispatch over dtypes.
#pragma once

#include "common.cuh"

namespace nibblelm::cuda {

// Values of T in one 16-byte access.
template <class T>
constexpr int kWide{Vec<T>::kSize};

// The two 16-bit values of a word, the low half first.
template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t word) {
  if constexpr (std::is_same_v<T, bf16>) {  // a bf16 is the upper half of an fp32
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
}

// Four words from global memory; loads keep their order, so that several are in flight before a first use.
__device__ __forceinline__ void read_16(const void* p, float& a, float& b, float& c, float& d) {
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(p));
}

template <class T, int V>
__device__ __forceinline__ void load(const T* p, float (&x)[V]) {
  if constexpr (V == 1) {
    x[0] = to_float(*p);
  } else {
    static_assert(V % kWide<T> == 0);
#pragma unroll
    for (int i = 0; i < V; i += kWide<T>) {
      const uint4 raw = *reinterpret_cast<const uint4*>(p + i);
      const uint32_t words[4]{raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (sizeof(T) == 4) {
          x[i + j] = __uint_as_float(words[j]);
        } else {
          const float2 pair = unpack2<T>(words[j]);
          x[i + 2 * j] = pair.x;
          x[i + 2 * j + 1] = pair.y;
        }
      }
    }
  }
}

// The same from data that no kernel writes (gains, biases): such loads may move ahead of stores.
template <int V>
__device__ __forceinline__ void load_constant(const float* p, float (&x)[V]) {
  if constexpr (V == 1) {
    x[0] = __ldg(p);
  } else {
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(p + i));
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  }
}

// 2^x to two units in the last place; results below the normal range are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Within 3e-7.
__device__ __forceinline__ float tanh_fast(float x) {
  constexpr float kTwoLog2e{2.885390081777927f};
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * kTwoLog2e));
}

// Two fp32 values as one word of two 16-bit values, `low` in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  if constexpr (std::is_same_v<T, bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <class T, int V>
__device__ __forceinline__ void store(T* p, const float (&x)[V]) {
  if constexpr (V == 1) {
    *p = from_float<T>(x[0]);
  } else {
    static_assert(V == kWide<T>);
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (sizeof(T) == 4) {
        words[j] = __float_as_uint(x[j]);
      } else {
        words[j] = pack2<T>(x[2 * j], x[2 * j + 1]);
      }
    }
    *reinterpret_cast<uint4*>(p) = {words[0], words[1], words[2], words[3]};
  }
}

// Calls f.template operator()<T>() with the activation type T of `dtype`.
template <class F>
void with_activation(DType dtype, const char* op, F&& f) {
  if (dtype == DType::f32) return f.template operator()<float>();
  if (dtype == DType::bf16) return f.template operator()<bf16>();
  throw std::invalid_argument(std::string(op) + ": activations are fp32 or bf16, got " + name(dtype));
}

template <class F>
void with_dtype(DType dtype, const char* op, F&& f) {
  if (dtype == DType::f16) return f.template operator()<half>();
  with_activation(dtype, op, f);
}

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace nibblelm::cuda
