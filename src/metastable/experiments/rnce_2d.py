"""Conditional densities in the plane: ranking noise contrast beside flows, diffusions and IBC (Section 7.2).

Six models of at most 22,000 parameters learn p(y | x) of a pinwheel, given its number of spokes, and of two
spirals, given their length. Samples are compared with the truth by the Bhattacharyya coefficient of kernel
densities, the smallest over contexts. What the paper cannot do is added: energies are normalised for each context
by importance sampling from their proposal, which is held against an integral on a grid.

The paper draws its spiral but does not define it; see `metastable.data.conditional_toy` for ours. Numbers of its
Tables 1 and 2 stand in pictures.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from metastable.api import fit
from metastable.core.batch import Batch
from metastable.core.random import derive, generator
from metastable.core.types import Energy, bind
from metastable.data import ConditionalToySet, Dataset, conditional_toy_set
from metastable.energies import AsEnergy
from metastable.energies.conditional import ConditionalNet
from metastable.evaluation.bhattacharyya import least_overlap
from metastable.evaluation.conditional import log_partition_given
from metastable.evaluation.quadrature import log_partition_quadrature
from metastable.kernels import ULA
from metastable.methods import Method
from metastable.methods.conditional_sampling import sample_from_proposal, sample_interpolating
from metastable.methods.density import Density
from metastable.methods.interpolating import InterpolatingNCE
from metastable.methods.ranking import ImplicitBC, RankingNCE
from metastable.proposals import Diffusion, DiffusionEnergy
from metastable.proposals.cnf import InterpolantFlow
from metastable.proposals.encoders import Standardise
from metastable.report.figures import MUTED, density_colours, picture
from metastable.runs.run import Run
from metastable.training.config import Adam, Schedule

from .base import Bench, Experiment, Row, WithSettings
from .finished import processes
from .trials import by_scale

SETS = ("pinwheel", "spiral")
"""Conditional toy sets, without the suffix `-given`."""
MOST_PARAMETERS = 22_000
SLACK = 0.003
"""How far below R-NCE the coefficient of I-R-NCE may be: about the spread of one training to the next."""
TRUTH, IBC, RNCE, IRNCE = "truth", "ibc", "r-nce", "i-r-nce"
DENSITIES = ("nf", "diffusion", "diffusion-phi")
GOOD = (*DENSITIES, RNCE)
"""Models that the paper finds indistinguishable."""
MODELS = (IRNCE, RNCE, IBC, *DENSITIES)
"""Those that take longest first, so that no process waits for the last of them."""


# ---- the models


@dataclass(frozen=True)
class Job(WithSettings):
    """One training: which model, on which set, from which seed, with the settings of the scale.

    `truth` is the seed of the true samples, which are the same for all models.
    """

    model: str
    toy: str
    repeat: int
    seed: int
    truth: int
    device: str
    settings: Mapping[str, Any]


def toy_of(name: str) -> ConditionalToySet:
    """The conditional toy set behind a short name."""
    return conditional_toy_set(f"{name}-given")


def build(job: Job, pairs: Batch) -> tuple[nn.Module, Method]:
    """The model, on the data's moments, and the method that trains it."""
    shape, context = tuple(pairs.x.shape[1:]), tuple(pairs.conditions.shape[1:])
    layers = {"width": job.width, "layers": 8, "seed": job.seed}
    if job.model == "nf":
        encoder = Standardise(context, pairs.given)
        settings = {"field": "residual", "encoder": encoder, "alpha": job.alpha}
        return InterpolantFlow(shape, context, data=pairs.x, **settings, **layers), Density()
    if job.model in DENSITIES:
        kind = Diffusion if job.model == "diffusion" else DiffusionEnergy
        return kind(shape, context, data=pairs, **layers), Density()
    width = job.width if job.model == IBC else job.energy_width
    settings = {"depth": 8, "time": job.model == IRNCE, "inflate": job.inflate, "seed": job.seed}
    energy = ConditionalNet(shape, context, width, data=pairs, **settings)
    if job.model == IBC:
        return energy, ImplicitBC(negatives_per_datum=job.ibc_negatives)
    proposal = {"name": "interpolant", "width": job.proposal_width, "layers": job.proposal_layers}
    proposal |= {"alpha": job.alpha, "times": job.times, **job.ode}
    turns = {"proposal_steps": job.turns[0], "energy_steps": job.turns[1]}
    settings = {"proposal": proposal, "negatives_per_datum": job.negatives, **turns}
    if job.model == RNCE:
        return energy, RankingNCE(**settings)
    return energy, InterpolatingNCE(times=job.times, **settings)


