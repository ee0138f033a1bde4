"""Chapter 2 of the AdaNCE thesis: hidden units of a Boltzmann machine, and HMC with a full mass matrix.

Units whose product is +1 are independent in pairs. A machine of visible units, which holds pairs only, cannot come
nearer to them than log 2 nats; with hidden units it can (Section 2.2.2), and all is enumerated. HMC's mass matrix
(2.1.3.4) decides how much of a narrow, tilted normal density one move crosses: where x and v swing as an oscillator
of frequency ω, L leapfrog steps of ε leave a correlation cos(L·arccos(1 − ½ε²ω²)) of the end with the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metastable.core.random import derive, generator
from metastable.energies import RBM, BoltzmannMachine, HiddenBoltzmannMachine
from metastable.evaluation.discrete import counting_noise, total_variation
from metastable.kernels import HMC, Gibbs, run_chain
from metastable.methods import PersistentCD
from metastable.proposals.signs import state_numbers, states
from metastable.report.figures import draw_level, palette, picture

from .base import Bench, Experiment, Row
from .trials import Arm, Line, Problem, Trial, Trials, by_adam, by_scale, draw_curves, last, mean

# ---- hidden units


def parity_law(units: int) -> Tensor:
    """p of every state: alike where the product of all units is +1, else 0; float64, `(2^units,)`."""
    even = (states(units).prod(1) > 0).double()
    return even / even.sum()


def kl_from(law: Tensor, energy: Any) -> float:
    """KL(law ‖ model) by enumeration, nats."""
    with torch.no_grad():
        p, log_q = law[law > 0], energy.exact_probabilities()[law > 0].log()
    return float((p * (p.log() - log_q.to(p))).sum())


def machines(bench: Bench, seed: int) -> dict[str, Any]:
    """Without hidden units, with hidden units coupled to all, and with those of a restricted machine."""
    return {
        "visible-only": BoltzmannMachine(bench.units, bench.spread, seed),
        "hidden": HiddenBoltzmannMachine(bench.units, bench.hidden, bench.spread, seed),
        "restricted": RBM(bench.units, bench.hidden, bench.spread, seed),
    }


def learned(bench: Bench) -> dict[str, list[Trial]]:
    """Every machine by PCD with Gibbs sweeps, from every seed."""
    law = parity_law(bench.units)
    rows = torch.multinomial(
        law, bench.rows, replacement=True, generator=generator(derive(bench.seed, "data"))
    )
    data = states(bench.units)[rows].float()

    def watch(at: Problem, line: Line) -> Line:
        return {"kl": kl_from(law, at.model)}

    return Trials(
        [
            Arm(name, PersistentCD(walkers=bench.walkers, kernel=Gibbs(), steps=2))
            for name in machines(bench, 0)
        ],
        lambda arm, seed: Problem(machines(bench, seed)[arm.name], data),
        by_adam(bench, None, log_every=max(1, bench.steps // 50), device="cpu"),
        bench.repeats,
        watch=watch,
        keep=lambda trial, at, run: run.energy.state_dict(),  # pyright: ignore
        words=lambda trial: f"KL {trial.curves['kl'][-1]:.4f}",
    ).run(bench)


def gibbs_rows(bench: Bench, machine: Any) -> list[Row]:
    """Frequencies of a learned machine's own chains from random signs, against enumeration."""
    rng = generator(derive(bench.seed, "gibbs"))
    x = torch.where(torch.rand((bench.chains, bench.units), generator=rng) < 0.5, 1.0, -1.0)
    with torch.no_grad():
        end = run_chain(Gibbs(), machine, x, bench.sweeps, rng).state.x
        exact = machine.exact_probabilities()
    found = torch.bincount(state_numbers(end), minlength=len(exact)) / len(end)
    off, noise = float(total_variation(exact, found)), counting_noise(exact, len(end))
    return [Row("gibbs_total_variation/hidden", off, "<=", 2 * noise, oracle=noise)]


# ---- the mass matrix


def tilted_covariance(d: int, correlation: float, ratio: float) -> Tensor:
    """Correlations ρ^{|i−j|} between coordinates whose widths go from 1 to `ratio`, `(d, d)`, float64."""
    at = torch.arange(d, dtype=torch.float64)
    widths = ratio ** (at / (d - 1))
    return correlation ** (at[:, None] - at).abs() * widths[:, None] * widths


