// linear: which kernel takes how many rows, over weight formats, and its plan on the present card.
#include <bit>

#include "activations.h"
#include "linear.h"
#include "linear_planes.cuh"

namespace nibblelm::cuda {

namespace {

std::string describe(const LinearWeight& w, int planes, int m) {
  return std::string("linear x=(") + std::to_string(m) + ", " + std::to_string(w.k) + ") in " + std::to_string(planes) +
         " planes, weight=(" + std::to_string(w.n) + ", " + std::to_string(w.k) + ") " + name(w.format) +
         (w.integer() && w.group_size ? " groups of " + std::to_string(w.group_size) : std::string());
}

DecodePlan plan_here(const LinearWeight& w, int planes, int m, bool aligned) {
  const DecodePlan plan =
      plan_decode(w, planes, m, aligned, device_attribute(cudaDevAttrMultiProcessorCount),
                  device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), compiled_architecture());
  if (plan.grid == 0) {
    throw std::invalid_argument(describe(w, planes, m) + ": K is too long for the shared memory of this card");
  }
  return plan;
}

// Where the parts of the large kernel's workspace begin.
struct LargeBuffers {
  int64_t scales, totals, shifts, partials, bytes;

  explicit LargeBuffers(const LargePlan& p) {
    scales = p.tiles_bytes();
    totals = scales + static_cast<int64_t>(p.slices()) * p.padded_rows() * 4;
    shifts = totals + static_cast<int64_t>(p.padded_rows()) * 4;
    partials = shifts + static_cast<int64_t>(p.slices()) * p.padded_rows() * 4;
    bytes = partials + p.partial_bytes();
  }
};

LargePlan plan_large_here(const LinearWeight& w, int planes, int m, bool mma_sync) {
  const LargePlan plan = plan_large(w, planes, m, device_attribute(cudaDevAttrMultiProcessorCount),
                                    compiled_architecture(), compiled_architecture() == 90 && !mma_sync);
  const bool fits = plan.shared_bytes <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return fits ? plan : LargePlan{};  // the code may be compiled for a card with more
}

// Whether eight activations are always one or two whole 16-byte words.
bool x_aligned(const LinearWeight& w, const void* x, int64_t stride, DType dtype) {
  return w.k % 8 == 0 && aligned16(x, stride * (dtype == DType::f32 ? 4 : 2));
}

// What the next launch takes.
struct LaunchRows {
  int rows;  // of x
  bool large;
};

// Of `m` rows that are left.
LaunchRows launch_rows(const LinearWeight& w, int planes, int m, bool aligned) {
  const auto fits = [&](int rows) { return plan_large_here(w, planes, rows, false).rows > 0; };
  if (m > kMaxDecodeRows && fits(std::min(m, kLargeChunk))) return {std::min(m, kLargeChunk), true};
  const DecodePlan plan = plan_here(w, planes, std::min(m, kMaxDecodeRows), aligned);
  return {plan.m, large_is_faster(w, plan, device_attribute(cudaDevAttrMultiProcessorCount)) && fits(plan.m)};
}

}  // namespace

int64_t linear_workspace(const LinearWeight& w, const void* x, int64_t x_stride, DType x_dtype, int m,
                         bool eight_bits) {
  const bool aligned = x_aligned(w, x, x_stride, x_dtype);
  const int planes = activation_planes(w.format, x_dtype, eight_bits);
  int64_t most{0};
  for (int row = 0, rows = 0; row < m; row += rows) {
    const LaunchRows next = launch_rows(w, planes, m - row, aligned);
    rows = next.rows;
    const int64_t bytes = next.large ? LargeBuffers(plan_large_here(w, planes, rows, false)).bytes
                                     : plan_here(w, planes, rows, aligned).workspace_bytes();
    most = std::max(most, bytes);
  }
  return most;
}