def updates(job: Job) -> int:
    """How many updates give an energy its steps, and a density its own, which cost less."""
    if job.model in DENSITIES:
        return job.density_steps
    steps = job.interpolating_steps if job.model == IRNCE else job.energy_steps
    if job.model == IBC or job.turns == (1, 1):
        return steps
    proposal, energy = job.turns
    return steps // energy * (proposal + energy)


def train(job: Job, pairs: Batch) -> Run:
    """The model after its training, on the job's device."""
    model, method = build(job, pairs)
    return fit(
        model,
        Dataset.of(pairs.x, job.toy, given=pairs.given),
        method,
        updates(job),
        seed=job.seed,
        units="none",
        batch_size=job.batch * (job.times if job.model in DENSITIES else 1),
        optimiser=Adam(job.rate),
        schedule=Schedule(job.schedule),
        device=job.device,
        evaluate=False,
    )


def density(job: Job, run: Run) -> Any:
    """The trained density, its ODE solved in the steps of the scale."""
    # what is no energy by itself is wrapped as one
    model: Any = run.energy.proposal if isinstance(run.energy, AsEnergy) else run.energy
    return model.with_steps(job.heun_steps)


def draw(job: Job, run: Run, given: Tensor, rng: torch.Generator) -> Tensor:
    """Samples for each context, `(C, n, 2)`: by the ODE of a density, by Algorithm 2 or 4 of an energy."""
    energy: Any = run.energy
    if job.model in DENSITIES:
        return density(job, run).sample(job.samples, rng, given)
    proposal: Any = run.players["proposal"]
    if job.model != IBC:
        proposal = proposal.with_steps(job.heun_steps)
    kernel = ULA(job.step_size)
    if job.model == IRNCE:
        settings = {"t_low": job.t_low, "evaluations": job.chain_steps, "kernel": kernel}
        return sample_interpolating(energy, proposal, job.samples, given, rng, **settings).x
    settings = {"kernel": kernel, "steps": job.chain_steps, "candidates": 1}  # the paper's starts
    return sample_from_proposal(energy, proposal, job.samples, given, rng, **settings).x


# ---- likelihoods


class Likelihood(NamedTuple):
    """Mean log p(y | x) on fresh data over contexts; of an energy, log Z of each by sampling and by a grid."""

    mean: float
    log_z: tuple[float, ...]
    log_z_grid: tuple[float, ...]


def on_grid(energy: Any, given: Tensor, box: float, points: int, t: float | None) -> float:
    """log ∫ exp(−E(y | given)) dy over [−box, box]² for one context, `(1, *context)`."""
    bound: Energy = bind(energy, given, t)

    def value(y: Tensor) -> Tensor:
        return bound(y.to(given)).double().cpu()

    return log_partition_quadrature(value, [(-box, box)] * 2, points)


@torch.no_grad()
def likelihood(job: Job, run: Run, given: Tensor, rng: torch.Generator) -> Likelihood:
    """Of `tested` fresh events for each context."""
    toy = toy_of(job.toy)
    y = torch.stack([toy.sample_given(v, job.tested, seed=derive(job.seed, "test")) for v in toy.values]).to(
        given
    )
    energy: Any = run.energy
    if job.model in DENSITIES:
        return Likelihood(float(density(job, run).log_prob(y, given).mean()), (), ())
    t = 1.0 if job.model == IRNCE else None
    proposal: Any = run.players["proposal"]
    if job.model != IBC:
        proposal = proposal.with_steps(*job.z_ode)
    z = log_partition_given(
        energy, proposal, given, job.draws, rng, std_error=job.z_error, most=job.most_draws, t=t
    )
    grid = [on_grid(energy, row[None], job.box, job.points, t) for row in given]
    E = bind(energy, given, t)(y.flatten(0, 1)).view(y.shape[:2]).double()
    mean = float((-E - z.value[:, None]).mean())
    return Likelihood(mean, tuple(z.value.tolist()), tuple(grid))


# ---- one model from data to numbers


class Outcome(NamedTuple):
    """What a training gave."""

    job: Job
    samples: np.ndarray  # (contexts, n, 2)
    overlap: float  # the smallest Bhattacharyya coefficient over contexts
    parameters: int
    likelihood: Likelihood
    seconds: tuple[float, float]  # training, then sampling and the rest


RECORDS = (Outcome, Job, Likelihood)


