"""A Boltzmann machine with hidden units: every pair of units coupled, those that are not seen summed out exactly.

Section 2.2.2 of Xu, *Self-adapting noise-contrastive estimation for energy-based models* (thesis, 2022): the
machine of which the restricted one keeps only the couplings between its layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import require, require_count
from metastable.proposals.signs import log_2cosh, states

from .couplings import Couplings, draw_units, hold
from .discrete import PairwiseEnergy

MOST_HIDDEN = 12
"""Up to this many hidden units all of their 2^H states are summed, for every event."""


class HiddenCouplings(NamedTuple):
    """E(v) = c − log Σ_h exp(½ sᵀWs + bᵀs) with s = (v, h): all pairs coupled, the last H units summed out."""

    weight: Tensor
    bias: Tensor
    hidden: int
    constant: Tensor | float = 0.0

    discrete = True

    @property
    def visible(self) -> int:
        """V."""
        return len(self.bias) - self.hidden

    @property
    def sweep_uniforms(self) -> int:
        """One for each visible unit and one for the hidden state."""
        return self.visible + 1

    def joint(self, v: Tensor) -> Tensor:
        """−E(v, h) of every hidden state, `(B, 2^H)`, without the constant."""
        V = self.visible
        h = states(self.hidden, v.dtype, v.device)
        W, R, b = self.weight[:V, V:], self.weight[V:, V:], self.bias
        among_seen = (0.5 * (v @ self.weight[:V, :V]) * v).sum(1) + v @ b[:V]
        among_hidden = (0.5 * (h @ R) * h).sum(1) + h @ b[V:]
        return among_seen[:, None] + among_hidden + (v @ W) @ h.T

    def __call__(self, x: Tensor) -> Tensor:
        """Free energies, `(B, *event)` to `(B,)`."""
        return self.constant - torch.logsumexp(self.joint(x.flatten(1)), 1)

    def sweep(
        self, x: Tensor, uniform: Tensor, free: Tensor | None = None, order: Tensor | None = None
    ) -> Tensor:
        """h from p(h | v) by enumeration, then the visible units one after the other given h and the rest."""
        v, V = x.flatten(1), self.visible
        cumulative = torch.softmax(self.joint(v), 1).cumsum(1)
        drawn = uniform[:, -1:].contiguous()
        row = torch.searchsorted(cumulative, drawn).clamp(max=2**self.hidden - 1)[:, 0]
        from_hidden = states(self.hidden, v.dtype, v.device)[row] @ self.weight[V:, :V] + self.bias[:V]
        order = torch.arange(V, device=v.device) if order is None else order
        for k in range(V):
            i = order[k : k + 1]
            field = v @ self.weight[:V, :V].index_select(1, i) + from_hidden.index_select(1, i)
            new = draw_units(field, uniform[:, k : k + 1])
            v = v.index_copy(
                1, i, hold(new, v.index_select(1, i), None if free is None else free.index_select(-1, i))
            )
        return v.view_as(x)

    def tempered(self, fields: Tensor, beta: Tensor | float) -> HiddenCouplings:
        """W and b scaled by β, visible biases from `fields`: the path of the joint distribution, as `Layers`."""
        f = fields.flatten().to(self.bias.dtype)
        beta = torch.as_tensor(beta).to(self.bias)
        V = self.visible
        bias = torch.cat([beta * self.bias[:V] + (1 - beta) * f, beta * self.bias[V:]])
        free = log_2cosh(f).sum() + self.hidden * torch.log(torch.tensor(2.0).to(f))
        constant = beta * self.constant + (1 - beta) * free
        return HiddenCouplings(beta * self.weight, bias, self.hidden, constant)

    def double(self) -> HiddenCouplings:
        """In float64, without gradients."""
        return self._replace(weight=self.weight.detach().double(), bias=self.bias.detach().double())


class HiddenBoltzmannMachine(PairwiseEnergy):
    """E(v) = −log Σ_h exp(½ sᵀWs + bᵀs), s = (v, h) ∈ {−1, +1}^{V+H}: every pair of units coupled.

    Pairs of visible units alone (`BoltzmannMachine`) can hold means and correlations; hidden units add what three
    and more units do together. All 2^H hidden states are summed for every event, so at most 12 units can be hidden;
    a `RBM`, whose hidden units are not coupled to one another, has no such bound.

    Args:
        visible: V, or the shape of an event.
        hidden: H, at most 12.
        scale: standard deviation of the first couplings.
        seed: of them.

    >>> machine = HiddenBoltzmannMachine(4, 2)
    >>> machine(torch.ones(1, 4)).shape, machine.weight.shape
    (torch.Size([1]), torch.Size([6, 6]))
    >>> HiddenBoltzmannMachine(4, 13)
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: hidden: must be at most 12, since all 2^hidden states are summed for ...
    """

    def __init__(self, visible: int | Iterable[int], hidden: int, scale: float = 0.1, seed: int = 0):
        super().__init__(visible)
        require_count("hidden", hidden)
        rule = (
            f"at most {MOST_HIDDEN}, since all 2^hidden states are summed for each event; an RBM has no bound"
        )
        require(hidden <= MOST_HIDDEN, "hidden", rule, hidden)
        self.hidden = hidden
        self._couple(self.units + hidden, scale, seed)

    def structure(self) -> HiddenCouplings:  # pyright: ignore
        """W, `(V + H, V + H)`, visible units first, b and H."""
        return HiddenCouplings(self.weight, self.bias, self.hidden)

    @property
    def sweep_uniforms(self) -> int:
        """One for each visible unit and one for the hidden state."""
        return self.units + 1

    def joint_energy(self, v: Tensor, h: Tensor) -> Tensor:
        """E(v, h) = −½ sᵀWs − bᵀs, `(B,)`."""
        return Couplings(self.weight, self.bias)(torch.cat([v.flatten(1), h], 1))
