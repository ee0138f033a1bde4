"""The Gibbs kernel in chains, training, evaluation and run folders; its laws are in tests/laws/test_discrete.py."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import assert_within, each, mean_and_error
from torch import Tensor, nn

import metastable as ms
from metastable.core.errors import ConfigError, InputError, UnsupportedError
from metastable.energies import RBM, BoltzmannMachine
from metastable.kernels import MALA, Flips, Gibbs, MetropolisHastings, compiled, run_chain, warm_up
from metastable.methods import Context, ContrastiveDivergence, Jarzynski, PersistentCD, ShortRun
from metastable.proposals import Gaussian, Signs, fit_signs
from metastable.proposals.signs import states
from metastable.walkers.path import path_for

F64 = torch.float64
over = pytest.mark.parametrize


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rbm(visible: int = 6, hidden: int = 4, scale: float = 0.5) -> RBM:
    W, a, b = (
        scale * torch.randn(s, generator=rng(1), dtype=F64) for s in ((visible, hidden), visible, hidden)
    )
    return RBM.of(W, a, b)


class Table(nn.Module):
    """An energy without structure or gradient: a number for each of eight states."""

    discrete = True
    event_shape = (3,)

    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.randn(8, generator=rng(2), dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return self.values[((x > 0) * torch.tensor([4, 2, 1])).sum(1)]


def exact_mean(energy) -> Tensor:
    s = states(math.prod(energy.event_shape))
    return torch.softmax(-energy(s).detach(), 0) @ s


MEMBERS = {
    "rbm": (rbm(), Gibbs()),
    "boltzmann machine": (BoltzmannMachine(5, scale=0.4).double(), Gibbs()),
    "boltzmann machine, random order": (BoltzmannMachine(5, scale=0.4).double(), Gibbs(order="random")),
    "table": (Table(), Gibbs()),
    "table, random order": (Table(), Gibbs(order="random")),
    "table, flips": (Table(), MetropolisHastings(Flips(0.3))),
}


@over(("energy", "kernel"), MEMBERS.values(), ids=MEMBERS)
def test_chains_reach_the_exact_means_and_stay_on_signs(energy, kernel):
    with torch.no_grad():
        w = ms.sample(energy, 20_000, kernel=kernel, steps=60, seed=3)
    assert bool((w.x.abs() == 1).all())
    mean, error = mean_and_error(w.x)
    assert_within(mean, exact_mean(energy), error)
    assert w.info["temperature"] == 1


def test_gibbs_is_the_default_of_a_discrete_energy():
    w = ms.sample(rbm(), 50, steps=2)
    assert w.info["kernel"] == Gibbs()
    assert bool((w.x.abs() == 1).all())


@over(
    ("energy", "order"),
    [(rbm(), "fixed"), (BoltzmannMachine(6, scale=0.5).double(), "random"), (Table(), "fixed")],
)
def test_clamped_units_do_not_move_and_the_others_follow_their_conditional(energy, order):
    d = energy.event_shape[0]
    clamped = torch.arange(d) < 2
    x = torch.ones(20_000, d, dtype=F64)
    kernel = Gibbs(order=order, clamped=clamped)
    w = ms.sample(energy, len(x), kernel=kernel, steps=40, init=x)
    assert bool((w.x[:, :2] == 1).all())
    s = states(d)
    s = s[(s[:, :2] == 1).all(1)]
    with torch.no_grad():
        expected = torch.softmax(-energy(s), 0) @ s
    mean, error = mean_and_error(w.x[:, 2:])
    assert_within(mean, expected[2:], error)


def test_images_move_as_their_flat_selves():
    flat = rbm(4, 3)
    image = RBM((1, 2, 2), 3).double()
    image.load_state_dict(flat.state_dict())
    x = Signs.uniform((1, 2, 2)).sample(7, rng()).double()
    for kernel in (Gibbs(), Gibbs(clamped=(((True, False), (False, False)),))):
        flat_kernel = kernel if kernel.clamped is None else Gibbs(clamped=(True, False, False, False))
        a = run_chain(kernel, image, kernel.init(image, x), 3, rng(1))
        b = run_chain(flat_kernel, flat, flat_kernel.init(flat, x.flatten(1)), 3, rng(1))
        assert torch.equal(a.state.x.flatten(1), b.state.x)
        assert torch.equal(a.info.moved, b.info.moved)


@over(
    ("energy", "kernel"),
    [
        MEMBERS["rbm"],
        pytest.param(*MEMBERS["boltzmann machine, random order"], marks=pytest.mark.slow),
        pytest.param(*MEMBERS["table, flips"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("error:engine")
def test_compiled_chains_are_the_eager_ones(energy, kernel, monkeypatch):
    monkeypatch.setattr(compiled, "UNROLL", 2)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled.compiled_several.cache_clear()
    x = Signs.uniform(energy.event_shape).sample(6, rng()).double()
    eager, fast = (
        run_chain(kernel, energy, kernel.init(energy, x), 5, rng(4), engine=engine)
        for engine in ("eager", "compile")
    )
    compiled.compiled_several.cache_clear()
    assert torch.equal(eager.state.x, fast.state.x)
    assert torch.equal(eager.info.moved, fast.info.moved)


# ---- training


def teacher_data(n: int = 3000) -> tuple[RBM, Tensor]:
    teacher = rbm(6, 3, 0.7)
    return teacher, teacher.sample(n, rng(5)).float()


def exact_kl(teacher: RBM, student: RBM) -> float:
    p, q = teacher.exact_probabilities(), student.exact_probabilities()
    return float((p * (p.log() - q.log())).sum())


METHODS = {
    "cd": ContrastiveDivergence(kernel=Gibbs(), steps=3),
    "pcd, from noise": PersistentCD(
        kernel=Gibbs(), steps=3, walkers=400, start_at="noise", rejuvenation=0.02
    ),
    "jarzynski": Jarzynski(kernel=Gibbs(), walkers=1200, populations=8),
}


@over("method", [METHODS[name] for name in ("cd", "pcd, from noise", "jarzynski")], ids=lambda m: m.name)
def test_training_approaches_the_exact_likelihood(method):
    """From independent units at 1 nat to where 3000 rows and 27 parameters leave about 27/6000."""
    teacher, data = teacher_data()
    student = RBM(6, 3, seed=1)
    before = exact_kl(teacher, student)
    run = ms.fit(
        student, data, method, steps=200, learning_rate=0.05, schedule=ms.training.Schedule("cosine")
    )
    assert before > 0.7
    assert exact_kl(teacher, student) < 0.08
    assert bool((run.walkers.x.abs() == 1).all())
    assert run.scores["log_z_exact"] == pytest.approx(float(student.log_partition()), rel=1e-5)
    assert "log_z_smc" not in run.scores
    assert run.modes is None


def test_persistent_chains_of_the_first_model_are_its_exact_draws():
    energy, data = RBM(6, 3, scale=0.7, seed=2), Signs.uniform(6).sample(40, rng())
    context = Context(energy, {"energy": energy}, data, fit_signs(data), rng(1))
    x = PersistentCD(kernel=Gibbs(), walkers=20_000, start_at="model").start(context).buffer
    mean, error = mean_and_error(x)
    assert_within(mean, exact_mean(energy.double()), error)


def test_jarzynski_weights_of_gibbs_walkers_know_log_z():
    _, data = teacher_data()
    student = RBM(6, 3, seed=1)
    method = Jarzynski(kernel=Gibbs(), walkers=8000, populations=16)
    run = ms.fit(student, data, method, steps=60, learning_rate=0.02, evaluate=False)
    z = run.log_partition
    assert z.std_error < 0.05
    assert_within(z.value, float(student.log_partition()), z.std_error)


class Counting(nn.Module):
    """A machine that counts rows through its energy and rows that it sweeps."""

    discrete = True

    def __init__(self, inner, sweeps: bool):
        super().__init__()
        self.inner, self.event_shape, self.rows = inner, inner.event_shape, 0
        if sweeps:
            self.sweep_uniforms, self.sweep = inner.sweep_uniforms, self._sweep

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return self.inner(x)

    def _sweep(self, x: Tensor, *rest) -> Tensor:
        self.rows += len(x)
        return self.inner.sweep(x, *rest)


@over("sweeps", [True, False], ids=["structured", "by differences"])
@over("name", ["cd", "pcd, from noise", "jarzynski"])
def test_evaluations_are_counted_as_they_are_made(name, sweeps):
    method = METHODS[name]
    if name == "jarzynski":
        method = replace(method, walkers=64, batch=16)
    energy = Counting(RBM(4, 3), sweeps)
    data = Signs.uniform(4).sample(40, rng())
    context = Context(energy, {"energy": energy}, data, fit_signs(data), rng(1))
    state = method.start(context)
    energy.rows = 0
    negatives, state, _ = method.negatives(context, state, data)
    method.loss(context, state, "energy", data, negatives)
    method.advance(context, state)
    assert method.evaluations(context, len(data)) == energy.rows


def test_a_run_on_disk_comes_back_and_goes_on(tmp_path):
    data = ms.data.load_array("toy:bars-and-stripes?n=200")
    out = tmp_path / "run"
    method = {"name": "pcd", "kernel": "gibbs", "walkers": 100}
    run = ms.fit({"name": "rbm", "hidden": 5}, data, method, steps=20, out=out, held_out=0.1)
    again = ms.load_run(out)
    x = run.walkers.x[:5]
    torch.testing.assert_close(run.energy(x), again.energy(x))
    assert again.log_partition.value == pytest.approx(run.log_partition.value)
    samples = np.load(out / "samples.npy")
    assert set(np.unique(samples)) == {-1.0, 1.0}
    assert again.sample(30, steps=3).x.shape == (30, 1, 4, 4)
    page = (out / "report.html").read_text()
    assert "as a grid of images" in page
    more = ms.fit({"name": "rbm", "hidden": 5}, data, method, steps=30, out=out, held_out=0.1, resume=True)
    assert more.history[-1]["step"] == 30


def test_the_boltzmann_machine_by_name():
    data = Signs(torch.tensor([0.5, -0.5, 0.0])).sample(500, rng())
    run = ms.fit("boltzmann", data, {"name": "cd", "kernel": "gibbs"}, steps=5)
    torch.testing.assert_close(run.log_prob(data).exp().max() <= 1, torch.tensor(True))
    assert run.energy.event_shape == (3,)


# ---- log Z


def test_log_z_is_exact_where_it_can_be_and_annealed_beyond():
    small = rbm()
    z = ms.log_partition(small)
    assert z.std_error == 0
    assert z.value == pytest.approx(float(small.log_partition()), rel=1e-12)
    assert z.trusted
    large = rbm(40, 30, 0.15)  # not listed: either layer has too many states
    z = ms.log_partition(large, walkers=128)
    assert 0 < z.std_error < 0.1
    assert z.trusted


def test_annealed_log_z_covers_the_exact_one_with_every_reference():
    energy = rbm(12, 8, 0.4)
    exact = float(energy.log_partition())
    data = energy.sample(2000, rng(1))
    forward = ms.log_partition(energy, reference=Signs.uniform(12), walkers=128)  # of another dtype
    both = ms.log_partition(energy, data=data, samples=data, walkers=128)
    for z in (forward, both):
        low, high = z.interval(1 - 1e-6)
        assert low < exact < high
        assert z.std_error < 0.05
        assert z.trusted, z.warnings
    assert abs(both.reverse - exact) < 6 * both.reverse_std_error + 0.02


def test_a_path_too_short_is_doubted():
    energy = rbm(30, 25, 1.5)
    z = ms.log_partition(energy, walkers=8, populations=4, conditional_ess=0.05, refinements=0, steps=1)
    assert not z.trusted


# ---- refusals


def continuous(x: Tensor) -> Tensor:
    return x.square().sum(1)


def data() -> Tensor:
    return Signs.uniform(6).sample(50, rng())


REFUSED = [
    (
        lambda: ms.sample(rbm(), 5, kernel=MALA(0.1)),
        UnsupportedError,
        "'mala' moves in continuous space.*Gibbs",
    ),
    (lambda: ms.sample(rbm(), 5, kernel=MetropolisHastings(0.5)), UnsupportedError, "Flips"),
    (lambda: ms.sample(rbm(), 5, kernel=Gibbs(), warmup=10), UnsupportedError, "no step size to adapt"),
    (lambda: ms.sample(continuous, 5, kernel=Gibbs(), event_shape=2), UnsupportedError, "discrete = True"),
    (lambda: ms.sample(rbm(), 5, kernel=Gibbs(clamped=(True, False))), InputError, r"gibbs.clamped.*\(6,\)"),
    (lambda: Gibbs(order="randm"), ConfigError, "did you mean 'random'"),
    (lambda: ms.fit(RBM(6, 2), data(), "jarzynski", steps=2), UnsupportedError, "kernel=ms.kernels.Gibbs"),
    (
        lambda: ms.fit(RBM(6, 2), data(), ShortRun(), steps=2),
        UnsupportedError,
        "'short-run' with kernel 'ula'",
    ),
    (lambda: ms.fit(RBM(6, 2), data(), "score-matching", steps=2), UnsupportedError, "continuous space"),
    (lambda: ms.fit(RBM(6, 2), (data() + 1) / 2, METHODS["cd"], steps=2), InputError, "recode bits with"),
    (lambda: ms.sample(rbm(), 5, init=torch.zeros(5, 6, dtype=F64)), InputError, "coded −1 and \\+1"),
    (lambda: ms.log_partition(rbm(), data=torch.rand(9, 6)), InputError, "data: .*threshold"),
    (lambda: path_for(rbm(), Gaussian(torch.zeros(6))), UnsupportedError, "use Signs"),
    (lambda: warm_up(Gibbs(), rbm(), data(), 3, rng()), UnsupportedError, "warmup"),
    (
        lambda: run_chain(Gibbs(), rbm(), Gibbs().init(rbm(), data().double()), 1, rng(), step_size=0.1),
        UnsupportedError,
        "step_size: 'gibbs' has none",
    ),
    (
        lambda: ms.continue_sampling(rbm(), ms.Walkers.equal(data().double()), 5, step_size=0.1),
        UnsupportedError,
        "step_size",
    ),
]


@each("act, error, words", REFUSED)
def test_what_cannot_be_is_refused_by_name(act, error, words):
    with pytest.raises(error, match=words):
        act()
