"""What an update costs: Jarzynski beside persistent contrastive divergence, noise contrast beside a loop by hand.

Jarzynski and PCD train the same energy on the same data, full batch, through the real training loop, with as many
walkers in all and the same kernel; resampling happens as often as it does in training. Jarzynski as it is by
default is timed beside the same moves without what looks after them: no step that tunes itself, no bound on the
pace, none of the meters. The β objective is timed beside plain training on the same chains. A method of noise
contrast goes through the same loop, beside plain torch code that makes the same update and nothing else: no
metrics, no guard, no schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from metastable.core.denormals import flushed
from metastable.core.weights import log_mean_exp
from metastable.energies import MLP, Tilted
from metastable.experiments.base import Row
from metastable.experiments.gmm import rates, student, teacher
from metastable.kernels import MALA
from metastable.methods import NCE, Context, Jarzynski, Method, PersistentCD, RankingNCE, Robust
from metastable.methods.base import Metrics
from metastable.methods.jarzynski import Followed, JarzynskiState
from metastable.proposals import Gaussian, fit_gaussian
from metastable.training.config import Adam, TrainerConfig
from metastable.training.engine import Engine
from metastable.training.trainer import Trainer

from .memory import peak_of, returned_by
from .timing import by_turns, machine, on_cores, pooled, rotated

PAPER = 36 / 34
"""Hours that the paper's CIFAR-10 training took: its method over PCD."""
TARGETS = {"mlp": 1.10, "mixture": 1.30}
CONTRAST_TARGET = 1.05
BETA_TARGET = 1.02
CARE_TARGET = 1.03
BETA = 0.1
BUILDS = 12
"""Trainings of each kind that two updates of nearly the same cost are timed on."""
LEARNING_RATE = 1e-3
NEGATIVES = 4
"""For each datum, in ranking NCE."""
MEMORY_TARGET = 1.5
STEP_SIZE = 0.1


def run(
    *,
    dim: int = 50,
    walkers: int = 10_000,
    data: int = 10_000,
    hidden: Sequence[int] = (128, 128),
    updates: int = 10,
    rounds: int = 25,
    warmup: int = 20,
    batch: int = 4096,
    memory_walkers: int = 100_000,
    memory_updates: int = 3,
    cores: int | None = None,
    seed: int = 0,
    device: str | None = None,
) -> list[Row]:
    """Ratios of update times, and the peak memory of a large training.

    Args:
        dim: d.
        walkers: N of every method; Jarzynski's count includes those that are held out.
        data: rows, all of them in every update.
        hidden: widths of the network.
        updates: in one timing.
        rounds: timings of each method.
        warmup: updates before the first timing.
        batch: data rows of an update of noise contrast.
        memory_walkers: N, and data rows, of the training whose memory is measured.
        memory_updates: its updates.
        cores: CPUs to use; by default as many as torch does.
        seed: of every random number.
        device: `cpu`, or a GPU; the one that is there by default.
    """
    home = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with on_cores(cores):
        x = teacher(data, dim, -10.0, 6.0, 0.25, seed).x.to(home)
        rows: list[Row] = []
        for name, make in _energies(x, hidden, seed).items():
            trainers = {label: make(method) for label, method in methods(walkers).items()}
            rows += _rows(name, trainers, updates, rounds, warmup)
        make = _energies(x, hidden, seed)["mlp"]
        rows += _near_rows("robust", BETA_TARGET, make, plain_and_robust(walkers), updates, rounds, warmup)
        rows += _near_rows("care", CARE_TARGET, make, plain_and_careful(walkers), updates, rounds, warmup)
        for name in CONTRASTS:
            settings = {"dim": dim, "batch": batch, "hidden": list(hidden), "updates": updates}
            settings |= {"rounds": rounds, "warmup": warmup, "cores": cores, "seed": seed, "device": home}
            found = returned_by(time_contrast, name=name, **settings)
            rows += [
                Row(f"step_cost_ratio/{name}", found["ratio"], "<=", CONTRAST_TARGET),
                Row(f"update_ms/{name}", found["ours_ms"]),
                Row(f"update_ms/{name}/by_hand", found["hand_ms"]),
            ]
        large = {"dim": dim, "walkers": memory_walkers, "hidden": list(hidden)}
        measure = peak_of if home == "cpu" else returned_by  # which returns the most that the GPU held
        peak = measure(train_large, updates=memory_updates, seed=seed, device=home, **large)
        rows.append(Row(f"peak_memory_gb/N={short(memory_walkers)}", peak / 1e9, "<=", MEMORY_TARGET))
        return rows + machine()


def methods(walkers: int) -> dict[str, Method]:
    """What is compared; `paper` is Algorithm 1 as printed, in which every walker steers."""
    return {
        "pcd": PersistentCD(walkers=walkers, step_size=STEP_SIZE),
        "jarzynski": Jarzynski(walkers=walkers, step_size=STEP_SIZE, pace=None),
        "paper": Jarzynski(walkers=walkers, step_size=STEP_SIZE, held_out=0.0, pace=None),
    }


