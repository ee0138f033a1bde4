"""`robust-toy`: networks in a batch against networks alone, the sets against their densities, and a small run."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from conftest import assert_within, mean_and_error, z_scores
from torch import Tensor

from metastable.core.random import generator
from metastable.evaluation.quadrature import kl_on_grid
from metastable.experiments import EXPERIMENTS, TITLES
from metastable.experiments import robust_students as kit
from metastable.experiments import robust_toy as toy
from metastable.experiments import robust_toy_figures as figures
from metastable.experiments.base import reproduce
from metastable.experiments.batched_nets import BatchedNets, OneNet
from metastable.methods import robust_loss

over = pytest.mark.parametrize


# ---- networks in a batch


def nets(seeds: tuple[int, ...] = (0, 0, 1)) -> BatchedNets:
    return BatchedNets(seeds, (2, 8, 16, 4), 0.05).double()


def points(k: int = 3, n: int = 40) -> Tensor:
    return 3 * torch.randn((k, n, 2), generator=generator(3), dtype=torch.float64)


def test_the_gradient_by_hand_is_autograds():
    batch, x = nets(), points().requires_grad_()
    truth = torch.autograd.grad(batch(x).sum(), x)[0]
    value, grad = batch.value_and_grad(x)
    torch.testing.assert_close(value, batch(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, truth, rtol=0, atol=1e-12)
    assert torch.equal(batch.grad(x), grad)
    batch.slope = 0.06  # another network's gradient is told apart
    assert not torch.allclose(batch.grad(x), truth, atol=1e-6)


def test_every_network_is_alone_in_its_batch():
    batch, x = nets(), points()
    for k in range(3):
        alone = OneNet(batch, k, factor=5.0)
        torch.testing.assert_close(alone(x[k]), 5 * batch(x)[k], rtol=0, atol=1e-12)
    before = batch(x)
    with torch.no_grad():
        batch.weights[1][0] += 1
    same = (batch(x) == before).all(1)
    assert same.tolist() == [False, True, True]


def test_equal_seeds_are_equal_networks_with_the_weights_of_linear_layers():
    batch = BatchedNets((4, 4, 5), kit.SIZES, kit.SLOPE)
    for p in batch.parameters():
        assert torch.equal(p[0], p[1])
        assert not torch.equal(p[0], p[2])
    for w in batch.weights:
        bound = w.shape[1] ** -0.5
        assert 0.8 * bound < float(w.detach().abs().max()) <= bound


# ---- the sets


@over("name", kit.TOYS)
def test_draws_follow_the_density(name):
    """E log p of draws is minus the entropy, which the KL of the uniform density gives by quadrature."""
    each = kit.TOYS[name]
    x = each.draw((40_000,), generator(0)).double()
    entropy = math.log((2 * each.half_width) ** 2) - each.kl_of_uniform()
    mean, error = mean_and_error(each.log_density(x))
    assert_within(mean, -entropy, error)
    assert float(z_scores(mean, -entropy + 0.1, error)) > 10
    assert kl_on_grid(each.log_density, lambda y: -each.log_density(y), each.box, 401) == pytest.approx(
        0, abs=1e-9
    )


def test_modes_and_rings_have_their_masses():
    n = 40_000
    x = kit.draw_gaussians((n,), generator(1))
    mode = torch.round(torch.atan2(x[:, 1], x[:, 0]) / (math.pi / 4)).long() % 8
    near = x.norm(dim=1) < 10
    share = torch.bincount(mode[near], minlength=8).double() / n
    mass = torch.arange(1.0, 9.0, dtype=torch.float64) / 36
    # a mode reaches its neighbours' sectors, 2.55 standard deviations away: they exchange about 1 % of its mass
    assert float((share - mass).abs().max()) < 0.006
    ring = kit.draw_circles((n,), generator(2)).norm(dim=1).round()
    counts = torch.stack([(ring == k).double().mean() for k in (1, 2, 3, 4)])
    assert_within(counts, 0.25, math.sqrt(0.25 * 0.75 / n) + 1e-3)  # a thousandth lies between two rings


def test_the_circles_have_the_entropy_of_equal_rings():
    """3.53453 nats."""
    assert kit.TOYS["circles"].kl_of_uniform() == pytest.approx(math.log(144) - 3.53453, abs=1e-4)


# ---- chains and updates


def students(
    *wanted: kit.Student, rate: float = 1e-3, steps: int = 3, seeds: tuple[int, ...] = (0, 1)
) -> kit.Students:
    setup = kit.Setup("small", kit.TOYS["gaussians"], wanted, negatives=7, steps=steps)
    return kit.Students(setup, seeds, rate, "cpu")


@over("power", [1.0, 0.4])
def test_chains_have_the_temperature_that_the_scores_use(power, monkeypatch):
    """On f = ½κ|x|² a chain is x ← r·x + √s·ε·u, r = 1 − s·a·κ: its second moment is known after any n steps.

    It goes to sε²/(1 − r²), which is T/(aκ) but for the size of a step.
    """
    group, kappa, n = (
        students(kit.Student(0.5), kit.Student(0.5, shifted=True), steps=400, seeds=(0,)),
        0.02,
        400,
    )
    monkeypatch.setattr(group.nets, "grad", lambda x: kappa * x)
    x = group.chains(20_000, power, generator(0))
    for k, (student, _) in enumerate(group.each):
        s, start = (10.0, 1 + 0.25) if student.shifted else (1.0, 1.0)  # the start's second moment
        r = 1 - s * power * kappa
        limit = s * kit.EPSILON**2 / (1 - r**2)
        assert limit == pytest.approx(kit.TEMPERATURE / (power * kappa), rel=0.12)
        mean, error = mean_and_error(x[k].square().mean(1))
        assert_within(mean, limit + (start - limit) * r ** (2 * n), error)
        assert float(z_scores(mean, 1.2 * limit, error)) > 10


def test_the_shifted_start_is_half_as_wide_and_bottom_right():
    group = students(kit.Student(0.0), kit.Student(0.0, shifted=True), steps=0)
    x = group.chains(20_000, 1.0, generator(0))
    shifted = [s.shifted for s, _ in group.each]
    assert shifted == [False, False, True, True]
    assert_within(x[0].mean(0), 0.0, 20_000**-0.5)
    assert_within(x[2].mean(0), torch.tensor([1.0, -1.0]), 0.5 * 20_000**-0.5)
    assert float(x[0].std() / x[1].std()) == pytest.approx(1, abs=0.03)
    assert float(x[2].sub(x[2].mean(0)).std()) == pytest.approx(0.5, abs=0.02)


WANTED = (*(kit.Student(b, v) for b in (0.1, 0.9) for v in kit.VARIANTS), kit.Student(0.0))


def test_one_update_of_all_is_the_update_of_each():
    """Same data for the students of a seed, negatives of (1 − β)f, and the library's loss at β/T."""
    group = students(*WANTED, rate=0.0)
    state = group.rng.get_state()
    group.update()
    got = [p.grad for p in group.nets.parameters()]
    group.rng.set_state(state)
    data = group.setup.toy.draw((2, 50), group.rng)
    x = group.chains(7, 1 - group.beta, group.rng)
    for k, (student, seed) in enumerate(group.each):
        alone = OneNet(group.nets, k, 1.0)

        def gradients(
            beta: float, alone: OneNet = alone, seed: int = seed, k: int = k, variant=student.variant
        ):
            loss, _ = robust_loss(-alone(data[seed]), -alone(x[k]), beta, None, variant)
            return torch.autograd.grad(loss, list(alone.parameters()))

        for ours, truth in zip(got, gradients(student.beta / kit.TEMPERATURE), strict=True):
            torch.testing.assert_close(ours[k], truth, rtol=2e-3, atol=2e-4)  # float32, times β/T
        if student.beta:  # weights at the network's own temperature would be another objective
            wrong = gradients(student.beta)
            assert not all(torch.allclose(o[k], w, rtol=1e-2, atol=1e-3) for o, w in zip(got, wrong))


