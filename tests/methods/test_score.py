"""Score matching through `ms.fit`: closed forms of a Gaussian, what is refused, what is logged."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from conftest import each
from torch import Tensor, nn

import metastable as ms
from metastable.core.errors import ConfigError, DivergenceError, UnsupportedError
from metastable.energies import MLP, GaussianMixture, Tilted
from metastable.evaluation.diagnosis import Facts, diagnose
from metastable.experiments.score_blind import (
    Quadratic,
    correlated_rows,
    covariance,
    fitted_precision,
    gaussian_methods,
    relative_error,
)
from metastable.methods import (
    METHODS,
    Context,
    DenoisingScoreMatching,
    ScoreMatching,
    SlicedScoreMatching,
)
from metastable.methods.curvature import kink_share
from metastable.methods.score import ScoreMethod
from metastable.proposals import fit_gaussian

SCORES = {name for name, method in METHODS.items() if issubclass(method, ScoreMethod)}

# ---- 50,000 rows of a 10-D Gaussian

SIGMA = 0.5


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return correlated_rows(50_000, 10, seed=0)


def inverse(x: Tensor, sigma: float = 0.0) -> Tensor:
    return (covariance(x) + sigma**2 * torch.eye(10, dtype=torch.float64)).inverse()


def test_the_covariance_is_no_axis_of_the_coordinates(rows):
    S = covariance(rows)
    off_diagonal = S - S.diagonal().diag()
    assert off_diagonal.norm() > 0.3 * S.norm()
    assert 3.5 < float(torch.linalg.cond(S)) < 4.5


def test_exact_score_matching_gives_the_inverse_sample_covariance(rows):
    P = fitted_precision(rows, ScoreMatching(chunk=32_768), steps=8, seed=0)
    assert relative_error(P, inverse(rows)) < 1e-3


def test_a_trace_divided_by_the_dimension_gives_another_matrix(rows):
    """The optimum of ½‖∇E‖² − Tr/d is S⁻¹/d: the bound above sees it."""

    class Divided(ScoreMatching):
        def objective(self, c):
            return super().objective(c) + (1 - 1 / 10) * c.bend

    P = fitted_precision(rows[:5000], Divided(), steps=9, seed=0)
    assert relative_error(P, inverse(rows[:5000])) > 0.5
    assert relative_error(P, inverse(rows[:5000]) / 10) < 0.05


@pytest.mark.parametrize("name", ["hutchinson", "sliced", "denoising"])
def test_fresh_noise_at_every_update_averages_out(name, rows):
    P = fitted_precision(rows, gaussian_methods(SIGMA)[name], steps=30, seed=0)
    truth = inverse(rows, SIGMA if name == "denoising" else 0.0)
    assert relative_error(P, truth) < 0.03
    if name == "denoising":
        assert relative_error(P, inverse(rows)) > 0.2


def test_the_same_projections_at_every_update_do_not_average_out(rows):
    """Why projections must be fresh: frozen ones leave the error of a single draw of them for each row."""

    class Frozen(SlicedScoreMatching):
        def directions(self, rows, rng):
            return super().directions(rows, torch.Generator().manual_seed(0))

    few = rows[:1000]
    errors = [
        relative_error(fitted_precision(few, method, steps=120, seed=0), inverse(few))
        for method in (Frozen(), SlicedScoreMatching())
    ]
    assert errors[0] > 3 * errors[1]


# ---- energies whose second derivative says nothing


class FunctionalReLU(nn.Module):
    """Kinks that no list of modules shows, under a smooth layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.relu(self.first(x))))).squeeze(-1)


