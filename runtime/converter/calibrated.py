"""Layers quantized with their activations in view, one after another as the conversion asks for their tensors."""

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nibblelm.converter.calibration import Moments, Read, Walk, layer_of
from nibblelm.converter.plan import Unit
from nibblelm.converter.source import check_finite
from nibblelm.errors import ConvertError
from nibblelm.ops.reference import dequantize
from nibblelm.ops.types import QuantizedWeight
from nibblelm.quant import awq, gptq
from nibblelm.quant.affine import pack_zero_point
from nibblelm.quant.rows import QuantizedRows, weighted_rows

AWQ_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Those whose layers `Awq` knows by the names of their modules: what may be folded into what."""


class Calibrated:
    """What becomes of the units of each layer. They must be asked for in the order of the model.

    stored   the weight that an earlier run wrote for a unit
    streams  that the walk must carry
    """

    streams = 1

    def __init__(self, walk: Walk, units: Mapping[str, Unit], read: Read, stored: Callable[[Unit], QuantizedWeight]):
        self._walk, self._units, self._read, self._stored = walk, units, read, stored
        self._results: dict[str, QuantizedRows | Tensor] = {}

    def result(self, unit: Unit) -> QuantizedRows | Tensor | None:
        """The rows of a matrix, or the new values of another tensor; None for one that stays as it is.

        Layers before the unit's that were not asked for are finished: they run with what is stored.
        """
        layer = layer_of(unit.spec.name)
        if layer is None:
            return None
        while self._walk.layer < layer:
            self._walk.advance(self._pass)
        if self._walk.layer == layer:
            self._results.clear()
            self._quantize_layer()
        return self._results.get(unit.spec.name)

    def _quantize_layer(self) -> None:
        """Run the walk's next layer and fill `_results` with what its units become."""
        raise NotImplementedError

    def _pass(self, modules: list[str], moments: Callable[[], Moments]) -> list[Tensor]:
        """The matrices that a finished layer runs with."""
        raise NotImplementedError

    def _unit(self, module: str) -> Unit:
        return self._units[f"{module}.weight"]

    def _weight(self, module: str) -> Tensor:
        """A matrix of the source, fp32, on the walk's device: all that is done to it is done there."""
        weight = self._read(f"{module}.weight").to(self._walk.device).float()
        check_finite(f"{module}.weight", 0, weight)
        return weight


def _checked(moments: Moments, modules: list[str]) -> Moments:
    if not (moments.second.isfinite().all() and moments.drift.isfinite().all()):
        raise ConvertError(f"the inputs of {modules[0]} overflow fp32 on the calibration text; use method mse")
    return moments


class Gptq(Calibrated):
    """Every matrix sees the inputs that the quantized matrices before it give (true-sequential), and makes up for what
    these differ from the unquantized model's (GPTAQ, Li et al. 2025)."""

    streams = 2

    def _quantize_layer(self) -> None:
        self._walk.advance(self._quantize)

    def _quantize(self, modules: list[str], moments: Callable[[], Moments]) -> list[Tensor]:
        seen = _checked(moments(), modules)
        weights = [self._weight(module) for module in modules]
        quantized = [self._rounded(self._unit(m), w, seen) for m, w in zip(modules, weights, strict=True)]
        return [torch.cat(weights), torch.cat(quantized)]

    def _rounded(self, unit: Unit, weight: Tensor, seen: Moments) -> Tensor:
        """Enter the rows of a matrix; returns what every reader of them will compute with."""
        scheme, (n, k) = unit.scheme, unit.spec.shape
        if scheme is None:
            return weight.to(unit.dtype).float()
        args = (scheme.bits, scheme.group_size, scheme.symmetric, unit.dtype)
        rows = self._results[unit.spec.name] = gptq.quantize(weight, seen.second, *args, seen.drift)
        zero = None if scheme.symmetric else pack_zero_point(rows.zero, scheme.bits)
        return self._restored(QuantizedWeight(rows.codes, rows.scale, zero, scheme.bits, scheme.group_size, (n, k)))

    def _restored(self, weight: QuantizedWeight) -> Tensor:
        """What every reader of the codes computes with, on the walk's device."""
        parts = {name: getattr(weight, name) for name in ("codes", "scale", "zero_point")}
        moved = {name: None if part is None else part.to(self._walk.device) for name, part in parts.items()}
        return dequantize(dataclasses.replace(weight, **moved))

    def _pass(self, modules: list[str], moments: Callable[[], Moments]) -> list[Tensor]:
        weights = [self._weight(module) for module in modules]
        units = [self._unit(module) for module in modules]
        parts = zip(units, weights, strict=True)
        stored = [self._restored(self._stored(u)) if u.scheme else w.to(u.dtype).float() for u, w in parts]
        return [torch.cat(weights), torch.cat(stored)]


