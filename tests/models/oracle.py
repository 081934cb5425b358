"""The oracle of the model tests: the source implementation in float32 with weights unpacked by compressed-tensors."""

import json
from importlib import import_module
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

for path in Path(__file__).parent.glob("reference_*.py"):  # of families that transformers does not know
    import_module(path.stem)

SMALL = dict(vocab_size=331, max_position_embeddings=512, num_hidden_layers=2, initializer_range=0.15)
PROMPT = torch.randint(0, 331, (70,), generator=torch.Generator().manual_seed(7)).tolist()
BIDIRECTIONAL = {"chatglm_6b": 45, "chatglm_6b-mask": 21}  # variants whose prompts' first tokens see each other
ALIBI = {"bloom", "mpt"}  # families without max_position_embeddings
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_CHATGLM = dict(padded_vocab_size=331, num_layers=2, seq_length=512, layernorm_epsilon=1e-5)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)


def _sizes(**switches: object) -> dict:
    """A config of Llama's key names, with four query heads on two."""
    sizes = dict(hidden_size=128, intermediate_size=176, num_attention_heads=4, num_key_value_heads=2)
    return {name: value for name, value in {**sizes, **switches}.items() if value is not None}


# One small config per variant of each family; together they cover every file under models/ (a test says so).
CONFIGS: dict[str, dict] = {
    "llama": dict(hidden_size=64, intermediate_size=172, num_attention_heads=8, num_key_value_heads=4),
    "llama-llama3-tied": dict(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3,
    ),
    "llama-bias-linear": dict(
        hidden_size=96,
        intermediate_size=160,
        num_attention_heads=3,
        num_key_value_heads=3,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0),
    ),
    # Prompts of 70 tokens are beyond the original context, those of 3 are not.
    "llama-dynamic": _sizes(
        head_dim=32,
        max_position_embeddings=32,
        rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0),
    ),
    "llama-longrope": _sizes(
        head_dim=32,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            original_max_position_embeddings=32,
            short_factor=[1.0 + 0.1 * i for i in range(16)],
            long_factor=[1.5 + 0.5 * i for i in range(16)],
        ),
    ),
    "gpt_neox": dict(
        hidden_size=96,
        intermediate_size=172,
        num_attention_heads=3,
    ),
    "gpt_neox-sequential": dict(
        tie_word_embeddings=True,
        hidden_size=160,
        intermediate_size=320,
        num_attention_heads=4,
        hidden_act="gelu_new",
        use_parallel_residual=False,
        attention_bias=False,
        rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5),
    ),
    "gemma2": dict(
        hidden_size=96,
        intermediate_size=172,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=20,
        sliding_window=13,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0,
    ),
    "gemma2-untied": dict(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=80,
        attention_bias=True,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=5,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
    ),
    "mistral": dict(
        hidden_size=128,
        intermediate_size=208,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        sliding_window=17,
    ),
    "qwen2": dict(
        hidden_size=208,
        intermediate_size=384,
        num_attention_heads=13,
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
    ),
    "qwen3": dict(
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=80,
        tie_word_embeddings=True,
    ),
    "qwen3-yarn": dict(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters=YARN,
    ),
    # What the families below have that those above have not; many switches in few configs.
    "gemma": _sizes(head_dim=32, num_key_value_heads=1, attention_bias=True),
    "gemma3_text": _sizes(
        head_dim=32,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=13,
        query_pre_attn_scalar=20,
        final_logit_softcapping=2.0,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
    ),
    "phi3": _sizes(sliding_window=17, pad_token_id=0),
    "phi3-partial": _sizes(
        num_key_value_heads=4,
        tie_word_embeddings=True,
        pad_token_id=0,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75),
    ),
    "phi3-longrope": _sizes(
        num_key_value_heads=1,
        pad_token_id=0,
        original_max_position_embeddings=32,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            partial_rotary_factor=0.5,
            short_factor=[1.0 + 0.1 * i for i in range(8)],
            long_factor=[1.5 + 0.5 * i for i in range(8)],
        ),
    ),
    "olmo2": _sizes(attention_bias=True),
    "olmo3": _sizes(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=13,
        rope_parameters=dict(full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=1e4)),
    ),
    "granite": _sizes(
        embedding_multiplier=3.0,
        residual_multiplier=0.22,
        attention_multiplier=0.3,
        logits_scaling=0.5,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "stablelm": _sizes(head_dim=None, use_qkv_bias=True),
    "stablelm-parallel": _sizes(
        head_dim=None,
        qk_layernorm=True,
        use_parallel_residual=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    "phi": _sizes(head_dim=None),
    "phi-norm": _sizes(
        head_dim=None, num_key_value_heads=4, qk_layernorm=True, hidden_act="gelu", tie_word_embeddings=True
    ),
    "starcoder2": _sizes(sliding_window=13),
    "starcoder2-untied": _sizes(use_bias=False, tie_word_embeddings=False, num_key_value_heads=1, hidden_act="gelu"),
    "cohere": _sizes(logit_scale=0.25, attention_bias=True),
    "cohere-norm": _sizes(use_qk_norm=True, tie_word_embeddings=False, num_key_value_heads=4),
    "cohere2": _sizes(layer_types=["sliding_attention", "full_attention"], sliding_window=13, logit_scale=0.5),
    "glm": _sizes(head_dim=32, pad_token_id=0),
    "glm-whole": _sizes(
        head_dim=24,
        attention_bias=False,
        tie_word_embeddings=True,
        pad_token_id=0,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0),
    ),
    "glm4": _sizes(head_dim=32, pad_token_id=0),
    "smollm3": _sizes(no_rope_layer_interval=2, attention_bias=True, mlp_bias=True, pad_token_id=0),
    "smollm3-window": _sizes(
        no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=13, tie_word_embeddings=False, pad_token_id=0
    ),
    "ministral": _sizes(head_dim=24, layer_types=["sliding_attention", "full_attention"], sliding_window=13),
    "ministral3": _sizes(
        head_dim=32,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=4.0,
            original_max_position_embeddings=32,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32.0,
            beta_slow=1.0,
            llama_4_scaling_beta=0.5,
        ),
    ),
    "gptj": dict(n_embd=128, n_head=4, rotary_dim=16, n_inner=172),
    "codegen": dict(n_embd=128, n_head=4, rotary_dim=8, activation_function="gelu", tie_word_embeddings=True),
    "gpt2": dict(n_embd=128, n_head=4),
    "gpt2-scaled": dict(
        n_embd=96,
        n_head=3,
        n_inner=172,
        scale_attn_by_inverse_layer_idx=True,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
    "opt": dict(hidden_size=128, ffn_dim=172, num_attention_heads=4, init_std=0.15),
    "opt-after": dict(
        hidden_size=128,
        ffn_dim=256,
        num_attention_heads=4,
        init_std=0.15,
        do_layer_norm_before=False,
        word_embed_proj_dim=64,
        enable_bias=False,
        activation_function="gelu",
    ),
    "internlm2": _sizes(rope_theta=10000.0, rms_norm_eps=1e-6, bias=True, hidden_act="silu"),
    "internlm2-plain": _sizes(rope_theta=1e6, rms_norm_eps=1e-5, bias=False, num_key_value_heads=1),
    "internlm3": _sizes(rope_theta=10000.0, rms_norm_eps=1e-5, head_dim=24, qkv_bias=True, bias=False),
    "internlm3-bias": _sizes(rope_theta=5e4, rms_norm_eps=1e-5, head_dim=32, qkv_bias=False, bias=True),
    "baichuan": _sizes(rms_norm_eps=1e-6, num_key_value_heads=None),
    "baichuan-13b": dict(
        hidden_size=96,
        intermediate_size=176,
        num_attention_heads=6,
        rms_norm_eps=1e-6,
        max_position_embeddings=None,
        model_max_length=512,
        z_loss_weight=0,
    ),
    "chatglm": dict(
        **_CHATGLM,
        hidden_size=128,
        ffn_hidden_size=176,
        num_attention_heads=4,
        kv_channels=32,
        rope_ratio=1,
        multi_query_attention=True,
        multi_query_group_num=2,
        add_qkv_bias=True,
        add_bias_linear=False,
    ),
    "chatglm-each": dict(
        **_CHATGLM,
        hidden_size=96,
        ffn_hidden_size=128,
        num_attention_heads=4,
        kv_channels=24,
        rope_ratio=50,
        multi_query_attention=False,
        multi_query_group_num=1,
        add_qkv_bias=False,
        add_bias_linear=True,
    ),
    # The gap is in the middle of the prompt, and the answer begins later.
    "chatglm_6b": dict(
        hidden_size=128,
        inner_hidden_size=176,
        num_layers=2,
        num_attention_heads=4,
        max_sequence_length=512,
        layernorm_epsilon=1e-5,
        position_encoding_2d=True,
        bos_token_id=PROMPT[44],
        gmask_token_id=PROMPT[25],
        mask_token_id=PROMPT[30],
    ),
    "chatglm_6b-mask": dict(
        hidden_size=96,
        inner_hidden_size=128,
        num_layers=2,
        num_attention_heads=3,
        max_sequence_length=512,
        layernorm_epsilon=1e-5,
        position_encoding_2d=True,
        bos_token_id=PROMPT[20],
        gmask_token_id=400,
        mask_token_id=PROMPT[19],
    ),
    "bloom": dict(hidden_size=128, n_head=8),
    "bloom-normed": dict(
        hidden_size=96, n_head=6, apply_residual_connection_post_layernorm=True, tie_word_embeddings=False
    ),
    "mpt": dict(d_model=128, n_heads=4, max_seq_len=512),
    "mpt-untied": dict(
        d_model=96,
        n_heads=6,
        max_seq_len=512,
        tie_word_embeddings=False,
        attn_config=dict(softmax_scale=0.2, attn_pdrop=0),
    ),
    "falcon": dict(hidden_size=128, num_attention_heads=4),
    "falcon-40b": dict(
        hidden_size=128,
        num_attention_heads=8,
        num_kv_heads=2,
        new_decoder_architecture=True,
        bias=True,
        tie_word_embeddings=False,
        ffn_hidden_size=192,
    ),
    "falcon-11b": dict(
        hidden_size=128,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
    ),
    "falcon-rw": dict(
        hidden_size=128, num_attention_heads=8, multi_query=False, parallel_attn=False, alibi=True, bias=True
    ),
}


