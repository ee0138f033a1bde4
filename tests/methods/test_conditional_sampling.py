"""Algorithms 2 and 4 with fields and energies in closed form: the law they end in, what they cost and refuse."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_within, mean_and_error, z_limit, z_scores
from torch import nn

from metastable.core.errors import ConfigError, InputError
from metastable.core.types import bind
from metastable.kernels import HMC, MALA, ULA
from metastable.methods import conditional_chains
from metastable.methods import interpolating_sde as algorithms
from metastable.methods.conditional_sampling import (
    _langevin_step,
    best_of,
    follow_sde,
    sample_from_proposal,
    sample_interpolating,
    split_evaluations,
)
from metastable.proposals import Gaussian, InterpolantFlow, MixtureField

over = pytest.mark.parametrize
GIVEN = torch.tensor([[-1.0], [2.0], [0.5]], dtype=torch.float64)
SD = 0.5


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class GaussianPath:
    """The exact flow from N(0, 1) to N(given, SD²) along I_t = (1 − t) z + t y, with the exact energies."""

    event_shape, context_shape = (1,), (1,)

    def moments(self, t, given):
        return t * given[:, None], (1 - t) ** 2 + t**2 * SD**2

    def sample(self, n, rng, given, *, until=1.0):
        mean, variance = self.moments(until, given)
        z = torch.randn((len(given), n, 1), generator=rng, dtype=torch.float64)
        return mean + math.sqrt(variance) * z

    def velocity(self, y, t, given):
        mean, variance = self.moments(t, given)
        return given[:, None] + (t * SD**2 - (1 - t)) / variance * (y - mean)

    def energy(self, y, given, t):
        t = t[..., None]
        return 0.5 * ((y - t * given[:, None]).square() / ((1 - t) ** 2 + t**2 * SD**2)).sum(-1)


PATH = GaussianPath()


def moments_of(y):
    """Means and mean squares about the truth of each context, with their standard errors."""
    centred = (y[..., 0] - GIVEN) / SD
    mean, mean_se = mean_and_error(centred.T)
    square, square_se = mean_and_error(centred.T.square())
    return torch.cat([mean, square - 1]), torch.cat([mean_se, square_se])


# ---- Algorithm 4


@over("t_low", [0.0, 0.4, 0.9])
def test_the_sde_keeps_the_law_of_the_path(t_low):
    start = PATH.sample(4000, rng(1), GIVEN, until=t_low)
    y = follow_sde(bind(PATH.energy, GIVEN, t_low), PATH, start, rng(2), t_low=t_low, steps=400, eta=0.5)
    off, error = moments_of(y)
    assert_within(off, torch.zeros(6), error)


def test_a_step_of_the_sde_asks_flow_and_energy_at_its_beginning():
    asked = []

    class Watched(GaussianPath):
        def velocity(self, y, t, given):
            asked.append(("flow", float(t)))
            return super().velocity(y, t, given)

        def energy(self, y, given, t):
            asked.append(("energy", float(t.flatten()[0])))
            return super().energy(y, given, t)

    path, start = Watched(), PATH.sample(2, rng(), GIVEN, until=0.2)
    follow_sde(bind(path.energy, GIVEN, 0.2), path, start, rng(), t_low=0.2, steps=4, eta=0.1)
    for who in ("flow", "energy"):
        assert [t for name, t in asked if name == who] == pytest.approx([0.2, 0.4, 0.6, 0.8])


def mutant(monkeypatch, name):
    """The SDE with one thing wrong."""
    if name == "sign":
        right = algorithms.energy_and_grad

        def wrong(E, x):
            return (lambda e: e._replace(grad=-e.grad))(right(E, x))

        monkeypatch.setattr(algorithms, "energy_and_grad", wrong)
    elif name == "no score":
        right = algorithms.energy_and_grad

        def none(E, x):
            return (lambda e: e._replace(grad=0 * e.grad))(right(E, x))

        monkeypatch.setattr(algorithms, "energy_and_grad", none)
    else:  # √η for √(2η)
        right = algorithms.normal_like
        monkeypatch.setattr(algorithms, "normal_like", lambda x, g: right(x, g) / math.sqrt(2))


@over("name", ["sign", "no score", "noise"])
def test_an_sde_with_a_wrong_term_has_another_law(monkeypatch, name):
    mutant(monkeypatch, name)
    start = PATH.sample(4000, rng(1), GIVEN, until=0.4)
    y = follow_sde(bind(PATH.energy, GIVEN, 0.4), PATH, start, rng(2), t_low=0.4, steps=400, eta=0.5)
    off, error = moments_of(y)
    assert float(z_scores(off, 0.0, error).max()) > 2 * z_limit(6)


def test_the_energy_puts_a_wrong_field_right():
    """A field that forgets the context: the flow alone ends at 0, the SDE with a large η at the context."""

    class Forgetful(GaussianPath):
        def velocity(self, y, t, given):
            return super().velocity(y, t, torch.zeros_like(given))

        def sample(self, n, rng, given, *, until=1.0):
            return super().sample(n, rng, torch.zeros_like(given), until=until)

    settings = {"t_low": 0.2, "evaluations": 600}
    alone = sample_interpolating(PATH.energy, Forgetful(), 500, GIVEN, rng(), eta=0.0, **settings).x
    helped = sample_interpolating(PATH.energy, Forgetful(), 500, GIVEN, rng(), eta=0.1, **settings).x
    assert float((alone.mean(1) - GIVEN).abs().min()) > 0.4
    assert float((helped.mean(1) - GIVEN).abs().max()) < 0.1
    usual = sample_interpolating(PATH.energy, Forgetful(), 500, GIVEN, rng(), kernel=ULA(5e-3), **settings).x
    paper = sample_interpolating(
        PATH.energy, Forgetful(), 500, GIVEN, rng(), eta=5e-3, kernel=ULA(5e-3), **settings
    ).x
    assert float((usual.mean(1) - GIVEN).abs().max()) < 0.1
    assert float((paper.mean(1) - GIVEN).abs().max()) > 0.15


@over(
    ("kernel", "step"),
    [
        (ULA(2e-3), 2e-3),
        (MALA(3e-3), 3e-3),
        (HMC(step_size=0.1, leapfrog=2), 0.005),
        (HMC(step_size=0.1, leapfrog=2, mass=25.0), 0.0002),
    ],
)
def test_a_step_of_the_sde_is_by_default_as_long_as_one_of_the_chain(kernel, step):
    info = sample_interpolating(
        PATH.energy, PATH, 3, GIVEN, rng(), t_low=0.4, evaluations=50, kernel=kernel
    ).info
    assert info["eta"] * (1 - 0.4) / info["sde_steps"] == pytest.approx(step)


@over("scale", [1e-2, 1.0, 1e2])
def test_defaults_do_not_depend_on_the_units_of_events(scale):
    """A fixed step size would throw walkers away at one end, and leave them to the flow at the other."""

    class Scaled(GaussianPath):
        def sample(self, n, rng, given, *, until=1.0):
            return scale * super().sample(n, rng, torch.zeros_like(given), until=until)  # forgets the context

        def velocity(self, y, t, given):
            return scale * super().velocity(y / scale, t, torch.zeros_like(given))

        def energy(self, y, given, t):
            return super().energy(y / scale, given, t)

    path = Scaled()
    walkers = sample_interpolating(path.energy, path, 1500, GIVEN, rng(), t_low=0.2, evaluations=800)
    off, error = moments_of(walkers.x / scale)
    assert_within(off, 0.0, error)
    dt = 0.8 / walkers.info["sde_steps"]
    assert torch.allclose(walkers.info["eta"] * dt, walkers.info["step_size"])


MEANS = torch.tensor([[-2.0, 0.0], [2.0, 1.0], [0.0, -2.0]], dtype=torch.float64)
SCALES = torch.tensor([0.4, 0.5, 0.3], dtype=torch.float64)
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
NO_CONTEXT = torch.zeros(1, 1, dtype=torch.float64)


class AnyContext(InterpolantFlow):
    """A flow without contexts where one with them is asked for."""

    def sample(self, n, rng, given=None, **options):
        return super().sample(n, rng, **options)[None]

    def velocity_given(self, given):
        return lambda x, t: self.velocity(x[0], t)[None]


def mixture_flow():
    field = MixtureField(MEANS, SCALES, WEIGHTS, interpolant="linear")
    flow = AnyContext(2, field=field, interpolant="linear", steps=60).double()
    return flow, lambda y, given, t: -field.log_prob(y, t)


@over("kernel", [None, HMC(step_size=0.2, leapfrog=5)])
def test_mode_weights_and_spreads_of_a_mixture(kernel):
    flow, energy = mixture_flow()
    walkers = sample_interpolating(
        energy, flow, 4000, NO_CONTEXT, rng(3), t_low=0.3, evaluations=300, eta=0.02, kernel=kernel
    )
    y = walkers.x[0]
    mode = torch.cdist(y, MEANS).argmin(1)
    share, error = mean_and_error(torch.nn.functional.one_hot(mode, 3))
    assert_within(share, WEIGHTS, error)  # modes are six standard deviations apart
    for k in range(3):
        square, error = mean_and_error(((y[mode == k] - MEANS[k]) / SCALES[k]).square().mean(1))
        own_law = (
            1 / (1 - 0.02 / (2 * float(SCALES[k]) ** 2)) if kernel is None else 1.0
        )  # of ULA on N(0, σ²)
        assert abs(float(square) - own_law) < z_limit(3) * float(error) + 0.02


class Weighed(AnyContext):
    def sample_and_log_prob(self, n, rng, given=None, **options):
        return tuple(values[None] for values in super().sample_and_log_prob(n, rng, **options))


def test_candidates_give_branches_the_shares_of_the_energy():
    """A flow whose branches have other shares than the energy's: at t̲ its draws are weighed, or they keep them."""
    _, energy = mixture_flow()
    wrong = MixtureField(MEANS, SCALES, WEIGHTS.flip(0), interpolant="linear")

    flow = Weighed(2, field=wrong, interpolant="linear", steps=60).double()
    settings = {"t_low": 0.9, "evaluations": 100}
    share = {}
    for candidates in (1, 16):
        walkers = sample_interpolating(
            energy, flow, 1000, NO_CONTEXT, rng(3), candidates=candidates, **settings
        )
        mode = torch.cdist(walkers.x[0], MEANS).argmin(1)
        share[candidates] = torch.bincount(mode, minlength=3) / 1000
    assert float((share[16] - WEIGHTS).abs().max()) < 0.03
    assert float((share[1] - WEIGHTS.flip(0)).abs().max()) < 0.06
    assert walkers.info["energy_rows"] >= 16_000 + 100_000
    with pytest.raises(ConfigError, match="candidates: must be 1 for a flow without sample_and_log_prob"):
        sample_interpolating(PATH.energy, PATH, 5, GIVEN, rng(), candidates=2)


