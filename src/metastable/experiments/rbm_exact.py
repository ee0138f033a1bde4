"""Discrete energies against enumeration: Gibbs marginals, annealed log Z, trained likelihood, pattern completion.

Units are coded −1 and +1. A machine of 12 visible and 8 hidden units has 4096 visible states, so every estimate
here has an exact answer beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.random import derive, generator
from metastable.core.weights import log_mean_exp, spread_of_log_mean
from metastable.data.toy import bars_and_stripes
from metastable.energies import RBM, BoltzmannMachine
from metastable.evaluation.discrete import counting_noise, total_variation
from metastable.kernels import Flips, Gibbs, Kernel, MetropolisHastings, run_chain
from metastable.methods import ContrastiveDivergence, Jarzynski, PersistentCD
from metastable.proposals import Signs
from metastable.proposals.signs import log_2cosh, state_numbers, states
from metastable.report.figures import draw_level, palette, picture
from metastable.runs.run import Run
from metastable.training.config import Adam, Schedule
from metastable.walkers.smc import ais

from .base import Bench, Experiment, Row
from .rbm_memory import draw_memory, memory_rows, sheet
from .trials import Arm, Problem, Trial, Trials, by_scale, draw_curves

VISIBLE, HIDDEN = 12, 8
COUPLING = 0.4
"""Standard deviation of the target's weights: strong enough that units are far from independent."""


# --- targets ------------------------------------------------------------------------------------------------


def target_rbm(visible: int = VISIBLE, hidden: int = HIDDEN, coupling: float = COUPLING) -> RBM:
    """A machine with random weights and biases, float64; the same one whatever the seed of the experiment."""
    rng = generator(derive(0, "target", visible, hidden))
    weight = coupling * torch.randn(visible, hidden, generator=rng, dtype=torch.float64)
    a, b = (0.3 * torch.randn(n, generator=rng, dtype=torch.float64) for n in (visible, hidden))
    return RBM.of(weight, a, b)


def target_boltzmann(units: int = VISIBLE) -> BoltzmannMachine:
    """A machine with random couplings of the size 1/√d, float64; always the same one."""
    rng = generator(derive(0, "boltzmann", units))
    raw = torch.randn(units, units, generator=rng, dtype=torch.float64).triu(1) / math.sqrt(units)
    return BoltzmannMachine.of(raw + raw.T, 0.3 * torch.randn(units, generator=rng, dtype=torch.float64))


def relaxation_time(energy: RBM) -> float:
    """Sweeps in which the slowest part of block Gibbs falls by e: −1/log λ₂, from the exact transition matrix.

    The chain h → v → h has the eigenvalues of v → h → v beyond zeros, and fewer states.
    """
    with torch.no_grad():
        log_h, log_v = (_block_log_probabilities(energy, layer) for layer in ("hidden", "visible"))
        step = log_v.exp() @ log_h.exp()
    return -1 / math.log(float(torch.linalg.eigvals(step).abs().sort().values[-2]))


def _block_log_probabilities(energy: RBM, drawn: str) -> Tensor:
    """log p(drawn layer | other layer) for all pairs of states, one row for each state of the other layer."""
    layers = energy.structure() if drawn == "hidden" else energy.structure().transposed()
    given, new = (states(n) for n in layers.weight.shape)
    field = layers.hidden_field(given)
    return field @ new.T - log_2cosh(field).sum(1, keepdim=True)


# --- marginals ----------------------------------------------------------------------------------------------


class Marginal(NamedTuple):
    """Probabilities of all states, exact and as frequencies, and what independent draws would leave."""

    exact: Tensor
    found: Tensor
    noise: float

    @property
    def distance(self) -> float:
        """Total variation."""
        return float(total_variation(self.exact, self.found))


def marginal(energy: Any, kernel: Kernel, chains: int, burn_in: int, kept: int, seed: int) -> Marginal:
    """Frequencies of `kept` sweeps of `chains` chains from random signs, against enumeration."""
    rng = generator(derive(seed, "marginal", kernel.name))
    x = Signs.uniform(energy.event_shape).sample(chains, rng).double()
    state = run_chain(kernel, energy, kernel.init(energy, x), burn_in, rng).state
    exact = energy.exact_probabilities()
    counts = torch.zeros(len(exact), dtype=torch.int64)
    for _ in range(kept):
        state = run_chain(kernel, energy, state, 1, rng).state
        counts += torch.bincount(state_numbers(state.x), minlength=len(exact))
    return Marginal(exact, counts.double() / counts.sum(), counting_noise(exact, chains * kept))


