"""Model families: one file per `model_type`, found by name.

A family file exports `KEYS` (the config keys it accepts), `read_config(raw, strict)` and
`Model(weights, config, positions)`.
"""

if __name__ != "nibblelm.models":
    raise ImportError(f"this folder is the package 'nibblelm.models', not '{__name__}'")

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from nibblelm.errors import ConfigError
from nibblelm.layers import PlanWeights, TensorSpec

__all__ = ["TensorSpec", "families", "family", "tensor_plan"]


def families() -> list[str]:
    """Every supported `model_type`."""
    return sorted(module.name for module in iter_modules(__path__))


def family(raw: Mapping[str, Any]) -> ModuleType:
    """The module of a config's `model_type`; ConfigError lists the supported ones if there is none."""
    model_type = raw.get("model_type")
    if model_type not in families():
        raise ConfigError(f"config.json: model_type {model_type!r} is not supported; supported: {families()}")
    return import_module(f"{__name__}.{model_type}")


def tensor_plan(raw: Mapping[str, Any], strict: bool = False) -> list[TensorSpec]:
    """Every tensor that a config's model reads, by wiring the model with weights that only take notes."""
    module = family(raw)
    plan = PlanWeights()
    module.Model(plan, module.read_config(raw, strict), positions=1)
    return plan.specs
