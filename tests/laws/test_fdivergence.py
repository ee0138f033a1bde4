"""f-EBM against exact answers: Theorems 1 to 3 on a finite space and by quadrature, and what a run reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import assert_within, each, mean_and_error
from torch import Tensor, nn

import metastable as ms
from metastable.core.errors import ConfigError, DivergenceError, InputError
from metastable.core.random import generator
from metastable.methods import Context, ExactDraws, FDivergence, Jarzynski, PersistentCD, rejection_sample
from metastable.methods.base import Negatives
from metastable.methods.divergences import DIVERGENCES, Divergence, alpha_divergence, from_function
from metastable.methods.fdivergence import Scored, normalised, theorem1, theorem3, variational_bound
from metastable.proposals import fit_gaussian

MEMBERS = {**DIVERGENCES, **{d.name: d for d in map(alpha_divergence, (-1.0, -0.5, 0.9))}}
MEMBERS["user's"] = from_function(lambda u: (u - 1) * u.log())
every = pytest.mark.parametrize("f", MEMBERS.values(), ids=MEMBERS)


# ---- exactly, on a finite space: p uniform over m points, q = softmax(−E), so that expectations are sums


class Finite(NamedTuple):
    """E of parameters θ at m points, and a function H on them; p is uniform."""

    theta: Tensor
    E: Tensor
    H: Tensor

    @property
    def log_q(self) -> Tensor:
        return torch.log_softmax(-self.E, 0)

    @property
    def mean(self) -> Callable[[Tensor], Tensor]:
        return Negatives(self.E[:, None], self.log_q.detach()).mean


@pytest.fixture
def finite() -> Finite:
    rng = generator(0)
    theta = torch.randn(4, generator=rng, dtype=torch.float64).requires_grad_()
    features = torch.randn(30, 4, generator=rng, dtype=torch.float64)
    E = torch.tanh(features @ theta) + 0.2 * features @ theta.square()
    return Finite(theta, E, -E.detach() + 0.3 * torch.randn(30, generator=rng, dtype=torch.float64))


def gradient(value: Tensor, space: Finite) -> Tensor:
    return torch.autograd.grad(value, space.theta, retain_graph=True)[0]


def best(space: Finite) -> Finite:
    """(15): H* = log(p·Z)."""
    return space._replace(H=(torch.logsumexp(-space.E, 0) - math.log(30)).detach().expand(30))


@every
def test_the_surrogate_has_the_gradient_of_the_bound(f: Divergence, finite: Finite):
    """Theorem 3 for any H: against automatic differentiation through q itself, in exact arithmetic."""
    x = finite.H + finite.E
    bound = f.slope(x).mean() - finite.log_q.exp() @ f.conjugate(x)
    truth = gradient(bound, finite)
    surrogate = theorem3(f, x, x, finite.E, finite.mean)
    torch.testing.assert_close(gradient(surrogate, finite), truth, rtol=1e-10, atol=1e-12)


@every
def test_theorem_1_is_the_gradient_at_a_fixed_function(f: Divergence, finite: Finite):
    F = f.conjugate(finite.H)  # a function of x alone
    truth = gradient(-(finite.log_q.exp() @ F), finite)
    torch.testing.assert_close(
        gradient(theorem1(F, finite.E, finite.mean), finite), truth, rtol=1e-10, atol=1e-12
    )


@every
def test_the_bound_is_the_divergence_at_its_maximum_and_less_elsewhere(f: Divergence, finite: Finite):
    """Theorem 2."""
    at = best(finite)
    x = (at.H + at.E).detach()
    divergence = at.log_q.exp() @ f.f(torch.exp(-math.log(30) - at.log_q))
    value = variational_bound(f, x, x, at.mean)
    torch.testing.assert_close(value, divergence, rtol=1e-10, atol=1e-12)
    rng = generator(1)
    for size in (1e-3, 0.1, 1.0):
        for _ in range(20):
            other = x + size * torch.randn(30, generator=rng, dtype=torch.float64)
            assert variational_bound(f, other, other, at.mean) < value


@every
def test_with_the_best_h_the_gradient_is_that_of_the_divergence(f: Divergence, finite: Finite):
    """(17); for KL that is contrastive divergence with exact samples."""
    at = best(finite)
    x = at.H + at.E
    divergence = at.log_q.exp() @ f.f(torch.exp(-math.log(30) - at.log_q))
    got = gradient(theorem3(f, x, x, at.E, at.mean), at)
    torch.testing.assert_close(got, gradient(divergence, at), rtol=1e-9, atol=1e-11)
    if f.name == "kl":
        contrast = gradient(at.E.mean() - at.mean(at.E), at)
        torch.testing.assert_close(got, contrast, rtol=1e-9, atol=1e-11)


class Normalised(NamedTuple):
    """Data and negatives at all points, of one class or of three whose shares are fixed; q moves with E."""

    space: Finite
    labels: Tensor | None

    def within(self, values: Tensor) -> Tensor:
        """Log-softmax over the points of each class."""
        if self.labels is None:
            return torch.log_softmax(values, 0)
        made = torch.zeros_like(values)
        for label in self.labels.unique():
            of = self.labels == label
            made = torch.where(of, values - torch.logsumexp(values[of], 0), made)
        return made

    @property
    def log_q(self) -> Tensor:
        """Of a point and its class, whose share is that of its points among all."""
        share = 0.0 if self.labels is None else (torch.bincount(self.labels)[self.labels].double() / 30).log()
        return self.within(-self.space.E) + share

    def scored(self) -> Scored:
        x, E = self.space.E.detach()[:, None], self.space.E
        drawn = Negatives(x, self.log_q.detach(), given=self.labels)
        labels = None if self.labels is None else torch.cat([self.labels, self.labels])
        return Scored(drawn, torch.cat([x, x]), torch.cat([E, E]), labels)


by_class = pytest.mark.parametrize("labels", [None, torch.arange(30) ** 2 % 7 % 3], ids=["one", "classes"])


@every
@by_class
def test_normalised_exponents_have_the_gradient_of_their_bound(f: Divergence, labels, finite: Finite):
    """For any H, whatever its constants, against automatic differentiation through q itself; for KL it is CD."""
    own = Normalised(finite, labels)
    x = own.within(finite.H) - own.within(-finite.E)
    truth = gradient(f.slope(x).mean() - own.log_q.exp() @ f.conjugate(x), finite)
    scored = own.scored()
    H = finite.H + (7.0 if labels is None else 7.0 * labels)
    got, E = normalised(scored, torch.cat([H, H]) + scored.E, scored.E, energy_moves=True)
    torch.testing.assert_close(got, torch.cat([x, x]))
    mean = scored.drawn.mean
    surrogate = theorem3(f, *scored.split(got), scored.split(E)[1], mean)
    torch.testing.assert_close(gradient(surrogate, finite), truth, rtol=1e-9, atol=1e-11)
    if f.name == "kl":
        contrast = gradient(finite.E.mean() - mean(finite.E), finite)
        torch.testing.assert_close(truth, contrast, rtol=1e-9, atol=1e-11)


@every
@by_class
def test_normalised_exponents_have_the_same_largest_bound(f: Divergence, labels, finite: Finite):
    """Theorem 2 where H is a density by class; nothing pulls H there, and its constants nowhere."""
    own = Normalised(finite._replace(E=finite.E.detach()), labels)
    scored, x = own.scored(), -math.log(30) - own.log_q

    def bound_of(H: Tensor) -> tuple[Tensor, Tensor]:
        H = H.clone().requires_grad_()
        made, _ = normalised(scored, torch.cat([H, H]) + scored.E, scored.E, energy_moves=False)
        bound = variational_bound(f, *scored.split(made), scored.drawn.mean)
        return bound, torch.autograd.grad(bound, H)[0]

    most, pull = bound_of(torch.full((30,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(most, own.log_q.exp() @ f.f(x.exp()), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(pull, torch.zeros_like(pull), rtol=0, atol=1e-10)
    less, pull = bound_of(finite.H)
    assert less < most
    classes = torch.zeros(30, dtype=torch.long) if labels is None else labels
    assert torch.zeros(3, dtype=torch.float64).index_add(0, classes, pull).abs().max() < 1e-9


@by_class
@pytest.mark.parametrize("estimator", ["theorem3", "theorem1"])
def test_samples_follow_the_energy_within_their_class(estimator, labels, finite: Finite):
    """The gradient of the bound averaged over classes, through q(x | y); one covariance over all is another."""
    own, f = Normalised(finite, labels), DIVERGENCES["js"]
    scored, exponent = own.scored(), finite.H + finite.E
    if estimator == "theorem3":
        truth = f.slope(exponent).mean() - own.log_q.exp() @ f.conjugate(exponent)
    else:
        truth = -(own.log_q.exp() @ f.conjugate(exponent.detach()))

    class Ratio(nn.Module):
        def forward(self, x: Tensor, E: Tensor, *labels: Tensor) -> Tensor:
            return torch.cat([finite.H, finite.H]) + (E if estimator == "theorem3" else E.detach())

    context = Context(
        lambda x: x, {"ratio": Ratio()}, scored.x, fit_gaussian(scored.x[:30, 0, None]), generator(0)
    )
    method = FDivergence(f="js", estimator=estimator)
    loss, _ = method.loss(context, None, "energy", scored.x[:30], scored)
    truth = gradient(truth, finite)
    torch.testing.assert_close(gradient(loss, finite), truth, rtol=1e-9, atol=1e-11)
    if labels is not None:
        loss, _ = method.loss(context, None, "energy", scored.x[:30], scored._replace(labels=None))
        assert (gradient(loss, finite) - truth).norm() > 0.01 * truth.norm()


def test_a_class_without_negatives_is_normalised_by_all_of_them():
    x = torch.zeros(4, 1)
    scored = Scored(Negatives(x[:2]), x, torch.tensor([0.0, 0.0, 1.0, 3.0]), torch.tensor([5, 1, 1, 2]))
    made, _ = normalised(scored, scored.E, scored.E, energy_moves=False)
    every_one = torch.logsumexp(torch.tensor([1.0, 3.0]), 0) - math.log(2)
    torch.testing.assert_close(made, torch.tensor([-float(every_one), -1.0, 0.0, 0.0]))


# ---- by quadrature, for the paper's target and a Gaussian model


class Bell(nn.Module):
    """½((x−μ)/σ)² with parameters μ and σ."""

    def __init__(self, mu: float = 0.0, sigma: float = 1.0):
        super().__init__()
        self.mu, self.sigma = nn.Parameter(torch.tensor(mu)), nn.Parameter(torch.tensor(sigma))
        self.event_shape = (1,)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * ((x[:, 0] - self.mu) / self.sigma).square()

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        return self.mu + self.sigma * torch.randn(n, 1, generator=rng).to(self.mu)


class LogMixture(nn.Module):
    """log of w·N(a, s²) + (1−w)·N(b, t²): an H whose e^{H+E} falls like p/q does."""

    def __init__(self, w: float, a: float, s: float, b: float, t: float):
        super().__init__()
        self.energy = ms.energies.GaussianMixture(
            torch.tensor([[a], [b]]), torch.tensor([s, t]), torch.tensor([w, 1 - w]).log()
        ).double()

    def forward(self, x: Tensor) -> Tensor:
        return -self.energy(x.double())


TARGET = LogMixture(0.33, -1.0, 0.25, 2.0, math.sqrt(2))
OTHER = LogMixture(0.4, -0.8, 0.35, 1.8, math.sqrt(2))
"""Wrong on purpose, so that no term of (18) vanishes; its tail is the target's."""
MU, SIGMA = 1.5, 1.4
"""Between 1.23 and 1.63 the estimator has a finite variance for every divergence here."""
DRAWS, BATCHES = 1_000_000, 100