def test_students_of_a_seed_begin_alike_and_part_ways():
    few = students(kit.Student(0.0), kit.Student(0.5), seeds=(0,))
    initial = few.nets(torch.zeros(2, 1, 2))
    assert torch.equal(initial[0], initial[1])
    for done in range(5):
        few.advance(done, 10)
    learned = few.nets(torch.zeros(2, 1, 2))
    assert not torch.equal(learned[0], learned[1])
    assert few.adam.param_groups[0]["lr"].item() == pytest.approx(1e-3 * kit.cosine(0.4))


def test_beta_learns_a_density_where_plain_training_does_not():
    gaussians = kit.TOYS["gaussians"]
    setup = kit.Setup("small", gaussians, (kit.Student(0.0), kit.Student(0.5)), negatives=20)
    group = kit.Students(setup, (0,), 5e-4, "cpu")
    for done in range(300):
        group.advance(done, 300)
    found = kit.score(group, 500, 0)
    plain, robust = (found["small", "gaussians", kit.Student(b)][0] for b in (0.0, 0.5))
    assert robust.kl < gaussians.kl_of_uniform() < 10 < plain.kl
    assert plain.samples.shape == (500, 2)


# ---- the experiment


def test_setups_have_the_papers_shapes():
    gaussians, circles = kit.TOYS.values()
    assert (gaussians.positives, gaussians.negatives, circles.positives, circles.negatives) == (
        50,
        20,
        100,
        100,
    )
    restricted, degenerate = kit.restricted_setup(circles), kit.degenerate_setup(gaussians)
    assert (restricted.positives, restricted.negatives, restricted.steps) == (100, 3, 3)
    assert (degenerate.negatives, degenerate.steps) == (1, 0)
    assert len(restricted.students) == 1 + 3 * 4  # β = 0 has no variants
    assert len(kit.default_setup(gaussians).students) == 4 + 4 + 3
    assert sum(p.numel() for p in BatchedNets((0,), kit.SIZES, kit.SLOPE).parameters()) == 10_593


