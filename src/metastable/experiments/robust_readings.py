"""What the β paper leaves open in Figure 6, reading by reading, and the fixed point of its Appendix I.

**Figure 6.** Chains start in a corner, in a Gaussian half as wide, with ten times the step; with β > 0 the paper's
density still "better reflects the data distribution". `robust-toy` finds it behind the uniform density. The text
leaves open where the corner is, what a step ten times as long does to the noise, how long chains are on the
circles, which learning rates fall, the weights of the modes, the noise ε and whether β weighs f or f/T. Each
reading changes one of these; `together` changes those that helped.

A step of s = 10 on the right density moves a point by s·T·|∇ log p|, T = ε²/2: at ε = 0.015, where a mode is 0.15
wide, by less than 0.01. Twenty such steps do not cross from one corner to the other whatever is learned, and then
weights are all that is left. ε is the reading that decides.

**Appendix I.** Training rests where p_d ∝ S·exp(βf/T), with S the law of the ends of chains on (1 − β)f, hence
p_θ ∝ (p_d/S)^{1/β}. On circles both are functions of the radius: S is measured from many chains, and the masses of
the four rings that follow are held against those of the learned density.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from metastable.core.random import derive, generator
from metastable.evaluation.quadrature import grid_density
from metastable.report.figures import draw_level, palette, picture

from .base import Bench, Experiment, Row
from .robust_students import BETAS, SPREAD, TOYS, Score, Setup, Student, Students, Toy, score, train
from .trials import by_scale

READINGS: dict[str, dict[str, Any]] = {
    "robust-toy": {},
    "start half as far": {"shift": 0.5},
    "noise not longer": {"quiet": True},
    "100 steps": {"steps": 100},
    "rate does not fall": {"falls": False},
    "beta weighs f": {"tempered": False},
    "equal modes": {},
    "epsilon 0.03": {"epsilon": 0.03},
    "epsilon 0.05": {"epsilon": 0.05},
    "epsilon 0.07": {"epsilon": 0.07},
    "together": {"epsilon": 0.05, "shift": 0.5, "steps": 100},
}
"""What each changes of the shifted setup of `robust-toy`."""
RINGS = (1, 2, 3, 4)
REACH = 3 * SPREAD
"""Half the width of a ring: beyond it there are no data."""
BINS = 90
"""Of a ring, along the radius."""


def draw_equal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """The eight modes with equal masses."""
    angle = torch.randint(0, 8, shape, generator=rng, device=rng.device) * (math.pi / 4)
    noise = torch.randn((*shape, 2), generator=rng, device=rng.device)
    return torch.stack([angle.cos(), angle.sin()], -1) + SPREAD * noise


def log_equal(x: Tensor) -> Tensor:
    """Their log p."""
    angle = torch.arange(8, dtype=x.dtype, device=x.device) * (math.pi / 4)
    centred = x[:, None] - torch.stack([angle.cos(), angle.sin()], -1)
    along = torch.logsumexp(-centred.square().sum(-1) / SPREAD**2 / 2, -1)
    return along - math.log(8 * 2 * math.pi * SPREAD**2)


EQUAL = replace(TOYS["gaussians"], draw=draw_equal, log_density=log_equal)


def setups_of(bench: Bench) -> list[Setup]:
    """Every reading of Figure 6 on both sets, and the circles from the default start."""
    students = tuple(Student(b, shifted=True) for b in bench.betas)
    found = []
    for name, toy in itertools.product(bench.readings, bench.sets):
        if name == "equal modes" and toy == "circles":
            continue
        of = EQUAL if name == "equal modes" else TOYS[toy]
        found.append(replace(Setup(name, of, students, of.negatives), **READINGS[name]))
    circles = TOYS["circles"]
    return [*found, Setup(FIXED, circles, tuple(Student(b) for b in bench.betas if b), circles.negatives)]


FIXED = "fixed point"


# ---- Figure 6


def reading_rows(bench: Bench, scores: Mapping[tuple[str, str, Student], Sequence[Score]]) -> Iterator[Row]:
    """KL of each reading beside the uniform density's, and which is the best."""
    ratios: dict[str, dict[str, float]] = {name: {} for name in bench.sets}
    for name, toy in itertools.product(bench.readings, bench.sets):
        if (name, toy, Student(0.0, shifted=True)) not in scores:
            continue
        uniform = (EQUAL if name == "equal modes" else TOYS[toy]).kl_of_uniform()
        for beta in bench.betas:
            kl = fmean(s.kl for s in scores[name, toy, Student(beta, shifted=True)])
            yield Row(f"kl/{name}/{toy}/beta={beta:g}", kl)
            if beta:
                ratios[toy][name] = min(ratios[toy].get(name, math.inf), kl / uniform)
        yield Row(f"kl_to_uniform/{name}/{toy}", ratios[toy][name])
    for toy, own in ratios.items():
        yield Row(f"kl_to_uniform/best/{toy}", min(own.values()), *bench.beyond.get(toy, ()), paper="below 1")


# ---- Appendix I


def radial_density(students: Students, k: int, chains: int, seed: int) -> Tensor:
    """S at the middle of each bin of each ring, per area, `(4, BINS)`, from the ends of chains of student k."""
    rng, counts = generator(seed, students.device), torch.zeros(len(RINGS), BINS, dtype=torch.float64)
    edges = torch.linspace(-REACH, REACH, BINS + 1, dtype=torch.float64)
    done, at_once = 0, 4096
    while done < chains:
        radius = students.chains(at_once, 1 - students.beta, rng)[k].double().norm(dim=1).cpu()
        for i, ring in enumerate(RINGS):
            counts[i] += torch.histogram(radius - ring, edges).hist
        done += at_once
    return counts / done / (2 * math.pi * radii() * float(edges[1] - edges[0]))


