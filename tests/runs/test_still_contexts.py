"""Numbers of contexts that never change in training: what they are later moves nothing."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

import metastable as ms
from metastable.core.units import Units
from metastable.proposals.encoders import Standardise, moments

over = pytest.mark.parametrize
NET = {"name": "conditional", "width": 16, "depth": 3}
FIELD = {"name": "interpolant", "steps": 4}
MODELS = {"ranking": (NET, "ranking-nce"), "flow": ("flow", "density"), "interpolant": (FIELD, "density")}


def pairs(still: float = 1.0, n: int = 200) -> tuple[Tensor, Tensor]:
    """Events, and contexts of which the second number is `still`."""
    rng = torch.Generator().manual_seed(0)
    c = torch.randn(n, 1, generator=rng)
    x = torch.cat([c, -c], 1) + 0.3 * torch.randn(n, 2, generator=rng)
    return x, torch.cat([c, torch.full((n, 1), still)], 1)


def trained(x: Tensor, given: Tensor, model: str = "ranking", **options) -> ms.Run:
    energy, method = MODELS[model]
    settings = {"seed": 0, "batch_size": 64, "evaluate": False, **options}
    return ms.fit(energy, x, method, 40, given=given, **settings)


def moved(given: Tensor, share: float = 1e-3) -> Tensor:
    return given * torch.tensor([1.0, 1 + share])


def change(run: ms.Run, x: Tensor, given: Tensor) -> float:
    """The most that a log-density changes where the still number is a thousandth larger."""
    some, there = x[:20], given[:20]
    return float((run.log_prob(some, given=there) - run.log_prob(some, given=moved(there))).abs().max())


@pytest.fixture
def divided(monkeypatch):
    """The rule as it was, in which a still number is divided by a small part of itself, or of the others."""
    monkeypatch.setattr(Units, "of_contexts", lambda given: Units.fit(given, "scale"))
    monkeypatch.setattr(Standardise, "_moments", lambda self, rows: moments(self.shape, rows, "given"))


@over("units", ["auto", "none"])
@over("still", [1.0, -300.0])
@over("model", MODELS)
def test_a_still_number_moves_no_density_and_no_draw(model, still, units):
    x, given = pairs(still)
    run = trained(x, given, model, units=units)
    assert change(run, x, given) < 1e-6
    where = torch.tensor([1.0, 0.0])
    assert float((run.log_prob(x, given=given) - run.log_prob(x, given=given + where)).abs().max()) > 0.1
    if units == "auto" or model != "ranking":  # chains of contexts that are not the same are tuned anew
        one, other = (run.sample(8, given=there[:3]).x for there in (given, moved(given, 100.0)))
        torch.testing.assert_close(one, other)


@over("units", ["auto", "none"])
def test_where_it_was_divided_a_thousandth_of_it_moved_densities(units, divided):
    x, given = pairs(-300.0)
    assert change(trained(x, given, units=units), x, given) > 1


@over("units", ["auto", "none"])
def test_training_is_what_it_was(units, request):
    x, given = pairs(7.0)  # whose mean is not rounded, so that it was 0 before as well
    now = trained(x, given, units=units)
    request.getfixturevalue("divided")
    before = trained(x, given, units=units)
    for one, other in zip(now.energy.parameters(), before.energy.parameters(), strict=True):
        assert torch.equal(one, other)


@over("scale", [1e-3, 1e3])
def test_contexts_in_other_units_give_the_same_model(scale):
    x, given = pairs(7.0)
    one, other = trained(x, given), trained(x, scale * given.double())
    found = [run.log_prob(x, given=there) for run, there in ((one, given), (other, scale * given.double()))]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert change(other, x, scale * given.double()) < 1e-6


def test_a_run_comes_back_from_its_folder_as_it_was(tmp_path):
    x, given = pairs(7.0)
    run = trained(x, given, out=tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["coordinates"]["given"]["matrix"][1] == 0
    again = ms.load_run(tmp_path)
    assert torch.equal(run.log_prob(x, given=given), again.log_prob(x, given=given))
    assert change(again, x, given) < 1e-6


def test_folders_from_before_are_read_with_their_scales(tmp_path, request, monkeypatch):
    x, given = pairs(7.0)
    request.getfixturevalue("divided")
    run = trained(x, given, out=tmp_path)
    expected = [run.log_prob(x, given=there) for there in (given, moved(given))]
    monkeypatch.undo()
    again = ms.load_run(tmp_path)
    assert Units.of_contexts(given).matrix[1] == 0
    for there, value in zip((given, moved(given)), expected, strict=True):
        assert torch.equal(again.log_prob(x, given=there), value)


def test_the_noise_of_contexts_leaves_still_numbers_alone():
    x, given = pairs(7.0)
    units = Units.of_contexts(given)
    assert units.turn(torch.ones(3, 2))[:, 1].tolist() == [0.0, 0.0, 0.0]
    assert units.inverse(units.forward(given))[:, 1].tolist() == [7.0] * len(x)


def test_still_pixels_of_contexts_are_left_out_with_gradients_that_are_numbers():
    rows = torch.rand(30, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    rows[:, 0, 0, 0] = 0.1
    encoder = Standardise((1, 2, 2), rows)
    there = (rows[:4] + 0.5).requires_grad_()
    code = encoder(there)
    assert code[:, 0].tolist() == [0.0] * 4
    code.square().sum().backward()
    assert there.grad is not None
    assert bool(there.grad.isfinite().all())
    encoder.refit(rows.flip(-1))  # now another pixel is still
    assert (encoder.scale == 0).tolist() == [False, True, False, False]