def sized(name: str, head_dim: int) -> dict:
    """The config of a variant with another head size."""
    config = CONFIGS[name]
    if "kv_channels" in config:
        return {**config, "kv_channels": head_dim}
    if "head_dim" in config or name in OWN_HEAD_SIZE:
        return {**config, "head_dim": head_dim}
    hidden, heads = next((h, n) for h, n in _SIZE_NAMES if h in config and n in config)
    return {**config, hidden: head_dim * config[heads]}


# Families whose heads may have a size that is not the hidden size's share, where CONFIGS leaves it out.
OWN_HEAD_SIZE = {"llama", "mistral"}
_SIZE_NAMES = [
    ("hidden_size", "num_attention_heads"),
    ("hidden_size", "n_head"),
    ("n_embd", "n_head"),
    ("d_model", "n_heads"),
]

# The first variant of each family with head sizes for which CUDA has kernels of their own; tests on GPUs take them too.
CONFIGS_BY_HEAD_SIZE = {
    f"{name}-of-{head_dim}": sized(name, head_dim) for name in CONFIGS if "-" not in name for head_dim in (64, 128)
}

MIXED = (r".*\.k_proj=8", r".*layers\.0\.mlp\.up_proj=16")
_FUSED = (r"qkv_proj=8", r"layers\.0\.mlp\.gate_up_proj=16")
_DENSE = (r"attention\.dense=8", r"\b0\.mlp\.dense_h_to_4h=16")
MIXED_BY_FAMILY = {
    **dict.fromkeys(("gpt_neox", "bloom", "falcon"), _DENSE),
    "phi3": _FUSED,
    **dict.fromkeys(("glm", "glm4"), (r"k_proj=8", _FUSED[1])),
    "internlm2": (r"wqkv=8", r"layers\.0\.feed_forward\.w3=16"),
    "baichuan": (r"W_pack=8", r"layers\.0\.mlp\.up_proj=16"),
    "chatglm": (r"attention\.dense=8", r"layers\.0\.mlp\.dense_h_to_4h=16"),
    "chatglm_6b": (r"attention\.dense=8", r"layers\.0\.mlp\.dense_h_to_4h=16"),
    "phi": (r"k_proj=8", r"layers\.0\.mlp\.fc1=16"),
    "starcoder2": (r"k_proj=8", r"layers\.0\.mlp\.c_fc=16"),
    "gptj": (r"k_proj=8", r"h\.0\.mlp\.fc_in=16"),
    "gpt2": (r"c_attn=8", r"h\.0\.mlp\.c_fc=16"),
    "codegen": (r"qkv_proj=8", r"h\.0\.mlp\.fc_in=16"),
    "opt": (r"k_proj=8", r"layers\.0\.fc1=16"),
    "mpt": (r"Wqkv=8", r"blocks\.0\.ffn\.up_proj=16"),
}


