"""quantization_config and packed tensors against compressed-tensors, and whole folders against transformers."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nibblelm.checkpoint import Checkpoint, Quantization, Scheme, open_checkpoint, quantization_config
from nibblelm.errors import CheckpointError, ConfigError
from nibblelm.ops.reference import dequantize
from nibblelm.ops.types import QuantizedWeight

MODULES = ["lm_head", "model.embed_tokens"]
MODULES += [
    f"model.layers.{i}.{name}" for i in range(3) for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
]


def library_args(scheme: Scheme) -> dict[str, Any]:
    per_row = scheme.group_size == -1
    strategy = {"strategy": "channel"} if per_row else {"strategy": "group", "group_size": scheme.group_size}
    return {"num_bits": scheme.bits, "symmetric": scheme.symmetric, **strategy}


def library_parts(weight: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """Quantized and packed by compressed-tensors alone: min/max scales, in the dtype of `weight`."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**library_args(scheme))
    grouped = weight.unflatten(1, (-1, weight.shape[1] if scheme.group_size == -1 else scheme.group_size))
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
    return {name: tensor.contiguous() for name, tensor in packed.items()}


def library_weight(parts: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    library_scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**library_args(scheme)))
    return PackedQuantizationCompressor.decompress(parts, library_scheme)["weight"]


