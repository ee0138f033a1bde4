"""Restoring against closed forms: Gaussian events, of which everything is known."""

from __future__ import annotations

import math

import pytest
import torch

from metastable.core.errors import ConfigError, InputError
from metastable.core.observed import Observed
from metastable.core.types import Walkers
from metastable.core.units import Coordinates, Units
from metastable.energies import Gaussian
from metastable.evaluation.restoration import mask_named
from metastable.runs.run import Run

MEAN = torch.tensor([1.0, -2.0, 0.5])
CLEAN = torch.tensor([[2.0, 1.2, 0.3], [1.2, 1.5, -0.4], [0.3, -0.4, 1.0]])
"""Law of clean events, N(MEAN, CLEAN)."""
SHAPE = (1, 4, 6)


class Scaled(torch.nn.Module):
    """E/P, which is what is learned where P·E is the density's."""

    def __init__(self, energy: Gaussian, power: float):
        super().__init__()
        self.inner, self.power = energy, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / self.power


def gaussian_run(data_noise: float = 0.0, power: float = 1.0, seed: int = 0) -> Run:
    """A run that learned clean Gaussian events with noise on them exactly."""
    energy = Gaussian(MEAN, CLEAN + data_noise**2 * torch.eye(3))
    x = energy.sample(4000, torch.Generator().manual_seed(seed))
    config = {"event_shape": [3], "trainer": {"data_noise": data_noise}}
    learned = Scaled(energy, power)
    return Run(learned, "pcd", [], Walkers.equal(x), None, config=config, power=power)