def _energies(x: Tensor, hidden: Sequence[int], seed: int) -> dict[str, Callable[[Method], Trainer]]:
    dim = x.shape[1]
    return {
        "mlp": lambda method: trainer(network(x, hidden, seed), x, method, Adam(1e-3), seed),
        "mixture": lambda method: trainer(
            student(dim, seed).to(x.device), x, method, rates(0.025, 0.125), seed
        ),
    }


def network(x: Tensor, hidden: Sequence[int], seed: int) -> nn.Module:
    """A perceptron on top of a Gaussian with the data's mean and variances, from which walkers start exactly."""
    reference = Gaussian(x.mean(0), 1.2 * x.std(0))
    return Tilted(reference, MLP(x.shape[1], tuple(hidden), seed=seed)).to(x.device)


def trainer(energy: nn.Module, x: Tensor, method: Method, optimiser: Callable, seed: int) -> Trainer:
    """A training that has begun, in memory."""
    config = TrainerConfig(batch_size=None, optimiser=optimiser, device=str(x.device))
    noise, companions = fit_gaussian(x), {}
    for name, module in method.companions(energy, x, noise, seed).items():
        companions[name] = module.to(x.device)
    training = Trainer(
        energy,
        {"energy": energy, **companions},
        x,
        method,
        config,
        noise=noise,
        engine=Engine(str(x.device)),
        make_context=Context,
        seed=seed,
    )
    training._begin()
    return training


def advance(training: Trainer, updates: int) -> None:
    """So many updates, with their log lines, until they are done."""
    with flushed():  # as in `Trainer.run`
        end = training.context.step + updates
        while training.context.step < end:
            training._update(min(training._unseen(), end - training.context.step))
            training._after_update()
    if training.engine.device.type == "cuda":
        torch.cuda.synchronize()


def _rows(name: str, trainers: dict[str, Trainer], updates: int, rounds: int, warmup: int) -> list[Row]:
    for training in trainers.values():
        advance(training, warmup)
    cases = {label: lambda t=training: advance(t, updates) for label, training in trainers.items()}
    times = by_turns(cases, rounds)
    steering = trainers["jarzynski"].state.steering
    per_update = float(steering.resamplings.double().mean()) / trainers["jarzynski"].context.step
    return [
        Row(f"step_cost_ratio/{name}", times.ratio("jarzynski", "pcd"), "<=", TARGETS[name], round(PAPER, 2)),
        Row(f"step_cost_ratio/{name}/held_out=0", times.ratio("paper", "pcd"), paper=round(PAPER, 2)),
        *(Row(f"update_ms/{name}/{c}", 1e3 * times.median(c) / updates) for c in ("jarzynski", "pcd")),
        Row(f"resamplings_per_update/{name}", per_update),
    ]


# ---- two updates of nearly the same cost: the β objective, and what looks after steps and weights


def plain_and_robust(walkers: int) -> dict[str, Method]:
    """Persistent chains, the same ones as the source of the β objective, and the first once more, as a control."""
    plain = PersistentCD(walkers=walkers, step_size=STEP_SIZE)
    return {"plain": plain, "robust": Robust(source=plain, beta=BETA), "again": plain}


@dataclass(frozen=True)
class Unwatched(Jarzynski):
    """Jarzynski with the metrics that training cannot do without."""

    def _metrics(
        self, context: Context, state: JarzynskiState, steering: Followed, following: Followed | None
    ) -> Metrics:
        log_z = (following or steering).walkers.log_partition()
        return {
            "displacement": steering.move.moved.mean().sqrt() / context.data_scale,
            "acceptance": steering.move.acceptance.mean(),
            "ess": steering.ess[0],
            "log_z": log_mean_exp(log_z),
            "log_z_se": log_z.std() / math.sqrt(len(log_z)),
        }


def plain_and_careful(walkers: int) -> dict[str, Method]:
    """Jarzynski by default, the same moves with a fixed step, free pace and no meters, and these once more."""
    plain = Unwatched(walkers=walkers, kernel=MALA(STEP_SIZE), pace=None)
    return {"plain": plain, "care": Jarzynski(walkers=walkers), "again": plain}


def _near_rows(
    name: str,
    target: float,
    make: Callable[[Method], Trainer],
    methods: dict[str, Method],
    updates: int,
    rounds: int,
    warmup: int,
) -> list[Row]:
    """The limit is near: turns are single updates, and trainings are built afresh several times.

    Where its arrays happen to lie in memory makes a training faster or slower by a percent or two for as long as it
    lives. So there are two trainings of the plain kind, one for `name` to be timed beside and one for a control,
    and each of the three is the first to be built as often.
    """
    parts = []
    for build in range(BUILDS):
        trainers = {label: make(methods[label]) for label in rotated(methods, build)}
        for training in trainers.values():
            advance(training, math.ceil(warmup / 4))
        cases = {label: lambda t=training: advance(t, 1) for label, training in trainers.items()}
        parts.append(by_turns(cases, math.ceil(2 * rounds * updates / BUILDS)))
    times = pooled(parts)
    return [
        Row(f"step_cost_ratio/{name}", times.ratio(name, "plain"), "<=", target),
        Row(f"step_cost_ratio/{name}/control", times.ratio("again", "plain")),
        Row(f"update_ms/{name}", 1e3 * times.median(name)),
        Row(f"update_ms/{name}/plain", 1e3 * times.median("plain")),
    ]


