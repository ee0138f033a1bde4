"""A Gaussian for data that are not Gaussian: which one depends on the divergence, and the ratio repairs the rest.

The data have a narrow mode beside a wide one; the model is ½((x−μ)/σ)². Each divergence has its own best (μ, σ).
The density ratio that is learned on the way turns the model's draws into draws of the data, by rejection sampling.

    python examples/f_divergence.py
    python examples/f_divergence.py --steps 3000
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import metastable as ms
from metastable.evaluation.distances import wasserstein_1d
from metastable.training.config import Schedule


class Bell(nn.Module):
    """½((x−μ)/σ)²; it can draw its own samples, so no chains are needed."""

    def __init__(self, mu: float = 0.5, sigma: float = 1.5):
        super().__init__()
        self.mu, self.log_sigma = nn.Parameter(torch.tensor(mu)), nn.Parameter(torch.tensor(math.log(sigma)))
        self.event_shape = (1,)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * ((x[:, 0] - self.mu) / self.log_sigma.exp()).square()

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` exact draws."""
        return self.mu + self.log_sigma.exp() * torch.randn(n, 1, generator=rng)


def jeffreys(u: Tensor) -> Tensor:
    """KL both ways; any strictly convex function with f(1) = 0 will do."""
    return (u - 1) * u.log()


@dataclass(frozen=True)
class Row:
    """What one divergence ended with."""

    name: str
    mu: float
    sigma: float
    plain: float
    corrected: float
    acceptance: float


def train(f: str | Callable[[Tensor], Tensor], x: Tensor, steps: int, seed: int) -> Row:
    """Fit by one divergence, then accept the model's draws in proportion to the learned ratio."""
    energy = Bell()
    method = ms.methods.FDivergence(
        f=f,
        source=ms.methods.ExactDraws(),
        ratio=ms.energies.MLP(1, (64, 64), "tanh", seed=seed),
        energy_rate=1.0,
    )
    run = ms.fit(
        energy,
        x,
        method,
        steps=steps,
        seed=seed,
        learning_rate=1e-2,
        schedule=Schedule("cosine"),
        evaluate=False,
    )
    rng = torch.Generator().manual_seed(seed)
    drawn = energy.sample(20_000, rng)
    log_ratio = run.log_ratio(drawn)
    kept = ms.methods.rejection_sample(drawn, log_ratio, rng, log_bound=log_ratio.quantile(0.999).item())
    return Row(
        method.divergence.name,
        energy.mu.item(),
        energy.log_sigma.exp().item(),
        float(wasserstein_1d(drawn, x)),
        float(wasserstein_1d(kept.x, x)),
        kept.acceptance,
    )


def compare(rows: int = 100_000, steps: int = 800, seed: int = 0) -> list[Row]:
    """One row for each divergence."""
    weights = torch.tensor([0.33, 0.67]).log()
    source = ms.energies.GaussianMixture(
        torch.tensor([[-1.0], [2.0]]), torch.tensor([0.25, math.sqrt(2)]), weights
    )
    x = source.sample(rows, torch.Generator().manual_seed(seed))
    return [train(f, x, steps, seed) for f in ("kl", "js", "reverse-kl", jeffreys)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="data points")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    print(f"{'':12}{'mu':>8}{'sigma':>8}{'W1 to data':>12}{'after rejection':>17}{'accepted':>10}")
    for row in compare(**vars(parser.parse_args())):
        print(
            f"{row.name:12}{row.mu:8.3f}{row.sigma:8.3f}{row.plain:12.3f}{row.corrected:17.3f}{row.acceptance:10.2f}"
        )


if __name__ == "__main__":
    main()
