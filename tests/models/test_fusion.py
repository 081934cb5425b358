"""Which kernels a step runs on each device, and that the rules that choose them change no bit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.graph import Graph, Value, fused, record
from nibblelm.kv_cache import KVCache
from nibblelm.layers import Step
from nibblelm.models import families, family
from nibblelm.ops.types import ActivationBits, Int8Pages, PackedLinear, Pages, Weight
from nibblelm.random_weights import RandomWeights
from nibblelm.runner import Runner

META, CUDA, CPU = (torch.device(name) for name in ("meta", "cuda", "cpu"))
BF16 = torch.bfloat16
USABLE, REASON = ops.cuda_available()


class ShapesOnly:
    """Weights without data: what rules look at. `mixed` modules do not stack with their neighbours."""

    device, dtype = META, BF16
    activation_bits: ActivationBits = 16

    def __init__(self, dtype: torch.dtype = BF16, mixed: str = "none") -> None:
        self.dtype, self.mixed = dtype, mixed

    def matrices(
        self,
        modules: Sequence[tuple[str, int]],
        columns: int,
        kind: str = "linear",
        pairs: bool = False,
        order: Tensor | None = None,
        transposed: bool = False,
    ) -> list[PackedLinear]:
        if any(self.mixed in name for name, _ in modules):
            return [PackedLinear((rows, columns), 4, -1, 0, CUDA, name) for name, rows in modules]
        shape, names = (sum(rows for _, rows in modules), columns), [name for name, _ in modules]
        return [PackedLinear(shape, 4, -1, 0, CUDA, names, pairs)]

    def vector(self, name: str, *shape: int) -> Tensor:
        return torch.empty(shape, device=META)

    def table(self, module: str, rows: int, columns: int, head: str | None) -> Weight:
        return torch.empty(rows, columns, device=META)

    def head(
        self, module: str, table: str, rows: int, columns: int, tied: bool, unit_rows: bool = False
    ) -> list[PackedLinear]:
        return self.matrices([(module, rows)], columns)


WINDOWED = {"gemma2", "gemma3_text", "olmo3", "cohere2", "ministral"}
# Families whose heads are always a part of the hidden state.
PARTS_OF_HIDDEN = {
    "gpt_neox",
    "stablelm",
    "phi",
    "gptj",
    "gpt2",
    "codegen",
    "opt",
    "bloom",
    "mpt",
    "falcon",
    "baichuan",
    "chatglm_6b",
}
_GPT = {
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "num_key_value_heads": None, "max_position_embeddings": "n_positions",
}  # fmt: skip
_NONE = {"intermediate_size": None, "num_key_value_heads": None}
# What a family calls a size; None: it has no such key.
OWN_NAMES: dict[str, dict[str, str | None]] = {
    "gpt_neox": {"num_key_value_heads": None},
    "baichuan": {"num_key_value_heads": None},
    "chatglm_6b": {
        "intermediate_size": "inner_hidden_size", "num_hidden_layers": "num_layers", "num_key_value_heads": None,
        "max_position_embeddings": "max_sequence_length",
    },
    "chatglm": {
        "intermediate_size": "ffn_hidden_size", "num_hidden_layers": "num_layers", "head_dim": "kv_channels",
        "num_key_value_heads": "multi_query_group_num", "vocab_size": "padded_vocab_size",
        "max_position_embeddings": "seq_length",
    },
    "gptj": _GPT,
    "gpt2": _GPT,
    "codegen": _GPT,
    "opt": {"intermediate_size": "ffn_dim", "num_key_value_heads": None},
    "bloom": {
        **_NONE, "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": None
    },
    "mpt": {
        **_NONE, "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
    "falcon": {"intermediate_size": "ffn_hidden_size", "num_key_value_heads": None},
}  # fmt: skip


HEAD_NORMS: dict[str, dict[str, Any]] = {
    "stablelm": {"qk_layernorm": True}, "cohere": {"use_qk_norm": True}, "phi": {"qk_layernorm": True}
}  # fmt: skip


def raw_config(model_type: str, **changes: Any) -> dict[str, Any]:
    sizes = dict(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=331, max_position_embeddings=512,
    )  # fmt: skip
    if model_type in PARTS_OF_HIDDEN:
        sizes["hidden_size"] = 4 * changes.pop("head_dim", sizes.pop("head_dim"))
    if model_type in WINDOWED:
        sizes["sliding_window"] = 13
    names = OWN_NAMES.get(model_type, {})
    own = {names.get(name, name): value for name, value in sizes.items() if names.get(name, name)}
    if model_type == "chatglm_6b":
        own |= dict.fromkeys(("bos_token_id", "gmask_token_id", "mask_token_id"), 330)
    return {"model_type": model_type, **own, **changes}


def step_of(
    raw: dict[str, Any],
    weights: Any,
    prompts: bool = False,
    last_row: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> Graph:
    """The nodes of a step on CUDA, as recorded."""
    module = family(raw)
    config = module.read_config(raw)
    model = module.Model(weights, config, 512)
    cache = KVCache(config.layers, 4, config.kv_heads, 512, config.head_dim, kv_dtype or weights.dtype, META)

    def forward(ids: Value, positions: Value, slots: Value, tiles: Value, wanted: Value) -> Value:
        step = Step(ids, positions, slots, cache, tiles if prompts else None, wanted if last_row else None)
        return model.forward(step)  # places and context left out

    return record(forward, 5, CUDA)


def names(graph: Graph) -> list[str]:
    """The ops in their order; of a linear its modules, with the norms and sums before it and what it ends with."""

    def step(a: dict[str, Any]) -> str:
        post, normed = a.get("post") is not None, a.get("gain") is not None
        first = [*(["norm"] if post else []), *(["norm"] if normed else ["add"] if post else [])]
        if a.get("addend"):
            first.insert(0, "add")
        modules = "/".join(name.rpartition(".")[2].removesuffix("_proj") for name in a["weight"].data)
        gate = {None: [], "silu": ["swiglu"], "tanh": ["geglu"]}[a.get("gate")]
        return "+".join([*first, modules, *gate, *([a["after"]] if a.get("after") else [])])

    found = []
    for node in graph.nodes:
        if node.op == "linear_chain":
            found.append(" > ".join(step(vars(s)) for s in node.attributes["steps"]))
        elif node.op in {"linear", "norm_linear"}:
            found.append(step({**node.attributes, **node.inputs}))
        elif node.op != "heads":
            found.append(node.op)
    return found


BETWEEN = "o > norm+gate/up+swiglu > down"


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_a_decode_step_runs_one_kernel_between_attentions(model_type: str) -> None:
    """The launches that the recorded speed was measured with; as many with an int8 cache."""
    between = BETWEEN.replace("swiglu", "geglu") if model_type == "gemma" else BETWEEN
    for kv_dtype in (BF16, torch.int8):
        assert names(fused(step_of(raw_config(model_type), ShapesOnly(), kv_dtype=kv_dtype))) == [
            "embedding", "norm+q/k/v", "rope_attention", f"{between} > norm+q/k/v", "rope_attention",
            f"{between} > norm+q/k/v", "rope_attention", between, "norm+lm_head",
        ]  # fmt: skip


@pytest.mark.parametrize("kv_dtype", [BF16, torch.int8])
@pytest.mark.parametrize(
    ("model_type", "head_dim", "together"),
    [
        *(("phi3", size, True) for size in (64, 80, 96, 112, 128, 256)),
        *(("phi3", size, False) for size in (48, 72, 88, 144, 160, 192, 240)),
        *(("qwen3", size, True) for size in (64, 128, 256)),
        *(("qwen3", size, False) for size in (80, 96, 112)),
        *(("gemma2", size, size >= 128) for size in (64, 80, 96, 128, 256)),
    ],
)
def test_head_sizes_that_are_rotated_in_attention(
    model_type: str, head_dim: int, together: bool, kv_dtype: torch.dtype
) -> None:
    """With QK-norm, which Qwen3 has, only those that have a kernel of their own."""
    sizes = {"num_attention_heads": 4, "hidden_size": 4 * head_dim, "head_dim": head_dim}
    raw = raw_config(model_type, num_hidden_layers=1, **sizes, **({"pad_token_id": 0} if model_type == "phi3" else {}))
    got = names(fused(step_of(raw, ShapesOnly(), kv_dtype=kv_dtype)))
    expected = ["rope_attention"] if together else ["rope_append", "attention"]
    assert got[2 : 3 + len(expected)] == [*expected, got[-2 - (model_type == "gemma2")]]


def test_norms_on_both_sides() -> None:
    """What a block gives is normed, added and normed again on its way into the next linear."""
    between = "o > norm+norm+gate_up+swiglu > down"
    assert names(fused(step_of(raw_config("glm4", num_hidden_layers=2), ShapesOnly()))) == [
        "embedding", "norm+q/k/v", "rope_append", "attention", f"{between} > norm+norm+q/k/v", "rope_append",
        "attention", between, "norm+norm+lm_head",
    ]  # fmt: skip
    for model_type, last in (("gemma2", ["softcap"]), ("gemma3_text", [])):
        attention = ["rope_append", "attention"] if model_type == "gemma2" else ["rope_attention"]
        between = "o > norm+norm+gate/up+geglu > down"
        assert names(fused(step_of(raw_config(model_type, num_hidden_layers=2), ShapesOnly()))) == [
            "embedding", "norm+q/k/v", *attention, f"{between} > norm+norm+q/k/v", *attention, between,
            "norm+norm+lm_head", *last,
        ]  # fmt: skip


def test_norms_last() -> None:
    """The sum goes into the next linear as it is."""
    between = "o > norm+add+gate/up+swiglu > down"
    attention = ["columns", "columns", "columns", "rms_norm", "rms_norm", "append", "attention"]
    for model_type in ("olmo2", "olmo3"):
        assert names(fused(step_of(raw_config(model_type, num_hidden_layers=2), ShapesOnly()))) == [
            "embedding", "q/k/v", *attention, f"{between} > norm+add+q/k/v", *attention, between, "norm+norm+lm_head"
        ]  # fmt: skip


_DENSE = ["dense", "norm+dense_h_to_4h+gelu_erf", "dense_4h_to_h"]


@pytest.mark.parametrize(
    ("model_type", "attention", "between", "qkv", "head"),
    [
        ("gpt_neox", ["rope_append", "attention"], _DENSE, "query_key_value", ["embed_out"]),
        ("falcon", ["rope_attention"], _DENSE, "query_key_value", ["lm_head"]),
        ("cohere", ["rope_append", "attention"], ["o", "norm+gate/up+swiglu", "down"], "q/k/v", ["lm_head", "scale"]),
    ],
)
def test_parallel_blocks(model_type: str, attention: list[str], between: list[str], qkv: str, head: list[str]) -> None:
    """Both norms of a GPT-NeoX layer read one sum, and both blocks of a Falcon or Cohere layer one norm."""
    last = " > ".join(between)
    assert names(fused(step_of(raw_config(model_type, num_hidden_layers=2), ShapesOnly()))) == [
        "embedding", f"norm+{qkv}", *attention, f"{last} > add+norm+{qkv}", *attention, last, f"add+norm+{head[0]}",
        *head[1:],
    ]  # fmt: skip


def test_layer_norms_and_activations() -> None:
    """BLOOM: a LayerNorm of the embedding stays alone, the others and GELU are done on the way."""
    between = "dense > norm+dense_h_to_4h+gelu_tanh > dense_4h_to_h"
    attention = ["columns", "columns", "columns", "append", "attention"]
    assert names(fused(step_of(raw_config("bloom", n_layer=2), ShapesOnly()))) == [
        "embedding", "layer_norm", "norm+query_key_value", *attention, f"{between} > norm+query_key_value", *attention,
        between, "norm+lm_head",
    ]  # fmt: skip


def test_rows_that_see_each_other_are_all_appended_before_attention() -> None:
    got = names(fused(step_of(raw_config("llama", num_hidden_layers=1), ShapesOnly()), related=True))
    assert got == ["embedding", "norm+q/k/v", "rope_append", "attention", BETWEEN, "norm+lm_head"]


def test_a_prompt_runs_the_same_but_for_attention() -> None:
    got = names(fused(step_of(raw_config("llama", num_hidden_layers=1), ShapesOnly(), True, last_row=True)))
    expected = ["embedding", "norm+q/k/v", "rope_append", "attention", BETWEEN, "rows", "rows", "norm+lm_head"]
    assert got == expected


APART = ["o", "rms_norm", "gate/up", "swiglu", "down", "rms_norm", "lm_head"]


@pytest.mark.parametrize(
    ("changes", "weights", "expected"),
    [
        (dict(head_dim=160), ShapesOnly(), ["norm+q/k/v", "rope_append", "attention", BETWEEN, "norm+lm_head"]),
        (dict(hidden_size=260), ShapesOnly(), ["rms_norm", "q/k/v", "rope_attention", *APART]),
        (dict(hidden_size=16392), ShapesOnly(), ["rms_norm", "q/k/v", "rope_attention", *APART]),
        (
            dict(mlp_bias=True),
            ShapesOnly(),
            ["norm+q/k/v", "rope_attention", "o > norm+gate/up", "swiglu", "down", "norm+lm_head"],
        ),
        (
            {},
            ShapesOnly(mixed="gate_proj"),
            ["norm+q/k/v", "rope_attention", "o", "rms_norm", "linears", "swiglu", "down", "norm+lm_head"],
        ),
        ({}, ShapesOnly(torch.float32), ["rms_norm", "q/k/v", "rope_append", "attention", *APART]),
    ],
    ids=["head 160", "odd width", "wide", "bias", "mixed", "fp32"],
)
def test_what_no_kernel_takes_runs_node_by_node(changes: dict, weights: ShapesOnly, expected: list[str]) -> None:
    raw = raw_config("llama", num_hidden_layers=1, **changes)
    assert names(fused(step_of(raw, weights))) == ["embedding", *expected]


def test_a_value_that_somebody_else_reads_is_kept() -> None:
    """Norms that read one sum, and a linear's result that is read twice: neither is lost in a kernel."""
    weights = ShapesOnly()
    (square,), gain = weights.matrices([("square", 256)], 256), weights.vector("gain", 256)

    def forward(x: Value) -> Value:
        x = x.embedding(torch.empty(331, 256, device=META), BF16)
        total = x + x.linear([square], None, 16)
        y = total.rms_norm(gain, 1e-6).linear([square], None, 16)
        normed = total.rms_norm(gain, 1e-5)
        return (normed + normed.linear([square], None, 16)) + (y + y.linear([square], None, 16))

    graph = fused(record(forward, 1, CUDA))
    assert names(graph) == ["embedding", "square > norm+square", "rms_norm", "square", "add", "square", "add", "add"]
    held = set(graph.inputs)
    for node in graph.nodes:
        assert set(node.inputs.values()) <= held, f"{node.op} reads what no node before it gives"
        held |= set(node.outputs)
    assert graph.output in held


