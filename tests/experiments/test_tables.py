"""Tables of the experiment: what they hold, how they are split, and that scores are the rivals' own."""

from __future__ import annotations

import numpy as np
import pytest

from metastable.experiments.right_by_default import tables


@pytest.mark.parametrize(
    ("name", "shape"),
    [("iris", (150, 4)), ("wine", (178, 13)), ("breast-cancer", (569, 30)), ("diabetes", (442, 9))],
)
def test_tables_are_standardised_and_have_densities(name, shape):
    x = tables.load(name)
    assert x.shape == shape
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(x.std(0), 1)
    assert min(len(np.unique(column)) for column in x.T) > 15


def test_splits_are_of_all_rows_and_differ():
    x = tables.load("iris")
    first, second = tables.split(x, 0), tables.split(x, 1)
    assert len(first.test) == 30
    np.testing.assert_allclose(np.sort(np.concatenate(first), 0), np.sort(x, 0))
    assert not np.array_equal(first.test, second.test)


def test_rivals_are_tuned_and_scored_in_nats_a_row():
    """Against rows of a known Gaussian both come near its entropy, and only the mixture very near."""
    rng = np.random.default_rng(0)
    found = tables.rivals(tables.Split(rng.normal(size=(400, 2)), rng.normal(size=(4000, 2))), seed=0)
    entropy = np.log(2 * np.pi * np.e)
    assert found.components == 1
    assert found.mixture == pytest.approx(-entropy, abs=0.08)
    assert found.kernel == pytest.approx(-entropy, abs=0.15)
    assert found.better == max(found.mixture, found.kernel)


def test_any_density_can_be_scored():
    rows = tables.split(tables.load("iris"), 0)
    assert tables.ours(rows, 0, lambda train, seed: lambda x: np.full(len(x), -2.5)) == -2.5
