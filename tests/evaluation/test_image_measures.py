"""Measures of images against exact answers: Gaussian features, sets that are the same or apart, and bad input."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import assert_within, mean_and_error, z_limit
from scipy.linalg import sqrtm
from torch import Tensor, nn

from metastable.core.errors import InputError
from metastable.core.types import Walkers
from metastable.evaluation import copying as copying_room
from metastable.evaluation import image_distances
from metastable.evaluation import image_measures as measures
from metastable.evaluation.copying import copying, exchangeable, nearest_rows
from metastable.evaluation.frechet import Statistics, frechet_distance, needed, statistics_of
from metastable.evaluation.image_distances import (
    frechet,
    inception_score,
    kid,
    precision_recall,
)
from metastable.evaluation.image_features import (
    FeatureNetwork,
    Pictures,
    as_pictures,
    open_network,
    prepared,
    scale_of,
)
from metastable.evaluation.image_measures import ImageQuestion, describe, image_measures
from metastable.report.sections.images import copying_lines


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=torch.float64)


def some_covariance(D: int, seed: int) -> Tensor:
    a = normal(D, D + 2, seed=seed)
    return a @ a.T / D


class Flat(nn.Module):
    """Features that are the first pixels themselves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.side, self.width = 0, width

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, : self.width]


def network_file(path, module: nn.Module):
    torch.jit.script(module).save(str(path))
    return path


# ---- Fréchet distance


def test_the_distance_of_two_gaussians_is_that_of_the_matrix_root():
    a, b = (Statistics(normal(5, seed=i), some_covariance(5, i + 10)) for i in range(2))
    root = np.real(np.asarray(sqrtm((a.covariance @ b.covariance).numpy())))
    exact = float((a.mean - b.mean).square().sum() + (a.covariance + b.covariance).trace()) - 2 * np.trace(
        root
    )
    assert frechet_distance(a, b) == pytest.approx(exact, rel=1e-10)
    assert frechet_distance(b, a) == pytest.approx(exact, rel=1e-10)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-10)


def test_the_distance_of_samples_is_the_closed_form_of_their_laws():
    """N(0, 1) and N(m, diag s²): |m|² + Σ(1 − s)²."""
    m, s = torch.tensor([0.5, 0.0, -0.2]).double(), torch.tensor([1.0, 2.0, 0.5]).double()
    reference = Statistics(m, s.square().diag(), math.inf)
    x = normal(40_000, 3)
    found = frechet(x, torch.zeros(len(x)), reference)
    assert_within(found.value, float(m.square().sum() + (1 - s).square().sum()), found.std_error)
    assert found.std_error < 0.02
    assert found.images == pytest.approx(40_000)


def test_statistics_with_weights_are_unbiased_and_those_of_the_weighted_law():
    fixed = normal(12, seed=5)
    many = [statistics_of(normal(12, 2, seed=seed), fixed) for seed in range(500)]
    mean, error = mean_and_error(torch.stack([found.covariance.flatten() for found in many]))
    assert_within(mean, torch.eye(2).flatten().double(), error)
    x = normal(40_000, 1)
    tilted = statistics_of(x, 0.7 * x[:, 0])  # exp(0.7 x) N(0, 1) ∝ N(0.7, 1)
    assert_within(tilted.mean, 0.7, (1 / tilted.images) ** 0.5)
    assert_within(tilted.covariance, 1.0, (4 / tilted.images) ** 0.5)
    assert tilted.images == pytest.approx(len(x) * math.exp(-0.49), rel=0.05)


def test_intervals_cover_the_distance_at_their_number_of_images():
    reference = Statistics(torch.zeros(2).double(), torch.eye(2).double(), math.inf)
    x = normal(50, 60, 2, seed=3) + torch.tensor([0.7, 0.0])
    found = [frechet(part, torch.zeros(60), reference, seed=i) for i, part in enumerate(x)]
    truth = sum(measure.value for measure in found) / len(found)
    assert truth > 0.49  # the bias of few images
    covered = sum(measure.interval[0] <= truth <= measure.interval[1] for measure in found) / len(found)
    assert abs(covered - 0.95) < z_limit() * math.sqrt(0.95 * 0.05 / len(found))


