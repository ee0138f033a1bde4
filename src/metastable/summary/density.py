"""The learned density itself: on a grid, against the true one, and whether it is a density at all."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from metastable.core.errors import InputError
from metastable.core.parts import energies_of
from metastable.core.protocols import Classifier, provides, reference_of
from metastable.core.random import generator
from metastable.data import ToySet
from metastable.evaluation.entropy import excess_mass, nearest_neighbour_entropy
from metastable.evaluation.modes import mode_weights
from metastable.evaluation.quadrature import bounding_box, grid_density, kl_on_grid, log_partition_quadrature
from metastable.evaluation.rays import holds_density
from metastable.proposals import fit_gaussian
from metastable.runs.run import Run
from metastable.walkers.space import space_of
from metastable.walkers.starts import some_rows

from .likelihood import LOOKED_AT, MOST_DIMENSIONS, mean_log_prob
from .samples import SHOWN
from .section import COSTLY_ROWS, Judged, Measured
from .units import toy_outside

GRID, COSTLY_GRID = 161, 61
"""Points along a side of a picture; fewer where each energy is an ODE solved."""
FINE_GRID = 401
"""The same for numbers by quadrature."""


class Density:
    """Against the truth where that is known; on a grid in one and two dimensions; facts for the diagnosis."""

    name = "density"

    def applies(self, judged: Judged) -> bool:
        """When training has ended, of a density without contexts."""
        return judged.after_training and not judged.run.conditional

    def measure(self, judged: Judged) -> Measured:
        """Kullback–Leibler divergences, log-densities on a grid, energies far away."""
        numbers = _against_truth(judged)
        arrays = {} if judged.run.folder is None else _grids(judged)
        return Measured(numbers, arrays, {**_energy_facts(judged), **_density_facts(judged)})


class Exact:
    """Mode weights and log Z by quadrature, for data in one or two dimensions."""

    name = "exact"

    def applies(self, judged: Judged) -> bool:
        """Where a grid can be laid."""
        return _on_a_grid(judged.run, judged.x)

    def measure(self, judged: Judged) -> Measured:
        """Both of the model itself, whatever its chains say."""
        run, box = judged.run, bounding_box(judged.x, 1.0)
        numbers: dict[str, Any] = {"log_z_exact": log_partition_quadrature(run.learned_energy, box)}
        if run.modes is not None and run.modes.get("centers") is not None:
            centers = torch.tensor(run.modes["centers"]).double()
            density = grid_density(run.learned_energy, box, FINE_GRID)
            points = torch.cartesian_prod(*density.axes).view(-1, len(density.axes))
            numbers["mode_weights"] = mode_weights(points, centers, density.density.flatten().log()).tolist()
        return Measured(numbers)


def _on_a_grid(run: Run, x: Tensor) -> bool:
    return x.dim() == 2 and x.shape[1] <= 2 and space_of(run.energy).has_volume


def _against_truth(judged: Judged) -> dict[str, float]:
    """The divergence from the true law, estimated, and in one or two dimensions exactly, by quadrature."""
    run, toy, z = judged.run, judged.toy, judged.run.log_partition
    if toy is None or toy.log_density is None or z is None:
        return {}
    x = some_rows(judged.x, COSTLY_ROWS) if judged.costly else judged.x
    own = float(toy.log_density(x.cpu().float()).double().mean())
    scores = {"kl_estimated": judged.found["likelihood"].numbers["cross_entropy"] + own}
    if judged.costly or not _on_a_grid(run, x):
        return scores
    box = bounding_box(x, 1.0)
    density = grid_density(run.learned_energy, box, FINE_GRID)
    kl = None
    with suppress(InputError):  # a box around few rows does not hold all of the true law
        kl = kl_on_grid(toy.log_density, run.learned_energy, box, FINE_GRID, mass_tolerance=1e-2)
    exact = {"log_z_exact": density.log_partition, "kl_exact": kl, "edge_mass": density.edge_mass}
    return scores | {name: value for name, value in exact.items() if value is not None}


def _energy_facts(judged: Judged) -> dict[str, float]:
    """Spread of P·E, the energy of what was learned, over data and as much noise."""
    run = judged.run
    if not space_of(run.energy).has_volume or run.normalised:  # a density has no chains
        return {}
    x = some_rows(judged.trained_on, SHOWN)
    noise = fit_gaussian(x).sample(len(x), generator(0, x.device)).to(x)
    return {"energy_spread": float(energies_of(run.learned_energy, torch.cat([x, noise])).std())}


def _density_facts(judged: Judged) -> dict[str, Any]:
    """Whether the energy can hold a density, and what tells a log-likelihood that none can have.

    Entropy and likelihood must be in the same coordinates: those of the rows that the energy was given.
    """
    run, train = judged.run, judged.trained_on
    if not space_of(run.energy).has_volume or run.normalised or judged.costly:
        return {}
    facts: dict[str, Any] = {"dimensions": train[0].numel()}
    if not provides(run.energy, Classifier):  # a classifier's density is a by-product
        facts["rays_down"] = holds_density(run.learned_energy, train).share_bad
        facts["bare"] = reference_of(run.energy) is None
    z = run.log_partition
    if z is None:
        return facts
    scores = judged.found["likelihood"].numbers
    likelihood = scores["log_likelihood"], scores["log_likelihood_se"]
    if judged.noise_in_units:  # rows with it have another likelihood, and another entropy, than those without
        likelihood = mean_log_prob(run, z, judged.noisy(some_rows(judged.x, LOOKED_AT)))
    facts |= dict(zip(("log_likelihood", "log_likelihood_se"), likelihood, strict=True))
    facts["excess_mass"] = excess_mass(run.learned_energy, z.value, train)
    if train[0].numel() <= MOST_DIMENSIONS:
        value, error, copies = nearest_neighbour_entropy(train)
        facts |= {"entropy": value, "entropy_se": error, "copies": copies}
    return facts


def _grids(judged: Judged) -> dict[str, Any]:
    """Log-densities for pictures of one- and two-dimensional models, in the data's units."""
    run, train = judged.in_data_units()
    toy: ToySet | None = toy_outside(judged.toy, judged.coordinates)
    if not _on_a_grid(run, train):
        return {}
    points_a_side = COSTLY_GRID if judged.costly else GRID
    density = grid_density(run.learned_energy, bounding_box(train, 0.2), points_a_side)
    offset = 0.0 if run.log_partition is None else density.log_partition - run.log_partition.value
    log_density = (density.density.clamp(min=1e-300).log() + offset).numpy()
    grids = {"grid_x": density.axes[0].numpy()}
    if train.shape[1] == 1:
        return grids | {"log_density": log_density}
    grids |= {"grid_y": density.axes[1].numpy(), "log_density": log_density.T}
    if toy is not None and toy.log_density is not None:
        points = torch.cartesian_prod(*density.axes).float()
        grids["truth_log_density"] = toy.log_density(points).view(points_a_side, points_a_side).numpy().T
    return grids
