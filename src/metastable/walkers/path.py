"""The path from a normalised reference q to exp(−E), and the temperatures at which it is walked.

    E_β(x) = (1 − β)·(−log q(x)) + β·E(x),    0 = β₀ < β₁ < … < β_K = 1.

Over units coded −1 and +1 the path is the same, but an energy that knows its conditionals at every β may walk its
own (`tempered(fields, beta)`, from independent units with those fields to E): see `DiscretePath`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import UnsupportedError
from metastable.core.perceptron import Perceptron
from metastable.core.precision import unrounded
from metastable.core.protocols import (
    ClosedForm,
    Gaussianlike,
    Tempering,
    perceptron_of,
    provides,
    reference_of,
)
from metastable.core.types import Energy, EnergyGrad, Proposal, energy_and_grad, is_discrete, precise
from metastable.kernels import ChainState, Kernel
from metastable.proposals.signs import Signs


class Schedule(NamedTuple):
    """Inverse temperatures from one end of the path to the other, and the step size of the moves at each.

    Attributes:
        betas: `(K + 1,)`, float64.
        step_sizes: `(K + 1,)`; entry k belongs to the kernel that leaves exp(−E_{β_k}) invariant.
    """

    betas: Tensor
    step_sizes: Tensor

    @classmethod
    def equal(cls, gaps: int, step_size: float = 0.1) -> Schedule:
        """`gaps` equal changes of β from 0 to 1, one step size."""
        betas = torch.linspace(0, 1, gaps + 1, dtype=torch.float64)
        return cls(betas, torch.full_like(betas, step_size))

    def reversed(self) -> Schedule:
        """The same path walked from the other end."""
        return Schedule(self.betas.flip(0), self.step_sizes.flip(0))

    def scaled(self, by: float) -> Schedule:
        """The same temperatures with step sizes multiplied by `by`."""
        return Schedule(self.betas, by * self.step_sizes)

    def refined(self) -> Schedule:
        """Twice as many changes of temperature: every gap is halved, step sizes between are geometric means."""
        betas = torch.stack([self.betas[:-1], (self.betas[:-1] + self.betas[1:]) / 2], 1).flatten()
        between = (self.step_sizes[:-1] * self.step_sizes[1:]).sqrt()
        steps = torch.stack([self.step_sizes[:-1], between], 1).flatten()
        return Schedule(torch.cat([betas, self.betas[-1:]]), torch.cat([steps, self.step_sizes[-1:]]))


class Tempered:
    """E_β(x) = (1 − β)·(−log q(x)) + β·E(x) as an energy with its own gradient."""

    def __init__(self, energy: Energy, reference: Proposal, beta: Tensor):
        self.energy, self.reference = energy, ReferenceEnergy(reference)
        self.beta, self.rest = beta, 1 - beta

    def __call__(self, x: Tensor) -> Tensor:
        """Energies, `(B,)`."""
        return self.beta * precise(self.energy(x)) + self.rest * self.reference(x)

    def value_and_grad(self, x: Tensor) -> EnergyGrad:
        """Both ends' values and gradients, mixed."""
        return self.mixed(Ends(energy_and_grad(self.energy, x), energy_and_grad(self.reference, x)))

    def mixed(self, ends: Ends) -> EnergyGrad:
        """Values and gradients of E_β from those of both ends; 0·inf is NaN, which every kernel rejects."""
        return EnergyGrad(*(self.beta * m + self.rest * r for m, r in zip(*ends, strict=True)))

    def perceptron(self) -> Perceptron | None:
        """The model's layers, β of them, on the Gaussians of q; None where it has others below, or q is none."""
        layers, q = perceptron_of(self.energy), self.reference.reference
        if layers is None or not provides(q, Gaussianlike):
            return None
        part = layers._replace(head=self.beta * layers.head, offset=self.beta * layers.offset)
        if layers.below is None:
            return part._replace(below=q.gaussians(), share=self.rest.to(layers.head).reshape(1))  # pyright: ignore
        return part if reference_of(self.energy) is q else None


class ReferenceEnergy:
    """−log q(x) as an energy; a density that is constant in x, as a uniform one, has gradient zero."""

    def __init__(self, reference: Proposal):
        self.reference = reference

    def __call__(self, x: Tensor) -> Tensor:
        """−log q(x), `(B,)`."""
        with unrounded(x):  # it is normalised as it is
            return -self.reference.log_prob(x)

    def value_and_grad(self, x: Tensor) -> EnergyGrad:
        """The reference's own closed form where it has one, else automatic differentiation."""
        if provides(self.reference, ClosedForm):
            with unrounded(x):
                return EnergyGrad(*self.reference.value_and_grad(x))  # pyright: ignore
        with torch.enable_grad():
            y = x.detach().requires_grad_(True)
            values = self(y)
            grad = (
                torch.autograd.grad(values.sum(), y, allow_unused=True)[0] if values.requires_grad else None
            )
        return EnergyGrad(values.detach(), torch.zeros_like(x) if grad is None else grad)