def test_copies_that_moved_are_worth_what_they_began_as():
    x, reference = normal(400, 2), Statistics(torch.zeros(2).double(), torch.eye(2).double())
    whole, few = (frechet(x, torch.zeros(400), reference, worth=worth) for worth in (math.inf, 100.0))
    assert few.value == whole.value
    assert few.std_error == pytest.approx(2 * whole.std_error)
    assert few.images == 100


def test_too_few_images_are_refused_with_the_number_that_is_needed():
    assert needed(2048) == 2049
    reference = Statistics(torch.zeros(8).double(), torch.eye(8).double())
    frechet(normal(9, 8), torch.zeros(9), reference)
    with pytest.raises(InputError, match=r"8 features needs 9 images or more.*got 8 .*KID"):
        frechet(normal(8, 8), torch.zeros(8), reference)
    heavy = torch.zeros(50)
    heavy[0] = 10.0  # one walker has all the weight
    with pytest.raises(InputError, match=r"needs 9 images or more.*got 1 \(effective\)"):
        frechet(normal(50, 8), heavy, reference)


def test_statistics_are_kept_in_files_and_read_as_other_tools_write_them(tmp_path):
    found = statistics_of(normal(30, 4))
    found.save(tmp_path / "own.npz")
    np.savez(tmp_path / "other.npz", mu=found.mean.numpy(), sigma=found.covariance.numpy())
    for name, images in (("own", 30.0), ("other", math.nan)):
        again = Statistics.load(tmp_path / f"{name}.npz")
        assert torch.equal(again.mean, found.mean)
        assert torch.equal(again.covariance, again.covariance.T)
        torch.testing.assert_close(again.covariance, found.covariance, rtol=1e-14, atol=0)
        assert again.images == pytest.approx(images, nan_ok=True)
    np.savez(tmp_path / "bad.npz", mean=np.zeros(3), covariance_upper=np.zeros(5))
    with pytest.raises(InputError, match=r"fid_statistics: .*must hold mean \(D,\) and covariance"):
        Statistics.load(tmp_path / "bad.npz")
    np.savez(tmp_path / "nan.npz", mu=np.zeros(2), sigma=np.array([[1, np.nan], [np.nan, 1]]))
    with pytest.raises(
        InputError, match=r"covariance in .*nan.npz must be finite, got 2 NaN or infinite of 4"
    ):
        Statistics.load(tmp_path / "nan.npz")
    np.savez(tmp_path / "words.npz", mu=np.array(["a"]), sigma=np.eye(1))
    with pytest.raises(InputError, match=r"words.npz is not a readable"):
        Statistics.load(tmp_path / "words.npz")
    statistics_of(normal(1, 4)).save(tmp_path / "one.npz")
    assert Statistics.load(tmp_path / "one.npz").images == 1
    (tmp_path / "no.npz").write_text("no")
    with pytest.raises(InputError, match="not a readable"):
        Statistics.load(tmp_path / "no.npz")
    with pytest.raises(InputError, match="must be of 3 features, as the network gives, got 4"):
        frechet(normal(30, 3), torch.zeros(30), found)


# ---- KID, precision and recall, Inception Score


def test_kid_of_one_law_is_zero_on_average_weighted_or_not_and_resampled_it_is_not():
    plain, weighted, resampled = [], [], []
    for seed in range(100):
        x, y = normal(2, 25, 3, seed=seed)
        log_weight = normal(25, seed=1000 + seed)  # which says nothing of x
        plain.append(kid(x, y).value)
        weighted.append(kid(x, y, log_weight).value)
        resampled.append(kid(Walkers(x, log_weight).resampled(seed=seed).x, y).value)
    for values in (plain, weighted):
        mean, error = mean_and_error(torch.tensor(values))
        assert_within(mean, 0.0, error)
    mean, error = mean_and_error(torch.tensor(resampled))
    assert mean > z_limit() * error


