"""An optimiser's step at a learning rate times a factor that lies on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

PLACES = 16
"""Updates whose rates are told beforehand, at most."""


class Rates:
    """An optimiser's learning rates where a recorded step can read them: those of the next updates, for each group.

    Schedules go on writing numbers into the groups; `write` brings them here, between two launches. Steps read
    those at `place`.
    """

    def __init__(self, optimiser: Optimizer):
        self.optimiser, self.place = optimiser, 0
        self.changed: set[int] = set()
        self.numbers: list[list[Any]] = [[None] * PLACES for _ in optimiser.param_groups]
        homes = [group["params"][0].device for group in optimiser.param_groups]
        # the fused kernels of a GPU read rates in float32, those of the CPU in float64
        kinds = [torch.float64 if home.type == "cpu" else torch.float32 for home in homes]
        self.tables = [
            torch.zeros(PLACES, dtype=kind, device=home) for kind, home in zip(kinds, homes, strict=True)
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """Of each group, `()`."""
        return [table[self.place] for table in self.tables]

    def scaled(self, factor: Tensor | None) -> list[Tensor]:
        """The same times a factor, `()`."""
        return self.tensors if factor is None else [t * factor.to(t) for t in self.tensors]

    def write(self, place: int = 0) -> None:
        """The rates of the next update, or of one after it, to be sent."""
        for i, (group, table) in enumerate(zip(self.optimiser.param_groups, self.tables, strict=True)):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                table[place].copy_(rate)
            elif rate != self.numbers[i][place]:
                self.numbers[i][place] = rate
                self.changed.add(i)

    def send(self) -> None:
        """What was written, to where steps read it; nobody waits."""
        for i in self.changed:
            table = self.tables[i]
            numbers = torch.tensor([rate or 0.0 for rate in self.numbers[i]], dtype=table.dtype)
            table.copy_(numbers.pin_memory() if table.is_cuda else numbers, non_blocking=True)
        self.changed.clear()


def lay_out(optimiser: Optimizer) -> None:
    """What it keeps of each weight into the weight's own order of memory, which fused steps ask for.

    A checkpoint has everything in the order of its indices.
    """
    for weight, kept in optimiser.state.items():
        for name, value in kept.items():
            if (
                isinstance(value, Tensor)
                and value.shape == weight.shape
                and value.stride() != weight.stride()
            ):
                kept[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def is_recordable(optimiser: Optimizer) -> bool:
    """Whether its steps look at no number: fused ones on a GPU, and those that were built as `capturable`."""
    return all(group.get("fused") or group.get("capturable") for group in optimiser.param_groups)


def scaled_step(optimiser: Optimizer, factor: Tensor | None, rates: Sequence[Tensor] | None = None) -> None:
    """One step with every learning rate times `factor`, `()`; what schedules see of the rates does not change.

    On the CPU the factor is a number. Elsewhere the host does not wait for it: fused optimisers take rates that lie
    on the device, and of others, whose steps are in proportion to their rates, the step itself is scaled. Where
    there are `rates`, already scaled, the step reads those, and may be recorded.

    >>> x = torch.nn.Parameter(torch.ones(1))
    >>> x.grad = torch.ones(1)
    >>> scaled_step(torch.optim.SGD([x], lr=0.5), torch.tensor(0.5))
    >>> x.item()
    0.75
    """
    numbers = [group["lr"] for group in optimiser.param_groups]
    if rates is not None:
        with _rates(optimiser, rates):
            optimiser.step()
    elif factor is None:
        optimiser.step()
    elif factor.device.type == "cpu":
        with _rates(optimiser, [rate * float(factor) for rate in numbers]):
            optimiser.step()
    else:
        shortened_step(optimiser, factor)


@contextmanager
def _rates(optimiser: Optimizer, rates: Sequence[Any]) -> Iterator[None]:
    """These learning rates, for as long as the `with` lasts; a step that is being recorded is said to be so."""
    groups = optimiser.param_groups
    before = [{name: group[name] for name in ("lr", "capturable") if name in group} for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
        home = group["params"][0]
        if group.get("fused") and home.is_cuda and torch.cuda.is_current_stream_capturing():
            group["capturable"] = True  # fused steps are, but refuse to be recorded unless they are told
    try:
        yield
    finally:
        for group, old in zip(groups, before, strict=True):
            group.update(old)


@torch.no_grad()
def shortened_step(optimiser: Optimizer, factor: Tensor) -> None:
    """A step of which each parameter goes `factor` of the way."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    before = [p.clone() for p in parameters]
    optimiser.step()
    for p, old in zip(parameters, before, strict=True):
        p.copy_(torch.lerp(old, p, factor.to(p)))
