"""The two-mode teacher and student of the Jarzynski paper: (14) and (15)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from metastable.core.random import derive, generator

LOG_2PI = math.log(2 * math.pi)


class TwoModes(nn.Module):
    """U_θ(x) = −log(e^{−½|x−a|²} + e^{−½|x−b|²−z}), θ = (a, b, z), Z_θ = (2π)^{d/2}(1 + e^{−z}).

    Args:
        a: mean of the first mode, `(d,)`.
        b: mean of the second mode.
        z: minus the log of the second mode's mass over the first's.
        train_means: whether a and b are learned too, or z alone (Appendix C).
    """

    def __init__(self, a: Tensor, b: Tensor, z: float = 0.0, train_means: bool = True):
        super().__init__()
        self.means = nn.Parameter(torch.stack([a, b]), requires_grad=train_means)
        self.z = nn.Parameter(torch.tensor(z, dtype=a.dtype))
        self.event_shape = tuple(a.shape)

    def _logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Exponents of both modes without the shared −½|x|², each `(B,)`."""
        linear = x @ self.means.T - 0.5 * self.means.square().sum(1)
        return linear[:, 0], linear[:, 1] - self.z

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x.square().sum(1) - torch.logaddexp(*self._logits(x))

    def value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Energies and gradients in closed form: ∇U = x − (1−r)a − rb with the second mode's share r."""
        first, second = self._logits(x)
        share = torch.sigmoid(second - first)
        pull = torch.stack([1 - share, share], 1) @ self.means
        return 0.5 * x.square().sum(1) - torch.logaddexp(first, second), x - pull

    def log_partition(self) -> Tensor:
        """½d·log 2π + log(1 + e^{−z}); (16) prints z* where z belongs."""
        d = self.event_shape[0]
        return 0.5 * d * LOG_2PI + nn.functional.softplus(-self.z.detach().double())

    def first_mass(self) -> float:
        """p = 1/(1 + e^{−z}), the mass of the mode that stands at the smaller first coordinate."""
        p = float(torch.sigmoid(self.z.detach().double()))
        first, second = self.means.detach()[:, 0].tolist()
        return p if first <= second else 1 - p

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` exact draws."""
        u = torch.rand(n, generator=rng, device=self.z.device)
        k = (u >= torch.sigmoid(self.z)).long()
        noise = torch.randn((n, *self.event_shape), generator=rng, device=self.z.device, dtype=self.z.dtype)
        return self.means[k] + noise


class Teacher(NamedTuple):
    """Data with the mass it really has in the first mode, fresh draws to score on, and the law of both."""

    x: Tensor
    first_mass: float
    fresh: Tensor
    model: TwoModes


def teacher(n: int, d: int, a: float, b: float, p: float, seed: int) -> Teacher:
    """`n` draws of (14) with means a·e₁ and b·e₁ and mass `p` at a."""
    first = torch.zeros(d)
    second = torch.zeros(d)
    first[0], second[0] = a, b
    model = TwoModes(first, second, math.log(p / (1 - p))).requires_grad_(False)
    x = model.sample(n, generator(derive(seed, "data")))
    fresh = model.sample(n, generator(derive(seed, "fresh")))
    return Teacher(x, float((x[:, 0] < (a + b) / 2).double().mean()), fresh, model)


def student(d: int, seed: int, offset: float = 0.1, spread: float = 0.01) -> TwoModes:
    """The start of Appendix B.1: means ∓`offset`·e₁ plus a little noise in the other coordinates, z = 0."""
    rng = generator(derive(seed, "student"))
    means = spread * torch.randn((2, d), generator=rng)
    means[0, 0], means[1, 0] = -offset, offset
    return TwoModes(means[0], means[1])


def rates(means: float, z: float) -> Callable[[TwoModes], Optimizer]:
    """Gradient descent with one learning rate for the means and one for z."""

    def make(module: TwoModes) -> Optimizer:
        groups = [{"params": [module.z], "lr": z}]
        if module.means.requires_grad:
            groups.append({"params": [module.means], "lr": means})
        return SGD(groups, lr=z)

    make.per_module = True  # pyright: ignore
    return make


def kl_from_teacher(source: Teacher, model: TwoModes, log_z: float) -> float:
    """KL(teacher ‖ model) averaged over fresh draws, with the model normalised by `log_z`.

    Over the training data, as in (16), it would fall below zero as the model fits their noise.
    """
    x = source.fresh.to(model.z)
    with torch.no_grad():
        own = source.model.to(x)(x).double().mean() + source.model.log_partition().to(x.device)
        return float(log_z + model(x).double().mean() - own)
