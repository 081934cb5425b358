"""Codes of least error in a layer's output: GPTQ (Frantar et al. 2023), then coordinate descent from there.

The error of a row is e H e^T with e = w - w' and H the second moment of the layer's inputs. GPTQ rounds column by
column, those of the largest H_jj first (act-order), and moves what is left of a row so that it makes up for the error
so far. Scales and zero-points are fixed before: by the clip search of `mse` with squares weighted by H_jj, then for
each row the best of a few multiples of its scales, judged by the error that GPTQ ends with. Coordinate descent then
rounds every code once more with all others as they came to be, and the scale of a row is fitted to its codes.

On 40 held-out stories the demo model at 4 bits per row is 0.0064 nats from its source by minmax, 0.0025 by this and
0.0020 when the matrices also make up for the error of the layers before them (`drift`).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nibblelm.quant import mse
from nibblelm.quant.affine import pack_codes, round_scale
from nibblelm.quant.rows import QuantizedRows

BLOCK = 128
"""Columns between two updates of the rest of the matrix."""

MULTIPLES = (1.0, 0.92, 0.96, 1.04)
SWEEPS = 2
_DAMPING = 0.01
"""Added to H's diagonal, in means of it; ten times that where the Cholesky factor does not exist, and so on."""


@dataclass(frozen=True)
class _Grid:
    """What a matrix may take: scale (R, G) as it will be stored, zero (R, G), both fp32; groups of `width` columns."""

    scale: Tensor
    zero: Tensor
    bits: int
    width: int

    @cached_property
    def groups(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of each group the scale, its reciprocal, the least and most steps, (R,): made once, since starting a kernel
        for every column takes a GPU longer than the column."""
        parts = (self.scale, 1.0 / self.scale, -self.zero, 2**self.bits - 1 - self.zero)
        return list(zip(*(part.T.contiguous() for part in parts), strict=True))

    def round(self, column: int, value: Tensor, steps: Tensor) -> Tensor:
        """Enter the nearest code - zero of values (R,) of a column into `steps`; returns what these stand for."""
        scale, inverse, least, most = self.groups[column // self.width]
        return torch.mul(value, inverse, out=steps).round_().clamp_(least, most) * scale

    def values(self, steps: Tensor) -> Tensor:
        """Steps (R, K) times their scales."""
        return steps * self.scale.repeat_interleave(self.width, 1)

    def rows(self, scale_of: Tensor, other: "_Grid") -> "_Grid":
        """This grid where `scale_of` (R,) is false, the other where it is true."""
        pick = scale_of.unsqueeze(1)
        scale, zero = torch.where(pick, other.scale, self.scale), torch.where(pick, other.zero, self.zero)
        return _Grid(scale, zero, self.bits, self.width)


def quantize(
    weight: Tensor,
    moment: Tensor,
    bits: int,
    group_size: int,
    symmetric: bool,
    dtype: torch.dtype,
    drift: Tensor | None = None,
) -> QuantizedRows:
    """Quantize (R, K) fp32 weights for inputs x of second moment `moment` (K, K), on its device; rows on the CPU.

    group_size  -1 for one scale per row, else a divisor of K; dtype  of the stored scales
    drift       (K, K), mean of (u - x) x^T: the output wanted is that of the weights for inputs u
    """
    original = weight = weight.to(moment.device)
    moment, factor = _damped(moment.double())
    if drift is not None:  # least squares: W u as nearly as W' x can be
        weight = (weight.double() + weight.double() @ drift.double() @ factor).float()
    grid = _first_grid(weight, moment.diagonal(), bits, group_size, symmetric, dtype)
    rows = len(weight)
    trials = [(grid.scale.double() * multiple) for multiple in MULTIPLES]
    scales = torch.cat([round_scale(trial, dtype).float() for trial in trials])
    every = _Grid(scales, grid.zero.repeat(len(MULTIPLES), 1), bits, grid.width)
    steps, loss = _gptq(weight.repeat(len(MULTIPLES), 1), factor, moment.diagonal().argsort(descending=True), every)
    best = loss.view(-1, rows).argmin(0) * rows + torch.arange(rows, device=loss.device)
    grid, steps = _Grid(every.scale[best], every.zero[best], bits, grid.width), steps[best]
    moment = moment.float()
    for _ in range(SWEEPS):
        grid, steps = _sweep(weight, moment, *_refit(weight, moment, grid, steps, dtype))
    error = original - grid.values(steps)
    codes = steps + grid.zero.repeat_interleave(grid.width, 1)
    return QuantizedRows(
        pack_codes(codes, bits).cpu(),
        grid.scale.to(dtype).cpu(),
        grid.zero.to(torch.uint8).cpu(),
        error.double().square().sum(1).cpu(),
        original.double().square().sum(1).cpu(),
    )


def _first_grid(
    weight: Tensor, importance: Tensor, bits: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> _Grid:
    width = weight.shape[1] if group_size == -1 else group_size
    blocks, factors = weight.view(len(weight), -1, width), importance.view(-1, width)
    scale, zero = mse.choose(blocks, bits, symmetric, dtype, factors)
    return _Grid(scale.squeeze(-1).float(), zero.squeeze(-1).float(), bits, width)


def _damped(moment: Tensor) -> tuple[Tensor, Tensor]:
    """The moment with its diagonal raised until it can be inverted, and the moment's inverse."""
    mean = moment.diagonal().mean().clamp(min=1e-30)
    damping = _DAMPING
    while True:
        raised = moment + torch.eye(len(moment), dtype=moment.dtype, device=moment.device) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(raised)
        if not failed:
            return raised, torch.cholesky_inverse(lower)
        damping *= 10


def _gptq(weight: Tensor, inverse: Tensor, order: Tensor, grid: _Grid) -> tuple[Tensor, Tensor]:
    """Steps (R, K) and the error e H e^T of each row, by columns in `order`; `inverse` is H^-1."""
    # Conditioning on the columns already rounded is elimination, which the Cholesky factor of H^-1 has done.
    upper = torch.linalg.cholesky(inverse[order][:, order], upper=True).float()
    left = weight[:, order]
    steps = torch.empty_like(left)
    loss = torch.zeros(len(left), device=left.device)
    columns, values, codes, pivots = order.tolist(), left.unbind(1), steps.unbind(1), upper.diagonal().unbind()
    for begin in range(0, len(columns), BLOCK):
        end = min(begin + BLOCK, len(columns))
        errors = torch.empty(len(left), end - begin, device=left.device)
        for j, error in enumerate(errors.unbind(1), begin):
            torch.sub(values[j], grid.round(columns[j], values[j], codes[j]), out=error).div_(pivots[j])
            left[:, j:end].addr_(error, upper[j, j:end], alpha=-1)
            loss += error.square()
        left[:, end:].addmm_(errors, upper[begin:end, end:], alpha=-1)
    return steps[:, order.argsort()], loss


def _sweep(weight: Tensor, moment: Tensor, grid: _Grid, steps: Tensor) -> tuple[_Grid, Tensor]:
    """Each code once more at its best, given all others: the error of no row grows."""
    error = weight - grid.values(steps)
    slope = error @ moment  # half the gradient of e H e^T
    steps = steps.clone()
    codes, slopes, pivots = steps.unbind(1), slope.unbind(1), moment.diagonal().unbind()
    for begin in range(0, weight.shape[1], BLOCK):
        end = min(begin + BLOCK, weight.shape[1])
        changes = torch.empty(len(weight), end - begin, device=weight.device)
        for j, change in enumerate(changes.unbind(1), begin):
            before = codes[j] * grid.groups[j // grid.width][0]
            wanted = (slopes[j] / pivots[j]).add_(before)
            torch.sub(before, grid.round(j, wanted, codes[j]), out=change)
            slope[:, j:end].addr_(change, moment[j, j:end])
        slope[:, end:].addmm_(changes, moment[begin:end, end:])
    return grid, steps


def _refit(weight: Tensor, moment: Tensor, grid: _Grid, steps: Tensor, dtype: torch.dtype) -> tuple[_Grid, Tensor]:
    """One scale per row fitted to its codes by least squares, where that is better after rounding."""
    if grid.scale.shape[1] > 1:
        return grid, steps
    weighted = steps @ moment
    norm = (weighted * steps).sum(1, keepdim=True)
    fitted = (weighted * weight).sum(1, keepdim=True) / norm
    sound = (norm > 0) & (fitted > 0)
    scale = round_scale(torch.where(sound, fitted, grid.scale).double(), dtype).float()
    other = _Grid(scale, grid.zero, grid.bits, grid.width)
    losses = [((e := weight - g.values(steps)) @ moment * e).sum(1) for g in (grid, other)]
    return grid.rows(losses[1] < losses[0], other), steps
