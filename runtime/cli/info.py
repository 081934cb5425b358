"""`nibblelm info`: architecture, size and memory of a model folder, without loading its weights."""

import argparse
import json
from typing import Any

from nibblelm.cli.options import add_model_argument, shown_perplexity

HELP = "print architecture, context, bits per weight and memory of a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--supported", action="store_true", help="list model families and the switches they understand")
    parser.add_argument("--strict", action="store_true", help="refuse unknown keys in config.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.supported:
        from nibblelm.cli.supported import switches, table
        from nibblelm.errors import RequestError
        from nibblelm.models import families

        if args.strict:
            raise RequestError("--strict is of a folder's config.json; leave it out with --supported")
        print(json.dumps({name: switches(name) for name in families()}) if args.json else table())
        return 0
    facts = describe(args.model, args.strict)
    if args.json:
        print(json.dumps(facts))
        return 0
    print(f"{facts['folder']}")
    print(
        f"architecture     {facts['model_type']}: {facts['layers']} layers, hidden {facts['hidden_size']}, "
        f"{facts['heads']} heads ({facts['kv_heads']} kv) of {facts['head_dim']}, vocabulary {facts['vocab_size']}"
    )
    print(f"context          {facts['context']} tokens")
    print(f"parameters       {facts['parameters'] / 1e6:.1f} M, {facts['bits_per_weight']:.2f} bits per weight")
    for scheme, count in facts["schemes"].items():
        print(f"  {scheme:<28} {count} matrices")
    print(f"weights          {facts['weight_bytes'] / 2**20:.1f} MiB")
    print(
        f"KV cache         {facts['kv_bytes_per_1k_tokens'] / 2**20:.2f} MiB per 1k tokens in bf16, twice that in fp32,"
        f" {facts['kv_int8_bytes_per_1k_tokens'] / 2**20:.2f} in int8"
    )
    if facts["unfused"]:
        print(f"not fused        {', '.join(facts['unfused'])}: their parts differ in scheme and run apart")
    try:
        for line in _record_lines(facts["record"]):
            print(line)
    except (AttributeError, KeyError, TypeError, ValueError):  # it is only a record: nothing else depends on it
        print("nibblelm.json    is not as nibblelm convert writes it")
    return 0


def _record_lines(record: dict[str, Any] | None) -> list[str]:
    """What nibblelm.json says of the conversion and of its evaluations. None: it cannot be read."""
    if record is None:
        raise ValueError
    if not record:
        return []
    options = record.get("options", {})
    made = [f"method {record.get('method')}", *(["rotated"] if options.get("rotate") else [])]
    if calibration := record.get("calibration"):
        chats = " as chats" if calibration.get("chat_template") else ""
        made.append("calibrated on {samples} x {length} tokens of {file}{0}, seed {seed}".format(chats, **calibration))
    lines = [f"converted        {', '.join(made)}"]
    errors = {name: tensor["relative_error"] for name, tensor in record.get("tensors", {}).items()}
    if errors:
        worst = max(errors, key=errors.__getitem__)
        mean = sum(errors.values()) / len(errors)
        lines.append(
            f"weight error     {mean:.4f} of the weights' norm on average, most {errors[worst]:.4f} in {worst}"
        )
    for text, figures in record.get("evaluations", {}).items():
        against = f", KL {figures['kl_mean']:.3g} to {figures['against']}" if figures.get("against") else ""
        lines.append(f"evaluated        {text}: perplexity {shown_perplexity(figures)}{against}")
    for text, figures in record.get("activation_rounding", {}).items():
        lines.append(
            f"activations      {text}: KL {figures['kl_mean']:.3g} of 8 bits to 16 ({figures['protocol']['device']}), "
            f"same first {100 * figures['top1_agreement']:.2f} %"
        )
    return lines


def describe(source: str, strict: bool = False) -> dict[str, Any]:
    """Facts of a model folder as plain values: sizes in elements and bytes."""
    from collections import Counter
    from math import prod

    import torch

    from nibblelm.checkpoint.json_object import read_object
    from nibblelm.errors import CheckpointError
    from nibblelm.kv_cache import bytes_per_token
    from nibblelm.models import family, open_model
    from nibblelm.weights import PlanWeights, check_tensors

    checkpoint = open_model(source)
    module = family(checkpoint.config)
    config = module.read_config(checkpoint.config, strict)
    plan = PlanWeights()
    module.Model(plan, config, positions=1)
    check_tensors(checkpoint, plan.specs)

    def scheme(name: str) -> str:
        found = (
            checkpoint.quantization.scheme(name) if checkpoint.quantization and name != "model.embed_tokens" else None
        )
        if found is None or f"{name}.weight" in checkpoint:
            return f"{checkpoint.info(f'{name}.weight').dtype}".removeprefix("torch.")
        grouping = "per row" if found.group_size == -1 else f"groups of {found.group_size}"
        return f"int{found.bits}, {grouping}, {'symmetric' if found.symmetric else 'zero-point'}"

    record: dict[str, Any] | None = {}
    if recorded := checkpoint.file("nibblelm.json"):
        try:
            record = read_object(recorded, CheckpointError)
        except CheckpointError:  # nothing else depends on it
            record = None
    kv_sizes = (config.layers, config.kv_heads, config.head_dim)
    matrices = [spec for spec in plan.specs if spec.kind in ("linear", "head")]
    parameters = sum(prod(spec.shape) for spec in plan.specs)
    weight_bytes = sum(checkpoint.info(name).nbytes for name in checkpoint.names())
    return {
        "folder": str(checkpoint.folder),
        "model_type": config.model_type,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context": config.max_positions,
        "parameters": parameters,
        "bits_per_weight": weight_bytes * 8 / parameters,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_1k_tokens": 1000 * bytes_per_token(*kv_sizes, torch.bfloat16),
        "kv_int8_bytes_per_1k_tokens": 1000 * bytes_per_token(*kv_sizes, torch.int8),
        "schemes": dict(Counter(scheme(spec.module) for spec in matrices)),
        "unfused": [group[0] for group in plan.groups if len({scheme(name) for name in group}) > 1],
        "record": record,
    }