def test_kid_of_two_laws_is_known():
    """(x·y + 1)³ of D = 1: Σ over k of C(3, k)(E xᵏ − E yᵏ)²."""
    x, y = normal(1500, 1), normal(1500, 1, seed=1) + 1
    exact = 3 * 1**2 + 3 * (2 - 1) ** 2 + (4 - 0) ** 2  # moments of N(1, 1): 1, 2, 4
    found = kid(x, y)
    assert_within(found.value, exact, found.std_error)
    assert found.std_error < 3


def test_intervals_of_kid_cover_it():
    pairs = normal(80, 2, 40, 2, seed=9)
    found = [kid(x + 1, y, seed=i) for i, (x, y) in enumerate(pairs)]
    truth = sum(measure.value for measure in found) / len(found)
    covered = sum(measure.interval[0] <= truth <= measure.interval[1] for measure in found) / len(found)
    assert abs(covered - 0.95) < z_limit() * math.sqrt(0.95 * 0.05 / len(found))


def test_precision_and_recall_of_sets_that_are_equal_apart_or_half_there():
    data = torch.cat([normal(60, 2), normal(60, 2, seed=1) + 50])
    same = precision_recall(data, data)
    assert (same.precision.value, same.recall.value) == pytest.approx((1, 1))
    apart = precision_recall(data + 1000, data)
    assert (apart.precision.value, apart.recall.value) == pytest.approx((0, 0))
    half = precision_recall(data[:60], data)
    assert half.precision.value == pytest.approx(1)
    assert half.recall.value == pytest.approx(0.5)
    log_weight = torch.zeros(120)
    log_weight[60:] = -50.0  # all the weight on half of it
    weighted = precision_recall(data, data, log_weight)
    assert weighted.recall.value == pytest.approx(0.5)
    assert weighted.recall.images == pytest.approx(60)
    astray = torch.cat([data[:60], data[60:] + 1000])
    assert precision_recall(astray, data).precision.value == pytest.approx(0.5)
    assert precision_recall(astray, data, log_weight).precision.value == pytest.approx(1)
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0]])  # balls of widths 1, 1, 2 and 4
    few = precision_recall(torch.tensor([[0.9], [4.5], [11.5], [20.0]]), line, neighbours=1)
    assert few.precision.value == pytest.approx(0.5)
    assert few.recall.value == pytest.approx(1)  # widths 3.6, 3.6, 7 and 8.5
    with pytest.raises(InputError, match="need 4 images or more, got 3"):
        precision_recall(data[:3], data)


def test_recall_of_a_single_sample_with_weight_is_refused():
    log_weight = torch.full((40,), -torch.inf, dtype=torch.float64)
    log_weight[3] = 0.0
    with pytest.raises(InputError, match="need two samples with weight or more, got 1"):
        precision_recall(normal(40, 2), normal(50, 2, seed=1), log_weight)


def test_the_error_of_precision_is_that_of_a_share():
    data, within = (
        normal(400, 2),
        1e-3 * normal(100, 2, seed=1),
    )  # where balls are, wherever their centers are
    samples = torch.cat([within, within + 1000])
    found = precision_recall(samples, data).precision
    assert found.value == pytest.approx(0.5)
    assert precision_recall(within, data).precision.interval == pytest.approx((1, 1))
    errors = torch.tensor([precision_recall(samples, data, seed=i).precision.std_error for i in range(20)])
    mean, error = mean_and_error(errors)
    assert_within(mean, math.sqrt(0.25 / 200), error)


