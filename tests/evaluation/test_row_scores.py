"""One score for each row, against densities that are known."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from metastable.core.errors import ConfigError, EnergyError
from metastable.core.types import LogPartition
from metastable.energies import two_modes
from metastable.runs.row_scores import RowScores
from metastable.runs.run import Run

ENERGY = two_modes(8.0, (0.2, 0.8), 2)
EXACT = LogPartition(float(ENERGY.log_partition()), 0.01)


def log_density(x):
    """log of 0.2·N(−4, 1) + 0.8·N(4, 1) along the first axis, times N(0, 1), written out."""
    along = torch.logaddexp(math.log(0.2) - (x[:, 0] + 4) ** 2 / 2, math.log(0.8) - (x[:, 0] - 4) ** 2 / 2)
    return (along - x[:, 1] ** 2 / 2 - math.log(2 * math.pi)).double()


def run_of(z: LogPartition | None, energy=ENERGY, **more) -> Run:
    return Run(energy, "cd", [], None, z, config={"event_shape": [2]}, **more)


def test_a_trusted_log_z_gives_log_densities_in_the_order_of_the_rows():
    x = ENERGY.sample(9, torch.Generator().manual_seed(0))
    found = run_of(EXACT).score(x)
    assert (found.kind, found.why) == ("log_density", "")
    assert torch.allclose(found.value, log_density(x), atol=1e-5)
    assert torch.equal(run_of(EXACT).score(x.flip(0)).value, found.value.flip(0))


@pytest.mark.parametrize(
    ("z", "why"),
    [
        (None, "log Z was not estimated"),
        (
            dataclasses.replace(EXACT, warnings=("walkers drift",)),
            "log Z is not to be trusted: walkers drift",
        ),
    ],
)
def test_without_a_trusted_log_z_energies_are_told_and_why(z, why):
    x = ENERGY.sample(9, torch.Generator().manual_seed(0))
    found = run_of(z, power=2.0).score(x)
    assert (found.kind, found.why) == ("energy", why)
    assert torch.allclose(found.value, 2 * ENERGY(x).double())


def test_the_same_rows_are_outliers_whether_log_z_is_known_or_not():
    rng = torch.Generator().manual_seed(0)
    own, new = ENERGY.sample(300, rng), torch.cat([ENERGY.sample(50, rng), torch.full((3, 2), 30.0)])
    flags = []
    for run in (run_of(EXACT), run_of(None)):
        flags.append(run.score(new).outliers(run.score(own).threshold(0.05)))
    assert torch.equal(*flags)
    assert bool(flags[0][-3:].all())
    assert int(flags[0].sum()) < 10


def test_new_rows_of_the_same_law_are_flagged_at_most_as_often_as_asked():
    """Of the n + 1 places that a new row may have among n others, ⌊(n + 1)·share⌋ lie beyond."""
    for n, share in ((99, 0.01), (100, 0.01), (19, 0.05), (250, 0.1), (37, 0.3)):
        own = RowScores(torch.arange(n, dtype=torch.float64), "energy")
        places = torch.arange(n + 1, dtype=torch.float64) - 0.5  # one in each gap
        beyond = float(own.outliers(own.threshold(share)).double().sum())
        flagged = RowScores(places, "energy").outliers(own.threshold(share)).double().sum()
        assert flagged == int(share * (n + 1) + 1e-9)
        assert beyond <= share * n


def test_too_few_rows_for_a_share_leave_the_most_extreme_of_them():
    assert RowScores(torch.tensor([3.0, 1.0, 2.0]), "energy").threshold(0.01) == 3.0
    assert RowScores(torch.tensor([3.0, 1.0, 2.0]), "log_density").threshold(0.01) == 1.0


def test_a_row_of_no_density_at_all_is_an_outlier():
    found = RowScores(torch.tensor([-1.0, -torch.inf]), "log_density")
    assert found.outliers(RowScores(torch.tensor([-1.0, -2.0]), "log_density").threshold(0.5)).tolist() == [
        False,
        True,
    ]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2.0])
def test_a_share_is_above_0_and_below_1(share):
    with pytest.raises(ConfigError, match="outliers: must be a share above 0 and below 1, got"):
        RowScores(torch.zeros(3), "energy").threshold(share)


def test_an_energy_that_is_no_number_is_refused_with_the_row():
    def broken(x):
        return torch.where(x[:, 0] > 2, torch.nan, x[:, 0])

    with pytest.raises(EnergyError, match="got NaN on 1 of 3 rows, the first at row 1"):
        run_of(EXACT, broken).score(torch.tensor([[0.0, 0.0], [3.0, 0.0], [1.0, 0.0]]))
