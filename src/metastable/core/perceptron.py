"""What a chain must know of an energy to run without it: the layers of a perceptron and the Gaussians below it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Gaussians(NamedTuple):
    """log q(x) = log Σ_k Σ_s exp(log_peak_ks − ½·precision_s·|factor_k(x − mean_k)|²): one Gaussian, or a mixture.

    Attributes:
        log_peak: log of the weighted density at each mean, `(K, S)`.
        mean: `(K, D)`.
        factor: `(K, D, D)`.
        precision: 1/c² of each width c, `(S,)`.
    """

    log_peak: Tensor
    mean: Tensor
    factor: Tensor
    precision: Tensor


class Perceptron(NamedTuple):
    """E(x) = head·a(W_L … a(W_1(x − centre) + b_1) … + b_L) + offset − share·log q(x), with x flattened.

    Weights are the parameters themselves where units leave them as they are, so that a trained energy need not be
    asked again.

    Attributes:
        weights: W of each hidden layer, `(out, in)`.
        biases: b of each.
        head: `(width,)`.
        offset: one number, `(1,)`.
        activation: `silu`, `softplus`, `tanh`, `gelu` or `leaky_relu`, with torch's own settings.
        centre: `(D,)`; None for zero.
        below: q; None where there is none.
        share: how much of log q is in it, `(1,)`; None for all.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    head: Tensor
    offset: Tensor
    activation: str
    centre: Tensor | None = None
    below: Gaussians | None = None
    share: Tensor | None = None

    def of_units(self, mean: Tensor, matrix: Tensor, inverse: Tensor, offset: float) -> Perceptron:
        """E((x − mean)·matrix) + offset as a function of x; a matrix may be the diagonal of one, `(D,)`."""
        like = self.head
        mean, A, back = (t.detach().to(like.device, torch.float64) for t in (mean, matrix, inverse))
        A, back = (t.diag() if t.dim() == 1 else t for t in (A, back))
        centre = mean if self.centre is None else mean + self.centre.double() @ back
        below = self.below
        if below is not None:
            means = (mean + below.mean.double() @ back).to(like.dtype)
            factors = (below.factor.double() @ A.T).to(like.dtype).contiguous()
            below = below._replace(mean=means, factor=factors)
        first = (self.weights[0].detach().double() @ A.T).to(like.dtype).contiguous()
        return self._replace(
            weights=(first, *self.weights[1:]),
            offset=self.offset.detach() + offset,
            centre=centre.to(like.dtype),
            below=below,
        )