@pytest.mark.parametrize(("dim", "n", "wide"), [(2, 300, 1.0), (8, 400, 0.7)])
def test_errors_of_precision_and_recall_know_that_balls_lie_by_chance(dim, n, wide, monkeypatch):
    """The spread over sets that are drawn anew, in standard errors; without the balls' own it is above 1."""

    def spreads(trials=240):
        drawn = [(wide * normal(n, dim, seed=2 * i), normal(n, dim, seed=2 * i + 1)) for i in range(trials)]
        found = [precision_recall(x, y, seed=i) for i, (x, y) in enumerate(drawn)]
        for name in ("precision", "recall"):
            values = torch.tensor([getattr(each, name).value for each in found])
            errors = torch.tensor([getattr(each, name).std_error for each in found])
            yield float(values.std() / errors.square().mean().sqrt())

    chance = z_limit() / math.sqrt(2 * 240)  # of a standard deviation, as a share of it
    assert all(0.8 * (1 - chance) < ratio < 1 + chance for ratio in spreads())
    monkeypatch.setattr(image_distances, "error_by_balls", lambda *_: 0.0)
    assert dim > 2 or max(spreads()) > 1 + chance


def test_inception_score_lies_between_one_and_the_number_of_classes():
    sure = torch.eye(4).repeat(5, 1).clamp(min=1e-30).log()
    assert inception_score(sure).value == pytest.approx(4)
    assert inception_score(torch.full((20, 4), -math.log(4))).value == pytest.approx(1)
    one = torch.where(torch.arange(20) % 4 == 0, 0.0, -math.inf)
    assert inception_score(sure, one).value == pytest.approx(1)  # all the weight on one class


@pytest.mark.parametrize(
    ("values", "beyond", "scale"),
    [
        ([0.0, 0.5, 1.0], 0.0, (0.0, 1.0)),
        ([-1.0, 0.0, 1.0], 0.0, (-1.0, 1.0)),
        ([-1.0, 1.0], 0.1, (-1.0, 1.0)),
        ([0.0, 2.0], 0.0, (0.0, 255.0)),  # integers
        ([0.0, 100.5], 0.0, (0.0, 255.0)),
        ([0.0, 0.5, 1.3], 0.0, None),
        ([0.5] * 999 + [90.0], 0.0, None),  # an outlier makes no bytes
        ([-0.05, 0.5, 1.04], 0.0, None),
        ([-0.05, 0.5, 1.04], 0.1, (0.0, 1.0)),
        ([-1.05, 0.5, 1.1], 0.1, (-1.0, 1.0)),
        ([0.5] * 999 + [90.0], 0.1, (0.0, 1.0)),
        ([-2.5, 0.5, 2.5], 0.1, None),
    ],
)
def test_the_scale_of_values_is_not_told_by_an_outlier(values, beyond, scale):
    assert scale_of(torch.tensor(values), beyond) == scale


def test_samples_a_little_out_of_range_are_clipped_and_that_is_said(flat):
    asked = question(flat, Walkers.equal(grey(50, 3) * 1.04))
    known = ImageQuestion(asked.samples, network=flat, statistics=describe(flat, asked.data).statistics)
    found, _ = image_measures(known)  # nothing but the samples tells their scale
    assert 0 < found["clipped_share"] < 0.1
    with pytest.raises(InputError, match="samples: values must lie on"):
        image_measures(replace(known, samples=Walkers.equal(3 * grey(50, 3))))
    far = replace(asked, samples=Walkers.equal(3 * grey(50, 3)))
    with pytest.raises(InputError, match="more than 1% of them far outside"):
        image_measures(far)
    assert (
        image_measures(replace(far, own=True))[0]["clipped_share"] > 0.5
    )  # a bad model is not another scale


# ---- copying


def test_nearest_rows_are_those_of_all_distances():
    x, rows = normal(30, 4).float(), normal(200, 4, seed=1).float()
    found, distance = nearest_rows(x, rows, 3), torch.cdist(x.double(), rows.double())
    assert torch.equal(found.which, distance.topk(3, largest=False).indices)
    torch.testing.assert_close(found.distance.double(), distance.topk(3, largest=False).values)
    assert float(nearest_rows(rows[:5], rows).distance.max()) == 0


