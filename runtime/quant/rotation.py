"""Randomised Hadamard rotations, which spread outliers over all coordinates (QuIP#, Tseng et al. 2024; QuaRot,
Ashkboos et al. 2024).

R = D (T x H): D random signs, H Sylvester's Hadamard matrix of the largest power of two that divides the size, and T,
for the odd rest, the discrete Hartley matrix cas(2 pi j k / m) / sqrt(m) (Bracewell 1983): orthogonal for every m, with
entries of at most sqrt(2 / m), where Hadamard matrices of odd sizes do not exist.

With `keeps_mean`, R P, where P is the reflection (Householder 1958) that takes 1 R back to the vector of ones, 1: then
1 R P = 1, and as R P is orthogonal, every x R P has the mean of x.
"""

import math

import torch
from torch import Tensor


class Rotation:
    """The orthogonal matrix R (size, size) of a seed. A call gives x @ R in fp64, in O(size log size) per row.

    keeps_mean  the mean of a row stays as it is
    """

    def __init__(self, size: int, seed: int, keeps_mean: bool = False) -> None:
        self.size = size
        self._power = size & -size
        generator = torch.Generator().manual_seed(seed)
        self._signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
        odd = torch.arange(size // self._power, dtype=torch.float64)
        angles = 2 * math.pi / len(odd) * (odd.outer(odd) % len(odd))
        self._hartley = (angles.cos() + angles.sin()) / math.sqrt(size)
        self._mirror: Tensor | None = None  # of length sqrt(2)
        if keeps_mean:
            ones = torch.ones(size, dtype=torch.float64)
            apart = self(ones) - ones
            self._mirror = apart * (2**0.5 / apart.norm()) if apart.norm() > 1e-6 else None

    def __call__(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        y = x.double() * self._signs
        width = 1
        while width < self._power:
            y = y.view(*x.shape[:-1], -1, 2, width)
            y = torch.stack((y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]), -2)
            width *= 2
        y = (self._hartley @ y.reshape(*x.shape[:-1], -1, self._power)).view(x.shape)
        return y if self._mirror is None else y - (y @ self._mirror).unsqueeze(-1) * self._mirror

    def rows(self, x: Tensor) -> Tensor:
        """R^T @ x of (size, ...), fp64: what writes into the rotated space."""
        return self(x.movedim(0, -1)).movedim(-1, 0).contiguous()
