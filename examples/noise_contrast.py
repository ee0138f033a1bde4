"""How good must the noise be? Noise-contrastive estimation with four kinds of noise, checked against exact answers.

The data are two Gaussians that hold 1/4 and 3/4 of the mass, six standard deviations apart. The model is a mixture
whose weights and log Z are known exactly, so what NCE learns can be checked: the weight of the left mode, and the
log Z that is learned beside the energy. Noise that is far from the data is told apart at once and teaches little; a
flow that plays against the energy is as hard as can be.

    python examples/noise_contrast.py
    python examples/noise_contrast.py --distance 10 --steps 1000
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

import metastable as ms

LIGHT = 0.25
"""Mass of the left mode."""


@dataclass(frozen=True)
class Row:
    """What one kind of noise ended with."""

    noise: str
    accuracy: float
    positive_weight: float
    left_weight: float
    log_z_error: float
    seconds: float


def noises(x: torch.Tensor) -> dict[str, ms.methods.Method]:
    """From far to near: a wide Gaussian, a box, the data's Gaussian, a flow that learns."""
    wide = ms.proposals.Gaussian(x.mean(0), 10 * x.std(0))
    flow = ms.proposals.Flow(x.shape[1], data=x, layers=2, hidden=(32,))
    return {
        "wide gaussian": ms.methods.NCE(noise=wide),
        "uniform": ms.methods.NCE(noise="uniform"),
        "gaussian": ms.methods.NCE(noise="gaussian"),
        "adversarial flow": ms.methods.FlowContrastive(noise=flow, noise_rate=0.1),
    }


def train(name: str, method: ms.methods.Method, x: torch.Tensor, steps: int, rate: float, seed: int) -> Row:
    """One kind of noise, from a start where both modes have the same weight."""
    means = torch.zeros(2, x.shape[1])
    means[0, 0], means[1, 0] = -1.0, 1.0
    energy = ms.energies.GaussianMixture(means, trainable=True)
    schedule = ms.training.Schedule("cosine")
    run = ms.fit(
        energy, x, method, steps=steps, learning_rate=rate, schedule=schedule, seed=seed, evaluate=False
    )
    learned = run.players["log_partition"]().item()
    last = run.history[-1]
    return Row(
        name,
        last["accuracy"],
        last["positive_weight"],
        energy.mode_weights()[0].item(),
        learned - energy.log_partition().item(),
        run.seconds,
    )


def compare(
    distance: float = 6.0, dim: int = 2, rows: int = 5000, steps: int = 300, rate: float = 0.03, seed: int = 0
) -> tuple[float, list[Row]]:
    """The data's own left weight, and one row for each kind of noise."""
    source = ms.energies.two_modes(distance, (LIGHT, 1 - LIGHT), dim)
    x = source.sample(rows, torch.Generator().manual_seed(seed))
    made = [train(name, method, x, steps, rate, seed) for name, method in noises(x).items()]
    return float((x[:, 0] < 0).double().mean()), made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--distance", type=float, default=6.0, help="between the modes, in standard deviations"
    )
    parser.add_argument("--dim", type=int, default=2)
    parser.add_argument("--rows", type=int, default=5000, help="data points")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=0.03, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    in_data, rows = compare(**vars(parser.parse_args()))
    print(
        f"{'noise':18}{'told apart':>12}{'weight of data':>16}{'left mode':>12}{'log Z error':>13}{'seconds':>9}"
    )
    print(f"{'(data)':18}{'':>28}{in_data:12.3f}")
    for row in rows:
        print(
            f"{row.noise:18}{row.accuracy:12.1%}{row.positive_weight:16.3f}{row.left_weight:12.3f}"
            f"{row.log_z_error:+13.3f}{row.seconds:9.1f}"
        )


if __name__ == "__main__":
    main()
