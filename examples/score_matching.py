"""What score matching learns, and what it cannot: three methods on two modes that drift apart.

The data are two Gaussians in the plane that hold 1/5 and 4/5 of the mass. Near each other, every method finds the
masses; far apart, score matching still gets the score right wherever there is data, and the masses by accident.
The masses of each model come from quadrature, so nothing here is an estimate.

    python examples/score_matching.py
    python examples/score_matching.py --distances 2 6 12 --steps 1000
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

import metastable as ms
from metastable.evaluation.modes import mode_weights
from metastable.evaluation.quadrature import grid_density
from metastable.training import Schedule

LIGHT = 0.2
"""Mass of the left mode."""


@dataclass(frozen=True)
class Row:
    """What one method ended with."""

    method: str
    distance: float
    left_mass: float
    true_mass: float


def left_mass(energy: torch.nn.Module, distance: float) -> float:
    """Mass nearer to the left mode, on a grid that holds all of it."""
    density = grid_density(energy, [(-distance / 2 - 6, distance / 2 + 6), (-6.0, 6.0)], 200)
    centers = torch.tensor([[-distance / 2, 0.0], [distance / 2, 0.0]], dtype=torch.float64)
    return float(
        mode_weights(torch.cartesian_prod(*density.axes), centers, density.density.flatten().log())[0]
    )


def compare(
    distances: tuple[float, ...] = (2.0, 12.0), rows: int = 3000, steps: int = 400, seed: int = 0
) -> list[Row]:
    """Sliced and denoising score matching, and Jarzynski, on the same data."""
    methods = (
        ms.methods.SlicedScoreMatching(variance_reduced=True),
        ms.methods.DenoisingScoreMatching(sigma=0.2),
        ms.methods.Jarzynski(walkers=4000, step_size=0.1),
    )
    found = []
    for distance in distances:
        truth = ms.energies.two_modes(distance, (LIGHT, 1 - LIGHT), dim=2)
        x = truth.sample(rows, torch.Generator().manual_seed(seed))
        for method in methods:
            network = {"name": "mlp", "hidden": (64, 64)}
            options = {"learning_rate": 4e-3, "schedule": Schedule("cosine"), "batch_size": 256}
            run = ms.fit(network, x, method, steps=steps, seed=seed, evaluate=False, **options)
            found.append(
                Row(method.name, distance, left_mass(run.energy, distance), left_mass(truth, distance))
            )
    return found


def main() -> None:
    """Train, and print one line for each method and distance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--distances", type=float, nargs="+", default=[2.0, 12.0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{'distance':>8}  {'method':<26} {'left mass':>9}  {'true':>6}")
    for row in compare(tuple(given.distances), steps=given.steps, seed=given.seed):
        print(f"{row.distance:>8g}  {row.method:<26} {row.left_mass:>9.3f}  {row.true_mass:>6.3f}")


if __name__ == "__main__":
    main()
