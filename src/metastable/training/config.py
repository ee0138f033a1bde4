"""Settings of the trainer: frozen, one class per choice, so that a setting nothing uses is not a field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from metastable.core.augment import require_changes
from metastable.core.errors import require, require_choice, require_count, require_moderate, require_positive

from .defaults import default_learning_rate, default_steps
from .engine import ENGINES

OptimiserFactory = Callable[[Iterable], Optimizer]
ScheduleFactory = Callable[[Optimizer], LRScheduler]


RATE_NAMES = ("lr", "rate")
"""What other libraries call the learning rate."""
FUSED_ON = ("cpu", "cuda")


def _all_on(parameters: list, *kinds: str) -> bool:
    """Whether all lie on devices of these kinds; parameter groups say nothing about theirs."""
    return all(isinstance(p, Tensor) and p.device.type in kinds for p in parameters)


@dataclass(frozen=True)
class Adam:
    """Adam, decoupled weight decay if any."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0

    name: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        require_positive("optimiser.learning_rate", self.learning_rate)
        require_moderate("optimiser.learning_rate", self.learning_rate)
        require(0 <= self.weight_decay < math.inf, "optimiser.weight_decay", "at least 0", self.weight_decay)
        require_moderate("optimiser.weight_decay", self.weight_decay)
        betas = self.betas if isinstance(self.betas, (list, tuple)) else (self.betas,)
        ok = len(betas) == 2 and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in betas)
        require(ok, "optimiser.betas", "two numbers of at least 0 and below 1", self.betas)
        object.__setattr__(self, "betas", tuple(betas))

    def __call__(self, parameters: Iterable) -> Optimizer:
        """The torch optimiser, fused where there is such a one: a step is then one kernel, not a dozen."""
        parameters = list(parameters)
        return torch.optim.AdamW(
            parameters,
            lr=self.learning_rate,
            betas=self.betas,
            weight_decay=self.weight_decay,
            fused=_all_on(parameters, *FUSED_ON),
        )


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent."""

    learning_rate: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        require_positive("optimiser.learning_rate", self.learning_rate)
        require_moderate("optimiser.learning_rate", self.learning_rate)
        for name in ("momentum", "weight_decay"):
            require(0 <= vars(self)[name] < math.inf, f"optimiser.{name}", "at least 0", vars(self)[name])
            require_moderate(f"optimiser.{name}", vars(self)[name])

    def __call__(self, parameters: Iterable) -> Optimizer:
        """The torch optimiser, fused on a GPU, where it can then be recorded."""
        parameters = list(parameters)
        return torch.optim.SGD(
            parameters,
            lr=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            fused=_all_on(parameters, "cuda") or None,
        )


@dataclass(frozen=True)
class Schedule:
    """The learning rate over time: a linear warm-up, then one of four shapes.

    Attributes:
        shape: `constant`, `linear` or `cosine` down to `final`, or `step`: times `drop` at each of `drops`.
        warmup: updates in which the rate rises from nothing.
        final: where `linear` and `cosine` end, as a share of the rate.
        drops: updates at which `step` falls.
        drop: what `step` is multiplied with there.

    >>> Schedule("step", drops=(10, 20), drop=0.5).factor(25, 30)
    0.25
    """

    shape: str = "constant"
    warmup: int = 0
    final: float = 0.0
    drops: tuple[int, ...] = ()
    drop: float = 0.3

    def __post_init__(self) -> None:
        require_choice("schedule.shape", self.shape, ("constant", "linear", "cosine", "step"))
        require_count("schedule.warmup", self.warmup, 0)
        require(0 <= self.final <= 1, "schedule.final", "a fraction between 0 and 1", self.final)
        object.__setattr__(self, "drops", tuple(self.drops))
        for i, at in enumerate(self.drops):
            require_count(f"schedule.drops.{i}", at)
        if (self.shape == "step") != bool(self.drops):
            rule = "updates at which the rate falls, for the shape 'step' and no other"
            require(False, "schedule.drops", rule, list(self.drops))
        require_positive("schedule.drop", self.drop)

    def factor(self, step: int, steps: int, done: float | None = None) -> float:
        """What the learning rate is multiplied with at `step` of `steps`.

        Args:
            step: updates before this one, which a warm-up counts.
            steps: of the whole training.
            done: share of the training that is done, which the shape follows; step/steps by default.
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        step = step if done is None else done * steps  # pyright: ignore
        if self.shape == "constant":
            return 1.0
        if self.shape == "step":
            return self.drop ** sum(step >= at for at in self.drops)
        t = min(1.0, max(0.0, step - self.warmup) / max(1, steps - self.warmup))
        fall = 1 - t if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * t))
        return self.final + (1 - self.final) * fall

    def build(self, optimiser: Optimizer, steps: int, done: Callable[[], float] | None = None) -> LRScheduler:
        """As a torch scheduler, stepped once per update; `done` as in `factor`, asked each time."""
        return LambdaLR(optimiser, lambda step: self.factor(step, steps, None if done is None else done()))


OPTIMISERS: dict[str, type] = {"adam": Adam, "sgd": SGD}