def mixed(name: str) -> dict:
    """Options of a conversion with 4, 8 and 16 bits in one layer."""
    return dict(bits=4, group_size=32, keep=MIXED_BY_FAMILY.get(name.partition("-")[0], MIXED))


def save_random(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, outlier: float | None = None
) -> Path:
    """Save a random checkpoint of a variant with `save_pretrained`; biases and norms are not trivial.

    outlier  the gain of two channels of every norm of the residual stream, as in large models
    """
    torch.manual_seed(seed)
    family = name.partition("-")[0]
    if family not in CONFIG_MAPPING:
        raise LookupError(
            f"the installed transformers does not know {family!r}: write tests/models/reference_{family}.py, "
            "as CONTRIBUTING says under 'Add a model family'"
        )
    sizes = {key: value for key, value in SMALL.items() if key != "max_position_embeddings" or family not in ALIBI}
    config = AutoConfig.for_model(family, **{**sizes, **{**CONFIGS_BY_HEAD_SIZE, **CONFIGS}[name]})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith(".bias"):
                value.normal_(0, 0.3)
            elif value.dim() == 1 or "_norm." in key:
                value.uniform_(0.5, 1.5)
                if outlier is not None and value.numel() == config.hidden_size:
                    value[torch.randperm(value.numel())[:2]] = outlier
    model.save_pretrained(folder)
    return folder


