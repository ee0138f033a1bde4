"""The velocity field of a mixture of Gaussians, in closed form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metastable.core.errors import InputError

from .fields import VectorField
from .interpolants import Interpolant, interpolant_named


class MixtureField(VectorField):
    """The exact velocity between N(0, I) and a mixture Σ_k w_k N(μ_k, σ_k² I), and the exact density on the way.

    On the way, component k is N(b μ_k, s_k² I) with s_k² = a² + b² σ_k², and

        v_t(x) = Σ_k r_k(x) [b′ μ_k + (a a′ + b b′ σ_k²)/s_k² · (x − b μ_k)],

    with r_k(x) the posterior of component k. It has nothing to learn: it is what a flow is tested with.

    Args:
        means: μ, `(M, d)`.
        scales: σ, `(M,)`.
        weights: positive numbers in the proportions of w; equal by default.
        interpolant: `linear`, `trigonometric` or an `Interpolant`.

    >>> field = MixtureField(torch.tensor([[-1.0], [1.0]]), torch.tensor([0.5, 0.5]), interpolant="linear")
    >>> field(torch.zeros(1, 1), None, 0.5).item()  # symmetric
    0.0
    """

    means: Tensor
    variances: Tensor
    log_weights: Tensor

    def __init__(
        self,
        means: Tensor,
        scales: Tensor,
        weights: Tensor | None = None,
        *,
        interpolant: str | Interpolant = "trigonometric",
    ):
        super().__init__()
        weights = torch.ones_like(scales) if weights is None else weights
        if means.dim() != 2 or scales.shape != means.shape[:1] or weights.shape != scales.shape:
            shapes = [tuple(value.shape) for value in (means, scales, weights)]
            raise InputError(f"means, scales, weights: must have shapes (M, d), (M,) and (M,), got {shapes}")
        if not bool((scales > 0).all() and (weights > 0).all()):
            raise InputError("scales, weights: must be positive")
        self.interpolant = interpolant_named(interpolant)
        self.register_buffer("means", means.clone())
        self.register_buffer("variances", scales.square())
        self.register_buffer("log_weights", (weights / weights.sum()).log())

    def _components(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x − b μ_k, `(…, M, d)`, s_k², `(…, M)`, and log(w_k N(x; b μ_k, s_k² I)), `(…, M)`."""
        a, b = (value[..., None] for value in self.interpolant.coefficients(t))
        spread = a.square() + b.square() * self.variances
        centred = x[..., None, :] - b[..., None] * self.means
        log_normal = -0.5 * (centred.square().sum(-1) / spread + x.shape[-1] * (2 * math.pi * spread).log())
        return centred, spread, self.log_weights + log_normal

    def log_prob(self, x: Tensor, t: Tensor | float = 1.0) -> Tensor:
        """The exact log-density of I_t, `(…, d)` to `(…)`."""
        return self._components(x, torch.as_tensor(t, dtype=x.dtype, device=x.device))[2].logsumexp(-1)

    def _parts(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """r_k, the bracket and its slope in x, and ∇ log N(x; b μ_k, s_k² I): `(…, M)`, or `(…, M, d)`."""
        centred, spread, log_joint = self._components(x, t)
        (a, b), (da, db) = self.interpolant.coefficients(t), self.interpolant.derivatives(t)
        growth = ((a * da)[..., None] + (b * db)[..., None] * self.variances) / spread
        each = db[..., None, None] * self.means + growth[..., None] * centred
        return log_joint.softmax(-1), each, growth, -centred / spread[..., None]

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """v, `(…, d)`."""
        share, each, _, _ = self._parts(x, clock)
        return (share[..., None] * each).sum(-2)

    def divergence(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """div v, `(…)`, with ∇r_k = r_k (∇ log N_k − Σ_j r_j ∇ log N_j)."""
        share, each, growth, score = self._parts(x, clock)
        mean_score = (share[..., None] * score).sum(-2, keepdim=True)
        return (share * (x.shape[-1] * growth + ((score - mean_score) * each).sum(-1))).sum(-1)
