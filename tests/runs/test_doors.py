"""What comes in by a run's doors: rows of another type or place, weights that are all zero, and the run's seed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import each
from torch import nn

import metastable as ms
from metastable.core.errors import InputError
from metastable.core.types import Walkers
from metastable.core.weights import require_weight
from metastable.evaluation.conditional import conditional_log_prob
from metastable.evaluation.distances import energy_distance
from metastable.evaluation.modes import mode_weights
from metastable.methods import FDivergence, PersistentCD
from metastable.proposals import Gaussian
from metastable.runs.folder import write_json
from metastable.runs.run import Run
from metastable.summary import load_summary
from metastable.walkers.importance import importance_log_partition, importance_walkers

QUICK = dict(steps=5, evaluate=False, device="cpu")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(n: int = 40) -> torch.Tensor:
    return torch.randn((n, 2), generator=rng(3), dtype=torch.float64)


# ---- rows of another type or place


@pytest.mark.parametrize(
    "given",
    [lambda x: x, lambda x: x.numpy(), lambda x: x.half().double()],
    ids=["tensor", "array", "rounded"],
)
def test_rows_of_any_type_are_brought_to_the_runs(given):
    run = ms.fit(None, rows().float(), "jarzynski", **QUICK)
    x = given(rows())
    found = run.log_prob(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, run.log_prob(torch.as_tensor(x).float()))  # rows keep their digits


def test_a_density_ratio_takes_them_too():
    run = ms.fit(None, rows().float(), FDivergence(source=PersistentCD(walkers=20)), **QUICK)
    x = rows()
    torch.testing.assert_close(run.log_ratio(x), run.log_ratio(x.float()))
    torch.testing.assert_close(run.importance_weights(x.numpy()), run.importance_weights(x.float()))


class Elsewhere(nn.Module):
    """An energy on another device than the rows: `meta` has no numbers, but refuses to mix all the same."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device="meta"))

    def forward(self, x):
        return x.square() @ self.weight


def elsewhere(**settings) -> Run:
    z = ms.LogPartition(0.0, 0.1)
    return Run(Elsewhere(), "cd", [], None, z, config={"event_shape": [2]}, **settings)


def test_rows_come_to_the_device_of_the_energy():
    with pytest.raises(RuntimeError, match="device"):
        Elsewhere()(rows().float())
    assert elsewhere().log_prob(rows()).device.type == "meta"


def test_samples_of_a_run_that_is_read_come_to_its_device(tmp_path):
    write_json(tmp_path / "summary.json", {"status": "finished"})
    np.save(tmp_path / "samples.npy", rows().float().numpy())
    run = load_summary(replace(elsewhere(folder=tmp_path), log_partition=None))
    assert run.walkers.x.device.type == run.walkers.log_weight.device.type == "meta"


# ---- the run's seed


def test_importance_draws_are_those_of_the_runs_seed(tmp_path):
    def fitted(seed: int) -> Run:
        return ms.fit(None, rows().float(), "nce", seed=seed, out=tmp_path / str(seed), **QUICK)

    one, other = fitted(1), fitted(2)
    assert not torch.equal(one.walkers.x, other.walkers.x)
    again = ms.load_run(tmp_path / "1")
    assert torch.equal(again.walkers.x, one.walkers.x)
    assert again.log_partition == one.log_partition


def test_other_seeds_give_other_estimates_within_their_errors():
    q = Gaussian(torch.zeros(2), 1.5)
    made = [importance_walkers(lambda x: 0.5 * x.square().sum(1), q, 4096, seed) for seed in (0, 1, 2)]
    found = [importance_log_partition(walkers) for walkers in made]
    assert len({z.value for z in found}) == 3
    assert all(abs(z.value - math.log(2 * math.pi)) < 5 * z.std_error for z in found)


def test_log_z_of_contexts_is_drawn_with_the_runs_seed():
    given = torch.rand((40, 1), generator=rng())
    runs = [
        ms.fit(None, rows().float()[:, :1], "ranking-nce", given=given, seed=seed, **QUICK)
        for seed in (1, 1, 2)
    ]
    one, same, other = (run.log_partition_given(given[:3]).value for run in runs)
    assert torch.equal(one, same)
    runs[1].config["seed"] = 2  # the same energy, drawn with another seed
    assert not torch.equal(one, runs[1].log_partition_given(given[:3]).value)
    assert not torch.equal(one, other)


# ---- weights that are all zero

NONE = torch.full((6,), -torch.inf)


@each(
    "use",
    [
        lambda: Walkers(rows(6), NONE).ess,
        lambda: mode_weights(rows(6), rows(2), NONE),
        lambda: energy_distance(rows(6), rows(6), NONE),
        lambda: importance_log_partition(
            Walkers(rows(6), NONE, {"populations": [2, 4], "ess_fraction": 1.0})
        ),
        lambda: require_weight(torch.stack([NONE, torch.zeros(6)])),
    ],
)
def test_weights_that_are_all_zero_are_an_error(use):
    with pytest.raises(InputError, match=r"log_weight.*: must have a finite largest value .* all are −inf"):
        use()


def test_weights_that_are_not_numbers_are_named():
    with pytest.raises(InputError, match="the largest is nan"):
        require_weight(torch.tensor([0.0, torch.nan]))
    with pytest.raises(InputError, match="of 1 of 2 populations; the largest is inf"):
        require_weight(torch.tensor([[0.0, torch.inf], [0.0, 0.0]]))
    some = torch.tensor([-torch.inf, 0.0])
    assert require_weight(some) is some
    assert Walkers(rows(2), some).ess == 1


def test_a_context_without_mass_cannot_normalise():
    def energy(y, given):
        return torch.where(given[:, :1] > 0, y.square().sum(-1), torch.inf)

    given = torch.tensor([[1.0], [-2.0], [1.0]])
    with pytest.raises(InputError, match=r"exp\(−E\) is 0 at all 64 draws .* context \[-2.0\]"):
        conditional_log_prob(energy, Gaussian(torch.zeros(2)), torch.zeros(3, 2), given, 64)


@pytest.mark.parametrize("seed", [0.5, "a", True, None])
def test_a_seed_that_no_folder_could_hold_is_refused_before_the_training(seed, tmp_path):
    """It trained, and what it wrote was said to be damaged when it was read."""
    with pytest.raises(InputError, match="seed: must be an integer, got "):
        ms.fit("mlp", torch.randn(32, 2), "cd", seed=seed, out=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()


def test_a_seed_of_numpy_is_one(tmp_path):
    ms.fit("mlp", torch.randn(32, 2), "cd", seed=np.int64(3), out=tmp_path / "run", **QUICK)
    assert ms.load_run(tmp_path / "run").config["seed"] == 3
