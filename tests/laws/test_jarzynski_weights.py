"""Proposition 1 of the Jarzynski paper: exact gradients and log Z for any protocol of parameters."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from conftest import assert_within, mean_and_error
from torch import Tensor, nn

from metastable.core.types import energy_and_grad, row_dot
from metastable.core.weights import log_mean_exp
from metastable.energies import GaussianMixture
from metastable.kernels import HMC, MALA, ULA, follow_acceptance
from metastable.walkers.jarzynski import fixed_parameters, langevin_step, reweigh_then_move
from metastable.walkers.population import Population

STEPS = 12
N = 40_000


class Moving(nn.Module):
    """An asymmetric one-dimensional mixture whose parameters follow a prescribed path θ_0 … θ_K."""

    def __init__(self):
        super().__init__()
        self.k = 0
        self.z = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def model(self, k: int) -> GaussianMixture:
        t = k / STEPS
        means = torch.tensor([[-0.5 - 1.5 * t], [0.5 + 0.8 * t]], dtype=torch.float64)
        scales = torch.tensor([1.0, 1.0 - 0.4 * t], dtype=torch.float64)
        return GaussianMixture(means, scales, torch.tensor([0.3 * t, 1.2 * t], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.k)(x)

    def log_ratio(self) -> float:
        return float(self.model(self.k).log_partition() - self.model(0).log_partition())


def start(energy: Moving, groups: int = 1, seed: int = 0) -> tuple[Population, torch.Generator]:
    rng = torch.Generator().manual_seed(seed)
    energy.k = 0
    x = energy.model(0).sample(N, rng)
    return Population.start(x, *energy_and_grad(energy, x), torch.zeros(groups)), rng


def follow(
    kernel, *, batch: int | None = None, steps: int = 1, groups: int = 1, threshold: float = 0.0
) -> tuple[Population, Moving]:
    """Walkers that follow the whole path."""
    energy = Moving()
    walkers, rng = start(energy, groups)
    for k in range(STEPS):
        rows = None if batch is None else torch.randperm(N, generator=rng)[:batch]
        if rows is not None and isinstance(kernel, ULA):
            walkers = walkers._replace(grad=energy_and_grad(energy, walkers.x[rows]).grad)
        energy.k = k + 1
        if isinstance(kernel, ULA):
            walkers, _ = langevin_step(kernel, energy, walkers, rows, rng)
            for _ in range(steps - 1):
                walkers, _ = langevin_step(kernel, energy, walkers, rows, rng, theta_moved=False)
        else:
            walkers, _ = reweigh_then_move(kernel, energy, walkers, rows, steps, rng, "eager")
        if threshold:
            walkers = walkers.resample(walkers.ess() < threshold, "systematic", "none", rng)
    return walkers, energy


KERNELS = {
    "ula": ULA(0.15),
    "ula, clipped drift": ULA(0.15, drift_clip=0.1),
    "ula, other noise": ULA(0.15, noise=0.8),
    "mala": MALA(0.15),
    "hmc": HMC(0.4, leapfrog=3),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("batch", "steps"), [(None, 1), (None, 3), (N // 5, 1), (N // 5, 3)])
def test_mean_weight_is_the_ratio_of_partition_functions(kernel, batch, steps):
    walkers, energy = follow(kernel, batch=batch, steps=steps)
    value, error = mean_and_error(torch.exp(walkers.log_weight - energy.log_ratio()))
    assert_within(value, torch.ones_like(value), error)


def test_mean_weight_is_exact_with_a_step_that_follows_the_past():
    """From a step far too long; each update's is set by the acceptance of the one before."""
    energy = Moving()
    walkers, rng = start(energy)
    log_step, steps = torch.tensor(math.log(50.0), dtype=torch.float64), []
    for k in range(STEPS):
        energy.k = k + 1
        steps.append(float(log_step.exp()))
        walkers, move = reweigh_then_move(
            MALA(), energy, walkers, None, 1, rng, "eager", log_step.exp(), probe=True
        )
        log_step = follow_acceptance(log_step, move.acceptance.mean(), 0.65, gain=0.5)
    assert steps[-1] < 0.2 * steps[0]
    value, error = mean_and_error(torch.exp(walkers.log_weight - energy.log_ratio()))
    assert_within(value, torch.ones_like(value), error)


