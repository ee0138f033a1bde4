"""`robust-readings`: what each reading changes, the fixed point where it is known, and a small run."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from conftest import assert_within, mean_and_error

from metastable.core.random import generator
from metastable.experiments import EXPERIMENTS, TITLES
from metastable.experiments import robust_readings as readings
from metastable.experiments import robust_students as kit
from metastable.experiments.base import Bench, reproduce
from metastable.experiments.finished import Finished

CIRCLES = kit.TOYS["circles"]


def setup(**changes) -> kit.Setup:
    students = (kit.Student(0.5, shifted=True),)
    return dataclasses.replace(kit.Setup("some", CIRCLES, students, 10), **changes)


def test_equal_modes_have_their_density():
    x = readings.draw_equal((40_000,), generator(0)).double()
    entropy = math.log((2 * 3.0) ** 2) - readings.EQUAL.kl_of_uniform()
    mean, error = mean_and_error(readings.log_equal(x))
    assert_within(mean, -entropy, error)
    assert entropy == pytest.approx(1.09323, abs=1e-4)


def test_the_default_of_every_change_is_robust_toys():
    base = setup()
    assert base.temperature == kit.TEMPERATURE
    assert base.power(0.5) == 1 / kit.TEMPERATURE
    students = kit.Students(base, (0,), 1e-3, "cpu")
    assert students.start_mean.flatten().tolist() == [2.0, -2.0]
    assert float(students.noise) == pytest.approx(0.015 * math.sqrt(10))


def test_every_reading_changes_what_it_says():
    near = kit.Students(setup(shift=0.5), (0,), 1e-3, "cpu")
    assert near.start_mean.flatten().tolist() == [1.0, -1.0]
    quiet = setup(quiet=True)
    assert float(kit.Students(quiet, (0,), 1e-3, "cpu").noise) == pytest.approx(0.015)
    assert quiet.temperature == pytest.approx(kit.TEMPERATURE / 10)  # ten times the drift at the same noise
    on_f = setup(tempered=False)
    assert float(kit.Students(on_f, (0,), 1e-3, "cpu").objectives[0][1]) == 0.5
    assert on_f.power(0.5) == pytest.approx(0.5 / kit.TEMPERATURE + 0.5)
    constant = kit.Students(setup(falls=False), (0,), 1e-3, "cpu")
    constant.advance(99, 100)
    assert float(constant.adam.param_groups[0]["lr"]) == pytest.approx(1e-3)


def test_where_chains_sample_the_flat_data_every_ring_has_a_quarter():
    """With S ∝ p_d^(1−β) the fixed point is the data; with too many chains inside, mass goes outwards."""
    r = readings.radii()
    flat = torch.stack([r.flatten(), torch.zeros(r.numel(), dtype=torch.float64)], 1)
    log_p = kit.log_circles(flat).view_as(r)
    for beta in (0.3, 0.9):
        right = readings.predicted_masses(torch.exp((1 - beta) * log_p), beta, CIRCLES)
        torch.testing.assert_close(right, torch.full_like(right, 0.25), rtol=0, atol=1e-3)
        inside = readings.predicted_masses(torch.exp((1 - beta) * log_p) / r, beta, CIRCLES)
        assert bool((inside.diff() > 0).all())


def test_masses_of_the_true_density_are_quarters():
    score = kit.Score(0.0, 0.0, lambda x: -kit.log_circles(x), torch.zeros(1, 2))  # pyright: ignore
    torch.testing.assert_close(
        readings.learned_masses(score, CIRCLES),
        torch.full((4,), 0.25, dtype=torch.float64),
        rtol=0,
        atol=1e-3,
    )


def test_ends_of_chains_that_do_not_move_have_the_density_of_the_start():
    still = dataclasses.replace(kit.Setup("still", CIRCLES, (kit.Student(0.9),), 10), steps=0)
    S = readings.radial_density(kit.Students(still, (0,), 1e-3, "cpu"), 0, 400_000, 0)
    exact = torch.exp(-readings.radii().square() / 8) / (8 * math.pi)
    assert float((S / exact - 1)[:3].mean(1).abs().max()) < 0.02


def test_a_small_run_gives_every_row_and_the_figures(tmp_path):
    small = {"updates": 2, "chains": 4096, "samples": 50, "betas": (0.0, 0.9), "readings": ("epsilon 0.05",)}
    settings = {**readings.EXPERIMENT.scales["gpu"], **small}
    experiment = dataclasses.replace(readings.EXPERIMENT, scales={"tiny": settings})
    rows = {row.metric: row for row in reproduce(experiment, "tiny", 0, tmp_path, device="cpu").rows}
    assert (rows["kl_to_uniform/best/circles"].relation, rows["kl_to_uniform/best/circles"].target) == (
        "<=",
        1.0,
    )
    assert sum(rows[f"ring_mass/beta=0.9/ring={k}"].value for k in readings.RINGS) == pytest.approx(1)
    assert sum(rows[f"ring_mass/beta=0.9/ring={k}"].oracle for k in readings.RINGS) == pytest.approx(
        1, abs=1e-3
    )
    assert (tmp_path / "rings.png").stat().st_size > 5_000
    assert (tmp_path / "figure-6-readings.png").stat().st_size > 5_000


def test_every_reading_is_trained_on_both_sets_but_modes_on_modes(tmp_path):
    bench = Bench(readings.EXPERIMENT.scales["gpu"], "gpu", 0, "cpu", tmp_path)
    made = readings.setups_of(bench)
    assert len(made) == 2 * len(readings.READINGS)  # less one, and the fixed point
    assert len({(s.name, s.toy.name) for s in made}) == len(made)


def test_the_title_is_the_one_in_the_index():
    assert EXPERIMENTS["robust-readings"].title == TITLES["robust-readings"]


def test_setups_that_were_trained_are_not_trained_again(tmp_path, monkeypatch):
    toys = [dataclasses.replace(toy, positives=4, negatives=4) for toy in kit.TOYS.values()]
    setups = [kit.Setup("few", toy, (kit.Student(0.0), kit.Student(0.5)), 4, steps=2) for toy in toys]
    settings = {"updates": 3, "repeats": 2, "learning_rate": 1e-2}

    def weights() -> list[list[float]]:
        bench = Bench(settings, "tiny", 0, "cpu", tmp_path, finished=Finished(tmp_path))
        groups = kit.train(bench, setups)
        return [torch.cat([p.flatten() for p in group.nets.parameters()]).tolist() for group in groups]

    whole, advance, advanced = weights(), kit.Students.advance, []

    def counted(self: kit.Students, done: int, updates: int) -> None:
        advanced.append(self.setup.toy.name)
        advance(self, done, updates)

    monkeypatch.setattr(kit.Students, "advance", counted)
    for path in tmp_path.glob("001-*"):
        path.unlink()
    assert weights() == whole
    assert advanced == ["gaussians"] * 3