# ---- noise contrast beside a loop by hand

ByHand = Callable[[nn.Module, Tensor, torch.Generator], Callable[[], None]]


def nce_by_hand(energy: nn.Module, x: Tensor, rng: torch.Generator) -> Callable[[], None]:
    """An update of binary NCE as plain torch code: Gaussian noise, one forward pass, a learned log Z, Adam."""
    mean, factor, log_noise = _gaussian_by_hand(x)
    c = nn.Parameter(x.new_zeros(()))
    optimiser = torch.optim.AdamW([*energy.parameters(), c], LEARNING_RATE, weight_decay=0.0)

    def update() -> None:
        y = mean + torch.randn(x.shape, generator=rng, device=x.device) @ factor.T
        points = torch.cat([x, y])
        G = -energy(points) - c - log_noise(points)
        loss = softplus(-G[: len(x)]).mean() + softplus(G[len(x) :]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return update


def ranking_by_hand(energy: nn.Module, x: Tensor, rng: torch.Generator) -> Callable[[], None]:
    """An update of ranking NCE as plain torch code: Gaussian negatives, one forward pass, a softmax, Adam."""
    mean, factor, log_noise = _gaussian_by_hand(x)
    optimiser = torch.optim.AdamW(energy.parameters(), LEARNING_RATE, weight_decay=0.0)

    def update() -> None:
        y = mean + torch.randn((NEGATIVES * len(x), x.shape[1]), generator=rng, device=x.device) @ factor.T
        points = torch.cat([x, y])
        r = -energy(points) - log_noise(points)
        loss = softplus(r[len(x) :].view(-1, NEGATIVES).logsumexp(1) - r[: len(x)]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return update


def _gaussian_by_hand(x: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Mean, Cholesky factor and log-density of the Gaussian with the moments of `x`."""
    mean, factor = x.mean(0), torch.linalg.cholesky(x.T.cov(correction=0))
    constant = factor.diagonal().log().sum() + 0.5 * len(mean) * math.log(2 * math.pi)

    def log_noise(x: Tensor) -> Tensor:
        white = torch.linalg.solve_triangular(factor, (x - mean).T, upper=False)
        return -0.5 * white.square().sum(0) - constant

    return mean, factor, log_noise


CONTRASTS: dict[str, tuple[Method, ByHand]] = {
    "nce": (NCE(), nce_by_hand),
    "ranking-nce": (RankingNCE(negatives_per_datum=NEGATIVES), ranking_by_hand),
}
"""Methods of noise contrast by name, each with the loop that it is timed beside."""


def time_contrast(
    name: str,
    dim: int,
    batch: int,
    hidden: list[int],
    updates: int,
    rounds: int,
    warmup: int,
    cores: int | None,
    seed: int,
    device: str = "cpu",
) -> dict[str, float]:
    """A method of noise contrast beside its loop by hand: the ratio of their times, and milliseconds an update."""
    method, by_hand = CONTRASTS[name]
    with on_cores(cores):
        x = teacher(batch, dim, -10.0, 6.0, 0.25, seed).x.to(device)
        training = trainer(network(x, hidden, seed), x, method, Adam(LEARNING_RATE), seed)
        update = by_hand(network(x, hidden, seed), x, torch.Generator(device).manual_seed(seed))

        advance(training, warmup)
        for _ in range(warmup):
            update()
        wait = torch.cuda.synchronize if device != "cpu" else lambda: None
        cases = {"ours": lambda: advance(training, 1), "hand": lambda: (update(), wait())}
        # the limit is near: an update is short, and its time spreads
        times = by_turns(cases, 2 * rounds * updates)
    return {
        "ratio": times.ratio("ours", "hand"),
        "ours_ms": 1e3 * times.median("ours"),
        "hand_ms": 1e3 * times.median("hand"),
    }


def train_large(
    dim: int, walkers: int, hidden: list[int], updates: int, seed: int, device: str = "cpu"
) -> int:
    """The training whose memory is measured: N walkers and as many data rows, full batch; bytes of the GPU."""
    x = torch.randn((walkers, dim), generator=torch.Generator().manual_seed(seed)).to(device)
    method = Jarzynski(walkers=walkers, step_size=STEP_SIZE, pace=None)
    advance(trainer(network(x, hidden, seed), x, method, Adam(1e-3), seed), updates)
    return torch.cuda.max_memory_allocated() if device != "cpu" else 0


def short(count: int) -> str:
    """A count as a label.

    >>> short(100_000), short(2500)
    ('1e5', '2500')
    """
    power = round(math.log10(count))
    return f"1e{power}" if count == 10**power and power > 3 else str(count)