@pytest.mark.parametrize("batch", [None, N // 5])
def test_a_step_at_the_same_parameters_is_the_step_to_them(batch):
    energy, kernel = Moving(), ULA(0.15)
    walkers, rng = start(energy)
    rows = None if batch is None else torch.randperm(N, generator=rng)[:batch]
    if rows is not None:
        walkers = walkers._replace(grad=walkers.grad[rows])
    moved, stayed = (
        langevin_step(kernel, energy, walkers, rows, torch.Generator().manual_seed(1), theta_moved=moved)[0]
        for moved in (True, False)
    )
    assert moved.given is stayed.given is None
    for a, b in zip(moved[:-1], stayed[:-1], strict=True):
        assert torch.equal(a, b)
    energy.k = 1  # the two differ where θ has moved, at walkers that stand still
    moved, stayed = (
        langevin_step(kernel, energy, walkers, rows, torch.Generator().manual_seed(1), theta_moved=moved)[0]
        for moved in (True, False)
    )
    assert torch.equal(moved.log_weight, stayed.log_weight) == (rows is None)


@functools.cache
def mixing_populations() -> Population:
    """A thousand populations of forty walkers that mix between updates and are resampled after most of them."""
    return follow(MALA(0.3), steps=20, groups=1000, threshold=0.99)[0]


def test_the_variance_of_log_z_is_what_weights_predict():
    walkers = mixing_populations()
    assert int(walkers.resamplings.min()) >= 3
    seen, error = walkers.log_partition().var(), math.sqrt(2 / walkers.groups)
    off = abs(float(walkers.noise().mean() / seen) - 1)
    assert off < 4 * error + 2 / 40  # the delta method leaves out the order 1/n
    forgetful = abs(float((walkers.noise() - walkers.past_noise).mean() / seen) - 1)
    assert forgetful > 4 * error + 2 / 40, "what was resampled must count"


@pytest.mark.parametrize("kernel", [ULA(0.15), MALA(0.15)], ids=["ula", "mala"])
def test_weighted_walkers_follow_the_last_model(kernel):
    walkers, energy = follow(kernel, steps=2)
    w = torch.exp(walkers.log_weight - energy.log_ratio())
    exact = energy.model(STEPS).sample(400_000, torch.Generator().manual_seed(1))
    for f in (lambda x: x, torch.square, lambda x: (x > 0).double(), torch.sin):
        truth, truth_error = mean_and_error(f(exact[:, 0]))
        value, error = mean_and_error(w * f(walkers.x[:, 0]))
        assert_within(value, truth, (error**2 + truth_error**2) ** 0.5)


def test_log_z_is_unbiased_through_resampling():
    groups = 500
    walkers, energy = follow(ULA(0.15), groups=groups, threshold=0.8)
    assert int(walkers.resamplings.min()) >= 1
    value, error = mean_and_error(torch.exp(walkers.log_partition() - energy.log_ratio()))
    assert_within(value, torch.ones_like(value), error)


def test_increment_is_the_papers_alpha():
    """(5) and (6), with U_k and U_{k+1} different."""
    energy, h = Moving(), 0.2
    kernel = ULA(h)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn((50, 1), generator=rng, dtype=torch.float64)
    noise = torch.randn((50, 1), generator=rng, dtype=torch.float64)
    energy.k = 3
    U, dU = energy_and_grad(energy, x)
    y = kernel.move(x, dU, noise)
    energy.k = 4
    V, dV = energy_and_grad(energy, y)

    def alpha(u, du, start, end):
        return u + 0.5 * row_dot(end - start, du) + 0.25 * h * row_dot(du, du)

    expected = alpha(U, dU, x, y) - alpha(V, dV, y, x)
    torch.testing.assert_close(kernel.log_weight_increment(noise, U, dU, V, dV), expected, rtol=0, atol=1e-12)


# ---- mutants: each is a mistake that has been made, and each must fail the test above


@dataclass(frozen=True)
class ClipInMoveOnly(ULA):
    def log_weight_increment(self, normal, energy, grad, new_energy, new_grad):
        honest = ULA(self.step_size)
        return honest.log_weight_increment(normal, energy, grad, new_energy, new_grad)


@dataclass(frozen=True)
class NoiseInMoveOnly(ULA):
    def log_weight_increment(self, normal, energy, grad, new_energy, new_grad):
        return ULA(self.step_size).log_weight_increment(normal, energy, grad, new_energy, new_grad)


@dataclass(frozen=True)
class EnergyOnly(ULA):
    """Forgets that ULA does not keep its target."""

    def log_weight_increment(self, normal, energy, grad, new_energy, new_grad):
        return energy - new_energy


@dataclass(frozen=True)
class WrongSign(ULA):
    def log_weight_increment(self, normal, energy, grad, new_energy, new_grad):
        return -ULA(self.step_size).log_weight_increment(normal, energy, grad, new_energy, new_grad)


@dataclass(frozen=True)
class Aliased(ULA):
    """`x_old = x` followed by an in-place update: the displacement is lost from both α."""

    def log_weight_increment(self, normal, energy, grad, new_energy, new_grad):
        h = self.step_size
        square = row_dot(grad, grad) - row_dot(new_grad, new_grad)
        return energy - new_energy + 0.25 * h * square


@pytest.mark.parametrize(
    "mutant",
    [
        ClipInMoveOnly(0.15, drift_clip=0.1),
        NoiseInMoveOnly(0.15, noise=0.8),
        EnergyOnly(0.15),
        WrongSign(0.15),
        Aliased(0.15),
    ],
    ids=lambda m: type(m).__name__,
)
def test_wrong_weights_are_caught(mutant):
    walkers, energy = follow(mutant, steps=2)
    value, error = mean_and_error(torch.exp(walkers.log_weight - energy.log_ratio()))
    with pytest.raises(AssertionError):
        assert_within(value, torch.ones_like(value), error)


def test_resampling_that_forgets_log_z_is_caught():
    walkers, energy = follow(ULA(0.15), groups=500, threshold=0.8)
    forgetful = log_mean_exp(walkers.by_group(walkers.log_weight))
    value, error = mean_and_error(torch.exp(forgetful - energy.log_ratio()))
    with pytest.raises(AssertionError):
        assert_within(value, torch.ones_like(value), error)


def test_sampling_goes_on_at_fixed_parameters_without_the_bias_of_ula():
    """Stationary ULA on x²/2 has variance 1/(1 − h/2); the weights bring it back to 1."""
    h, rng = 0.5, torch.Generator().manual_seed(0)

    def energy(x: Tensor) -> Tensor:
        return 0.5 * x.square().sum(1)

    x = torch.randn((200_000, 1), generator=rng, dtype=torch.float64)
    walkers = fixed_parameters(ULA(h), energy, x, 15, rng, threshold=0.0)
    w = torch.exp(walkers.log_weight)
    value, error = mean_and_error(w * walkers.x[:, 0] ** 2)
    assert_within(value, torch.ones_like(value), error)
    plain = float(walkers.x.var())
    assert abs(plain - 1 / (1 - h / 2)) < 0.05


def test_steering_does_not_reach_the_held_out_log_z():
    """A gradient taken from a population pulls that population's log Z down; the follower's stays."""
    d, n, rate, updates = 10, 200, 0.1, 60
    steering, following = [], []
    for seed in range(40):
        rng = torch.Generator().manual_seed(seed)
        mean = nn.Parameter(torch.zeros(d, dtype=torch.float64))

        def energy(x: Tensor, mean: Tensor = mean) -> Tensor:
            return 0.5 * (x - mean).square().sum(1)

        kernel = ULA(0.1)
        groups = []
        for _ in range(2):
            x = torch.randn((n, d), generator=rng, dtype=torch.float64)
            groups.append(Population.start(x, *energy_and_grad(energy, x), torch.zeros(1)))
        for _ in range(updates):
            p = torch.softmax(groups[0].log_weight, 0)
            gradient = -(p[:, None] * (groups[0].x - mean)).sum(0)  # data energies do not matter here
            with torch.no_grad():
                mean += rate * gradient.detach()
            groups = [langevin_step(kernel, energy, g, None, rng)[0] for g in groups]
        steering.append(float(groups[0].log_partition()))
        following.append(float(groups[1].log_partition()))
    # log Z is 0 + const throughout: a Gaussian that moves keeps its normaliser
    mean_follow, error_follow = mean_and_error(torch.exp(torch.tensor(following, dtype=torch.float64)))
    assert_within(mean_follow, torch.ones_like(mean_follow), error_follow)
    mean_steer, error_steer = mean_and_error(torch.tensor(steering, dtype=torch.float64))
    assert mean_steer < -4 * error_steer, "steering should bias its own estimate; if not, the test is blind"
    assert math.isfinite(float(mean_steer))