@over(
    ("t_low", "kernel", "sde", "moves"),
    [
        (0.0, ULA(0.1), 100, 0),
        (0.45, ULA(0.1), 55, 45),
        (0.45, MALA(0.1), 54, 45),  # the SDE pays for the gradient at the start
        (0.45, HMC(0.1, leapfrog=10), 59, 4),
        (0.5, HMC(0.1, leapfrog=50), 49, 1),  # all moves that its share has
        (0.999, MALA(0.1), 1, 98),  # and keeps a step to come to t = 1
    ],
)
def test_the_budget_is_spent_exactly(t_low, kernel, sde, moves):
    rows = []

    def counted(y, given, t):
        rows.append(y.shape[:2].numel())
        return PATH.energy(y, given, t)

    assert split_evaluations(100, t_low, kernel) == (sde, moves)
    walkers = sample_interpolating(
        counted, PATH, 7, GIVEN, rng(), t_low=t_low, evaluations=100, eta=0.01, kernel=kernel
    )
    assert sum(rows) == 100 * 7 * 3
    assert walkers.info["evaluations"] == 100
    assert (walkers.info["sde_steps"], walkers.info["chain_steps"]) == (sde, moves)


def test_contexts_are_encoded_once():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoded = 0

        def encode(self, given):
            self.encoded += len(given)
            return given

        def score(self, x, code, t=None):
            return PATH.energy(x, code, t)

    energy, seen = Counting(), []
    sample_interpolating(energy, PATH, 5, GIVEN, rng(), t_low=0.5, evaluations=40, eta=0.01)
    assert energy.encoded == len(GIVEN)
    flow = InterpolantFlow(1, 1, width=4, steps=3, encoder=lambda given: seen.append(len(given)) or given)
    seen.clear()
    sample_interpolating(energy, flow.double(), 5, GIVEN, rng(), t_low=0.5, evaluations=40, eta=0.01)
    assert seen == [3, 3]  # for the draws at t̲, and for all steps of the SDE


