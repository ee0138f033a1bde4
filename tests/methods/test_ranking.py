"""RankingNCE and ImplicitBC in training: optima within their errors, log Z, trained proposals, bad input."""

from __future__ import annotations

import copy
import importlib.util
import math

import pytest
import torch
from conftest import assert_within, each, mean_and_error, minimise, z_limit
from torch import Tensor, nn

import metastable as ms
from metastable.core.errors import ConfigError, InputError, UnsupportedError
from metastable.evaluation.diagnosis import diagnose
from metastable.experiments.nce_bias import Shifted
from metastable.methods.base import Context, Nothing
from metastable.methods.ranking import ImplicitBC, RankingNCE
from metastable.proposals import Gaussian, Uniform
from metastable.training import SGD
from metastable.walkers.importance import importance_log_partition, importance_walkers

over = pytest.mark.parametrize


class Learned(nn.Module):
    """N(mean, 1), the mean a parameter."""

    def __init__(self, mean: float):
        super().__init__()
        self.event_shape = (1,)
        self.mean = nn.Parameter(torch.tensor([mean]))

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        return self.mean + torch.randn((n, 1), generator=rng)

    def log_prob(self, x: Tensor) -> Tensor:
        return -0.5 * (x[:, 0] - self.mean).square() - 0.5 * math.log(2 * math.pi)


def draws(n: int, mean: float = 1.0, seed: int = 0) -> Tensor:
    return mean + torch.randn((n, 1), generator=torch.Generator().manual_seed(seed))


# ---- the optimum


def estimates(method, groups: int = 48, size: int = 1500) -> Tensor:
    """θ̂ on independent sets of N(1, 1) with fixed negatives from N(0, 1): what the method's loss is least at."""
    proposal, found = Gaussian(torch.zeros(1, dtype=torch.float64)), []
    for g in range(groups):
        energy = Shifted(0.5).double()
        x = draws(size, seed=g).double()
        rng = torch.Generator().manual_seed(1000 + g)
        context = Context(energy, {"energy": energy, "proposal": proposal}, x, proposal, rng)
        negatives, state, _ = method.negatives(context, Nothing(), x)
        minimise(method, context, state, negatives, 15)
        found.append(energy.theta.detach())
    return torch.stack(found)


@over("shared", [False, True])
def test_the_optimum_is_the_truth_and_without_correction_it_is_not(shared):
    count = 300 if shared else 5
    mean, error = mean_and_error(estimates(RankingNCE(negatives_per_datum=count, shared=shared)))
    assert float(error) < 0.03
    assert_within(mean, 1.0, error)
    mean, error = mean_and_error(estimates(ImplicitBC(negatives_per_datum=count, shared=shared)))
    assert abs(float(mean) - 1.0) > z_limit() * float(error)


# ---- a proposal that learns


def test_a_trained_proposal_goes_to_the_data_and_the_users_own_stays():
    x, proposal = draws(2000), Learned(-1.0)
    before = copy.deepcopy(proposal.state_dict())
    settings = dict(steps=120, optimiser=SGD(0.2), batch_size=None, evaluate=False)
    method = RankingNCE(negatives_per_datum=4, proposal=proposal)
    first, second = (ms.fit(Shifted(), x, method, seed=3, **settings) for _ in range(2))
    learned = first.players["proposal"].mean.detach()
    torch.testing.assert_close(learned, x.mean(0), rtol=0, atol=1e-4)  # the likelihood's optimum, exactly
    assert torch.equal(proposal.mean, before["mean"])
    assert torch.equal(first.energy.theta, second.energy.theta)
    assert abs(first.energy.theta.item() - x.mean().item()) < 0.1
    assert {"proposal_loss", "proposal_nll"} <= set(first.history[-1])
    assert first.history[-1]["objective"] < first.history[0]["objective"] < 0


def test_a_proposal_can_be_left_as_it_is():
    x, method = draws(500), RankingNCE(proposal=Learned(0.5), train_proposal=False)
    run = ms.fit(Shifted(), x, method, steps=5, evaluate=False)
    assert float(run.players["proposal"].mean.detach()) == 0.5
    assert "proposal_loss" not in run.history[-1]


def test_the_proposals_rate():
    method = RankingNCE(proposal_rate=0.1)
    assert (method.rate("energy"), method.rate("proposal")) == (1.0, 0.1)


# ---- log Z


class Bowl(nn.Module):
    """½|x|²/s² in d dimensions, with one parameter so that it can be trained."""

    def __init__(self, dim: int, scale: float):
        super().__init__()
        self.dim, self.scale = dim, scale
        self.offset = nn.Parameter(torch.zeros(()))
        self.event_shape = (dim,)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x.flatten(1).square().sum(1) / self.scale**2 + self.offset

    def log_partition(self) -> float:
        return 0.5 * self.dim * math.log(2 * math.pi * self.scale**2)


def test_log_z_is_exact_where_the_proposal_is_the_model():
    walkers = importance_walkers(Bowl(3, 1.0), Gaussian(torch.zeros(3)), 512)
    z = importance_log_partition(walkers)
    assert z.value == pytest.approx(1.5 * math.log(2 * math.pi), abs=1e-6)
    assert z.std_error < 1e-6
    assert (z.ess, z.degrees, z.warnings) == (pytest.approx(512), 63, ())


