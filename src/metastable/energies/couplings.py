"""Energies of units coded −1 and +1 as plain tensors: pairwise couplings, and layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from metastable.proposals.signs import log_2cosh, signs, state_chunks


def draw_units(field: Tensor, uniform: Tensor) -> Tensor:
    """±1 with P(+1) = 1/(1 + exp(−2·field))."""
    return signs(uniform < torch.sigmoid(2 * field), field.dtype)


def hold(new: Tensor, old: Tensor, free: Tensor | None) -> Tensor:
    """`new` where units are free, `old` where they are clamped; both `(B, d)`."""
    return new if free is None else torch.where(free, new, old)


class Couplings(NamedTuple):
    """E(s) = c − ½ sᵀWs − bᵀs with W symmetric and zero on its diagonal."""

    weight: Tensor
    bias: Tensor
    constant: Tensor | float = 0.0

    discrete = True

    @property
    def sweep_uniforms(self) -> int:
        """One for each unit."""
        return len(self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Energies, `(B, *event)` to `(B,)`."""
        s = x.flatten(1)
        return self.constant - ((0.5 * (s @ self.weight) + self.bias) * s).sum(1)

    def sweep(
        self, x: Tensor, uniform: Tensor, free: Tensor | None = None, order: Tensor | None = None
    ) -> Tensor:
        """Unit after unit from P(s_i = +1 | rest) = 1/(1 + exp(−2(Wᵢs + bᵢ)))."""
        return self.pass_over(x, lambda field, old, k: draw_units(field, uniform[:, k]), free, order)

    def pass_over(
        self,
        x: Tensor,
        update: Callable[[Tensor, Tensor, int], Tensor],
        free: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Tensor:
        """One pass over the units: the k-th that is visited becomes `update(its field, its value, k)`."""
        s = x.flatten(1).clone()
        order = torch.arange(s.shape[1], device=s.device) if order is None else order
        for k in range(s.shape[1]):
            i = order[k : k + 1]
            old = s.index_select(1, i)[:, 0]
            field = s @ self.weight.index_select(0, i)[0] + self.bias.index_select(0, i)
            new = hold(update(field, old, k), old, None if free is None else free.index_select(-1, i)[..., 0])
            s = s.index_copy(1, i, new[:, None])
        return s.view_as(x)

    def tempered(self, fields: Tensor, beta: Tensor | float) -> Couplings:
        """(1 − β)·(−log q) + β·E for q ∝ exp(fieldsᵀs): another of the same kind."""
        f = fields.flatten().to(self.bias.dtype)
        beta = torch.as_tensor(beta).to(self.bias)
        constant = beta * self.constant + (1 - beta) * log_2cosh(f).sum()
        return Couplings(beta * self.weight, beta * self.bias + (1 - beta) * f, constant)

    def double(self) -> Couplings:
        """In float64, without gradients."""
        return Couplings(self.weight.detach().double(), self.bias.detach().double(), self.constant)


class Layers(NamedTuple):
    """E(v) = c − aᵀv − Σ_j log 2cosh(b_j + W_jᵀv), the free energy of visible units over hidden ones."""

    weight: Tensor
    visible_bias: Tensor
    hidden_bias: Tensor
    constant: Tensor | float = 0.0

    discrete = True

    @property
    def sweep_uniforms(self) -> int:
        """One for each hidden and each visible unit."""
        return sum(self.weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Free energies, `(B, *event)` to `(B,)`."""
        v = x.flatten(1)
        return self.constant - v @ self.visible_bias - log_2cosh(self.hidden_field(v)).sum(1)

    def hidden_field(self, v: Tensor) -> Tensor:
        """b + Wᵀv, `(B, H)`."""
        return v @ self.weight + self.hidden_bias

    def visible_field(self, h: Tensor) -> Tensor:
        """a + Wh, `(B, V)`."""
        return h @ self.weight.T + self.visible_bias

    def sweep(
        self, x: Tensor, uniform: Tensor, free: Tensor | None = None, order: Tensor | None = None
    ) -> Tensor:
        """v → h → v: each layer is one block, so `order` has no meaning."""
        v, H = x.flatten(1), len(self.hidden_bias)
        h = draw_units(self.hidden_field(v), uniform[:, :H])
        return hold(draw_units(self.visible_field(h), uniform[:, H:]), v, free).view_as(x)

    def tempered(self, fields: Tensor, beta: Tensor | float) -> Layers:
        """The machine with W and b scaled by β, and visible biases from `fields` to a.

        The geometric path of the joint distribution of both layers, from q ∝ exp(fieldsᵀv) with free hidden
        units, summed over the hidden ones (Salakhutdinov and Murray 2008): unlike the geometric path of the
        visible marginal it keeps the conditionals of a restricted machine. E₀ = −log q.
        """
        f = fields.flatten().to(self.visible_bias.dtype)
        beta = torch.as_tensor(beta).to(self.visible_bias)
        free = log_2cosh(f).sum() + len(self.hidden_bias) * math.log(2)
        return Layers(
            beta * self.weight,
            beta * self.visible_bias + (1 - beta) * f,
            beta * self.hidden_bias,
            beta * self.constant + (1 - beta) * free,
        )

    def transposed(self) -> Layers:
        """The same machine seen from the hidden layer: the free energy of h."""
        return Layers(self.weight.T, self.hidden_bias, self.visible_bias, self.constant)

    def double(self) -> Layers:
        """In float64, without gradients."""
        W, a, b = (p.detach().double() for p in (self.weight, self.visible_bias, self.hidden_bias))
        return Layers(W, a, b, self.constant)


def enumerated(energy: Callable[[Tensor], Tensor], units: int, device: torch.device) -> Tensor:
    """−E of all 2^units states, float64, in the order of `proposals.signs.states`."""
    with torch.no_grad():
        return -torch.cat([energy(part) for part in state_chunks(units, torch.float64, device)])