@pytest.mark.parametrize(("rows", "gated"), [(256, ["linear_activation"]), (192, ["linear", "swiglu"])])
def test_the_cpu_activates_in_the_linear_where_gates_are_whole_panels(rows: int, gated: list[str]) -> None:
    weights = ShapesOnly(torch.float32)
    (gate_up,), (down,) = weights.matrices([("gate_up", rows)], 64), weights.matrices([("down", 64)], rows // 2)

    def forward(x: Value) -> Value:
        x = x.embedding(torch.empty(331, 64, device=META), torch.float32)
        x = x.linear([gate_up], None, 8).swiglu().linear([down], None, 8)
        return x.linear([down], None, 8).gelu("erf") + x.relu()

    ops_run = [node.op for node in fused(record(forward, 1, CPU)).nodes]
    assert ops_run == ["embedding", *gated, "linear", "linear_activation", "relu", "add"]


def test_what_differs_in_shape_is_not_added() -> None:
    with pytest.raises(ValueError, match=r"add: widths 64 and 0"):
        record(lambda ids: ids.embedding(torch.empty(8, 64), BF16) + ids, 1, CPU)


def stored(pool: Pages) -> list[Tensor]:
    return [pool.codes, pool.scales] if isinstance(pool, Int8Pages) else [pool]


class LivelyWeights(RandomWeights):
    """With norms that are not trivial."""

    def vector(self, name: str, *shape: int) -> Tensor:
        return super().vector("bias", *shape) * 3 + ("norm" in name or ".ln_" in name)


INT8 = torch.int8
GPU = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=REASON)]
DEVICES = [
    pytest.param(CPU, torch.float32, torch.float32, id="cpu"),
    pytest.param(CPU, torch.float32, INT8, id="cpu-int8"),
    pytest.param(CUDA, BF16, BF16, id="cuda", marks=GPU),
    pytest.param(CUDA, BF16, INT8, id="cuda-int8", marks=GPU),
    pytest.param(CUDA, torch.float32, torch.float32, id="cuda-fp32", marks=GPU),
]
"""Device, activations and cache."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """CUDA kernels differ by head size; the CPU's take any, so that one will do unless --every is given."""
    if "model_type" not in metafunc.fixturenames or metafunc.function is not test_rules_change_no_bit:
        return
    every = metafunc.config.getoption("--every")
    cases = []
    for device in DEVICES:
        cpu = device.values[0] == CPU
        for model_type in families():
            sampled = cpu and not every and model_type != "llama"
            sizes = [80] if sampled else [64, 80, 256] if cpu else [64, 80, 96, 128, 256]
            cases += [
                pytest.param(model_type, size, bits, *device.values, id=f"{model_type}-{size}-{bits}-{device.id}",
                             marks=device.marks)
                for size in sizes
                for bits in ((4,) if sampled else (4, 16))
            ]  # fmt: skip
    metafunc.parametrize(("model_type", "head_dim", "bits", "device", "dtype", "kv_dtype"), cases)


