"""The training loop: the same moments in every update, for every method alike."""

from __future__ import annotations

import copy
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from metastable.core import heap, processes
from metastable.core.batch import Rows, as_batch
from metastable.core.capture import CaptureError
from metastable.core.denormals import flushed
from metastable.core.ending import ends_all
from metastable.core.errors import ConfigError, OutOfMemoryError
from metastable.core.memory import within_memory
from metastable.core.protocols import output_scale_of
from metastable.core.random import generator
from metastable.core.types import Proposal
from metastable.core.units import Coordinates
from metastable.core.waiting import unwatched

from .agreement import Agreement
from .batches import Batches
from .captured import LEAST_TOGETHER, TOGETHER, Captured, Planned, copied
from .checkpoints import CheckpointStore
from .config import Schedule, TrainerConfig
from .contract import Outcome, TrainableMethod
from .engine import Choice, Engine, choose_engine
from .foreign import held_at_once, require_alone_or_together, sizes_of
from .guard import Guard
from .interrupts import stop_on_interrupt
from .kept import KeptTraining
from .patience import Patience
from .players import offsets_of, optimisers_of, trainable
from .records import Gather, Recorder, Row, of_all
from .returned import require_players
from .scaled import is_recordable
from .updates import Updates

OnRow = Callable[[Row], None]
"""Told of every line of metrics, e.g. a progress bar."""
MOST_ERROR = 0.3
"""Standard error of log Z, in nats, above which a likelihood says nothing about when to end."""
LOOK_EVERY = 97
"""Updates between looks at numbers on an accelerator; a prime, so that players who take turns are all looked at."""
LOOK_EVERY_CAPTURED = 17 * LOOK_EVERY
"""The same where updates are launched as a whole, beside which one that is looked at takes long."""
WORTH = 1000
"""Updates that must be left for several to be recorded together, which takes as long as these gain by it."""


