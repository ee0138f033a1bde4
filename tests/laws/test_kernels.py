"""Laws of every kernel: what it leaves invariant, what it reverses, and the bias it is known to have.

Targets are asymmetric on purpose: on a Gaussian a wrong sign in a drift or a ratio can go unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from conftest import assert_within, each, mean_and_error, quadrature, z_limit, z_scores
from torch import Tensor, nn
from torch.distributions import Normal

from metastable.core.errors import ConfigError
from metastable.core.types import energy_and_grad, row_dot, row_sum
from metastable.energies import MLP, Banana, DoubleWell
from metastable.kernels import HMC, KERNELS, MALA, ULA, ChainState, Kernel, Noise, run_chain
from metastable.kernels.hmc import leapfrog
from metastable.kernels.mala import langevin_alpha
from metastable.kernels.metropolis import accept

F64 = torch.float64
over = pytest.mark.parametrize


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Gumbel(nn.Module):
    """E(x) = Σ x_i + e^{−x_i}: skewed, with closed-form draws −log(−log u)."""

    event_shape = (2,)

    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.exp(-x)).sum(1)

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        return -torch.log(-torch.log(torch.rand((n, 2), generator=rng, dtype=F64)))


TARGETS = {
    "gumbel": (Gumbel(), [(-4, 35, 800), (-4, 35, 800)]),
    "tilted wells": (DoubleWell(2, 1.5, 1.5, tilt=0.6), [(-7, 7, 600), (-8, 8, 200)]),
    "banana": (Banana(2, 1.2, 0.5), [(-9, 9, 300), (-9, 49, 600)]),
}
ADJUSTED = {
    "mala": MALA(0.4),
    "mala short": MALA(0.05),
    "hmc": HMC(0.5, leapfrog=4),
    "hmc heavy": HMC(0.9, leapfrog=2, mass=(2.0, 0.7)),
    "hmc one": HMC(0.7, leapfrog=1, mass=0.8),
}


def functions(x: Tensor) -> Tensor:
    """Location, spread, skew and dependence, all bounded so that a z-score means what it says."""
    return torch.cat([torch.tanh(x), torch.cos(x), torch.sin(2 * x), torch.tanh(x[:, :1] * x[:, 1:])], 1)


def departure(kernel: Kernel, target: str, chains: int = 20_000, steps: int = 15) -> float:
    """Largest z-score of a mean after `steps` steps from exact draws, over the limit: above 1 has failed."""
    energy, box = TARGETS[target]
    exact = quadrature(energy, box).mean(functions)
    source = rng(11)
    x = energy.sample(chains, source).double()
    result = run_chain(kernel, energy, kernel.init(energy, x), steps, source)
    assert 0.2 < result.info.acceptance.mean() < 1
    assert (result.state.x != x).any(1).double().mean() > 0.9  # standing still leaves anything invariant
    mean, error = mean_and_error(functions(result.state.x))
    score = z_scores(mean, exact, error).nan_to_num(nan=math.inf)  # a chain that blew up has left
    return float(score.max()) / z_limit(len(exact))


@over("target", TARGETS)
@over("name", ADJUSTED)
def test_adjusted_kernels_leave_the_target_invariant(name, target):
    assert departure(ADJUSTED[name], target) < 1


@dataclass(frozen=True)
class WithoutReverse(MALA):
    """MALA that forgets log q(x | x′) − log q(x′ | x)."""

    def step(self, energy, state, noise, step_size):
        y = state.x - step_size * state.grad + (2 * step_size) ** 0.5 * noise.normal
        new = ChainState(y, *energy_and_grad(energy, y))
        return accept(state, new, state.energy - new.energy, noise.uniform)


@dataclass(frozen=True)
class UphillDrift(MALA):
    """MALA that reads the gradient it kept with the wrong sign."""

    def step(self, energy, state, noise, step_size):
        return super().step(energy, state._replace(grad=-state.grad), noise, step_size)


@dataclass(frozen=True)
class WrongSign(MALA):
    """MALA that accepts with the inverse ratio."""

    def step(self, energy, state, noise, step_size):
        y = state.x - step_size * state.grad + (2 * step_size) ** 0.5 * noise.normal
        new = ChainState(y, *energy_and_grad(energy, y))
        ratio = langevin_alpha(state, y, step_size) - langevin_alpha(new, state.x, step_size)
        return accept(state, new, -ratio, noise.uniform)


@dataclass(frozen=True)
class WithoutKinetic(HMC):
    """HMC that accepts on the potential energy alone."""

    def step(self, energy, state, noise, step_size):
        mass = self._mass(state.x)
        new, _ = leapfrog(energy, state, mass.sqrt() * noise.normal, mass, step_size, self.leapfrog)
        return accept(state, new, state.energy - new.energy, noise.uniform)


@dataclass(frozen=True)
class WithoutMass(HMC):
    """HMC whose momenta are standard normal whatever the mass."""

    def step(self, energy, state, noise, step_size):
        mass = self._mass(state.x)
        return super().step(energy, state, noise._replace(normal=noise.normal / mass.sqrt()), step_size)


@dataclass(frozen=True)
class NeverReject(MALA):
    """ULA under MALA's name."""

    def step(self, energy, state, noise, step_size):
        always = noise._replace(uniform=-torch.ones_like(noise.uniform))
        return super().step(energy, state, always, step_size)