@over("t_low", [1.0, -0.1, 1.5, math.nan])
def test_a_time_outside_the_flow_is_refused(t_low):
    with pytest.raises(ConfigError, match=r"t_low: must be a time from 0 to 1, and below 1"):
        sample_interpolating(PATH.energy, PATH, 5, GIVEN, rng(), t_low=t_low)


def test_a_kernel_that_does_not_fit_the_budget_is_refused():
    with pytest.raises(ConfigError, match=r"of 99 only 49 are the chain's, and one move of 'hmc' needs 50"):
        sample_interpolating(
            PATH.energy, PATH, 5, GIVEN, rng(), t_low=0.5, evaluations=99, kernel=HMC(0.1, leapfrog=50)
        )


def test_a_negative_eta_is_refused():
    with pytest.raises(ConfigError, match=r"eta: must be a finite number of at least 0, got -1"):
        sample_interpolating(PATH.energy, PATH, 5, GIVEN, rng(), eta=-1, kernel=ULA(0.1))


def test_an_sde_that_blows_up_names_time_and_context():
    class Broken(GaussianPath):
        def velocity(self, y, t, given):
            v = super().velocity(y, t, given)
            v[2] = math.nan if t >= 0.75 else v[2]
            return v

    with pytest.raises(InputError, match=r"left every finite region at t = 0\.755 for context 2"):
        sample_interpolating(PATH.energy, Broken(), 5, GIVEN, rng(), t_low=0.5, evaluations=200, eta=0.01)