def masses(covariance: Tensor) -> Mapping[str, Tensor]:
    """M: none, the inverse variances, and the inverse covariance."""
    d = len(covariance)
    return {
        "unit": torch.eye(d, dtype=torch.float64),
        "diagonal": torch.diag(1 / covariance.diagonal()),
        "full": torch.linalg.inv(covariance),
    }


def crossed(bench: Bench, covariance: Tensor, mass: Tensor) -> tuple[float, float, float]:
    """Correlation of one move with its start along the slowest direction: measured, exact; and the acceptance.

    ε is the same share of the narrowest direction, as the mass makes it, whatever the mass.
    """
    L = torch.linalg.cholesky(mass)
    own, axes = torch.linalg.eigh(L.T @ covariance @ L)  # in coordinates y = Lᵀx the mass is 1
    step = bench.share * math.sqrt(float(own[0]))
    angle = math.acos(1 - 0.5 * step**2 / float(own[-1]))
    precision = torch.linalg.inv(covariance)
    rng = generator(derive(bench.seed, "hmc"))
    start = torch.randn((bench.chains, len(mass)), generator=rng, dtype=torch.float64)
    x = start @ torch.linalg.cholesky(covariance).T
    kernel = HMC(step, bench.leapfrog, mass_matrix=mass)  # pyright: ignore
    result = run_chain(kernel, lambda at: 0.5 * ((at @ precision) * at).sum(1), x, 1, rng)
    a, b = (rows @ L @ axes[:, -1] for rows in (x, result.state.x))
    return float((a @ b) / (a @ a)), math.cos(bench.leapfrog * angle), float(result.info.acceptance.mean())


def mass_rows(bench: Bench) -> list[Row]:
    """How much of the widest direction one move leaves, for each mass."""
    covariance, rows = tilted_covariance(bench.dim, bench.correlation, bench.ratio), []
    for name, mass in masses(covariance).items():
        measured, exact, acceptance = crossed(bench, covariance, mass)
        rows += [
            Row(f"correlation_after_a_move/{name}", measured, oracle=exact),
            Row(f"correlation_off_exact/{name}", abs(measured - exact), "<=", bench.tolerance),
            Row(f"acceptance/{name}", acceptance, ">=", 0.5),
        ]
    return rows


def body(bench: Bench) -> list[Row]:
    """Hidden units, then masses."""
    found = learned(bench)
    with picture(bench.folder / "parity.png", 6, 3.2) as axes:
        for (name, trials), colour in zip(found.items(), palette, strict=False):
            draw_curves(axes, trials, "kl", colour, name)
        draw_level(axes, math.log(2))
        axes.set(title="KL(data ‖ model), nats", xlabel="update")
        axes.legend(fontsize=7)
    kl = {name: mean(last(trials, "kl")) for name, trials in found.items()}
    best = min(last(found["hidden"], "kl"))
    rows = [
        Row("kl/visible-only", kl["visible-only"], ">=", math.log(2) - 1e-3, oracle=math.log(2)),
        Row("kl/hidden", kl["hidden"], "<=", bench.kl_target, oracle=0.0),
        Row("kl/restricted", kl["restricted"], oracle=0.0),
        Row("kl_best/hidden", float(best), oracle=0.0),
    ]
    first = found["hidden"][0]
    machine = machines(bench, first.seed)["hidden"]
    machine.load_state_dict(first.kept)
    return [*rows, *gibbs_rows(bench, machine), *mass_rows(bench)]


EXPERIMENT = Experiment(
    name="adance-background",
    title="Hidden units of a Boltzmann machine against enumeration, and HMC with a full mass matrix (Chapter 2)",
    paper="Nathaniel Xu, Self-adapting noise-contrastive estimation for energy-based models, 2022, Chapter 2",
    scales=by_scale(
        {"dim": 20, "correlation": 0.9, "ratio": 20.0, "leapfrog": 5, "share": 0.3},
        units=(3, 5),
        hidden=(2, 6),  # with four, one start in three stays at half a nat
        spread=(0.5, 1.0),
        rows=(500, 2000),
        walkers=(500, 1000),
        steps=(200, 1500),
        rate=(0.05, 0.05),
        repeats=(1, 3),
        chains=(4000, 100_000),
        sweeps=(30, 200),
        kl_target=(0.5, 0.2),
        tolerance=(0.1, 0.05),
    ),
    body=body,
)