class Awq(Calibrated):
    """Inputs are those of the unquantized model; what makes an input is scaled down where its readers are scaled up."""

    def _quantize_layer(self) -> None:
        seen: list[tuple[list[str], Moments]] = []

        def look(modules: list[str], moments: Callable[[], Moments]) -> list[Tensor]:
            seen.append((modules, _checked(moments(), modules)))
            return self._pass(modules, moments)

        self._walk.advance(look)
        weights = {module: self._weight(module) for modules, _ in seen for module in modules}
        importance = {}
        for modules, moments in seen:
            factors = self._fold(modules, moments, weights)
            for module in modules:
                weights[module] = (weights[module] * factors).float()
                importance[module] = moments.second.diagonal().double() / factors.square()
        for module, weight in weights.items():
            unit, scheme = self._unit(module), self._unit(module).scheme
            if scheme is None:
                self._results[unit.spec.name] = weight.cpu()
            else:
                args = (scheme.bits, scheme.group_size, scheme.symmetric, unit.dtype)
                self._results[unit.spec.name] = weighted_rows(weight, *args, importance[module])

    def _fold(self, modules: list[str], moments: Moments, weights: dict[str, Tensor]) -> Tensor:
        """The factors (K,) fp64 of the columns of `modules`, after what makes their input was divided by them."""
        layer, own = ".".join(modules[0].split(".")[:3]), modules[0].rpartition(".")[2]
        magnitude = moments.magnitude
        values = f"{layer}.self_attn.v_proj"
        # One row of v_proj serves all heads of its group: (kv heads, heads of the group, head_dim).
        heads = (len(weights[values]) // self._walk.head_dim, -1, self._walk.head_dim)
        if own == "o_proj":
            shared = magnitude.view(heads)
            magnitude = shared.mean(1, keepdim=True).expand_as(shared).reshape(-1)
        readers = [(weights[module], self._unit(module).scheme) for module in modules]
        factors = awq.search(readers, moments.second, magnitude, self._unit(modules[0]).dtype)
        if own == "o_proj":
            self._scale_rows(values, factors.view(heads)[:, 0].reshape(-1), weights)
        elif own == "down_proj":
            self._scale_rows(f"{layer}.mlp.up_proj", factors, weights)
        else:
            norm = "input_layernorm" if own == "q_proj" else "post_attention_layernorm"
            return self._scale_gain(f"{layer}.{norm}.weight", factors)
        return factors

    def _scale_rows(self, module: str, factors: Tensor, weights: dict[str, Tensor]) -> None:
        weights[module] = (weights[module] / factors.unsqueeze(1)).float()
        if f"{module}.bias" in self._units:
            self._results[f"{module}.bias"] = self._read(f"{module}.bias").double() / factors.cpu()

    def _scale_gain(self, name: str, factors: Tensor) -> Tensor:
        """Divide a norm's gain; returns by what it was divided after rounding to its dtype, so that nothing is lost."""
        gain = self._read(name).double().to(factors.device)
        scaled = (gain / factors).to(self._units[name].dtype)
        lost = (scaled == 0) | ~scaled.isfinite()
        self._results[name] = torch.where(lost, gain.to(scaled.dtype), scaled).cpu()
        return torch.where(lost, 1.0, gain / scaled.double())

    def _pass(self, modules: list[str], moments: Callable[[], Moments]) -> list[Tensor]:
        return [torch.cat([self._weight(module) for module in modules])]
