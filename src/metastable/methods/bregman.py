"""Bregman divergences between density ratios, for self-adapting Bregman ratio matching.

Nathaniel Xu, *Self-adapting noise-contrastive estimation for energy-based models*, MSc thesis, 2022, Chapter 4.
A strictly convex Ψ gives the two halves of the loss,

    S₀(g) = Ψ′(g)g − Ψ(g)   (4.4),   S₁(g) = Ψ′(g)   (4.5),   S₀′(g) = g S₁′(g)   (4.6).

Both are functions of ℓ = log g here, since g = exp(E_frozen − E) is known by its logarithm: closed forms then
overflow only where the loss itself does. In ℓ the weights of (4.12) are plain derivatives,
S₀′(g)g = dS₀/dℓ for negatives and S₁′(g)g = dS₁/dℓ for positives.

| symbol | here |
|---|---|
| Ψ | `Bregman`, by name or from a function |
| g | `exp(log_g)` |
| S₀, S₁ | `Bregman.S0`, `Bregman.S1` |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from metastable.core.configure import name_of
from metastable.core.convex import derivative, require_convex, require_convex_at
from metastable.core.errors import ConfigError, require_choice

OfLog = Callable[[Tensor], Tensor]
"""A function of log g, elementwise."""


class Bregman:
    """The two halves of a Bregman loss as functions of log g.

    Args:
        name: what it is called.
        S0: log g to S₀(g), averaged over negatives.
        S1: log g to S₁(g), averaged over data.
        psi: Ψ itself, where it is a user's.

    >>> Bregman.named("nce").S0(torch.zeros(1))
    tensor([0.6931])
    """

    def __init__(self, name: str, S0: OfLog, S1: OfLog, psi: OfLog | None = None):
        self.name, self.S0, self.S1, self.psi = name, S0, S1, psi

    def __repr__(self) -> str:
        return f"Bregman({self.name!r})"

    @classmethod
    def named(cls, name: str) -> Bregman:
        """A built-in one: `nce`, `kl` or `squared`."""
        require_choice("psi", name, BREGMANS)
        return BREGMANS[name]

    @classmethod
    def from_function(cls, psi: Callable[[Tensor], Tensor], field: str = "psi") -> Bregman:
        """Any strictly convex Ψ on (0, ∞), written in torch operations; its derivatives are automatic.

        Ψ is checked on a grid from 10⁻³ to 10³: finite, differentiable, strictly convex. g itself is formed, so
        that log g beyond about 88 (709 in double precision) overflows, and sooner where Ψ grows fast.

        >>> mine = Bregman.from_function(lambda u: u * u.log() - u)
        >>> torch.allclose(mine.S0(torch.tensor([0.3])), BREGMANS["kl"].S0(torch.tensor([0.3])))
        True
        """
        require_convex(psi, field)

        def of_data(log_g: Tensor) -> Tensor:  # (4.5)
            return derivative(psi, log_g.exp())

        def of_negatives(log_g: Tensor) -> Tensor:  # (4.4)
            g = log_g.exp()
            return derivative(psi, g) * g - psi(g)

        return cls(name_of(psi), of_negatives, of_data, psi)

    def loss(self, log_g_negatives: Tensor, log_g_data: Tensor, ratio: float = 1.0) -> Tensor:
        """(4.8): `ratio`·E_negatives[S₀(g)] − E_data[S₁(g)].

        With g = p_θ/(k·p_n) and `ratio` = k its minimum is p_θ = p_data for every k, since S₀′ = g·S₁′: (4.6).
        """
        return ratio * self.S0(log_g_negatives).mean() - self.S1(log_g_data).mean()

    def require_convex_at(self, log_g: Tensor, field: str) -> None:
        """Refuse a user's Ψ that is not strictly convex where data and negatives are."""
        if self.psi is not None:
            require_convex_at(self.psi, field, log_g)

    def weights(self, log_g_negatives: Tensor, log_g_data: Tensor) -> tuple[Tensor, Tensor]:
        """S₀′(g)g of negatives and S₁′(g)g of data, the weights of (4.12), without a graph."""
        return _slope(self.S0, log_g_negatives), _slope(self.S1, log_g_data)

    def factor(self) -> float:
        """S₀′(1): what the gradient of maximum likelihood is multiplied with where g = 1 (Section 4.4)."""
        return float(_slope(self.S0, torch.zeros(1, dtype=torch.float64)))


def _slope(function: OfLog, log_g: Tensor) -> Tensor:
    return derivative(function, log_g.detach()).detach()


BREGMANS: dict[str, Bregman] = {
    # Ψ = u log u − (1+u) log(1+u): S₀ = log(1+g), S₁ = log g − log(1+g)  (4.11)
    "nce": Bregman("nce", lambda log_g: -F.logsigmoid(-log_g), F.logsigmoid),
    # Ψ = u log u: S₀ = g, S₁ = log g + 1
    "kl": Bregman("kl", torch.exp, lambda log_g: log_g + 1),
    # Ψ = ½u²: S₀ = ½g², S₁ = g
    "squared": Bregman("squared", lambda log_g: 0.5 * (2 * log_g).exp(), torch.exp),
}
"""Built-in choices of Ψ."""


def as_bregman(psi: Any, field: str = "psi") -> Bregman:
    """A Bregman loss from its name, a function Ψ, or itself."""
    if isinstance(psi, Bregman):
        return psi
    if isinstance(psi, str):
        require_choice(field, psi, BREGMANS)
        return BREGMANS[psi]
    if callable(psi):
        return Bregman.from_function(psi, field)  # pyright: ignore
    raise ConfigError(field, f"must be one of {', '.join(BREGMANS)}, a function Ψ or a Bregman, got {psi!r}")
