"""Whether an energy can hold a density: known tails on both sides of the edge, and what is said of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from metastable.energies import MLP, RBM, JointEnergy, Tilted, on_reference
from metastable.evaluation.rays import bare_network_words, far_share, holds_density, radii, spread_of
from metastable.proposals import Uniform, fit_gaussian

over = pytest.mark.parametrize


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(d: int = 2, n: int = 200) -> Tensor:
    return torch.randn((n, d), generator=rng(), dtype=torch.float64)


def tail(power: float):
    """E = power·log r far away: exp(−E) has a finite integral where power > d."""
    return lambda x: 0.5 * power * torch.log1p(x.square().sum(1))


@over("d", [1, 2, 10])
def test_the_edge_is_a_growth_of_d_log_r(d):
    x = data(d)
    assert holds_density(tail(d + 0.5), x).holds  # Student's law with half a degree of freedom
    bad = holds_density(tail(d - 0.5), x)
    assert bad.share_bad == 1
    assert bad.growth == pytest.approx(d - 0.5, rel=0.01)
    assert bad.needed == d


@over("units", [1e-4, 1.0, 1e5])
def test_units_of_the_data_do_not_matter(units):
    scale = torch.tensor([1.0, units], dtype=torch.float64)
    x = data() * scale + 3 * scale
    assert holds_density(lambda y: (y / scale).square().sum(1), x).holds
    assert holds_density(lambda y: tail(1.5)(y / scale), x).share_bad == 1
    assert holds_density(lambda y: (y / scale)[:, 1], x).share_bad == 0.5  # a ray and its opposite


def test_walls_are_fine_and_holes_are_not():
    x = data()
    assert holds_density(lambda y: torch.where(y.square().sum(1) > 25, torch.inf, 0.0), x).holds
    for hole in (-torch.inf, torch.nan):
        found = holds_density(lambda y, hole=hole: torch.where(y[:, 0] > 50, hole, y.square().sum(1)), x)
        assert 0.3 < found.share_bad < 0.5
        assert found.growth == -math.inf


@over("activation", ["silu", "tanh", "leaky_relu"])
def test_a_bare_network_holds_none_and_on_a_reference_it_does(activation):
    x = data().float()
    network = MLP(2, (32, 32), activation, seed=1)
    words = bare_network_words(network, x)
    assert 'reference="gaussian"' in words
    assert "no density" in words
    assert bare_network_words(Tilted(fit_gaussian(x), network, zero_start=False), x) is None
    assert bare_network_words(on_reference(network, x), x) is None


def test_nothing_is_said_where_it_means_nothing():
    x = data().float()
    assert bare_network_words(RBM(2, 3), x.sign()) is None
    assert bare_network_words(JointEnergy(torch.nn.Linear(2, 3)), x) is None
    assert bare_network_words(Tilted(Uniform(x.amin(0), x.amax(0)), MLP(2)), x) is None


def test_images_are_looked_at_too():
    x = torch.rand((50, 1, 4, 4), generator=rng())
    x[:, 0, 0, 0] = 0.0  # a pixel that is always dark
    assert holds_density(lambda y: y.flatten(1).square().sum(1), x).holds
    assert spread_of(x).shape == ()
    assert not holds_density(lambda y: y.flatten(1).mean(1), x).holds


def test_on_reference_is_the_gaussian_of_the_data_at_first():
    x = data().float() * 3 + 1
    network = MLP(2, (8,), seed=1).double()
    energy = on_reference(network, x)
    assert energy.network is network
    assert energy.reference.mean.dtype == torch.float64
    torch.testing.assert_close(
        energy(x.double()), -fit_gaussian(x, inflate=1.2).double().log_prob(x.double())
    )
    kept = on_reference(MLP(2, (8,), seed=1), x, zero_start=False)
    assert (kept(x) + kept.reference.log_prob(x)).abs().max() > 1e-3


def test_distances_are_in_spreads_of_the_data():
    x = data(3, 4000) * torch.tensor([1.0, 1e3, 1e-3]) + 7
    assert float(radii(x, x).square().mean()) == pytest.approx(1.0)
    away = x.mean(0) + 50 * torch.tensor([1.0, 1e3, 1e-3]) * torch.ones(1, 3)
    assert float(radii(away, x)) == pytest.approx(50, rel=0.05)


def test_what_lies_beyond_five_times_the_farthest_datum_is_far():
    x = data(2, 500)
    farthest = x[radii(x, x).argmax()]
    centre = x.mean(0)
    assert (
        far_share(torch.stack([centre + 4.9 * (farthest - centre), centre + 5.1 * (farthest - centre)]), x)
        == 0.5
    )
    assert far_share(x, x) == 0
    assert far_share(torch.full((1, 2), torch.nan).double(), x) == 1
    cauchy = torch.distributions.Cauchy(0.0, 1.0)
    torch.manual_seed(0)
    assert far_share(cauchy.sample((100_000, 1)), cauchy.sample((50, 1))) < 0.01
