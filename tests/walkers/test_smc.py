"""Annealed importance sampling and SMC: exact laws of the mean weight, with mutants that break them."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import FALSE_ALARM, z_limit

from metastable.core.errors import ConfigError, EnergyError, UnsupportedError
from metastable.core.types import student_t_quantile
from metastable.energies import DoubleWell, Funnel, GaussianMixture
from metastable.kernels import HMC, MALA, ULA
from metastable.proposals import Gaussian, Uniform
from metastable.walkers import anneal as annealing
from metastable.walkers import path as paths
from metastable.walkers.anneal import anneal
from metastable.walkers.path import Schedule
from metastable.walkers.pilot import find_schedule
from metastable.walkers.smc import ais, reverse_ais, smc

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LIMIT = z_limit()
FEW = student_t_quantile(1 - FALSE_ALARM / 2, 15)  # the same rate with the spread of 16 populations


def tilted_well() -> DoubleWell:
    """Asymmetric, so that a wrong sign cannot hide behind a symmetry."""
    return DoubleWell(dim=1, separation=1.5, height=2.0, tilt=0.4)


def reference(dim: int = 1, scale: float = 1.5) -> Gaussian:
    return Gaussian(torch.full((dim,), 0.3, dtype=torch.float64), scale)


def z_score(log_weight: torch.Tensor, log_mean: float) -> float:
    """How many standard errors the mean of exp(log_weight) is from exp(log_mean)."""
    ratio = torch.exp(log_weight - log_mean)
    return float((ratio.mean() - 1) / (ratio.std() / len(ratio) ** 0.5))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class UncorrectedLangevin(ULA):
    """Claims an invariance that it does not have."""

    invariant = True


# --- the law: E[weight] = Z ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [MALA(0.3), HMC(0.5, leapfrog=3)], ids=lambda k: k.name)
def test_mean_ais_weight_is_z(kernel):
    energy = tilted_well()
    walkers = ais(energy, reference(), 20_000, 6, kernel, 2, rng())
    assert walkers.log_weight.dtype == torch.float64
    assert abs(z_score(walkers.log_weight, float(energy.log_partition()))) < LIMIT


def test_uncorrected_moves_break_the_law():
    energy = tilted_well()
    walkers = ais(energy, reference(), 20_000, 6, UncorrectedLangevin(0.3), 2, rng())
    assert abs(z_score(walkers.log_weight, float(energy.log_partition()))) > 2 * LIMIT


def test_weights_taken_after_the_move_break_the_law(monkeypatch):
    energy, true_path = tilted_well(), paths.Tempered
    # moving at the next β before its weight is taken is the same as weighing after the move
    monkeypatch.setattr(paths, "Tempered", lambda e, q, beta: true_path(e, q, (beta + 1 / 6).clamp(max=1.0)))
    walkers = ais(energy, reference(), 20_000, 6, MALA(0.3), 2, rng())
    assert abs(z_score(walkers.log_weight, float(energy.log_partition()))) > 2 * LIMIT


def small_populations(energy, resample_below: float = 0.9):
    schedule = Schedule.equal(5, 0.3)
    x = reference().sample(4 * 8000, rng())
    options = {"steps": 1, "populations": 8000, "resample_below": resample_below}
    return anneal(energy, reference(), x, schedule, MALA(), rng(1), **options)


def test_populations_of_four_are_unbiased_through_resampling():
    """Exactly unbiased at any number of walkers: with four, a bias of order 1/n would be seen."""
    energy = tilted_well()
    each = small_populations(energy).log_partitions
    assert each.shape == (8000,)
    assert abs(z_score(each, float(energy.log_partition()))) < LIMIT


def test_resampling_that_keeps_old_weights_breaks_the_law(monkeypatch):
    energy, resample = tilted_well(), annealing.resample_uneven
    monkeypatch.setattr(annealing, "resample_uneven", lambda w, uneven, g: (resample(w, uneven, g)[0], w))
    each = small_populations(energy).log_partitions
    assert abs(z_score(each, float(energy.log_partition()))) > 2 * LIMIT


def test_jittered_step_sizes_keep_the_law():
    energy = tilted_well()
    schedule, x = Schedule.equal(6, 0.3), reference().sample(20_000, rng())
    walkers = anneal(energy, reference(), x, schedule, MALA(), rng(1), steps=2, resample_below=0, jitter=1.0)
    assert abs(z_score(walkers.log_weight, float(energy.log_partition()))) < LIMIT


# --- the reverse path ---------------------------------------------------------------------------------------


def test_reverse_weights_average_to_one_over_z():
    """The reference is narrower than the model here: only then have the reverse weights a finite variance."""
    means = torch.tensor([[-1.5], [1.0]], dtype=torch.float64)
    energy = GaussianMixture(means, log_weights=torch.tensor([0.9, 2.5]).log())
    back = reverse_ais(
        energy,
        reference(scale=0.9),
        energy.sample(20_000, rng()),
        Schedule.equal(6).betas,
        0.3,
        MALA(),
        rng(1),
        steps=2,
    )
    assert abs(z_score(back.log_weight, -float(energy.log_partition()))) < LIMIT
    assert abs(z_score(back.log_weight, float(energy.log_partition()))) > 2 * LIMIT


def test_forward_and_reverse_bracket_log_z():
    """Mean log-weights are bounds: forward below log Z, reverse above, both by several standard errors here."""
    energy, betas = tilted_well(), Schedule.equal(3).betas
    exact = float(energy.log_partition())
    low = ais(energy, reference(), 4000, betas, MALA(0.3), 1, rng()).log_weight
    samples = energy.sample(4000, rng(1)).double()
    high = -reverse_ais(energy, reference(), samples, betas, 0.3, MALA(), rng(2)).log_weight
    assert low.mean() + LIMIT * low.std() / 4000**0.5 < exact
    assert high.mean() - LIMIT * high.std() / 4000**0.5 > exact


# --- adaptive SMC -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("energy", "scale"),
    [
        (DoubleWell(dim=2, tilt=0.3), 2.5),
        (Funnel(2, width=1.5), 3.0),
        (GaussianMixture(torch.tensor([[-3.0, 0], [3, 1]]), log_weights=torch.tensor([0.2, 1.8]).log()), 3.5),
    ],
    ids=["double-well", "funnel", "mixture"],
)
def test_smc_populations_agree_with_the_exact_value(energy, scale):
    q = Gaussian(torch.zeros(2), scale)
    run = smc(energy, q, 16, 256, rng(3))
    assert run.complete
    assert run.x.shape == (16 * 256, 2)
    assert run.info["acceptance"].min() > 0.3
    assert abs(z_score(run.log_partitions, float(energy.log_partition()))) < FEW


def test_weighted_walkers_have_the_models_mode_weights():
    energy = DoubleWell(dim=1, tilt=0.3)
    run = smc(energy, Gaussian(torch.zeros(1), 2.5), 16, 512, rng())
    right = (torch.softmax(run.log_weight, 0) * (run.x[:, 0] > 0)).view(16, -1).sum(1) * 16
    error = (right.mean() - energy.right_weight()) / (right.std() / 4)
    assert abs(float(error)) < FEW


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_event_shape_and_dtype(dtype):
    mean = torch.linspace(-1, 1, 12, dtype=dtype).view(1, 3, 4)

    def energy(x):
        return 2 * (x - mean).square().sum((1, 2, 3))

    run = smc(energy, Gaussian(torch.zeros(1, 3, 4, dtype=dtype)), 16, 32, rng())
    assert run.x.shape == (512, 1, 3, 4)
    assert run.x.dtype == dtype
    assert run.log_weight.dtype == torch.float64
    assert abs(z_score(run.log_partitions, 6 * math.log(math.pi / 2))) < FEW


def test_a_uniform_reference_gives_the_integral_over_its_box():
    box = Uniform(torch.tensor([0.0]), torch.tensor([9.0]))
    run = smc(lambda x: 0.5 * x.square().sum(1), box, 16, 256, rng())
    assert abs(z_score(run.log_partitions, 0.5 * math.log(math.pi / 2))) < FEW
    assert bool((run.x >= 0).all())


def test_walls_of_infinite_energy_have_probability_zero():
    def half_line(x):
        return x[:, 0] + torch.where(x[:, 0] > 0, 0.0, math.inf)

    run = smc(half_line, Gaussian(torch.zeros(1), 2.0), 16, 256, rng())
    assert abs(z_score(run.log_partitions, 0.0)) < FEW
    assert int(run.info["undefined"]) == 0


def test_the_same_seed_gives_the_same_run():
    energy, q = tilted_well(), reference()
    first, second = (smc(energy, q, 2, 32, rng(7)) for _ in range(2))
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.log_weight, second.log_weight)


# --- schedules ----------------------------------------------------------------------------------------------


def test_the_pilot_takes_more_temperatures_for_a_higher_conditional_ess():
    energy, q = tilted_well(), reference()
    few, many = (
        find_schedule(energy, q, 256, MALA(), rng(), conditional_ess=c).schedule for c in (0.5, 0.95)
    )
    assert few.betas[0] == many.betas[0] == 0
    assert few.betas[-1] == many.betas[-1] == 1
    assert bool((many.betas.diff() > 0).all())
    assert len(many.betas) > len(few.betas)


def test_a_path_that_cannot_end_is_called_incomplete():
    pilot = find_schedule(lambda x: -x.square().sum(1), Gaussian(torch.zeros(2)), 64, MALA(), rng())
    assert not pilot.complete


def test_refined_halves_every_gap_and_keeps_the_ends():
    coarse = Schedule(torch.tensor([0.0, 0.1, 1.0]), torch.tensor([0.4, 0.1, 0.1]))
    fine = coarse.refined()
    assert torch.allclose(fine.betas, torch.tensor([0.0, 0.05, 0.1, 0.55, 1.0]))
    assert torch.allclose(fine.step_sizes, torch.tensor([0.4, 0.2, 0.1, 0.1, 0.1]))


# --- refusals -----------------------------------------------------------------------------------------------


def test_a_kernel_that_is_not_invariant_is_refused():
    with pytest.raises(UnsupportedError, match="MALA or HMC"):
        ais(tilted_well(), reference(), 10, 4, ULA(0.1), 1, rng())
    with pytest.raises(UnsupportedError, match="biased"):
        smc(tilted_well(), reference(), 2, 10, rng(), kernel=ULA(0.1))


@pytest.mark.parametrize("betas", [[0.0, 0.5], [0.1, 1.0], [0.0, 0.5, 0.5, 1.0], [1.0, 0.0]])
def test_betas_must_increase_from_zero_to_one(betas):
    with pytest.raises(ConfigError, match="betas"):
        ais(tilted_well(), reference(), 10, torch.tensor(betas), MALA(), 1, rng())


def test_rows_must_fill_the_populations():
    with pytest.raises(ConfigError, match="multiple of 3"):
        anneal(
            tilted_well(),
            reference(),
            torch.zeros(10, 1).double(),
            Schedule.equal(2),
            MALA(),
            rng(),
            populations=3,
        )


@pytest.mark.parametrize(("value", "words"), [(math.nan, "not a number"), (-math.inf, "infinite density")])
def test_energies_without_a_density_are_refused(value, words):
    with pytest.raises(EnergyError, match=words):
        smc(lambda x: x.sum(1) * 0 + value, Gaussian(torch.zeros(2)), 2, 16, rng())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("kernel", [MALA(0.3), HMC(0.5, leapfrog=2)], ids=lambda k: k.name)
def test_recorded_changes_of_temperature_are_the_eager_ones_bit_for_bit(kernel, device, monkeypatch):
    """On the CPU the recorded function is called on the memory that it was recorded with."""
    energy, found, states = GaussianMixture(torch.tensor([[-2.0], [2.0]]), torch.tensor([0.3, 1.0])), [], []
    energy, base = energy.to(device), Gaussian(torch.zeros(1), 2.0).to(device)
    x, schedule = base.sample(64, torch.Generator(device).manual_seed(1)), Schedule.equal(6, 0.3)
    for least in (2, 1000):
        monkeypatch.setattr(annealing, "STAND_IN", True)
        monkeypatch.setattr(annealing, "LEAST", least)
        source = torch.Generator(device).manual_seed(0)
        w = anneal(energy, base, x, schedule, kernel, source, steps=2, populations=4, resample_below=0.9)
        found.append((w.x, w.log_weight, *w.info.values()))
        states.append(source.get_state())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(*states)
    assert float(found[0][3].min()) < 0.9  # some were resampled


def test_what_cannot_be_watched_is_walked_step_by_step(monkeypatch):
    monkeypatch.setattr(annealing, "STAND_IN", True)
    monkeypatch.setattr(annealing, "LEAST", 2)
    base, source = reference(), rng()
    energy = lambda x: (source.initial_seed() * x).square().sum(1)  # noqa: E731
    with pytest.warns(RuntimeWarning, match="log Z: temperature by temperature, as a step .*Generator"):
        anneal(energy, base, base.sample(4, rng()), Schedule.equal(3), MALA(0.1), rng())