def marginals(bench: Bench) -> dict[str, Marginal]:
    """The restricted machine in blocks and by single flips, and a Boltzmann machine unit by unit."""
    rbm, machine = target_rbm(), target_boltzmann()
    members: dict[str, tuple[Any, Kernel, int]] = {
        "gibbs": (rbm, Gibbs(), bench.burn_in),
        "gibbs, boltzmann machine": (machine, Gibbs(order="random"), bench.burn_in),
        "metropolis-hastings": (rbm, MetropolisHastings(Flips(1 / VISIBLE)), 3 * bench.burn_in),
    }
    return {
        name: marginal(energy, kernel, bench.chains, burn_in, bench.kept, bench.seed)
        for name, (energy, kernel, burn_in) in members.items()
        if name in bench.samplers
    }


# --- log Z --------------------------------------------------------------------------------------------------


class Estimates(NamedTuple):
    """Annealed estimates of log Z over seeds, `(S,)`, their standard errors, and the exact value."""

    values: Tensor
    errors: Tensor
    exact: float

    @property
    def scores(self) -> Tensor:
        """|value − exact| in standard errors."""
        return (self.values - self.exact).abs() / self.errors


def annealed(energy: RBM, seeds: int, walkers: int, groups: int, temperatures: int, seed: int) -> Estimates:
    """One run of annealed importance sampling from uniform signs for each seed; errors from groups of walkers."""
    reference = Signs.uniform(energy.event_shape, energy.weight.detach())
    values, errors = [], []
    for k in range(seeds):
        rng = generator(derive(seed, "ais", k))
        run = ais(energy, reference, walkers, temperatures, Gibbs(), 1, rng)
        each = log_mean_exp(run.log_weight.view(groups, -1))
        values.append(log_mean_exp(each))
        errors.append(spread_of_log_mean(each))
    return Estimates(torch.stack(values), torch.stack(errors), float(energy.log_partition()))


# --- training -----------------------------------------------------------------------------------------------


class Learned(NamedTuple):
    """Exact draws of a trained machine, `(64, *event)`, and its exact KL(data ‖ model)."""

    drawn: Tensor
    kl: float


def exact_kl(truth: Tensor, model: RBM) -> float:
    """Σ p log(p/q) over all states; `truth` is `(2^V,)` and may hold zeros."""
    known = truth > 0
    return float((truth[known] * (truth[known].log() - model.exact_probabilities()[known].log())).sum())


METHODS = ("cd-1", "cd-10", "pcd", "jarzynski")


def arms(bench: Bench, names: Iterable[str]) -> list[Arm]:
    """Those of `METHODS` that are named, all with block Gibbs sweeps."""
    chains = {"kernel": Gibbs(), "steps": 5, "walkers": bench.walkers}
    known = {
        "cd-1": ContrastiveDivergence(kernel=Gibbs(), steps=1),
        "cd-10": ContrastiveDivergence(kernel=Gibbs(), steps=10),
        "pcd": PersistentCD(**chains),
        "jarzynski": Jarzynski(**chains, pace=None),
    }
    return [Arm(name, known[name]) for name in names]


