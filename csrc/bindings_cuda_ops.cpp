// The ops other than linear. Arguments come in the order of the launchers and structs of cuda/*.h, or by name, pointers
// as integers (0 for null), dtypes as indices of `_cuda.DTYPES`; the last two of each are the stream and
// `programmatic`.
#include <pybind11/pybind11.h>

#include "cuda/activations.h"
#include "cuda/add.h"
#include "cuda/argmax.h"
#include "cuda/attention.h"
#include "cuda/attention_mask.h"
#include "cuda/embedding.h"
#include "cuda/mask_logits.h"
#include "cuda/norm.h"
#include "cuda/read_pinned.h"
#include "cuda/rope.h"
#include "cuda/sampling.h"
#include "cuda/softmax.h"

namespace py = pybind11;
using namespace nibblelm::cuda;

namespace {

using Address = std::uintptr_t;
using Int = std::int64_t;

template <typename T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

DType type_of(int index) { return static_cast<DType>(index); }

void bind_norm(py::module_& m, const char* name, void (*launcher)(const NormArgs&, DType, const Launch&)) {
  m.def(name, [launcher](Address x, Address residual, Address weight, Address bias, Address y, Address h, Int x_stride,
                         Int residual_stride, Int rows, int heads, int columns, float eps, bool plus_one, bool per_head,
                         int dtype, Address stream, bool programmatic) {
    launcher({at(x), at(residual), at<float>(weight), at<float>(bias), at(y), at(h), x_stride, residual_stride, rows,
              heads, columns, eps, plus_one, per_head},
             type_of(dtype), {at(stream), programmatic});
  });
}

// Needs bind_rope() before it.
void bind_attention(py::module_& m) {
  py::class_<AttentionArgs>(m, "AttentionArgs")
      .def(py::init([](Address q, Address out, const PagedCache& cache, Address slopes, Address prefix, Address starts,
                       Address mask, Address tiles, Int q_stride, Int mask_stride, Int rows, int tile_count,
                       int mask_columns, int heads, int window, float scale, float softcap, bool mma_sync, int dtype) {
             return AttentionArgs{.q = at(q),
                                  .out = at(out),
                                  .workspace = nullptr,
                                  .cache = cache,
                                  .slopes = at<float>(slopes),
                                  .prefix = at<std::int32_t>(prefix),
                                  .starts = at<std::int32_t>(starts),
                                  .mask = at<float>(mask),
                                  .tiles = at<std::int32_t>(tiles),
                                  .q_stride = q_stride,
                                  .mask_stride = mask_stride,
                                  .rows = rows,
                                  .tile_count = tile_count,
                                  .mask_columns = mask_columns,
                                  .heads = heads,
                                  .window = window,
                                  .scale = scale,
                                  .softcap = softcap,
                                  .mma_sync = mma_sync,
                                  .type = type_of(dtype)};
           }),
           py::kw_only(), py::arg("q"), py::arg("out"), py::arg("cache"), py::arg("slopes"), py::arg("prefix"),
           py::arg("starts"), py::arg("mask"), py::arg("tiles"), py::arg("q_stride"), py::arg("mask_stride"),
           py::arg("rows"), py::arg("tile_count"), py::arg("mask_columns"), py::arg("heads"), py::arg("window"),
           py::arg("scale"), py::arg("softcap"), py::arg("mma_sync"), py::arg("dtype"))
      .def_property("workspace", nullptr, [](AttentionArgs& args, Address to) { args.workspace = at<float>(to); });
  m.def("attention_decode", [](const AttentionArgs& args, Address stream, bool programmatic) {
    attention_decode(args, {at(stream), programmatic});
  });
  m.def("attention_prefill", [](const AttentionArgs& args, Address stream, bool programmatic) {
    attention_prefill(args, {at(stream), programmatic});
  });
  m.def("attention_rope", [](const AttentionArgs& args, const RopeTable& table, Address q_norm, Address k_norm,
                             float eps, bool plus_one, Address stream, bool programmatic) {
    attention_rope(args, table, at<float>(q_norm), at<float>(k_norm), eps, plus_one, {at(stream), programmatic});
  });
  m.def("attention_fuses", attention_fuses);
  m.def("attention_workspace", attention_workspace);
}

void bind_rope(py::module_& m) {
  py::class_<RopeTable>(m, "RopeTable")
      .def(py::init(
          [](Address positions, Address cos, Address sin, int half, int streams, bool interleaved, int entries) {
            return RopeTable{
                at<std::int32_t>(positions), at<float>(cos), at<float>(sin), half, streams, interleaved, entries};
          }));
  py::class_<PagedCache>(m, "PagedCache")
      .def(py::init([](Address k, Address v, Address k_scales, Address v_scales, Address k_unpacked, Address v_unpacked,
                       Address tables, Address slots, Address positions, int pages, int slot_count, int table_width,
                       int table_stride, int kv_heads, int head_dim, int dtype) {
             return PagedCache{.k = at(k),
                               .v = at(v),
                               .k_scales = at<float>(k_scales),
                               .v_scales = at<float>(v_scales),
                               .k_unpacked = at(k_unpacked),
                               .v_unpacked = at(v_unpacked),
                               .tables = at<std::int32_t>(tables),
                               .slots = at<std::int32_t>(slots),
                               .positions = at<std::int32_t>(positions),
                               .pages = pages,
                               .slot_count = slot_count,
                               .table_width = table_width,
                               .table_stride = table_stride,
                               .kv_heads = kv_heads,
                               .head_dim = head_dim,
                               .dtype = type_of(dtype)};
           }),
           py::kw_only(), py::arg("k"), py::arg("v"), py::arg("k_scales"), py::arg("v_scales"), py::arg("k_unpacked"),
           py::arg("v_unpacked"), py::arg("tables"), py::arg("slots"), py::arg("positions"), py::arg("pages"),
           py::arg("slot_count"), py::arg("table_width"), py::arg("table_stride"), py::arg("kv_heads"),
           py::arg("head_dim"), py::arg("dtype"));
  py::class_<HeadNorms>(m, "HeadNorms")
      .def(py::init([](Address q, Address k, Address q_bias, Address k_bias, float eps, bool plus_one, bool centred,
                       bool per_head) {
             return HeadNorms{at<float>(q), at<float>(k), at<float>(q_bias), at<float>(k_bias),
                              eps,          plus_one,     centred,           per_head};
           }),
           py::kw_only(), py::arg("q"), py::arg("k"), py::arg("q_bias") = 0, py::arg("k_bias") = 0, py::arg("eps"),
           py::arg("plus_one") = false, py::arg("centred") = false, py::arg("per_head") = false);
  m.def("rope", [](Address x, Int stride, Int rows, int heads, int head_dim, const RopeTable& table, int dtype,
                   Address stream, bool programmatic) {
    rope(at(x), stride, rows, heads, head_dim, table, type_of(dtype), {at(stream), programmatic});
  });
  m.def("kv_append", [](Address k, Address v, Int k_stride, Int v_stride, Int rows, const PagedCache& cache, int dtype,
                        Address stream, bool programmatic) {
    kv_append(at(k), at(v), k_stride, v_stride, rows, cache, type_of(dtype), {at(stream), programmatic});
  });
  m.def("rope_append", [](Address qkv, Int stride, Int rows, int heads, const RopeTable& table, const PagedCache& cache,
                          const HeadNorms& norms, int dtype, Address stream, bool programmatic) {
    rope_append(at(qkv), stride, rows, heads, table, cache, norms, type_of(dtype), {at(stream), programmatic});
  });
}

void bind_sample(py::module_& m) {
  py::class_<SamplingArgs>(m, "SamplingArgs")
      .def(py::init([](Address logits, Address workspace, Address ids, Address temperature, Address top_k,
                       Address top_p, Address min_p, Address repetition, Address presence, Address frequency,
                       Address seeds, Address steps, Address bias, Address prompt, Address counts, Address positions,
                       Address host_ids, Int logits_stride, Int rows, int vocab, int blocks) {
             return SamplingArgs{.logits = at<float>(logits),
                                 .workspace = at<float>(workspace),
                                 .ids = at<std::int32_t>(ids),
                                 .temperature = at<float>(temperature),
                                 .top_k = at<std::int32_t>(top_k),
                                 .top_p = at<float>(top_p),
                                 .min_p = at<float>(min_p),
                                 .repetition = at<float>(repetition),
                                 .presence = at<float>(presence),
                                 .frequency = at<float>(frequency),
                                 .seeds = at<std::uint64_t>(seeds),
                                 .steps = at<std::int64_t>(steps),
                                 .bias = at<float>(bias),
                                 .prompt = at<std::uint8_t>(prompt),
                                 .counts = at<std::int32_t>(counts),
                                 .positions = at<std::int32_t>(positions),
                                 .host_ids = at<std::int32_t>(host_ids),
                                 .logits_stride = logits_stride,
                                 .rows = rows,
                                 .vocab = vocab,
                                 .blocks = blocks};
           }),
           py::kw_only(), py::arg("logits"), py::arg("workspace"), py::arg("ids"), py::arg("temperature"),
           py::arg("top_k"), py::arg("top_p"), py::arg("min_p"), py::arg("repetition"), py::arg("presence"),
           py::arg("frequency"), py::arg("seeds"), py::arg("steps"), py::arg("bias"), py::arg("prompt"),
           py::arg("counts"), py::arg("positions"), py::arg("host_ids"), py::arg("logits_stride"), py::arg("rows"),
           py::arg("vocab"), py::arg("blocks"));
  m.def("sample",
        [](const SamplingArgs& args, Address stream, bool programmatic) { sample(args, {at(stream), programmatic}); });
}

}  // namespace