class Ends(NamedTuple):
    """Energies and gradients of both ends of the path at the same positions."""

    model: EnergyGrad
    reference: EnergyGrad

    def gap(self) -> Tensor:
        """E(x) + log q(x) in float64, `(B,)`; what is not a number has no probability, so +inf."""
        gap = self.model.energy.double() - self.reference.energy.double()
        return torch.where(gap.isnan(), torch.inf, gap)

    def undefined(self) -> Tensor:
        """How many energies are not a number; +inf is one that says probability zero."""
        return self.model.energy.isnan().sum()

    def rows(self, index: Tensor) -> Ends:
        return Ends(*(EnergyGrad(e.energy[index], e.grad[index]) for e in self))


class GeometricPath:
    """E_β = (1 − β)·(−log q) + β·E, with both ends' gradients evaluated once where walkers stand."""

    discrete = False

    def __init__(self, energy: Energy, reference: Proposal):
        self.energy, self.reference = energy, reference

    def look(self, x: Tensor) -> Ends:
        """What is known where the walkers stand."""
        return Ends(energy_and_grad(self.energy, x), energy_and_grad(ReferenceEnergy(self.reference), x))

    def gap(self, here: Ends) -> Tensor:
        """E_1 − E_0, `(n,)`, float64."""
        return here.gap()

    def log_change(self, here: Ends, before: Tensor | float, after: Tensor | float) -> Tensor:
        """E_before − E_after, the log-weight of a change of temperature, `(n,)`, float64."""
        return -((after - before) * here.gap())

    def log_changes(self, here: Ends, before: float, gains: Tensor) -> Tensor:
        """The same for each of several changes of β, `(C,)` to `(C, n)`: one look serves all of them."""
        return -gains[:, None] * here.gap()

    def at(self, beta: Tensor) -> Tempered:
        """E_β."""
        return Tempered(self.energy, self.reference, beta)

    def at_rest(self) -> Energy:
        """E_0."""
        return ReferenceEnergy(self.reference)

    def state(self, kernel: Kernel, tempered: Any, x: Tensor, here: Ends) -> ChainState:
        """Chains of E_β at `x`, from what is known there."""
        return ChainState(x, *tempered.mixed(here))


class Standing(NamedTuple):
    """Walkers of a discrete path: nothing is kept but where they stand."""

    x: Tensor

    def undefined(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self.x.device)

    def rows(self, index: Tensor) -> Standing:
        return Standing(self.x[index])


class DiscretePath:
    """The path of an energy over units coded −1 and +1: its own where it has one, else the geometric one.

    A restricted Boltzmann machine's own path scales its parameters, which is not geometric in the energy of its
    visible units but keeps them drawable in blocks. Only E_β at the walkers is needed, and no gradient.
    """

    discrete = True

    def __init__(self, energy: Energy, reference: Proposal):
        self.energy, self.reference = energy, reference
        self.fields = reference.fields if isinstance(reference, Signs) else None
        able = self.fields is not None and provides(energy, Tempering)
        self.own = energy.tempered if able else None  # pyright: ignore

    def look(self, x: Tensor) -> Standing:
        """Nothing is evaluated yet."""
        return Standing(x)

    def gap(self, here: Standing) -> Tensor:
        """E_1 − E_0, `(n,)`, float64."""
        return -self.log_change(here, 0.0, 1.0)

    def log_change(self, here: Standing, before: Tensor | float, after: Tensor | float) -> Tensor:
        """E_before − E_after, `(n,)`, float64; what is not a number has no probability."""
        with torch.no_grad():
            change = self.at(before)(here.x).double() - self.at(after)(here.x).double()
        return torch.where(change.isnan(), -torch.inf, change)

    def log_changes(self, here: Standing, before: float, gains: Tensor) -> Tensor:
        """The same for each of several changes of β, `(C,)` to `(C, n)`."""
        return torch.stack([self.log_change(here, before, before + gain) for gain in gains])

    def at(self, beta: Tensor | float) -> Energy:
        """E_β."""
        if self.own is not None:
            with torch.no_grad():
                return self.own(self.fields, beta)
        return DiscreteTempered(self.energy, self.reference, torch.as_tensor(beta))

    def at_rest(self) -> Energy:
        """E_0."""
        return self.at(0.0)

    def state(self, kernel: Kernel, tempered: Energy, x: Tensor, here: Standing) -> ChainState:
        """Chains of E_β at `x`."""
        return kernel.init(tempered, x)


class DiscreteTempered(Tempered):
    """The geometric mixture of two energies over units coded −1 and +1, for kernels that look at energies only."""

    discrete = True


def path_for(energy: Energy, reference: Proposal) -> GeometricPath | DiscretePath:
    """The path from `reference` to `energy`."""
    discrete = is_discrete(energy)
    if discrete and not is_discrete(reference):
        raise UnsupportedError(
            "reference: the energy is over units coded −1 and +1, so its reference must be too; use Signs"
        )
    return DiscretePath(energy, reference) if discrete else GeometricPath(energy, reference)
