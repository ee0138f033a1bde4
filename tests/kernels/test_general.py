"""Metropolis–Hastings with any proposal; detailed balance over states is in tests/laws/test_discrete.py."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import assert_within, each, mean_and_error, quadrature, z_limit, z_scores
from torch import Tensor

import metastable as ms
from metastable.core.configure import describe
from metastable.core.errors import ConfigError
from metastable.kernels import (
    KERNELS,
    Flips,
    Independent,
    MetropolisHastings,
    RandomWalk,
    compiled,
    run_chain,
)
from metastable.proposals import Gaussian, Signs, Uniform

F64 = torch.float64
over = pytest.mark.parametrize


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gumbel(x: Tensor) -> Tensor:
    """E = x + e^{−x}: skewed, so that a wrong sign cannot hide."""
    return (x + torch.exp(-x)).sum(1)


def gumbel_draws(n: int) -> Tensor:
    return -torch.log(-torch.log(torch.rand((n, 1), generator=rng(9), dtype=F64)))


class Drifting:
    """x* = x/2 + ½ + 0.8ξ: pulls towards 1 and is far from symmetric."""

    def draw(self, x: Tensor, noise: Tensor) -> Tensor:
        return 0.5 * x + 0.5 + 0.8 * noise

    def log_density(self, x: Tensor, y: Tensor) -> Tensor:
        return -((y - 0.5 * x - 0.5) / 0.8).square().sum(1) / 2


class Uncorrected(Drifting):
    """The mutant: the same moves, as if they were symmetric."""

    def log_density(self, x: Tensor, y: Tensor) -> Tensor:
        return x.new_zeros(len(x))


class Multiplicative:
    """x* = x·e^{0.7ξ} on positive numbers: symmetric in log x only, so the factor y/x matters."""

    def draw(self, x: Tensor, noise: Tensor) -> Tensor:
        return x * torch.exp(0.7 * noise)

    def log_density(self, x: Tensor, y: Tensor) -> Tensor:
        return (-((y / x).log() / 0.7).square() / 2 - y.log()).sum(1)


MOVES = {
    "random walk": RandomWalk(1.5),
    "drifting": Drifting(),
    "independent, gaussian": Independent(Gaussian(torch.ones(1, dtype=F64), 2.5)),
    "a proposal": Gaussian(torch.zeros(1, dtype=F64), 3.0),
}


def statistics(x: Tensor) -> Tensor:
    return torch.cat([x, x.square(), torch.exp(-x)], 1)


def moved_statistics(proposal, steps: int = 3) -> Tensor:
    """From exact draws: an invariant kernel leaves every expectation where it was."""
    kernel, x = MetropolisHastings(proposal), gumbel_draws(60_000)
    return statistics(run_chain(kernel, gumbel, kernel.init(gumbel, x), steps, rng(1)).state.x)


def truth() -> Tensor:
    return quadrature(gumbel, [(-5.0, 40.0, 200_001)]).mean(statistics)


@over("proposal", MOVES.values(), ids=MOVES)
def test_a_skewed_target_is_left_invariant(proposal):
    mean, error = mean_and_error(moved_statistics(proposal))
    assert_within(mean, truth(), error)


def test_without_the_hastings_factor_it_is_not():
    mean, error = mean_and_error(moved_statistics(Uncorrected()))
    scores = z_scores(mean, truth(), error)
    assert scores.max() > z_limit(scores.numel())


def test_chains_from_elsewhere_arrive():
    kernel = MetropolisHastings(RandomWalk(2.5))
    w = ms.sample(gumbel, 20_000, kernel=kernel, steps=60, init=torch.full((1, 1), 3.0, dtype=F64))
    mean, error = mean_and_error(statistics(w.x))
    assert_within(mean, truth(), error)
    assert 0.2 < w.info["acceptance"] < 1


def test_positive_numbers_by_a_multiplicative_walk():
    """Gamma(3): E = x − 2 log x on x > 0, mean 3 and variance 3; a candidate cannot leave the support."""

    def gamma(x: Tensor) -> Tensor:
        return (x - 2 * x.log()).sum(1)

    w = ms.sample(gamma, 20_000, kernel=MetropolisHastings(Multiplicative()), steps=60, init=torch.ones(1, 1))
    mean, error = mean_and_error(torch.cat([w.x, (w.x - 3).square()], 1))
    assert_within(mean, torch.tensor([3.0, 3.0]), error)


def test_candidates_of_density_zero_are_refused():
    box = Uniform(torch.zeros(1), torch.ones(1))
    kernel = MetropolisHastings(RandomWalk(5.0))

    def inside(x: Tensor) -> Tensor:
        return -box.log_prob(x)

    x = torch.full((100, 1), 0.5)
    state = run_chain(kernel, inside, kernel.init(inside, x), 20, rng()).state
    assert bool(((state.x >= 0) & (state.x <= 1)).all())


def test_a_perfect_independence_sampler_accepts_everything():
    q = Gaussian(torch.ones(2), 0.7)

    def energy(x: Tensor) -> Tensor:
        return 3.0 - q.log_prob(x)

    info = ms.sample(energy, 100, kernel=MetropolisHastings(q), steps=5, event_shape=2).info
    assert info["acceptance"] == pytest.approx(1.0, abs=1e-6)


def test_signs_make_an_independence_sampler_of_states():
    energy = ms.energies.RBM(4, 3, scale=0.4)
    w = ms.sample(energy, 20_000, kernel=MetropolisHastings(Signs.uniform(4)), steps=40)
    from metastable.proposals.signs import states

    mean, error = mean_and_error(w.x)
    assert_within(mean, energy.exact_probabilities() @ states(4), error)


@pytest.mark.filterwarnings("error:engine")
def test_compiled_chains_are_the_eager_ones(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled.compiled_several.cache_clear()
    kernel, x = MetropolisHastings(0.7), gumbel_draws(6)
    eager, fast = (
        run_chain(kernel, gumbel, kernel.init(gumbel, x), 5, rng(4), engine=engine)
        for engine in ("eager", "compile")
    )
    compiled.compiled_several.cache_clear()
    torch.testing.assert_close(eager.state.x, fast.state.x, rtol=1e-10, atol=1e-10)


def test_training_and_evaluations_with_a_random_walk():
    x = torch.randn(200, 2, generator=rng())
    kernel = MetropolisHastings(0.5)
    run = ms.fit("mixture", x, ms.methods.PersistentCD(kernel=kernel, walkers=50), steps=3, evaluate=False)
    assert run.config["method"]["kernel"] == {"name": "metropolis-hastings", "proposal": 0.5}
    assert kernel.evaluations(7) == 8
    assert kernel.gradients_per_step == 0


@each("given", [0.3, "flips", {"name": "random-walk", "scale": 0.3}, RandomWalk(0.3), Flips(0.2)])
def test_settings_describe_the_kernel_and_build_it_again(given):
    kernel = MetropolisHastings(given)
    settings = describe(kernel)
    settings.pop("name")
    assert KERNELS["metropolis-hastings"](**settings).transition == kernel.transition


BAD = [
    (lambda: MetropolisHastings(-1.0), "random-walk.scale: must be"),
    (lambda: MetropolisHastings("random-wlk"), "did you mean 'random-walk'"),
    (lambda: MetropolisHastings({"name": "flips", "p": 0.1}), "metropolis-hastings.proposal.p: unknown"),
    (lambda: MetropolisHastings(RandomWalk), "must have draw"),
    (lambda: MetropolisHastings(None), "must have draw"),
    (lambda: Flips(1.0), "between 0 and 1"),
]


@each("make, words", BAD)
def test_bad_proposals_are_named(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
