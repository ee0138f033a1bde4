"""Gaussian and uniform proposals: the density they say, the draws that go with it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from conftest import assert_within, mean_and_error, z_limit, z_scores
from safetensors.torch import load, save
from torch import Tensor
from torch import distributions as td

from metastable.core.errors import ConfigError, InputError
from metastable.core.types import Proposal
from metastable.proposals import Gaussian, Uniform, fit_gaussian
from metastable.proposals.basic import FULL_COVARIANCE_LIMIT, by_inverse

F64 = torch.float64
over = pytest.mark.parametrize
FACTOR = torch.tensor([[1.5, 0.0, 0.0], [-0.7, 0.4, 0.0], [0.2, 1.0, 0.9]], dtype=F64)
MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
IMAGE = torch.arange(6, dtype=F64).view(1, 2, 3)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


MEMBERS: dict[str, tuple[Proposal, td.Distribution]] = {
    "number": (Gaussian(MEAN, 2.0), td.Independent(td.Normal(MEAN, 2.0), 1)),
    "diagonal": (
        Gaussian(MEAN, torch.tensor([0.5, 1.0, 3.0])),
        td.Independent(td.Normal(MEAN, torch.tensor([0.5, 1.0, 3.0], dtype=F64)), 1),
    ),
    "full": (Gaussian(MEAN, FACTOR), td.MultivariateNormal(MEAN, scale_tril=FACTOR)),
    "one coordinate": (Gaussian(MEAN[:1], FACTOR[:1, :1]), td.Independent(td.Normal(MEAN[:1], 1.5), 1)),
    "image": (Gaussian(IMAGE, 0.5 + IMAGE), td.Independent(td.Normal(IMAGE, 0.5 + IMAGE), 3)),
    "uniform": (Uniform(MEAN, MEAN + 2), td.Independent(td.Uniform(MEAN, MEAN + 2), 1)),
    "uniform image": (Uniform(-IMAGE - 1, IMAGE), td.Independent(td.Uniform(-IMAGE - 1, IMAGE), 3)),
}


@over("name", MEMBERS)
def test_log_density_is_that_of_torch(name):
    proposal, truth = MEMBERS[name]
    x = proposal.sample(200, rng())
    assert isinstance(proposal, Proposal)
    assert x.shape == (200, *proposal.event_shape)
    assert torch.allclose(proposal.log_prob(x), truth.log_prob(x), rtol=1e-12, atol=1e-12)


@over("name", MEMBERS)
def test_draws_have_the_moments_of_the_density(name):
    proposal, truth = MEMBERS[name]
    x = proposal.sample(50_000, rng(1)).flatten(1)
    mean, error = mean_and_error(x)
    assert_within(mean, truth.mean.flatten(), error)
    centred = x - truth.mean.flatten()
    second, error = mean_and_error(centred[:, :, None] * centred[:, None, :])
    exact = getattr(truth, "covariance_matrix", None)
    assert_within(second, truth.variance.flatten().diag() if exact is None else exact, error)


@over("name", MEMBERS)
def test_density_and_draws_belong_together(name):
    """The mean of φ(x)/q(x) over draws of q is 1 for any normalised φ inside q: here a small box."""
    proposal, _ = MEMBERS[name]
    x = proposal.sample(100_000, rng(2)).flatten(1)
    low, high = (x.quantile(q, 0) for q in (0.35, 0.65))
    inside = ((x > low) & (x < high)).all(1)
    ratio = inside / (high - low).prod() * torch.exp(-proposal.log_prob(x.view(-1, *proposal.event_shape)))
    mean, error = mean_and_error(ratio)
    assert error < 0.2
    assert_within(mean, 1.0, error)


@over("name", MEMBERS)
def test_draws_come_from_the_generator_alone(name):
    proposal, _ = MEMBERS[name]
    before = torch.get_rng_state()
    assert torch.equal(proposal.sample(5, rng(3)), proposal.sample(5, rng(3)))
    assert torch.equal(before, torch.get_rng_state())


@over("name", MEMBERS)
def test_state_survives_a_file_bit_by_bit(name):
    proposal, _ = MEMBERS[name]
    x = proposal.sample(5, rng())
    other = copy.deepcopy(proposal)
    for value in other.state_dict().values():
        value.mul_(1.5).add_(0.1)
    assert not torch.equal(other.log_prob(x), proposal.log_prob(x))
    other.load_state_dict(load(save(proposal.state_dict())))
    assert torch.equal(other.log_prob(x), proposal.log_prob(x))


def test_outside_the_box_is_impossible():
    box = Uniform(torch.tensor([0.0, -1.0]), torch.tensor([1.0, 1.0]))
    x = torch.tensor([[0.0, -1.0], [1.0, 1.0], [0.5, 1.001], [-0.001, 0.0]])
    assert box.log_prob(x).tolist() == pytest.approx([-math.log(2), -math.log(2), -math.inf, -math.inf])


def test_the_callers_tensors_are_not_shared():
    mean, scale, low, high = torch.zeros(2), torch.eye(2), torch.zeros(2), torch.ones(2)
    proposal, box = Gaussian(mean, scale), Uniform(low, high)
    for value in (mean, scale, low, high):
        value += 5
    assert torch.equal(proposal.mean, torch.zeros(2))
    assert torch.equal(proposal.scale, torch.eye(2))
    assert torch.equal(box.high, torch.ones(2))


@over("scale", [0.0, -1.0, torch.tensor([1.0, 0.0]), torch.diag(torch.tensor([1.0, -1.0]))])
def test_a_scale_must_be_positive(scale):
    with pytest.raises(ConfigError, match=r"^scale: must be positive on its diagonal"):
        Gaussian(torch.zeros(2), scale)


def test_a_matrix_must_be_lower_triangular():
    """Draws would use the upper half and the density would not."""
    with pytest.raises(InputError, match=r"^scale: .*lower triangular"):
        Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.0, 1.0]]))


def test_a_box_must_have_an_inside():
    with pytest.raises(InputError, match=r"^high: must be above low"):
        Uniform(torch.zeros(2), torch.tensor([1.0, 0.0]))


def covariance(q: Gaussian) -> Tensor:
    return q.scale @ q.scale.T


def skewed_rows(n: int = 400) -> Tensor:
    z = torch.randn((n, 3), generator=rng(4), dtype=F64)
    return MEAN + (z + 0.3 * z.square()) @ FACTOR.T


def test_fit_has_the_moments_of_the_data():
    x = skewed_rows()
    q = fit_gaussian(x)
    assert torch.allclose(q.mean, x.mean(0), rtol=1e-10)
    assert torch.allclose(covariance(q), x.T.cov(correction=0), rtol=1e-4, atol=1e-4)
    wide = fit_gaussian(x, inflate=1.5)
    assert torch.allclose(covariance(wide), 2.25 * covariance(q), rtol=1e-10)
    assert torch.equal(wide.mean, q.mean)


def test_a_weight_of_k_is_k_copies():
    x, copies = skewed_rows(50), torch.randint(0, 4, (50,), generator=rng())
    weighted = fit_gaussian(x, copies.to(F64).log() + 123.0)
    repeated = fit_gaussian(x.repeat_interleave(copies, 0))
    assert torch.allclose(weighted.mean, repeated.mean, rtol=1e-10)
    assert torch.allclose(weighted.scale, repeated.scale, rtol=1e-10)
    assert not torch.allclose(weighted.mean, fit_gaussian(x).mean, rtol=1e-3)


def test_weights_move_the_fit_to_the_target():
    """Draws of q reweighted to p have p's moments: self-normalised importance sampling, by z-score."""
    p, q = Gaussian(MEAN, 0.5 * FACTOR), Gaussian(MEAN + 0.2, 0.8 * FACTOR)
    x = q.sample(50_000, rng(5))
    log_weight = p.log_prob(x) - q.log_prob(x)
    fitted = fit_gaussian(x, log_weight)
    w = torch.softmax(log_weight, 0)[:, None]
    error = (w * (x - fitted.mean)).square().sum(0).sqrt()
    assert_within(fitted.mean, MEAN, error)
    assert z_scores(fit_gaussian(x).mean, MEAN, error).max() > z_limit(3)  # the weights were needed


