"""A mixture of Gaussians, each at several widths: modes of any shape with tails of any weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.errors import InputError, require
from metastable.core.perceptron import Gaussians


class ScaleMixture(nn.Module):
    """p(x) = Σ_k Σ_s w_ks N(x; m_k, c_s² Σ_k) over vectors, with exact draws.

    One width c = 1 gives an ordinary mixture of Gaussians. With several, each component is itself a mixture of a
    narrow and some wide Gaussians, so that its tails can be as heavy as the data's; the widths share m_k and Σ_k
    and cost next to nothing. Σ_k is held by P_k with P_k Σ_k P_kᵀ = I, so that the density of all components is one
    product of matrices.

    Loading weights of another number of components or widths makes the module that size.

    Args:
        log_weight: log w, `(K, S)`; brought to Σ w = 1.
        mean: m, `(K, d)`.
        precision_factor: P, `(K, d, d)`, lower triangular with positive diagonal.
        width: c, `(S,)`.

    >>> q = ScaleMixture(torch.zeros(1, 2), torch.zeros(1, 1), torch.ones(1, 1, 1), torch.tensor([1.0, 3.0]))
    >>> round(q.log_prob(torch.zeros(1, 1)).exp().item(), 4)  # ½·0.3989 + ½·0.1330
    0.266
    """

    log_weight: Tensor
    mean: Tensor
    precision_factor: Tensor
    width: Tensor

    def __init__(self, log_weight: Tensor, mean: Tensor, precision_factor: Tensor, width: Tensor):
        super().__init__()
        K, S, d = len(mean), len(width), mean.shape[-1]
        shapes = (tuple(log_weight.shape), tuple(mean.shape), tuple(precision_factor.shape))
        if shapes != ((K, S), (K, d), (K, d, d)):
            raise InputError(
                "scale mixture: log_weight, mean and precision_factor must have shapes (K, S), (K, d) and "
                f"(K, d, d), got {', '.join(map(str, shapes))} for {S} widths"
            )
        diagonal = precision_factor.diagonal(dim1=-2, dim2=-1)
        require(bool((diagonal > 0).all()), "precision_factor", "positive on its diagonal", diagonal.min())
        require(bool((width > 0).all()), "width", "positive", width.tolist())
        self.event_shape = (d,)
        flat = torch.log_softmax(log_weight.flatten(), 0)
        self.register_buffer("log_weight", flat.view(K, S))
        self.register_buffer("mean", mean.clone())
        self.register_buffer("precision_factor", precision_factor.tril())
        self.register_buffer("width", width.clone())

    def log_prob(self, x: Tensor) -> Tensor:
        """Normalised log-density, `(B, d)` to `(B,)`."""
        K, d = self.mean.shape
        P = self.precision_factor
        # P_k(x − m_k) for all k by one product; events must be centred by all the same vector before it
        offset = (P @ (self.mean - self.mean[0])[..., None]).flatten()
        white = (x - self.mean[0]) @ P.reshape(K * d, d).T - offset
        square = white.view(len(x), K, d).square().sum(-1)
        log_joint = self._log_peak() - 0.5 * square[..., None] / self.width.square()
        return torch.logsumexp(log_joint.flatten(1), 1)

    def _log_peak(self) -> Tensor:
        """log of w_ks times the density of its Gaussian at its mean, `(K, S)`."""
        d = self.mean.shape[1]
        log_det = self.precision_factor.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
        return self.log_weight + log_det - d * self.width.log() - 0.5 * d * math.log(2 * math.pi)

    def gaussians(self) -> Gaussians:
        """Its components and their widths."""
        factor = self.precision_factor.contiguous()
        return Gaussians(self._log_peak(), self.mean, factor, self.width.square().reciprocal())

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` independent draws, `(n, d)`."""
        K, S = self.log_weight.shape
        chosen = torch.multinomial(self.log_weight.flatten().exp(), n, replacement=True, generator=rng)
        component, width = chosen // S, self.width[chosen % S]
        noise = torch.randn(
            (n, self.mean.shape[1]), generator=rng, device=self.mean.device, dtype=self.mean.dtype
        )
        x = noise * width[:, None]
        for k in range(K):
            rows = component == k
            x[rows] = torch.linalg.solve_triangular(self.precision_factor[k], x[rows].T, upper=False).T
        return self.mean[component] + x

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any
    ) -> None:
        """Takes the stored number of components and widths, which follow from data and not from settings."""
        for name in ("log_weight", "mean", "precision_factor", "width"):
            stored, own = state_dict.get(prefix + name), getattr(self, name)
            free = name in ("log_weight", "width")  # whose events are none
            if (
                stored is not None
                and stored.dim() == own.dim()
                and (free or stored.shape[1:] == own.shape[1:])
            ):
                setattr(self, name, own.new_empty(stored.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)  # pyright: ignore