def load_reference(source: Path, quantized: Path | None = None) -> PreTrainedModel:
    """The source model in float32, its weights those of `quantized`, if given, unpacked by the format's library."""
    # Eager Falcon adds ALiBi twice, to the scores and to the mask (transformers 5.17); MPT and GPT-J have eager alone.
    kind = "sdpa" if AutoConfig.from_pretrained(source).model_type == "falcon" else "eager"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation=kind)
    if quantized is not None:
        state = {key.replace("embed_out.", "lm_head."): value for key, value in unpacked(quantized).items()}
        if "lm_head.weight" in state and getattr(model.config, "tie_word_embeddings", False):
            model.config.tie_word_embeddings = False
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        packed = {key.removesuffix("_packed") for key in names_in(quantized) if key.endswith(".weight_packed")}
        for name, module in model.named_modules():
            if isinstance(module, Conv1D) and f"{name}.weight" in packed:
                state[f"{name}.weight"] = state[f"{name}.weight"].T
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
    return model.eval()


def names_in(folder: Path) -> list[str]:
    """Names of the tensors of a folder."""
    return [name for shard in sorted(folder.glob("*.safetensors")) for name in load_file(shard)]


def unpacked(folder: Path) -> dict[str, Tensor]:
    """The state dict of a pack-quantized folder in float32."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    groups = json.loads((folder / "config.json").read_text()).get("quantization_config", {}).get("config_groups", {})
    bits = {target: group["weights"]["num_bits"] for group in groups.values() for target in group["targets"]}
    state = {k: v.float() for k, v in tensors.items() if ".weight_" not in k}
    for key in (k for k in tensors if k.endswith(".weight_packed")):
        module = key.removesuffix(".weight_packed")
        shape, scale = torch.Size(tensors[f"{module}.weight_shape"].tolist()), tensors[f"{module}.weight_scale"].float()
        codes = unpack_from_int32(tensors[key], bits[module], shape).float()
        group = -(-shape[1] // scale.shape[1])
        zero = tensors.get(f"{module}.weight_zero_point")
        if zero is not None:
            zeros = unpack_from_int32(zero, bits[module], torch.Size((shape[0], scale.shape[1])), packed_dim=0).float()
            codes = codes - zeros.repeat_interleave(group, 1)[:, : shape[1]]
        state[f"{module}.weight"] = codes * scale.repeat_interleave(group, 1)[:, : shape[1]]
    return state


def relative_error(got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 error of each row."""
    return (got - want).norm(dim=-1) / want.norm(dim=-1)
