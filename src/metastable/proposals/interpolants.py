"""Stochastic interpolants: a path from noise to data, and the quadratic loss whose minimum follows it.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive
estimation and interpolating energy models*, TMLR 2024, Section 5.1, after M. S. Albergo, E. Vanden-Eijnden,
*Building normalizing flows with stochastic interpolants*, ICLR 2023.

| paper | here |
|---|---|
| y, the event | `y`, flattened: `(…, d)` |
| z ~ N(0, I) | `z` |
| I_t(z, y) = a(t) z + b(t) y | `Interpolant.point` |
| ∂_t I_t(z, y) | `Interpolant.speed` |
| v̂_t(x, ·) | `velocity(y, t)`; the context x is bound by the caller |
| Λ, t ↦ t^{1/α} of a uniform number | `draw_times(shape, alpha)` |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import require_choice, require_positive

Velocity = Callable[[Tensor, Tensor], Tensor]
"""From `(…, d)` and times `(…)` to `(…, d)`."""


class Interpolant(NamedTuple):
    """I_t(z, y) = a(t) z + b(t) y with I_0 = z and I_1 = y, by its coefficients and their derivatives in t."""

    name: str
    coefficients: Callable[[Tensor], tuple[Tensor, Tensor]]
    derivatives: Callable[[Tensor], tuple[Tensor, Tensor]]

    def point(self, z: Tensor, y: Tensor, t: Tensor) -> Tensor:
        """I_t(z, y); z and y are `(…, d)`, t is `(…)`."""
        return _combine(self.coefficients(t), z, y)

    def speed(self, z: Tensor, y: Tensor, t: Tensor) -> Tensor:
        """∂_t I_t(z, y)."""
        return _combine(self.derivatives(t), z, y)

    def __reduce__(self) -> tuple[Callable[..., Interpolant], tuple[Any, ...]]:
        """By the name of one of ours, whose functions have none by which they could be pickled."""
        ours = INTERPOLANTS.get(self.name) is self
        return (interpolant_named, (self.name,)) if ours else (Interpolant, tuple(self))


def _combine(weights: tuple[Tensor, Tensor], z: Tensor, y: Tensor) -> Tensor:
    of_noise, of_data = weights
    return of_noise[..., None] * z + of_data[..., None] * y


QUARTER = math.pi / 2
LINEAR = Interpolant("linear", lambda t: (1 - t, t), lambda t: (-torch.ones_like(t), torch.ones_like(t)))
"""I_t = (1 − t) z + t y: straight lines."""
TRIGONOMETRIC = Interpolant(
    "trigonometric",
    lambda t: (torch.cos(QUARTER * t), torch.sin(QUARTER * t)),
    lambda t: (-QUARTER * torch.sin(QUARTER * t), QUARTER * torch.cos(QUARTER * t)),
)
"""I_t = cos(πt/2) z + sin(πt/2) y, the paper's example: data of unit variance keep it at every t."""
INTERPOLANTS = {member.name: member for member in (LINEAR, TRIGONOMETRIC)}


def interpolant_named(choice: str | Interpolant) -> Interpolant:
    """The interpolant of that name, or itself.

    >>> interpolant_named("linear").point(torch.zeros(1), torch.ones(1), torch.tensor(0.25)).item()
    0.25
    """
    if isinstance(choice, Interpolant):
        return choice
    require_choice("interpolant", choice, INTERPOLANTS)
    return INTERPOLANTS[choice]


def draw_times(shape: Sequence[int], alpha: float, rng: torch.Generator, like: Tensor) -> Tensor:
    """Times t = u^{1/α} with u uniform on [0, 1]: density α t^{α−1}, so α > 1 looks more often near the data.

    >>> t = draw_times((10_000,), 3.0, torch.Generator().manual_seed(0), torch.zeros(()))
    >>> abs(t.mean().item() - 0.75) < 0.01  # α / (α + 1)
    True
    """
    require_positive("alpha", alpha)
    u = torch.rand(tuple(shape), generator=rng, device=like.device, dtype=like.dtype)
    return u if alpha == 1 else u.pow(1 / alpha)


def log_time(t: Tensor) -> Tensor:
    """−log(1.1 − t), Appendix B.4: what networks see of a time, spread out where u^{1/α} crowds the times.

    >>> log_time(torch.tensor([0.5, 1.0]))
    tensor([0.5108, 2.3026])
    """
    return -torch.log(1.1 - t)


def interpolant_loss(velocity: Velocity, interpolant: Interpolant, y: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """(5.3) for each pair of latent and datum: ‖v̂_t(I_t)‖² − 2 ∂_t I_t · v̂_t(I_t), shape `(…)`.

    Its mean is least where v̂_t(y) = 𝔼[∂_t I_t(z, y₁) | I_t = y], the velocity that carries N(0, I) to the
    data.
    """
    v = velocity(interpolant.point(z, y, t), t)
    return (v * (v - 2 * interpolant.speed(z, y, t))).sum(-1)