def draws() -> tuple[Tensor, Tensor, Tensor]:
    rng = generator(7)
    p = TARGET.energy.sample(DRAWS, rng)
    q = MU + SIGMA * torch.randn(DRAWS, 1, generator=rng, dtype=torch.float64)
    H = OTHER(torch.cat([p, q]))
    return p, q, H


def exact_gradient(f: Divergence) -> Tensor:
    """∇ of (14) in (μ, σ) by the trapezoid rule, differentiating through q."""
    x = torch.linspace(-25, 25, 40_001, dtype=torch.float64)
    mu, sigma = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (MU, SIGMA))
    E = 0.5 * ((x - mu) / sigma).square()
    q = torch.softmax(-E, 0)
    exponent = OTHER(x[:, None]) + E
    p = torch.softmax(TARGET(x[:, None]), 0)
    bound = (p * f.slope(exponent)).sum() - (q * f.conjugate(exponent)).sum()
    return torch.stack(torch.autograd.grad(bound, (mu, sigma)))


def estimates(f: Divergence, sample: tuple[Tensor, Tensor, Tensor], without_product: bool = False) -> Tensor:
    """Theorem 3's gradient on each batch of draws, `(batches, 2)`, as training would compute it."""
    p, q, H = sample
    energy = Bell(MU, SIGMA).double()
    parts = []
    for data, model, H_data, H_model in zip(
        *(t.chunk(BATCHES) for t in (p, q, H[:DRAWS], H[DRAWS:])), strict=True
    ):
        E_model = energy(model)
        x_model = H_model + E_model
        loss = theorem3(f, H_data + energy(data), x_model, E_model, torch.mean)
        if without_product:  # the mutant: adds the term −E_q[F]·E_q[∇E] back
            loss = loss + f.conjugate(x_model).mean().detach() * E_model.mean()
        parts.append(torch.stack(torch.autograd.grad(loss, (energy.mu, energy.sigma))))
    return torch.stack(parts)