def learn(job: Job) -> Outcome:
    """Data, training, samples, their overlap with true ones, likelihood."""
    toy = toy_of(job.toy)
    began = time.perf_counter()
    run = train(job, toy.sample(job.rows, seed=derive(job.seed, "data")))
    trained = time.perf_counter()
    given = torch.stack([toy.context(value) for value in toy.values]).to(job.device)
    rng = generator(derive(job.seed, "draws"), job.device)
    with torch.no_grad():
        x = draw(job, run, given, rng).cpu()
    overlap = least_overlap(list(x), true_samples(toy, job.samples, job.truth))
    found = likelihood(job, run, given, rng)
    parameters = sum(p.numel() for player in run.players.values() for p in player.parameters())
    seconds = trained - began, time.perf_counter() - trained
    return Outcome(job, x.numpy(), overlap, parameters, found, seconds)


def true_samples(toy: ConditionalToySet, n: int, seed: int, name: str = "a") -> list[Tensor]:
    """`n` for each context that is tested; another name gives others."""
    return [toy.sample_given(value, n, seed=derive(seed, name)) for value in toy.values]


def jobs(bench: Bench) -> list[Job]:
    """All trainings; IBC more than once, for its spread."""
    todo, truth = [], derive(bench.seed, "truth") % 2**31
    for model in MODELS:
        for toy in SETS:
            for r in range(bench.repeats if model == IBC else 1):
                seed = derive(bench.seed, "rnce-2d", toy, model, r) % 2**31
                todo.append(Job(model, toy, r, seed, truth, bench.device, bench.settings))
    return todo


def learn_all(bench: Bench, todo: Sequence[Job]) -> list[Outcome]:
    """Every job, `workers` at a time: small networks keep one core busy, and no more than that."""
    named = [(f"{job.toy}, {job.settings.get('arm', job.model)}, repeat {job.repeat}", job) for job in todo]
    if bench.workers == 1:
        made = bench.finished.once
        return [tell(bench, *made(name, partial(learn, job), RECORDS, given=job)) for name, job in named]
    with processes(bench.workers) as pool:
        begin = partial(bench.finished.submit, pool, records=RECORDS)
        futures = [begin(name, learn, job) for name, job in named]
        for future in as_completed(futures):
            tell(bench, future.result())
        return [future.result() for future in futures]


def tell(bench: Bench, outcome: Outcome, before: bool = False) -> Outcome:
    """The same, once it is said."""
    job, (training, rest) = outcome.job, outcome.seconds
    bench.say(
        f"{job.toy}, {job.model}: {updates(job)} updates in {training:.0f} s, all else in {rest:.0f} s, "
        f"{outcome.parameters} parameters, log-likelihood {outcome.likelihood.mean:.3f}, "
        f"Bhattacharyya coefficient {outcome.overlap:.4f}{' (made before)' if before else ''}"
    )
    return outcome


# ---- numbers


def overlaps(outcomes: Iterable[Outcome]) -> dict[str, list[float]]:
    """Of each model's trainings."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.job.model, []).append(outcome.overlap)
    return found


def overlap_rows(
    bench: Bench, toy: str, found: Mapping[str, Sequence[float]], ceiling: float
) -> Iterator[Row]:
    """Each model against its goal, I-R-NCE against R-NCE, and IBC against all others; `ceiling` is the truth's."""
    of = {model: float(np.mean(values)) for model, values in found.items()}
    for model in sorted(of, key=[*GOOD, IRNCE, IBC].index):
        goal = (">=", bench.least_bc) if model in GOOD and bench.least_bc else (None, None)
        yield Row(f"bc/{model}/{toy}", of[model], *goal)
    yield Row(f"bc/{TRUTH}/{toy}", ceiling)
    judged = bench.least_bc is not None
    yield Row(f"bc_gain/{IRNCE}/{toy}", of[IRNCE] - of[RNCE], *((">=", -SLACK) if judged else (None, None)))
    spread = max(found[IBC]) - min(found[IBC])
    margin = min(value for model, value in of.items() if model != IBC) - of[IBC]
    yield Row(f"bc_margin/{IBC}/{toy}", margin, *((">=", spread) if judged else (None, None)))


def other_rows(toy: str, outcomes: Sequence[Outcome], seed: int) -> Iterator[Row]:
    """log Z by sampling against the grid, and likelihoods."""
    first = {o.job.model: o for o in outcomes if o.job.repeat == 0}
    for model in (RNCE, IRNCE):
        z, grid = (np.array(v) for v in first[model].likelihood[1:])
        yield Row(f"log_z_gap/{model}/{toy}", float(np.abs(z - grid).max()), "<=", 0.02)
    for model in (*GOOD, IRNCE, IBC):
        yield Row(f"log_likelihood/{model}/{toy}", first[model].likelihood.mean)
    yield Row(f"log_likelihood/{TRUTH}/{toy}", true_likelihood(toy_of(toy), seed))