def write_folder(folder: Path, parts: dict[str, torch.Tensor], config: dict[str, Any], **others: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({**{f"m.{name}": tensor for name, tensor in parts.items()}, **others}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(331, 172, -1), (331, 352, 32), (3, 176, 8), (1, 32, 32), (17, 1, -1)])
def test_packed_weights_mean_what_the_library_says(
    n: int, k: int, group: int, bits: Any, symmetric: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    scheme = Scheme(bits, group, symmetric)
    generator = torch.Generator().manual_seed(n * k + bits)
    weight = (torch.randn(n, k, generator=generator) + 0.3).to(dtype)
    parts = library_parts(weight, scheme)
    checkpoint = Checkpoint(write_folder(tmp_path, parts, quantization_config({"m": scheme}, ["lm_head"])))
    assert checkpoint.modules_quantized == ["m"]
    got = checkpoint.weight("m")
    assert isinstance(got, QuantizedWeight)
    assert (got.bits, got.group_size, got.shape, got.scale.dtype) == (bits, group, (n, k), dtype)
    assert (got.zero_point is None) == symmetric
    # code - zero and its product with a 16-bit scale are exact in fp32; only the result's rounding is the library's.
    expected = library_weight(parts, scheme)
    assert torch.equal(dequantize(got).to(dtype), expected)
    if dtype == torch.float32:  # so that both are not the same nonsense
        steps = got.scale.repeat_interleave(k if group == -1 else group, 1)
        assert ((expected - weight).abs() <= 1.01 * steps).all()


def test_schemes_are_chosen_as_the_library_chooses() -> None:
    """Random groups of names, patterns and class names, with random ignore lists."""
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.utils.match import match_named_modules, match_targets

    model = torch.nn.Module()
    for name in MODULES:
        parent = model
        for part in name.split(".")[:-1]:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(name.split(".")[-1], torch.nn.Linear(1, 1))
    wanted = [
        *MODULES,
        "Linear",
        r"re:.*mlp\..*",
        r"re:.*q_proj$",
        r"re:model\.layers\.[01]\..*proj",
        "re:lm_head",
        "nothing",
    ]
    choices = [Scheme(b, g, s) for b in (4, 8) for g in (-1, 32) for s in (True, False)]
    rng, quantized = random.Random(0), 0
    for _ in range(300):
        config = quantization_config({}, rng.sample(wanted, rng.randrange(4)))
        for index in range(rng.randint(1, 4)):
            group = quantization_config({"": rng.choice(choices)}, [])["config_groups"]["group_0"]
            config["config_groups"][f"g{index}"] = {**group, "targets": rng.sample(wanted, rng.randint(1, 4))}
        schemes: dict[str, Any] = {}
        for group in config["config_groups"].values():
            schemes.update(dict.fromkeys(group["targets"], QuantizationScheme(**copy.deepcopy(group)).weights))
        selected = dict(match_named_modules(model, schemes, config["ignore"]))
        got = Quantization(config)
        for name in MODULES:
            scheme, expected = got.scheme(name), None
            if name in selected:
                expected = schemes[match_targets(name, selected[name], schemes)[0]]
                quantized += 1
            assert (scheme is None) == (expected is None), (config, name)
            if scheme is not None and expected is not None:
                assert (scheme.bits, scheme.symmetric) == (expected.num_bits, expected.symmetric)
                assert scheme.group_size == (expected.group_size or -1)
    assert quantized > 1000


def test_what_is_written_is_valid_for_the_library_and_reads_back() -> None:
    from compressed_tensors.quantization import QuantizationConfig

    choices = [Scheme(4, 32, False), Scheme(8, -1, True), Scheme(4, -1, False)]
    schemes = {name: choices[i % 3] for i, name in enumerate(MODULES[2:])}
    config = json.loads(json.dumps(quantization_config(schemes, ["lm_head"])))
    assert len(config["config_groups"]) == 3
    parsed = Quantization(config)
    assert {name: parsed.scheme(name) for name in MODULES} == {"lm_head": None, "model.embed_tokens": None, **schemes}
    assert parsed.to_dict() == config
    library = QuantizationConfig.model_validate(config)
    assert library.quantization_status.value == "compressed"
    # what the library itself writes of it, with all its optional fields, reads as the same schemes
    again = Quantization(json.loads(library.model_dump_json()))
    assert {name: again.scheme(name) for name in schemes} == schemes


def group_config(**changes: Any) -> dict[str, Any]:
    config = quantization_config({"m": Scheme(4, 32, True)}, [])
    group = config["config_groups"]["group_0"]
    group["weights"] |= changes.pop("weights", {})
    group |= changes
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(({"quant_method": name}, f"quant_method '{name}'.*{{}}") for name in ("gptq", "awq", "bitsandbytes", "fp8")),
        ({}, "quant_method None"),
        ({**group_config(), "format": "int-quantized"}, "format 'int-quantized' is not supported"),
        ({**group_config(), "format": "marlin-24"}, "format 'marlin-24' is not supported"),
        ({**group_config(format=None), "format": "mixed-precision"}, "format 'mixed-precision' is not supported"),
        (group_config(format="float-quantized"), "group_0.*format 'float-quantized'"),
        (group_config(input_activations={"num_bits": 8}), "input_activations is set"),
        (group_config(output_activations={}), "output_activations is set"),
        ({**group_config(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({**group_config(), "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({**group_config(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**group_config(), "quantization_status": "calibration"}, "quantization_status 'calibration'"),
        ({**group_config(), "surprise": 1}, "'surprise'"),
        (group_config(surprise=1), "group_0.*'surprise'"),
        (group_config(weights={"surprise": 1}), "weights.*'surprise'"),
        ({**group_config(), "config_groups": {"W4A16": ["Linear"]}}, "must be an object"),
        ({**group_config(), "config_groups": {}}, "config_groups must be a filled object"),
        ({**group_config(), "ignore": "lm_head"}, "ignore must be a list"),
        ({**group_config(), "ignore": ["re:("]}, r"cannot use the pattern '\('"),
        (group_config(targets=[1]), "targets must be a list"),
        (group_config(targets=None), "targets must be a list"),
        *((group_config(weights={"num_bits": bits}), "num_bits") for bits in (2, 3, 16, 4.0, "4", True)),
        (group_config(weights={"type": "float"}), "type 'float'"),
        (group_config(weights={"symmetric": 1}), "symmetric must be true or false"),
        (group_config(weights={"dynamic": True}), "dynamic True"),
        (group_config(weights={"dynamic": "local"}), "dynamic 'local'"),
        (group_config(weights={"dynamic": 0}), "dynamic 0"),
        *((group_config(weights={"actorder": order}), "actorder") for order in ("group", "dynamic", True)),
        (group_config(weights={"block_structure": [128, 128], "strategy": "block"}), "block_structure"),
        *((group_config(weights={"group_size": size}), "group_size") for size in (0, -1, -2, None, "32", 32.0, True)),
        *((group_config(weights={"group_size": size}), "a multiple of 8") for size in (1, 2, 4, 12)),
        (group_config(weights={"strategy": "tensor"}), "strategy 'tensor'"),
        (group_config(weights={"strategy": "channel"}), "'channel' with group_size 32"),
        (group_config(weights={"strategy": None, "group_size": None}), "strategy None"),
    ],
)
def test_refuses_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("{}", "NibbleLM reads compressed-tensors")):
        Quantization(config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weights": {"actorder": "static"}}, Scheme(4, 32, True)),
        ({"weights": {"actorder": "weight", "observer": "mse", "observer_kwargs": {}}}, Scheme(4, 32, True)),
        ({"weights": {"strategy": None}}, Scheme(4, 32, True)),
        ({"weights": {"strategy": None, "group_size": -1}}, Scheme(4, -1, True)),
        ({"weights": {"strategy": "channel", "group_size": -1, "symmetric": False}}, Scheme(4, -1, False)),
        ({"format": None}, Scheme(4, 32, True)),
    ],
)
def test_spellings_that_mean_the_same(changes: dict[str, Any], expected: Scheme) -> None:
    assert Quantization(group_config(**copy.deepcopy(changes))).scheme("m") == expected
    config = {**group_config(**{"format": "pack-quantized", **changes}), "format": "mixed-precision"}
    if changes.get("format", "pack-quantized") is not None:
        assert Quantization(config).scheme("m") == expected


SPOILERS: dict[str, dict[str, Any]] = {
    "needs weight_packed, weight_scale, weight_shape, weight_zero_point; stored are": {"weight_zero_point": None},
    "weight_shape, weight_zero_point; stored": {"weight_scale": None},
    "stored are.*weight_g_idx": {"weight_g_idx": torch.zeros(64, dtype=torch.int32)},
    "stored are weight, ": {"weight": torch.zeros(17, 64)},
    "not two int64": {"weight_shape": torch.tensor([17, 64, 1])},
    r"not two int64$": {"weight_shape": torch.tensor([17.0, 64.0])},
    "both must be positive": {"weight_shape": torch.tensor([-17, 64])},
    "must be positive": {"weight_shape": torch.tensor([17, 0])},
    "need torch.int32": {"weight_shape": torch.tensor([18, 64])},
    r"\(17, 576460752303423488\)": {"weight_shape": torch.tensor([17, 1 << 62])},
    "groups of 32 do not divide the 63": {"weight_shape": torch.tensor([17, 63])},
    r"weight_packed' is torch.int64": {"weight_packed": torch.zeros(17, 8, dtype=torch.int64)},
    r"weight_packed' is torch.int32 \(17, 9\)": {"weight_packed": torch.zeros(17, 9, dtype=torch.int32)},
    r"weight_scale' is torch.float32 \(17, 1\)": {"weight_scale": torch.ones(17, 1)},
    "weight_scale' is torch.float64": {"weight_scale": torch.ones(17, 2, dtype=torch.float64)},
    r"weight_zero_point' is torch.int32 \(17, 2\)": {"weight_zero_point": torch.zeros(17, 2, dtype=torch.int32)},
    "weight_zero_point' is torch.int8": {"weight_zero_point": torch.zeros(3, 2, dtype=torch.int8)},
}


@pytest.mark.parametrize("message", SPOILERS)
def test_packed_tensors_must_fit_their_scheme(message: str, tmp_path: Path) -> None:
    scheme = Scheme(4, 32, False)
    parts = library_parts(torch.randn(17, 64, generator=torch.Generator().manual_seed(0)), scheme)
    assert isinstance(
        Checkpoint(write_folder(tmp_path, parts, quantization_config({"m": scheme}, []))).weight("m"), QuantizedWeight
    )
    spoiled = {name: tensor for name, tensor in {**parts, **SPOILERS[message]}.items() if tensor is not None}
    checkpoint = Checkpoint(write_folder(tmp_path, spoiled, quantization_config({"m": scheme}, [])))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.weight("m")


def test_config_and_tensors_must_agree_on_what_is_quantized(tmp_path: Path) -> None:
    scheme = Scheme(8, -1, True)
    parts = library_parts(torch.randn(17, 64, generator=torch.Generator().manual_seed(0)), scheme)
    full = {"full.weight": torch.ones(3, 3), "odd.weight": torch.ones(3, dtype=torch.int64)}
    config = quantization_config({"m": scheme, "full": scheme}, ["m"])
    checkpoint = Checkpoint(write_folder(tmp_path, parts, config, **full))
    with pytest.raises(CheckpointError, match="'m' is stored quantized, but"):
        checkpoint.weight("m")
    with pytest.raises(CheckpointError, match="'full' is quantized, but it is stored as it is"):
        checkpoint.weight("full")
    with pytest.raises(CheckpointError, match=r"'odd\.weight' is torch\.int64"):
        checkpoint.weight("odd")
    with pytest.raises(CheckpointError, match=r"no tensor 'absent\.weight'"):
        checkpoint.weight("absent")


def test_a_folder_opens_in_transformers_with_the_weights_read_here(tmp_path: Path) -> None:
    """Mixed int4 and int8, groups and rows, K = 172, 331 output rows: same logits as the float model of our weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=331,
        tie_word_embeddings=False,
    )
    source = LlamaForCausalLM(config).eval()
    source.save_pretrained(tmp_path)
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    schemes: dict[str, Scheme] = {"lm_head": Scheme(8, -1, True)}
    for index, name in enumerate(n for n in state if n.endswith("_proj.weight")):
        group = -1 if "down_proj" in name else (32, 64, -1)[index % 3]
        schemes[name.removesuffix(".weight")] = Scheme(4 if index % 4 else 8, group, index % 2 == 0)
    del schemes["model.layers.1.self_attn.o_proj"]  # one Linear stays as it is
    for module, scheme in schemes.items():
        parts = library_parts(state.pop(f"{module}.weight"), scheme)
        state |= {f"{module}.{name}": tensor for name, tensor in parts.items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = quantization_config(schemes, ["model.layers.1.self_attn.o_proj"])
    (tmp_path / "config.json").write_text(json.dumps(raw))

    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    checkpoint = open_checkpoint(tmp_path)
    assert sorted(checkpoint.modules_quantized) == sorted(schemes)
    modules = [name.removesuffix(".weight") for name in source.state_dict()]
    ours = {f"{module}.weight": dequantize(checkpoint.weight(module)) for module in modules}
    source.load_state_dict(ours)
    ids = torch.arange(63).view(1, -1) * 5
    with torch.no_grad():
        assert torch.equal(source(ids).logits, opened(ids).logits)
    theirs = opened.state_dict()  # the first forward has decompressed them
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