@pytest.fixture(scope="module")
def sample():
    return draws()


@every
def test_theorem_3_over_a_million_draws(f: Divergence, sample):
    """Within four standard errors of quadrature; without the product of means it is not."""
    truth = exact_gradient(f)
    got, error = mean_and_error(estimates(f, sample))
    assert ((got - truth).abs() <= 4 * error).all(), (got, truth, error)
    wrong, error = mean_and_error(estimates(f, sample, without_product=True))
    assert abs(wrong[1] - truth[1]) > 4 * error[1]  # σ: the mean of ∂E/∂μ is zero


# ---- as a method


def context_of(energy: nn.Module, data: Tensor, method: FDivergence) -> Context:
    noise = fit_gaussian(data)
    players = {"energy": energy, **method.companions(energy, data, noise, 0)}
    return Context(energy, players, data, noise, generator(0))


@pytest.mark.parametrize("estimator", ["theorem3", "theorem1"])
def test_the_default_ratio_begins_at_one(estimator):
    data = torch.randn(20, 3, generator=generator(0))
    energy = ms.energies.MLP(3, hidden=(8,))
    method = FDivergence(estimator=estimator)
    ratio = context_of(energy, data, method).players["ratio"]
    assert torch.equal(ratio(data, energy(data)), torch.zeros(20))