void bind_ops(py::module_& m) {
  m.def("activate", [](Address x, Address y, Int rows, Int columns, Int x_stride, int form, float cap, bool gated,
                       bool pairs, int dtype, Address stream, bool programmatic) {
    activate(at(x), at(y), rows, columns, x_stride, static_cast<Activation>(form), cap, gated, pairs, type_of(dtype),
             {at(stream), programmatic});
  });
  m.def("add", [](Address x, Address y, Address out, Int rows, Int columns, Int x_stride, Int y_stride, int dtype,
                  Address stream, bool programmatic) {
    add(at(x), at(y), at(out), rows, columns, x_stride, y_stride, type_of(dtype), {at(stream), programmatic});
  });
  m.def("alibi_mask", [](Address scores, Address slopes, float value, Int batch, Int heads, Int queries, Int keys,
                         int dtype, Address stream, bool programmatic) {
    alibi_mask(at(scores), at<float>(slopes), value, batch, heads, queries, keys, type_of(dtype),
               {at(stream), programmatic});
  });
  m.def("argmax",
        [](Address x, Address y, Int rows, Int columns, Int x_stride, int dtype, Address stream, bool programmatic) {
          argmax(at(x), at<std::int32_t>(y), rows, columns, x_stride, type_of(dtype), {at(stream), programmatic});
        });
  m.def("attention_mask", [](Address scores, Address mask, float value, Int batch, Int heads, Int queries, Int keys,
                             int dtype, Address stream, bool programmatic) {
    attention_mask(at(scores), at(mask), value, batch, heads, queries, keys, type_of(dtype),
                   {at(stream), programmatic});
  });
  m.def("embedding", [](Address ids, Address codes, Address scale, Address zero, Address minimum, Address y, Int rows,
                        Int vocab, int columns, int words, int groups, int group_size, int bits, int table,
                        float multiplier, int dtype, Address stream, bool programmatic) {
    embedding({at<std::int32_t>(ids), at(codes), at(scale), at<std::int32_t>(zero), at(minimum), at(y), rows, vocab,
               columns, words, groups, group_size, bits, type_of(table), multiplier},
              type_of(dtype), {at(stream), programmatic});
  });
  m.def("mask_logits",
        [](Address x, Address mask, Address y, Int rows, Int columns, Int x_stride, Address stream, bool programmatic) {
          mask_logits(at<float>(x), at<std::uint32_t>(mask), at<float>(y), rows, columns, x_stride,
                      {at(stream), programmatic});
        });
  m.def("read_pinned", [](Address x, Address y, Int count, Address stream, bool programmatic) {
    read_pinned(at<std::int32_t>(x), at<std::int32_t>(y), count, {at(stream), programmatic});
  });
  bind_norm(m, "layer_norm", layer_norm);
  bind_norm(m, "rms_norm", rms_norm);
  bind_rope(m);
  bind_attention(m);
  bind_sample(m);
  m.def("softmax", [](Address x, Address y, Int rows, Int columns, bool logarithm, int form, int dtype, Address stream,
                      bool programmatic) {
    softmax(at(x), at(y), rows, columns, logarithm, static_cast<SoftmaxForm>(form), type_of(dtype),
            {at(stream), programmatic});
  });
}
