"""Every number of a run is about the density that was learned, exp(−P·E), whatever its chains' temperature."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FALSE_ALARM, assert_within, each, mean_and_error, z_limit, z_scores
from torch import Tensor, nn

import metastable as ms
from metastable.compare import scores as compared
from metastable.core.errors import ConfigError
from metastable.core.powered import Powered, powered
from metastable.core.random import generator
from metastable.core.types import LogPartition, energy_and_grad, student_t_quantile
from metastable.energies import RBM, JointEnergy
from metastable.evaluation.classifier import class_samples
from metastable.evaluation.diagnosis import Facts, diagnose
from metastable.kernels import MALA, ULA, Gibbs
from metastable.methods import (
    JEM,
    NCE,
    AdaptiveNCE,
    ExactDraws,
    FDivergence,
    Jarzynski,
    Mixed,
    PersistentCD,
    Robust,
    ShortRun,
)
from metastable.methods.base import Context
from metastable.proposals import fit_gaussian
from metastable.report.read import read_run
from metastable.report.run_page import cards
from metastable.runs.model import Model
from metastable.runs.run import Run
from metastable.summary.classifier import kernel_of

TRUTH = -0.5 * math.log(2 * math.pi) - 0.5
"""Log-likelihood of data with mean 0 and variance 1 under the best Gaussian, per row."""
COLD = ULA(0.1, noise=math.sqrt(0.05))  # T = ¼
WALKERS = 2000
KEPT = "cold chains"
NOT_DRAWN = lambda folder: folder  # noqa: E731  # a report takes seconds


class Precision(nn.Module):
    """E = ½λx², at first with λ = ½."""

    def __init__(self) -> None:
        super().__init__()
        self.lam = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.lam * x.square().sum(1)


class Ignorant(PersistentCD):
    """A mutant: it does not say at which temperature its chains sampled."""

    def power(self, step: int) -> float:
        return 1.0


def chains(kernel: ULA = COLD) -> PersistentCD:
    return PersistentCD(kernel=kernel, walkers=WALKERS, steps=5)


METHODS = {
    "cold chains": (chains(), 4.0),
    "robust on cold chains": (Robust(source=chains(), beta=0.5), 4.0),
    "robust with a + b = 2": (Robust(source=chains(ULA(0.05)), sampling=1.0, weighting=1.0), 2.0),
    "chains at temperature 1": (chains(ULA(0.05)), 1.0),
    "mutant": (Ignorant(kernel=COLD, walkers=WALKERS, steps=5), 1.0),
}


def standard(n: int = 2000) -> Tensor:
    x = torch.randn(n, 1, generator=generator(0))
    return (x - x.mean()) / x.std(correction=0)


@dataclass
class Trained:
    run: Run
    folder: Any
    power: float

    @property
    def precision(self) -> float:
        """P·λ, closed form of everything."""
        return self.power * float(self.run.energy.lam.detach())


@pytest.fixture(scope="module")
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def trained(tmp_path_factory, module_patch):
    """Each method once, on data whose mean is 0 and variance 1 exactly; `KEPT` in a folder."""
    made: dict[str, Trained] = {}
    module_patch.setattr("metastable.report.write_report", NOT_DRAWN)
    settings = {"steps": 120, "learning_rate": 0.03, "batch_size": None, "log_every": 4}

    def get(name: str) -> Trained:
        if name not in made:
            method, power = METHODS[name]
            folder = tmp_path_factory.mktemp("learned") / "run" if name == KEPT else None
            made[name] = Trained(
                ms.fit(Precision(), standard(), method, out=folder, **settings), folder, power
            )
        return made[name]

    return get


def off_in_errors(run: Run) -> float:
    """How far the log-likelihood of the data is from the truth, in its own standard errors."""
    return float(z_scores(run.scores["log_likelihood"], TRUTH, run.scores["log_likelihood_se"]))


def second_moment(walkers: Any) -> tuple[float, float]:
    """Mean of x² under the weights, and its standard error from the effective number of walkers."""
    w, squares = torch.softmax(walkers.log_weight, 0), walkers.x.double().square().flatten()
    mean = w @ squares
    return float(mean), float((w @ (squares - mean).square() / walkers.ess).sqrt())


TRUE = [name for name in METHODS if name != "mutant"]


@pytest.mark.parametrize("name", TRUE)
def test_the_likelihood_is_that_of_what_was_learned(trained, name):
    found = trained(name)
    run = found.run
    assert run.power == pytest.approx(found.power)
    assert off_in_errors(run) < z_limit()
    # and exactly: under the P·λ that training ended with, log Z is ½ log(2π/Pλ) and the mean of P·E is ½Pλ
    exact, z = 0.5 * math.log(2 * math.pi / found.precision), run.log_partition
    limit = student_t_quantile(1 - FALSE_ALARM / 2, z.degrees) * z.std_error
    assert abs(z.value - exact) < limit
    assert run.scores["log_likelihood"] == pytest.approx(-0.5 * found.precision - z.value, abs=1e-5)
    assert float(run.log_prob(standard()).mean()) == pytest.approx(run.scores["log_likelihood"], abs=1e-5)
    assert compared(run, standard())["log_z_exact"] == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("name", TRUE)
def test_samples_have_the_variance_of_the_data(trained, name):
    found = trained(name)
    run, noise = found.run, math.sqrt(2 / WALKERS)
    # the error of one update's negatives, though training averages over many
    assert abs(found.precision - 1) < z_limit() * noise
    for walkers in (run.walkers, run.sample(WALKERS, seed=1)):
        mean, error = second_moment(walkers)
        assert_within(mean, 1 / found.precision, error)
        assert_within(mean, 1.0, math.hypot(error, noise))


def test_a_run_that_ignores_the_temperature_is_found_out(trained):
    run = trained("mutant").run
    assert off_in_errors(run) > 2 * z_limit()
    mean, error = second_moment(run.sample(WALKERS, seed=1))
    assert (mean - 1) / error > 2 * z_limit()


def test_the_power_is_said_in_words_where_it_is_not_1(trained):
    names = {name: [f.name for f in trained(name).run.diagnosis] for name in TRUE}
    assert names["chains at temperature 1"] == ["healthy"]
    assert names[KEPT] == ["healthy", "tempered-density"]
    words = trained(KEPT).run.diagnosis[-1]
    assert "exp(−4·E)" in words.text
    assert "temperature 0.25" in words.text
    assert "Of exp(−4·E), which is what was learned." in str(cards(read_run(trained(KEPT).folder)))


def test_a_run_read_back_has_its_power(trained):
    found = trained(KEPT)
    again = ms.load_run(found.folder, Precision())
    assert again.power == found.run.power
    torch.testing.assert_close(again.log_prob(standard()), found.run.log_prob(standard()))
    assert_within(second_moment(again.sample(WALKERS))[0], 1 / found.precision, math.sqrt(2 / WALKERS))


def test_numbers_of_a_run_from_before_there_were_powers_are_those_of_E(trained, tmp_path):
    import shutil

    shutil.copytree(trained(KEPT).folder, tmp_path / "old")
    path = tmp_path / "old" / "summary.json"
    summary = json.loads(path.read_text())
    del summary["power"]
    path.write_text(json.dumps(summary))
    assert ms.load_run(tmp_path / "old", Precision()).power == 1.0
    path.unlink()  # nothing was said about the run, so nothing has to agree with it
    assert ms.load_run(tmp_path / "old", Precision()).power == pytest.approx(4.0)


# ---- the command line


def test_the_command_line_scores_and_samples_what_was_learned(tmp_path, module_patch):
    """By quadrature of P·E, whatever the training made of it."""
    from typer.testing import CliRunner

    from metastable.cli.main import app
    from metastable.evaluation.quadrature import grid_density

    def metastable(*words: object) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    module_patch.setattr("metastable.report.write_report", NOT_DRAWN)
    module_patch.setattr(
        "metastable.summary.samples.distances", lambda *_: {"mmd2": 0.0, "energy_distance": 0.0}
    )
    data, out = tmp_path / "x.npy", tmp_path / "run"
    np.save(data, standard(600).numpy())
    run = ms.fit({"name": "mlp", "hidden": [8]}, data, PersistentCD(kernel=COLD, walkers=300), 10, out=out)
    assert "exp(−4·E), and all numbers are of that density" in metastable("evaluate", out, "--data", data)
    found = json.loads((out / "evaluation.json").read_text())
    assert found["power"] == pytest.approx(4.0)
    density = grid_density(lambda x: found["power"] * run.energy(x.float()).double(), ((-6.0, 6.0),), 4001)
    limit = student_t_quantile(1 - FALSE_ALARM / 2, run.log_partition.degrees) * run.log_partition.std_error
    assert abs(found["log_partition"]["value"] - density.log_partition) < limit
    with torch.no_grad():
        energy = 4 * float(run.energy(standard(600)).double().mean())
    assert found["log_likelihood"] == pytest.approx(-energy - found["log_partition"]["value"], abs=1e-5)
    metastable("sample", out, "--n", 2000, "--out", tmp_path / "s.npy")
    x = torch.from_numpy(np.load(tmp_path / "s.npy")).double()
    at, mass = density.axes[0], density.density * (density.axes[0][1] - density.axes[0][0])
    variance = float(mass @ at.square()) - float(mass @ at) ** 2
    fourth = float(mass @ (at - mass @ at) ** 4)
    assert_within(float(x.var()), variance, math.sqrt(fourth / len(x)))
    # hardly trained: at first exp(−E) had the data's variance, and exp(−4E) a quarter of it
    assert variance < 0.6


def test_the_estimator_scores_what_was_learned():
    estimator = ms.EnergyDensity(method=chains(), steps=5, random_state=0).fit(standard(200).numpy())
    rows = torch.linspace(-2, 2, 5, dtype=torch.float64)[:, None]
    learned = estimator.energy_
    assert isinstance(learned, Powered)
    torch.testing.assert_close(learned(rows), 4 * learned.energy(rows))
    x = np.linspace(-20, 20, 8001)[:, None]
    mass = np.exp(estimator.score_samples(x)).sum() * (x[1, 0] - x[0, 0])
    assert_within(math.log(mass), 0.0, estimator.log_partition_.std_error)


# ---- what a method says


@each(
    "method, power",
    [
        (PersistentCD(), 1),
        (ShortRun(kernel=COLD), 4),
        (Mixed(sources=(PersistentCD(kernel=COLD), ShortRun(kernel=COLD))), 4),
        (Jarzynski(kernel=COLD), 1),  # its weights account for the noise
        (ExactDraws(), 1),
        (NCE(), 1),
        (AdaptiveNCE(source=PersistentCD(kernel=COLD)), 4),
        (FDivergence(source=PersistentCD(kernel=COLD)), 4),
        (Robust(source=PersistentCD(kernel=COLD), beta=(0.1, 0.5)), 4),
        (Robust(source=PersistentCD(kernel=COLD), sampling=0.5, weighting=0.25), 3),
        (Robust(source=Jarzynski(kernel=COLD), sampling=0.5, weighting=0.25), 0.75),
        (JEM(source=Robust(source=PersistentCD(kernel=COLD))), 4),
        (JEM(source=PersistentCD(kernel=COLD), generative=0.0), 1),
    ],
)
def test_the_power_of_each_method(method, power):
    assert method.power(0) == pytest.approx(power)


def test_a_power_that_moves_is_that_of_the_last_update():
    method = Robust(source=ShortRun(steps=1, walkers=4), sampling=1.0, beta=0.5, beta_start=0.0, anneal=10)
    run = ms.fit(Precision(), standard(20), method, steps=4, evaluate=False)
    assert run.power == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"sampling": 1.0, "weighting": -1.0}, "robust.weighting"),
        ({"sampling": 0.5, "beta": -0.7}, "robust.beta"),
    ],
)
def test_a_density_upside_down_is_refused(settings, field):
    with pytest.raises(ConfigError, match=f"{field}: must leave sampling \\+ weighting above 0"):
        Robust(**settings)


def test_chains_of_different_temperatures_have_no_power():
    with pytest.raises(ConfigError, match="must all sample at one temperature, got pcd"):
        Mixed(sources=(PersistentCD(kernel=COLD), ShortRun()))


@pytest.mark.parametrize("mutant", [False, True])
def test_walkers_of_the_robust_objective_stand_for_what_is_learned(mutant):
    """Exact draws of exp(−aE/T), weighed: the mean of x² is T/(a + b)λ. Unweighed, as a mutant, it is T/aλ."""
    λ, n, a, b, T = 0.3, 20_000, 0.6, 0.9, COLD.temperature
    x = torch.randn(n, 1, generator=generator(3), dtype=torch.float64) * math.sqrt(T / (a * λ))
    energy = Precision().double()
    energy.lam.data.fill_(λ)
    context = Context(energy, {"energy": energy}, x, fit_gaussian(x), generator(0))
    method = Robust(source=PersistentCD(kernel=COLD, walkers=n), sampling=a, weighting=b)
    (state,) = method.start(context)
    walkers = method.current_walkers(context, (state._replace(buffer=x),))
    if mutant:
        walkers = replace(walkers, log_weight=torch.zeros_like(walkers.log_weight))
    mean, error = second_moment(walkers)
    score = float(z_scores(mean, T / ((a + b) * λ), error))
    assert (score > 2 * z_limit()) if mutant else (score < z_limit())


def test_a_discrete_energy_is_listed_at_its_power():
    data = torch.randint(0, 2, (60, 6), generator=generator(0)).float() * 2 - 1
    method = Robust(source=PersistentCD(kernel=Gibbs(), walkers=60), sampling=1.0, weighting=1.0)
    run = ms.fit(RBM(6, 4, seed=0), data, method, steps=10)
    states = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 6)
    with torch.no_grad():
        exact = torch.logsumexp(-2 * run.energy(states).double(), 0)
    assert run.power == 2
    assert run.log_partition.value == pytest.approx(float(exact), abs=1e-5)
    assert run.sample(50, steps=2).x.abs().eq(1).all()


# ---- the energy of it


def test_powered_keeps_what_an_energy_is():
    energy = ms.energies.DoubleWell()
    assert powered(energy, 1.0) is energy
    twice = powered(energy, 2.0)
    x = torch.randn(5, *energy.event_shape, generator=generator(0))
    value, grad = energy_and_grad(twice, x)
    torch.testing.assert_close(value, 2 * energy(x))
    torch.testing.assert_close(grad, 2 * energy_and_grad(energy, x).grad)
    assert twice.event_shape == energy.event_shape
    assert not twice.discrete
    rbm = RBM(4, 2, seed=0)
    thrice = powered(rbm, 3.0)
    assert thrice.discrete
    assert all(p is q for p, q in zip(thrice.parameters(), rbm.parameters(), strict=True))
    tilted = ms.fit(None, torch.randn(50, 2, generator=generator(0)), "cd", 1, evaluate=False).energy
    assert powered(tilted, 2.0).reference is tilted.reference  # where log Z starts from
    assert len(list(powered(tilted, 2.0).parameters())) == len(list(tilted.parameters()))


def test_a_power_of_p_x_leaves_p_of_the_labels_alone():
    """E(x, y) of exp(−P·E(x)) is P·E(x) − log p(y | x): the classifier of output scale P·o."""
    energy = JointEnergy(nn.Linear(2, 3), output_scale=2.0)
    x, labels = torch.randn(6, 2, generator=generator(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    learned = powered(energy, 5.0)
    torch.testing.assert_close(learned(x), 5 * energy(x))
    assert torch.equal(learned.log_prob_labels(x), energy.log_prob_labels(x))
    log_p = energy.log_prob_labels(x).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(learned(x, labels), 5 * energy(x) - log_p)
    assert energy.output_scale == 2.0


class Centres(nn.Module):
    """Logits −½c(x − μ_y)²: with o = 1, p(x | y) is the Gaussian of variance 1/c around μ_y."""

    classes = 2

    def forward(self, x: Tensor) -> Tensor:
        return -2.0 * (x - x.new_tensor([-1.0, 1.0])).square()  # c = 4


@pytest.mark.parametrize("kernel", [COLD, ULA(0.025)])
def test_samples_of_a_class_are_of_p_x_given_y_whatever_the_kernel_s_temperature(kernel):
    """A Langevin chain of h·T on a Gaussian ends at the variance 1/c(1 − ½hTc), exactly."""
    start = 3 * torch.randn(8000, 1, generator=generator(1), dtype=torch.float64)
    energy = JointEnergy(Centres(), output_scale=1.0, event_shape=(1,))
    drawn = class_samples(energy, start, kernel=kernel, per_class=3000, steps=200, seed=0)[:, :, 0]
    h = kernel.step_size * kernel.temperature
    mean, error = mean_and_error(drawn.T)
    assert_within(mean, torch.tensor([-1.0, 1.0]), error)
    squares, error = mean_and_error((drawn.T - mean).square())
    assert_within(squares, torch.full((2,), 1 / (4 * (1 - 2 * h))), error)


# ---- which kernel


def test_the_kernel_of_a_run_is_that_of_its_chains():
    mixed = Mixed(sources=(ExactDraws(), PersistentCD(kernel=MALA(0.3)), ShortRun(step_size=0.02)))
    assert kernel_of(mixed) == MALA(0.3)
    two = Mixed(sources=(ShortRun(step_size=1e-4), PersistentCD()))
    assert kernel_of(JEM(source=Robust(source=two))) == ULA(1e-4)
    assert kernel_of(PersistentCD()) == PersistentCD().moves
    assert kernel_of(ExactDraws()) is None
    assert kernel_of(NCE()) is None


def test_class_samples_of_a_run_move_by_its_kernel_or_by_one_that_was_tuned():
    from metastable.summary.classifier import moves_of

    energy = JointEnergy(Centres(), output_scale=1.0, event_shape=(1,))
    start = torch.randn(300, 1, generator=generator(0))
    steep = JEM(source=Mixed(sources=(PersistentCD(step_size=1e-4), ShortRun(step_size=1e-3))))
    assert moves_of(Run(energy, "jem", [], None, None, trained_with=steep), start, 0) == ULA(1e-4)
    tuned = moves_of(Run(energy, "nce", [], None, None, trained_with=NCE()), start, 0)
    assert isinstance(tuned, MALA)
    assert 0.05 < tuned.step_size < 2


# ---- the diagnosis


def test_energies_of_a_log_are_judged_in_nats():
    """A gap of 0.01 is nothing at temperature 1, and 200 nats at the temperature of ULA(1.0, noise=0.01)."""
    noise = torch.randn(100, generator=generator(0)).tolist()
    log = [{"step": k, "energy_gap": -0.01 + 1e-4 * noise[k]} for k in range(100)]
    found = {power: [f.name for f in diagnose(log, Facts("pcd", power=power))] for power in (1.0, 20_000.0)}
    assert found[1.0] == ["healthy"]
    assert found[20_000.0] == ["no-learning", "tempered-density"]


class Fixed(nn.Module):
    """½‖x − m‖² with an m that nothing trains."""

    def __init__(self):
        super().__init__()
        self.register_buffer("m", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x - self.m).square().sum(1)


def test_a_model_of_buffers_alone_is_where_it_was_brought():
    model = Model(Fixed(), log_z=LogPartition(math.log(2 * math.pi), 0.0, math.inf))
    assert model.home.dtype == torch.float32
    model.energy.double()
    x = torch.full((1, 2), 0.1, dtype=torch.float64)
    assert model.log_prob(x).item() == pytest.approx(-0.01 - math.log(2 * math.pi), abs=1e-14)