def test_a_kernel_density_estimate_is_a_density():
    gaussians = kit.TOYS["gaussians"]
    density = figures.smoothed(gaussians, gaussians.draw((500,), generator(0)))
    cell = (2 * gaussians.half_width / (figures.POINTS - 1)) ** 2
    assert float(density.sum() * cell) == pytest.approx(1, abs=1e-3)
    row, column = divmod(int(density.argmax()), figures.POINTS)
    axis = torch.linspace(-3, 3, figures.POINTS)
    assert axis[row] ** 2 + axis[column] ** 2 == pytest.approx(1, abs=0.3)  # x first
    assert axis[column] < 0  # the heaviest modes are the last, below


def test_a_small_run_gives_every_row_and_the_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "POINTS", 161)
    small = {
        "updates": 3,
        "learning_rate": 1e-3,
        "repeats": 2,
        "samples": 50,
        "everything": False,
        "variant_ratio": 0.3,
    }
    experiment = dataclasses.replace(toy.EXPERIMENT, scales={"tiny": small})
    result = reproduce(experiment, "tiny", 0, tmp_path, device="cpu")
    rows = {row.metric: row for row in result.rows}
    judged = [row for row in result.rows if row.relation]
    assert len(judged) == 2 + 4 + 3
    assert all(row.relation == "<=" for row in judged)
    assert rows["kl_largest/gaussians/beta=0.9"].target == 0.6
    assert rows["kl_largest/circles/beta=0.9"].target == pytest.approx(1.4353, abs=1e-3)
    ratio = rows["kl/gaussians/beta=0.1"].value / rows["kl/gaussians/beta=0"].value
    assert rows["kl_ratio/gaussians/beta=0.1 to beta=0"].value == pytest.approx(ratio)
    assert {"figure-2.png", "figure-10.png"} == {p.name for p in tmp_path.glob("*.png")}
    assert (tmp_path / "report.html").is_file()


def test_everything_is_drawn_where_everything_is_trained():
    setups = [
        make(t)
        for make in (
            kit.default_setup,
            kit.restricted_setup,
            kit.degenerate_setup,
            kit.longer_setup,
        )
        for t in kit.TOYS.values()
    ]
    trained = {(s.name, s.toy.name, student) for s in setups for student in s.students}
    for lines in figures.plans().values():
        for line in lines:
            variants = [
                dataclasses.replace(s, variant="default") if s.beta == 0 else s
                for s in line.students.values()
            ]
            assert {(line.setup, line.toy.name, s) for s in variants} <= trained


def test_the_title_is_the_one_in_the_index():
    assert EXPERIMENTS["robust-toy"].title == TITLES["robust-toy"]
