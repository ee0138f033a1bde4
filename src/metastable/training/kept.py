"""What a training keeps on disk: how it begins, its checkpoints, and how it goes on from them."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from metastable.core import processes
from metastable.core.errors import CheckpointError
from metastable.core.method import Method

from .agreement import Agreement
from .captured import Captured
from .checkpoints import Checkpoint, CheckpointStore, on_device
from .config import TrainerConfig
from .contract import TrainableMethod
from .engine import Engine
from .patience import Patience
from .players import average_name, load_weights, plain_state
from .records import Gather, Recorder
from .scaled import lay_out


class KeptTraining:
    """All that a checkpoint holds, and the ways in and out of it; `Trainer` makes the updates in between."""

    players: dict[str, nn.Module]
    method: TrainableMethod
    config: TrainerConfig
    engine: Engine
    context: Any
    state: Any
    optimisers: dict[str, Optimizer]
    schedules: dict[str, LRScheduler]
    averages: dict[str, AveragedModel]
    captured: Captured | None
    store: CheckpointStore | None
    recorder: Recorder
    gather: Gather
    patience: Patience | None
    seconds: float
    evaluations: int
    rollbacks: int
    seed: int
    agreement: Agreement
    _saved: float

    @property
    def ema(self) -> AveragedModel | None:
        """The average of the energy."""
        return self.averages.get("energy")

    def _begin(self) -> None:
        if self.store is not None and processes.by_first(self.store.steps):
            raise CheckpointError(
                f"{self.store.folder}: already holds checkpoints; resume the run, or choose another folder"
            )
        if self.recorder.path is not None:
            self.recorder.rewind(-1)
        self._all_alike()
        with self.engine.rounded():
            self.state = self.method.start(self.context)
        self._all_alike()  # some methods fit a player first
        if self.store is not None:
            self._checkpoint()

    def _all_alike(self) -> None:
        """Every process begins with the players of the first, whoever made them."""
        for module in self.players.values():
            processes.as_first([*module.parameters(), *module.buffers()])

    def _whole(self) -> Any:
        """The method's state with the walkers of all processes."""
        method, state = self.method, self.state
        return method.gathered(state) if processes.is_many() and isinstance(method, Method) else state

    def _own(self, state: Any) -> Any:
        """Of such a state, the part of this process."""
        method = self.method
        return method.own_part(state) if processes.is_many() and isinstance(method, Method) else state

    def _checkpoint(self) -> None:
        """Of all processes, written by the first."""
        assert self.store is not None
        weights = {name: module.state_dict() for name, module in self.players.items()}
        weights |= {average_name(name): average.state_dict() for name, average in self.averages.items()}
        tree = self._tree()
        if processes.is_first():
            self.store.save(self.context.step, weights, tree, self.recorder.digest)
        self._saved, self.agreement.old = time.perf_counter(), False

    def _tree(self) -> dict[str, Any]:
        others = {"streams": processes.stacked(self.context.rng.get_state())} if processes.is_many() else {}
        return {
            **others,
            "optimisers": {name: o.state_dict() for name, o in self.optimisers.items()},
            "schedules": {name: plain_state(s.state_dict()) for name, s in self.schedules.items()},
            "method": self.method.save(self._whole()),
            "rng": self.context.rng.get_state(),
            "gather": self.gather.save(),
            "seconds": self.seconds,
            "evaluations": self.evaluations,
            "rollbacks": self.rollbacks,
            "patience": None if self.patience is None else self.patience.save(),
        }

    def _resume(self) -> bool:
        """Go on from the newest good checkpoint; False where there is none."""
        checkpoint = processes.by_first(self.store.load) if self.store is not None else None
        if checkpoint is None:
            return False
        self._restore(checkpoint)
        if processes.is_first():
            self.store.rewind(checkpoint.step)  # pyright: ignore
        self.recorder.rewind(checkpoint.step)
        self.recorder.history = processes.by_first(lambda: self.recorder.history)
        if checkpoint.log and self.recorder.digest not in ("", checkpoint.log):
            words = f"{self.recorder.path}: was altered since the checkpoint of update {checkpoint.step}"
            warnings.warn(
                f"{words}; training goes on as it was, and the log is not to be trusted", stacklevel=4
            )
        return True

    def _restore(self, checkpoint: Checkpoint) -> None:
        tree: Any = checkpoint.state
        self.state = self._own(self._reload(checkpoint))
        if self.captured is not None:
            self.captured.forget()
        for name, average in self.averages.items():
            self._restore_average(name, average, checkpoint)
        for name, optimiser in self.optimisers.items():
            optimiser.load_state_dict(tree["optimisers"][name])
            lay_out(optimiser)
            self.schedules[name].load_state_dict(tree["schedules"][name])
        self.context.step = checkpoint.step
        self._go_on_drawing(tree)
        self.gather.load(on_device(tree["gather"], self.engine.device))
        self.seconds, self.rollbacks = tree["seconds"], tree["rollbacks"]
        if self.patience is not None and tree.get("patience") is not None:
            noise = self.config.noise_at(self.config.steps or 0)
            self.patience.load(on_device(tree["patience"], self.engine.device), noise)
        self.evaluations = tree["evaluations"]

    def _restore_average(self, name: str, average: AveragedModel, checkpoint: Checkpoint) -> None:
        """An average as it was; one that earlier releases did not keep begins with the weights of now."""
        kept = checkpoint.weights.get(average_name(name))
        if kept is not None:
            average.load_state_dict(dict(kept))
            return
        average.module.load_state_dict(self.players[name].state_dict())
        average.n_averaged.fill_(max(checkpoint.step, 0))

    def _go_on_drawing(self, tree: dict[str, Any]) -> None:
        """Random numbers go on as they were; in another number of processes they begin new streams."""
        streams = tree.get("streams", tree["rng"][None])
        if len(streams) == processes.count():
            self.context.rng.set_state(streams[processes.rank()].clone())
        else:
            names = ("resumed", self.context.step, processes.count())
            self.context.rng.manual_seed(processes.own_seed(self.seed, *names))

    def _reload(self, checkpoint: Checkpoint) -> Any:
        """The players as they were then; returns the method's state."""
        for name, module in self.players.items():
            load_weights(module, checkpoint.weights[name], name)
        tree: Any = checkpoint.state
        return self.method.load(on_device(tree["method"], self.engine.device))

    @contextmanager
    def looking_back(self) -> Iterator[tuple[Any, Any] | None]:
        """Context and state of the newest good checkpoint, None where there is none; players are put back after.

        What training left, of which a diverged energy may be looked at too, stays as it is.
        """
        checkpoint = None if self.store is None else self.store.load()
        if checkpoint is None:
            yield None
            return
        left = {name: copy.deepcopy(module.state_dict()) for name, module in self.players.items()}
        try:
            state = self._reload(checkpoint)
            yield replace(self.context, step=checkpoint.step), state
        finally:
            for name, module in self.players.items():
                module.load_state_dict(left[name])
