"""How long may the noise stand still? Self-adapting NCE at several intervals, and PCD, against a known density.

A pinwheel in two dimensions has an exact density, so KL(data ‖ model) can be had by quadrature. At interval 1 the
method is maximum likelihood, as PCD with the same chains is; at longer ones the density ratio g between the model
and its frozen copy spreads. The last row uses a Ψ of one's own, as a plain function.

    python examples/adaptive_nce.py
    python examples/adaptive_nce.py --steps 2000 --spectral-norm
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch

import metastable as ms
from metastable.data.toy import toy_set
from metastable.evaluation.quadrature import kl_on_grid


@dataclass(frozen=True)
class Row:
    """What one training ended with."""

    label: str
    kl: float
    var_log_g: float
    gradient: float
    seconds: float


def own_psi(u: torch.Tensor) -> torch.Tensor:
    """Any strictly convex function of the ratio."""
    return (u.sqrt() - 1) ** 2 + u * u.log()


def methods() -> dict[str, ms.methods.Method]:
    """The same chains for all."""
    chains = ms.methods.PersistentCD(walkers=256, steps=5, kernel=ms.kernels.MALA(0.03), rejuvenation=0.1)
    adaptive = {f"interval {K}": ms.methods.AdaptiveNCE(chains, interval=K) for K in (1, 50)}
    return {"pcd": chains, **adaptive, "own psi, 10": ms.methods.AdaptiveNCE(chains, own_psi, interval=10)}


def compare(steps: int = 400, rate: float = 5e-3, spectral: bool = False, seed: int = 0) -> list[Row]:
    """One row for each method."""
    toy = toy_set("pinwheel")
    x = toy.sample(3000, seed)
    energy = {"name": "mlp", "hidden": (64, 64), "spectral_norm": spectral}
    rows = []
    for label, method in methods().items():
        run = ms.fit(energy, x, method, steps, seed=seed, learning_rate=rate, batch_size=256, evaluate=False)
        kl = kl_on_grid(toy.log_density, run.energy, [(-5.0, 5.0)] * 2, 201)
        var, gradient = (
            float(np.mean([row.get(name, np.nan) for row in run.history]))
            for name in ("var_log_g", "gradient_magnitude")
        )
        rows.append(Row(label, kl, var, gradient, run.seconds))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate")
    parser.add_argument("--spectral-norm", dest="spectral", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    print(f"{'':14}{'KL':>8}{'Var(log g)':>12}{'mean |dE|':>11}{'seconds':>9}")
    for row in compare(**vars(parser.parse_args())):
        print(f"{row.label:14}{row.kl:8.3f}{row.var_log_g:12.2g}{row.gradient:11.3g}{row.seconds:9.1f}")


if __name__ == "__main__":
    main()