def test_nearest_rows_are_the_same_block_by_block_and_of_bytes(monkeypatch):
    rows = torch.randint(256, (200, 4), dtype=torch.uint8, generator=rng())
    whole = nearest_rows(rows[:30].float() + 0.3, rows, 3)
    monkeypatch.setattr(copying_room, "BLOCK", 64)  # 16 rows at once
    found = nearest_rows(rows[:30].float() + 0.3, rows, 3)
    torch.testing.assert_close(found.distance, whole.distance)
    assert torch.equal(found.which[:, 0], whole.which[:, 0])
    assert nearest_rows(rows[:2], rows[:2], 3).which.tolist() == [[0, 1], [1, 0]]  # no more than there are


def test_fresh_samples_are_no_copies_and_copies_are_seen():
    training, held_out, fresh = (normal(n, 6, seed=i) for i, n in enumerate((400, 200, 300)))
    found = copying(fresh, training, held_out)
    assert found.expected == pytest.approx(2 / 3)
    assert_within(found.copied, 0.0, found.copied_std_error)
    assert found.ratio == pytest.approx(1, abs=0.1)
    half = copying(torch.cat([fresh[:150], training[:150]]), training, held_out)
    assert_within(half.copied, 0.5, half.copied_std_error)
    assert half.copied > z_limit() * half.copied_std_error
    log_weight = torch.zeros(300)
    log_weight[:150] = -50.0
    copies = copying(torch.cat([fresh[:150], training[:150]]), training, held_out, log_weight)
    assert copies.copied == pytest.approx(1)


def test_samples_around_one_image_say_little_about_copying():
    """The image at the middle is in training or not by chance, and all samples follow it."""
    rows = torch.cat([torch.zeros(1, 3).double(), 9 + normal(399, 3)])
    samples = 0.1 * normal(500, 3, seed=2)
    for first in (rows, rows.flip(0)):
        found = copying(samples, first[:200], first[200:])
        assert abs(found.nearest_is_training - found.expected) == pytest.approx(0.5)
        assert found.std_error == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "m"), [(300, 60), (60, 300), (500, 5), (500, 1)])
def test_held_out_images_of_one_law_are_exchangeable(n, m):
    for seed in range(10):
        x = normal(n + m, 4, seed=seed)
        share, chance, error = exchangeable(x[:n], x[n:], seed)
        assert chance == pytest.approx(n / (n + m - 1))
        assert chance - share <= 4 * error


def test_held_out_images_of_another_law_tell_no_copying():
    """Every sample is nearer to training than to them, and none is a copy."""
    training, fresh, others = normal(300, 6), normal(200, 6, seed=1), 2.5 + normal(100, 6, seed=2)
    found = copying(fresh, training, others)
    assert found.copied > 3 * found.copied_std_error
    (line,) = copying_lines({"copying": {"pixels": found.as_json()}})
    assert "tells nothing" in line
    assert "copies are seen" not in line
    same = copying(training[:150], training, normal(100, 6, seed=3))
    (line,) = copying_lines({"copying": {"pixels": same.as_json()}})
    assert "copies are seen" in line


# ---- pictures and networks


def test_pictures_are_bytes_and_scales_are_told_by_their_values():
    x = torch.tensor([0.0, 0.5, 1.0, 0.25]).view(1, 1, 2, 2)
    for rows in (x, 2 * x - 1, 255 * x, (255 * x)[:, 0]):
        assert as_pictures(rows, "x").bytes.flatten().tolist() in ([0, 128, 255, 64], [0, 127, 255, 64])
    beyond = as_pictures(torch.tensor([-1.4, 1.3, 0.0, 1.0]).view(1, 1, 2, 2), "samples", (-1.0, 1.0))
    assert beyond.bytes.flatten().tolist() == [0, 255, 128, 255]
    assert beyond.clipped == 0.5