MUTANTS = {
    "no reverse term": WithoutReverse(0.4),
    "uphill": UphillDrift(0.4),
    "wrong sign": WrongSign(0.4),
    "never rejects": NeverReject(0.2),
    "no kinetic term": WithoutKinetic(0.5, leapfrog=4),
    "no mass": WithoutMass(0.9, leapfrog=2, mass=(2.0, 0.7)),
}


@over("target", TARGETS)
@over("name", MUTANTS)
def test_a_wrong_kernel_is_found(name, target):
    assert departure(MUTANTS[name], target) > 1


@over("kernel", [ULA(0.1), ULA(0.1, noise=0.2), ULA(0.3, drift_clip=0.1), *ADJUSTED.values()])
def test_no_steps_keep_every_chain(kernel):
    energy, _ = TARGETS["banana"]
    state = kernel.init(energy, energy.sample(10, rng()).double())
    result = run_chain(kernel, energy, state, 0, rng())
    assert all(torch.equal(a, b) for a, b in zip(result.state, state, strict=True))
    assert result.trace is None


@over("kernel", ADJUSTED.values())
def test_the_state_keeps_the_energy_and_gradient_of_its_position(kernel):
    energy, _ = TARGETS["gumbel"]
    state = kernel.init(energy, energy.sample(200, rng()))
    result = run_chain(kernel, energy, state, 7, rng(1)).state
    again = energy_and_grad(energy, result.x)
    assert torch.equal(result.energy, again.energy)
    assert torch.equal(result.grad, again.grad)


def state_at(energy: nn.Module, x: Tensor) -> ChainState:
    return ChainState(x, *energy_and_grad(energy, x))


def test_accept_takes_the_new_row_with_its_probability():
    old = ChainState(torch.zeros(6, 2), torch.zeros(6), torch.zeros(6, 2))
    new = ChainState(torch.ones(6, 2), torch.ones(6), torch.ones(6, 2))
    log_ratio = torch.tensor([0.5, math.log(0.5), math.log(0.5), math.nan, math.inf, -math.inf])
    uniform = torch.tensor([0.999, 0.49, 0.51, 0.0, 0.0, 0.0])
    state, info = accept(old, new, log_ratio, uniform)
    assert state.energy.tolist() == [1, 1, 0, 0, 0, 0]
    assert state.x[:, 0].tolist() == state.grad[:, 1].tolist() == state.energy.tolist()
    assert torch.allclose(info.acceptance, torch.tensor([1, 0.5, 0.5, 0, 0, 0]))
    assert torch.equal(info.moved, 2 * state.energy)


@over("kernel", ADJUSTED.values())
def test_a_proposal_outside_the_domain_is_rejected(kernel):
    """E = x − log x on x > 0 is NaN beyond; its chains must stay inside and keep finite numbers."""

    def energy(x: Tensor) -> Tensor:
        return (x - torch.log(x)).sum(1)

    state = kernel.init(energy, torch.full((500, 2), 0.3, dtype=F64))
    state = run_chain(kernel, energy, state, 20, rng()).state
    assert (state.x > 0).all()
    assert torch.isfinite(state.energy).all()
    assert torch.isfinite(state.grad).all()


LEAPFROG_TARGETS = [*(energy for energy, _ in TARGETS.values()), MLP(2, (16,), seed=3).double()]


@over("energy", LEAPFROG_TARGETS)
@over("mass", [1.0, (2.0, 0.5)])
def test_leapfrog_runs_backwards_to_where_it_began(energy, mass):
    x, p = (torch.randn((20, 2), generator=rng(s), dtype=F64) for s in (0, 1))
    m = torch.tensor(mass, dtype=F64)
    there, q = leapfrog(energy, state_at(energy, x), p, m, 0.1, 20)
    back, r = leapfrog(energy, there, -q, m, 0.1, 20)
    assert (there.x - x).abs().max() > 0.1
    assert torch.allclose(back.x, x, rtol=0, atol=1e-10)
    assert torch.allclose(-r, p, rtol=0, atol=1e-10)


