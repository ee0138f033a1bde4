"""What a finished conditional run is worth: likelihoods normalised context by context, samples, diagnosis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.batch import Batch
from metastable.core.errors import InputError
from metastable.core.method import draws_given
from metastable.core.protocols import Sampled, StepwiseSolved, provides
from metastable.core.random import derive, generator
from metastable.core.types import bind
from metastable.core.units import Coordinates
from metastable.energies import AsEnergy
from metastable.evaluation.conditional import ConditionalLogProb, LogPartitions, conditional_log_prob
from metastable.evaluation.diagnosis import Finding
from metastable.evaluation.distances import energy_distance
from metastable.evaluation.quadrature import bounding_box, grid_density
from metastable.methods.conditional_tuning import forget_tuning
from metastable.proposals.given import finely, log_prob_of
from metastable.runs.run import Run
from metastable.walkers.starts import random_rows, some_rows

from .section import Judged, Measured

ROWS = 2000
"""Held-out pairs behind a likelihood, where they share their contexts."""
CONTEXTS, CONTEXTS_ODE = 256, 64
"""Distinct contexts behind one, each of which needs a log Z; fewer where a draw is the solution of an ODE."""
DRAWS, DRAWS_ODE = 2**17, 2**15
"""Draws of the proposal for all contexts together."""
DRAWS_OWN = 2**13
"""The same of a diffusion's φ, whose own draws cost a gradient of φ at every step."""
LEAST_DRAWS, MOST_DRAWS = 256, 8192
"""Draws for one context."""
STD_ERROR = 0.1
"""Of log Z: contexts above it get more draws, up to the most, where these cost little."""
SHOWN, SHOWN_EVENTS = 4, 500
"""Contexts that a report shows, and samples of each."""
GRID = 101


class Contexts:
    """What a conditional run is worth.

    The conditional log-likelihood of held-out pairs is −E(x | c) − log Z(c), with log Z(c) by importance sampling
    from the proposal that was trained beside the energy. A model without such a proposal has none.
    """

    name = "contexts"

    def applies(self, judged: Judged) -> bool:
        """Events must be given contexts."""
        return judged.run.conditional

    def measure(self, judged: Judged) -> Measured:
        """Scores of the pairs; when training has ended also a few contexts, into `run.contexts`, and findings."""
        run, rows, seed = judged.run, judged.rows, judged.seed
        found, sampler = likelihoods(run, rows, seed), Sampler(run)
        if not judged.after_training:
            numbers: dict[str, Any] = _scores(sampler, found, rows, seed)
            warnings = [] if found is None else [f"log Z: {text}" for text in found.log_partition.warnings]
            numbers["warnings"] = [*warnings, *(finding.text for finding in sampler.findings)]
            return Measured(numbers)
        train = judged.train
        assert train is not None
        own = likelihoods(run, train, seed) if found is not None and not _same(train, rows) else None
        shown = _shown(sampler, train, rows, seed) if sampler.able else None
        if shown is not None and judged.coordinates is not None:
            shown = _outward(shown, judged.coordinates)
        run.contexts = shown.table if shown else None
        numbers = _scores(sampler, found, rows, seed)
        forget_tuning(run.energy)  # so that the run samples as it will when it is read back
        findings = [*_doubts(found), *sampler.findings]
        return Measured(numbers, shown.arrays if shown else {}, _held_out(found, own), findings)


# ---- likelihoods


