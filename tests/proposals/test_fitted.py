"""The reference that is chosen from data: its density against integrals, its choices against known answers."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import assert_within, mean_and_error, quadrature
from safetensors.torch import load, save
from torch import Tensor
from torch import distributions as td

from metastable.core.errors import ConfigError, InputError
from metastable.core.types import Proposal
from metastable.proposals import ScaleMixture, fit_gaussian, fit_reference
from metastable.proposals.fitted import WIDTHS, choose

pytestmark = pytest.mark.usefixtures("references_anew")
F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=rng(seed), dtype=F64)


def two_far_modes(n: int, d: int = 2) -> Tensor:
    """A quarter of the rows around 4, the others around −4, with covariances that differ."""
    x = normal(n, d)
    x[: n // 4] = 0.3 * x[: n // 4] + 4
    x[n // 4 :] -= 4
    return x


@pytest.fixture(scope="module")
def mixture() -> ScaleMixture:
    """Two components of three widths, in two dimensions."""
    weight = torch.tensor([[0.1, 0.2, 0.1], [0.3, 0.1, 0.2]], dtype=F64)
    mean = torch.tensor([[-1.0, 0.5], [2.0, -1.0]], dtype=F64)
    factor = torch.tensor([[[1.0, 0.0], [0.7, 2.0]], [[0.8, 0.0], [-0.3, 1.1]]], dtype=F64)
    return ScaleMixture(weight.log() + 3.0, mean, factor, torch.tensor([0.5, 1.0, 2.0], dtype=F64))


# --- the density -------------------------------------------------------------------------------------------


def truth_of(q: ScaleMixture) -> td.Distribution:
    """The same mixture by torch, one Gaussian for each component and width."""
    K, S = q.log_weight.shape
    L = torch.linalg.inv(q.precision_factor)
    scale = (q.width[None, :, None, None] * L[:, None]).flatten(0, 1)
    each = td.MultivariateNormal(q.mean.repeat_interleave(S, 0), scale_tril=scale)
    return td.MixtureSameFamily(td.Categorical(logits=q.log_weight.reshape(K * S)), each)


def test_log_density_is_that_of_torch(mixture):
    assert isinstance(mixture, Proposal)
    x = 3 * normal(500, 2)
    torch.testing.assert_close(mixture.log_prob(x), truth_of(mixture).log_prob(x), rtol=1e-12, atol=1e-12)


def test_density_integrates_to_one(mixture):
    grid = quadrature(lambda x: -mixture.log_prob(x), [(-22, 22, 801), (-22, 22, 801)])
    assert float(grid.log_partition) == pytest.approx(0, abs=1e-5)


def test_draws_follow_the_density(mixture):
    """Shares of a grid of boxes, by quadrature and among draws; and their first two moments."""
    x = mixture.sample(40_000, rng(1))
    grid = quadrature(lambda x: -mixture.log_prob(x), [(-22, 22, 801), (-22, 22, 801)])

    def facts(x: Tensor) -> Tensor:
        boxes = [(x[:, 0] > a) & (x[:, 1] > b) for a in (-1.03, 0.52, 2.02) for b in (-1.03, 0.52)]
        return torch.cat([torch.stack(boxes, 1).to(F64), x, x.square(), x[:, :1] * x[:, 1:]], 1)

    mean, error = mean_and_error(facts(x))
    # the edge of a box cuts through cells of the grid
    assert_within(mean, grid.mean(facts), error + 0.003)


def test_gradients_are_those_of_finite_differences(mixture):
    x = normal(5, 2).requires_grad_()
    assert torch.autograd.gradcheck(mixture.log_prob, (x,))


def test_parts_of_other_shapes_are_refused():
    with pytest.raises(InputError, match=r"shapes \(K, S\), \(K, d\) and \(K, d, d\)"):
        ScaleMixture(torch.zeros(2, 1), torch.zeros(1, 2), torch.eye(2)[None], torch.ones(1))
    with pytest.raises(ConfigError, match="precision_factor: must be positive"):
        ScaleMixture(torch.zeros(1, 1), torch.zeros(1, 2), -torch.eye(2)[None], torch.ones(1))


def test_a_mixture_takes_the_size_of_the_weights_it_loads(mixture):
    small = fit_reference(normal(8, 2).float()).double()
    assert len(small.mean) == 1
    small.load_state_dict(load(save(mixture.state_dict())))
    x = normal(50, 2)
    assert torch.equal(small.log_prob(x), mixture.log_prob(x))
    assert torch.equal(small.sample(5, rng()), mixture.sample(5, rng()))
    with pytest.raises(RuntimeError, match="size mismatch"):
        fit_reference(normal(8, 3)).load_state_dict(mixture.state_dict())


# --- the choice --------------------------------------------------------------------------------------------


def test_rows_of_a_gaussian_get_one_gaussian():
    """Above the one fitted by moments there is no more than what a covariance of 300 rows is off by."""
    x = normal(300, 4) @ torch.tensor([[1, 0, 0, 0], [0.8, 0.5, 0, 0], [0, 0, 2, 0], [0, 0, 0, 1]], dtype=F64)
    q = fit_reference(x)
    assert q.log_weight.shape == (1, 1)
    torch.testing.assert_close(q.mean[0], x.mean(0))
    new = normal(4000, 4, seed=1) @ torch.tensor(
        [[1, 0, 0, 0], [0.8, 0.5, 0, 0], [0, 0, 2, 0], [0, 0, 0, 1]], dtype=F64
    )
    gap = q.log_prob(new) - fit_gaussian(x).log_prob(new)
    assert abs(float(gap.mean())) < 0.02


def test_far_modes_are_found_with_their_weights_and_widths():
    x = two_far_modes(400)
    assert choose((x - x.mean(0)) / x.std(0), 0).components == 2
    q = fit_reference(x)
    near = q.mean[:, 0] > 0
    assert float(q.log_weight.exp()[near].sum()) == pytest.approx(0.25, abs=0.005)
    draws = q.sample(20_000, rng())
    narrow = draws[draws[:, 0] > 0]
    assert float(narrow.std()) == pytest.approx(0.3, rel=0.15)


def test_heavy_tails_are_seen():
    """Student's t with three degrees of freedom: far better than a Gaussian, near the truth."""
    truth = td.StudentT(torch.tensor(3.0, dtype=F64))
    x = normal(1200, 3) / (normal(1200, 9, seed=1).view(1200, 3, 3).square().mean(1)).sqrt()
    q, g = fit_reference(x[:600]), fit_gaussian(x[:600])
    exact = truth.log_prob(x[600:]).sum(1).mean()
    assert q.width.numel() == len(WIDTHS)
    assert float(exact - q.log_prob(x[600:]).mean()) < 0.2
    assert float(exact - g.log_prob(x[600:]).mean()) > 0.4


