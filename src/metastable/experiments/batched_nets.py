"""Many small networks of one architecture, evaluated and trained as one.

Layer i of all K networks is one tensor `(K, in, out)`, so that a batched matrix product serves them all, and the
gradient with respect to the input is written out: K networks cost a few operations, whatever K is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from metastable.core.random import generator
from metastable.core.types import EnergyGrad


class BatchedNets(nn.Module):
    """K fully connected networks with leaky ReLUs and one output each.

    Args:
        seeds: one for each network; networks with the same seed begin with the same weights, which are those of
            `nn.Linear`, uniform on ±1/√in.
        sizes: of the layers, from the input to the last hidden one.
        slope: of the leaky ReLU below 0.

    >>> nets = BatchedNets([0, 0, 1], (2, 32, 64, 64, 64), slope=0.05)
    >>> f = nets(torch.ones(3, 5, 2))
    >>> f.shape, bool((f[0] == f[1]).all()), bool((f[0] == f[2]).any())
    (torch.Size([3, 5]), True, False)
    >>> sum(p.numel() for p in nets.parameters()) // 3
    10593
    """

    def __init__(self, seeds: Sequence[int], sizes: Sequence[int], slope: float):
        super().__init__()
        self.slope = slope
        drawn: dict[int, list[tuple[Tensor, Tensor]]] = {seed: [] for seed in seeds}
        for seed, layers in drawn.items():
            rng = generator(seed)
            for inputs, outputs in itertools.pairwise([*sizes, 1]):
                bound = 1 / math.sqrt(inputs)
                weight = torch.empty(inputs, outputs).uniform_(-bound, bound, generator=rng)
                layers.append((weight, torch.empty(1, outputs).uniform_(-bound, bound, generator=rng)))
        each = list(zip(*(drawn[seed] for seed in seeds), strict=True))
        self.weights = nn.ParameterList([torch.stack([w for w, _ in layer]) for layer in each])
        self.biases = nn.ParameterList([torch.stack([b for _, b in layer]) for layer in each])

    def __len__(self) -> int:
        return len(self.weights[0])

    def forward(self, x: Tensor) -> Tensor:
        """`(K, n, d)` to `(K, n)`: network k sees `x[k]`."""
        *hidden, (weight, bias) = zip(self.weights, self.biases, strict=True)
        for w, b in hidden:
            x = leaky_relu(torch.baddbmm(b, x, w), self.slope)
        return torch.baddbmm(bias, x, weight)[..., 0]

    @torch.no_grad()
    def value_and_grad(self, x: Tensor) -> EnergyGrad:
        """f, `(K, n)`, and its gradient in x, `(K, n, d)`: the chain rule by hand, without a tape."""
        hidden = self._hidden(x)
        value = torch.baddbmm(self.biases[-1], hidden[-1], self.weights[-1])[..., 0]
        return EnergyGrad(value, self._pull_back(hidden))

    @torch.no_grad()
    def grad(self, x: Tensor) -> Tensor:
        """The gradient in x alone, `(K, n, d)`."""
        return self._pull_back(self._hidden(x))

    def _hidden(self, x: Tensor) -> list[Tensor]:
        hidden, (*layers, _) = [], zip(self.weights, self.biases, strict=True)
        for w, b in layers:
            x = leaky_relu(torch.baddbmm(b, x, w), self.slope, inplace=True)
            hidden.append(x)
        return hidden

    def _pull_back(self, hidden: list[Tensor]) -> Tensor:
        """df/dx from the last layer to the first; a leaky ReLU has the sign of its input."""
        backward = torch.ops.aten.leaky_relu_backward  # one pass over memory in the place of three
        *weights, last = self.weights
        g = last.mT.expand_as(hidden[-1])
        for h, w in zip(reversed(hidden), reversed(weights), strict=True):
            g = torch.bmm(backward(g, h, self.slope, True), w.mT)
        return g


class OneNet(nn.Module):
    """Network k of many, times a factor, as an energy over rows: `(B, d)` to `(B,)`."""

    def __init__(self, nets: BatchedNets, k: int, factor: float):
        super().__init__()
        self.slope, self.factor = nets.slope, factor
        self.weights = nn.ParameterList([w.detach()[k].clone() for w in nets.weights])
        self.biases = nn.ParameterList([b.detach()[k].clone() for b in nets.biases])

    def forward(self, x: Tensor) -> Tensor:
        *hidden, (weight, bias) = zip(self.weights, self.biases, strict=True)
        for w, b in hidden:
            x = leaky_relu(torch.addmm(b, x, w), self.slope)
        return self.factor * torch.addmm(bias, x, weight)[:, 0]
