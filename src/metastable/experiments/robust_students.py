"""Students of `robust-toy`: the two sets, the paper's setups, training side by side, and scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metastable.core.random import derive, generator
from metastable.evaluation.distances import energy_distance
from metastable.evaluation.quadrature import kl_on_grid
from metastable.methods import robust_loss

from .base import Bench
from .batched_nets import BatchedNets, OneNet
from .finished import Slot

SIZES, SLOPE = (2, 32, 64, 64, 64), 0.05
"""ToyNet: hidden layers, and the leaky ReLU."""

EPSILON = 0.015

TEMPERATURE = EPSILON**2 / 2

SPREAD = 0.15
"""Standard deviation of a mode, and of a ring's radius."""

BETAS = (0.0, 0.1, 0.5, 0.9)

VARIANTS = ("default", "no-positive", "batch-corrected", "true-objective")

STEPS, DEFAULT = 20, "default"

LONGER = 10
"""Size of a step from a shifted start."""

POINTS = 401
"""Of the grid, along each axis."""


@dataclass(frozen=True)
class Toy:
    """A set with an exact density, and how it is trained in the default setup.

    Attributes:
        name: of the set.
        draw: `(shape, rng)` to draws `(*shape, 2)` on the generator's device, in operations that can be captured.
        log_density: normalised, `(B, 2)` to `(B,)`.
        half_width: of the box on which densities are compared.
        start: standard deviation of the Gaussian from which chains start.
        positives: data in a batch.
        negatives: chains in a batch.
    """

    name: str
    draw: Callable[[tuple[int, ...], torch.Generator], Tensor]
    log_density: Callable[[Tensor], Tensor]
    half_width: float
    start: float
    positives: int
    negatives: int

    @property
    def box(self) -> tuple[tuple[float, float], ...]:
        """The square that holds it."""
        return ((-self.half_width, self.half_width),) * 2

    def kl_of_uniform(self) -> float:
        """KL(p_data ‖ uniform on the box), what a model that knows nothing has."""
        return kl_on_grid(self.log_density, lambda x: torch.zeros_like(x[:, 0]), self.box, POINTS)


def _around(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], -1)