def test_weighted_negatives_weigh_every_mean(finite: Finite):
    """`loss` with log-weights is the finite-space surrogate, so sources with weights are used as they should be."""
    method = FDivergence(f="hellinger")
    x = torch.arange(30.0, dtype=torch.float64)[:, None]

    class Ratio(nn.Module):
        def forward(self, at: Tensor, E: Tensor) -> Tensor:
            return finite.H[at[:, 0].long()] + E

    drawn = Negatives(x, finite.log_q.detach() + 3.0)
    both = Scored(drawn, torch.cat([x, x]), torch.cat([finite.E, finite.E]))
    context = Context(lambda x: finite.E, {"ratio": Ratio()}, x, fit_gaussian(x), generator(0))
    loss, _ = method.loss(context, None, "energy", x, both)
    exponent = finite.H + finite.E
    truth = theorem3(DIVERGENCES["hellinger"], exponent, exponent, finite.E, finite.mean)
    torch.testing.assert_close(gradient(loss, finite), gradient(truth, finite))
    up, metrics = method.loss(context, None, "ratio", x, both)
    torch.testing.assert_close(
        -up, variational_bound(DIVERGENCES["hellinger"], exponent, exponent, finite.mean)
    )
    assert metrics["exponent_max"] == exponent.max()


def turn(method: FDivergence, player: str, x: Tensor, energy: nn.Module) -> tuple[Tensor, dict]:
    """The loss of one turn on data `x` and on negatives −x, and what is logged."""
    context = context_of(energy, x, method)
    both = torch.cat([x, -x])
    return method.loss(context, None, player, x, Scored(Negatives(-x), both, energy(both)))


