"""A step size for each context: widths beside any others, what is remembered, and what that costs."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from conftest import assert_within
from torch import nn

from metastable.kernels import HMC, MALA, ULA
from metastable.methods import conditional_tuning
from metastable.methods.conditional_sampling import sample_from_proposal, sample_interpolating
from metastable.methods.conditional_starts import own_draws
from metastable.methods.conditional_tuning import FULL, PILOTS, SHORT, first_guess, forget_tuning
from metastable.proposals import Gaussian

over = pytest.mark.parametrize
Q = Gaussian(torch.zeros(2), 1.5)
GIVEN = torch.tensor([[-4.0], [0.0], [-3.0], [0.3]])
"""Log-widths: one narrow context beside a wide one, and once more."""


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Widths(nn.Module):
    """E(y | c) = ½|y/(s e^c)|², which counts the rows that it is asked for."""

    event_shape = (2,)

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.rows = 0

    def forward(self, y, given):
        self.rows += y.shape[:2].numel()
        return 0.5 * (y / (self.log_scale + given[:, None]).exp()).square().sum(-1)


def off_by(walkers) -> torch.Tensor:
    """Standard deviations over the true ones, `(B,)`, less one."""
    return walkers.x.square().mean((1, 2)).sqrt() / GIVEN[:, 0].exp() - 1


def test_a_first_guess_is_that_of_the_lightest_direction():
    starts = own_draws(2 * torch.randn(3, 500, 2, generator=rng()))
    found = first_guess(HMC(1.0, mass=(4.0, 25.0)), starts)
    turned = ((17.44, -10.08), (-10.08, 11.56))
    torch.testing.assert_close(first_guess(HMC(1.0, mass_matrix=turned), starts), found)
    assert found.tolist() == pytest.approx(3 * [4.0], rel=0.1)


# ---- Algorithm 2


WAYS = {
    "mala": {},
    "hmc": {"kernel": HMC(0.1, leapfrog=4), "tune": True, "steps": 30},
    "own draws": {"candidates": 1, "steps": 200},
}


@over("way", WAYS)
def test_narrow_contexts_have_their_width_beside_wide_ones(way):
    """Also from starts of the width of the proposal, ninety times too wide: chains alone then have to find it."""
    walkers = sample_from_proposal(Widths(), Q, 1000, GIVEN, rng(), **WAYS[way])
    assert float(off_by(walkers).abs().max()) < 0.1
    assert not any("were accepted" in words for words in walkers.info["warnings"])
    target = walkers.info["kernel"].target_acceptance
    assert float((walkers.info["acceptance"] - target).abs().max()) < 0.2
    square = (walkers.x / GIVEN.exp()[:, None]).square().mean(2)
    assert_within(square.mean(1), torch.ones(4), square.std(1) / math.sqrt(1000))


def test_one_step_for_all_contexts_is_another_law_and_says_so():
    """The mutant that the old default was: the step that suits the middle of the four."""
    walkers = sample_from_proposal(Widths(), Q, 500, GIVEN, rng(), kernel=MALA(0.5), candidates=1)
    assert float(off_by(walkers)[0]) > 10
    (words,) = walkers.info["warnings"]
    assert "for 2 of 4 contexts fewer than 20% of the moves were accepted (context 0: " in words
    assert "at step size 0.5" in words


def test_a_kernel_that_is_given_keeps_its_step():
    walkers = sample_from_proposal(Widths(), Q, 50, GIVEN, rng(), kernel=ULA(1e-5), steps=3)
    assert walkers.info["kernel"] == ULA(1e-5)
    assert torch.equal(walkers.info["step_size"], torch.full((4,), 1e-5, dtype=torch.float64))
    tuned = sample_from_proposal(Widths(), Q, 50, GIVEN, rng(), kernel=ULA(1e-5), steps=3, tune=True)
    assert float(tuned.info["step_size"][1] / tuned.info["step_size"][0]) > 100


# ---- what it costs


@over("kernel", [None, HMC(0.1, leapfrog=3)])
@over("tune", [None, True])
def test_every_energy_is_counted(kernel, tune):
    energy = Widths()
    for _ in range(2):  # the second call finds its steps in memory
        energy.rows = 0
        options = {"kernel": kernel, "tune": tune}
        info = sample_from_proposal(energy, Q, 60, GIVEN, rng(), steps=7, **options).info
        assert info["energy_rows"] == energy.rows
        assert info["evaluations"] == math.ceil(energy.rows / 240)


def test_a_second_look_at_a_context_is_counted_too(monkeypatch):
    monkeypatch.setattr(conditional_tuning, "AWAY", 0.0)
    energy = Widths()
    sample_from_proposal(energy, Q, 60, torch.zeros(1, 1), rng(), steps=1)
    energy.rows = 0
    info = sample_from_proposal(energy, Q, 60, torch.ones(1, 1), rng(), steps=1).info
    assert info["energy_rows"] == energy.rows


# ---- memory


def test_a_context_has_a_step_for_each_time():
    class Narrowing(Widths):
        time = True

        def forward(self, y, given, t):
            return super().forward(y, given - 3 * t[:, :1])

    energy, given = Narrowing(), torch.zeros(1, 1)
    early, late = (sample_from_proposal(energy, Q, 20, given, rng(), steps=5, t=t) for t in (0.0, 1.0))
    ratio = float(early.info["step_size"] / late.info["step_size"])
    assert 50 < ratio < 3000  # e⁶ = 403


def sampled(energy, given=GIVEN, seed=0, **options):
    energy.rows = 0
    walkers = sample_from_proposal(energy, Q, 20, given, rng(seed), steps=5, **options)
    return walkers, energy.rows


def test_a_step_is_looked_for_once_and_samples_are_the_same():
    energy = Widths()
    first, cost = sampled(energy)
    again, less = sampled(energy)
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.info["step_size"], again.info["step_size"])
    assert cost - less == 4 * (1024 + PILOTS * (FULL + 1))
    some, _ = sampled(energy, GIVEN[2:])
    assert torch.equal(some.info["step_size"], first.info["step_size"][2:])
    other, _ = sampled(Widths())  # another module, the same from its own first look
    assert torch.equal(other.x, first.x)


def test_another_seed_has_the_same_steps():
    energy = Widths()
    first = sampled(energy)[0].info["step_size"]
    assert torch.equal(sampled(energy, seed=1)[0].info["step_size"], first)
    assert torch.equal(sampled(Widths(), seed=1)[0].info["step_size"], first)


def test_a_context_that_is_there_twice_has_one_step():
    energy, twice = Widths(), torch.cat([GIVEN, GIVEN])
    first = sampled(energy, twice)[0]
    assert torch.equal(first.info["step_size"][:4], first.info["step_size"][4:])
    assert torch.equal(sampled(energy, twice)[0].x, first.x)


def test_new_contexts_begin_at_what_was_found_last_and_cost_less():
    energy, near = Widths(), torch.tensor([[0.0], [0.2], [-0.2]])
    sampled(energy, near)
    walkers, cost = sampled(energy, near + 0.1)
    assert cost == 3 * (1024 + PILOTS * (SHORT + 1) + 1024 + 20 * 6)
    expected = sampled(Widths(), near + 0.1)[0].info["step_size"]
    assert float((walkers.info["step_size"] / expected).log().abs().max()) < 0.4
    tiny = torch.tensor([[-12.0]])  # its step is 10¹⁰ times shorter: a whole warm-up follows
    far, cost = sampled(energy, tiny)
    assert cost == 1024 + PILOTS * (SHORT + 1 + FULL + 1) + 1024 + 20 * 6
    assert 0.2 < float(far.info["step_size"]) / math.exp(-24) < 3


@over("change", ["in place", "data", "a load"])
def test_training_forgets(change):
    energy = Widths()
    before = sampled(energy)[0].info["step_size"]
    if change == "in place":
        with torch.no_grad():
            energy.log_scale.add_(1.0)
    elif change == "data":
        energy.log_scale.data.add_(1.0)  # which torch does not count as a new version
    else:
        energy.load_state_dict({"log_scale": torch.ones(())})
    walkers, cost = sampled(energy)
    assert cost > 4 * PILOTS * FULL
    assert float((walkers.info["step_size"] / before).log().mean()) == pytest.approx(2.0, abs=0.5)


def test_memory_can_be_dropped_is_bounded_and_dies_with_its_energy(monkeypatch):
    energy = Widths()
    _, cost = sampled(energy)
    forget_tuning(energy)
    assert sampled(energy)[1] == cost
    monkeypatch.setattr(conditional_tuning, "REMEMBERED", 2)
    forget_tuning(energy)
    sampled(energy)
    assert len(conditional_tuning._MEMORIES[energy].steps) == 2
    held = len(conditional_tuning._MEMORIES)
    del energy
    assert len(conditional_tuning._MEMORIES) == held - 1
    copy.deepcopy(Widths())  # nothing of it is in the module


def test_settings_have_memories_of_their_own():
    energy = Widths()
    mala = sampled(energy)[0].info["step_size"]
    hmc = sampled(energy, kernel=HMC(0.1, leapfrog=2), tune=True)[0].info["step_size"]
    assert float((mala - hmc).abs().min()) > 0
    assert torch.equal(sampled(energy)[0].info["step_size"], mala)


def test_a_plain_function_is_tuned_anew():
    rows = []

    def energy(y, given):
        rows.append(y.shape[:2].numel())
        return 0.5 * (y / given[:, None].exp()).square().sum(-1)

    first = sample_from_proposal(energy, Q, 20, GIVEN, rng(), steps=5)
    half = sum(rows)
    assert torch.equal(sample_from_proposal(energy, Q, 20, GIVEN, rng(), steps=5).x, first.x)
    assert sum(rows) == 2 * half


# ---- Algorithm 4


class Paths(nn.Module):
    """The exact flow from N(0, 1) to N(0, c²), one width c for each context, with its energies."""

    event_shape, context_shape = (1,), (1,)

    def variance(self, t, given):
        return (1 - t) ** 2 + t**2 * given[:, None].square()

    def sample(self, n, rng, given, *, until=1.0):
        return self.variance(until, given).sqrt() * torch.randn((len(given), n, 1), generator=rng)

    def velocity(self, y, t, given):
        return (t * given[:, None].square() - (1 - t)) / self.variance(t, given) * y

    def forward(self, y, given, t):
        return 0.5 * (y.square() / self.variance(t[..., None], given)).sum(-1)


@over("kernel", [None, HMC(1.0, leapfrog=2)])
def test_algorithm_4_has_an_eta_for_each_context(kernel):
    path, given = Paths(), torch.tensor([[1.0]] * 9 + [[0.05]])
    options = {"kernel": kernel, "tune": None if kernel is None else True, "evaluations": 300}
    walkers = sample_interpolating(path, path, 800, given, rng(), **options)
    width = walkers.x.square().mean((1, 2)).sqrt() / given[:, 0]
    assert float((width - 1).abs().max()) < 0.1
    eta = walkers.info["eta"]
    assert eta.shape == (10,)
    assert float(eta[0] / eta[9]) == pytest.approx(400, rel=0.5)
    assert walkers.info["evaluations"] == 300 + math.ceil((walkers.info["energy_rows"] - 300 * 8000) / 8000)


def test_one_eta_for_all_leaves_the_narrow_one():
    path, given = Paths(), torch.tensor([[1.0]] * 9 + [[0.05]])
    try:
        walkers = sample_interpolating(path, path, 200, given, rng(), kernel=MALA(0.35))
    except ValueError:  # it left every finite region
        return
    assert float(walkers.x[9].std()) / 0.05 > 10


def test_of_many_contexts_each_costs_some_hundred_energies():
    energy, given = Widths(), torch.linspace(-2, 0.5, 600)[:, None]
    walkers = sample_from_proposal(energy, Q, 1, given, rng())
    assert walkers.info["energy_rows"] == energy.rows
    assert energy.rows < 600 * 700  # two thousand and more each, if each were looked at as one alone is
    in_units = walkers.info["step_size"] / (2 * given[:, 0].double()).exp()
    assert 0.3 < float(in_units.min()) < float(in_units.max()) < 4
    size = walkers.x[:, 0] / given.exp()
    assert float(size.square().mean()) == pytest.approx(1.0, abs=5 * math.sqrt(1 / 600))
