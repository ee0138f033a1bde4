"""Figure 2 of the R-NCE paper: five courses of the objective, each made on purpose and named by the diagnosis.

Data are three normal modes in the plane. The energy is always the same network. What differs is the proposal: how
much it can hold (the data's law exactly, or one Gaussian), and whether it learns late, beforehand, or never.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from metastable.core.random import derive, generator
from metastable.energies import MLP
from metastable.evaluation.diagnosis import Facts, diagnose
from metastable.evaluation.quadrature import grid_density, kl_on_grid
from metastable.methods import RankingNCE
from metastable.report.figures import draw_level, palette, picture
from metastable.runs.run import Run

from .base import Bench, Experiment, Row
from .trials import Arm, Problem, Trial, Trials, by_adam, by_scale

K = 15
MATCHED = -math.log(K + 1)
MATCHED_TOLERANCE = 0.05
MEANS = ((3.0, 0.0), (-1.5, 2.6), (-1.5, -2.6))
SPREAD, WEIGHTS = 0.6, (0.5, 0.3, 0.2)
RADIUS = 5.0
"""How far out the components of a proposal start; nearer together they stay together for long."""
AHEAD = 4.0
"""Learning rate of a proposal that learns beforehand, as a multiple of the energy's."""
BOX = ((-7.0, 7.0), (-7.0, 7.0))


class NormalMixture(nn.Module):
    """Σ_k w_k N(μ_k, s_k² I) whose means, scales and weights learn: a proposal of a capacity that is chosen.

    Args:
        components: how many; as many as the data have modes hold their law exactly.
        scale: of all of them at first.
    """

    def __init__(self, components: int, scale: float):
        super().__init__()
        angle = torch.arange(components) * (2 * math.pi / components) + 0.3
        start = RADIUS * torch.stack([angle.cos(), angle.sin()], 1) if components > 1 else torch.zeros(1, 2)
        self.means = nn.Parameter(start)
        self.log_scales = nn.Parameter(torch.full((components,), math.log(scale)))
        self.logits = nn.Parameter(torch.zeros(components))
        self.event_shape: tuple[int, ...] = (2,)

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws, `(n, 2)`."""
        chosen = torch.multinomial(self.logits.softmax(0), n, replacement=True, generator=rng)
        noise = torch.randn((n, 2), generator=rng, device=self.means.device)
        return self.means[chosen] + self.log_scales.exp()[chosen, None] * noise

    def log_prob(self, x: Tensor) -> Tensor:
        """`(B, 2)` to `(B,)`."""
        z = (x[:, None] - self.means) / self.log_scales.exp()[:, None]
        each = -0.5 * z.square().sum(-1) - 2 * self.log_scales - math.log(2 * math.pi)
        return torch.logsumexp(each + self.logits.log_softmax(0), 1)


def truth() -> NormalMixture:
    """The law of the data."""
    law = NormalMixture(3, SPREAD)
    with torch.no_grad():
        law.means.copy_(torch.tensor(MEANS))
        law.logits.copy_(torch.tensor(WEIGHTS).log())
    return law


@dataclass(frozen=True)
class Regime:
    """One of the five: what the proposal can hold, where it starts, and when it learns."""

    words: str
    components: int
    scale: float
    learns: bool = True
    pretrained: bool = False


REGIMES = {
    "posterior-collapse": Regime("a proposal without information", 1, 150.0, learns=False),
    "proposal-caught-up": Regime("learns late, holds the data", 3, 6.0),
    "proposal-behind": Regime("learns late, holds too little", 1, 12.0),
    "proposal-ahead": Regime("learned before, holds the data", 3, 2.0, pretrained=True),
    "energy-overtook": Regime("learned before, holds too little", 1, 2.0, pretrained=True),
}
"""By the name that the diagnosis should give; in the order of the caption of Figure 2."""


@dataclass(frozen=True)
class Outcome:
    """What one regime came to."""

    steps: np.ndarray
    objective: np.ndarray
    names: tuple[str, ...]
    kl_energy: float
    kl_proposal: float

    @property
    def end(self) -> float:
        """The objective over the last fifth."""
        return float(self.objective[-len(self.objective) // 5 :].mean())


def arms(bench: Bench) -> list[Arm]:
    """The library's R-NCE with the proposal of each regime; learning beforehand takes updates of its own."""
    compared = []
    for name, regime in REGIMES.items():
        before = bench.pretrain if regime.pretrained else 0
        method = RankingNCE(
            negatives_per_datum=K,
            proposal=NormalMixture(regime.components, regime.scale),
            train_proposal=regime.learns and not regime.pretrained,
            pretrain=before,
            proposal_rate=AHEAD if regime.pretrained else 1.0,
        )
        compared.append(Arm(name, method, {"steps": bench.steps + before}, about=before))
    return compared


