"""`quantization_config` of a compressed-tensors `pack-quantized` folder: which module is stored in which scheme.

Source: the fields of `QuantizationConfig`, `QuantizationScheme` and `QuantizationArgs` of compressed-tensors 0.17.
Whatever would change the weights' values and is not implemented is an error that names it.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nibblelm.checkpoint.json_object import listed, shown
from nibblelm.checkpoint.patterns import NamePattern
from nibblelm.errors import ConfigError

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
_MIXED = "mixed-precision"  # every group names its own format
_SUPPORTED = f"NibbleLM reads {METHOD} in the {FORMAT} format: int4 or int8 weights, per row or in groups"
_TOP_KEYS = {
    *("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "sparsity_config", "transform_config"),
    # these say how the file came to be, not what the weights are
    *("quantization_status", "global_compression_ratio", "version", "run_compressed"),
}
_GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
_WEIGHT_KEYS = {
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder"),
    *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),  # how they were made; tensors carry their own dtypes
}
_STATUSES = (None, "compressed", "frozen")
# "static" and its alias "weight" order columns during calibration only; "group" and "dynamic" store a permutation.
_ACTORDERS = (None, False, "static", "weight")


@dataclass(frozen=True)
class Scheme:
    """How one weight matrix is stored. `group_size` -1 is one scale per row; symmetric has no zero-points."""

    bits: Literal[4, 8]
    group_size: int
    symmetric: bool


class Quantization:
    """A parsed quantization_config. Raises ConfigError at anything it would have to guess or ignore."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        _check_method(config)
        self._config = copy.deepcopy(dict(config))
        self._schemes: dict[str, Scheme] = {}
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise ConfigError(f"quantization_config: config_groups must be a filled object, got {shown(groups)}")
        for name, group in groups.items():
            targets, scheme = _parse_group(f"quantization_config.config_groups[{shown(name)}]", group, config["format"])
            self._schemes.update(dict.fromkeys(targets, scheme))
        ignore = _names("quantization_config.ignore", config.get("ignore") or [])
        self._ignored = {name for name in ignore if not name.startswith("re:")}
        self._ignored_patterns = _patterns(ignore)
        # One module can match several patterns: the library takes the first in alphabetical order.
        self._patterns = _patterns(sorted(self._schemes))

    def scheme(self, module: str, module_class: str = "Linear") -> Scheme | None:
        """The scheme of a module by its name in memory, None when it is not quantized.

        `ignore` wins; then an exact name, a `re:` pattern, a class name, as in compressed-tensors.
        """
        if module in self._ignored or module_class in self._ignored:
            return None
        if any(pattern.matches(module) for pattern in self._ignored_patterns.values()):
            return None
        if module in self._schemes:
            return self._schemes[module]
        for target, pattern in self._patterns.items():
            if pattern.matches(module):
                return self._schemes[target]
        return self._schemes.get(module_class)

    def names_exactly(self, module: str) -> bool:
        """Whether a config group lists this very module, so that it cannot be stored unquantized."""
        return module in self._schemes and self.scheme(module) is not None

    def to_dict(self) -> dict[str, Any]:
        """The quantization_config as it was read."""
        return copy.deepcopy(self._config)


