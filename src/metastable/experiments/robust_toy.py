"""The toy sets of the β paper (Section 4.1, Appendix K): densities learned from short chains, for several β.

Chains take a fixed, small number of steps from Gaussian noise, far too few to arrive. Plain training (β = 0) turns
the network into something that moves noise onto the data in just that many steps, and its density is wrong by tens
to hundreds of nats; with β the density is learned. Both sets have exact densities, so that KL(p_data ‖ p_θ) is an
integral.

| symbol | here |
|---|---|
| f (the paper's −f) | the network, `BatchedNets` |
| x ← x − (1−β)·s·∇f + √s·ε·u | a step of SGLD, `Students.chains`; s = 1, and 10 from the shifted start |
| T = ε²/2 | the temperature of these chains: what they sample is exp(−(1−β)f/T), and p_θ ∝ exp(−f/T) (Appendix G) |
| β/T | what weighs f in the objective, so that β means what it says |
| N, M | `Setup.positives`, `Setup.negatives` |

The paper does not publish the weights of the modes (here ∝ 1…8), its larger step (here ε = 0.015, where its source
has 0.01 and five times the steps), its learning-rate schedule (here a cosine to 0) and where exactly the shifted
start lies (here one standard deviation of the default start to the right and one down).
"""

from __future__ import annotations

import itertools
from statistics import fmean

from .base import Bench, Experiment, Row
from .robust_students import (
    DEFAULT,
    TOYS,
    VARIANTS,
    Score,
    Scores,
    Setup,
    Student,
    default_setup,
    degenerate_setup,
    longer_setup,
    restricted_setup,
    score,
    train,
)
from .robust_toy_figures import draw
from .trials import by_scale

TENTH = 0.1
GAUSSIANS_LIMIT = 0.6
"""KL of β = 0.5 and 0.9 on the eight modes."""


def rows_of(scores: Scores, variant_ratio: float) -> list[Row]:
    """What is required first, then every number."""
    kl = {key: fmean(s.kl for s in own) for key, own in scores.items()}
    rows = []
    for name in TOYS:
        ratio = kl[DEFAULT, name, Student(0.1)] / kl[DEFAULT, name, Student(0.0)]
        rows.append(Row(f"kl_ratio/{name}/beta=0.1 to beta=0", ratio, "<=", TENTH))
    for name, beta in itertools.product(TOYS, (0.5, 0.9)):
        limit = TOYS[name].kl_of_uniform()
        limit = min(limit, GAUSSIANS_LIMIT) if name == "gaussians" else limit
        largest = max(s.kl for s in scores[DEFAULT, name, Student(beta)])
        rows.append(Row(f"kl_largest/{name}/beta={beta:g}", largest, "<=", limit))
    plain, *others = (kl["restricted", "gaussians", Student(0.5, v)] for v in VARIANTS)
    for variant, other in zip(VARIANTS[1:], others, strict=True):
        label = f"kl_ratio/restricted/gaussians/default to {variant}"
        rows.append(Row(label, plain / other, "<=", variant_ratio))
    rows += [Row(f"kl/{name}/uniform", toy.kl_of_uniform()) for name, toy in TOYS.items()]
    for (setup, name, student), own in scores.items():
        where = name if setup == DEFAULT else f"{setup}/{name}"
        variant = "" if student.variant == "default" else f"/{student.variant}"
        label = f"{where}/beta={student.beta:g}{variant}{'/shifted' if student.shifted else ''}"
        rows.append(Row(f"kl/{label}", kl[setup, name, student]))
        if setup in (DEFAULT, "longer"):  # elsewhere chains hardly move
            rows.append(Row(f"distance/{label}", fmean(s.distance for s in own)))
    return rows


# ---- the experiment


def setups_of(bench: Bench) -> list[Setup]:
    """All of them, or at the smallest scale those behind the numbers that are required."""
    gaussians, circles = TOYS.values()
    if not bench.everything:
        few = [default_setup(t, everything=False) for t in (gaussians, circles)]
        return [*few, restricted_setup(gaussians, betas=(0.5,), times=3)]
    each = [
        make(t) for make in (default_setup, restricted_setup, degenerate_setup) for t in (gaussians, circles)
    ]
    return [*each, longer_setup(circles)]


def body(bench: Bench) -> list[Row]:
    """Train, score, draw."""
    scores: dict[tuple[str, str, Student], list[Score]] = {}
    for students in train(bench, setups_of(bench)):
        scores |= score(students, bench.samples, bench.seed)
    draw(bench, scores)
    return rows_of(scores, bench.variant_ratio)


EXPERIMENT = Experiment(
    name="robust-toy",
    title="Eight modes and four circles from chains that do not arrive: β and its variants (Fig. 2, 5-11)",
    paper="Energy-based model training objective robust to inaccurate SGLD samples, Section 4.1, Appendix K",
    scales=by_scale(
        updates=(1500, 10_000, 100_000),
        learning_rate=(1e-3, 2e-4, 1e-4),
        repeats=(1, 3, 3),
        samples=(1000, 2000, 2000),
        everything=(False, True, True),
        # with one seed the variants have not gone astray as far as they will
        variant_ratio=(0.25, TENTH, TENTH),
    ),
    body=body,
)