def size_rows(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """Parameters of each model with its proposal, on the set where there are more of them."""
    for model in (*GOOD, IRNCE, IBC):
        most = max(o.parameters for o in outcomes if o.job.model == model)
        yield Row(f"parameters/{model}", most, "<=", MOST_PARAMETERS)


def true_likelihood(toy: ConditionalToySet, seed: int, n: int = 4096) -> float:
    """𝔼 log p(y | x) under the truth, averaged over contexts: what no model exceeds but by chance."""
    each = [toy.log_density(toy.sample_given(v, n, seed=derive(seed, "test")), v).mean() for v in toy.values]
    return float(torch.stack(each).mean())


def body(bench: Bench) -> list[Row]:
    """Every model on both sets."""
    outcomes = learn_all(bench, jobs(bench))
    seed = outcomes[0].job.truth
    rows: list[Row] = []
    others: list[Row] = []
    for name in SETS:
        toy, own = toy_of(name), [o for o in outcomes if o.job.toy == name]
        truth, second = (true_samples(toy, bench.samples, seed, which) for which in "ab")
        rows += overlap_rows(bench, name, overlaps(own), least_overlap(second, truth))
        others += other_rows(name, own, seed)
        _draw_samples(bench, name, own, truth)
    return [*rows, *others, *size_rows(outcomes)]


# ---- pictures


TITLES: Mapping[str, str] = {
    TRUTH: "truth",
    "nf": "NF",
    "diffusion": "Diffusion",
    "diffusion-phi": "Diffusion-φ",
    RNCE: "R-NCE",
    IRNCE: "I-R-NCE",
    IBC: "IBC",
}


def _draw_samples(bench: Bench, name: str, outcomes: Iterable[Outcome], truth: list[Tensor]) -> None:
    """Two-dimensional histograms of 64 bins, a row for each context and a column for each model, as Table 1."""
    toy = toy_of(name)
    samples = {o.job.model: o.samples for o in outcomes if o.job.repeat == 0}
    samples[TRUTH] = np.stack(truth)
    shape = len(toy.values), len(TITLES)
    path, edges = bench.folder / f"samples-{name}.png", np.linspace(-4, 4, 65)
    look = {"origin": "lower", "extent": (-4, 4, -4, 4), "vmin": 0, "cmap": density_colours()}
    with picture(path, 1.55 * shape[1], 1.62 * shape[0], *shape, squeeze=False) as axes:
        for column, (model, title) in zip(axes.T, TITLES.items(), strict=True):
            for ax, found in zip(column, samples[model], strict=True):
                counts, *_ = np.histogram2d(*found.T, bins=(edges, edges))
                ax.imshow(counts.T, vmax=np.quantile(counts[counts > 0], 0.98), **look)
                ax.set(xticks=[], yticks=[])
            column[0].set_title(title)
        for ax, value in zip(axes[:, 0], toy.values, strict=True):
            ax.set_ylabel(f"{value:g}")
        words = "spokes" if name == "pinwheel" else "degrees"
        axes[0, 0].figure.supylabel(words, fontsize="medium", color=MUTED)


SHARED = {
    "turns": (1, 1),
    "batch": 128,
    "rate": 3e-3,
    "schedule": "cosine",
    "width": 56,
    "energy_width": 48,
    "proposal_width": 64,
    "proposal_layers": 3,
    "inflate": 1.0,
    "alpha": 4.0,
    "negatives": 9,
    "times": 4,
    "t_low": 0.5,
    "step_size": 1e-3,
    "box": 8.0,
    "z_error": 0.004,
    "most_draws": 2**17,
}
"""What all scales have in common: Appendix B.2 but for rate, schedule, widths, inflate and times (and turns)."""

EXPERIMENT = Experiment(
    name="rnce-2d",
    title="Conditional densities in the plane: R-NCE beside flows, diffusions and IBC (Tables 1 and 2)",
    paper="Singh, Tu, Sindhwani, TMLR 2024, Section 7.2 and Appendix B.2",
    scales=by_scale(
        SHARED,
        workers=(1, 2, 12),
        rows=(10_000, 50_000, 50_000),
        density_steps=(300, 16_000, 20_000),
        energy_steps=(60, 4000, 20_000),
        interpolating_steps=(60, 10_000, 20_000),
        ode=({"steps": 8, "scored": 5}, {"steps": 12, "scored": 7}, {"steps": 16, "scored": 9}),
        ibc_negatives=(9, 63, 255),
        repeats=(2, 3, 3),
        samples=(512, 4096, 8192),
        heun_steps=(24, 128, 512),
        z_ode=((16, 9), (48, 32), (64, 64)),
        chain_steps=(60, 1000, 1000),
        tested=(200, 2000, 4096),
        draws=(2048, 8192, 16384),
        points=(201, 401, 401),
        least_bc=(None, 0.97, 0.985),
    ),
    body=body,
)
