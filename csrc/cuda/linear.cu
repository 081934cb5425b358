// linear: dispatch of the decode kernel over weight formats, and its plan on the present card.
#include <bit>

#include "linear.h"
#include "linear_planes.cuh"

namespace nibblelm::cuda {

namespace {

std::string describe(const LinearWeight& w, DType x_dtype, int m) {
  return std::string("linear x=(") + std::to_string(m) + ", " + std::to_string(w.k) + ") " + name(x_dtype) +
         " weight=(" + std::to_string(w.n) + ", " + std::to_string(w.k) + ") " + name(w.format) +
         (w.integer() && w.group_size ? " groups of " + std::to_string(w.group_size) : std::string());
}

// Of the code that runs on this card (`kArchitecture` there), which may be older than the card.
__global__ void architecture_probe() {}

int compiled_architecture() {
  static const int architecture = [] {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, architecture_probe), "linear: cudaFuncGetAttributes");
    return attributes.ptxVersion;
  }();
  return architecture;
}

DecodePlan plan_here(const LinearWeight& w, DType x_dtype, int m, bool aligned) {
  const DecodePlan plan =
      plan_decode(w, x_dtype, m, aligned, device_attribute(cudaDevAttrMultiProcessorCount),
                  device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 1024, compiled_architecture());
  if (plan.grid == 0) {
    throw std::invalid_argument(describe(w, x_dtype, m) + ": K is too long for the shared memory of this card");
  }
  return plan;
}

// Whether eight activations are always one or two whole 16-byte words.
bool x_aligned(const LinearWeight& w, const void* x, int64_t stride, DType dtype) {
  return w.k % 8 == 0 && aligned16(x, stride * (dtype == DType::f32 ? 4 : 2));
}

}  // namespace

int64_t linear_decode_workspace(const LinearWeight& w, const void* x, int64_t x_stride, DType x_dtype, int m) {
  const bool aligned = x_aligned(w, x, x_stride, x_dtype);
  const DecodePlan first = plan_here(w, x_dtype, m, aligned);
  const int rest = m % first.m;
  return std::max(first.workspace_bytes(), rest ? plan_here(w, x_dtype, rest, aligned).workspace_bytes() : 0);
}

namespace {

// All but the plan and what depends on it.
DecodeArgs decode_args(const LinearStep& step) {
  const auto& [w, args] = step;
  DecodeArgs a{};
  a.data = static_cast<const uint8_t*>(w.data);
  a.records = static_cast<const uint8_t*>(w.records);
  a.bias = args.bias;
  a.arrivals = args.arrivals;
  a.x_stride = args.x_stride;
  a.y_stride = args.y_stride;
  a.n = w.n;
  a.k = w.k;
  a.strips = w.strips();
  a.steps = w.steps();
  a.y_dtype = args.y_dtype;
  a.x_aligned = x_aligned(w, args.x, args.x_stride, args.x_dtype);
  if (w.integer()) {
    a.stages = w.steps();
    a.groups = w.groups();
    a.group_shift = w.group_size == 0 ? 0 : std::countr_zero(static_cast<unsigned>(w.group_size));
    a.record_bytes = w.record_bytes();
    a.scale_dtype = w.scale_dtype;
    a.has_zero = w.has_zero;
    a.has_minimum = w.has_minimum;
  } else {
    a.pitch_bytes = w.pitch * (w.format == WeightFormat::f32 ? 4 : 2);
    a.stages = static_cast<int>((a.pitch_bytes + 127) / 128);
  }
  if (args.gain != nullptr) {
    const bool aligned = a.x_aligned && aligned16(args.residual, args.residual_stride * 2) && aligned16(args.gain, 0);
    if (args.x_dtype == DType::f32 || !aligned || w.k > kMaxNormColumns) {
      throw std::invalid_argument(describe(w, args.x_dtype, args.m) +
                                  ": a norm before it takes aligned bf16 rows of at most 16,384");
    }
    a.gain = args.gain;
    a.eps = args.eps;
    a.plus_one = args.plus_one;
    a.residual_stride = args.residual_stride;
  }
  if (args.swiglu && w.n % kStripRows != 0) {
    throw std::invalid_argument(describe(w, args.x_dtype, args.m) + ": swiglu takes pairs of 8 rows");
  }
  a.swiglu = args.swiglu;
  return a;
}

// Collects links until one does not go with them.
class ChainLauncher {
 public:
  explicit ChainLauncher(const Launch& launch) : launch_(launch) {}