class Trainer(KeptTraining):
    """Trains `players` with `method` on `data`; everything random follows from `seed`.

    Args:
        energy: the energy, already checked.
        players: the modules of the run, by name, `energy` among them; those with trainable parameters get an
            optimiser each. All of them stay in eval mode: a density needs one fixed energy, which dropout or
            batch statistics would make a random one.
        data: `(n, *event)`, on the engine's device, or a `Batch` where the method needs what its events are given.
        method: a training method.
        config: how training runs.
        noise: a normalised density around the data.
        engine: device and precision.
        make_context: builds the method's context; kept out of here so that the loop knows no method.
        seed: of every random number in the run.
        folder: where to write metrics and checkpoints; None keeps everything in memory.
        on_row: told of every line of metrics.
        held_out: rows that say when to end, like `data`; None trains to the last step.
        seen: the rows that the method looks at outside of updates, with their noise; None: `data`.
        coordinates: the units that `data` are in, where they are not the data's own: noise is given in those, and
            energies are logged in them.
        power: P of exp(−P·E), which is what is learned.
        run: identity of the run, which its checkpoints carry.
    """

    def __init__(
        self,
        energy: Callable[[Tensor], Tensor],
        players: Mapping[str, nn.Module],
        data: Rows,
        method: TrainableMethod,
        config: TrainerConfig,
        *,
        noise: Proposal,
        engine: Engine,
        make_context: Callable[..., Any],
        seed: int = 0,
        folder: Path | None = None,
        on_row: OnRow | None = None,
        held_out: Rows | None = None,
        seen: Rows | None = None,
        coordinates: Coordinates | None = None,
        power: float = 1.0,
        run: str = "",
    ):
        data = as_batch(data)
        x = data.x if seen is None else as_batch(seen).x
        config = config.resolved(len(x), x[0].numel())
        self.energy, self.players, self.method, self.config = energy, dict(players), method, config
        self.engine, self.seed, self.folder, self.on_row = engine, seed, folder, on_row
        steps = config.steps or 0
        require_alone_or_together(method, config.follows)
        self.choice = choose_engine(config.engine, x.device, method, steps, energy, x, engine.precision)
        units = None if coordinates is None else coordinates.events
        self.batches = Batches.of(data, config, seed, coordinates)
        self.offsets = {} if units is None else offsets_of(units.log_det, power)
        self.context = make_context(
            energy=energy,
            players=self.players,
            data=x,
            given=data.given,
            noise=noise,
            rng=generator(processes.own_seed(seed, "method"), x.device),
            engine=self.choice.chains,
            batch=self.batches.size,
            data_scale=max(float(x.flatten(1).var(0).sum().sqrt()), 1e-12),
        )
        for module in self.players.values():
            module.eval()
        self.trainable = {name: trainable(module) for name, module in self.players.items()}
        self.optimisers = optimisers_of(self.players, config, method)
        self.seconds = 0.0
        self.schedules = {name: self._schedule(name, o) for name, o in self.optimisers.items()}
        self.averages = self._averaged(config.ema)
        self.captured = self._captured()
        self.store = None if folder is None else CheckpointStore(folder / "checkpoints", config.keep, run=run)
        self.recorder = Recorder(folder if processes.is_first() else None, config.tensorboard)
        self.guard = Guard(config.energy_limit * (output_scale_of(energy) or 1.0), seed)
        self.gather = Gather()
        self.state: Any = None
        self.evaluations = 0
        self.rollbacks = 0
        self.row: Row = {}
        self.asked: tuple[Row, Callable[[], Row]] | None = None
        self.patience = self._patience(held_out, power)
        self.kept: int | None = None
        self._stopping = self.hurried = False
        self.agreement = Agreement()
        self._saved = time.perf_counter()

    def _patience(self, held_out: Rows | None, power: float) -> Patience | None:
        if held_out is None or self.config.patience is None:
            return None
        held_out = as_batch(held_out)
        if held_out.given is not None:
            return None
        assert self.config.steps is not None
        return Patience(held_out.x, power, self.config.steps, self.config.patience)

    def _schedule(self, name: str, optimiser: Optimizer) -> LRScheduler:
        """The player's own, over as many updates as it will have a turn in.

        One that learns first and then stays follows those, also where others follow seconds.
        """
        schedule = self.config.schedules.get(name, self.config.schedule)
        if isinstance(schedule, Schedule):
            steps = self.config.steps or 0
            own = self.method.updates(self.context, name, steps)
            first = own < steps and self.method.updates(self.context, name, own) == own
            done = None if first or self.config.follows == "steps" else self._done
            return schedule.build(optimiser, own, done)
        assert schedule is not None  # settled with the number of rows
        return schedule(optimiser)

    def _done(self) -> float:
        """Share of the training that is done."""
        return self.config.done(self.context.step, self.seconds)

    def _averaged(self, decay: float | None) -> dict[str, AveragedModel]:
        """Of the energy and of every other player that learns."""
        names = [] if decay is None else [n for n in self.players if n == "energy" or self.trainable[n]]
        return {
            name: AveragedModel(
                self.players[name], multi_avg_fn=get_ema_multi_avg_fn(decay or 0.0), use_buffers=True
            )
            for name in names
        }

    def _captured(self) -> Captured | None:
        """Updates as a function, and what records them, where they are to be recorded."""
        fixed = [n for n, o in self.optimisers.items() if not is_recordable(o)]
        if self.choice.chosen == "captured" and self.engine.device.type == "cuda" and fixed:
            why = f"the optimiser of {fixed[0]!r} is neither fused nor capturable"
            asked = self.config.engine == "compile"
            self.choice = Choice("compile", why, "compile") if asked else Choice("eager", why)
            self.context.engine = self.choice.chains
        if self.config.engine in ("captured", "fused") and self.choice.chosen != "captured":
            warnings.warn(f"trainer.engine: not captured, as {self.choice.reason}", stacklevel=4)
        elif self.config.engine == "fused" and self.choice.chains != "fused":
            warnings.warn(f"trainer.engine: no chains are fused; updates are {self.choice}", stacklevel=4)
        recorded, config = self.choice.chosen == "captured", self.config
        self.update = Updates(
            self.method,
            self.players,
            self.optimisers,
            self.engine,
            self.averages,
            config.ema,
            config.clip_grad_norm,
            recorded,
        )
        return Captured(self.update, self.context.rng, self.engine.device) if recorded else None

    # ---- the loop

    def run(self, resume: bool = False) -> Outcome:
        """Train until the configured steps or seconds are spent, or a Ctrl-C; a guard error propagates."""
        held = lambda: held_at_once(self.method, self.context.data, self.config.batch_size)  # noqa: E731
        sizes = sizes_of(self.method, len(self.context.data), self.config.batch_size)
        with within_memory(lambda: self.update.moment, held, sizes):
            self._run(resume)
            if self._interrupted and ends_all():
                raise KeyboardInterrupt
            return self._outcome("interrupted" if self._interrupted else "finished")

    def _run(self, resume: bool) -> None:
        if not (resume and self._resume()):
            self._begin()
        self.engine.prepare()
        began = time.perf_counter() - self.seconds
        self._agree()
        with stop_on_interrupt(self._stop), flushed(), heap.kept():
            while not self._is_last():
                self._update(self._unseen())
                self.seconds = time.perf_counter() - began
                self._agree()
                self._after_update()
        if self.asked is not None:
            self._log()
        self.update.moment = "log Z"
        # one that was stopped goes on from where it is
        went_back = not self._interrupted and self._keep_best()
        if self.store is not None:
            latest = processes.by_first(self.store.latest_step)
            if went_back or latest != self.context.step:
                self._checkpoint()
        self.recorder.close()

    def _stop(self, number: int = signal.SIGINT) -> None:
        self._stopping = True
        self.hurried = self.hurried or number == signal.SIGTERM

    @property
    def _interrupted(self) -> bool:
        """Whether somebody asked to stop: of several processes, once all know of it."""
        return self.agreement.stopped if processes.is_many() else self._stopping

    def _agree(self) -> None:
        """What one process knows, that time is up or somebody pressed Ctrl-C, all are told of together."""
        seconds, saved = self.config.max_seconds, self.config.checkpoint_seconds
        late = seconds is not None and self.seconds >= seconds
        old = saved is not None and time.perf_counter() - self._saved >= saved
        self.agreement.reach(self.context.step, self.seconds, self._stopping, late, old)

    def _is_last(self) -> bool:
        """Whether there is no further update: the budget is spent, or somebody pressed Ctrl-C."""
        evaluations = self.config.max_evaluations
        spent = evaluations is not None and self.evaluations >= evaluations
        done = self.context.step >= (self.config.steps or 0) or (
            self.patience is not None and self.patience.spent
        )
        return self.agreement.late or spent or self._interrupted or done

    def _unseen(self) -> int:
        """Updates until somebody looks: at a line of metrics, a checkpoint, held-out rows, numbers, or the end."""
        step, config = self.context.step, self.config
        every = [config.log_every, LOOK_EVERY_CAPTURED]
        every += [] if self.store is None else [config.checkpoint_every]
        every += [] if self.patience is None else [self.patience.every]
        if step % LOOK_EVERY_CAPTURED == 0:
            return 1
        return min((config.steps or 0) - step, *(each - step % each for each in every))

    def _update(self, most: int = 1) -> None:
        """One update, or up to `most` of them where they are launched together."""
        count, left = min(most, TOGETHER), (self.config.steps or 0) - self.context.step
        worth = count >= LEAST_TOGETHER and left >= WORTH and self.config.max_evaluations is None
        if (worth and self._launched(count)) or self._launched(1):
            return
        (planned,) = self._planned(1)
        shared = self.captured is not None and self.state is self.captured.state
        state = copied(self.state) if shared else self.state  # recordings write over theirs
        self.update.before()
        self.update.send()
        with unwatched(self.context.step % LOOK_EVERY != 0):
            made = self.update(self.context, state, planned.batch, planned.turns)
        self.state, averaged, latest = made
        self.gather.add(averaged, latest)
        self._move_rates(planned)
        self._updated(planned)

    def _planned(self, count: int) -> list[Planned]:
        """What the next updates will see."""
        context, method, planned = replace(self.context), self.method, []
        noises = [self.config.noise_at(context.step + i, self.seconds) for i in range(count)]
        for batch in self.batches.several(context.step, noises):
            turns = tuple((turn,) if isinstance(turn, str) else tuple(turn) for turn in method.turns(context))
            require_players(method.name, turns, self.players)
            planned.append(Planned(context.step, method.takes(batch), turns))
            context.step += 1
        return planned

    def _move_rates(self, planned: Planned) -> None:
        """The schedules of those who had a turn go on: once in an update, however many turns the player had."""
        for player in self.optimisers.keys() & {name for together in planned.turns for name in together}:
            self.schedules[player].step()

    def _updated(self, planned: Planned) -> None:
        """What the host counts after an update."""
        self.update.after()
        self._count(len(planned.batch) * processes.count())
        self.context.step += 1

    def _launched(self, count: int) -> bool:
        """Whether the next `count` updates were made by one launch: rates are told before, metrics come after."""
        if self.captured is None or self.context.step % LOOK_EVERY_CAPTURED == 0:
            return False
        planned = self._planned(count)
        try:
            recorded = self.captured.prepared(self.context, self.state, planned)
        except (CaptureError, torch.OutOfMemoryError, OutOfMemoryError) as error:
            chains = self.context.engine if self.context.engine in ("fused", "compile") else "auto"
            self.captured, self.choice = None, Choice("eager", f"an update {error}", chains)
            self.context.engine = chains
            warnings.warn(f"trainer.engine: goes on step by step, as an update {error}", stacklevel=4)
            return False
        if recorded is None:
            return False
        for place, one in enumerate(planned):
            self.update.before(place)
            self._move_rates(one)
        self.update.send()
        self.state, lines = self.captured.launched(recorded, self.state, planned)
        for line in lines:
            self.gather.add_line(line)
        for one in planned:
            self._updated(one)
        return True

    def _count(self, batch: int) -> None:
        with processes.alone():  # of all of them together
            made = self.method.evaluations(self.context, batch)
        if made is not None:
            self.evaluations += made
        elif self.config.max_evaluations is not None:
            raise ConfigError("trainer.max_evaluations", "this method does not count its evaluations")

    def _after_update(self) -> None:
        step, config = self.context.step, self.config
        if self.asked is not None and not self._log():
            return
        if self.patience is not None and self.patience.due(step):
            self._look_at_held_out()
        last = self._is_last()
        save = self.store is not None and (step % config.checkpoint_every == 0 or last)
        timely = not save and self._is_time()
        if step % config.log_every == 0 or save or last:
            self._ask()
            # updates go on while a line comes from the device or from other processes
            at_once = save or last or timely or (self.captured is None and not processes.is_many())
            if at_once and not self._log():
                return
        elif timely and self.asked is not None and not self._log():
            return
        if save or (timely and self._is_good()):
            self._checkpoint()

    def _is_time(self) -> bool:
        """Whether a checkpoint is due by the clock; where training may roll back to it, none ever is."""
        may_be = self.store is not None and self.config.on_divergence != "rollback"
        # lines of several processes are joined when they are written
        here = not processes.is_many() or self.context.step % self.config.log_every == 0
        return may_be and here and self.agreement.old

    def _is_good(self) -> bool:
        """Whether the guard would let the line so far pass; the line goes on as if nobody had looked."""
        line = self.gather.save()
        values = self.gather.read()
        self.gather.load(line)
        return self.guard.reason(values) is None

    def _ask(self) -> None:
        """A line of metrics of now, whose values are on their way."""
        shown = self.optimisers.get("energy") or next(iter(self.optimisers.values()))
        row = {
            "step": self.context.step,
            "seconds": self.seconds,
            "learning_rate": shown.param_groups[0]["lr"],
            "evaluations": self.evaluations,
        }
        self.asked = row, of_all(self.gather.shared, self.gather.asked())

    def _log(self) -> bool:
        """Write the line that was asked for; False when the guard rolled training back."""
        assert self.asked is not None
        (row, coming), self.asked = self.asked, None
        values = coming()
        if values:
            self.row = row | {name: value + self.offsets.get(name, 0.0) for name, value in values.items()}
            reason = self.guard.reason(self.row)
            if reason is not None:
                self._diverged(reason)
                return False
            self.recorder.write(self.row)
            if self.on_row is not None:
                self.on_row(self.row)
        return True

    # ---- when to end

    def _look_at_held_out(self) -> None:
        """Score the held-out rows, and remember everything where they have never been as likely."""
        assert self.patience is not None
        self.update.moment = "log Z"
        with self.engine.rounded():
            state = self._whole()
            z = processes.by_first(lambda: self.method.log_partition(self.context, state))
            sure = z is not None and z.std_error < MOST_ERROR
            better = sure and self.patience.better(self.energy, z.value, self.context.step)  # pyright: ignore
        if z is None:  # a method that does not know log Z cannot say when likelihood stops to grow
            self.patience = None
        elif better:
            weights = {name: copy.deepcopy(m.state_dict()) for name, m in self.players.items()}
            averages = {name: copy.deepcopy(m.state_dict()) for name, m in self.averages.items()}
            kept = copied(self.method.save(state))
            self.patience.best = {"weights": weights, "method": kept, "averages": averages}

    def _keep_best(self) -> bool:
        """Go back to where held-out rows were most likely, where that is worth it."""
        patience = self.patience
        if patience is None or patience.best is None or not patience.past_its_best:
            return False
        for name, module in self.players.items():
            module.load_state_dict(patience.best["weights"][name])
        for name, weights in patience.best.get("averages", {}).items():  # earlier releases kept none
            self.averages[name].load_state_dict(weights)
        self.state = self._own(self.method.load(patience.best["method"]))
        self.kept = patience.at
        return True

    # ---- divergence

    def _diverged(self, reason: str) -> None:
        step = int(self.row["step"])
        good = None if self.store is None else processes.by_first(self.store.latest_step)
        path = None if self.store is None or good is None else self.store.folder / f"step-{good:08d}"
        may_roll_back = self.config.on_divergence == "rollback" and self.rollbacks < self.config.max_rollbacks
        if not may_roll_back or path is None:
            self.recorder.write(self.row)
            rows = self.recorder.history
            raise self.guard.error(reason, step, None if path is None else str(path), rows)
        count = self.rollbacks + 1
        self._resume()
        factor = 0.5 ** (count - self.rollbacks)  # the checkpoint may have been made before earlier rollbacks
        self.rollbacks = count
        self._slow_down(factor, count)

    def _slow_down(self, factor: float, count: int) -> None:
        """A smaller learning rate and other random numbers: the same course would end the same way."""
        for optimiser, schedule in zip(self.optimisers.values(), self.schedules.values(), strict=True):
            for group in optimiser.param_groups:
                group["lr"] *= factor
            schedule.base_lrs = [rate * factor for rate in schedule.base_lrs]
        self.context.rng.manual_seed(processes.own_seed(self.seed, "rollback", count))

    # ---- the end

    def _outcome(self, status: str) -> Outcome:
        state, method = self._whole(), self.method
        with self.engine.rounded():
            walkers = processes.by_first(lambda: method.current_walkers(self.context, state))
            log_partition = processes.by_first(lambda: method.log_partition(self.context, state))
        return Outcome(
            status=status,
            step=self.context.step,
            seconds=self.seconds,
            history=self.recorder.history,
            walkers=walkers,
            log_partition=log_partition,
            ema=None if self.ema is None else self.ema.module,
            averages={name: average.module.state_dict() for name, average in self.averages.items()},
            state=state,
            kept=self.kept,
            message="" if self.patience is None else self.patience.words(self.context.step),
            refused=[] if self.store is None else self.store.refused,
            engine=self.choice,
            hurried=self.hurried,
        )