@dataclass(frozen=True)
class TrainerConfig:
    """How training runs, whatever the method.

    Attributes:
        steps: updates; None for as many as rows and columns ask for (`training.defaults`).
        max_seconds: stop after this many seconds of training, even before `steps`; None has no limit.
        max_evaluations: stop after this many energy evaluations (a gradient counts as one); None has no limit.
        batch_size: data rows per update; None takes all of them.
        data_noise: standard deviation of fresh normal noise on the rows of every update; it makes a density of data
            that have none, such as pixels, and smooths the one that is learned.
        data_noise_final: where the noise ends, in a straight line over `steps`; None keeps it constant.
        data_noise_over: share of `steps` in which it falls there; it stays for the rest.
        given_noise: what the noise is multiplied with on contexts: a number, or one for each number of a context; 0
            leaves them as they are.
        augment: ways in which the pictures of every update are changed at random, each on its own: `flip`
            (mirrored), `crop` (shifted by up to an eighth), `shift` (by up to a sixteenth), `rescale`, `colour`,
            `blur`; see `core.augment`. The density that is learned is then one of such pictures.
        given_augment: the same for contexts that are pictures, or hold some: all of a context are changed alike.
        given_pictures: where these lie in a flattened context: start, count, channels, height and width. Left out,
            a context of three dimensions is a picture.
        optimiser: `Adam`, `SGD`, or any callable from parameters to a torch optimiser; one with the attribute
            `per_module = True` is given the module instead, to make parameter groups. None for Adam at a rate that
            rows and columns ask for (`training.defaults`), which falls to zero along a cosine.
        optimisers: by name, for players that should not share `optimiser` (a method's page names its players).
        schedule: `Schedule`, or any callable from an optimiser to a torch scheduler; None for a constant rate, or a
            cosine where the optimiser was left out too.
        schedules: by name, for players that should not share `schedule`.
        follows: what schedules and a noise that falls go by: `steps`, or `seconds`, the larger of the shares of
            `steps` and of `max_seconds` that are spent, so that a rate is where it should be when time is up. The
            weights then depend on how fast the machine is.
        follows_seconds: what these seconds are a share of, where `max_seconds` ends one piece of a longer training;
            None for `max_seconds`.
        clip_grad_norm: cut the gradient's norm at this value.
        patience: share of `steps` after which training ends where held-out rows have not become more likely, and
            the model that made them most likely is kept; for methods that know log Z while they train. Rows have
            the noise that training ends with. None trains to the last step.
        ema: decay of an exponential moving average of every player's weights, see `Run.averaged`; None keeps none.
        log_every: updates between lines of metrics (and guard checks).
        checkpoint_every: updates between checkpoints.
        checkpoint_seconds: seconds after which there is one in any case, so that a killed run loses no more; no
            number depends on it. None for none; and none with `rollback`, which goes back to the latest there is.
        keep: checkpoints kept.
        on_divergence: `stop`, or `rollback` to the last good checkpoint with half the learning rate.
        max_rollbacks: rollbacks before stopping after all.
        energy_limit: a mean energy beyond ± this counts as exploded; times the energy's `output_scale`, where it
            has one.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        precision: `32-true`, `64-true`, or coarser products: `tf32` on a GPU, `bf16-mixed`; weights are exact for
            the energy as it is computed.
        engine: how updates run: `eager`, operation by operation; `compile`, the same with compiled chains, and
            on a GPU recorded, too; `captured`, every kind of update recorded once and launched as a whole;
            `fused`, the same with chains of perceptrons moved by one kernel, which draws noise of its own;
            `auto`, the fastest of these that needs no compiling, can be and gains. On the CPU, where nothing can be
            recorded, `captured` runs the same code on the same memory, for tests.
        tensorboard: also write TensorBoard event files.
    """

    steps: int | None = None
    max_seconds: float | None = None
    max_evaluations: int | None = None
    batch_size: int | None = 512
    data_noise: float = 0.0
    data_noise_final: float | None = None
    data_noise_over: float = field(default=1.0, kw_only=True)
    given_noise: float | tuple[float, ...] = field(default=0.0, kw_only=True)
    augment: tuple[str, ...] = field(default=(), kw_only=True)
    given_augment: tuple[str, ...] = field(default=(), kw_only=True)
    given_pictures: tuple[int, ...] = field(default=(), kw_only=True)
    optimiser: Adam | SGD | OptimiserFactory | None = None
    optimisers: Mapping[str, Adam | SGD | OptimiserFactory] = field(default_factory=dict)
    schedule: Schedule | ScheduleFactory | None = None
    schedules: Mapping[str, Schedule | ScheduleFactory] = field(default_factory=dict, kw_only=True)
    follows: str = field(default="steps", kw_only=True)
    follows_seconds: float | None = field(default=None, kw_only=True)
    clip_grad_norm: float | None = None
    patience: float | None = 0.2
    ema: float | None = None
    log_every: int = 10
    checkpoint_every: int = 500
    checkpoint_seconds: float | None = 120.0
    keep: int = 3
    on_divergence: str = "stop"
    max_rollbacks: int = 3
    energy_limit: float = 1e6
    device: str = "auto"
    precision: str = "32-true"
    engine: str = "auto"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        seconds = {"max_seconds": require_positive, "checkpoint_seconds": require_positive}
        counts = {"max_evaluations": require_count, "batch_size": require_count}
        for name, check in ({"steps": require_count} | seconds | counts).items():
            if vars(self)[name] is not None:
                check(f"trainer.{name}", vars(self)[name])
        for name in ("data_noise", "data_noise_final"):
            value = vars(self)[name]
            require(value is None or 0 <= value < math.inf, f"trainer.{name}", "at least 0", value)
            require_moderate(f"trainer.{name}", value or 0.0)
        if not isinstance(self.given_noise, (int, float)):
            object.__setattr__(self, "given_noise", tuple(self.given_noise))
        for name in ("augment", "given_augment"):
            object.__setattr__(self, name, require_changes(f"trainer.{name}", vars(self)[name]))
        self._require_places()
        over = self.data_noise_over
        require(0 < over <= 1, "trainer.data_noise_over", "above 0 and at most 1", over)
        for name in ("log_every", "checkpoint_every", "keep"):
            require_count(f"trainer.{name}", vars(self)[name])
        require_count("trainer.max_rollbacks", self.max_rollbacks, 0)
        if self.clip_grad_norm is not None:
            require_positive("trainer.clip_grad_norm", self.clip_grad_norm)
        if self.ema is not None:
            require(0 < self.ema < 1, "trainer.ema", "above 0 and below 1", self.ema)
        if self.patience is not None:
            require(0 < self.patience <= 1, "trainer.patience", "above 0 and at most 1", self.patience)
        require_positive("trainer.energy_limit", self.energy_limit)
        own = {"optimiser": self.optimiser} | {f"optimisers.{k}": v for k, v in self.optimisers.items()}
        for name, made in own.items():
            rule = "Adam(…), SGD(…) or a function that makes one (the rate alone: fit(learning_rate=…))"
            require(made is None or callable(made), f"trainer.{name}", rule, made)
        for name, made in {"": self.schedule, **self.schedules}.items():
            ok = callable(made) or isinstance(made, Schedule) or (made is None and not name)
            field = f"trainer.schedules.{name}" if name else "trainer.schedule"
            require(ok, field, "a Schedule, or a function that makes one", made)
        self._require_clock()
        require_choice("trainer.on_divergence", self.on_divergence, ("stop", "rollback"))
        require_choice("trainer.engine", self.engine, ENGINES)

    def _require_places(self) -> None:
        at = self.given_pictures
        whole = isinstance(at, (tuple, list)) and all(isinstance(n, int) and n >= 0 for n in at)
        rule = "start, count, channels, height and width of pictures in a context, or ()"
        require(whole and (not at or (len(at) == 5 and min(at[1:]) > 0)), "trainer.given_pictures", rule, at)
        object.__setattr__(self, "given_pictures", tuple(at))

    def _require_clock(self) -> None:
        require_choice("trainer.follows", self.follows, ("steps", "seconds"))
        by_steps, limited = self.follows == "steps", self.max_seconds is not None
        require(by_steps or limited, "trainer.follows", "'steps' without max_seconds", self.follows)
        if self.follows_seconds is not None:
            require_positive("trainer.follows_seconds", self.follows_seconds)
            rule = "None unless follows is 'seconds'"
            require(not by_steps, "trainer.follows_seconds", rule, self.follows_seconds)
        own = {type(made) for made in (self.schedule, *self.schedules.values())} <= {Schedule, NoneType}
        rule = "'steps' where a function makes the schedule"
        require(by_steps or own, "trainer.follows", rule, self.follows)

    def resolved(self, rows: int, numbers: int, mixture: bool = False) -> TrainerConfig:
        """The same with everything filled in that follows from `rows` of `numbers` each, and from the reference."""
        schedule = Schedule("cosine" if self.optimiser is None else "constant")
        rate = default_learning_rate(rows, numbers, mixture)
        return replace(
            self,
            steps=default_steps(rows, numbers) if self.steps is None else self.steps,
            optimiser=Adam(rate) if self.optimiser is None else self.optimiser,
            schedule=schedule if self.schedule is None else self.schedule,
        )

    def done(self, step: int, seconds: float) -> float:
        """Share of the training that is done after so many updates and seconds, which schedules follow."""
        share, whole = step / (self.steps or 1), self.follows_seconds or self.max_seconds or 1.0
        return share if self.follows == "steps" else min(1.0, max(share, seconds / whole))

    def noise_at(self, step: int, seconds: float = 0.0) -> float:
        """Standard deviation of the data noise of update `step`, after so many seconds."""
        if self.data_noise_final is None:
            return self.data_noise
        at = step if self.follows == "steps" else self.done(step, seconds) * (self.steps or 1)
        fallen = min(1.0, at / (self.data_noise_over * (self.steps or 1)))
        return self.data_noise + (self.data_noise_final - self.data_noise) * fallen
