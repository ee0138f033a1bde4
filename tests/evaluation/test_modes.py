"""Mode weights against counting, their errors against repeated draws, and modes of known laws."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import each
from torch import Tensor

from metastable.core.errors import ConfigError, InputError
from metastable.evaluation.modes import find_modes, mode_weight_errors, mode_weights

CENTERS = torch.tensor([[-4.0, 0.0], [4.0, 0.0], [0.0, 6.0]])


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mixture(means, scale: float, weights=None, n: int = 2000, seed: int = 0) -> Tensor:
    means = torch.as_tensor(means, dtype=torch.float32)
    weights = torch.ones(len(means)) if weights is None else torch.tensor(weights)
    source = rng(seed)
    rows = torch.multinomial(weights, n, replacement=True, generator=source)
    return means[rows] + scale * torch.randn(n, means.shape[1], generator=source)


def ring(radius: float) -> list[list[float]]:
    return [[radius * math.cos(k * math.pi / 4), radius * math.sin(k * math.pi / 4)] for k in range(8)]


# ---------------------------------------------------------------------------------------------- weights


def test_weights_are_counts_of_nearest_centres() -> None:
    x = mixture(CENTERS, 1.0, n=400)
    counts = torch.cdist(x, CENTERS).argmin(1).bincount(minlength=3) / 400
    assert torch.allclose(mode_weights(x, CENTERS), counts.double())


def test_log_weights_count_and_their_offset_does_not() -> None:
    x = torch.tensor([[-4.0, 0.0], [4.0, 0.0], [4.1, 0.0]])
    log_weight = torch.tensor([math.log(6.0), math.log(2.0), 0.0])
    for offset in (0.0, -1e4, 1e4):
        weights = mode_weights(x, CENTERS, log_weight.double() + offset)
        assert torch.allclose(weights, torch.tensor([6 / 9, 3 / 9, 0.0], dtype=torch.float64))


def test_events_of_any_shape_and_centres_far_from_the_origin() -> None:
    x = mixture(CENTERS, 1.0, n=100).double()
    shaped = mode_weights(x.view(100, 1, 2) + 1e6, CENTERS.double().view(3, 1, 2) + 1e6)
    assert torch.equal(shaped, mode_weights(x, CENTERS.double()))


def test_importance_weights_move_mass_between_modes() -> None:
    """Draws with masses ½, ½ and weights for ¼, ¾ give ¼, ¾ within the standard error."""
    x = mixture(CENTERS[:2], 1.0, n=4000)
    target = torch.tensor([0.25, 0.75])
    log_weight = torch.where(x[:, 0] < 0, math.log(0.5), math.log(1.5))
    result = mode_weight_errors(x, CENTERS[:2], target, log_weight)
    assert float(result.z_score.abs().max()) < 4.5
    unweighted = mode_weight_errors(x, CENTERS[:2], target)
    assert float(unweighted.z_score.abs().max()) > 20


def test_standard_errors_are_those_of_repeated_draws() -> None:
    weights = [0.2, 0.3, 0.5]
    results = [
        mode_weight_errors(mixture(CENTERS, 1.0, weights, n=200, seed=s), CENTERS, torch.tensor(weights))
        for s in range(400)
    ]
    z = torch.stack([r.z_score for r in results])
    # the variance of 400 standard normal scores has a standard error of √(2/400)
    assert float((z.square().mean(0) - 1).abs().max()) < 4.5 * math.sqrt(2 / 400)
    assert float(z.mean(0).abs().max()) < 4.5 / math.sqrt(400)


def test_a_lost_mode_is_not_known_without_error() -> None:
    x = CENTERS[:1].repeat(100, 1)
    result = mode_weight_errors(x, CENTERS[:2], torch.tensor([0.5, 0.5]))
    assert result.worst == 0.5
    assert result.std_error.tolist() == pytest.approx([0.05, 0.05])


def test_effective_size_and_target_error_widen_the_standard_error() -> None:
    x, target = mixture(CENTERS[:2], 1.0, n=1000), torch.tensor([0.5, 0.5])
    plain = mode_weight_errors(x, CENTERS[:2], target)
    assert plain.ess == pytest.approx(1000)
    fewer = mode_weight_errors(x, CENTERS[:2], target, effective_size=10)
    assert fewer.std_error.tolist() == pytest.approx([math.sqrt(0.25 / 10)] * 2)
    both = mode_weight_errors(x, CENTERS[:2], target, target_std_error=plain.std_error)
    assert torch.allclose(both.std_error, math.sqrt(2) * plain.std_error)


def test_weighted_walkers_count_as_fewer() -> None:
    x = mixture(CENTERS[:2], 1.0, n=100)
    log_weight = torch.full((100,), -50.0).index_fill(0, torch.arange(4), 0.0)
    assert mode_weight_errors(x, CENTERS[:2], torch.tensor([0.5, 0.5]), log_weight).ess == pytest.approx(4)


@each(
    "call, message",
    [
        (lambda x: mode_weights(x, CENTERS[:, :1]), "centers"),
        (lambda x: mode_weights(x, CENTERS, torch.zeros(3)), "log_weight"),
        (lambda x: mode_weight_errors(x, CENTERS, torch.tensor([0.5, 0.5])), "target"),
        (lambda x: mode_weight_errors(x, CENTERS, torch.tensor([0.5, 0.5, 0.5])), "sum to 1"),
        (lambda x: find_modes(x[:10]), "20 finite rows"),
        (lambda x: find_modes(x * math.nan), "20 finite rows"),
    ],
)
def test_refusals_name_the_field(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(mixture(CENTERS, 1.0, n=30))


def test_max_modes_must_be_a_count() -> None:
    with pytest.raises(ConfigError, match="max_modes"):
        find_modes(mixture(CENTERS, 1.0), max_modes=0)


# ------------------------------------------------------------------------------------------------ modes


def gaussian(dim: int, n: int = 1500):
    return lambda s: torch.randn(n, dim, generator=rng(s))


def correlated(dim: int, n: int = 1500):
    """Standard deviations from 1 to 100 in directions that are not the axes."""

    def draw(seed: int) -> Tensor:
        source = rng(seed)
        turn = torch.linalg.qr(torch.randn(dim, dim, generator=source)).Q
        return torch.randn(n, dim, generator=source) * torch.logspace(0, 2, dim) @ turn.T

    return draw


def banana(seed: int) -> Tensor:
    x = torch.randn(1500, 2, generator=rng(seed))
    first = 2 * x[:, 0]
    return torch.stack([first, x[:, 1] + first.square() - 4], 1)


SINGLE = {
    "line": gaussian(1),
    "plane": gaussian(2),
    "few rows": gaussian(2, 60),
    "five": gaussian(5),
    "fifty": gaussian(50),
    "more columns than rows": gaussian(300, 280),
    "correlated": correlated(2),
    "correlated ten": correlated(10),
    "banana": banana,
    "uniform line": lambda s: torch.rand(1500, generator=rng(s)),
    "uniform square": lambda s: torch.rand(1500, 2, generator=rng(s)),
    "heavy tails": lambda s: gaussian(2)(s) / torch.randn(1500, 1, generator=rng(s + 100)).abs(),
    "skew": lambda s: -torch.rand(1500, 2, generator=rng(s)).log(),
    "rounded": lambda s: (5 * gaussian(2)(s)).round(),
    "binary": lambda s: (torch.rand(1500, 6, generator=rng(s)) > 0.4).float(),
    "constant column": lambda s: torch.cat([gaussian(1)(s), torch.ones(1500, 1)], 1),
}


@pytest.mark.parametrize("name", SINGLE)
@each("seed", [0, 1])
def test_one_mode_is_not_taken_for_several(name: str, seed: int) -> None:
    modes = find_modes(SINGLE[name](seed))
    assert len(modes) == 1, modes.evidence
    assert not modes.separated
    assert modes.weights.tolist() == [1.0]


SEVERAL = {
    "two on a line": ([[0.0], [8.0]], 1.0, None),
    "two": ([[0.0, 0.0], [10.0, 0.0]], 1.0, [0.25, 0.75]),
    "two in fifty dimensions": (torch.eye(2, 50) * 11, 1.0, [0.25, 0.75]),
    "small and large": ([[0.0, 0.0], [9.0, 0.0]], 1.0, [0.05, 0.95]),
    "three": (CENTERS, 0.7, [0.2, 0.3, 0.5]),
    "ring": (ring(4.0), 0.3, None),
    "eight in fifty dimensions": (torch.eye(8, 50) * 7, 1.0, None),
}


@pytest.mark.parametrize("name", SEVERAL)
@each("seed", [0, 1])
def test_separated_modes_are_found_with_centres_and_weights(name: str, seed: int) -> None:
    means, scale, weights = SEVERAL[name]
    means = torch.as_tensor(means)
    x = mixture(means, scale, weights, seed=seed)
    modes = find_modes(x)
    assert len(modes) == len(means), modes.evidence
    assert modes.separated
    nearest = torch.cdist(means, modes.centers).argmin(1)
    assert sorted(nearest.tolist()) == list(range(len(means)))
    # a mean of the fewest rows has an error of scale·√(dim/rows) in length
    fewest = 2000 * min(weights or [1 / len(means)])
    assert float((modes.centers[nearest] - means).norm(dim=1).max()) < 3 * scale * math.sqrt(
        means.shape[1] / fewest
    )
    target = torch.tensor(weights or [1 / len(means)] * len(means))
    assert float(mode_weight_errors(x, means, target).z_score.abs().max()) < 4.5
    assert torch.equal(modes.weights, modes.weights.sort(descending=True).values)
    assert torch.allclose(modes.weights, mode_weights(x, modes.centers))


@each("seed", [0, 1])
def test_modes_that_touch_are_modes_but_not_separated(seed: int) -> None:
    """On the unit ring with standard deviation 0.15 the density between two modes is 0.077 of the peak."""
    modes = find_modes(mixture(ring(1.0), 0.15, seed=seed))
    assert len(modes) == 8
    assert modes.evidence["valley_ratio"] > 0.05
    near = find_modes(mixture([[0.0, 0.0], [4.5, 0.0]], 1.0, seed=seed))  # 0.16 of the peak
    assert (len(near), near.separated) == (2, False)


def test_units_do_not_hide_the_gap_but_nearest_centres_need_common_units() -> None:
    x = mixture([[0.0, 0.0], [10.0, 0.0]], 1.0)
    modes = find_modes(x * torch.tensor([1.0, 1000.0]))
    assert (len(modes), modes.separated, modes.evidence["parts"]) == (1, True, 2)
    assert "nearest centres" in modes.evidence["note"]


def test_max_modes_keeps_the_heaviest_parts_whole() -> None:
    modes = find_modes(mixture([[0.0], [20.0], [24.0 + 4.0]], 1.0), max_modes=2)
    assert len(modes) == 2
    assert modes.weights.tolist() == pytest.approx([2 / 3, 1 / 3], abs=0.05)


def test_images_of_two_kinds() -> None:
    kinds = torch.randn(2, 1, 20, 20, generator=rng(0)) * 2
    rows = torch.randint(0, 2, (600,), generator=rng(1))
    images = kinds[rows] + 0.5 * torch.randn(600, 1, 20, 20, generator=rng(2))
    modes = find_modes(images)
    assert modes.centers.shape == (2, 1, 20, 20)
    assert modes.separated
    assert float(torch.cdist(modes.centers.flatten(1), kinds.flatten(1)).min(1).values.max()) < 2


def test_the_answer_is_reproducible_and_types_are_kept() -> None:
    x = mixture(CENTERS, 0.7, n=5000)
    first, second = find_modes(x, seed=3), find_modes(x, seed=3)
    assert torch.equal(first.centers, second.centers)
    assert first.centers.dtype == torch.float32
    assert first.evidence["rows"] == 2000