def test_a_penalty_on_exponents_is_in_the_loss_of_h_alone():
    """Mean squares of H + E as they are before the cut; the energy's loss has none of it."""
    x, energy = toy(200), Bell(0.3)
    (plain, bound), (held, same) = (
        turn(FDivergence(f="js", ratio=network(), exponent_l2=weight, clip_exponent=0.1), "ratio", x, energy)
        for weight in (0.0, 0.5)
    )
    H = network()
    at_data, at_model = ((H(at) + energy(at)).square().mean() for at in (x, -x))
    torch.testing.assert_close(held - plain, 0.5 * (at_data + at_model))
    assert bound == same
    losses = [
        turn(FDivergence(f="js", ratio=network(), exponent_l2=w), "energy", x, energy)[0] for w in (0.0, 0.5)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("f", ["kl", "js", "hellinger", "reverse-kl"])
def test_a_constant_of_the_energy_is_no_part_of_normalised_exponents(f):
    """Nothing pulls it, however far off it is; without `normalise` every exponent is cut at a bound."""
    x, height = toy(200), nn.Parameter(torch.tensor(40.0))

    class Raised(Bell):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + height

    energy, options = Raised(0.3, 5.0), {"f": f, "ratio": network(), "clip_exponent": 5.0}
    loss, _ = turn(FDivergence(normalise=True, **options), "energy", x, energy)
    pulls = torch.autograd.grad(loss, [height, energy.mu])
    assert abs(pulls[0]) < 1e-5
    assert abs(pulls[1]) > 1e-3
    _, metrics = turn(FDivergence(**options), "ratio", x, energy)
    assert metrics["exponent_min"] == metrics["exponent_max"] == 5.0
    _, metrics = turn(FDivergence(normalise=True, **options), "ratio", x, energy)
    assert -5 < metrics["exponent_min"] < 0 < metrics["exponent_max"] < 5


def toy(rows: int = 4000) -> Tensor:
    return TARGET.energy.sample(rows, generator(3)).float()


@cache
def short(f, steps: int = 150, precision: str = "64-true", **options) -> tuple[Bell, ms.Run]:
    energy = Bell(0.0, 1.5)
    method = FDivergence(source=ExactDraws(), f=f, ratio=network(), energy_rate=1.0, **options)
    settings = {"batch_size": 500, "learning_rate": 1e-2, "log_every": 50, "evaluate": False}
    return energy, ms.fit(energy, toy(), method, steps, precision=precision, seed=5, **settings)


def network(hidden: int = 16) -> nn.Module:
    rng = generator(11)
    net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1), nn.Flatten(0))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=rng))
    return net


def test_a_users_u_log_u_trains_as_kl_does():
    (named, _), (own, _) = short("kl"), short(lambda u: u * torch.log(u))
    assert abs(named.mu.item()) > 0.1  # it moved
    assert own.mu.item() == pytest.approx(named.mu.item(), abs=1e-3)
    assert own.sigma.item() == pytest.approx(named.sigma.item(), abs=1e-3)


def test_different_divergences_train_differently():
    assert abs(short("kl")[0].mu.item() - short("reverse-kl")[0].mu.item()) > 1e-2


def test_one_ratio_step_more_is_another_course():
    energy, run = short("js", steps=20, ratio_steps=2)
    assert energy.mu.item() != short("js", steps=20)[0].mu.item()
    assert {"divergence", "exponent_min", "exponent_max", "grad_norm_ratio"} <= set(run.history[-1])


# ---- the density ratio of a run


@pytest.fixture(scope="module")
def js_run() -> ms.Run:
    return short("js", steps=600, precision="32-true")[1]


def test_the_ratio_turns_model_averages_into_data_averages(js_run):
    """Its mean over the model is near 1, and weighted by it the model's mean moves to the data's."""
    x = js_run.energy.sample(50_000, generator(0)).detach()
    assert js_run.log_ratio(x).exp().mean().item() == pytest.approx(1.0, abs=0.1)
    weights = js_run.importance_weights(x)
    assert weights.sum().item() == pytest.approx(1.0)
    share = float(((x[:, 0] + 1).abs() < 0.5).double() @ weights)
    in_data = float(((toy()[:, 0] + 1).abs() < 0.5).double().mean())
    plain = float(((x[:, 0] + 1).abs() < 0.5).double().mean())
    assert abs(share - in_data) < 0.25 * abs(plain - in_data)


def test_corrected_samples_are_weighted_walkers(js_run):
    plain, corrected = js_run.sample(2000, seed=1), js_run.sample(2000, seed=1, corrected=True)
    assert torch.equal(plain.x, corrected.x)
    torch.testing.assert_close(
        corrected.log_weight - plain.log_weight, js_run.log_ratio(plain.x).double(), rtol=1e-6, atol=1e-6
    )
    even = corrected.resampled()
    assert not even.log_weight.any()
    assert wasserstein(even.x, toy()) < 0.5 * wasserstein(plain.resampled().x, toy())


