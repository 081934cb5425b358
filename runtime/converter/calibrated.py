"""Layers quantized with their activations in view, one after another as the conversion asks for their tensors."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nibblelm.converter.calibration import Moments, Read, Walk, layer_of
from nibblelm.converter.plan import Unit
from nibblelm.converter.source import check_finite
from nibblelm.converter.wiring import Fold
from nibblelm.errors import ConvertError
from nibblelm.ops.reference import dequantize
from nibblelm.ops.types import QuantizedWeight
from nibblelm.quant import awq, gptq
from nibblelm.quant.affine import pack_zero_point
from nibblelm.quant.rows import QuantizedRows, weighted_rows


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
    """Inputs are those of the unquantized model; what makes an input is scaled down where its readers are scaled up.

    folds  of each module, what that is
    """

    def __init__(self, *args: Any, folds: Mapping[str, Fold]) -> None:
        super().__init__(*args)
        self._folds = folds

    def _quantize_layer(self) -> None:
        seen: dict[Fold, Moments] = {}

        def look(modules: list[str], moments: Callable[[], Moments]) -> list[Tensor]:
            if (fold := self._folds[modules[0]]) not in seen:
                seen[fold] = _checked(moments(), modules)
            return self._pass(modules, moments)

        self._walk.advance(look)
        weights = {module: self._weight(module) for fold in seen for module in fold.modules}
        importance = {}
        for fold, moments in seen.items():
            factors = self._folded(fold, moments, weights)
            for module in fold.modules:
                weights[module] = (weights[module] * factors).float()
                importance[module] = moments.second.diagonal().double() / factors.square()
        for module, weight in weights.items():
            unit, scheme = self._unit(module), self._unit(module).scheme
            if scheme is None:
                self._results[unit.spec.name] = (weight.T.contiguous() if unit.spec.transposed else weight).cpu()
            else:
                args = (scheme.bits, scheme.group_size, scheme.symmetric, unit.dtype)
                self._results[unit.spec.name] = weighted_rows(weight, *args, importance[module])

    def _folded(self, fold: Fold, moments: Moments, weights: dict[str, Tensor]) -> Tensor:
        """The factors (K,) fp64 of the columns of `fold.modules`, after what makes their input was divided by them."""
        if fold.gain is None and not fold.rows:
            return torch.ones_like(moments.magnitude, dtype=torch.float64)
        rows = sum(len(rows) for _, rows in fold.rows) or len(moments.magnitude)
        shared = moments.magnitude.view(fold.heads, -1, rows // fold.heads)  # one row may serve several columns
        magnitude = shared.mean(1, keepdim=True).expand_as(shared).reshape(-1)
        readers = [(weights[module], self._unit(module).scheme) for module in fold.modules]
        factors = awq.search(readers, moments.second, magnitude, self._unit(fold.modules[0]).dtype)
        if fold.gain is not None:
            return self._scale_norm(fold.gain, fold.bias, int(fold.plus_one), factors)
        own = factors.view_as(shared)[:, 0].reshape(-1)
        for (module, rows), part in zip(fold.rows, own.split([len(rows) for _, rows in fold.rows]), strict=True):
            self._scale_rows(module, rows.to(part.device), part, weights)
        return factors

    def _scale_rows(self, module: str, rows: Tensor, factors: Tensor, weights: dict[str, Tensor]) -> None:
        scaled = (weights[module][rows] / factors.unsqueeze(1)).float()
        weights[module] = weights[module].index_copy(0, rows, scaled)
        if (name := f"{module}.bias") in self._units:
            bias = self._read(name).double().to(rows.device)
            self._results[name] = bias.index_copy(0, rows, bias[rows] / factors).cpu()

    def _scale_norm(self, name: str, bias: str | None, plus: int, factors: Tensor) -> Tensor:
        """Divide a norm; returns by what, after its gain was rounded to its dtype, so that the rounding loses nothing.
        A bias of 16 bits is rounded once more."""
        gain = self._read(name).double().to(factors.device) + plus
        stored = (gain / factors - plus).to(self._units[name].dtype)
        lost = (stored.double() + plus == 0) | ~stored.isfinite()
        stored = torch.where(lost, (gain - plus).to(stored.dtype), stored)
        divided = torch.where(lost, 1.0, gain / (stored.double() + plus))
        self._results[name] = stored.cpu()
        if bias is not None:
            self._results[bias] = self._read(bias).double() / divided.cpu()
        return divided

    def _pass(self, modules: list[str], moments: Callable[[], Moments]) -> list[Tensor]:
        return [torch.cat([self._weight(module) for module in modules])]
