"""The f-EBM paper's one-dimensional problem: data, model, and the exact optimum of each divergence."""

from __future__ import annotations

import math
from functools import cache

import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from metastable.energies import GaussianMixture
from metastable.methods.divergences import Divergence, divergence_of

LOG_2PI = math.log(2 * math.pi)
BOX, POINTS = (-14.0, 16.0), 12_001
"""The grid of every integral; at its ends all densities here are below e⁻³⁰."""


def target() -> GaussianMixture:
    """p, normalised."""
    means, scales = torch.tensor([[-1.0], [2.0]]), torch.tensor([0.25, math.sqrt(2)])
    return GaussianMixture(means, scales, torch.tensor([0.33, 0.67]).log()).double()


class Bell(nn.Module):
    """½((x−μ)/σ)², with μ and log σ as parameters; it draws its own exact samples.

    >>> Bell(0.0, 2.0)(torch.tensor([[2.0], [4.0]]))
    tensor([0.5000, 2.0000], grad_fn=<MulBackward0>)
    """

    def __init__(self, mu: float, sigma: float):
        super().__init__()
        self.mu = nn.Parameter(torch.tensor(mu))
        self.log_sigma = nn.Parameter(torch.tensor(math.log(sigma)))
        self.event_shape = (1,)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * ((x[:, 0] - self.mu) * torch.exp(-self.log_sigma)).square()

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` exact draws."""
        noise = torch.randn(n, 1, generator=rng, device=self.mu.device, dtype=self.mu.dtype)
        return self.mu + self.log_sigma.exp() * noise

    @property
    def place(self) -> tuple[float, float]:
        """(μ, σ)."""
        return self.mu.item(), math.exp(self.log_sigma.item())


@cache
def _grid() -> tuple[Tensor, Tensor]:
    x = torch.linspace(*BOX, POINTS, dtype=torch.float64)
    return x, -target()(x[:, None])


def log_model(x: Tensor, mu: float, sigma: float) -> Tensor:
    """log q(x), `(n,)`."""
    return -0.5 * ((x - mu) / sigma).square() - math.log(sigma) - 0.5 * LOG_2PI


def exact_divergence(f: Divergence, mu: float, sigma: float) -> float:
    """D_f(p‖q) by the trapezoid rule: q f(p/q) = p f′ − q f*(f′), functions of log p/q."""
    x, log_p = _grid()
    log_q = log_model(x, mu, sigma)
    ratio = log_p - log_q
    integrand = log_p.exp() * f.slope(ratio) - log_q.exp() * f.conjugate(ratio)
    return float(torch.trapezoid(integrand, x))


@cache
def optimum(name: str) -> tuple[float, float]:
    """(μ*, σ*), the minimum of D_f(p‖q) over all normal q.

    >>> [round(v, 3) for v in optimum("kl")]  # the mean and standard deviation of the data
    [1.01, 1.83]
    """
    f = divergence_named(name)
    found = minimize(
        lambda at: exact_divergence(f, at[0], math.exp(at[1])),
        (1.3, math.log(1.7)),
        method="Nelder-Mead",
        options={"xatol": 1e-7, "fatol": 1e-12},
    )
    return float(found.x[0]), math.exp(float(found.x[1]))


def divergence_named(name: str) -> Divergence:
    """`kl`, …, or `alpha=-0.5`."""
    return divergence_of(*f_and_alpha(name))


def f_and_alpha(name: str) -> tuple[str, float | None]:
    """The name of f, and α where it has one."""
    f, _, alpha = name.partition("=")
    return f, float(alpha) if alpha else None