MATRIX = torch.tensor([[2.0, 0.9], [0.9, 0.7]], dtype=F64)


def noise_of(x: Tensor, seed: int = 4) -> Noise:
    return Noise(
        torch.randn(x.shape, generator=rng(seed), dtype=F64),
        torch.rand(len(x), generator=rng(seed + 1), dtype=F64),
    )


@over("energy", LEAPFROG_TARGETS)
def test_a_full_mass_matrix_is_a_change_of_coordinates(energy):
    """With M = LLᵀ, HMC of E at x is HMC of unit mass of y ↦ E(L⁻ᵀy) at y = Lᵀx, move by move."""
    L = torch.linalg.cholesky(MATRIX)
    back = torch.linalg.inv(L)  # rows x = y L⁻¹
    x = torch.randn((40, 2), generator=rng(0), dtype=F64)
    seen, plain = HMC(0.4, 6, mass_matrix=MATRIX), HMC(0.4, 6)  # pyright: ignore
    moved, info = seen.step(energy, state_at(energy, x), noise_of(x), 0.4)
    other = lambda y: energy(y @ back)  # noqa: E731
    there, beside = plain.step(other, state_at(other, x @ L), noise_of(x), 0.4)
    assert torch.allclose(moved.x @ L, there.x, rtol=0, atol=1e-10)
    assert torch.allclose(info.acceptance, beside.acceptance, rtol=0, atol=1e-10)
    unrelated, _ = plain.step(energy, state_at(energy, x), noise_of(x), 0.4)
    assert (unrelated.x - moved.x).abs().max() > 0.05


def test_a_diagonal_mass_matrix_is_the_diagonal():
    energy, x = LEAPFROG_TARGETS[0], torch.randn((30, 2), generator=rng(0), dtype=F64)
    a, b = (
        k.step(energy, state_at(energy, x), noise_of(x), 0.3)[0].x
        for k in (HMC(0.3, 5, mass=(2.0, 0.5)), HMC(0.3, 5, mass_matrix=((2.0, 0.0), (0.0, 0.5))))
    )
    assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_a_mass_matrix_of_another_size_is_named():
    energy, x = LEAPFROG_TARGETS[0], torch.zeros((3, 2), dtype=F64)
    with pytest.raises(ConfigError, match=r"hmc\.mass_matrix: must be \(2, 2\) for events of 2 numbers"):
        HMC(0.1, mass_matrix=((1.0,),)).step(energy, state_at(energy, x), noise_of(x), 0.1)


def test_leapfrog_preserves_volume():
    energy, mass = LEAPFROG_TARGETS[0], torch.tensor([2.0, 0.5], dtype=F64)

    def flow(z: Tensor) -> Tensor:
        state, p = leapfrog(energy, state_at(energy, z[:, :2]), z[:, 2:], mass, 0.3, 5)
        return torch.cat([state.x, p], 1)

    z, step = torch.randn((1, 4), generator=rng(), dtype=F64), 1e-5
    shift = step * torch.eye(4, dtype=F64)
    jacobian = (flow(z + shift) - flow(z - shift)) / (2 * step)
    assert torch.linalg.det(jacobian).item() == pytest.approx(1.0, abs=1e-7)


@over("energy", LEAPFROG_TARGETS)
def test_leapfrog_energy_error_is_second_order(energy):
    x, p = (torch.randn((50, 2), generator=rng(s), dtype=F64) for s in (0, 1))
    mass = torch.ones((), dtype=F64)

    def error(step: float) -> float:
        state, q = leapfrog(energy, state_at(energy, x), p, mass, step, round(0.64 / step))
        change = state.energy + 0.5 * row_sum(q.square()) - energy(x) - 0.5 * row_sum(p.square())
        return change.detach().abs().mean().item()

    order = math.log2(error(0.01) / error(0.005))
    assert order == pytest.approx(2.0, abs=0.02)


def test_one_leapfrog_step_is_mala():
    energy, _ = TARGETS["banana"]
    eps = 0.6
    one, mala = HMC(eps, leapfrog=1), MALA(eps**2 / 2)
    state = mala.init(energy, energy.sample(500, rng()).double())
    noise = mala.draw(state.x, rng(1))
    (a, info_a), (b, info_b) = (k.step(energy, state, noise, k.step_size) for k in (one, mala))
    assert torch.allclose(a.x, b.x, rtol=1e-12, atol=1e-12)
    assert torch.allclose(info_a.acceptance, info_b.acceptance, rtol=1e-10, atol=1e-12)
    assert 0.1 < info_b.acceptance.mean() < 0.99