# ---- Algorithm 2


def test_chains_from_a_poor_proposal_reach_the_model():
    def energy(y, given):
        return 0.5 * ((y - given[:, None]) / SD).square().sum(-1)

    q = Gaussian(torch.zeros(1, dtype=torch.float64), 3.0)
    walkers = sample_from_proposal(energy, q, 2000, GIVEN, rng(5), steps=60)
    assert walkers.x.shape == (3, 2000, 1)
    assert walkers.log_weight.shape == (3, 2000)
    assert walkers.ess == pytest.approx(6000)
    assert 0.4 < float(walkers.info["acceptance"].min()) < 0.8
    assert_within(moments_of(walkers.x)[0], torch.zeros(6), moments_of(walkers.x)[1])
    start = sample_from_proposal(energy, q, 2000, GIVEN, rng(5), steps=0, candidates=1)
    assert float(z_scores(moments_of(start.x)[0], 0.0, moments_of(start.x)[1]).max()) > 20


def test_the_papers_langevin_step_and_a_time():
    walkers = sample_from_proposal(PATH.energy, PATH, 3000, GIVEN, rng(6), kernel=ULA(0.005), steps=30, t=1.0)
    off, error = moments_of(walkers.x)
    assert_within(off[:3], torch.zeros(3), error[:3])
    # the law of ULA on N(0, σ²) has variance σ²/(1 − h/(2σ²)); 30 steps are on the way there
    assert float((off[3:] - 0.01).abs().max()) < z_limit(3) * float(error[3:].max()) + 0.01
    assert walkers.info["evaluations"] == 30


def test_walkers_of_one_context():
    walkers = sample_from_proposal(PATH.energy, PATH, 20, GIVEN, rng(), kernel=MALA(0.05), steps=5, t=1.0)
    assert walkers.of(1).resampled(7).x.shape == (7, 1)
    with pytest.raises(InputError, match="several contexts"):
        walkers.resampled(7)


def test_chains_that_leave_name_the_context():
    def energy(y, given):
        return given[:, None, 0] * y.square().sum(-1) ** 2  # −y⁴ for the first context

    with pytest.raises(InputError, match="for context 0"):
        sample_from_proposal(
            energy, Gaussian(torch.ones(1).double()), 5, GIVEN, rng(), kernel=ULA(0.5), steps=20
        )


# ---- choosing


@pytest.mark.parametrize("x", [torch.zeros(2, 0, 1), torch.zeros(2), [[0.0], [1.0]]])
def test_the_best_of_none_is_refused(x):
    with pytest.raises(ValueError, match=r"x: must be candidates, .* of at least one"):
        best_of(PATH.energy, x, GIVEN, t=1.0)


def test_the_best_of_several_has_the_lowest_energy():
    y = PATH.sample(64, rng(), GIVEN)
    best = best_of(PATH.energy, y, GIVEN, t=1.0)
    assert torch.equal(best.place, (y - GIVEN[:, None]).abs()[..., 0].argmin(1))
    assert torch.equal(best.x, y[torch.arange(3), best.place])
    assert torch.allclose(best.energy, 0.5 * ((best.x - GIVEN) / SD).square()[:, 0])


