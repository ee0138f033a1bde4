"""One update of a training as a function: what it is given is tensors, and what it leaves is tensors.

Nothing here looks at a number on a device or asks how far training has come, so that an update can be recorded and
launched as a whole (`training.captured`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from metastable.core.capture import aside

from .engine import Engine
from .players import followers, norm_name, trainable
from .records import LINE_MEANS
from .returned import require_gradient, returned
from .scaled import Rates, is_recordable, scaled_step

Turns = tuple[tuple[str, ...], ...]


class Updated(NamedTuple):
    """The method's state after an update, and its metrics: those that a line averages, and those of its end."""

    state: Any
    averaged: dict[str, Tensor]
    latest: dict[str, Tensor]


class Updates:
    """Negatives, a loss and a step for every turn, the average of the weights, and the method that follows.

    Attributes:
        method: whose moments they are.
        players: all modules, by name.
        optimisers: of those that learn.
        rates: their learning rates as tensors, where steps read those: on accelerators wherever they can be read
            there, and wherever updates may be recorded.
        averages: of the weights of players, by name, if any.
    """

    def __init__(
        self,
        method: Any,
        players: Mapping[str, nn.Module],
        optimisers: Mapping[str, Optimizer],
        engine: Engine,
        averages: Mapping[str, AveragedModel],
        decay: float | None,
        clip: float | None,
        recorded: bool,
    ):
        self.method, self.players, self.optimisers, self.engine = method, players, optimisers, engine
        self.averages, self.clip = averages, clip
        self.moment = "start"  # for whoever must say where an update ended
        self.average = None if decay is None else get_ema_multi_avg_fn(decay)
        self.trainable = {name: trainable(module) for name, module in players.items()}
        self.follow = {name: followers(module) for name, module in players.items()}
        away = engine.device.type != "cpu"
        self.rates = {
            name: Rates(optimiser)
            for name, optimiser in optimisers.items()
            if (away and is_recordable(optimiser)) or (recorded and not away)
        }

    def __call__(self, context: Any, state: Any, batch: Any, turns: Turns) -> Updated:
        """One update of `state` on `batch`, in which the players have these turns."""
        method, self.moment = self.method, "negatives"
        with self.engine.autocast():
            made = method.negatives(context, state, batch)
        negatives, state, metrics = returned(method.name, "negatives", made)
        averaged, self.moment = dict(metrics), "loss"
        for together in turns:
            with self.engine.autocast():
                made = method.loss(context, state, together[0], batch, negatives)
            loss, metrics = returned(method.name, "loss", made)
            averaged |= metrics
            averaged |= self._descend(state, together, loss)
        self._average()
        self.moment = "advance"
        with self.engine.rounded():  # energies enter weights as they entered the losses and the moves
            made = method.advance(context, state)
        state, latest = returned(method.name, "advance", made)
        averaged |= {k: v for k, v in latest.items() if k in LINE_MEANS}
        return Updated(state, averaged, {k: v for k, v in latest.items() if k not in LINE_MEANS})

    def before(self, place: int = 0) -> None:
        """What changes between two updates by the host's hand: learning rates, each of a launch in its place."""
        for rates in self.rates.values():
            rates.write(place)

    def send(self) -> None:
        """Learning rates to where steps read them."""
        for rates in self.rates.values():
            rates.send()

    def turn_to(self, place: int) -> None:
        """Learning rates are read there from now on."""
        for rates in self.rates.values():
            rates.place = place

    def after(self) -> None:
        """What the host counts: how many weights the averages are of."""
        for average in self.averages.values():
            average.n_averaged += 1

    @property
    def first_average(self) -> bool:
        """Whether the averages begin in the next update."""
        return any(not int(average.n_averaged) for average in self.averages.values())

    def changed(self) -> list[Tensor]:
        """Every tensor that an update writes to, but for the method's state."""
        modules = [*self.players.values(), *self.averages.values()]
        weights = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        kept = [value for o in self.optimisers.values() for own in o.state.values() for value in own.values()]
        return weights + [value for value in kept if isinstance(value, Tensor)]

    def _descend(self, state: Any, together: tuple[str, ...], loss: Tensor) -> dict[str, Tensor]:
        """One backward pass into the players of a turn, then a step of each; what is frozen stays."""
        stepped = [player for player in together if player in self.optimisers]
        parameters = [p for player in stepped for p in self.trainable[player]]
        for parameter in parameters:
            parameter.grad = None
        factors, rates = {}, {}
        with aside(self.engine.device) as join:  # the gradient does not ask for them
            for player in stepped:
                factors[player] = self.method.rate_factor(state) if player == "energy" else None
                if player in self.rates:
                    rates[player] = self.rates[player].scaled(factors[player])
        if parameters:
            require_gradient(self.method.name, loss)
            self.engine.backward(loss, parameters)
        join()
        return {norm_name(p): self._step(p, factors[p], rates.get(p)) for p in stepped}

    def _step(self, player: str, factor: Tensor | None, rates: list[Tensor] | None) -> Tensor:
        """The player's optimiser step; returns the norm of its gradient."""
        norm = self._clip(self.trainable[player])
        scaled_step(self.optimisers[player], factor, rates)
        for follow in self.follow[player]:
            follow()
        return norm

    def _clip(self, parameters: list[nn.Parameter]) -> Tensor:
        if self.clip is not None:
            return nn.utils.clip_grad_norm_(parameters, self.clip)
        gradients = [p.grad for p in parameters if p.grad is not None]
        return gradients[0].norm() if len(gradients) == 1 else nn.utils.get_total_norm(gradients)

    @torch.no_grad()
    def _average(self) -> None:
        """As `AveragedModel` does it, which would ask the host how many weights it has averaged."""
        if self.average is None:
            return
        own = [t for average in self.averages.values() for t in _weights(average.module)]
        now = [t for name in self.averages for t in _weights(self.players[name])]
        if self.first_average:
            for average, new in zip(own, now, strict=True):
                average.copy_(new)
            return
        for kind in dict.fromkeys((t.device, t.dtype) for t in own):
            same = [i for i, t in enumerate(own) if (t.device, t.dtype) == kind]
            self.average([own[i] for i in same], [now[i] for i in same], 0)  # pyright: ignore


def _weights(module: nn.Module) -> Sequence[Tensor]:
    return [t.detach() for t in (*module.parameters(), *module.buffers())]
