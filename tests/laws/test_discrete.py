"""Energies over units coded −1 and +1 against enumeration: identities that hold to rounding, and their mutants."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from conftest import assert_within, each, mean_and_error, z_limit, z_scores
from torch import Tensor

from metastable.core.errors import ConfigError, InputError
from metastable.data.toy import bars_and_stripes, toy_set
from metastable.energies import RBM, BoltzmannMachine, Hopfield, check_energy
from metastable.energies import couplings as module
from metastable.evaluation.discrete import (
    counting_noise,
    enumerated_log_weights,
    exact_log_partition,
    total_variation,
)
from metastable.kernels import Flips, Gibbs, MetropolisHastings, Noise
from metastable.kernels.gibbs import sweep_by_differences
from metastable.proposals import Signs, fit_signs
from metastable.proposals.signs import MOST_UNITS, log_2cosh, require_few, state_numbers, states
from metastable.walkers.smc import ais

F64 = torch.float64
over = pytest.mark.parametrize


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=F64)


def rbm(visible: int = 4, hidden: int = 3, seed: int = 0) -> RBM:
    return RBM.of(
        0.7 * normal(visible, hidden, seed=seed), 0.4 * normal(visible, seed=1), 0.5 * normal(hidden, seed=2)
    )


def machine(units: int = 4) -> BoltzmannMachine:
    raw = 0.6 * normal(units, units).triu(1)
    return BoltzmannMachine.of(raw + raw.T, 0.4 * normal(units, seed=1))


ENERGIES = {"rbm": rbm(), "boltzmann machine": machine(), "hopfield": Hopfield(states(4)[[1, 6]])}


# ---- energies


def free_energy_by_summing(energy: RBM, v: Tensor) -> Tensor:
    h = states(energy.hidden)
    joint = torch.stack([energy.joint_energy(row.expand(len(h), -1), h) for row in v])
    return -torch.logsumexp(-joint, 1)


def test_the_free_energy_sums_the_hidden_units_out():
    energy, v = rbm(), states(4)
    torch.testing.assert_close(energy(v), free_energy_by_summing(energy, v), rtol=0, atol=1e-12)


@over(
    "wrong",
    [
        lambda e, v: -v @ e.visible_bias - log_2cosh(v @ e.weight).sum(1),  # hidden bias left out
        lambda e, v: (
            -v @ e.visible_bias - torch.nn.functional.softplus(v @ e.weight + e.hidden_bias).sum(1)
        ),  # 0/1
        lambda e, v: (
            -v @ e.visible_bias - log_2cosh(2 * (v @ e.weight + e.hidden_bias)).sum(1)
        ),  # the 2 twice
    ],
    ids=["no hidden bias", "0/1 coding", "factor 2"],
)
def test_mutants_of_the_free_energy_are_seen(wrong):
    energy, v = rbm(), states(4)
    assert (wrong(energy, v) - free_energy_by_summing(energy, v)).abs().max() > 0.1


def test_log_z_of_a_restricted_machine_is_the_same_from_either_layer_and_from_both():
    for energy in (rbm(5, 3), rbm(3, 5)):
        from_visible = torch.logsumexp(-energy(states(energy.units)), 0)
        from_hidden = torch.logsumexp(-energy.structure().transposed()(states(energy.hidden)), 0)
        both = states(energy.units + energy.hidden)
        joint = energy.joint_energy(both[:, : energy.units], both[:, energy.units :])
        for value in (from_hidden, torch.logsumexp(-joint, 0), energy.log_partition()):
            torch.testing.assert_close(value, from_visible, rtol=0, atol=1e-12)


def test_a_boltzmann_machine_is_its_quadratic_form():
    energy, s = machine(), states(4)
    W, b = energy.weight, energy.bias
    expected = torch.stack([-0.5 * row @ W @ row - b @ row for row in s])
    torch.testing.assert_close(energy(s), expected, rtol=0, atol=1e-12)
    assert torch.equal(W, W.T)
    assert bool((W.diagonal() == 0).all())
    torch.optim.SGD(energy.parameters(), 0.1).zero_grad()
    energy(s).sum().backward()
    assert torch.equal(energy.weight, energy.weight.T)


@over("energy", ENERGIES.values(), ids=ENERGIES)
def test_probabilities_are_those_of_the_energy(energy):
    log_p = -energy(states(4)) - energy.log_partition()
    torch.testing.assert_close(energy.exact_probabilities(), log_p.exp().detach(), rtol=1e-12, atol=1e-14)
    assert math.isclose(float(energy.exact_probabilities().sum()), 1.0, rel_tol=1e-12)


@over("energy", [rbm(5, 3), rbm(3, 5), machine()], ids=["wide", "narrow", "boltzmann machine"])
def test_exact_draws_have_the_exact_frequencies(energy):
    n = 20_000
    p = energy.exact_probabilities()
    found = torch.bincount(state_numbers(energy.sample(n, rng(3))), minlength=len(p)) / n
    assert_within(found, p, torch.sqrt(p * (1 - p) / n))


@over("energy", [rbm(), machine()], ids=["rbm", "boltzmann machine"])
def test_the_path_begins_at_the_reference_and_ends_at_the_energy(energy):
    fields, s = 0.5 * normal(4, seed=7), states(4)
    torch.testing.assert_close(
        energy.tempered(fields, 0.0)(s), -Signs(fields).log_prob(s), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(energy.tempered(fields, 1.0)(s), energy(s), rtol=0, atol=1e-12)


def test_images_and_their_flat_selves_have_the_same_energy():
    image = RBM((1, 2, 2), 3, scale=0.5, seed=1)
    flat = RBM(4, 3, scale=0.5, seed=1)
    x = states(4, torch.float32)
    torch.testing.assert_close(image(x.view(-1, 1, 2, 2)), flat(x))
    assert image.sample(5, rng()).shape == (5, 1, 2, 2)


# ---- conditionals and invariance


def up_probability(sweep: Callable[[Tensor, Tensor], Tensor], x: Tensor, unit: int) -> Tensor:
    """P(unit becomes +1) of a sweep in which only it moves: the uniform number at which its outcome changes."""
    low, high = x.new_zeros(len(x)), x.new_ones(len(x))
    at_zero = sweep(x, low[:, None].expand_as(x))[:, unit]
    for _ in range(60):
        middle = (low + high) / 2
        same = sweep(x, middle[:, None].expand_as(x))[:, unit] == at_zero
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return torch.where(at_zero > 0, low, 1 - low)


def sweep_matrix(energy, only: Callable, d: int = 4) -> Tensor:
    """The transition matrix of one sweep, as a product of one matrix for each unit."""
    s = states(d)
    total = torch.eye(2**d, dtype=F64)
    for i in range(d):
        p = up_probability(lambda x, u, i=i: only(energy, x, u, torch.arange(d) == i), s, i)
        matrix = torch.zeros(2**d, 2**d, dtype=F64)
        for sign, weight in ((1.0, p), (-1.0, 1 - p)):
            to = s.clone()
            to[:, i] = sign
            matrix[torch.arange(2**d), state_numbers(to)] += weight
        total = total @ matrix
    return total


def structured(energy, x, uniform, free):
    return energy.sweep(x, uniform, free)


def by_differences(energy, x, uniform, free):
    return sweep_by_differences(energy, x, energy(x), uniform, free, None)[0]


@over(
    ("energy", "only"),
    [
        (machine(), structured),
        (ENERGIES["hopfield"], structured),
        (machine(), by_differences),
        (rbm(), by_differences),
    ],
    ids=["boltzmann machine", "hopfield", "boltzmann machine by differences", "rbm by differences"],
)
def test_a_sweep_leaves_the_model_invariant(energy, only):
    with torch.no_grad():
        matrix, p = sweep_matrix(energy, only), energy.exact_probabilities()
    torch.testing.assert_close(matrix.sum(1), torch.ones(16, dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(p @ matrix, p, rtol=0, atol=1e-12)
    assert matrix.min() > 0  # every state reaches every other


def test_a_sweep_in_the_other_coding_is_seen(monkeypatch):
    """P(+1) = σ(field), right for units 0 and 1, is wrong for units −1 and +1."""
    monkeypatch.setattr(
        module, "draw_units", lambda field, u: 2 * (u < torch.sigmoid(field)).to(field.dtype) - 1
    )
    energy = machine()
    with torch.no_grad():
        matrix, p = sweep_matrix(energy, structured), energy.exact_probabilities()
    assert total_variation(p @ matrix, p) > 0.05


def block_matrix(energy: RBM) -> Tensor:
    """Σ_h p(h | v) p(v′ | h) from the conditionals that the machine gives."""
    v, h = states(energy.units), states(energy.hidden)

    def product(p: Tensor, s: Tensor) -> Tensor:
        return torch.where(s[None] > 0, p[:, None], 1 - p[:, None]).prod(2)

    return product(energy.hidden_probability(v), h) @ product(energy.visible_probability(h), v)


def block_frequencies(energy: RBM, n: int) -> Tensor:
    v = states(energy.units).repeat_interleave(n, 0)
    u = torch.rand((len(v), energy.sweep_uniforms), generator=rng(5), dtype=F64)
    to = state_numbers(energy.sweep(v, u)).view(-1, n)
    return torch.stack([torch.bincount(row, minlength=2**energy.units) for row in to]) / n


def test_the_block_sweep_is_its_conditionals_which_leave_the_model_invariant():
    energy, n = rbm(3, 2), 20_000
    with torch.no_grad():
        matrix, p = block_matrix(energy), energy.exact_probabilities()
        torch.testing.assert_close(p @ matrix, p, rtol=0, atol=1e-12)
        found = block_frequencies(energy, n)
    assert_within(found, matrix, torch.sqrt(matrix * (1 - matrix) / n))


def test_a_block_sweep_without_the_hidden_bias_is_seen(monkeypatch):
    energy, n = rbm(3, 2), 20_000
    matrix = block_matrix(energy).detach()
    monkeypatch.setattr(module.Layers, "hidden_field", lambda self, v: v @ self.weight)
    with torch.no_grad():
        found = block_frequencies(energy, n)
    scores = z_scores(found, matrix, torch.sqrt(matrix * (1 - matrix) / n))
    assert scores.max() > z_limit(scores.numel())


# ---- Metropolis–Hastings on states


class Upwards:
    """Each unit at −1 goes up with probability 0.7, each at +1 down with 0.2: not symmetric."""

    discrete = True

    def draw(self, x: Tensor, noise: Tensor) -> Tensor:
        return torch.where(noise < 0, -x, x)  # the tests choose who flips

    def log_density(self, x: Tensor, y: Tensor) -> Tensor:
        flip = torch.where(x > 0, 0.2, 0.7).to(x)
        return torch.where(x == y, 1 - flip, flip).log().sum(1)


def flow(energy, kernel, transition, d: int = 3) -> Tensor:
    """π(x) q(y | x) 𝒜(y, x) for all pairs, with acceptances as the kernel reports them."""
    s = states(d)
    p = energy.exact_probabilities()
    total = torch.zeros(2**d, 2**d, dtype=F64)
    for flips in s:
        state = kernel.init(energy, s)
        noise = Noise(flips.expand_as(s), torch.full((2**d,), 2.0, dtype=F64))  # never taken
        with torch.no_grad():
            _, info = kernel.step(energy, state, noise, 0.0)
        y = transition.draw(s, noise.normal)
        log_q = transition.log_density(s, y)
        if isinstance(transition, Flips):  # up to the constant that it leaves out
            log_q = log_q + d * math.log(1 - transition.probability)
        total[torch.arange(2**d), state_numbers(y)] = p * log_q.exp() * info.acceptance
    return total


@over("transition", [Flips(0.3), Upwards()], ids=["flips", "upwards"])
def test_metropolis_hastings_is_in_detailed_balance(transition):
    energy = rbm(3, 2)
    found = flow(energy, MetropolisHastings(transition), transition)
    torch.testing.assert_close(found, found.T, rtol=0, atol=1e-12)
    assert (found + torch.eye(8) > 0).all()


def test_without_the_hastings_factor_detailed_balance_is_lost():
    class Uncorrected(Upwards):
        def log_density(self, x: Tensor, y: Tensor) -> Tensor:
            return x.new_zeros(len(x))

    found = flow(rbm(3, 2), MetropolisHastings(Uncorrected()), Upwards())
    assert (found - found.T).abs().max() > 0.005


# ---- annealing


@over("energy", [rbm(6, 4), machine(6)], ids=["rbm", "boltzmann machine"])
@over("fields", [torch.zeros(6, dtype=F64), 0.4 * normal(6, seed=9)], ids=["uniform", "base rate"])
def test_mean_annealed_weight_is_z(energy, fields):
    walkers = ais(energy, Signs(fields), 4000, 8, Gibbs(), 1, rng(2))
    weight = torch.exp(walkers.log_weight - energy.log_partition())
    assert_within(*_with_truth(weight, 1.0))


def _with_truth(values: Tensor, truth: float) -> tuple[Tensor, float, Tensor]:
    mean, error = mean_and_error(values)
    return mean, truth, error


def test_an_energy_without_structure_anneals_through_its_differences():
    inner = machine(5)

    def energy(x: Tensor) -> Tensor:
        return inner(x)

    energy.discrete = True  # pyright: ignore
    walkers = ais(energy, Signs.uniform(5, torch.empty(0, dtype=F64)), 3000, 6, Gibbs(), 1, rng(2))
    weight = torch.exp(walkers.log_weight - inner.log_partition())
    assert_within(*_with_truth(weight, 1.0))


def test_annealing_with_a_kernel_for_another_coding_is_seen(monkeypatch):
    energy = rbm(6, 4)
    monkeypatch.setattr(
        module, "draw_units", lambda field, u: 2 * (u < torch.sigmoid(field)).to(field.dtype) - 1
    )
    walkers = ais(energy, Signs(torch.zeros(6, dtype=F64)), 4000, 8, Gibbs(), 1, rng(2))
    mean, error = mean_and_error(torch.exp(walkers.log_weight - energy.log_partition()))
    assert z_scores(mean, 1.0, error) > z_limit()


def test_any_discrete_energy_is_enumerated():
    inner = machine(5)
    like = torch.empty(0, dtype=F64)
    torch.testing.assert_close(
        torch.logsumexp(enumerated_log_weights(inner, (5,), like), 0), inner.log_partition()
    )
    z = exact_log_partition(lambda x: inner(x), (5,), like, 0)
    assert z.std_error == 0
    assert math.isclose(z.value, float(inner.log_partition()), rel_tol=1e-12)
    assert z.walkers is not None
    assert_within(
        *_with_truth(z.walkers.x[:, 0], float((inner.exact_probabilities() * states(5)[:, 0]).sum()))
    )


# ---- proposals and counting


def test_signs_are_normalised_and_drawn_as_they_say():
    q, s = Signs(normal(3)), states(3)
    assert math.isclose(float(q.log_prob(s).exp().sum()), 1.0, rel_tol=1e-12)
    x = q.sample(20_000, rng(1))
    mean, error = mean_and_error(x)
    assert_within(mean, torch.tanh(q.fields), error)
    assert bool(torch.isneginf(q.log_prob(torch.tensor([[0.0, 1.0, 1.0]], dtype=F64))))


def test_fitted_signs_have_the_datas_means():
    x = Signs(torch.tensor([0.8, -0.3, 0.0])).sample(5000, rng())
    mean, error = mean_and_error(x)
    assert_within(torch.tanh(fit_signs(x, 1e-6).fields), mean, error)
    always = fit_signs(torch.ones(10, 2))
    assert torch.isfinite(always.fields).all()


def test_the_noise_of_counting_is_as_predicted():
    p = torch.softmax(normal(500), 0)
    n, found = 20_000, []
    for seed in range(20):
        rows = torch.multinomial(p, n, replacement=True, generator=rng(seed))
        found.append(total_variation(torch.bincount(rows, minlength=500) / n, p))
    assert math.isclose(float(torch.stack(found).mean()), counting_noise(p, n), rel_tol=0.03)


def test_bars_and_stripes_are_all_different_and_of_equal_probability():
    toy, patterns = toy_set("bars-and-stripes"), bars_and_stripes(4)
    assert len(patterns.flatten(1).unique(dim=0)) == 2 * 2**4 - 2
    probability = toy.log_density(states(16).view(-1, 1, 4, 4)).exp()
    assert math.isclose(float(probability.sum()), 1.0, rel_tol=1e-12)
    found = torch.bincount(state_numbers(toy.sample(30_000)), minlength=2**16)
    assert bool((found[probability == 0] == 0).all())
    assert_within(found[probability > 0] / 30_000, 1 / 30, math.sqrt(29 / 30**2 / 30_000))


# ---- memory


def test_orthogonal_patterns_are_fixed_points_and_minima():
    hadamard = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    h4 = torch.kron(hadamard, hadamard)
    h16 = torch.kron(h4, h4)
    memory = Hopfield(h16[1:3])
    torch.testing.assert_close(memory.complete(h16[1:3]), h16[1:3])
    one_flip = h16[1] * (1 - 2 * torch.eye(16))
    assert bool((memory(one_flip) > memory(h16[1:2])).all())
    torch.testing.assert_close(memory.complete(one_flip), h16[1].expand(16, 16))


def test_random_patterns_come_back_below_capacity_and_not_above():
    def rate(count: int) -> float:
        patterns = Signs.uniform(200).sample(count, rng(count))
        known = torch.rand(patterns.shape, generator=rng(1)) < 0.5
        return float((Hopfield(patterns).complete(patterns, known) == patterns).float().mean())

    assert rate(10) > 0.99
    assert rate(80) < 0.95


def test_the_pseudo_inverse_keeps_patterns_that_hebb_confuses():
    base = Signs.uniform(60).sample(1, rng(0))
    patterns = torch.where(torch.rand((10, 60), generator=rng(1)) < 0.15, -base, base)
    kept = Hopfield(patterns, "pseudo-inverse").complete(patterns)
    confused = Hopfield(patterns).complete(patterns)
    assert torch.equal(kept, patterns)
    assert not torch.equal(confused, patterns)


def test_known_units_stay_and_warm_completion_is_the_clamped_model():
    patterns = states(5, F64)[[3, 12, 26]]
    memory, known = Hopfield(patterns), torch.tensor([True, True, False, False, False])
    n, beta = 20_000, 1.5
    back = memory.complete(patterns[:1].expand(n, 5), known, beta=beta, sweeps=20)
    assert bool((back[:, :2] == patterns[0, :2]).all())
    s = states(5)
    allowed = (s[:, :2] == patterns[0, :2]).all(1)
    p = torch.where(allowed, torch.exp(-beta * memory(s)), 0.0)
    p = p / p.sum()
    found = torch.bincount(state_numbers(back), minlength=32) / n
    assert_within(found, p, torch.sqrt(p * (1 - p) / n))


# ---- bad input


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: Hopfield(torch.tensor([[0.0, 1.0]])), "patterns: .* got values such as 0; recode bits"),
    (lambda: Hopfield(torch.ones(3)), "patterns: must be"),
    (lambda: Hopfield(torch.ones(1, 3), "hebb"), "did you mean 'hebbian'"),
    (lambda: RBM(0, 3), "units: must be an integer of at least 1"),
    (lambda: RBM(3, 0), "hidden: must be an integer of at least 1"),
    (lambda: BoltzmannMachine.of(torch.eye(3)), "zero diagonal"),
    (lambda: BoltzmannMachine.of(torch.ones(2, 3)), "square"),
    (lambda: BoltzmannMachine(30).log_partition(), f"at most 2\\^{MOST_UNITS}.*metastable.log_partition"),
    (lambda: BoltzmannMachine(30).sample(3, rng()), "too many to list"),
    (lambda: require_few(MOST_UNITS + 1), "too many"),
    (lambda: Signs(torch.tensor([math.inf])), "fields: must be finite"),
    (lambda: check_energy(RBM(3, 2), torch.rand(5, 3)), "threshold it first"),
    (lambda: check_energy(RBM(3, 2), torch.tensor([[0.0, 1, 0]])), "2\\*x − 1"),
    (lambda: Hopfield(torch.ones(1, 3)).complete(torch.ones(1, 4)), "partial: must be"),
    (lambda: Hopfield(torch.ones(1, 3)).complete(torch.ones(1, 3), torch.ones(3)), "bools"),
    (lambda: Hopfield(torch.ones(1, 3)).complete(torch.ones(1, 3), torch.ones(2) > 0), "known: must be"),
    (lambda: Hopfield(torch.ones(1, 3)).complete(torch.zeros(1, 3)), "partial"),
    (lambda: Hopfield(torch.ones(1, 3)).complete(torch.ones(1, 3), beta=0.0), "beta"),
]


@each("act, words", BAD)
def test_bad_input_is_named(act, words):
    with pytest.raises((InputError, ConfigError), match=words):
        act()


def test_large_machines_are_enumerated_by_their_small_layer():
    assert RBM(300, 5).enumerable
    assert not RBM(300, 40).enumerable
    assert RBM(300, 5).sample(4, rng()).shape == (4, 300)