def test_candidates_of_other_contexts_and_nan_are_refused():
    with pytest.raises(InputError, match="one for each of the 2 sets of candidates, got 3"):
        best_of(PATH.energy, torch.zeros(2, 4, 1), GIVEN)
    y = PATH.sample(4, rng(), GIVEN)
    y[1, 2] = math.nan
    with pytest.raises(InputError, match="context 1"):
        best_of(PATH.energy, y, GIVEN, t=1.0)


def test_an_annealed_chain_takes_smaller_and_smaller_steps(monkeypatch):
    """Langevin without a gradient moves by √(2h) each: the mean square of all moves is 2 Σ h_i, level by level."""
    flat = lambda y, given: 0.0 * y.sum(-1)  # noqa: E731
    target, rows = bind(flat, torch.zeros(1, 1)), torch.zeros(20_000, 1)
    seen = []
    chain = conditional_chains.run_chain

    def watched(kernel, target, state, steps, rng, **options):
        result = chain(kernel, target, state, steps, rng, **options)
        seen.append((options["step_size"], float((result.state.x - state.x).square().mean()) / steps))
        return result

    monkeypatch.setattr(conditional_chains, "run_chain", watched)
    rng = torch.Generator().manual_seed(0)
    _, info = conditional_chains.run_chains(target, rows, ULA(0.1), 20, rng, "eager", anneal=0.01)
    sizes = [h for h, _ in seen]
    assert sizes == pytest.approx([0.1 * 0.01 ** (i / 9) for i in range(10)])
    for h, square in seen:
        assert square == pytest.approx(2 * h, rel=5 * (2 / 40_000) ** 0.5)
    assert info["evaluations"] == ULA(0.1).evaluations(20)
    with pytest.raises(ConfigError, match=r"anneal: must be 1 .* noise of its own"):
        conditional_chains.run_chains(target, rows, ULA(0.1, noise=0.1), 20, rng, "eager", anneal=0.01)


def test_acceptance_of_an_annealed_chain_is_the_mean_over_its_moves(monkeypatch):
    target, rows, seen = (
        bind(lambda y, given: 50 * y.square().sum(-1), torch.zeros(1, 1)),
        torch.ones(200, 1),
        [],
    )
    chain = conditional_chains.run_chain

    def watched(kernel, target, state, steps, rng, **options):
        result = chain(kernel, target, state, steps, rng, **options)
        seen.append((steps, result.info.acceptance.mean()))
        return result

    monkeypatch.setattr(conditional_chains, "run_chain", watched)
    _, info = conditional_chains.run_chains(target, rows, MALA(0.05), 13, rng(), "eager", anneal=0.01)
    exact = sum(steps * share for steps, share in seen) / 13
    torch.testing.assert_close(info["acceptance"], exact[None], check_dtype=False)


def test_the_longest_step_of_the_sde_follows_the_heaviest_number():
    mass = torch.tensor([4.0, 25.0])
    kernel = HMC(step_size=0.1, leapfrog=2, mass=mass)
    assert _langevin_step(kernel, None) == pytest.approx(0.5 * 0.1**2 / 25)
    turned = ((17.44, -10.08), (-10.08, 11.56))
    full = HMC(step_size=0.1, leapfrog=2, mass_matrix=turned)
    assert _langevin_step(full, None) == pytest.approx(0.5 * 0.1**2 / 25)


def test_step_sizes_that_were_found_are_counted_and_most_moves_are_accepted():
    rows = []

    def counted(y, given, t):
        rows.append(y.shape[:2].numel())
        return PATH.energy(y, given, t)

    info = sample_interpolating(counted, PATH, 200, GIVEN, rng(), t_low=0.5, evaluations=100).info
    assert info["energy_rows"] == sum(rows) > 100 * 200 * 3
    assert info["acceptance"].min() > 0.9


def test_candidates_are_weighed_at_the_time_that_they_are_of():
    """A flow that ends at the law of the energy is on its way to it at t̲, where all draws have the same weight."""
    _, energy = mixture_flow()
    field = MixtureField(MEANS, SCALES, WEIGHTS, interpolant="linear")
    flow = Weighed(2, field=field, interpolant="linear", steps=60).double()
    settings = {"t_low": 0.3, "evaluations": 20, "candidates": 8}
    info = sample_interpolating(energy, flow, 50, NO_CONTEXT, rng(3), **settings).info
    assert info["start_ess_given"].item() > 0.98 * 8 * 50