def wasserstein(x: Tensor, y: Tensor) -> float:
    grid = torch.linspace(0.0005, 0.9995, 1000, dtype=torch.float64)
    return float((x.flatten().double().quantile(grid) - y.flatten().double().quantile(grid)).abs().mean())


def test_rejection_sampling_gives_the_target_with_an_exact_ratio():
    rng = generator(2)
    x = 0.8 + 1.8 * torch.randn(200_000, 1, generator=rng, dtype=torch.float64)
    log_q = -0.5 * ((x[:, 0] - 0.8) / 1.8).square() - math.log(1.8 * math.sqrt(2 * math.pi))
    kept = rejection_sample(x, TARGET(x) - log_q, rng)
    near = ((kept.x[:, 0] + 1).abs() < 0.5).double()
    truth = 0.33 * math.erf(2 / math.sqrt(2)) + 0.67 * _normal_mass(-1.5, -0.5, 2.0, math.sqrt(2))
    assert_within(near.mean(), truth, near.std() / math.sqrt(len(near)))
    assert kept.acceptance == pytest.approx(
        math.exp(-kept.log_bound), abs=0.01
    )  # 1/M for normalised densities
    assert kept.beyond == 0.0
    half = rejection_sample(x, TARGET(x) - log_q, rng, log_bound=kept.log_bound - math.log(2))
    assert half.acceptance > 1.5 * kept.acceptance
    assert 0 < half.beyond < 0.3


def _normal_mass(low: float, high: float, mean: float, sd: float) -> float:
    def below(v: float) -> float:
        return 0.5 * (1 + math.erf((v - mean) / (sd * math.sqrt(2))))

    return below(high) - below(low)


def test_bad_ratios_are_refused():
    x = torch.zeros(4, 1)
    with pytest.raises(InputError, match="4 finite numbers"):
        rejection_sample(x, torch.tensor([0.0, math.nan, 0.0, 0.0]), generator(0))
    with pytest.raises(InputError, match=r"must map \(B, \*event\) to \(B,\)"):
        ms.fit(Bell(), toy(50), FDivergence(ratio=nn.Linear(1, 1)), steps=1, evaluate=False)
    with pytest.raises(InputError, match="fails on rows"):
        ms.fit(Bell(), toy(50), FDivergence(ratio=nn.Linear(2, 1)), steps=1, evaluate=False)
    run = ms.fit(Bell(), toy(50), PersistentCD(), steps=1, evaluate=False)
    with pytest.raises(InputError, match="learns no density ratio"):
        run.log_ratio(x)


def test_the_ratio_is_read_back_from_disk(tmp_path):
    method = FDivergence(f="js", source=PersistentCD(walkers=64))
    run = ms.fit(None, toy(200), method, steps=5, out=tmp_path / "a", evaluate=False)
    x = toy(20)
    assert torch.equal(ms.load_run(tmp_path / "a").log_ratio(x), run.log_ratio(x))
    own = replace(method, ratio=network())
    run = ms.fit(None, toy(200), own, steps=5, out=tmp_path / "b", evaluate=False)
    assert torch.equal(ms.load_run(tmp_path / "b", method=own).log_ratio(x), run.log_ratio(x))
    with pytest.raises(InputError, match="method="):
        ms.load_run(tmp_path / "b")


def test_the_command_line_draws_corrected_samples(tmp_path):
    from typer.testing import CliRunner

    from metastable.cli.main import app

    method = FDivergence(f="js", source=Jarzynski(walkers=64, populations=4))
    run = ms.fit(None, toy(200), method, steps=5, out=tmp_path / "run", evaluate=False)
    out = tmp_path / "x.npy"
    command = ["sample", str(tmp_path / "run"), "--n", "50", "--steps", "5", "--out", str(out), "--weighted"]
    plain = CliRunner().invoke(app, command)
    before = np.load(out.with_suffix(".log_weight.npy"))
    corrected = CliRunner().invoke(app, [*command, "--corrected"])
    assert (plain.exit_code, corrected.exit_code) == (0, 0), plain.output + corrected.output
    assert "density ratio" in corrected.output
    difference = np.load(out.with_suffix(".log_weight.npy")) - before
    expected = run.log_ratio(torch.from_numpy(np.load(out))).double().numpy()
    np.testing.assert_allclose(difference, expected, rtol=1e-5, atol=1e-5)


# ---- overflow


