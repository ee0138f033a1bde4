"""The summary of a classifier that is an energy, and its samples of p(x | y), against exact answers."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import assert_within, mean_and_error, z_scores
from torch import Tensor, nn

import metastable as ms
from metastable.core.errors import InputError
from metastable.core.types import Walkers
from metastable.energies import GaussianMixture
from metastable.evaluation.classifier import class_samples, classifier_summary
from metastable.kernels import MALA
from metastable.runs.run import Run

MEANS = torch.tensor([[-1.2, 0.0], [1.2, 0.0], [0.0, 1.5]], dtype=torch.float64)
LOG_WEIGHTS = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()


class Gaussians(nn.Module):
    """Logits log p(x, y) of overlapping unit Gaussians: p(y | x), p(x) and p(x | y) are all exact."""

    classes = 3
    event_shape = (2,)

    def __init__(self):
        super().__init__()
        self.means = nn.Parameter(MEANS.clone())
        self.bias = nn.Parameter(LOG_WEIGHTS.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.bias - 0.5 * (x[:, None] - self.means).square().sum(2)


def joint() -> ms.energies.JointEnergy:
    return ms.energies.JointEnergy(Gaussians(), output_scale=1.0)


def draws(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Events with labels drawn from p(y | x), which is the same as labels first."""
    x = GaussianMixture(MEANS, log_weights=LOG_WEIGHTS).sample(n, torch.Generator().manual_seed(seed))
    p = torch.softmax(joint().logits(x).detach(), 1)
    return x, torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed + 1))[:, 0]


def test_the_bayes_classifier_has_its_exact_accuracy_and_is_calibrated():
    x, y = draws(20_000, 0)
    found = classifier_summary(joint(), x, y, most_scored=100).numbers
    p = torch.softmax(joint().logits(x).detach(), 1)
    assert_within(found["accuracy"], float(p.amax(1).mean()), found["accuracy_se"])
    entropy, error = mean_and_error(-torch.log(p.gather(1, y[:, None])[:, 0]))
    assert found["negative_log_likelihood"] == pytest.approx(float(entropy))
    assert_within(float(entropy), float(-(p * p.log()).sum(1).mean()), error)
    for name in ("calibration_error", "calibration_error_equal_mass"):
        ece = found[name]
        assert ece["value"] < ece["by_chance"] + 5 * ece["by_chance_std"]
        assert ece["value"] < 0.02
    assert sum(found["reliability"]["events"]) == found["rows"] == 20_000
    json.dumps(found)


def test_outsiders_are_named_and_ranked():
    x, y = draws(400, 2)
    far, same = x + 8, draws(400, 4)[0]
    found = classifier_summary(joint(), x, y, {"far": far, "same": same})
    first, second = found.numbers["ood"]
    assert first["name"] == "far"
    assert first["auroc"]["log_density"]["value"] > 0.999
    assert_within(second["auroc"]["log_density"]["value"], 0.5, second["auroc"]["log_density"]["std_error"])
    assert found.arrays["inside_confidence"].shape == (400,)
    assert found.arrays["outside_0_gradient"].shape == (400,)
    assert (found.arrays["outside_0_gradient"] < 0).all()


def test_at_most_so_many_rows_are_scored():
    x, y = draws(50, 6)
    found = classifier_summary(joint(), x, y, {"o": x}, most_scored=20)
    assert found.numbers["rows"] == 50  # a classifier is judged by all of them
    assert found.numbers["ood"][0]["rows"] == 20
    again = classifier_summary(joint(), x, y, {"o": x}, most_scored=20)
    assert (again.arrays["inside_log_density"] == found.arrays["inside_log_density"]).all()


def test_outsiders_of_another_shape_and_labels_out_of_range_are_refused():
    x, y = draws(10, 8)
    with pytest.raises(InputError, match=r"outside: o must have events of the shape \(2,\), got \(3,\)"):
        classifier_summary(joint(), x, y, {"o": torch.zeros(5, 3)})
    with pytest.raises(InputError, match="labels: must be from 0 to 2, got 3 in row"):
        classifier_summary(joint(), x, y + 1)


# ---------------------------------------------------------------------------------------- samples of p(x | y)


