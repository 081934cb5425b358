// The kernel table of the instruction set that this file is compiled for.
#include "cpu/isa.h"

namespace nibblelm::NIBBLE_ISA {

int64_t quantize_range(const QuantizeArgs&, int64_t, int64_t, float*);
void quantized_linear(const QuantizedLinearArgs&);
void full_linear(const FullLinearArgs&);
void rms_norm(const RmsNormArgs&);
void layer_norm(const LayerNormArgs&);
void add(const AddArgs&);
void rope(const RopeArgs&);
void kv_append(const KvAppendArgs&);
void attention(const AttentionArgs&);
void activate(const ActivationArgs&);
void embedding(const EmbeddingArgs&);
void softmax(const RowsArgs&);
void log_softmax(const RowsArgs&);
void argmax(const ArgmaxArgs&);
void mask_logits(const MaskArgs&);
void read_memory(const ReadArgs&);
void multiply_bytes(const MultiplyArgs&);

extern const Kernels kernels{quantize_range, quantized_linear, full_linear, rms_norm,    layer_norm,    add,
                             rope,           kv_append,        attention,   activate,    embedding,     softmax,
                             log_softmax,    argmax,           mask_logits, read_memory, multiply_bytes};

}  // namespace nibblelm::NIBBLE_ISA