@torch.inference_mode()
def test_rules_change_no_bit(
    model_type: str, head_dim: int, bits: int, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    head_norms = HEAD_NORMS.get(model_type, {}) if head_dim in (80, 128, 256) else {}
    raw, module = raw_config(model_type, head_dim=head_dim, **head_norms), family({"model_type": model_type})
    config = module.read_config(raw)
    weights = LivelyWeights(device, dtype, 24 if dtype == torch.float32 else 16, bits, -1)
    model = module.Model(weights, config, 64)
    plain, ruled = (Runner(model, device, kv_dtype, 64, graph) for graph in (False, True))
    for runner in (plain, ruled):
        runner.reserve(40)
    ids = torch.randint(0, 331, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    for m in (1, 3, 8, 16, 17, 40):
        for every_row in (True, False):
            got = ruled.prefill(ids[:m], 0, every_row=every_row)
            assert torch.equal(got, plain.prefill(ids[:m], 0, every_row=every_row)), f"prompt of {m}"
            assert got.isfinite().all()
        for slot in range(1, m):
            for runner in (plain, ruled):
                runner.prefill(ids[: 1 + slot % 5], slot)
        for _ in range(3):
            assert torch.equal(ruled.decode(ids[:m], range(m)), plain.decode(ids[:m], range(m))), f"{m} rows"
    # a draft: rows of one sequence, which see each other, beside a row of another
    want = torch.cat([plain.decode([token], [slot]).clone() for token, slot in zip(ids, [0] * 9 + [1], strict=False)])
    assert torch.equal(ruled.decode(ids[:10], [0] * 9 + [1], [*range(43, 52), len(ruled.history[1])]), want)
    for ours, theirs in zip(ruled.cache.keys + ruled.cache.values, plain.cache.keys + plain.cache.values, strict=True):
        for a, b in zip(stored(ours), stored(theirs), strict=True):
            assert torch.equal(a[0, :, :52], b[0, :, :52])