class MeanOnly(nn.Module):
    """½‖x − m‖²: smooth, though no parameter bends it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x - self.mean).square().sum(1)


@pytest.fixture
def points() -> Tensor:
    x = torch.randn((300, 2), generator=torch.Generator().manual_seed(0))
    x[:100, 0] += 8
    return x


def context_of(energy: nn.Module, x: Tensor) -> Context:
    return Context(energy, {"energy": energy}, x, fit_gaussian(x), torch.Generator().manual_seed(0))


KINKED = {
    "bare": lambda x: MLP(2, hidden=(16,), activation="leaky_relu"),
    "tilted, zero at first": lambda x: Tilted(fit_gaussian(x), MLP(2, hidden=(16,), activation="leaky_relu")),
    "functional, mixed": lambda x: FunctionalReLU(),
}
SMOOTH = {
    "silu": lambda x: MLP(2, hidden=(16,)),
    "tilted": lambda x: Tilted(fit_gaussian(x), MLP(2, hidden=(64, 64), activation="softplus")),
    "mixture": lambda x: GaussianMixture(torch.tensor([[0.0, 0.0], [8.0, 0.0]]), trainable=True),
    "quadratic": lambda x: Quadratic(2),
    "mean only": lambda x: MeanOnly(),
}


@pytest.mark.parametrize("make", KINKED.values(), ids=KINKED)
@pytest.mark.parametrize("method", [ScoreMatching(), SlicedScoreMatching()], ids=["exact", "sliced"])
def test_kinks_are_refused_where_second_derivatives_are_needed(make, method, points):
    context = context_of(make(points), points)
    with pytest.raises(UnsupportedError, match=f"{method.name}: ∇E jumps.*silu.*denoising-score-matching"):
        method.start(context)
    DenoisingScoreMatching().start(context)


@pytest.mark.parametrize("make", SMOOTH.values(), ids=SMOOTH)
def test_smooth_energies_are_not(make, points):
    energy = make(points)
    ScoreMatching().start(context_of(energy, points))
    near = points + 0.1 * (points.roll(1, 0) - points)
    assert kink_share(energy, list(energy.parameters()), points, near) < 1e-3


# ---- σ


def test_sigma_falls_as_it_should():
    method = DenoisingScoreMatching(sigma=0.1, sigma_start=0.9, anneal=100, shape="linear")
    assert [method.sigma_at(k, 1.0) for k in (0, 50, 100, 10_000)] == pytest.approx([0.9, 0.5, 0.1, 0.1])
    geometric = DenoisingScoreMatching(sigma=0.01, sigma_start=1.0, anneal=100)
    assert geometric.sigma_at(50, 1.0) == pytest.approx(0.1)
    assert DenoisingScoreMatching().sigma_at(7, scale=3.0) == pytest.approx(0.3)


def test_sigma_is_logged_and_ends_where_it_was_told(points):
    method = DenoisingScoreMatching(sigma=0.2, sigma_start=1.0, anneal=20)
    run = ms.fit(None, points, method, steps=30, log_every=1, evaluate=False)
    assert run.history[0]["sigma"] == pytest.approx(1.0)
    assert run.history[-1]["sigma"] == pytest.approx(0.2)


def test_the_weighted_loss_is_sigma_squared_times_the_plain_one(points):
    first = [
        ms.fit(
            None, points, DenoisingScoreMatching(sigma=0.3, weighted=w), steps=1, log_every=1, evaluate=False
        )
        for w in (False, True)
    ]
    plain, weighted = (run.history[0]["score_loss"] for run in first)
    assert weighted == pytest.approx(0.09 * plain, rel=1e-5)


# ---- settings, logs, guard, diagnosis


@each(
    "make, field",
    [
        (lambda: ScoreMatching(trace="exakt"), "score-matching.trace"),
        (lambda: ScoreMatching(projections=0), "score-matching.projections"),
        (lambda: ScoreMatching(probes="normal"), "score-matching.probes"),
        (lambda: ScoreMatching(chunk=0), "score-matching.chunk"),
        (lambda: SlicedScoreMatching(projections=-1), "sliced-score-matching.projections"),
        (lambda: SlicedScoreMatching(probes="sphere"), "sliced-score-matching.probes"),
        (lambda: DenoisingScoreMatching(sigma=0.0), "denoising-score-matching.sigma"),
        (lambda: DenoisingScoreMatching(sigma_start=-1.0), "denoising-score-matching.sigma_start"),
        (lambda: DenoisingScoreMatching(sigma=0.5, sigma_start=0.1), "denoising-score-matching.sigma_start"),
        (lambda: DenoisingScoreMatching(shape="cosine"), "denoising-score-matching.shape"),
        (lambda: DenoisingScoreMatching(anneal=0), "denoising-score-matching.anneal"),
    ],
)
def test_bad_settings_name_field(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == field


def test_a_first_sigma_below_the_data_s_own_is_refused(points):
    with pytest.raises(ConfigError, match=r"sigma_start: must be at least .* got 0\.001"):
        ms.fit(None, points, DenoisingScoreMatching(sigma_start=0.001), steps=1, evaluate=False)


@pytest.mark.parametrize("method", [ScoreMatching(), DenoisingScoreMatching()], ids=["exact", "denoising"])
def test_exploding_energies_stop_the_run(method, points):
    with pytest.raises(DivergenceError, match=r"energy_(data|noisy)|grad_norm"):
        ms.fit(None, points, method, steps=50, learning_rate=1e4, log_every=1, evaluate=False)


def test_images_are_trained_on_with_the_default_energy():
    x = torch.randn((32, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    run = ms.fit(None, x, ScoreMatching(chunk=512), steps=2, batch_size=16, log_every=1, evaluate=False)
    assert run.history[0]["evaluations"] == 16 * 64
    assert {"score_loss", "score_norm", "energy_data"} <= set(run.history[0])


@pytest.mark.parametrize("name", sorted(SCORES))
def test_separated_modes_are_said_to_be_unseen(name):
    assert len(SCORES) == 3
    right = diagnose([], Facts(name, [0.2, 0.8], [0.2, 0.8], 0.01, separated=True))
    (note,) = [f for f in right if f.name == "mode-weights-unseen"]
    assert f"{name.replace('-', ' ').capitalize()} learns from the inside of each mode only" in note.text
    wrong = diagnose([], Facts(name, [0.2, 0.8], [0.7, 0.3], 0.01, separated=True))
    (finding,) = [f for f in wrong if f.name == "wrong-mode-weights"]
    assert "cannot see how much mass a mode has" in finding.text
    assert "jarzynski" in finding.advice
    together = diagnose([], Facts(name, [0.2, 0.8], [0.2, 0.8], 0.01, separated=False))
    assert "mode-weights-unseen" not in [f.name for f in together]


def test_every_setting_is_on_the_page_with_its_default():
    text = (Path(__file__).resolve().parents[2] / "docs/methods/score-matching.md").read_text()
    for method in (ScoreMatching(), SlicedScoreMatching(), DenoisingScoreMatching()):
        table = text.split(f"`{type(method).__name__}`:\n", 1)[1].split("\n\n", 1)[0]
        shown = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", table, re.MULTILINE))
        fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
        assert set(shown) == set(fields)
        stated = {name: str(value) for name, value in fields.items() if value is not None}
        assert stated == {name: shown[name] for name in stated}