def likelihoods(run: Run, pairs: Batch, seed: int) -> ConditionalLogProb | None:
    """Normalised log-densities of some of the pairs, as many as a matter of seconds; None without a proposal."""
    rows = _chosen(run, pairs, seed)
    if run.normalised:
        value = run.log_prob(rows.x, rows.conditions).double()
        none = torch.zeros_like(value)
        exact = LogPartitions(none[:1], none[:1], none[:1] + math.inf, none[:1])
        return ConditionalLogProb(value, none, torch.zeros_like(value, dtype=torch.long), exact)
    try:
        proposal = run.importance_density()
    except InputError:
        return None
    contexts = len(torch.unique(rows.conditions, dim=0))
    budget = DRAWS_ODE if _solves_an_ode(proposal) else DRAWS
    budget = DRAWS_OWN if provides(run.energy, StepwiseSolved) else budget
    draws = min(max(budget // contexts, LEAST_DRAWS), MOST_DRAWS)
    rng = generator(derive(seed, "log Z given"), rows.x.device)
    more = {} if _solves_an_ode(proposal) else {"std_error": STD_ERROR, "most": MOST_DRAWS}
    return conditional_log_prob(run.energy, proposal, rows.x, rows.conditions, draws, rng, **more)


def _chosen(run: Run, pairs: Batch, seed: int) -> Batch:
    """Pairs at random: many where they share contexts, fewer where each has its own."""
    rng = generator(derive(seed, "pairs"), pairs.x.device)
    rows = pairs[random_rows(len(pairs), min(ROWS, len(pairs)), rng, pairs.x.device)]
    most = CONTEXTS_ODE if _solves_an_ode(run.players.get("proposal", run.energy)) else CONTEXTS
    if len(torch.unique(rows.conditions, dim=0)) <= most:
        return rows
    return rows[:most] if len(rows) < len(pairs) else rows[random_rows(len(rows), most, rng, pairs.x.device)]


def _solves_an_ode(proposal: Any) -> bool:
    return hasattr(proposal, "steps")


def _same(train: Batch, validation: Batch) -> bool:
    if len(validation) != len(train):
        return False
    return torch.equal(validation.x, train.x) and torch.equal(validation.conditions, train.conditions)


# ---- samples


class Sampler:
    """Samples of a run, as far as it has any: a finished training is judged though its chains run away."""

    def __init__(self, run: Run):
        self.run = run
        self.findings: list[Finding] = []

    @property
    def able(self) -> bool:
        """Whether there is somewhere to start from: a density's own draws, a proposal, or the method's own way."""
        own = draws_given(self.run.trained_with)
        return own or provides(self.run.energy, Sampled) or "proposal" in self.run.players

    def __call__(self, n: int, given: Tensor, seed: int) -> Tensor | None:
        """`n` for each context, `(B, n, *event)`; None, and a finding, where sampling failed."""
        try:
            return self.run.sample(n, given=given, seed=seed).x
        except InputError as error:
            text = f"Samples could not be drawn: {error}."
            advice = "Train longer, or sample with smaller steps: run.sample(n, given=…, kernel=MALA(…))."
            if not self.findings:
                self.findings.append(Finding("sampling-failed", "problem", text, {}, advice))
            return None


# ---- a few contexts, looked at


@dataclass(frozen=True)
class Shown:
    """A few contexts: `arrays` for pictures, `table` for `summary.json`."""

    arrays: dict[str, np.ndarray]
    table: dict[str, Any]


def _shown(sampler: Sampler, train: Batch, validation: Batch, seed: int) -> Shown | None:
    """Data near a few contexts beside samples for them, log Z with its error, and densities in the plane."""
    run, given = sampler.run, _some_contexts(validation, seed)
    drawn = sampler(SHOWN_EVENTS, given, derive(seed, "shown"))
    if drawn is None:
        return None
    near = [_nearest(train, c) for c in given]
    arrays = {
        "given_shown": given.cpu().numpy(),
        "samples_given": drawn.cpu().numpy(),
        "data_given": torch.cat(near).cpu().numpy(),
        "data_given_counts": np.array([len(rows) for rows in near]),
    }
    table = {"given": given.flatten(1).tolist(), **_partitions(run, given, seed)}
    grids = _grids(run, train, given, table)
    return Shown(arrays | grids, table)


def _outward(shown: Shown, coordinates: Coordinates) -> Shown:
    """What is shown, in the data's units. Densities on a grid stay on one where no axis is turned."""
    units, contexts = coordinates.events, coordinates.given
    arrays = dict(shown.arrays)
    for name in ("samples_given", "data_given"):
        arrays[name] = units.inverse(torch.from_numpy(arrays[name])).numpy()
    table = dict(shown.table)
    if contexts is not None:
        given = contexts.inverse(torch.from_numpy(arrays["given_shown"]))
        arrays["given_shown"], table["given"] = given.numpy(), given.flatten(1).tolist()
    axes = [name for name in ("grid_given_x", "grid_given_y") if name in arrays]
    if axes and units.matrix.dim() > 1:
        for name in (*axes, "log_density_given"):
            del arrays[name]
    elif axes:
        for i, name in enumerate(axes):
            arrays[name] = arrays[name] * float(units.inverse_matrix[i]) + float(units.mean[i])
        arrays["log_density_given"] = arrays["log_density_given"] + units.log_det
    return Shown(arrays, table)


def _some_contexts(pairs: Batch, seed: int) -> Tensor:
    """Distinct contexts, in order of their first number."""
    distinct = torch.unique(pairs.conditions, dim=0)
    rng = generator(derive(seed, "contexts"), distinct.device)
    rows = random_rows(len(distinct), min(SHOWN, len(distinct)), rng, distinct.device)
    return distinct[rows.sort().values]


def _nearest(pairs: Batch, context: Tensor) -> Tensor:
    """Events that were given this context, or the nearest ones where hardly any were."""
    scale = pairs.conditions.flatten(1).std(0).clamp(min=1e-12)
    away = ((pairs.conditions - context).flatten(1) / scale).square().sum(1)
    exact = (away == 0).nonzero()[:, 0]
    rows = exact if len(exact) >= 20 else away.argsort()[: max(20, len(pairs) // 20)]
    return pairs.x[some_rows(rows, SHOWN_EVENTS)]


def _partitions(run: Run, given: Tensor, seed: int) -> dict[str, Any]:
    """log Z of the shown contexts; nothing for a density, whose log Z is 0, or without a proposal."""
    if run.normalised:
        return {}
    try:
        rng = generator(derive(seed, "log Z shown"), given.device)
        draws = DRAWS_OWN // len(given) if provides(run.energy, StepwiseSolved) else MOST_DRAWS // 2
        z = run.log_partition_given(given, draws=draws, rng=rng)
    except InputError:
        return {}
    return {
        "log_z": z.value.tolist(),
        "log_z_se": z.std_error.tolist(),
        "ess": z.ess.tolist(),
        "draws": z.draws.tolist(),
    }


def _grids(run: Run, train: Batch, given: Tensor, table: dict[str, Any]) -> dict[str, np.ndarray]:
    """Log-densities on a grid, normalised by it, for events on a line or in the plane; log Z by quadrature too."""
    if (
        train.x.dim() != 2
        or train.x.shape[1] > 2
        or _solves_an_ode(run.energy.proposal if isinstance(run.energy, AsEnergy) else None)
    ):
        return {}
    box = bounding_box(train.x, 0.3)
    bound = [bind(run.energy, c[None]) for c in given]
    each = [grid_density(lambda x, e=e: e(x.to(e.given)).cpu(), box, GRID) for e in bound]
    table["log_z_on_grid"] = [density.log_partition for density in each]
    names = ("grid_given_x", "grid_given_y")
    axes = {name: axis.numpy() for name, axis in zip(names, each[0].axes, strict=False)}
    values = np.stack([density.density.clamp(min=1e-300).log().numpy() for density in each])
    return axes | {"log_density_given": values if train.x.shape[1] == 1 else values.transpose(0, 2, 1)}


# ---- numbers and words


def _scores(
    sampler: Sampler, judged: ConditionalLogProb | None, validation: Batch, seed: int
) -> dict[str, float]:
    run, scores = sampler.run, {}
    if judged is not None:
        mean, error = judged.mean_and_error()
        scores |= {"log_likelihood": mean, "log_likelihood_se": error, "cross_entropy": -mean}
        z = judged.log_partition
        if not run.normalised:
            scores["ess_proposal"] = float((z.ess / z.draws).mean())
    rows = _chosen(run, validation, seed)
    if "proposal" in run.players and not run.normalised:
        proposal = finely(run.players["proposal"])
        with torch.no_grad():
            scores["proposal_log_likelihood"] = float(log_prob_of(proposal, rows).double().mean())
    drawn = sampler(1, rows.conditions, derive(seed, "distance")) if sampler.able else None
    if drawn is not None:
        scores["energy_distance"] = _pair_distance(drawn[:, 0], rows)
    return scores


def _pair_distance(drawn: Tensor, rows: Batch) -> float:
    """Energy distance of (context, sample) to (context, datum), every number in its standard deviations."""
    sides = [torch.cat([rows.conditions.flatten(1), x.flatten(1)], 1).double() for x in (drawn, rows.x)]
    scale = sides[1].std(0).clamp(min=1e-12)
    return float(energy_distance(sides[0] / scale, sides[1] / scale))


def _doubts(judged: ConditionalLogProb | None) -> list[Finding]:
    """What speaks against log Z of the contexts."""
    if judged is None or not judged.log_partition.warnings:
        return []
    text = "log Z of contexts should not be trusted: " + "; ".join(judged.log_partition.warnings) + "."
    worst: dict[str, Any] = {"least_ess": float(judged.log_partition.ess.min())}
    advice = "Train the proposal longer or give it more capacity; ask for more draws."
    if judged.log_partition.coarse is not None and bool(judged.log_partition.coarse.any()):
        advice = "Solve the proposal's ODE in more steps: run.players['proposal'].with_steps(…) in its place."
    return [Finding("log-z-doubtful", "warning", text, worst, advice)]


def _held_out(judged: ConditionalLogProb | None, own: ConditionalLogProb | None) -> dict[str, Any]:
    """How much more likely training pairs are than held-out ones."""
    if judged is None or own is None:
        return {}
    (held, held_se), (trained, trained_se) = judged.mean_and_error(), own.mean_and_error()
    return {"held_out_energy_gap": trained - held, "held_out_energy_gap_se": math.hypot(held_se, trained_se)}
