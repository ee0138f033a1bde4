"""The β objective in use: settings, sources, monitors, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from conftest import assert_within, each, z_limit, z_scores
from torch import Tensor

import metastable as ms
from metastable.core.configure import describe
from metastable.core.errors import ConfigError, InputError
from metastable.core.random import generator
from metastable.energies import MLP, RBM, Tilted
from metastable.evaluation.diagnosis import diagnose
from metastable.kernels import MALA, ULA, Gibbs
from metastable.methods import (
    JEM,
    ChainMethod,
    Context,
    ContrastiveDivergence,
    ExactDraws,
    Jarzynski,
    Mixed,
    PersistentCD,
    Robust,
    ShortRun,
)
from metastable.methods.base import Negatives, Nothing
from metastable.methods.beta_objective import Weights, robust_loss, watch
from metastable.proposals import Gaussian, Uniform, fit_gaussian, fit_signs
from metastable.runs.resolve import resolve_method
from metastable.training import SGD


def context_of(dim: int = 2, rows: int = 60) -> Context:
    data = torch.randn((rows, dim), generator=generator(0))
    energy = Tilted(fit_gaussian(data), MLP(dim, hidden=(8,), seed=0))
    return Context(energy, {"energy": energy}, data, fit_gaussian(data), generator(1))


# ---- settings


def test_beta_moves_in_a_straight_line_and_stays():
    method = Robust(beta=(0.1, 0.3), beta_start=0.5, anneal=10)
    assert method.beta_at(0) == (0.5, 0.5)
    assert method.beta_at(5) == pytest.approx((0.3, 0.4))
    assert method.beta_at(10) == method.beta_at(500) == (0.1, 0.3)
    assert [p.sampling for p in method.powers(10)] == [0.9, 0.7]


def test_temperatures_of_appendix_g():
    a, b = Robust(sampling=0.6, weighting=2.0).powers(0)[0]
    assert (a, b) == (0.6, 2.0)
    assert Robust(beta=0.2, weighting=0.5).powers(0)[0] == (0.8, 0.5)


def test_numbers_of_numpy_are_numbers():
    method = Robust(beta=np.float32(0.1), beta_start=np.float64(0.5), weighting=np.int64(2))
    assert method.betas == pytest.approx((0.1,))
    assert json.loads(json.dumps(describe(method)))["beta"] == pytest.approx(0.1)  # not a name in its place
    assert Robust(beta=(np.float32(0.25), 0.5)).betas == (0.25, 0.5)
    assert Robust(beta=np.array([0.25, 0.5])[0]).beta == 0.25


@pytest.mark.parametrize(
    ("settings", "logged"),
    [
        ({"beta": 0.1, "beta_start": 0.5, "anneal": 4}, [0.5, 0.4, 0.3, 0.2, 0.1, 0.1]),
        ({"beta": (0.1, 0.3)}, [0.2] * 6),
        ({"beta": 0.1}, [None] * 6),
    ],
)
def test_beta_is_logged_where_the_settings_alone_do_not_say_it(settings, logged):
    method = Robust(source=ShortRun(steps=1, walkers=4), **settings)
    run = ms.fit(None, torch.randn(20, 2, generator=generator(0)), method, 6, evaluate=False, log_every=1)
    found = [row.get("beta") for row in run.history]
    assert found == (logged if logged[0] is None else pytest.approx(logged))


def test_settings_survive_a_file():
    method = Robust(
        source=Mixed(
            sources=(PersistentCD(walkers=9, kernel=MALA(0.1)), Jarzynski(walkers=64)), shares=(1, 2)
        ),
        beta=(0.1, 0.5),
        variant="true-objective",
    )
    settings = json.loads(json.dumps(describe(method)))
    assert resolve_method(settings) == method
    with pytest.raises(ConfigError, match=r"method\.source\.sources\.1\.walker: unknown"):
        resolve_method(
            {
                "name": "robust",
                "source": {"name": "mixed", "sources": ["pcd", {"name": "jarzynski", "walker": 3}]},
            }
        )


def test_a_source_without_a_name_is_the_default_with_other_settings():
    made = resolve_method({"name": "robust", "beta": 0.2, "source": {"walkers": 77}})
    assert made == Robust(source=ShortRun(steps=20, walkers=77), beta=0.2)
    inner = resolve_method({"name": "jem", "source": {"beta": 0.3, "source": {"steps": 7}}})
    assert isinstance(inner, JEM)
    assert inner.source == replace(JEM().source, beta=0.3, source=replace(JEM().source.source, steps=7))
    with pytest.raises(ConfigError, match="did you mean 'walkers'") as caught:
        resolve_method({"name": "robust", "source": {"walker": 77}})
    assert caught.value.path == "method.source.walker"
    with pytest.raises(ConfigError, match="must have a 'name'"):  # the kernel is None by default
        resolve_method({"name": "robust", "source": {"kernel": {"step_size": 0.1}}})


@each(
    "make, field, words",
    [
        (lambda: Robust(beta=1.2), "robust.beta", "inverted energy"),
        (lambda: Robust(beta_start=1.5), "robust.beta_start", "inverted energy"),
        (lambda: Robust(beta_start="low"), "robust.beta_start", "finite number, got 'low'"),
        (lambda: Robust(beta=1.0), "robust.beta", "bounded set.*use beta below 1"),
        (lambda: Robust(beta=(0.1, 1.0)), "robust.beta", "bounded set"),
        (lambda: Robust(beta_start=1.0), "robust.beta_start", "bounded set.*use beta_start below 1"),
        (lambda: Robust(sampling=0.0), "robust.sampling", "bounded set.*use sampling above 0"),
        (lambda: Robust(sampling=-0.5), "robust.sampling", "inverted energy"),
        (lambda: Robust(beta=float("nan")), "robust.beta", "finite"),
        (lambda: Robust(beta=()), "robust.beta", "one number or several"),
        (lambda: Robust(beta="high"), "robust.beta", "finite number, got 'high'"),
        (lambda: Robust(beta=None), "robust.beta", "finite number, got None"),
        (lambda: Robust(beta=True), "robust.beta", "finite number, got True"),
        (lambda: Robust(beta=np.float32("nan")), "robust.beta", "finite number, got nan"),
        (lambda: robust_loss(torch.zeros(2), torch.zeros(2), 0.1, variant="best"), "robust.variant", "best"),
        (lambda: Robust(beta=(0.1, 0.2), weighting=0.3), "robust.weighting", "several"),
        (lambda: Robust(weighting=float("inf")), "robust.weighting", "finite"),
        (lambda: Robust(variant="defualt"), "robust.variant", "did you mean 'default'"),
        (lambda: Robust(anneal=0), "robust.anneal", "at least 1"),
        (lambda: Robust(source=ms.methods.NCE()), "robust.source", "a method with chains"),
        (lambda: Robust(source=ExactDraws()), "robust.source", "sampling=1"),
        (lambda: Mixed(sources=()), "mixed.sources", "no negatives"),
        (lambda: Mixed(sources=(ms.methods.NCE(),)), "mixed.sources.0", "chains"),
        (lambda: Mixed(step_size=0.1), "mixed.step_size", "given to the sources"),
        (lambda: Mixed(shares=(1.0,)), "mixed.shares", "one for each source"),
        (lambda: Mixed(shares=(1.0, -1.0)), "mixed.shares", "above 0"),
        (
            lambda: Mixed(sources=(ShortRun(), PersistentCD(kernel=ULA(1.0, noise=0.01)))),
            "mixed.sources",
            "one temperature",
        ),
        (lambda: Mixed(sources=(ShortRun(energy_l2=0.1),)), "mixed.sources.0.energy_l2", "mixture"),
    ],
)
def test_bad_settings_name_field_and_reason(make, field: str, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        make()
    assert caught.value.path == field


def test_no_negatives_and_half_a_datum_are_refused():
    context = context_of()
    for method, drawn, rows, words in (
        (Robust(), Negatives(context.data[:0]), 5, "M = 0"),
        (Robust(), Negatives(context.data), 0, "N = 0"),
        (Robust(variant="true-objective"), Negatives(context.data), 1, "needs two rows, got 1"),
    ):
        with pytest.raises(InputError, match=words):
            method.loss(context, (), "energy", context.data[:rows], (drawn,))


# ---- β = 1: uniform negatives


@dataclass(frozen=True)
class InBox(ChainMethod[Nothing]):
    """Uniform draws from a box that no energy can move."""

    name = "in-box"

    @property
    def bounded(self) -> bool:
        return True

    def start(self, context: Context) -> Nothing:
        return Nothing()

    def negatives(self, context, state, batch):
        box = Uniform(torch.full((1,), -6.0), torch.full((1,), 6.0))
        return Negatives(box.sample(4000, context.rng)), state, {}

    def load(self, tree) -> Nothing:
        return Nothing()


def test_beta_one_learns_from_uniform_draws_in_a_box():
    """Figure 1c: negatives are uniform, and p^1 weighs them. The mean of a Gaussian is found without a chain."""
    x = 1.0 + torch.randn(2000, 1, generator=generator(0))
    energy = ms.energies.GaussianMixture(torch.zeros(1, 1), trainable=True)
    method = Robust(source=InBox(), beta=1.0, variant="no-positive")
    run = ms.fit(energy, x, method, steps=120, optimiser=SGD(0.1), batch_size=None, evaluate=False)
    effective = 4000 * 2 * math.pi**0.5 / 12  # uniform draws in a box of 12, under a unit Gaussian
    error = (0.1 / 1.9 / effective) ** 0.5  # what is left of the last updates' noise at a rate of 0.1
    assert_within(energy.means[0], x.mean(0), error)
    assert run.history[-1]["negatives_effective"] == pytest.approx(effective, rel=0.15)


@pytest.mark.parametrize("beta", [1.0, 0.4])
def test_units_follow_the_flat_energy(beta: float):
    """Finitely many states are a bounded set: Gibbs sweeps of (1 − β)E, at β = 1 coin tosses, by enumeration."""
    rng, walkers = generator(0), 20_000
    energy = RBM(4, 3, seed=0)
    with torch.no_grad():
        for p in energy.parameters():
            p.add_(0.4)
    data = torch.where(torch.rand(50, 4, generator=rng) < 0.5, -1.0, 1.0)
    context = Context(energy, {"energy": energy}, data, fit_signs(data), rng)
    method = Robust(source=PersistentCD(walkers=walkers, kernel=Gibbs(), steps=12), beta=beta)
    (drawn,), _, _ = method.negatives(context, method.start(context), data)
    states = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=4)))
    with torch.no_grad():
        flat, own = (torch.softmax(-a * energy(states), 0) @ states for a in (1 - beta, 1.0))
    error = ((1 - flat**2) / walkers).sqrt()
    assert_within(drawn.x.mean(0), flat, error)
    assert z_scores(drawn.x.mean(0), own, error).min() > 3 * z_limit()


# ---- sources


def test_mixed_negatives_count_as_their_shares_say():
    context = context_of()
    sources = (PersistentCD(walkers=30, start_at="noise"), ShortRun(walkers=10, steps=2))
    for shares, expected in ((None, 0.75), ((1.0, 1.0), 0.5), ((1.0, 4.0), 0.2)):
        method = Mixed(sources=sources, shares=shares)
        drawn, _, metrics = method.negatives(context, method.start(context), context.data)
        first = torch.arange(40) < 30
        assert drawn.x.shape == (40, 2)
        assert float(drawn.mean(first.float())) == pytest.approx(expected)
        assert metrics["displacement"] > 0
    assert drawn.log_weight is not None
    assert (
        Mixed(sources=sources).negatives(context, method.start(context), context.data)[0].log_weight is None
    )


def test_mixed_keeps_the_weights_of_a_weighted_source():
    """Jarzynski walkers of uneven weight beside chains: each part averages as it would alone."""
    context = context_of()
    jarzynski, chains = Jarzynski(walkers=64, populations=4), PersistentCD(walkers=30, start_at="noise")
    method = Mixed(sources=(jarzynski, chains), shares=(0.5, 0.5))
    states = method.start(context)
    uneven = torch.randn(len(states[0].steering.x), generator=generator(4)).double() - 7
    states = (states[0]._replace(steering=states[0].steering._replace(log_weight=uneven)), states[1])
    drawn, _, _ = method.negatives(context, states, context.data)
    n = len(uneven)
    values = drawn.x[:, 0]
    weighted = torch.softmax(uneven, 0).float() @ values[:n]
    torch.testing.assert_close(drawn.mean(values), (weighted + values[n:].mean()) / 2)


def test_log_z_is_given_only_where_walkers_follow_what_is_learned():
    context = context_of()
    source = Jarzynski(walkers=128, populations=4)
    for method, given in (
        (Robust(source=source, beta=0.0), True),
        (
            Robust(source=source, sampling=1.0, weighting=0.4),
            False,
        ),  # its walkers follow E, and 1.4·E is learned
        (Robust(source=source, beta=0.2), False),
        (Robust(source=source, beta=(0.2, 0.0)), True),
        (Robust(source=Mixed(sources=(PersistentCD(walkers=20), source)), beta=0.0), True),
        (Robust(source=PersistentCD(walkers=20), beta=0.0), False),
    ):
        state = method.start(context)
        z = method.log_partition(context, state)
        assert (z is not None) is given, method
        _, metrics = method.advance(context, method.negatives(context, state, context.data)[1])
        assert ("log_z" in metrics) is (given and method.beta != (0.2, 0.0))


# ---- a run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    x = torch.randn(400, 2, generator=generator(0)) * 0.5 + 1.0
    source = Mixed(
        sources=(PersistentCD(walkers=100, step_size=0.05), ShortRun(walkers=50, steps=5, step_size=0.05))
    )
    method = Robust(source=source, beta=(0.1, 0.4), beta_start=0.6, anneal=20)
    out = tmp_path_factory.mktemp("runs") / "robust"
    run = ms.fit("mlp", x, method, steps=40, out=out, log_every=1, learning_rate=3e-3, evaluate=False)
    return run, out


def test_a_run_logs_the_monitors_and_is_read_back(finished):
    run, out = finished
    row = run.history[-1]
    assert 0 < row["grad_scale"] <= 1
    assert row["weight_data_max"] <= 1
    assert row["grad_scale"] <= row["weight_negatives_max"] <= 150
    assert 1 <= row["negatives_effective"] <= 150
    assert 0 <= row["negatives_ignored"] <= 1
    again = ms.load_run(out)
    assert again.method == "robust"
    probe = torch.randn(5, 2, generator=generator(3))
    with torch.no_grad():
        assert torch.equal(again.energy(probe), run.energy(probe))
    assert run.walkers is None or torch.equal(again.walkers.x, run.walkers.x)
    assert run.log_partition is None


def test_the_report_shows_the_weights(finished):
    from metastable.report import write_report

    _, out = finished
    page = write_report(out).read_text("utf-8")
    assert "Weights of data and negatives" in page
    assert "Ignored negatives" in page
    assert "heaviest negative" in page


def test_walkers_read_back_carry_the_weights_of_their_own_beta(tmp_path):
    """After the anneal β is 0.4 again, also when the run is read from its folder."""
    x = torch.randn(200, 2, generator=generator(0))
    method = Robust(source=PersistentCD(walkers=50), beta=0.4, beta_start=0.0, anneal=5)
    run = ms.fit("mlp", x, method, steps=8, out=tmp_path / "r", evaluate=False, device="cpu", units="none")
    again = ms.load_run(tmp_path / "r")
    with torch.no_grad():
        truth = -0.4 * run.energy(run.walkers.x).double()
    torch.testing.assert_close(run.walkers.log_weight, truth)
    torch.testing.assert_close(again.walkers.log_weight, truth)


def test_a_buffer_is_weighed_a_part_at_a_time(monkeypatch):
    """All of 10,000 images at once do not fit through a deep network."""
    monkeypatch.setattr("metastable.methods.robust.PART", 7 * 2)
    seen: list[int] = []

    def energy(x: Tensor) -> Tensor:
        seen.append(len(x))
        return 0.5 * x.square().sum(1)

    x = torch.randn(20, 2, generator=generator(0))
    context = Context(energy, {}, x, fit_gaussian(x), generator(0))
    method = Robust(source=PersistentCD(), beta=0.25)
    walkers = method.current_walkers(context, method.start(context))
    assert walkers is not None
    assert seen == [7, 7, 6]
    torch.testing.assert_close(walkers.log_weight, -0.25 * energy(walkers.x).to(walkers.log_weight))


def test_one_of_many_negatives_that_is_far_off_does_no_harm():
    """A negative at a cliff: plain training follows its slope, β does not."""
    x = torch.tensor([[0.0], [0.5], [40.0]])
    slope = torch.ones(1, requires_grad=True)
    pulls = []
    for beta in (0.0, 0.5):
        loss, weights = robust_loss(-slope * torch.zeros(4), -(slope * x[:, 0]), beta)
        pulls.append(float(torch.autograd.grad(loss, slope)[0]))
    assert abs(pulls[0]) > 10 > 0.5 > abs(pulls[1])
    assert float(weights.negatives[2]) < 1e-8


# ---- monitors and their diagnosis


def test_monitors_count_what_is_ignored():
    share = torch.tensor([0.5, 0.5 - 1e-4, 1e-4, 0.0])
    seen = {name: float(value) for name, value in watch(Weights(torch.tensor([0.2, 0.6]), share)).items()}
    assert seen["grad_scale"] == pytest.approx(0.4)
    assert seen["weight_data_max"] == pytest.approx(0.6)
    assert seen["weight_negatives_max"] == pytest.approx(4 * 0.4 * 0.5)
    assert seen["negatives_effective"] == pytest.approx(2.0, rel=1e-3)
    assert seen["negatives_ignored"] == 0.5
    gone = watch(Weights(torch.full((3,), 1e-4), torch.full((4,), 0.25)))
    assert float(gone["negatives_ignored"]) == 1
    assert float(gone["negatives_effective"]) == 4


def history(scale, rows: int = 100) -> list[dict]:
    rng = np.random.default_rng(0)
    return [
        {"step": 10 * k, "grad_scale": scale(k / rows) * (1 + 0.1 * rng.random()), "negatives_ignored": 0.5}
        for k in range(rows)
    ]


@each(
    "scale, severity",
    [
        (lambda t: 0.9, None),
        (lambda t: 0.02, None),  # small M and large β: a smaller step, not a failure
        (lambda t: 1e-4 if t < 0.2 else 0.9, None),
        (lambda t: 1e-4 if t < 0.4 else 0.9, "warning"),
        (lambda t: 0.9 if t < 0.6 else 1e-4, "problem"),
        (lambda t: 1e-4, "problem"),
    ],
)
def test_negatives_that_are_ignored_for_long_are_named(scale, severity: str | None):
    found = {f.name: f for f in diagnose(history(scale))}
    assert ("negatives-ignored" in found) is (severity is not None)
    if severity:
        finding = found["negatives-ignored"]
        assert finding.severity == severity
        assert "SGD" in finding.advice
        assert "beta" in finding.advice
        assert finding.evidence["negatives_ignored"] == 0.5


def test_chains_that_never_reach_the_data_are_diagnosed():
    """Negatives start ten standard deviations off and hardly move, with a β that sees it."""
    x = torch.randn(200, 2, generator=generator(0))
    energy = Tilted(Gaussian(torch.zeros(2)), MLP(2, hidden=(8,), seed=0))

    @dataclass(frozen=True)
    class FarOff(ContrastiveDivergence):
        def begin(self, context: Context, batch: Tensor, n: int) -> Tensor:
            return 10.0 + 0.1 * torch.randn((n, 2), generator=context.rng)

    method = Robust(source=FarOff(steps=1, step_size=1e-4), beta=0.5)
    run = ms.fit(energy, x, method, steps=60, log_every=1, optimiser=SGD(0.01), evaluate=False)
    assert "negatives-ignored" in {f.name for f in diagnose(run.history)}
    assert run.history[-1]["grad_scale"] < 1e-3
    near = replace(method, source=ContrastiveDivergence(steps=1))
    run = ms.fit(energy, x, near, steps=60, log_every=1, optimiser=SGD(0.01), evaluate=False)
    assert "negatives-ignored" not in {f.name for f in diagnose(run.history)}


def test_a_plan_counts_every_chain():
    source = Mixed(sources=(PersistentCD(walkers=30), ShortRun()))
    assert Robust(source=source, beta=(0.1, 0.2)).stored(batch=64, rows=1000) == 2 * (30 + 64)
    assert PersistentCD().stored(batch=64, rows=1000) == 1000
