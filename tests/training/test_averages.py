"""Averages of every player: by their closed form, kept with a run, and used where policies act."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

import metastable as ms
from metastable.data import Dataset
from metastable.training.trainer import Trainer

over = pytest.mark.parametrize
FLOW = {"name": "interpolant", "width": 8, "layers": 2, "steps": 4, "scored": 3}
METHOD = {"name": "ranking-nce", "negatives_per_datum": 2, "proposal": FLOW}


def rows(n: int = 60) -> Dataset:
    rng = torch.Generator().manual_seed(0)
    given = torch.randn(n, 3, generator=rng)
    return Dataset.of(given[:, :2] + torch.randn(n, 2, generator=rng), "rows", given=given)


def fit(steps: int, energy="conditional", method=None, **options):
    options = {"batch_size": 20, "evaluate": False, "learning_rate": 0.05, "ema": 0.5} | options
    return ms.fit({"name": energy, "width": 8, "depth": 3}, rows(), method or METHOD, steps, **options)


def of_run(players) -> list[Tensor]:
    return [v for name in ("energy", "proposal") for v in players[name].state_dict().values()]


def test_every_player_is_averaged_as_the_closed_form_says(monkeypatch):
    """After n updates Σ_k d^{n−k} (1 − d)^{k>1} θ_k, the first weights being the average of themselves."""
    seen = []
    updated = Trainer._updated

    def watched(self, planned):
        seen.append([v.clone() for v in of_run(self.players)])
        updated(self, planned)

    monkeypatch.setattr(Trainer, "_updated", watched)
    run = fit(5)
    found = of_run(run.averaged().inside or run.averaged().players)
    for k, value in enumerate(found):
        shares = [0.5**4] + [0.5 ** (5 - i) for i in range(1, 5)]
        expected = sum(share * step[k] for share, step in zip(shares, seen, strict=True))
        torch.testing.assert_close(value, expected)
    moved = [not torch.equal(a, b) for a, b in zip(found, of_run(run.inside or run.players), strict=True)]
    assert sum(moved) > len(moved) / 2


@over(
    "energy, owner",
    [("conditional", ""), ("conditional", "energy"), ("conditional", "proposal"), ("on-proposal", "")],
)
def test_averages_come_back_with_their_run(energy, owner, tmp_path):
    run = fit(4, energy, {**METHOD, "encoder_owner": owner}, out=tmp_path / "run")
    back = ms.load_run(tmp_path / "run")
    x, given = torch.randn(3, 2), torch.randn(3, 3)
    with torch.no_grad():
        one, two, plain = run.averaged(), back.averaged(), run.model.energy(x, given)
        assert torch.equal(one.model.energy(x, given), two.model.energy(x, given))
        assert not torch.allclose(one.model.energy(x, given), plain)
        draws = [r.sample(5, steps=1, candidates=1, given=given, seed=1).x for r in (one, two, run)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2])
    assert torch.equal(run.model.energy(x, given), plain)  # the run itself is as it was
    if energy == "on-proposal":  # and stands on the averaged proposal
        p = one.model.players["proposal"]
        expected = one.model.energy.network(x, given) - p.log_prob(x, given)
        torch.testing.assert_close(one.model.energy(x, given), expected)


def test_without_averages_a_run_is_its_own():
    run = fit(2, ema=None)
    assert run.averaged() is run


def test_resuming_goes_on_with_the_averages_of_every_player(tmp_path):
    options = {"checkpoint_every": 4, "log_every": 4}
    whole = fit(12, out=tmp_path / "whole", **options)
    fit(12, out=tmp_path / "parts", **options)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000012")
    resumed = fit(12, out=tmp_path / "parts", resume=True, **options)
    for name in ("energy", "proposal"):
        for key, value in whole.averages[name].items():
            assert torch.equal(value, resumed.averages[name][key])


def test_the_best_model_is_kept_with_its_averages(monkeypatch, tmp_path):
    """Going back puts the averages back too: they are of the update that was kept."""
    data = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    method = ms.methods.Jarzynski(walkers=64, populations=4)
    kept = {}
    looked = Trainer._look_at_held_out

    def watched(self):
        looked(self)
        if self.patience is not None and self.patience.at == self.context.step:
            kept.update({k: v.clone() for k, v in self.averages["energy"].module.state_dict().items()})

    monkeypatch.setattr(Trainer, "_look_at_held_out", watched)
    options = {"ema": 0.9, "learning_rate": 0.05, "batch_size": 20, "held_out": 0.3, "schedule": None}
    run = ms.fit({"name": "mlp", "reference": "gaussian"}, data, method, 100, evaluate=False, **options)
    assert run.kept is not None
    assert run.kept < 100
    for key, value in run.averages["energy"].items():
        assert torch.equal(value, kept[key])