def learn(
    bench: Bench, names: Iterable[str], data: Tensor, truth: Tensor, hidden: int, steps: int
) -> dict[str, Trial]:
    """Train a machine by each method and follow its exact distance to `truth`."""

    def problem(arm: Arm, seed: int) -> Problem:
        return Problem(RBM(tuple(data.shape[1:]), hidden, seed=derive(seed, "student") % 2**31), data)

    def keep(trial: Trial, at: Problem, run: Run) -> Learned:
        return Learned(at.model.sample(64, generator(derive(bench.seed, "shown"))), exact_kl(truth, at.model))

    settings = {
        "steps": steps,
        "batch_size": 256,
        "optimiser": Adam(0.02),
        "schedule": Schedule("cosine"),
        "log_every": max(1, steps // 40),
        "device": "cpu",
    }
    found = Trials(
        arms(bench, names),
        problem,
        settings,
        seed=lambda bench, arm, repeat: bench.seed,
        watch=lambda at, line: {"kl": exact_kl(truth, at.model)},
        keep=keep,
        words=lambda trial: f"KL(truth ‖ student) = {trial.kept.kl:.4f}",
        records=(Learned,),
    ).run(bench)
    return {name: trial for name, (trial,) in found.items()}


def independent_kl(truth: Tensor, data: Tensor) -> float:
    """KL(truth ‖ independent units with the data's means): what a machine without weights can reach."""
    bare = RBM(tuple(data.shape[1:]), 1, scale=0.0)
    with torch.no_grad():
        bare.visible_bias.copy_(torch.atanh(data.flatten(1).mean(0).clamp(-1 + 1e-6, 1 - 1e-6)))
    return exact_kl(truth, bare)


def students(bench: Bench) -> tuple[dict[str, Trial], float]:
    """Every method on rows of the target, and the KL of independent units."""
    teacher = target_rbm()
    truth = teacher.exact_probabilities()
    data = teacher.sample(bench.rows, generator(derive(bench.seed, "rows"))).float()
    return learn(bench, bench.methods, data, truth, HIDDEN, bench.steps), independent_kl(truth, data)


def bars(bench: Bench) -> dict[str, Trial]:
    """Machines trained on bars and stripes: a few patterns far apart, which persistent chains follow badly."""
    patterns = bars_and_stripes(bench.side)
    truth = torch.zeros(2 ** patterns[0].numel(), dtype=torch.float64)
    truth[state_numbers(patterns)] = 1 / len(patterns)
    data = patterns.repeat(20, 1, 1, 1)
    return learn(bench, bench.bars_methods, data, truth, bench.bars_hidden, bench.bars_steps)


# --- the experiment -----------------------------------------------------------------------------------------


def body(bench: Bench) -> list[Row]:
    """Rows of all four parts, and their pictures."""
    found = marginals(bench)
    for name, m in found.items():
        bench.say(f"{name}: total variation {m.distance:.4f}, {m.noise:.4f} for independent draws")
    sizes = {f"{v}x{h}": (v, h) for v, h in bench.machines}
    estimates = {}
    for name, (v, h) in sizes.items():
        energy = target_rbm(v, h, COUPLING * math.sqrt(VISIBLE / v))
        temperatures = bench.temperatures if v == VISIBLE else 2 * bench.temperatures
        estimates[name] = annealed(
            energy, bench.seeds, bench.ais_walkers, bench.groups, temperatures, bench.seed
        )
        bench.say(
            f"annealed log Z, {name}: at most {float(estimates[name].scores.max()):.2f} standard errors off"
        )
    trained, alone = students(bench)
    on_bars = bars(bench)
    _draw_marginals(bench, found)
    _draw_log_z(bench, estimates)
    _draw_training(bench, trained, alone, on_bars)
    draw_memory(bench)
    return [*_rows(bench, found, estimates, trained, alone, on_bars), *memory_rows(bench)]


def _rows(
    bench: Bench,
    found: dict[str, Marginal],
    estimates: dict[str, Estimates],
    trained: dict[str, Trial],
    alone: float,
    on_bars: dict[str, Trial],
) -> list[Row]:
    """Marginals, log Z, and students."""
    rows = [Row("relaxation_sweeps/gibbs", relaxation_time(target_rbm()))]
    for name, m in found.items():
        key = name.replace(", ", "/").replace(" ", "-")
        rows += [
            Row(f"total_variation/{key}", m.distance, "<=", bench.tv_target),
            Row(f"total_variation_of_independent_draws/{key}", m.noise),
        ]
    for name, e in estimates.items():
        rows += [
            Row(f"log_z_worst_z/{name}", float(e.scores.max()), "<=", 3.0),
            Row(f"log_z_seeds_within_3_std_errors/{name}", float((e.scores <= 3).sum()), ">=", len(e.values)),
            Row(f"log_z_median_std_error/{name}", float(e.errors.median())),
            Row(f"log_z_mean_error/{name}", float(e.values.mean()) - e.exact),
            Row(f"log_z_exact/{name}", e.exact),
        ]
    rows.append(Row("kl_exact/independent-units", alone))
    for name, trial in trained.items():
        target = bench.kl_targets.get(name)
        rows.append(Row(f"kl_exact/{name}", trial.kept.kl, "<=" if target else None, target))
    return rows + [Row(f"kl_exact/bars-and-stripes/{name}", t.kept.kl) for name, t in on_bars.items()]


# --- pictures -----------------------------------------------------------------------------------------------


def _draw_marginals(bench: Bench, found: dict[str, Marginal]) -> None:
    """Exact probabilities against frequencies."""
    size = 3.3 * len(found) + 0.6, 3.4
    with picture(bench.folder / "marginals.png", *size, 1, len(found), sharey=True, squeeze=False) as panels:
        for axes, (name, m) in zip(panels[0], found.items(), strict=True):
            seen = m.found > 0
            low = float(m.exact.min()) / 2
            axes.plot([low, 1], [low, 1], color="black", lw=0.8)
            axes.scatter(m.exact[seen], m.found[seen], s=4, alpha=0.35, color=palette.blue, linewidths=0)
            axes.set(xscale="log", yscale="log", xlabel="exact probability", xlim=(low, 1), ylim=(low, 1))
            axes.set_xticks([10.0**k for k in range(-8, 1, 2) if 10.0**k >= low])
            axes.set_title(f"{name}\ntotal variation {m.distance:.4f}", fontsize=9)
        panels[0, 0].set_ylabel("frequency")


def _draw_log_z(bench: Bench, estimates: dict[str, Estimates]) -> None:
    """log Z with error bars against the exact value."""
    with picture(
        bench.folder / "log-z.png", 4.4 * len(estimates), 3.0, 1, len(estimates), squeeze=False
    ) as panels:
        for axes, (name, e) in zip(panels[0], estimates.items(), strict=True):
            seeds, look = range(len(e.values)), {"fmt": "o", "ms": 3, "lw": 1, "color": palette.blue}
            axes.axhline(0, color="black", lw=0.8)
            axes.errorbar(seeds, e.values - e.exact, 3 * e.errors, **look)
            axes.set(title=f"log Z of {name}, ± 3 standard errors", xlabel="seed", ylabel="estimate − exact")
            axes.set_xlim(-1, len(seeds))
            axes.set_xticks(range(0, len(seeds), 5))


def _draw_training(bench: Bench, trained: dict[str, Trial], alone: float, on_bars: dict[str, Trial]) -> None:
    """Exact KL along training, and exact draws of the machines that learned bars and stripes."""
    count, widths = len(on_bars), [1.8, *[1] * len(on_bars)]
    with picture(
        bench.folder / "training.png", 4.6 + 2.4 * count, 3.2, 1, 1 + count, width_ratios=widths
    ) as all_axes:
        left, *panels = all_axes
        for (name, trial), colour in zip(trained.items(), palette, strict=False):
            draw_curves(left, [trial], "kl", colour, name)
        draw_level(left, alone, label="independent units")
        left.set(title="KL(teacher ‖ student), exact", xlabel="update", yscale="log")
        left.legend(fontsize=7)
        for axes, (name, trial) in zip(panels, on_bars.items(), strict=True):
            axes.imshow(
                sheet(trial.kept.drawn[:, 0], 8, 0.3), cmap="gray", vmin=-1, vmax=1, interpolation="nearest"
            )
            axes.set_title(f"bars and stripes, {name}\nKL {trial.kept.kl:.2f}", fontsize=8)
            axes.set_axis_off()


EXPERIMENT = Experiment(
    name="rbm-exact",
    title="Boltzmann machines against enumeration: Gibbs, annealed log Z, CD and PCD, pattern completion",
    paper="Xu, thesis 2022, Sections 2.1.3 and 2.2.2; no numbers there to compare with",
    scales=by_scale(
        {"burn_in": 200, "tv_target": 0.02, "seeds": 20},
        samplers=(("gibbs",), ("gibbs", "gibbs, boltzmann machine", "metropolis-hastings")),
        chains=(40_000, 100_000),
        kept=(100, 200),
        machines=(((VISIBLE, HIDDEN),), ((VISIBLE, HIDDEN), (100, 16))),
        ais_walkers=(500, 1000),
        groups=(50, 100),
        temperatures=(60, 200),
        rows=(4000, 10_000),
        methods=(("cd-1", "pcd"), METHODS),
        walkers=(500, 1000),
        steps=(400, 2000),
        kl_targets=({"cd-1": 0.1, "pcd": 0.1}, {"cd-10": 0.02, "pcd": 0.02, "jarzynski": 0.02}),
        side=(3, 4),
        bars_hidden=(12, 24),
        bars_steps=(300, 1500),
        bars_methods=(("cd-10",), ("cd-10", "pcd", "jarzynski")),
        units=(100, 200),
        loads=((0.05, 0.1), (0.05, 0.1, 0.14, 0.2, 0.3)),
        repeats=(10, 20),
    ),
    body=body,
)