class Steep(nn.Module):
    """An H that is far too large."""

    def __init__(self, height: float):
        super().__init__()
        self.height = nn.Parameter(torch.tensor(height))

    def forward(self, x: Tensor) -> Tensor:
        return self.height + 0.0 * x[:, 0]


def test_an_overflow_is_reported_with_the_exponent_and_never_clipped():
    """The line holds updates after the overflow too, in which nothing is a number any more."""
    method = FDivergence(source=ExactDraws(), f="pearson", ratio=Steep(60.0))
    with pytest.raises(DivergenceError, match=r"H \+ E, which is exponentiated, went from 60.* to 6\d\.\d"):
        ms.fit(Bell(), toy(100), method, steps=10, evaluate=False)


def test_clipping_is_a_choice():
    method = FDivergence(source=ExactDraws(), f="pearson", ratio=Steep(60.0), clip_exponent=5.0)
    run = ms.fit(Bell(), toy(100), method, steps=10, evaluate=False)
    assert run.history[-1]["exponent_max"] == 5.0


@each(
    "make, path",
    [
        (lambda: FDivergence(f="klx"), "f-ebm.f"),
        (lambda: FDivergence(f="alpha"), "f-ebm.alpha"),
        (lambda: FDivergence(f=lambda u: u**2), "f-ebm.f"),
        (lambda: FDivergence("js"), "f-ebm.source"),
        (lambda: FDivergence(ratio_steps=0), "f-ebm.ratio_steps"),
        (lambda: FDivergence(energy_rate=0.0), "f-ebm.energy_rate"),
        (lambda: FDivergence(estimator="theorem2"), "f-ebm.estimator"),
        (lambda: FDivergence(clip_exponent=-1.0), "f-ebm.clip_exponent"),
        (lambda: FDivergence(exponent_l2=-1.0), "f-ebm.exponent_l2"),
        (lambda: FDivergence(exponent_l2=math.inf), "f-ebm.exponent_l2"),
        (lambda: FDivergence(estimator="theorem1", normalise=True), "f-ebm.normalise"),
        (lambda: ExactDraws(step_size=0.1), "exact.step_size"),
        (lambda: ExactDraws(walkers=0), "exact.walkers"),
    ],
)
def test_bad_settings_name_field_and_value(make, path):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == path


def test_exact_draws_need_an_energy_that_samples():
    with pytest.raises(InputError, match=r"no sample\(n, rng\)"):
        ms.fit(ms.energies.MLP(1), toy(50), ExactDraws(), steps=1, evaluate=False)


def test_a_network_needs_an_h_that_is_faster_than_e():
    """At the default rates the exponents stay near log p/q; at equal ones the energy runs away."""
    x = ms.energies.two_modes(6.0, (0.5, 0.5), dim=2).sample(1000, generator(4))
    extremes = {}
    for rate in (0.2, 1.0):
        method = FDivergence(f="js", source=PersistentCD(walkers=256), energy_rate=rate)
        run = ms.fit(None, x, method, steps=100, evaluate=False, batch_size=256)
        extremes[rate] = max(-run.history[-1]["exponent_min"], run.history[-1]["exponent_max"])
    assert extremes[0.2] < 10
    assert extremes[1.0] > 10 * extremes[0.2]


def test_an_f_that_is_a_line_where_data_are_is_refused_when_training_starts():
    """Strictly convex up to u = 500; a ratio that begins at e⁸ lies where it is not."""
    line = FDivergence(f=lambda u: torch.where(u < 500, (u - 1) ** 2, 998 * u - 249_999), ratio=Eight())
    x = torch.randn((30, 1), generator=torch.Generator().manual_seed(0))
    energy = Flat()
    players = {"energy": energy, **line.companions(energy, x, fit_gaussian(x), 0)}
    context = Context(energy, players, x, fit_gaussian(x), torch.Generator())
    with pytest.raises(ConfigError, match=r"f-ebm\.f: must be strictly convex, but its slope goes from 998"):
        line.start(context)
    near = FDivergence(f=line.f)
    near.start(
        Context(
            energy,
            players | near.companions(energy, x, fit_gaussian(x), 0),
            x,
            fit_gaussian(x),
            torch.Generator(),
        )
    )


class Flat(torch.nn.Module):
    """E = 0 with a parameter that does nothing."""

    def __init__(self):
        super().__init__()
        self.offset = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return 0 * x[:, 0] + self.offset


class Eight(Flat):
    """H = 8."""

    def forward(self, x):
        return super().forward(x) + 8