namespace {

// All but the plan and what depends on it.
DecodeArgs decode_args(const LinearStep& step) {
  const auto& [w, args] = step;
  const int planes = activation_planes(w.format, args.x_dtype, args.eight_bits);
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
  if (args.gain != nullptr || args.post_gain != nullptr) {
    const bool aligned = a.x_aligned && aligned16(args.residual, args.residual_stride * 2) && aligned16(args.gain, 0) &&
                         aligned16(args.post_gain, 0) && aligned16(args.gain_bias, 0) &&
                         aligned16(args.addend, args.addend_stride * 2);
    if (args.x_dtype == DType::f32 || !aligned || w.k > kMaxNormColumns) {
      throw std::invalid_argument(describe(w, planes, args.m) +
                                  ": a norm before it takes aligned bf16 rows of at most 16,384");
    }
    a.gain = args.gain;
    a.gain_bias = args.gain_bias;
    a.post_gain = args.post_gain;
    a.addend = args.addend;
    a.addend_stride = args.addend_stride;
    a.centres = args.centres;
    a.eps = args.eps;
    a.post_eps = args.post_eps;
    a.plus_one = args.plus_one;
    a.residual_stride = args.residual_stride;
  }
  const int before = (args.post_gain != nullptr) + (args.addend != nullptr);
  if (before > 0 && (args.residual == nullptr || before > 1 || (args.post_gain != nullptr && args.centres))) {
    throw std::invalid_argument(describe(w, planes, args.m) +
                                ": a post_gain or an addend takes a residual, and not the other or LayerNorm beside a "
                                "post_gain");
  }
  if (args.after != After::nothing && (args.gate != Gate::none || args.y_stride != w.n || args.x_dtype == DType::f32)) {
    throw std::invalid_argument(describe(w, planes, args.m) +
                                ": an activation takes bf16 rows, a contiguous y and no gate");
  }
  if (args.gate != Gate::none && w.n % kStripRows != 0) {
    throw std::invalid_argument(describe(w, planes, args.m) + ": a gate takes pairs of 8 rows");
  }
  a.gated = args.gate != Gate::none;
  a.gelu = args.gate == Gate::gelu_tanh;
  return a;
}

// Calls call<F>().
template <class Call>
void with_format(WeightFormat format, Call call) {
  switch (format) {
    case WeightFormat::int4:
      return call.template operator()<WeightFormat::int4>();
    case WeightFormat::int4_half:
      return call.template operator()<WeightFormat::int4_half>();
    case WeightFormat::int8:
      return call.template operator()<WeightFormat::int8>();
    case WeightFormat::f16:
      return call.template operator()<WeightFormat::f16>();
    case WeightFormat::bf16:
      return call.template operator()<WeightFormat::bf16>();
    case WeightFormat::f32:
      return call.template operator()<WeightFormat::f32>();
  }
}

// Collects links until one does not go with them.
class ChainLauncher {
 public:
  explicit ChainLauncher(const Launch& launch) : launch_(launch) {}

  void add(const LinearStep& step) {
    const auto& [w, args] = step;
    DecodeArgs a = decode_args(step);
    const int planes = activation_planes(w.format, args.x_dtype, args.eight_bits);
    const int x_bytes = args.x_dtype == DType::f32 ? 4 : 2, y_bytes = args.y_dtype == DType::f32 ? 4 : 2;
    for (int row = 0, rows = 0; row < args.m; row += rows) {  // usually once
      const LaunchRows next = launch_rows(w, planes, args.m - row, a.x_aligned);
      rows = next.rows;
      a.x = static_cast<const uint8_t*>(args.x) + row * args.x_stride * x_bytes;
      a.y = static_cast<uint8_t*>(args.y) + row * args.y_stride * y_bytes;
      if (args.residual != nullptr) {
        a.residual = static_cast<const uint8_t*>(args.residual) + row * args.residual_stride * 2;
        a.h = static_cast<uint8_t*>(args.h) + static_cast<int64_t>(row) * w.k * 2;
      }
      if (args.addend != nullptr) {
        a.addend = static_cast<const uint8_t*>(args.addend) + row * args.addend_stride * 2;
      }
      if (next.large) {
        flush();
        launch_large(step, a, planes, rows);
        launch_after(step, a, rows);
        continue;
      }
      a.plan = plan_here(w, planes, rows, a.x_aligned);
      a.after = a.plan.m == 1 ? args.after : After::nothing;
      a.partials = static_cast<float*>(args.workspace);
      const bool normed = a.gain != nullptr || a.post_gain != nullptr;
      a.plan.prepared = a.plan.prepared || (normed && a.plan.row_rounds > kMostNormedRounds);
      a.images = a.plan.prepared ? static_cast<uint8_t*>(args.workspace) + a.plan.partial_floats() * 4 : nullptr;
      if (chain_.count == kMaxLinks || !goes_on(a, step, planes)) flush();
      if (chain_.count == 0) chain_.barrier = args.arrivals + a.strips;
      a.apart = chain_.count > 0 && !reads_what_is_stored(a, args.x_dtype);
      if (!a.apart) first_stored_ = chain_.count;
      planes_ = planes;
      steps_[chain_.count] = &step;
      chain_.links[chain_.count++] = a;
      if (a.after != args.after) {
        flush();
        launch_after(step, a, rows);
      }
    }
  }