@pytest.mark.parametrize(
    ("x", "scale", "words"),
    [
        (torch.full((2, 1, 4, 4), -2.0), None, r"data: values must lie on .*\[−1, 1\], got -2 … -2"),
        (torch.full((2, 1, 4, 4), 256.0), None, "data: values must lie on"),
        (torch.full((2, 1, 4, 4), 9.0), (-1.0, 1.0), r"must lie on \[−1, 1\].*on the scale of the data"),
        (torch.full((2, 1, 4, 4), math.nan), None, "must be finite, got 2 of 2 pictures"),
        (torch.zeros(2, 2, 4, 4), None, r"must be pictures \(N, C, H, W\) with C = 1 \(grey\) or 3"),
        (torch.zeros(2, 7), None, "must be pictures"),
        (torch.zeros(2, 8, 8, 3), None, r"got \(2, 8, 8, 3\), which looks like \(N, H, W, C\)"),
    ],
)
def test_what_is_no_picture_is_refused(x, scale, words):
    with pytest.raises(InputError, match=words):
        as_pictures(x, "data", scale)


def test_pictures_are_resized_as_for_the_published_numbers():
    """Pixel j of 299 lies at j·w/299 of the picture: a ramp shows it."""
    ramp = torch.arange(32).byte().view(1, 1, 1, 32).expand(1, 1, 24, 32)
    seen = 128 * (prepared(ramp) + 1)
    expected = (torch.arange(299) * 32 / 299).clamp(max=31)
    torch.testing.assert_close(seen, expected.expand(1, 3, 299, 299), atol=1e-3, rtol=0)
    down = 128 * (prepared(ramp.transpose(2, 3)) + 1)
    torch.testing.assert_close(down, expected[:, None].expand(1, 3, 299, 299), atol=1e-3, rtol=0)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2048))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((1, 2, 3))[:, None] * self.scale


class Maps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class OneChannel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean((2, 3))


def test_a_network_of_2048_features_that_is_no_inception_gives_no_fid(tmp_path):
    found = open_network(network_file(tmp_path / "wide.pt", Wide()))
    assert (found.width, found.is_inception, found.classes) == (2048, False, 0)


def test_files_that_are_no_networks_of_features_are_refused(tmp_path):
    (tmp_path / "text.pt").write_text("no network")
    torch.save(Maps().state_dict(), tmp_path / "weights.pt")
    for path, words in (
        (tmp_path / "missing.pt", "no such file"),
        (tmp_path / "text.pt", "is no TorchScript file"),
        (tmp_path / "weights.pt", "is no TorchScript file"),
        (network_file(tmp_path / "maps.pt", Maps()), r"must give features \(B, D\), got \(1, 3, 299, 299\)"),
        (network_file(tmp_path / "one.pt", OneChannel()), r"does not take pictures \(B, 3, 299, 299\)"),
    ):
        with pytest.raises(InputError, match=words):
            open_network(path)


# ---- all together


@pytest.fixture(scope="module")
def flat(tmp_path_factory) -> FeatureNetwork:
    return open_network(network_file(tmp_path_factory.mktemp("network") / "flat.pt", Flat(6)))


def grey(n: int, seed: int) -> Tensor:
    return torch.rand((n, 1, 4, 4), generator=rng(seed)) * 2 - 1


def question(flat: FeatureNetwork | None, samples: Walkers, **settings) -> ImageQuestion:
    data, held_out = (
        as_pictures(grey(n, seed), name) for n, seed, name in ((90, 1, "data"), (60, 2, "fresh"))
    )
    return ImageQuestion(samples, data, held_out, flat, **settings)


def test_all_measures_have_numbers_of_images_intervals_and_floors(flat):
    asked = question(flat, Walkers.equal(grey(50, 3)))
    found, arrays = image_measures(asked)
    assert "fid" not in found
    assert found["network"] == {"name": "flat.pt", "features": 6, "is_inception": False, "classes": 0}
    for name in ("frechet_distance", "kid", "precision", "recall"):
        measure = found[name]
        assert measure["interval"][0] <= measure["value"] <= measure["interval"][1]
        assert measure["images"] == measure["floor"]["images"] == pytest.approx(50)
        assert measure["reference_images"] == 90
    exact = frechet_distance(
        *(statistics_of(flat(p).values) for p in (as_pictures(asked.samples.x, "s"), asked.data))
    )
    assert found["frechet_distance"]["value"] == pytest.approx(exact)
    assert set(found["copying"]) == {"pixels", "features"}
    assert arrays["nearest_images"].shape == (8, 6, 1, 4, 4)
    assert any("no Inception Score: flat.pt" in note for note in found["notes"])


