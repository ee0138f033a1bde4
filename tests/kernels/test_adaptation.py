"""Warm-up: dual averaging finds the step size at which the wanted share of moves is accepted."""

from __future__ import annotations

import math

import pytest
import torch

from metastable.core.errors import MOST, UnsupportedError
from metastable.energies import Banana, DoubleWell
from metastable.kernels import HMC, MALA, ULA, Kernel, run_chain, warm_up
from metastable.kernels.adaptation import dual_average_init, dual_average_update, step_of_rows, warm_up_each

TARGETS = {"banana": Banana(4, 1.0, 0.5), "wells": DoubleWell(3, 1.5, 2.0, tilt=0.5)}
ACCURACY = 0.04
"""Error of the acceptance that 300 adaptation steps are asked for; sampling noise is a tenth of it."""
over = pytest.mark.parametrize


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def acceptance(kernel: Kernel, energy, x: torch.Tensor, steps: int = 40) -> float:
    return run_chain(kernel, energy, kernel.init(energy, x), steps, rng(9)).info.acceptance.mean().item()


def exact_start(energy, chains: int = 500) -> torch.Tensor:
    return energy.sample(chains, rng(5)).double()


@over("target", TARGETS)
@over("start", [1e-3, 0.2, 20.0])
@over("kernel", [MALA(1.0), HMC(1.0, leapfrog=3), HMC(1.0, leapfrog=5, mass=2.5)])
def test_the_wanted_acceptance_is_reached_from_any_start(kernel, start, target):
    from dataclasses import replace

    energy = TARGETS[target]
    before = replace(kernel, step_size=start)
    tuned, state = warm_up(before, energy, exact_start(energy), 300, rng())
    assert replace(tuned, step_size=start) == before  # nothing else was touched
    assert acceptance(tuned, energy, state.x) == pytest.approx(kernel.target_acceptance, abs=ACCURACY)


@over("wanted", [0.4, 0.95])
def test_another_target_can_be_asked_for(wanted):
    energy = TARGETS["banana"]
    tuned, state = warm_up(MALA(0.1), energy, exact_start(energy), 300, rng(), target=wanted)
    assert acceptance(tuned, energy, state.x) == pytest.approx(wanted, abs=ACCURACY)


@over("target", TARGETS)
def test_unadjusted_langevin_takes_the_step_at_which_mala_accepts_nine_in_ten(target):
    energy = TARGETS[target]
    tuned, state = warm_up(ULA(0.5), energy, exact_start(energy), 300, rng())
    assert isinstance(tuned, ULA)
    assert state.energy.numel() == 0  # the state is ULA's, not MALA's
    assert acceptance(MALA(tuned.step_size), energy, state.x) == pytest.approx(0.9, abs=ACCURACY)


@over("kernel", [ULA(0.1, noise=0.01), ULA(0.1, drift_clip=0.1)])
def test_a_chain_without_an_acceptance_is_refused(kernel):
    energy = TARGETS["banana"]
    with pytest.raises(UnsupportedError, match="give its step_size"):
        warm_up(kernel, energy, exact_start(energy, 5), 10, rng())


def test_the_state_returned_belongs_to_the_tuned_kernel():
    energy = TARGETS["banana"]
    x = exact_start(energy, 50)
    _, state = warm_up(MALA(0.1), energy, x, 20, rng())
    assert torch.equal(state.energy, energy(state.x))
    assert not torch.equal(state.x, x)


def test_no_steps_keep_the_step_size():
    energy = TARGETS["banana"]
    tuned, _ = warm_up(MALA(0.1), energy, exact_start(energy, 5), 0, rng())
    assert tuned.step_size == pytest.approx(0.1, rel=1e-12)


def test_warm_up_is_repeatable():
    energy = TARGETS["banana"]
    results = [warm_up(HMC(0.1, leapfrog=2), energy, exact_start(energy, 20), 10, rng(3)) for _ in range(2)]
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1].x, results[1][1].x)


def test_the_update_is_the_papers():
    """Two updates of Hoffman and Gelman's (6) by hand, with γ = 0.05, t₀ = 10, κ = 0.75."""
    mu, wanted = math.log(10 * 0.2), 0.8
    s = dual_average_init(torch.tensor(0.2, dtype=torch.float64))
    error = average = 0.0
    for t, accepted in enumerate([0.3, 0.95, 0.6], 1):
        s = dual_average_update(s, torch.tensor(accepted, dtype=torch.float64), wanted, torch.tensor(mu))
        error = (1 - 1 / (t + 10)) * error + (wanted - accepted) / (t + 10)
        log_step = mu - math.sqrt(t) / 0.05 * error
        average = t**-0.75 * log_step + (1 - t**-0.75) * average
        assert s.log_step.item() == pytest.approx(log_step, rel=1e-6)
        assert s.log_average.item() == pytest.approx(average, rel=1e-6)


# ---- a step size for each group

WIDTHS = torch.tensor([1.0, 0.05, math.exp(-4), 30.0], dtype=torch.float64)


def of_widths(x: torch.Tensor) -> torch.Tensor:
    """½|x/σ|² with the σ of a row's group, `(4·K, 2)`."""
    return 0.5 * (x.view(4, -1, 2) / WIDTHS[:, None, None]).square().sum(-1).flatten()


@over("first", [1e-3, 1.0])
@over("kernel", [MALA(1.0), HMC(1.0, leapfrog=3), ULA(1.0)])
def test_every_group_has_the_step_that_suits_it(kernel, first):
    x = (WIDTHS[:, None, None] * torch.randn(4, 800, 2, generator=rng(), dtype=torch.float64)).flatten(0, 1)
    guess = torch.full((4,), first, dtype=torch.float64)
    found = warm_up_each(kernel, of_widths, x, 200, rng(1), guess)
    moving = MALA(1.0) if isinstance(kernel, ULA) else kernel
    h = step_of_rows(found.step_size, found.x)
    result = run_chain(moving, of_widths, moving.init(of_widths, found.x), 40, rng(2), step_size=h)
    by_group = result.info.acceptance.view(4, -1).mean(1)
    assert float((by_group - kernel.target_acceptance).abs().max()) < 2 * ACCURACY
    assert float((found.acceptance - by_group).abs().max()) < 4 * ACCURACY
    # the same law in other units: the step scales with the width (HMC) or its square
    power = 1 if isinstance(kernel, HMC) else 2
    in_units = found.step_size / WIDTHS**power
    assert float(in_units.max() / in_units.min()) < 1.4


def test_one_group_is_what_all_chains_together_are():
    """A kernel that takes a number for the step takes one for each row, with the same moves."""
    energy, x = TARGETS["banana"], exact_start(TARGETS["banana"], 30)
    for kernel in (MALA(0.2), HMC(0.2, leapfrog=2), ULA(0.01)):
        each = step_of_rows(torch.tensor([kernel.step_size]), x)
        one, many = (
            run_chain(kernel, energy, kernel.init(energy, x), 5, rng(3), step_size=h).state.x
            for h in (None, each)
        )
        assert torch.allclose(one, many, rtol=1e-6)


def test_a_flat_energy_is_warmed_up_to_the_largest_step():
    tuned, _ = warm_up(MALA(0.1), lambda x: 0 * x.sum(1), torch.zeros(4, 2), 300, rng())
    assert tuned.step_size == MOST