  void flush() {
    if (chain_.count == 0) return;
    const LinearWeight& w = steps_[0]->weight;
    std::string what = describe(w, planes_, chain_.links[0].plan.m);
    if (chain_.count > 1) what += " and " + std::to_string(chain_.count - 1) + " more";
    with_format(w.format, [&]<WeightFormat F>() {
      if constexpr (F != WeightFormat::int4_half) launch_decode_format<F>(chain_, planes_, launch_, what);
    });
    chain_.count = 0;
  }

 private:
  // Links share the rings, the kernel, and its one row of x that every block prepares.
  bool goes_on(const DecodeArgs& a, const LinearStep& step, int planes) const {
    if (chain_.count == 0) return true;
    const DecodeArgs& first = chain_.links[0];
    const auto alone = [](const DecodeArgs& link) { return link.plan.m > 1 || link.images != nullptr; };
    for (int i = 0; i < chain_.count; ++i) {  // the kernel has the extras of one kind
      const Extras own = extras_of(a), other = extras_of(chain_.links[i]);
      if (own != other && own != Extras::none && other != Extras::none) return false;
    }
    return !alone(a) && !alone(first) && step.weight.format == steps_[0]->weight.format && planes == planes_ &&
           step.args.x_dtype == steps_[0]->args.x_dtype && (a.group_shift > 0) == (first.group_shift > 0) &&
           a.plan.record_slot == first.plan.record_slot;
  }

  // Whether one row of x takes what links store that no link has waited for.
  bool reads_what_is_stored(const DecodeArgs& a, DType x_dtype) const {
    const auto overlap = [](const void* from, int64_t bytes, const void* to, int64_t stored) {
      const auto first = reinterpret_cast<std::uintptr_t>(from), second = reinterpret_cast<std::uintptr_t>(to);
      return from != nullptr && to != nullptr && first < second + stored && second < first + bytes;
    };
    const auto bytes = [](int64_t count, DType dtype) { return count * (dtype == DType::f32 ? 4 : 2); };
    for (int i = first_stored_; i < chain_.count; ++i) {
      const DecodeArgs& before = chain_.links[i];
      for (const void* const row : {a.x, a.residual, a.addend}) {
        const int64_t read = bytes(a.k, row == a.x ? x_dtype : DType::bf16);
        if (overlap(row, read, before.y, bytes(before.n, before.y_dtype)) ||
            overlap(row, read, before.h, bytes(before.k, DType::bf16))) {
          return true;
        }
      }
    }
    return false;
  }

  // Of rows whose kernel does not end with it.
  void launch_after(const LinearStep& step, const DecodeArgs& a, int rows) const {
    const auto form = [&] {
      switch (step.args.after) {
        case After::gelu_tanh:
          return Activation::gelu_tanh;
        case After::gelu_erf:
          return Activation::gelu_erf;
        default:
          return Activation::relu;
      }
    };
    if (step.args.after == After::nothing) return;
    activate(a.y, a.y, rows, a.n, a.y_stride, form(), 0.0f, false, false, a.y_dtype, launch_);
  }

  void launch_large(const LinearStep& step, const DecodeArgs& a, int planes, int rows) const {
    const auto& [w, args] = step;
    LargeArgs g{a, plan_large_here(w, planes, rows, args.mma_sync), rows, nullptr, nullptr, nullptr, nullptr, nullptr};
    g.a.plan.slices_log = decode_slices_log(w.steps());
    g.a.plan.row_rounds = row_rounds(g.a.plan.slices_log, w.steps());
    g.a.stages = g.p.stages;
    if (for_racecheck()) g.p.releasing = 32;
    g.p.paired_stores = reinterpret_cast<std::uintptr_t>(a.y) % 4 == 0 && a.y_stride % 2 == 0;
    const LargeBuffers at(g.p);
    uint8_t* const workspace = static_cast<uint8_t*>(args.workspace);
    g.tiles = workspace;
    g.scales = reinterpret_cast<float*>(workspace + at.scales);
    g.totals = reinterpret_cast<float*>(workspace + at.totals);
    g.shifts = reinterpret_cast<int*>(workspace + at.shifts);
    g.partials = reinterpret_cast<float*>(workspace + at.partials);
    with_format(g.p.format, [&]<WeightFormat F>() {
      if constexpr (F != WeightFormat::f32) launch_large_format<F>(g, planes, launch_, describe(w, planes, rows));
    });
  }

  const Launch& launch_;
  const LinearStep* steps_[kMaxLinks]{};
  int planes_{0};        // of all of them
  int first_stored_{0};  // from this link on, what is stored has not been waited for
  DecodeChain chain_{};
};

}  // namespace

void linear(std::span<const LinearStep> steps, const Launch& launch) {
  ChainLauncher launcher(launch);
  for (const LinearStep& step : steps) launcher.add(step);
  launcher.flush();
}

}  // namespace nibblelm::cuda
