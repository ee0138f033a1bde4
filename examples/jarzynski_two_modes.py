"""Who learns the weights of two modes? Jarzynski, persistent CD and CD on the same data, with exact answers.

The data are two Gaussians that hold 1/4 and 3/4 of the mass, too far apart for a chain to cross. The model is a
mixture of two Gaussians whose means and weights are learned from a start where both modes lie together, so the
weights it ends with, and its log Z, are known exactly and every estimate can be checked.

    python examples/jarzynski_two_modes.py
    python examples/jarzynski_two_modes.py --distance 12 --steps 1000 --walkers 20000
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

import metastable as ms
from metastable.training import SGD

LIGHT = 0.25
"""Mass of the left mode."""


@dataclass(frozen=True)
class Row:
    """What one method ended with."""

    method: str
    left_weight: float
    seconds: float
    log_z: ms.LogPartition | None
    log_z_exact: float


def student(dim: int) -> ms.energies.GaussianMixture:
    """Two modes that lie nearly together, of equal weight."""
    means = torch.zeros(2, dim)
    means[0, 0], means[1, 0] = -0.1, 0.1
    return ms.energies.GaussianMixture(means, trainable=True)


def train(method: ms.methods.Method, x: torch.Tensor, steps: int, rate: float, seed: int) -> Row:
    """One method on the data, full batches and plain gradient descent as in the paper."""
    energy = student(x.shape[1])
    run = ms.fit(
        energy,
        x,
        method,
        steps=steps,
        seed=seed,
        units="none",  # step sizes are in units of the modes, as in the paper
        optimiser=SGD(rate),
        batch_size=None,
        evaluate=False,
    )
    exact = energy.log_partition().item()
    return Row(method.name, energy.mode_weights()[0].item(), run.seconds, run.log_partition, exact)


def compare(
    distance: float = 8.0,
    dim: int = 2,
    rows: int = 2000,
    walkers: int = 4000,
    steps: int = 500,
    rate: float = 0.05,
    seed: int = 0,
) -> tuple[float, list[Row]]:
    """The data's own left weight, and one row for each method."""
    source = ms.energies.two_modes(distance, (LIGHT, 1 - LIGHT), dim)
    x = source.sample(rows, torch.Generator().manual_seed(seed))
    methods = [
        ms.methods.Jarzynski(walkers=walkers, step_size=0.1, threshold=0.95),
        ms.methods.PersistentCD(step_size=0.1),
        ms.methods.ContrastiveDivergence(step_size=0.1, steps=4),
    ]
    return float((x[:, 0] < 0).double().mean()), [train(m, x, steps, rate, seed) for m in methods]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--distance", type=float, default=8.0, help="between the modes, in standard deviations"
    )
    parser.add_argument("--dim", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2000, help="data points")
    parser.add_argument("--walkers", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    in_data, rows = compare(**vars(parser.parse_args()))
    print(f"{'':12}{'left weight':>12}{'log Z':>20}{'exact':>10}{'seconds':>10}")
    print(f"{'data':12}{in_data:12.3f}")
    for row in rows:
        z = "" if row.log_z is None else f"{row.log_z.value:.3f} ± {row.log_z.std_error:.3f}"
        print(f"{row.method:12}{row.left_weight:12.3f}{z:>20}{row.log_z_exact:10.3f}{row.seconds:10.1f}")


if __name__ == "__main__":
    main()