def quantization_config(schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` for these modules: one config group per distinct scheme, naming its modules.

    Names rather than patterns, so that every reader agrees on what is quantized. `ignore` lists the unquantized
    Linear modules.
    """
    modules: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        modules.setdefault(scheme, []).append(name)
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": _group(*item) for i, item in enumerate(modules.items())},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    per_row = scheme.group_size == -1
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if per_row else "group",
        "group_size": None if per_row else scheme.group_size,
        "dynamic": False,
        "actorder": None,
    }
    group = {"targets": targets, "weights": weights, "format": FORMAT}
    return {**group, "input_activations": None, "output_activations": None}


def _check_method(config: Mapping[str, Any]) -> None:
    method = config.get("quant_method")
    if method != METHOD:
        raise ConfigError(
            f"quantization_config: quant_method {shown(method)} is not supported. {_SUPPORTED}; "
            "convert from the model's unquantized checkpoint instead"
        )
    if config.get("format") not in (FORMAT, _MIXED):
        raise ConfigError(f"quantization_config: format {shown(config.get('format'))} is not supported. {_SUPPORTED}")
    _check_keys("quantization_config", config, _TOP_KEYS)
    if config.get("kv_cache_scheme") is not None:
        raise ConfigError("quantization_config: kv_cache_scheme is not supported; the cache is kept in full precision")
    status = config.get("quantization_status")
    if status not in _STATUSES:
        raise ConfigError(
            f"quantization_config: quantization_status {shown(status)} is not supported, only 'compressed'"
        )
    if not _is_empty(config.get("transform_config"), "config_groups"):
        raise ConfigError("quantization_config: transform_config is not supported; save the model without transforms")
    sparsity = config.get("sparsity_config")
    if not (_is_empty(sparsity) or (isinstance(sparsity, dict) and sparsity.get("format") == "dense")):
        raise ConfigError("quantization_config: sparsity_config is not supported; save the model without sparsity")


def _is_empty(value: Any, inner: str = "") -> bool:
    """None, {} or {inner: {}}: how the library writes that an option is not used."""
    return value is None or value in ({}, {inner: {}})


def _check_keys(where: str, value: Any, known: set[str]) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be an object, got {shown(value)}")
    unknown = sorted(value.keys() - known)
    if unknown:
        raise ConfigError(f"{where} has keys that NibbleLM does not know: {listed(unknown)}. {_SUPPORTED}")


def _names(where: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ConfigError(f"{where} must be a list of module names, got {shown(value)}")
    return value


def _patterns(names: Sequence[str]) -> dict[str, NamePattern]:
    return {name: NamePattern(name.removeprefix("re:")) for name in names if name.startswith("re:")}


def _parse_group(where: str, group: Any, default_format: str) -> tuple[list[str], Scheme]:
    _check_keys(where, group, _GROUP_KEYS)
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise ConfigError(f"{where}: {key} is set, but quantized activations are not supported. {_SUPPORTED}")
    stored = group.get("format") or default_format
    if stored != FORMAT:
        raise ConfigError(f"{where}: format {shown(stored)} is not supported. {_SUPPORTED}")
    return _names(f"{where}.targets", group.get("targets")), _parse_weights(f"{where}.weights", group.get("weights"))


def _parse_weights(where: str, weights: Any) -> Scheme:
    _check_keys(where, weights, _WEIGHT_KEYS)
    bits, symmetric = weights.get("num_bits", 8), weights.get("symmetric", True)
    strategy, group_size = weights.get("strategy"), weights.get("group_size")
    if type(bits) is not int or bits not in (4, 8):
        raise ConfigError(f"{where}: num_bits {shown(bits)} is not supported; 4 and 8 are")
    if not isinstance(symmetric, bool):
        raise ConfigError(f"{where}: symmetric must be true or false, got {shown(symmetric)}")
    for key, allowed in (
        ("type", (None, "int")),
        ("dynamic", (None, False)),
        ("actorder", _ACTORDERS),
        ("block_structure", (None,)),
    ):
        value = weights.get(key)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
            raise ConfigError(f"{where}: {key} {shown(value)} is not supported. {_SUPPORTED}")
    if group_size is not None and type(group_size) is not int:
        raise ConfigError(f"{where}: group_size must be a number, got {shown(group_size)}")
    if strategy is None and group_size is not None:
        strategy = "channel" if group_size == -1 else "group"
    if strategy == "channel" and group_size in (None, -1):
        return Scheme(bits, -1, symmetric)
    if strategy == "group" and group_size is not None and group_size > 0 and group_size % 8 == 0:
        return Scheme(bits, group_size, symmetric)
    raise ConfigError(
        f"{where}: strategy {shown(strategy)} with group_size {shown(group_size)} is not supported; "
        "'channel' (per row) and 'group' with a multiple of 8 are"
    )