def test_log_z_is_within_its_error_and_wrong_weights_are_not():
    energy, proposal = Bowl(3, 0.8), Gaussian(torch.full((3,), 0.2), 1.1)
    walkers = importance_walkers(energy, proposal, 16_384)
    z = importance_log_partition(walkers)
    assert 0 < z.std_error < 0.02
    assert_within(z.value, energy.log_partition(), 1.11 * z.std_error)  # 1.11: t with 63 degrees at that rate
    mutant = Gaussian(torch.full((3,), 0.2), 1.1)
    mutant.log_prob = lambda x: -Gaussian.log_prob(mutant, x)
    wrong = importance_walkers(energy, mutant, 16_384)
    assert wrong is None or abs(importance_log_partition(wrong).value - energy.log_partition()) > 0.5


@over("shift", [6.0, 60.0, math.nan])
def test_no_log_z_where_few_draws_carry_the_weight(shift):
    assert (
        importance_walkers(lambda x: 50 * (x - shift).square().sum(1), Gaussian(torch.zeros(2)), 4096) is None
    )


def test_few_draws_give_a_warning_before_they_give_nothing():
    walkers = importance_walkers(lambda x: 0.5 * (x[:, 0] / 0.02).square(), Gaussian(torch.zeros(1)), 16_384)
    assert walkers is not None
    (warning,) = importance_log_partition(walkers).warnings
    assert "nearer proposal" in warning


def test_a_run_that_is_read_back_has_the_same_log_z(tmp_path):
    x = torch.randn((600, 2), generator=torch.Generator().manual_seed(0))
    run = ms.fit(None, x, "ranking-nce", steps=20, out=tmp_path / "run", evaluate=False)
    again = ms.load_run(tmp_path / "run")
    assert run.log_partition is not None
    assert again.log_partition.value == run.log_partition.value
    assert again.log_partition.std_error == run.log_partition.std_error
    assert torch.equal(again.walkers.x, run.walkers.x)


def test_a_flow_that_learned_comes_back_with_the_run(tmp_path):
    if importlib.util.find_spec("zuko") is None:
        pytest.skip("zuko is not installed")
    x = torch.randn((300, 2), generator=torch.Generator().manual_seed(0))
    method = RankingNCE(proposal="flow", negatives_per_datum=2, walkers=1024)
    run = ms.fit(None, x, method, steps=4, out=tmp_path / "run", evaluate=False)
    again = ms.load_run(tmp_path / "run")
    assert run.log_partition is not None
    assert again.log_partition.value == run.log_partition.value


def test_a_box_gives_no_log_z_of_a_density_that_may_reach_beyond_it():
    run = ms.fit(Bowl(2, 1.0), torch.randn(200, 2), "ibc", steps=2, evaluate=False)
    assert run.log_partition is None
    assert run.walkers is None


# ---- collapse


def test_a_proposal_far_from_the_data_is_named():
    method = RankingNCE(negatives_per_datum=4, proposal=Gaussian(torch.full((1,), -30.0), 1.0))
    run = ms.fit(Shifted(1.0), draws(500), method, steps=25, log_every=1, evaluate=False)
    found = {finding.name: finding for finding in diagnose(run.history)}
    assert found["posterior-collapse"].severity == "problem"
    near = RankingNCE(negatives_per_datum=4)
    run = ms.fit(Shifted(1.0), draws(500), near, steps=25, log_every=1, evaluate=False)
    assert "posterior-collapse" not in {finding.name for finding in diagnose(run.history)}


# ---- bad input


@each(
    "make, field",
    [
        (lambda: RankingNCE(negatives_per_datum=0), "ranking-nce.negatives_per_datum"),
        (lambda: RankingNCE(negatives_per_datum=2.5), "ranking-nce.negatives_per_datum"),
        (lambda: ImplicitBC(negatives_per_datum=-1), "ibc.negatives_per_datum"),
        (lambda: RankingNCE(proposal="gausian"), "ranking-nce.proposal"),
        (lambda: RankingNCE(walkers=0), "ranking-nce.walkers"),
        (lambda: ImplicitBC(proposal_rate=0.0), "ibc.proposal_rate"),
    ],
)
def test_bad_settings_name_field_and_value(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == field


def test_data_outside_the_support_are_refused():
    box = Uniform(torch.tensor([0.0]), torch.tensor([0.5]))
    with pytest.raises(InputError, match=r"ranking-nce\.proposal: \d+ of 100 data rows lie outside"):
        ms.fit(Shifted(), draws(100), RankingNCE(proposal=box), steps=1, evaluate=False)


def test_a_proposal_that_cannot_make_its_own_draws_is_refused():
    liar = Uniform(torch.tensor([-10.0]), torch.tensor([10.0]))
    liar.sample = lambda n, rng: torch.full((n, 1), 11.0)
    with pytest.raises(InputError, match="do not belong together"):
        ms.fit(Shifted(), draws(100), RankingNCE(proposal=liar), steps=1, evaluate=False)


def test_a_proposal_of_another_shape_is_refused():
    method = RankingNCE(proposal=Gaussian(torch.zeros(3)))
    with pytest.raises(InputError, match=r"ranking-nce\.proposal: events"):
        ms.fit(Shifted(), draws(100), method, steps=1, evaluate=False)


def test_a_density_that_is_only_estimated_is_refused():
    estimated = Gaussian(torch.zeros(1), 2.0)
    estimated.biased = True
    with pytest.raises(UnsupportedError, match=r"ranking-nce\.proposal"):
        ms.fit(Shifted(), draws(100), RankingNCE(proposal=estimated), steps=1, evaluate=False)
    run = ms.fit(Shifted(), draws(100), ImplicitBC(proposal=estimated), steps=1, evaluate=False)
    assert run.log_partition is None


def test_a_thing_that_is_no_proposal_is_refused():
    with pytest.raises(ConfigError, match=r"ibc\.proposal: must be one of"):
        ms.fit(Shifted(), draws(100), ImplicitBC(proposal=3), steps=1, evaluate=False)