def draw_gaussians(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Modes on the unit circle, mode k of mass k/36."""
    u = torch.rand(shape, generator=rng, device=rng.device)
    k = torch.ceil((torch.sqrt(1 + 288 * u) - 1) / 2).clamp(1, 8)  # the first with k(k + 1)/72 ≥ u
    noise = torch.randn((*shape, 2), generator=rng, device=rng.device)
    return _around((k - 1) * (math.pi / 4)) + SPREAD * noise


def log_gaussians(x: Tensor) -> Tensor:
    """log p of the modes."""
    k = torch.arange(1.0, 9.0, dtype=x.dtype, device=x.device)
    squared = (x[:, None] - _around((k - 1) * (math.pi / 4))).square().sum(-1) / SPREAD**2
    return torch.logsumexp(torch.log(k / 36) - squared / 2, -1) - math.log(2 * math.pi * SPREAD**2)


def draw_circles(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Radius N(k, 0.15²) with k = 1, 2, 3 or 4, at a uniform angle."""
    angle = 2 * math.pi * torch.rand(shape, generator=rng, device=rng.device)
    k = torch.randint(1, 5, shape, generator=rng, device=rng.device)
    radius = k + SPREAD * torch.randn(shape, generator=rng, device=rng.device)
    return radius[..., None] * _around(angle)


def log_circles(x: Tensor) -> Tensor:
    """log p of the rings, N(r; k, 0.15²)/(2πr) each."""
    # at the origin both are e⁻²², whatever is divided by
    r = torch.linalg.vector_norm(x, dim=-1).clamp(min=1e-6)
    k = torch.arange(1.0, 5.0, dtype=x.dtype, device=x.device)
    along = torch.logsumexp(-((r[:, None] - k) / SPREAD).square() / 2, -1)
    return along - r.log() - math.log(4 * 2 * math.pi * SPREAD * math.sqrt(2 * math.pi))


TOYS = {
    "gaussians": Toy("gaussians", draw_gaussians, log_gaussians, 3.0, 1.0, positives=50, negatives=20),
    "circles": Toy("circles", draw_circles, log_circles, 6.0, 2.0, positives=100, negatives=100),
}


@dataclass(frozen=True)
class Student:
    """One model to train: its β, the variant of the objective, and where its chains start."""

    beta: float
    variant: str = "default"
    shifted: bool = False

    @property
    def objective(self) -> tuple[bool, str]:
        """Whether it is plain training, which has no variants; and the variant."""
        return self.beta > 0, self.variant


@dataclass(frozen=True)
class Setup:
    """Students that see batches of one shape, and so train as one.

    Attributes:
        name: `default`, `longer`, `restricted` or `degenerate`.
        toy: the set.
        students: what is trained.
        negatives: M, chains in a batch.
        steps: of each chain.
        times: how many times as many updates as the others.
        epsilon: ε, the noise of a step of size 1.
        shift: where a shifted start lies, in standard deviations of the default start along each axis.
        quiet: whether longer steps have the noise of a step of size 1; all students are shifted then.
        falls: whether the learning rate does.
        tempered: whether β weighs f/T, so that it means what it says, or f itself.
    """

    name: str
    toy: Toy
    students: tuple[Student, ...]
    negatives: int
    steps: int = STEPS
    times: int = 1
    epsilon: float = EPSILON
    shift: float = 1.0
    quiet: bool = False
    falls: bool = True
    tempered: bool = True

    @property
    def positives(self) -> int:
        """N, data in a batch."""
        return self.toy.positives

    @property
    def temperature(self) -> float:
        """T of its chains, noise²/(2·step)."""
        return self.epsilon**2 / 2 / (LONGER if self.quiet else 1)

    def power(self, beta: float) -> float:
        """P of the density exp(−P·f) that is learned: what chains sample and what β weighs, together."""
        return 1 / self.temperature if self.tempered else (1 - beta) / self.temperature + beta


def _all_variants(betas: Iterable[float]) -> tuple[Student, ...]:
    return tuple(Student(b, v) for b in betas for v in (VARIANTS if b else VARIANTS[:1]))


def default_setup(toy: Toy, *, everything: bool = True) -> Setup:
    """Figure 2, and with `everything` Figures 6 and 7."""
    students = tuple(Student(b) for b in BETAS)
    if everything:
        students += tuple(Student(b, shifted=True) for b in BETAS)
        students += tuple(Student(0.5, v) for v in VARIANTS[1:])
    return Setup(DEFAULT, toy, students, toy.negatives)


def longer_setup(toy: Toy) -> Setup:
    """Figure 5: twice as many updates."""
    return Setup("longer", toy, tuple(Student(b) for b in BETAS), toy.negatives, times=2)


def restricted_setup(toy: Toy, betas: Iterable[float] = BETAS, times: int = 1) -> Setup:
    """Figures 10 and 11: three negatives from chains of three steps."""
    return Setup("restricted", toy, _all_variants(betas), negatives=3, steps=3, times=times)


def degenerate_setup(toy: Toy) -> Setup:
    """Figures 8 and 9: one negative, which is noise."""
    return Setup("degenerate", toy, _all_variants(BETAS), negatives=1, steps=0)


class Students:
    """The students of a setup, one of each for every seed, in one network and one optimiser.

    Those of one seed start from the same weights and see the same data.
    """

    def __init__(self, setup: Setup, seeds: Sequence[int], learning_rate: float, device: str):
        self.setup, self.device, self.repeats = setup, torch.device(device), len(seeds)
        students = sorted(setup.students, key=lambda s: s.objective)
        self.each = [(student, i) for student in students for i in range(self.repeats)]
        self.nets = BatchedNets([seeds[i] for _, i in self.each], SIZES, SLOPE).to(self.device)
        self.seeds = self._tensor([i for _, i in self.each])
        self.beta = self._column([s.beta for s, _ in self.each])
        shifted = self._column([float(s.shifted) for s, _ in self.each])
        self.step_size = 1 + (LONGER - 1) * shifted
        self.noise = setup.epsilon * (self.step_size.sqrt() if not setup.quiet else shifted**0)
        self.start_mean = setup.shift * setup.toy.start * shifted * self._tensor([1.0, -1.0])
        self.start_scale = setup.toy.start * (1 - 0.5 * shifted)
        self.objectives: list[tuple[slice, float | Tensor, str]] = []
        for (robust, variant), group in itertools.groupby(self.each, key=lambda e: e[0].objective):
            begin = self.objectives[-1][0].stop if self.objectives else 0
            # neighbours with the same objective, and β/T of each
            own = slice(begin, begin + len(list(group)))
            unit = setup.temperature if setup.tempered else 1.0
            beta = self.beta[own, 0, 0] / unit if robust else 0.0
            self.objectives.append((own, beta, variant))
        self.rng = generator(derive(seeds[0], "toy", setup.toy.name, setup.name), self.device)
        self.learning_rate = learning_rate
        self.adam = torch.optim.Adam(
            self.nets.parameters(),
            lr=torch.tensor(learning_rate, device=self.device),
            fused=True,
            capturable=self.device.type == "cuda",
        )
        self.step = self.update
        self.stream = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _column(self, values: Sequence[float]) -> Tensor:
        return self._tensor(values)[:, None, None]

    def chains(self, n: int, power: Tensor | float, rng: torch.Generator) -> Tensor:
        """n ends of chains on `power`·f for each student, `(K, n, 2)`."""
        normal = torch.randn((self.setup.steps + 1, len(self.each), n, 2), generator=rng, device=self.device)
        x = self.start_mean + self.start_scale * normal[0]
        drift = -self.step_size * power
        for u in normal[1:]:
            x = torch.addcmul(torch.addcmul(x, self.noise, u), drift, self.nets.grad(x))
        return x

    def update(self) -> None:
        """One update of every student."""
        N = self.setup.positives
        data = self.setup.toy.draw((self.repeats, N), self.rng)[self.seeds]
        x = self.chains(self.setup.negatives, 1 - self.beta, self.rng)
        f = -self.nets(torch.cat([data, x], 1))
        losses = [robust_loss(f[k, :N], f[k, N:], beta, None, v)[0] for k, beta, v in self.objectives]
        parameters = list(self.nets.parameters())
        gradients = torch.autograd.grad(torch.cat(losses).sum(), parameters)  # students share nothing
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.adam.step()

    def advance(self, done: int, updates: int) -> None:
        """Update `done` of `updates`; on a GPU nearly all replay one that was recorded, on a stream of its own."""
        with torch.cuda.stream(self.stream):
            share = cosine(done / updates) if self.setup.falls else 1.0
            self.adam.param_groups[0]["lr"].fill_(share * self.learning_rate)
            if self.stream is not None and done == WARM_UP:
                self.step = captured(self.update, self.rng, self.stream)
            self.step()


WARM_UP = 3
"""Updates on a GPU before one is recorded, in which libraries and the optimiser make what they need."""


def captured(
    update: Callable[[], None], rng: torch.Generator, stream: torch.cuda.Stream
) -> Callable[[], None]:
    """`update` as one CUDA graph: hundreds of small kernels in one launch. Recording it does not run it."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(rng)
    with torch.cuda.graph(graph, stream=stream):
        update()
    return graph.replay


def cosine(t: float) -> float:
    """From 1 at t = 0 to 0 at t = 1."""
    return 0.5 * (1 + math.cos(math.pi * t))


def train(bench: Bench, setups: Sequence[Setup]) -> list[Students]:
    """All setups that were not trained before, one by one; on a GPU in turns, so that several share it."""
    seeds = [derive(bench.seed, "student", i) % 2**31 for i in range(bench.repeats)]
    groups = [Students(setup, seeds, bench.learning_rate, bench.device) for setup in setups]
    waiting: list[tuple[Students, Slot]] = []
    for group in groups:
        setup = group.setup
        slot = bench.finished.slot(f"{setup.name}, {setup.toy.name}", trial_seeds=seeds, setup=setup)
        if (known := slot.find()) is None:
            waiting.append((group, slot))
        else:
            group.nets.load_state_dict(known)
            bench.say(f"{setup.name}, {setup.toy.name}: made before")
    on_gpu = torch.device(bench.device).type == "cuda"
    for some in [waiting] if on_gpu else [[one] for one in waiting]:
        in_turns(bench, [group for group, _ in some])
        for group, slot in some:
            slot.keep(group.nets.state_dict())
    return groups


def in_turns(bench: Bench, groups: Sequence[Students]) -> None:
    """Every update of each, an update of one after an update of the other."""
    names = ", ".join(f"{group.setup.name} of {group.setup.toy.name}" for group in groups)
    last = bench.updates * max((group.setup.times for group in groups), default=0)
    for done in range(last):
        for group in groups:
            updates = bench.updates * group.setup.times
            if done < updates:
                group.advance(done, updates)
        if (done + 1) % max(1, last // 10) == 0:
            bench.say(f"{names}: {done + 1} of {last} updates")
    if torch.device(bench.device).type == "cuda":
        torch.cuda.synchronize(bench.device)


@dataclass(frozen=True)
class Score:
    """How good a student is.

    Attributes:
        kl: KL(p_data ‖ p_θ) in nats on the set's box, p_θ ∝ exp(−f/T).
        distance: squared energy distance between SGLD(p_θ), the ends of chains as in training but on f itself,
            and data.
        energy: f/T as an energy.
        samples: SGLD(p_θ), `(n, 2)`.
    """

    kl: float
    distance: float
    energy: OneNet
    samples: Tensor


Scores = Mapping[tuple[str, str, Student], Sequence[Score]]
"""One for each seed, by the names of setup and set and the student."""


def score(students: Students, samples: int, seed: int) -> dict[tuple[str, str, Student], list[Score]]:
    """Every student, on the grid and by its samples."""
    setup, rng = students.setup, generator(derive(seed, "score", students.setup.toy.name), students.device)
    x = students.chains(samples, 1.0, rng).cpu()
    data = setup.toy.draw((samples,), rng).cpu()
    scores: dict[tuple[str, str, Student], list[Score]] = {}
    for k, (student, _) in enumerate(students.each):
        energy = OneNet(students.nets, k, setup.power(student.beta))
        kl = kl_on_grid(setup.toy.log_density, energy, setup.toy.box, POINTS)
        own = Score(kl, float(energy_distance(x[k], data)), energy, x[k])
        scores.setdefault((setup.name, setup.toy.name, student), []).append(own)
    return scores