def posterior(y: torch.Tensor, missing: torch.Tensor, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and covariance of the clean event given the numbers of `y` that were seen with noise."""
    seen = ~missing
    gain = CLEAN[:, seen] @ torch.linalg.inv(CLEAN[seen][:, seen] + noise**2 * torch.eye(int(seen.sum())))
    return MEAN + gain @ (y[seen] - MEAN[seen]), CLEAN - gain @ CLEAN[seen]


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_tweedie_gives_the_posterior_mean_whatever_the_power(power):
    run = gaussian_run(0.7, power)
    x = torch.tensor([[0.0, 1.0, 2.0], [3.0, -1.0, 0.0]])
    expected = torch.stack([posterior(row, torch.zeros(3, dtype=torch.bool), 0.7)[0] for row in x])
    assert torch.allclose(run.denoised(x), expected, atol=1e-5)
    noisy, clean = (run.sample(50, steps=5, denoise=asked) for asked in (False, True))
    assert torch.allclose(clean.x, run.denoised(noisy.x))


def test_tweedie_is_in_the_units_of_the_data():
    run, units = gaussian_run(0.7), Units.fit(gaussian_run(0.7).walkers.x, "whiten")
    inner = Gaussian(
        units.forward(MEAN[None])[0].float(),
        (units.matrix.T @ (CLEAN + 0.49 * torch.eye(3)).double() @ units.matrix).float(),
    )
    whitened = Run(inner, "pcd", [], None, None, config=run.config).outward(Coordinates(units))
    x = torch.tensor([[0.0, 1.0, 2.0]])
    assert torch.allclose(whitened.denoised(x).float(), run.denoised(x), atol=1e-4)


def test_noise_that_falls_is_taken_off_as_it_was_in_the_end():
    run = gaussian_run()
    run.config["trainer"] = {"data_noise": 1.0, "data_noise_final": 0.2, "steps": 10}
    run.history = [{"step": 10}]
    assert run.data_noise == pytest.approx(0.2)
    run.kept = 5
    assert run.data_noise == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("noise", "data_noise", "power"), [(0.0, 0.0, 1.0), (0.0, 0.0, 4.0), (0.8, 0.0, 1.0), (0.8, 0.8, 1.0)]
)
def test_draws_have_the_conditional_mean_and_covariance(noise, data_noise, power):
    run = gaussian_run(data_noise, power)
    y, missing = torch.tensor([2.0, -1.0, math.nan]), torch.tensor([False, False, True])
    restored = run.restore(y, missing, noise=noise, draws=4000, steps=60)
    x, (mean, covariance) = restored.draws[0], posterior(y, missing, noise)
    if data_noise:  # a draw is E[clean | x]: of what x leaves open it holds nothing
        covariance = covariance - (CLEAN - CLEAN @ torch.linalg.inv(CLEAN + 0.64 * torch.eye(3)) @ CLEAN)
    se = covariance.diag().clamp(min=0).sqrt() / math.sqrt(len(x))
    assert bool(((x.mean(0) - mean).abs() <= 4.5 * se + 1e-6).all()), (x.mean(0), mean, se)
    v = covariance.diag().clamp(min=0)
    off = (torch.cov(x.T) - covariance).abs() / ((v[:, None] * v + covariance**2) / len(x)).sqrt().clamp(
        min=1e-7
    )
    assert bool((off < 4.5).all()), (torch.cov(x.T), covariance)


def test_noise_below_that_of_the_model_is_made_up_and_known_numbers_come_back():
    run = gaussian_run(0.8)
    y, missing = torch.tensor([[2.0, -1.0, 0.0]]), torch.tensor([0, 0, 1])
    x = run.restore(y, missing, draws=3000, steps=60).draws[0]
    assert bool((x[:, :2] == y[0, :2]).all())
    # of the mean given numbers with the model's noise, the mean over that noise
    expected, _ = posterior(y[0], missing.bool(), 0.8)
    assert abs(float(x[:, 2].mean() - expected[2])) < 4.5 * float(x[:, 2].std()) / math.sqrt(3000)
    # x has that noise on what was seen, and follows the model given it; a draw is E[clean | x]
    S = CLEAN + 0.64 * torch.eye(3)
    follows = torch.cat([torch.eye(2), S[2:, :2] @ torch.linalg.inv(S[:2, :2])])
    covariance = 0.64 * follows @ follows.T
    covariance[2, 2] += S[2, 2] - S[2, :2] @ torch.linalg.inv(S[:2, :2]) @ S[:2, 2]
    gain = (CLEAN @ torch.linalg.inv(S))[2]
    assert float(x[:, 2].var()) == pytest.approx(
        float(gain @ covariance @ gain), rel=4.5 * math.sqrt(2 / 3000)
    )


@pytest.mark.parametrize("noise", [0.05, 0.3, 0.6])
def test_noise_below_that_of_the_model_is_taken_off_not_added_to(noise):
    run, rng = gaussian_run(0.8), torch.Generator().manual_seed(1)
    clean = torch.randn((2000, 3), generator=rng) @ torch.linalg.cholesky(CLEAN).T + MEAN
    y = clean + noise * torch.randn(clean.shape, generator=rng)
    found = run.restore(y, None, noise=noise, draws=8, steps=1).mean
    exact = torch.stack([posterior(row, torch.zeros(3, dtype=torch.bool), noise)[0] for row in y])
    off, given, least = (float((x - clean).square().mean()) for x in (found, y, exact))
    assert off < given
    assert off < 1.25 * least


def test_chains_of_many_held_numbers_move_from_the_first_step_on():
    shape, rng = (3, 16, 16), torch.Generator().manual_seed(0)
    x = torch.randn(202, *shape, generator=rng)
    walkers, given = Walkers.equal(x[2:]), x[:2]
    energy = Gaussian(torch.zeros(768), torch.eye(768))
    config = {"event_shape": list(shape), "trainer": {}}
    run = Run(lambda x: energy(x.flatten(1)), "pcd", [], walkers, None, config=config)
    found = run.restore(given, "left", draws=16, steps=50)
    assert 0.4 < found.info["acceptance"] < 0.8  # the target is 0.574
    hidden = found.draws[..., :8].flatten(1)
    # given what was seen, numbers are independent and standard normal
    assert abs(float(hidden.mean())) < 4.5 / math.sqrt(hidden.numel())
    assert abs(float(hidden.var()) - 1) < 4.5 * math.sqrt(2 / hidden.numel())
    again = run.restore(given, "left", draws=16, steps=50)
    assert torch.equal(again.draws, found.draws)


def test_where_everything_is_held_no_chain_runs():
    found = gaussian_run(0.8).restore(torch.zeros(2, 3), None, noise=0.3, draws=4, steps=5)
    assert found.info == {}
    assert bool((found.spread > 0).all())


@pytest.mark.parametrize("seen", [0, 1])
def test_a_run_without_walkers_fills_in_all_or_almost_all(seen):
    run = gaussian_run()
    alone = Run(run.energy, "cd", [], None, None, config=run.config)
    y, missing = torch.tensor([2.0, math.nan, math.nan]), torch.arange(3) >= seen
    x = alone.restore(y, missing, draws=1500, steps=200).draws[0]
    mean, covariance = posterior(y, missing, 0.0)
    se = covariance.diag().clamp(min=0).sqrt() / math.sqrt(len(x))
    assert bool(((x.mean(0) - mean).abs() <= 4.5 * se + 1e-6).all()), (x.mean(0), mean, se)


def test_every_event_has_its_own_mask_and_its_own_chains():
    run = gaussian_run()
    y = torch.tensor([[2.0, -1.0, 0.0], [0.0, -3.0, 1.0]])
    missing = torch.tensor([[0, 0, 1], [1, 0, 0]])
    restored = run.restore(y, missing, draws=1500, steps=60)
    assert bool((restored.draws.std(1) > 0).eq(missing.bool()).all())
    for i in range(2):
        mean, covariance = posterior(y[i], missing[i].bool(), 0.0)
        off = (restored.mean[i] - mean).abs() - 4.5 * covariance.diag().clamp(min=0).sqrt() / math.sqrt(1500)
        assert bool((off < 1e-4).all())


def test_errors_are_over_what_was_not_known():
    run = gaussian_run()
    restored = run.restore(torch.tensor([2.0, -1.0, 0.0]), torch.tensor([0, 0, 1]), draws=500, steps=60)
    truth = torch.tensor([[2.0, -1.0, 0.3]])
    errors = restored.errors(truth)
    assert errors["given"] == pytest.approx(float((restored.given[0, 2] - 0.3) ** 2), rel=1e-5)
    assert errors["mean"] == pytest.approx(float((restored.mean[0, 2] - 0.3) ** 2), rel=1e-5)
    n = restored.draws.shape[1]
    assert errors["draw"] == pytest.approx(errors["mean"] + errors["variance"] * (n - 1) / n, rel=1e-4)


def test_held_numbers_cannot_move_and_their_z_are_without_effect():
    seen, hidden = torch.tensor([[1.0, 2.0]]), torch.tensor([[False, True]])
    energy = Observed(lambda x: x.sum(1), seen, hidden, torch.tensor([1.0, 3.0]))
    z = torch.tensor([[5.0, 2.0]])
    assert energy.events(z).tolist() == [[1.0, 8.0]]
    assert energy(z).item() == pytest.approx(9.0 + 12.5)


def test_halves_of_a_picture():
    named = {name: mask_named(name, SHAPE)[0].int().tolist() for name in ("left", "bottom", "centre")}
    assert named["left"] == [[1, 1, 1, 0, 0, 0]] * 4
    assert named["bottom"] == [[0] * 6] * 2 + [[1] * 6] * 2
    assert named["centre"] == [[0] * 6, [0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0], [0] * 6]
    assert not bool((mask_named("top", SHAPE) & mask_named("bottom", SHAPE)).any())
    assert bool((mask_named("left", SHAPE) | mask_named("right", SHAPE)).all())


@pytest.mark.parametrize(
    ("images", "mask", "options", "words"),
    [
        (torch.zeros(2, 4), None, {"noise": 1.0}, r"images: must have the run's shape \(3,\), got \(4,\)"),
        (torch.zeros(2, 3), torch.ones(4), {}, r"mask: must have the shape \(3,\) of an event, got \(4,\)"),
        (
            torch.zeros(2, 3),
            [0, 1, 2],
            {},
            "mask: must hold 1 where a number is missing and 0 where not, got 2",
        ),
        (torch.zeros(2, 3), [0, 0, 0], {}, "mask: hides nothing, and noise is 0"),
        (torch.full((2, 3), math.nan), [0, 0, 1], {}, "images: must be finite"),
        (torch.zeros(2, 3), "left", {}, "mask: must be ones and zeros"),
        (torch.zeros(2, 3), [0, 0, 1], {"noise": -1.0}, "noise: must be a finite number of at least 0"),
        (torch.zeros(2, 3), [0, 0, 1], {"draws": 0}, "draws: must be an integer of at least 1"),
    ],
)
def test_what_cannot_be_restored_is_refused(images, mask, options, words):
    with pytest.raises((InputError, ConfigError), match=words):
        gaussian_run().restore(images, mask, **options)


def test_grey_against_colour_is_said():
    run = Run(lambda x: x.flatten(1).sum(1), "pcd", [], None, None, config={"event_shape": [1, 4, 4]})
    with pytest.raises(InputError, match="the run is of grey pictures, these are colour"):
        run.restore(torch.zeros(2, 3, 4, 4), "left")


def test_a_run_without_noise_has_none_to_take_off():
    with pytest.raises(InputError, match="denoise: this run was trained without noise"):
        gaussian_run().sample(10, denoise=True)