@over("shape", [(200, 1, 4, 4), (200, 3, 2, 2), (200, 43, 3), (200, FULL_COVARIANCE_LIMIT + 1)])
def test_images_and_long_vectors_get_variances_only(shape):
    x = torch.randn(shape, generator=rng(), dtype=F64) * 3 + 1
    q = fit_gaussian(x)
    assert q.scale.shape == q.mean.shape == q.event_shape == shape[1:]
    assert torch.allclose(q.scale.square(), x.var(0, correction=0), rtol=1e-4)


@over("shape", [(4, 3), (2, 2, 2), (128, 1)])
def test_events_of_few_numbers_have_their_covariance_whatever_their_shape(shape):
    d = math.prod(shape)
    factor = torch.eye(d, dtype=F64) + 0.5 * torch.ones(d, d, dtype=F64).tril(-1) / math.sqrt(d)
    truth = Gaussian(torch.arange(d, dtype=F64).view(shape), factor)
    fitted = fit_gaussian(truth.sample(20_000, rng()))
    assert fitted.event_shape == shape
    assert torch.allclose(fitted.scale @ fitted.scale.T, factor @ factor.T, atol=0.1)
    flat = fit_gaussian(truth.sample(20_000, rng()).flatten(1))
    x = truth.sample(50, rng(1))
    assert torch.allclose(fitted.log_prob(x), flat.log_prob(x.flatten(1)))
    assert torch.allclose(fitted.sample(5, rng()).flatten(1), flat.sample(5, rng()))