def test_components_that_share_a_covariance_are_pulled_together():
    """Three modes of one narrow covariance in ten dimensions, fifteen rows each: no own covariance would do."""
    mixing = torch.diag(torch.linspace(0.1, 1.0, 10, dtype=F64))
    centres = 6 * normal(3, 10, seed=5)

    def rows(n: int, seed: int) -> Tensor:
        return centres.repeat_interleave(n, 0) + normal(3 * n, 10, seed) @ mixing

    few, new = rows(15, 1), rows(500, 2)
    q = fit_reference(few)
    exact = truth_of(
        ScaleMixture(
            torch.zeros(3, 1, dtype=F64),
            centres,
            torch.linalg.inv(mixing).expand(3, 10, 10),
            torch.ones(1, dtype=F64),
        )
    )
    assert len(q.mean) > 1
    assert float((exact.log_prob(new) - q.log_prob(new)).mean()) < 3
    assert float((exact.log_prob(new) - fit_gaussian(few).log_prob(new)).mean()) > 3


def test_other_units_give_the_same_density():
    x, unit = two_far_modes(200), torch.tensor([1000.0, 0.01], dtype=F64)
    plain, scaled = fit_reference(x), fit_reference(x * unit + 7)
    shift = scaled.log_prob(x * unit + 7) - plain.log_prob(x)
    torch.testing.assert_close(shift, -unit.log().sum().expand(len(x)), atol=1e-6, rtol=0)


def test_the_seed_decides_and_nothing_global_does():
    x = two_far_modes(100, 3)
    before = torch.get_rng_state()
    a, b = fit_reference(x, 3), fit_reference(x, 3)
    assert all(torch.equal(p, q) for p, q in zip(a.buffers(), b.buffers(), strict=True))
    assert torch.equal(before, torch.get_rng_state())


def odd_tables() -> dict[str, Tensor]:
    x = normal(40, 2)
    return {
        "two rows": x[:2],
        "one column": x[:, :1],
        "equal rows": torch.ones(5, 2),
        "a constant column": torch.cat([x, torch.full((40, 1), 7.0)], 1),
        "a column twice": torch.cat([x, x[:, :1]], 1),
        "fewer rows than columns": normal(6, 20),
        "duplicates": normal(5, 2).repeat(20, 1),
        "an extreme row": torch.cat([x, torch.tensor([[1e6, -1e6]])]),
        "tiny": 1e-12 * x.float(),
    }


@pytest.mark.parametrize("name", odd_tables())
def test_odd_tables_get_a_density(name):
    x = odd_tables()[name]
    q = fit_reference(x)
    assert q.mean.dtype == x.dtype
    assert torch.isfinite(q.log_prob(x)).all()
    assert torch.isfinite(q.sample(100, rng())).all()
    assert torch.isfinite(copy.deepcopy(q).log_prob(q.sample(10, rng()))).all()


def test_one_row_is_fitted_without_leaving_it_out(monkeypatch):
    """Of one row no part is left to fit: nothing that is factored may come from nothing."""
    factor = torch.linalg.cholesky

    def of_numbers(matrix: Tensor) -> Tensor:
        assert bool(matrix.isfinite().all())
        return factor(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky", of_numbers)
    row = torch.tensor([[1.0, -2.0]], dtype=F64)
    fitted = fit_reference(row)
    torch.testing.assert_close(fitted.mean, row)
    assert bool(fitted.log_prob(row).isfinite().all())