@pytest.mark.parametrize("steps", [0, 40])
def test_class_samples_from_draws_of_the_model_follow_each_class(steps):
    start, _ = draws(40_000, 10)
    found = class_samples(joint(), start, kernel=MALA(0.3), per_class=600, steps=steps, seed=3)
    assert found.shape == (3, 600, 2)
    mean, error = mean_and_error(found.transpose(0, 1))
    assert_within(mean, MEANS, error)
    # chains that ignore the label would have the mean of p(x) in each class
    marginal = torch.softmax(LOG_WEIGHTS, 0) @ MEANS
    assert bool((z_scores(mean, marginal.expand(3, 2), error).amax(1) > 10).all())


def test_chains_from_elsewhere_reach_their_class():
    """Started from one cloud in the wrong place, what is left of it must be forgotten."""
    noise = 4 + torch.randn(2000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = class_samples(joint(), noise, kernel=MALA(0.5), per_class=500, steps=300, seed=5)
    mean, error = mean_and_error(found.transpose(0, 1))
    assert_within(mean, MEANS, error)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e200])
def test_a_walker_that_ran_away_is_chosen_for_no_class(value):
    start, _ = draws(50, 12)
    start[::2] = value  # 1e200 is finite, and its logits are not
    found = class_samples(joint(), start, kernel=MALA(0.3), per_class=4, steps=0, seed=7)
    assert bool((found.abs() < 100).all())


def run_of(walkers: Tensor, **settings) -> Run:
    config = {"event_shape": [2], "method": {"name": "jem"}}
    return Run(joint(), "jem", [], Walkers.equal(walkers), None, config=config, **settings)


@pytest.mark.parametrize("moves", [{"steps": 20}, {"steps": 1, "step_size": 1e-6}])
@pytest.mark.parametrize("label", [0, 1, 2])
def test_a_run_samples_one_class(label, moves):
    """By where the walkers go, and by those that are chosen where they hardly move."""
    run = run_of(draws(20_000, 14)[0])
    found = run.sample(1000, label=label, seed=1, **moves)
    size = min(found.ess, found.info["start_ess"])
    mean = torch.softmax(found.log_weight, 0) @ found.x
    assert_within(mean, MEANS[label], size**-0.5)  # the classes are unit Gaussians
    everything = run.sample(1000, steps=20, seed=1)
    mean = torch.softmax(everything.log_weight, 0) @ everything.x
    assert float(z_scores(mean, MEANS[label], everything.ess**-0.5).max()) > 10


def test_walkers_of_a_class_say_how_many_there_were():
    """One of 200 is where class 1 is, however many walkers are drawn from it."""
    x = torch.tensor([[-30.0, 0.0]], dtype=torch.float64).repeat(200, 1)
    x[7] = torch.tensor([30.0, 0.0])
    found = run_of(x).sample(500, label=1, steps=2)
    assert found.info["start_ess"] == pytest.approx(1.0)
    assert found.ess == pytest.approx(1.0)  # copies of one walker, though their own weights are equal
    assert run_of(x).sample(500, steps=2).info["start_ess"] == pytest.approx(200.0)


def test_a_label_that_cannot_be_sampled_is_named():
    run = run_of(draws(50, 15)[0])
    for label, words in (
        (3, "labels: must be from 0 to 2, got 3"),
        (0.5, "labels: must be integers, got torch.float64, 0.5"),
        ([0, 1], "label: must be one class, got 2 labels"),
    ):
        with pytest.raises(InputError, match=words):
            run.sample(5, label=label)  # type: ignore
    with pytest.raises(InputError, match="'jem' was trained without contexts; samples of one class: label=…"):
        run.sample(5, given=1)
    with pytest.raises(
        InputError, match=r"label: needs a run of a classifier that is an energy model \(jem\)"
    ):
        Run(GaussianMixture(MEANS), "pcd", [], run.walkers, None, config=run.config).sample(5, label=1)
    run.config["context_shape"] = [1]
    with pytest.raises(InputError, match="label: this is a conditional run, which has no classes"):
        run.sample(5, label=1)


def test_class_samples_follow_the_seed_and_need_enough_rows():
    start, _ = draws(50, 12)
    settings = {"kernel": MALA(0.3), "per_class": 4, "steps": 3}
    one, two = (class_samples(joint(), start, seed=7, **settings) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, class_samples(joint(), start, seed=8, **settings))
    assert class_samples(joint(), start, most_classes=2, seed=7, **settings).shape == (2, 4, 2)
    with pytest.raises(InputError, match="start: must have 4 rows or more, one for each chain, got 3"):
        class_samples(joint(), start[:3], **settings)
