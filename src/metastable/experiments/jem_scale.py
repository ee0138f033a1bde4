"""Where a JEM's output scale belongs: o = 1, o on the energy, and o on h (Appendix M.2 of the β paper).

SGLD with noise √α and drift α/2 moves on a density of f = o·log Σ e^h. Without o, says the paper, gradients are too
small for chains to move; with o on h itself, which only writes the same density in other units, discrimination is
poor, since p(y | x) loses its doubt. In small, on the digits and with the network of `jem-stability`, each is
trained as scenario 1 is, plain and with β·o = 0.5; the drift of a step beside its noise, test accuracy and the
distance of the chains from the data say who can move and who can tell.

The weight of log p(x) is 1/o for `energy` and for `h`, as public code leaves o out of the loss, and 1 for `one` and
`h and loss`, where it is the likelihood of the pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metastable.core.random import derive
from metastable.energies import JointEnergy, WideResNet
from metastable.evaluation.distances import energy_distance
from metastable.report.figures import save_image_rows
from metastable.runs.run import Run

from .base import Bench, Experiment, Row
from .jem_stability import CLASSIFIER, IN_SMALL, Scenario, Task, digits, mean_accuracy, stopped_share, trials
from .jem_stability import EXPERIMENT as STABILITY
from .trials import Arm, Problem, Trial, mean

SCALE = IN_SMALL[1].output_scale


class Placed(NamedTuple):
    """Where o stands: on the energy (`scenario.output_scale`), or on what the network gives."""

    scenario: Scenario
    on_h: float = 1.0


PLACES = {
    "energy": Placed(IN_SMALL[1]),
    "one": Placed(replace(IN_SMALL[1], output_scale=1.0)),
    "h": Placed(replace(IN_SMALL[1], output_scale=1.0, generative=1 / SCALE), on_h=SCALE),
    "h and loss": Placed(replace(IN_SMALL[1], output_scale=1.0), on_h=SCALE),
}
SAYS = {"one": "no movement", "h": "poor discrimination", "h and loss": "poor discrimination"}
"""The paper, in words."""


class Louder(nn.Module):
    """A network whose outputs are o times as large."""

    def __init__(self, network: nn.Module, scale: float):
        super().__init__()
        self.network, self.scale = network, scale

    def forward(self, x: Tensor) -> Tensor:
        """o·h."""
        return self.scale * self.network(x)


class Ended(NamedTuple):
    """What is kept of a training: its chains, and the drift of a step in units of its noise."""

    chains: Tensor
    drift: float


def drift_to_noise(energy: JointEnergy, x: Tensor, alpha: float) -> float:
    """|α/2·∇E| over √α, both for each pixel, root mean square over chains."""
    x = x.detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(energy(x).sum(), x)
    return float((alpha / 2 * gradient).square().mean().sqrt() / alpha**0.5)


def train(bench: Bench, task: Task, place: Placed, beta_o: float) -> list[Trial]:
    """Every seed of one place and one β·o."""
    scenario = place.scenario
    base = trials(bench, task, scenario, (beta_o / place.on_h,))

    def problem(arm: Arm, seed: int) -> Problem:
        seed = derive(seed, "network") % 2**31
        network: nn.Module = WideResNet(task.train.event_shape, bench.depth, bench.width, 10, seed)
        network = Louder(network, place.on_h) if place.on_h != 1 else network
        return Problem(JointEnergy(network, scenario.output_scale), task.train)

    def keep(trial: Trial, at: Problem, run: Run) -> Ended | None:
        if run.walkers is None:
            return None
        chains = run.walkers.x[:500]
        return Ended(chains.cpu(), drift_to_noise(at.model, chains, scenario.alpha))

    (found,) = replace(base, problem=problem, keep=keep, records=(Ended,)).run(bench).values()
    return found


def rows_of(name: str, found: Sequence[Trial], task: Task, at: str) -> Iterator[Row]:
    """Accuracy, stops, drift and distance of one place and β."""
    where, said = f"{name}/{at}", SAYS.get(name)
    ended = [t.kept for t in found if t.kept is not None]
    yield Row(f"accuracy/{where}", mean_accuracy(found), paper=said if name != "one" else None)
    yield Row(f"stopped/{where}", stopped_share(found))
    if ended:
        data = task.train.x[:500].flatten(1)
        far = mean(float(energy_distance(e.chains.flatten(1), data)) for e in ended)
        yield Row(
            f"drift_to_noise/{where}", mean(e.drift for e in ended), paper=said if name == "one" else None
        )
        yield Row(f"distance/{where}", far)


def body(bench: Bench) -> list[Row]:
    """Every place of o, plain and with β, beside the classifier alone."""
    task = digits(bench.test_share)
    alone = mean_accuracy(train(bench, task, PLACES["energy"], CLASSIFIER))
    rows, pictures = [Row("accuracy/classifier", alone)], {"data": task.train.x[:10]}
    of: dict[str, float] = {}
    for name, place in PLACES.items():
        for beta_o in (0.0, bench.stated):
            found = train(bench, task, place, beta_o)
            own = list(rows_of(name, found, task, f"beta_o={beta_o:g}"))
            rows += own
            of |= {row.metric: row.value for row in own}
            kept = [t.kept for t in found if t.kept is not None]
            if kept:
                pictures[f"o on {name}, β·o = {beta_o:g}"] = kept[0].chains[:10]
    save_image_rows(bench.folder / "chains.png", pictures)
    at = f"beta_o={bench.stated:g}"
    one, energy = (of.get(f"drift_to_noise/{name}/{at}", math.nan) for name in ("one", "energy"))
    lost = of[f"accuracy/energy/{at}"] - of[f"accuracy/h/{at}"]
    return [
        Row(f"drift_ratio/one to energy/{at}", one / energy, "<=", 0.1),
        Row(f"accuracy_lost/h to energy/{at}", lost),
        *rows,
    ]


EXPERIMENT = Experiment(
    name="jem-scale",
    title="Where a JEM's output scale belongs: nowhere, on the energy, or on the logits (App. M.2)",
    paper="Energy-based model training objective robust to inaccurate SGLD samples, ICLR 2025 submission, App. M.2",
    scales={
        "smoke": {**STABILITY.scales["smoke"], "steps": 6},
        "cpu": {**STABILITY.scales["cpu"], "seeds": 2},
    },
    body=body,
)