  void add(const LinearStep& step) {
    const auto& [w, args] = step;
    DecodeArgs a = decode_args(step);
    const int x_bytes = args.x_dtype == DType::f32 ? 4 : 2, y_bytes = args.y_dtype == DType::f32 ? 4 : 2;
    for (int row = 0, rows = plan_here(w, args.x_dtype, args.m, a.x_aligned).m; row < args.m;
         row += rows) {  // usually once
      a.plan = plan_here(w, args.x_dtype, std::min(rows, args.m - row), a.x_aligned);
      a.x = static_cast<const uint8_t*>(args.x) + row * args.x_stride * x_bytes;
      a.y = static_cast<uint8_t*>(args.y) + row * args.y_stride * y_bytes;
      if (args.residual != nullptr) {
        a.residual = static_cast<const uint8_t*>(args.residual) + row * args.residual_stride * 2;
        a.h = static_cast<uint8_t*>(args.h) + static_cast<int64_t>(row) * w.k * 2;
      }
      a.partials = static_cast<float*>(args.workspace);
      a.images = a.plan.prepared ? static_cast<uint8_t*>(args.workspace) + a.plan.partial_floats() * 4 : nullptr;
      if (chain_.count == kMaxLinks || !goes_on(a, w.format, args)) flush();
      if (chain_.count == 0) chain_.barrier = args.arrivals + a.strips;
      steps_[chain_.count] = &step;
      chain_.links[chain_.count++] = a;
    }
  }

  void flush() {
    if (chain_.count == 0) return;
    const LinearWeight& w = steps_[0]->weight;
    const bool x_is_float = steps_[0]->args.x_dtype == DType::f32;
    std::string what = describe(w, steps_[0]->args.x_dtype, chain_.links[0].plan.m);
    if (chain_.count > 1) what += " and " + std::to_string(chain_.count - 1) + " more";
    switch (w.format) {
      case WeightFormat::int4:
        launch_format<WeightFormat::int4>(chain_, x_is_float, launch_, what);
        break;
      case WeightFormat::int8:
        launch_format<WeightFormat::int8>(chain_, x_is_float, launch_, what);
        break;
      case WeightFormat::f16:
        launch_format<WeightFormat::f16>(chain_, x_is_float, launch_, what);
        break;
      case WeightFormat::bf16:
        launch_format<WeightFormat::bf16>(chain_, x_is_float, launch_, what);
        break;
      case WeightFormat::f32:
        launch_format<WeightFormat::f32>(chain_, x_is_float, launch_, what);
        break;
    }
    chain_.count = 0;
  }

 private:
  // Links share the rings, the kernel, and its one row of x that every block prepares.
  bool goes_on(const DecodeArgs& a, WeightFormat format, const LinearArgs& args) const {
    if (chain_.count == 0) return true;
    const DecodeArgs& first = chain_.links[0];
    const auto alone = [](const DecodeArgs& link) { return link.plan.m > 1 || link.images != nullptr; };
    const LinearStep& step = *steps_[0];
    return !alone(a) && !alone(first) && format == step.weight.format && args.x_dtype == step.args.x_dtype &&
           (a.group_shift > 0) == (first.group_shift > 0) && a.plan.record_slot == first.plan.record_slot;
  }

  const Launch& launch_;
  const LinearStep* steps_[kMaxLinks]{};
  DecodeChain chain_{};
};

}  // namespace

void linear_decode(std::span<const LinearStep> steps, const Launch& launch) {
  ChainLauncher launcher(launch);
  for (const LinearStep& step : steps) launcher.add(step);
  launcher.flush();
}

}  // namespace nibblelm::cuda