def test_walkers_count_by_their_weight(flat):
    x, log_weight = torch.cat([grey(80, 4), 0 * grey(80, 5)]), torch.zeros(160)
    log_weight[80:] = -60.0
    weighted, plain = (
        image_measures(question(flat, w))[0] for w in (Walkers(x, log_weight), Walkers.equal(x[:80]))
    )
    assert weighted["ess"] == pytest.approx(80)
    for name in ("frechet_distance", "kid", "precision"):
        assert weighted[name]["value"] == pytest.approx(plain[name]["value"], rel=1e-6)


def test_without_a_network_nothing_is_called_fid_and_pixels_are_compared(flat):
    found, _ = image_measures(question(None, Walkers.equal(grey(20, 3))))
    assert set(found["copying"]) == {"pixels"}
    assert not {"fid", "frechet_distance", "kid"} & set(found)
    assert any("no network was named" in note for note in found["notes"])


def test_few_samples_give_kid_and_the_reason_why_no_distance(flat):
    found, _ = image_measures(question(flat, Walkers.equal(grey(6, 3))))
    assert "frechet_distance" not in found
    assert found["kid"]["images"] == pytest.approx(6)
    assert any("6 features need 7 images or more, and there are 6" in note for note in found["notes"])


def test_statistics_stand_for_data_and_features_of_data_are_kept(flat, tmp_path, monkeypatch):
    asked = question(flat, Walkers.equal(grey(50, 3)))
    direct = image_measures(asked)[0]["frechet_distance"]["value"]
    assert asked.data is not None
    described = describe(flat, asked.data, tmp_path)
    only = ImageQuestion(asked.samples, network=flat, statistics=described.statistics)
    found, arrays = image_measures(only)
    assert found["frechet_distance"]["value"] == pytest.approx(direct)
    assert "kid" not in found
    assert not arrays
    monkeypatch.setattr(FeatureNetwork, "batches", lambda *_: pytest.fail("features are made again"))
    again = describe(flat, asked.data, tmp_path)
    assert torch.equal(again.features, described.features)
    torch.testing.assert_close(again.statistics.covariance, described.statistics.covariance)
    assert again.statistics.images == len(again.features) == 90


def test_copying_by_features_sees_all_images_or_says_how_many_it_does_not(flat, monkeypatch):
    monkeypatch.setattr(measures, "PAIRS", 20)
    asked = question(flat, Walkers.equal(grey(50, 3)))
    copies = replace(asked, samples=Walkers.equal(asked.data.bytes / 127.5 - 1))
    found = image_measures(copies)[0]["copying"]["features"]
    assert found["training"] == found["training_images"] == 90
    assert found["copied"] == pytest.approx(1)
    known = describe(flat, asked.data).statistics
    seen = image_measures(replace(copies, statistics=known))[0]
    assert seen["copying"]["features"]["training"] == 20
    (line,) = [line for line in copying_lines(seen) if line.startswith("By features")]
    assert line.endswith("copies of 70 more training images are not seen")
    assert "more training images" not in " ".join(copying_lines({"copying": {"features": found}}))


def test_pictures_of_another_kind_are_refused(flat):
    for other, words in (((20, 3, 4, 4), "got 1 × 4 × 4"), ((20, 1, 8, 8), "must be 1 × 8 × 8")):
        x = torch.rand(other, generator=rng()) * 2 - 1
        with pytest.raises(InputError, match=words):
            image_measures(question(flat, Walkers.equal(x)))


def test_progress_is_told_of_every_batch(flat):
    told: list[tuple[str, int, int]] = []
    flat(Pictures(torch.zeros(70, 1, 4, 4, dtype=torch.uint8), "zeros"), lambda *done: told.append(done))
    assert told == [("features of zeros", done, 70) for done in (32, 64, 70)]
