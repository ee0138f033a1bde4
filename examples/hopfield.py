"""An associative memory completes letters from their upper halves, and forgets when it holds too many.

Letters are patterns of −1 and +1. Their upper halves are clamped and the rest is found by going downhill, or by
Gibbs sampling at an inverse temperature. The Hebbian rule confuses letters that resemble each other; the
pseudo-inverse rule does not.

    python examples/hopfield.py
    python examples/hopfield.py --beta 6 --known 0.4
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import metastable as ms

LETTERS = {
    "T": ("#######", "#######", "..###..", "..###..", "..###..", "..###..", "..###..", "..###.."),
    "L": ("##.....", "##.....", "##.....", "##.....", "##.....", "##.....", "#######", "#######"),
    "O": (".#####.", "##...##", "##...##", "##...##", "##...##", "##...##", "##...##", ".#####."),
    "X": ("##...##", "##...##", ".##.##.", "..###..", "..###..", ".##.##.", "##...##", "##...##"),
    "H": ("##...##", "##...##", "##...##", "#######", "#######", "##...##", "##...##", "##...##"),
    "C": (".######", "##.....", "##.....", "##.....", "##.....", "##.....", "##.....", ".######"),
    "Z": ("#######", ".....##", "....##.", "...##..", "..##...", ".##....", "##.....", "#######"),
}
MARKS = {1.0: "#", -1.0: ".", 0.0: "?"}


def letters() -> Tensor:
    """All letters, `(7, 8, 7)`."""
    return torch.tensor(
        [[[1.0 if c == "#" else -1.0 for c in row] for row in rows] for rows in LETTERS.values()]
    )


def drawn(images: Tensor) -> str:
    """Pictures side by side as text."""
    return "\n".join(
        "   ".join("".join(MARKS[v] for v in row) for row in line) for line in images.transpose(0, 1).tolist()
    )


def completed(rule: str, known_rows: int, beta: float | None, seed: int) -> tuple[Tensor, Tensor, float]:
    """What is shown, what the memory makes of it, and the share of letters that come back exactly."""
    patterns = letters()
    known = torch.zeros_like(patterns, dtype=torch.bool)
    known[:, :known_rows] = True
    back = ms.energies.Hopfield(patterns, rule).complete(patterns, known, beta=beta, seed=seed)
    right = (back == patterns).flatten(1).all(1)
    return torch.where(known, patterns, torch.zeros_like(patterns)), back, right.float().mean().item()


def capacity(units: int = 200, seed: int = 0) -> dict[float, float]:
    """Share of random patterns that half of their units bring back, by patterns for each unit."""
    shares = {}
    for load in (0.05, 0.1, 0.15, 0.2, 0.3):
        rng = torch.Generator().manual_seed(seed)
        patterns = ms.proposals.Signs.uniform(units).sample(round(load * units), rng)
        known = torch.rand(patterns.shape, generator=rng) < 0.5
        back = ms.energies.Hopfield(patterns).complete(patterns, known)
        shares[load] = ((back * patterns).mean(1) > 0.95).float().mean().item()
    return shares


def main() -> None:
    """Print letters and capacities."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--known", type=float, default=0.5, help="share of the rows that is shown")
    parser.add_argument(
        "--beta", type=float, help="inverse temperature of clamped Gibbs sampling; downhill without"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows = round(given.known * letters().shape[1])
    for k, rule in enumerate(("hebbian", "pseudo-inverse")):
        shown, back, share = completed(rule, rows, given.beta, given.seed)
        if k == 0:
            print(f"shown\n\n{drawn(shown)}\n")
        print(f"{rule}: {share:.0%} of the letters come back\n\n{drawn(back)}\n")
    print("Hebbian rule, 200 units, half of them known: share of random patterns that come back")
    for load, share in capacity(seed=given.seed).items():
        print(f"  {round(load * 200):3d} patterns ({load:.2f} for each unit)  {share:.0%}")


if __name__ == "__main__":
    main()
