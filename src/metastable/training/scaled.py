"""An optimiser's step at a learning rate times a factor that lies on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def scaled_step(optimiser: Optimizer, factor: Tensor | None) -> None:
    """One step with every learning rate times `factor`, `()`; what schedules see of the rates does not change.

    On the CPU the factor is a number. Elsewhere the host does not wait for it: fused optimisers take rates that lie
    on the device, and of others, whose steps are in proportion to their rates, the step itself is scaled.

    >>> x = torch.nn.Parameter(torch.ones(1))
    >>> x.grad = torch.ones(1)
    >>> scaled_step(torch.optim.SGD([x], lr=0.5), torch.tensor(0.5))
    >>> x.item()
    0.75
    """
    if factor is None:
        optimiser.step()
    elif factor.device.type == "cpu":
        with _rates(optimiser, float(factor)):
            optimiser.step()
    elif all(group.get("fused") for group in optimiser.param_groups):
        with _rates(optimiser, factor.float()):
            optimiser.step()
    else:
        shortened_step(optimiser, factor)


@contextmanager
def _rates(optimiser: Optimizer, factor: Tensor | float) -> Iterator[None]:
    """Every learning rate times `factor`, for as long as the `with` lasts."""
    rates: list[Any] = [group["lr"] for group in optimiser.param_groups]
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate


@torch.no_grad()
def shortened_step(optimiser: Optimizer, factor: Tensor) -> None:
    """A step of which each parameter goes `factor` of the way."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    before = [p.clone() for p in parameters]
    optimiser.step()
    for p, old in zip(parameters, before, strict=True):
        p.copy_(torch.lerp(old, p, factor.to(p)))
