"""Coordinates in which a reference has unit scales, so that one step size serves every direction."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from metastable.core.perceptron import Perceptron
from metastable.core.protocols import Gaussianlike, perceptron_of, provides, reference_of
from metastable.core.types import Energy, EnergyGrad, Proposal, energy_and_grad, row_sum
from metastable.proposals import Gaussian


class Place(NamedTuple):
    """Where walkers live."""

    dtype: torch.dtype
    device: torch.device


class Whitened:
    """Energy and reference in coordinates z with x = m + Lz, in which the reference has unit scales.

    log Z is the same in both, since E_z(z) = E(m + Lz) − log|det L|, but one step size then serves every
    direction. A Gaussian reference brings its own m and L; any other is scaled by its draws.
    """

    def __init__(self, energy: Energy, reference: Proposal, place: Place, rng: torch.Generator):
        gaussian = isinstance(reference, Gaussian)
        if gaussian:
            centre, scale = reference.mean, reference.scale
        else:
            with torch.no_grad():
                draws = reference.sample(4096, rng)
            centre, scale = draws.mean(0), draws.std(0)
        self.full = gaussian and reference.full
        self.centre, self.scale = centre.to(**place._asdict()), scale.to(**place._asdict())
        diagonal = self.scale.diagonal() if self.full else self.scale
        self.log_det = diagonal.double().log().sum().to(place.dtype)
        self.reference: Proposal = (
            _Standard(torch.zeros_like(self.centre)) if gaussian else _WhiteReference(reference, self)
        )
        # an energy that stands on the reference stands on it in these coordinates, too
        self.energy = _WhiteEnergy(
            energy, self, self.reference if reference_of(energy) is reference else None
        )

    def to_model(self, z: Tensor) -> Tensor:
        """x = m + Lz."""
        return self.centre + ((z.flatten(1) @ self.scale.T).view(z.shape) if self.full else z * self.scale)

    def to_white(self, x: Tensor) -> Tensor:
        """z = L⁻¹(x − m)."""
        centred = x - self.centre
        if not self.full:
            return centred / self.scale
        return torch.linalg.solve_triangular(self.scale, centred.flatten(1).T, upper=False).T.reshape(x.shape)

    def pull_back(self, grad: Tensor) -> Tensor:
        """∇_z = Lᵀ∇_x."""
        return (grad.flatten(1) @ self.scale).view(grad.shape) if self.full else grad * self.scale


class _WhiteEnergy:
    """E(m + Lz) − log|det L|, on the density that the energy stands on, where that is the reference."""

    def __init__(self, energy: Energy, coordinates: Whitened, reference: Proposal | None):
        self.energy, self.coordinates, self.reference = energy, coordinates, reference

    def __call__(self, z: Tensor) -> Tensor:
        return self.energy(self.coordinates.to_model(z)) - self.coordinates.log_det

    def value_and_grad(self, z: Tensor) -> EnergyGrad:
        """Gradients through the energy's own, where it has one."""
        values, grad = energy_and_grad(self.energy, self.coordinates.to_model(z))
        return EnergyGrad(values - self.coordinates.log_det, self.coordinates.pull_back(grad))

    def perceptron(self) -> Perceptron | None:
        """The energy's layers over these coordinates, made once."""
        return self._layers

    @cached_property
    def _layers(self) -> Perceptron | None:
        layers, space = perceptron_of(self.energy), self.coordinates
        if layers is None or layers.head.dtype != space.centre.dtype:
            return None
        scale = space.scale.double() if space.full else space.scale.double().flatten().diag()
        inverse = torch.linalg.inv(scale)
        origin = -(space.centre.double().flatten() @ inverse.T)
        made = layers.of_units(origin, scale.T, inverse.T, 0.0)
        made = made._replace(offset=made.offset - space.log_det)
        known = (
            made.below is not None and self.reference is not None and provides(self.reference, Gaussianlike)
        )
        if not known:
            return made
        # −log q(m + Lz) − log|det L| is −log of the reference's own density here
        below = self.reference.gaussians()  # pyright: ignore
        return made._replace(offset=made.offset + space.log_det, below=below)


class _WhiteReference:
    """q(m + Lz)·|det L|."""

    def __init__(self, reference: Proposal, coordinates: Whitened):
        self.inner, self.coordinates = reference, coordinates
        self.event_shape = reference.event_shape

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        with torch.no_grad():
            return self.coordinates.to_white(self.inner.sample(n, rng).to(self.coordinates.centre))

    def log_prob(self, x: Tensor) -> Tensor:
        return self.inner.log_prob(self.coordinates.to_model(x)) + self.coordinates.log_det


class _Standard(Gaussian):
    """N(0, I), with the gradient of −log q written out."""

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """½|z|² + ½d·log 2π, and z."""
        return 0.5 * row_sum(z.square()) + 0.5 * self.mean.numel() * math.log(2 * math.pi), z
