"""The five targets: their exact log Z against other ways to it, and one estimate of each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metastable.evaluation.quadrature import log_partition_quadrature
from metastable.experiments.right_by_default.targets import (
    TARGETS,
    LogisticPosterior,
    Ring,
    coverage,
    far_modes,
)


@pytest.mark.parametrize(("radius", "width"), [(4.0, 0.2), (1.0, 0.5)])
def test_the_ring_by_quadrature(radius, width):
    ring = Ring(radius, width)
    edge = radius + 8 * width
    exact = log_partition_quadrature(ring, [(-edge, edge)] * 2, 801)
    # the tip of a cone at the centre, where little mass is, is all that the rule cannot resolve
    assert float(ring.log_partition()) == pytest.approx(exact, abs=1e-4)


def test_far_modes_by_quadrature():
    energy = far_modes()
    assert float(energy.log_partition()) == pytest.approx(
        log_partition_quadrature(energy, [(-16.0, 16.0), (-14.0, 14.0)], 201), abs=1e-5
    )


def test_the_evidence_of_one_feature_and_one_row_is_a_half():
    """By symmetry: the one label is as likely as the other."""
    assert float(LogisticPosterior(1, 1, 1).log_partition()) == pytest.approx(-0.6931472, abs=1e-5)


def test_the_evidence_by_draws_of_the_prior():
    """Z is the mean likelihood over the prior; and a quarter of the grid's points give the same."""
    energy = LogisticPosterior(4, 2, 6)
    w = torch.randn(400_000, 4, generator=torch.Generator().manual_seed(0))
    prior: Tensor = torch.distributions.Normal(0.0, 1.0).log_prob(w).sum(1)
    likelihood = (-energy(w) - prior).double().exp()
    error = float(likelihood.std()) / len(w) ** 0.5
    assert abs(float(energy.log_partition().exp() - likelihood.mean())) < 4.9 * error


def test_banana_and_funnel_say_what_their_draws_say():
    """log Z = −log p(x) − E(x) at every draw, with p the exact density that the draws are made from."""
    x = TARGETS["funnel"]().sample(5, torch.Generator().manual_seed(0))
    normal = torch.distributions.Normal
    log_p = normal(0.0, 3.0).log_prob(x[:, 0]) + normal(0.0, (x[:, :1] / 2).exp()).log_prob(x[:, 1:]).sum(1)
    energy = TARGETS["funnel"]()
    torch.testing.assert_close(-log_p - energy(x), energy.log_partition().float().expand(5))
    banana = TARGETS["banana"]()
    y = banana.sample(5, torch.Generator().manual_seed(0))
    bent = y[:, 1] - 0.5 * (y[:, 0].square() - 9)
    log_p = normal(0.0, 3.0).log_prob(y[:, 0]) + normal(0.0, 1.0).log_prob(
        torch.cat([bent[:, None], y[:, 2:]], 1)
    ).sum(1)
    torch.testing.assert_close(-log_p - banana(y), banana.log_partition().float().expand(5))


@pytest.mark.parametrize("name", TARGETS)
def test_one_estimate_of_each_is_near_or_not_trusted(name):
    found = coverage(name, [3])
    (row,) = found["rows"]
    assert not row["trusted"] or abs(row["z_score"]) < 5
    assert row["trusted"] or name == "funnel"
    assert row["seconds"] == found["seconds"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_intervals_cover_on_every_target(name):
    found = coverage(name, 100)
    assert found["worst"] < 4 if name == "funnel" else found["trusted"] >= 0.9
    assert name == "funnel" or found["coverage"] >= 0.9
