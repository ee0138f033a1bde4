"""A learning rate times a factor: the step is the one that the product makes, and the rate is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from metastable.training import SGD, Adam
from metastable.training.scaled import scaled_step, shortened_step

OPTIMISERS = {
    "adam": Adam(0.1, weight_decay=0.1),
    "sgd": SGD(0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


def after(make, rates: list[float], step) -> torch.Tensor:
    x = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimiser = make([x])
    for rate in rates:
        optimiser.zero_grad()
        (x**2).sum().backward()
        step(optimiser, rate)
        assert optimiser.param_groups[0]["lr"] == 0.1
    return x.detach()


def by_hand(optimiser: torch.optim.Optimizer, factor: float) -> None:
    optimiser.param_groups[0]["lr"] = 0.1 * factor
    optimiser.step()
    optimiser.param_groups[0]["lr"] = 0.1


@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)
@pytest.mark.parametrize("step", [scaled_step, shortened_step])
def test_a_step_is_scaled_as_its_rate_would_be(make, step):
    factors = [0.1, 0.5, 1.0, 0.3]
    got = after(make, factors, lambda o, f: step(o, torch.tensor(f, dtype=torch.float64)))
    torch.testing.assert_close(got, after(make, factors, by_hand), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(got, after(make, [1.0] * 4, by_hand))


def test_without_a_factor_the_step_is_the_optimisers():
    plain = after(OPTIMISERS["adam"], [1.0] * 3, by_hand)
    assert torch.equal(after(OPTIMISERS["adam"], [1.0] * 3, lambda o, f: scaled_step(o, None)), plain)
