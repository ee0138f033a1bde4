"""Units: there and back, the Jacobian, and rows that do not vary."""

import math

import pytest
import torch

from metastable.core.errors import MetastableError
from metastable.core.units import Coordinates, Units, default_kind, require_kind


def rows(n=500, seed=0):
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn((n, 3), generator=rng, dtype=torch.float64)
    mixing = torch.tensor([[1.0, 0.9, 0.0], [0.0, 0.3, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    return z @ mixing * torch.tensor([1e5, 1e-3, 1.0]) + torch.tensor([1.7e9, 0.0, -3.0])


@pytest.mark.parametrize("kind", ["none", "scale", "whiten"])
def test_there_and_back_is_where_it_was(kind):
    x = rows()
    units = Units.fit(x, kind)
    back = units.inverse(units.forward(x))
    assert ((back - x).abs() <= 1e-9 * x.abs().amax(0)).all()


def test_scaled_columns_have_unit_variance_and_whitened_ones_no_correlations():
    x = rows(5000)
    scaled, white = (Units.fit(x, kind).forward(x) for kind in ("scale", "whiten"))
    assert torch.allclose(scaled.var(0, correction=0), torch.ones(3, dtype=torch.float64))
    assert torch.allclose(torch.cov(white.T), torch.eye(3, dtype=torch.float64), atol=0.02)
    assert torch.corrcoef(scaled.T)[0, 1] > 0.9


@pytest.mark.parametrize("kind", ["scale", "whiten"])
def test_the_jacobian_is_that_of_automatic_differentiation(kind):
    x = rows()
    units = Units.fit(x, kind)
    J = torch.autograd.functional.jacobian(lambda row: units.forward(row[None])[0], x[0])
    assert math.isclose(units.log_det, float(torch.linalg.slogdet(J).logabsdet), rel_tol=1e-9)


def test_a_unix_time_keeps_its_values():
    seconds = torch.arange(1_700_000_000, 1_700_001_690, dtype=torch.float64)[:, None]
    assert len(torch.unique(seconds.float())) < 60  # what float32 would have left
    assert len(torch.unique(Units.fit(seconds, "whiten").forward(seconds).float())) == len(seconds)


def test_other_units_of_the_same_table_give_the_same_coordinates():
    x = rows()
    other = x * torch.tensor([0.001, 5.0, 1.8]) + torch.tensor([4.0, -1.0, 32.0])
    one, two = (Units.fit(table, "whiten").forward(table) for table in (x, other))
    assert torch.allclose(one, two, atol=1e-6)


def test_columns_that_do_not_vary_are_given_a_unit_spread_and_others_are_left_alone():
    x = torch.cat([rows(), torch.full((500, 1), 7.0, dtype=torch.float64)], 1)
    x = torch.cat([x, x[:, :1] * 2 + 1], 1)  # one that follows from another
    for kind in ("scale", "whiten"):
        units = Units.fit(x, kind)
        u = units.enter(x, 0)
        assert (torch.cov(u.T).diagonal() > 0.5).all()
        assert torch.equal(u, units.enter(x, 0))
        assert (units.inverse(u)[:, 3] - 7).abs().max() < 0.05
    assert torch.linalg.eigvalsh(torch.cov(Units.fit(x, "whiten").enter(x, 0).T)).min() > 0.5


def test_correlations_of_few_rows_are_shrunk():
    few = torch.randn((8, 6), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    units = Units.fit(few, "whiten")
    assert torch.isfinite(units.matrix).all()
    assert units.matrix.abs().max() < 10 / few.std(0).min()


def test_events_of_any_shape_and_leading_dimensions_go_through():
    x = torch.randn(50, 2, 3, generator=torch.Generator().manual_seed(0))
    units = Units.fit(x, "scale")
    assert units.forward(x.view(5, 10, 2, 3)).shape == (5, 10, 2, 3)
    assert torch.allclose(
        units.forward(x).flatten(1).std(0, correction=0), torch.ones(6, dtype=torch.float64)
    )


def test_differences_turn_without_the_mean():
    x = rows()
    units = Units.fit(x, "whiten")
    assert torch.allclose(units.turn(x[1:] - x[:1]), units.forward(x[1:]) - units.forward(x[:1]), atol=1e-6)


def test_they_come_back_from_json():
    units = Coordinates(Units.fit(rows(), "whiten"), Units.fit(rows()[:, :1], "scale"))
    again = Coordinates.from_json(units.as_json())
    assert again is not None
    assert torch.equal(again.events.matrix, units.events.matrix)
    assert again.events.log_det == units.events.log_det
    assert Coordinates(Units.none((2,))).as_json() is None


def test_what_auto_means():
    assert [default_kind(shape) for shape in ((3,), (500,), (1, 28, 28))] == ["whiten", "scale", "none"]
    spreads = (0.0, 1e-3, 0.3, 5.0, 80.0)
    assert [default_kind((1, 28, 28), lambda s=s: s) for s in spreads] == [
        "none",
        "common",
        "none",
        "none",
        "common",
    ]
    assert default_kind((3,), lambda: pytest.fail("vectors are not measured")) == "whiten"


def test_a_common_unit_is_one_for_all_numbers():
    x = 100 + 50 * torch.rand(200, 1, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[..., 0, 0] = 100.0  # a pixel that is black in all pictures stays so
    units = Units.fit(x, "common")
    u = units.enter(x, 0)
    assert abs(float(u.mean())) < 1e-6
    assert float(u.std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert float(u[..., 0, 0].std()) == 0
    assert torch.allclose(units.inverse(u), x, atol=1e-4)
    assert units.log_det == pytest.approx(-9 * float(x.std(correction=0).log()))


def test_words_that_name_no_units_are_refused():
    with pytest.raises(
        MetastableError, match="units: must be one of auto, none, common, scale, whiten, got 'meters'"
    ):
        require_kind("meters")


@pytest.mark.parametrize("kind", ["scale", "whiten"])
def test_where_the_noise_of_training_gives_a_spread_no_other_is_added(kind):
    x = torch.cat([rows(), torch.full((500, 1), 7.0, dtype=torch.float64)], 1)[:, 2:]
    rng = torch.Generator().manual_seed(1)
    noisy = x + 0.1 * torch.randn(x.shape, generator=rng, dtype=torch.float64)
    units = Units.fit(noisy, kind, 0.1)
    assert torch.allclose(units.inverse(units.enter(x, 0)), x, atol=1e-5)
    seen = units.enter(x, 0) + units.turn(noisy - x)
    assert torch.linalg.eigvalsh(torch.cov(seen.T)).min() > 0.5
    old = {key: value for key, value in units.as_json().items() if key != "noise"}
    assert Units.from_json(units.as_json()).noise == 0.1
    assert Units.from_json(old).enter(x, 0)[:, 1].std() > 0.5  # folders from before: as they were


def test_noise_that_is_nothing_beside_what_two_columns_share_is_no_spread():
    x = 1e7 * rows()[:, 2:].repeat(1, 2)
    units = Units.fit(x, "whiten", 0.1)
    assert torch.linalg.eigvalsh(torch.cov(units.enter(x, 0).T)).min() > 0.5