@over("d", [1, 64, FULL_COVARIANCE_LIMIT])
def test_columns_that_repeat_each_other_still_fit(d):
    """Float32 columns of rank one, far from the origin: what a table with copied columns looks like."""
    x = torch.randn((300, 1), generator=rng()) * torch.randn((1, d), generator=rng(1)) + 50
    q = fit_gaussian(x)
    assert q.scale.dtype == torch.float32
    assert torch.isfinite(q.log_prob(q.sample(10, rng()))).all()


def test_constant_data_give_a_narrow_density_not_a_crash():
    q = fit_gaussian(torch.ones(10, 2))
    assert torch.isfinite(q.log_prob(torch.ones(1, 2))).all()


UNITS = torch.tensor([1e5, 1e-4, 1.0], dtype=F64)


def test_the_unit_of_a_column_is_nothing_to_the_others():
    """Dollars, and a code beside them: the fit in other units is the fit, in those units."""
    x = skewed_rows(400)
    plain, scaled = fit_gaussian(x), fit_gaussian(x * UNITS)
    torch.testing.assert_close(scaled.scale, UNITS[:, None] * plain.scale, rtol=1e-9, atol=0)
    torch.testing.assert_close(scaled.log_prob(x * UNITS), plain.log_prob(x) - UNITS.log().sum())
    narrow = scaled.scale[1].norm()
    torch.testing.assert_close(narrow, (x * UNITS)[:, 1].std(correction=0), rtol=1e-5, atol=0)


def test_a_small_spread_far_from_zero_is_kept():
    """A column of seconds since 1970, which float32 sums would blur: 1.7e9 ± 10."""
    x = torch.randn((500, 2), generator=rng(), dtype=F64) * torch.tensor([10.0, 1.0]) + torch.tensor(
        [1.7e9, 0.0]
    )
    q = fit_gaussian(x)
    torch.testing.assert_close(q.mean, x.mean(0), rtol=1e-14, atol=1e-6)
    torch.testing.assert_close(covariance(q), x.T.cov(correction=0), rtol=1e-4, atol=1e-4)


@over("value", [0.0, 7.0, -3e8])
@over("others", [1e-6, 1.0, 1e7])
def test_a_constant_column_has_a_narrow_scale_of_its_own(value, others):
    x = torch.cat([others * torch.randn((100, 2), generator=rng()), torch.full((100, 1), value)], 1)
    q = fit_gaussian(x)
    own = 1e-3 * (abs(value) or 1.0)
    torch.testing.assert_close(q.scale[2], torch.tensor([0.0, 0.0, own]), rtol=1e-5, atol=1e-6 * own)
    torch.testing.assert_close(covariance(q)[:2, :2], x[:, :2].T.cov(correction=0), rtol=1e-4, atol=0)
    assert torch.isfinite(q.log_prob(x)).all()


def test_pixels_share_a_floor():
    """A pixel that is always dark is as wide as a thousandth of the others are."""
    x = torch.randn((500, 1, 2, 2), generator=rng(), dtype=F64)
    x[:, 0, 0, 0] = 0.0
    typical = x.var(0, correction=0).mean().sqrt()
    torch.testing.assert_close(fit_gaussian(x).scale[0, 0, 0], 1e-3 * typical)


def test_a_small_matrix_is_undone_by_its_inverse_as_by_solving():
    """What a GPU does, where solving for many narrow events is slow."""
    q = Gaussian(MEAN, FACTOR)
    x = torch.randn((50, 3), generator=rng(), dtype=F64) * 3
    white = by_inverse(x - MEAN, q.gaussians().factor[0])
    torch.testing.assert_close(
        -0.5 * white.square().sum(1) - q._constant(), q.log_prob(x), rtol=1e-12, atol=1e-12
    )
