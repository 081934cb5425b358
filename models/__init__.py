"""Model families: one file per `model_type`, found by name.

A family file exports `KEYS` (the config keys it accepts), `read_config(raw, strict)` and
`Model(weights, config, positions)`; where files differ in names, `tensor_name(name)`, the name that the model asks for;
`UNOPENED`, why transformers cannot open its quantized folders; and where one model_type stands for two families,
`variant(raw)`, the name of the file for a config.
"""

if __name__ != "nibblelm.models":
    raise ImportError(f"this folder is the package 'nibblelm.models', not '{__name__}'")

import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from nibblelm.checkpoint import Checkpoint, open_checkpoint
from nibblelm.checkpoint.json_object import listed
from nibblelm.errors import ConfigError
from nibblelm.layers import PlanWeights, TensorSpec

__all__ = ["NESTED", "TensorSpec", "families", "family", "open_model", "tensor_plan", "unopened"]

NESTED = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""Models of several parts, whose config.json has their text model's inside: its model_type where it names none."""
_OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")


def families() -> list[str]:
    """Every supported `model_type`."""
    return sorted(module.name for module in iter_modules(__path__))


def family(raw: Mapping[str, Any]) -> ModuleType:
    """The module of a config's `model_type`; ConfigError lists the supported ones if there is none."""
    model_type = raw.get("model_type")
    if model_type not in families():
        raise ConfigError(f"config.json: model_type {model_type!r} is not supported; supported: {families()}")
    module = import_module(f"{__name__}.{model_type}")
    variant = getattr(module, "variant", None)
    return module if variant is None else import_module(f"{__name__}.{variant(raw)}")


def open_model(source: str | Path, revision: str | None = None) -> Checkpoint:
    """`open_checkpoint`, with the config of the text model and the tensors by the names that its family asks for.

    What belongs to other parts of the model is left out, with one warning that names it.
    """
    checkpoint = open_checkpoint(source, revision)
    raw = checkpoint.config
    if raw.get("model_type") in NESTED:
        inner = raw.get("text_config")
        if not isinstance(inner, dict):
            raise ConfigError(f"config.json: text_config of a {raw['model_type']!r} must be an object, got {inner!r}")
        whole = {name: raw[name] for name in _OF_THE_WHOLE if name in raw}
        tied = {name: raw[name] for name in ("tie_word_embeddings",) if name in raw}  # the head is of the whole
        checkpoint.config = {"model_type": NESTED[raw["model_type"]], **whole, **inner, **tied}
        checkpoint.rename(_text_part)
        if checkpoint.skipped:
            kinds = sorted({".".join(name.split(".")[:2]) for name in checkpoint.skipped})
            message = f"{len(checkpoint.skipped)} tensors do not belong to the text model and are skipped"
            warnings.warn(f"{checkpoint.folder}: {message}: {listed(kinds, 8)}", stacklevel=2)
    elif (named := getattr(family(raw), "tensor_name", None)) is not None:
        checkpoint.rename(named)
    return checkpoint


def _text_part(name: str) -> str | None:
    """The text model's name of a tensor, in the layout of transformers 5 or 4; None: another part's."""
    for prefix, own in (("language_model.model.", "model."), ("model.language_model.", "model."), ("lm_head.",) * 2):
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else None


def unopened(raw: Mapping[str, Any]) -> str:
    """Why transformers cannot open a quantized folder of a config's family; empty if it can."""
    return getattr(family(raw), "UNOPENED", "")


def tensor_plan(raw: Mapping[str, Any], strict: bool = False) -> list[TensorSpec]:
    """Every tensor that a config's model reads, by wiring the model with weights that only take notes."""
    module = family(raw)
    plan = PlanWeights()
    module.Model(plan, module.read_config(raw, strict), positions=1)
    return plan.specs