def outcome(trial: Trial, at: Problem, run: Run) -> Outcome:
    """The objective while the energy learns, the diagnosis, and distances from the data's law."""
    rows, proposal = [row for row in run.history if "objective" in row], cast(Any, run.players["proposal"])
    findings = diagnose(run.history, Facts(method=run.method, negatives_per_datum=K))
    return Outcome(
        np.array([row["step"] - trial.arm.about for row in rows]),
        np.array([row["objective"] for row in rows]),
        tuple(finding.name for finding in findings),
        _kl(at.truth, run.energy),
        _kl(at.truth, lambda x: -proposal.log_prob(x.to(proposal.means)).cpu()),
    )


def _kl(law: NormalMixture, energy: Any) -> float:
    """KL(data ‖ model) by quadrature on the box around the data, where the model is normalised.

    What a model puts beyond the box is left out: a proposal as wide as the world is worse than this says.
    """
    log_p = lambda x: law.log_prob(x.float())  # noqa: E731
    if not math.isfinite(grid_density(energy, BOX, 41).log_partition):
        return math.inf
    with torch.no_grad():
        return kl_on_grid(log_p, energy, BOX, 241, mass_tolerance=1e-2)


# ---- the experiment


def body(bench: Bench) -> list[Row]:
    """Each regime: where its objective ends, whether it is named, how far energy and proposal are from the data."""
    law = truth()
    x = law.sample(bench.data, generator(derive(bench.seed, "data")))

    def problem(arm: Arm, seed: int) -> Problem:
        return Problem(MLP((2,), hidden=(bench.width, bench.width), seed=seed), x, law)

    found = Trials(
        arms(bench),
        problem,
        by_adam(bench, bench.batch, log_every=max(1, bench.steps // 150)),
        seed=lambda bench, arm, repeat: derive(bench.seed, arm.name) % 2**31,
        keep=outcome,
        words=lambda trial: f"objective {trial.kept.end:.3f}, found {', '.join(trial.kept.names)}",
        records=(Outcome,),
    ).run(bench)
    outcomes = {name: trial.kept for name, (trial,) in found.items()}
    _draw(bench, outcomes)
    return rows_of(outcomes)


def rows_of(outcomes: dict[str, Outcome]) -> list[Row]:
    """Of each regime, then what the objective of some must be."""
    rows = []
    for name, found in outcomes.items():
        rows += [
            Row(f"named/{name}", float(name in found.names), ">=", 1.0),
            Row(f"objective/{name}", found.end),
            Row(f"kl_energy/{name}", found.kl_energy),
            Row(f"kl_proposal/{name}", found.kl_proposal),
        ]
    for name in ("proposal-caught-up", "proposal-ahead"):
        distance = abs(outcomes[name].end - MATCHED)
        rows.append(Row(f"distance_from_matched/{name}", distance, "<=", MATCHED_TOLERANCE))
    for name in ("proposal-behind", "energy-overtook"):
        rows.append(Row(f"above_matched/{name}", outcomes[name].end - MATCHED, ">=", MATCHED_TOLERANCE))
    return [*rows, Row("objective_of_collapse", outcomes["posterior-collapse"].end, ">=", -MATCHED_TOLERANCE)]


def _draw(bench: Bench, outcomes: dict[str, Outcome]) -> None:
    """Figure 2, and what each course was worth."""
    colours = (palette.vermillion, palette.blue, palette.sky, palette.green, palette.orange)
    first = min(found.steps[0] for found in outcomes.values())
    labels = (
        (0.0, "0: collapse", first, 3, "left"),
        (MATCHED, "−log(K+1): matched", bench.steps, -10, "right"),
    )
    path = bench.folder / "figure-2.png"
    with picture(path, 10, 3.9, columns=2, width_ratios=(3, 2)) as (left, right):
        for (name, found), colour in zip(outcomes.items(), colours, strict=True):
            left.plot(found.steps, found.objective, color=colour, lw=1.4, label=name)
        for level, words, place, up, side in labels:
            draw_level(left, level)
            left.annotate(words, (place, level), (0, up), textcoords="offset points", ha=side, fontsize=7.5)
        title = f"objective while training, K = {K}"
        left.set(title=title, xlabel="update of the energy", ylabel="nats", xscale="log")
        left.set_ylim(1.7 * MATCHED, 0.3)
        left.legend(fontsize=7.5, loc="lower right")
        places = np.arange(len(outcomes))
        energies, proposals = zip(*((o.kl_energy, o.kl_proposal) for o in outcomes.values()), strict=True)
        right.barh(places - 0.2, energies, 0.36, color=palette.blue, label="energy")
        right.barh(places + 0.2, proposals, 0.36, color=palette.orange, label="proposal")
        right.set_yticks(places, [f"{name}\n{REGIMES[name].words}" for name in outcomes], fontsize=7)
        right.invert_yaxis()
        right.set(title="KL from the data's law", xlabel="nats")
        right.legend(fontsize=7.5)


EXPERIMENT = Experiment(
    name="rnce-profiles",
    title="Who learns faster, energy or proposal: five courses of the R-NCE objective (Fig. 2)",
    paper="Singh, Tu, Sindhwani, TMLR 2024, Section 4.4",
    scales=by_scale(
        data=(20_000, 100_000),
        batch=(128, 256),
        steps=(900, 4000),
        pretrain=(700, 2000),
        rate=(5e-3, 3e-3),
        width=(48, 64),
    ),
    body=body,
)