def radii() -> Tensor:
    """Of the middles of the bins of each ring, `(4, BINS)`."""
    middle = (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS * 2 * REACH - REACH
    return torch.tensor(RINGS, dtype=torch.float64)[:, None] + middle


def predicted_masses(density: Tensor, beta: float, toy: Toy) -> Tensor:
    """∫ (p_d/S)^{1/β} over each ring, as shares; bins that no chain reached are left out."""
    r = radii()
    flat = torch.stack([r.flatten(), torch.zeros(r.numel(), dtype=torch.float64)], 1)
    ratio = toy.log_density(flat).view_as(r) - density.log()
    mass = torch.where(density > 0, torch.exp(ratio / beta), 0.0) * r
    return mass.sum(1) / mass.sum()


def learned_masses(found: Score, toy: Toy) -> Tensor:
    """Shares of the four rings in the learned density, on a grid."""
    grid = grid_density(found.energy, toy.box, 401)
    axis = torch.linspace(-toy.half_width, toy.half_width, 401, dtype=torch.float64)
    radius = torch.cartesian_prod(axis, axis).norm(dim=1).view(401, 401)
    density = grid.density.double().cpu()
    mass = torch.stack([density[(radius - k).abs() < REACH].sum() for k in RINGS])
    return mass / mass.sum()


def ring_rows(bench: Bench, students: Students, own: Mapping[Any, Sequence[Score]]) -> Iterator[Row]:
    """Each ring's learned mass beside what the fixed point says, and how much of the deviation from 1/4 it says."""
    found, drawn = {}, {}
    for k, (student, repeat) in enumerate(students.each):
        if repeat:
            continue
        S = radial_density(students, k, bench.chains, derive(bench.seed, "rings", k))
        found[student.beta] = learned_masses(own[FIXED, "circles", student][0], students.setup.toy)
        drawn[student.beta] = predicted_masses(S, student.beta, students.setup.toy)
    for beta in sorted(found):
        for ring, mass, said in zip(RINGS, found[beta].tolist(), drawn[beta].tolist(), strict=True):
            yield Row(f"ring_mass/beta={beta:g}/ring={ring}", mass, oracle=round(said, 4))
        gap = float((found[beta] - drawn[beta]).abs().max())
        yield Row(f"ring_gap/beta={beta:g}", gap, *(bench.ring_gap if beta == max(found) else ()))
    with picture(bench.folder / "rings.png", 9, 3.2, columns=len(found), squeeze=False, sharey=True) as axes:
        for axis, beta in zip(axes[0], sorted(found), strict=True):
            axis.plot(RINGS, found[beta], "o-", color=palette.blue, label="learned")
            axis.plot(RINGS, drawn[beta], "s--", color=palette.vermillion, label="fixed point of Appendix I")
            draw_level(axis, 0.25, lw=0.8, label="data")
            axis.set(xlabel="ring", xticks=RINGS, title=f"β = {beta:g}")
        axes[0, 0].set_ylabel("mass")
        axes[0, 0].legend(fontsize=7.5)


def draw_readings(bench: Bench, rows: Sequence[Row]) -> None:
    """The best KL over β of each reading, in units of the uniform density's."""
    path, columns = bench.folder / "figure-6-readings.png", len(bench.sets)
    with picture(path, 2 + 4 * columns, 3.8, columns=columns, sharey=True, squeeze=False) as axes:
        for axis, toy in zip(axes[0], bench.sets, strict=True):
            own = {
                r.metric.split("/")[1]: r.value
                for r in rows
                if r.metric.startswith("kl_to_uniform/") and r.metric.endswith(toy) and r.relation is None
            }
            axis.barh(list(own), list(own.values()), color=palette.blue, height=0.6)
            axis.axvline(1.0, color=palette.vermillion, lw=1.2)
            axis.set(xscale="log", xlabel="least KL over β > 0, uniform density = 1", title=toy)
        axes[0, 0].invert_yaxis()


def body(bench: Bench) -> list[Row]:
    """Train every reading, score, and compare rings."""
    scores: dict[tuple[str, str, Student], list[Score]] = {}
    groups = train(bench, setups_of(bench))
    for students in groups:
        scores |= score(students, bench.samples, bench.seed)
    rows = list(reading_rows(bench, scores))
    draw_readings(bench, rows)
    return [*rows, *ring_rows(bench, groups[-1], scores)]


EXPERIMENT = Experiment(
    name="robust-readings",
    title="What the β paper leaves open: readings of Figure 6, and ring masses at the fixed point (App. I)",
    paper="Energy-based model training objective robust to inaccurate SGLD samples, Appendices I and K.1",
    scales=by_scale(
        updates=(40, 500, 6000),
        learning_rate=(1e-3, 1e-3, 5e-4),
        repeats=(1, 1, 1),
        samples=(200, 1000, 1000),
        chains=(8192, 50_000, 400_000),
        betas=((0.0, 0.9), (0.0, 0.5, 0.9), BETAS),
        sets=(("gaussians",), ("gaussians",), tuple(TOYS)),
        readings=(("epsilon 0.05",), tuple(READINGS), tuple(READINGS)),
        beyond=({}, {"gaussians": ("<=", 1.0)}, dict.fromkeys(TOYS, ("<=", 1.0))),
        ring_gap=((), (), ("<=", 0.1)),
    ),
    body=body,
)