def half_square(x: Tensor) -> Tensor:
    return 0.5 * x.square().sum(1)


@over(
    "kernel", [ULA(0.1), ULA(0.5), ULA(1.2), ULA(0.5, noise=0.3), ULA(1.0, noise=0.01), ULA(0.2, noise=1.5)]
)
def test_unadjusted_variance_is_the_biased_one(kernel):
    """On E = x²/2 the chain x′ = (1−h)x + σξ has variance σ²/(2h − h²) = T/(1 − h/2)."""
    h, T = kernel.step_size, kernel.temperature
    chains = 40_000
    steps = math.ceil(math.log(1e-9) / math.log(abs(1 - h))) if h != 1 else 2
    state = kernel.init(half_square, torch.zeros(chains, 2, dtype=F64))
    x = run_chain(kernel, half_square, state, steps, rng()).state.x
    variance, error = mean_and_error(x.square())
    exact = T / (1 - h / 2)
    assert_within(variance, exact, error)
    assert z_scores(variance, 1.0, error).min() > z_limit(2)  # the bias is large enough to be seen


def test_temperature_is_the_ratio_of_noise_to_drift():
    assert ULA(0.3).temperature == MALA(0.3).temperature == HMC(0.3).temperature == 1.0
    assert ULA(0.5, noise=1.0).temperature == pytest.approx(1.0)
    assert ULA(1.0, noise=0.01).temperature == pytest.approx(5e-5)


MOVES = [ULA(0.3), ULA(0.3, noise=0.2), ULA(0.3, drift_clip=0.15), ULA(0.3, noise=0.9, drift_clip=0.05)]


def two_points(kernel: ULA) -> tuple[ChainState, ChainState, Tensor]:
    energy, _ = TARGETS["tilted wells"]
    x = energy.sample(50, rng()).double()
    old = state_at(energy, x)
    normal = kernel.draw(x, rng(1)).normal
    return old, state_at(energy, kernel.move(x, old.grad, normal)), normal


@over("kernel", MOVES)
def test_log_transition_is_the_normal_density_up_to_its_constant(kernel):
    old, new, _ = two_points(kernel)

    def normal(a: ChainState, b: ChainState) -> Tensor:
        return row_sum(Normal(a.x - kernel.drift(a.grad), float(kernel.sigma())).log_prob(b.x))

    there = kernel.log_transition(old.x, old.grad, new.x)
    back = kernel.log_transition(new.x, new.grad, old.x)
    constant = -2 * (math.log(kernel.sigma()) + 0.5 * math.log(2 * math.pi))
    assert torch.allclose(there + constant, normal(old, new), rtol=1e-12, atol=1e-12)
    assert torch.allclose(back - there, normal(new, old) - normal(old, new), rtol=1e-10, atol=1e-10)


@over("kernel", MOVES)
def test_log_weight_increment_is_the_ratio_of_the_two_moves(kernel):
    old, new, normal = two_points(kernel)
    there = kernel.log_transition(old.x, old.grad, new.x) - old.energy
    back = kernel.log_transition(new.x, new.grad, old.x) - new.energy
    increment = kernel.log_weight_increment(normal, old.energy, old.grad, new.energy, new.grad)
    assert torch.allclose(increment, back - there, rtol=1e-9, atol=1e-9)


def test_mala_ratio_is_the_metropolis_hastings_ratio():
    kernel = ULA(0.3)
    old, new, normal = two_points(kernel)
    alpha = langevin_alpha(old, new.x, 0.3) - langevin_alpha(new, old.x, 0.3)
    increment = kernel.log_weight_increment(normal, old.energy, old.grad, new.energy, new.grad)
    assert torch.allclose(alpha, increment, rtol=1e-9, atol=1e-9)


@over("kernel", MOVES)
def test_move_step_and_density_share_one_drift(kernel):
    energy, _ = TARGETS["tilted wells"]
    old, new, normal = two_points(kernel)
    stepped, info = kernel.step(
        energy, kernel.init(energy, old.x), Noise(normal, old.x.new_empty(0)), kernel.step_size
    )
    assert torch.allclose(stepped.x, new.x, rtol=1e-14, atol=1e-14)
    assert torch.equal(info.acceptance, torch.ones(50, dtype=F64))
    assert torch.allclose(info.moved, row_dot(new.x - old.x, new.x - old.x))
    centre = kernel.move(old.x, old.grad, torch.zeros_like(normal))
    assert torch.allclose(
        kernel.log_transition(old.x, old.grad, centre), torch.zeros(50, dtype=F64), atol=1e-25
    )
    if kernel.drift_clip is not None:
        moved = (centre - old.x).abs()
        assert moved.max() <= kernel.drift_clip * (1 + 1e-12)
        assert ((kernel.step_size * old.grad).abs() > kernel.drift_clip).any()


@over("name", [name for name in KERNELS if name != "gibbs"])  # which moves signs: tests/kernels/test_gibbs.py
def test_images_move_as_their_flat_selves(name):
    kernel = KERNELS[name](0.1)

    def energy(x: Tensor) -> Tensor:
        return (x + torch.exp(-x)).flatten(1).sum(1)

    image = torch.rand((5, 2, 2, 3), generator=rng(), dtype=F64)
    a = run_chain(kernel, energy, kernel.init(energy, image), 4, rng(2))
    b = run_chain(kernel, energy, kernel.init(energy, image.flatten(1)), 4, rng(2))
    assert a.state.x.shape == image.shape
    assert torch.allclose(a.state.x.flatten(1), b.state.x, rtol=1e-13)
    assert torch.allclose(a.info.moved, b.info.moved)


BAD_SETTINGS: list[tuple[Callable[[], Kernel], str]] = [
    (lambda: ULA(0.0), "ula.step_size"),
    (lambda: MALA(float("nan")), "mala.step_size"),
    (lambda: HMC(-0.1), "hmc.step_size"),
    (lambda: ULA(0.1, noise=0.0), "ula.noise"),
    (lambda: ULA(0.1, drift_clip=-1.0), "ula.drift_clip"),
    (lambda: HMC(0.1, leapfrog=0), "hmc.leapfrog"),
    (lambda: HMC(0.1, mass=0.0), "hmc.mass"),
    (lambda: HMC(0.1, mass=(1.0, -1.0)), "hmc.mass"),
    (lambda: HMC(0.1, mass=torch.tensor([1.0, 0.0])), "hmc.mass"),
    (lambda: HMC(0.1, mass=2.0, mass_matrix=((1.0, 0.0), (0.0, 1.0))), "hmc.mass"),
    (lambda: HMC(0.1, mass_matrix=((1.0, 2.0), (2.0, 1.0))), "hmc.mass_matrix"),
    (lambda: HMC(0.1, mass_matrix=((1.0, 1.0), (1.0, 1.0))), "hmc.mass_matrix"),
    (lambda: HMC(0.1, mass_matrix=((1.0, 0.5), (0.0, 1.0))), "hmc.mass_matrix"),
    (lambda: HMC(0.1, mass_matrix=((1.0, 0.0),)), "hmc.mass_matrix"),
    (lambda: HMC(0.1, mass="abc"), "hmc.mass"),  # pyright: ignore
    (lambda: HMC(0.1, mass=()), "hmc.mass"),
]


@each("make, field", BAD_SETTINGS)
def test_a_bad_setting_is_named(make, field):
    with pytest.raises(ConfigError) as raised:
        make()
    assert raised.value.path == field


@each(
    "matrix, said",
    [
        (((1, 0), (0,)), "must be numbers, in rows of one length, got ((1, 0), (0,))"),
        ("abc", "must be numbers, in rows of one length, got 'abc'"),
        (((1.0, 0.5), (0.0, 1.0)), "must be finite and symmetric, got [[1.0, 0.5], [0.0, 1.0]]"),
        (((1.0, 0.0), (0.0, math.nan)), "must be finite and symmetric, got [[1.0, 0.0], [0.0, nan]]"),
    ],
)
def test_what_is_no_mass_matrix_is_named(matrix, said):
    with pytest.raises(ConfigError) as raised:
        HMC(0.1, mass_matrix=matrix)
    assert str(raised.value) == f"hmc.mass_matrix: {said}"


def test_a_kernel_is_a_value():
    assert HMC(0.1, mass=torch.tensor([1.0, 2.0])) == HMC(0.1, mass=(1.0, 2.0))
    assert len({MALA(0.1), MALA(0.1), MALA(0.2), ULA(0.1)}) == 3


@pytest.mark.parametrize("mass", [torch.tensor([[2.0, 1.0], [1.0, 2.0]]), (1.0, 2.0, 3.0), (1.0,)])
def test_masses_of_another_shape_are_refused_by_name(mass):
    x = torch.zeros(5, 2)
    kernel = HMC(0.1, mass=mass)
    state = kernel.init(lambda x: x.square().sum(1), x)
    with pytest.raises(ConfigError, match=r"hmc.mass: must be one number .* of shape \(2,\); .*mass_matrix"):
        kernel.step(lambda x: x.square().sum(1), state, kernel.draw(x, torch.Generator()), 0.1)
