"""Chains that carry labels: what they learn of p(x | y), against closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metastable as ms
from metastable.core.batch import Batch, Beside
from metastable.core.by_class import OfLabels, draw_labels
from metastable.core.errors import ConfigError, InputError
from metastable.core.method import Context, Negatives
from metastable.core.random import generator
from metastable.energies import MLP, ClassEnergy, JointEnergy
from metastable.kernels import MALA
from metastable.methods import (
    JEM,
    AdaptiveNCE,
    ContrastiveDivergence,
    FDivergence,
    Jarzynski,
    Mixed,
    PersistentCD,
    Robust,
    ShortRun,
)
from metastable.proposals import Gaussian
from metastable.walkers.population import Population

SHARES = torch.tensor([0.3, 0.7])
MEANS = torch.tensor([-1.0, 2.0])
SCALES = torch.tensor([0.5, 1.0])


class Pair(nn.Module):
    """½((x − μ_y)/σ_y)² for two classes, `(B, 1)` to `(B, 2)`."""

    event_shape = (1,)

    def __init__(self, mu: Tensor, sigma: Tensor):
        super().__init__()
        self.mu = nn.Parameter(mu.clone().double())
        self.register_buffer("sigma", sigma.clone().double())

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * ((x - self.mu) / self.sigma).square()


def pairs(n: int, mu: Tensor, seed: int) -> Batch:
    """Rows of two Gaussians with their labels, `SHARES` of each."""
    rng = generator(seed)
    y = (torch.rand(n, generator=rng) < SHARES[1]).long()
    x = mu[y] + SCALES[y] * torch.randn(n, generator=rng)
    return Batch(x[:, None].double(), y, Beside.LABELS)


def context_of(energy: nn.Module, data: Batch, **players: nn.Module) -> Context:
    noise = Gaussian(torch.zeros(1), 2.0).double()
    given = data.given
    return Context(energy, {"energy": energy, **players}, data.x, noise, generator(5), given=given)


def gradient(method: Any, context: Context, batch: Any, negatives: Any) -> Tensor:
    loss, _ = method.loss(context, None, "energy", batch, negatives)
    return torch.autograd.grad(loss, context.energy.network.mu)[0]  # pyright: ignore


def scores(made: list[Tensor], exact: Tensor) -> Tensor:
    """How many standard errors the mean of independent gradients is off, at worst."""
    all_ = torch.stack(made)
    return ((all_.mean(0) - exact) / (all_.std(0) / len(made) ** 0.5)).abs().max()


def off_by(method: Any, mixed_up: bool = False) -> Tensor:
    """z-score of a method's gradient at μ = `MEANS` on data around 0.5 more, with chains where the model is.

    Exact: ∂/∂μ_y of E_p[E] − E_q[E] is −π_y(m_y − μ_y)/σ_y².
    """
    energy = ClassEnergy(Pair(MEANS, SCALES), 2, shares=SHARES)
    made = []
    for seed in range(20):
        data, start = pairs(2000, MEANS + 0.5, 100 + seed), pairs(2000, MEANS, seed)
        context = context_of(energy, start)
        state = method.start(context)
        batch = start if isinstance(method, ContrastiveDivergence) else data
        drawn, _, _ = method.negatives(context, state, batch)
        drawn = method.drawn(drawn)[0]
        if mixed_up:
            drawn = drawn._replace(given=drawn.given.roll(1))
        made.append(gradient(ContrastiveDivergence(labels=True), context, data, drawn))
    return scores(made, -SHARES * 0.5 / SCALES**2)


KERNEL = {"kernel": MALA(0.2), "steps": 2, "labels": True}


@pytest.mark.parametrize(
    "method",
    [
        ContrastiveDivergence(**KERNEL),
        PersistentCD(**KERNEL),
        PersistentCD(batch=1000, **KERNEL),
        Mixed(sources=(PersistentCD(**KERNEL), ContrastiveDivergence(walkers=500, **KERNEL)), labels=True),
    ],
    ids=["cd", "pcd", "pcd in parts", "mixed"],
)
def test_gradient_of_chains_with_labels(method: Any) -> None:
    """Within four standard errors where each chain has its own label, and far off where labels are mixed up."""
    method = method if not isinstance(method, Mixed) else replace(method, sources=method.sources[:1])
    assert off_by(method) < 4
    assert off_by(method, mixed_up=True) > 8


def test_data_and_negatives_are_lowered_and_raised_under_their_labels() -> None:
    """Gradients flow into the classes that are there, and into no other."""
    energy = ClassEnergy(Pair(MEANS, SCALES), 2)
    x = torch.ones(4, 1, dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.int64)
    context = context_of(energy, Batch(x, ones, Beside.LABELS))
    made = gradient(PersistentCD(labels=True), context, Batch(x, ones), Negatives(x - 3, given=ones))
    assert made[0] == 0
    torch.testing.assert_close(made[1], torch.tensor(-3.0, dtype=torch.float64))  # (μ − 1) − (μ + 2)


# ---- Jarzynski: walkers of p(x, y), weighed and resampled together


def tilted(a: Tensor, c: Tensor) -> ClassEnergy:
    """q = N(0, 2²), f(x)[y] = a_y·x + c_y: then p(x | y) = N(−4a_y, 2²) and Z_y = exp(8a_y² ÷ 4 − c_y)."""
    network = nn.Linear(1, 2).double()
    energy = ClassEnergy(network, 2, Gaussian(torch.zeros(1), 2.0).double(), SHARES)
    with torch.no_grad():
        network.weight.copy_(a[:, None])
        network.bias.copy_(c)
    return energy


A, C = torch.tensor([0.4, -0.3]), torch.tensor([0.5, -0.4])


def followed(method: Jarzynski) -> tuple[Any, Context, Any]:
    """Walkers that followed a straight path of θ from the reference to (A, C)."""
    energy = tilted(0 * A, 0 * C)
    context = context_of(energy, pairs(50, MEANS, 0))
    state = method.start(context)
    for k in range(1, 11):
        _, state, _ = method.negatives(context, state, None)
        with torch.no_grad():
            energy.network.weight.copy_(k / 10 * A[:, None])  # pyright: ignore
            energy.network.bias.copy_(k / 10 * C)  # pyright: ignore
        context.step = k
        state, _ = method.advance(context, state)
    return method, context, state


def z_scores(method: Any, context: Context, state: Any) -> list[float]:
    """log Z, the share of class 1 and the mean of each class against their closed forms, in standard errors."""
    Z = SHARES * (2 * A**2 - C).exp()
    log_z = method.log_partition(context, state)
    found = [(log_z.value - float(Z.sum().log())) / log_z.std_error]
    following = state.following
    weights = following.by_group(following.comparable_log_weight()).softmax(-1)
    x, y = following.by_group(following.x[:, 0]), following.by_group(following.given)
    for values, exact in [
        ((weights * y).sum(1), float(Z[1] / Z.sum())),
        *(((weights * (y == k) * x).sum(1) / (weights * (y == k)).sum(1), -4 * float(A[k])) for k in (0, 1)),
    ]:
        found.append(float((values.mean() - exact) / (values.std() / len(values) ** 0.5)))
    return found


JARZYNSKI = {"walkers": 8192, "populations": 16, "pace": None, "labels": True}
PLAIN = Jarzynski(kernel=MALA(0.5), **JARZYNSKI)


@pytest.mark.parametrize(
    "method",
    [
        PLAIN,
        replace(PLAIN, resample="lag", lag=1),
        replace(
            PLAIN, batch=1024, gradient="batch", resample="lag", lag=3, scheme="multinomial", order="none"
        ),
        Jarzynski(step_size=0.1, **JARZYNSKI),
    ],
    ids=["mala", "resampled every time", "in parts", "ula"],
)
def test_weighted_walkers_stand_for_x_and_y(method: Jarzynski) -> None:
    assert max(map(abs, z_scores(*followed(method)))) < 4


def test_labels_that_stay_behind_when_walkers_are_resampled_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Population.resample

    def forgetful(self: Population, *args: Any, **kwargs: Any) -> Population:
        return own(self, *args, **kwargs)._replace(given=self.given)

    monkeypatch.setattr(Population, "resample", forgetful)
    assert max(map(abs, z_scores(*followed(replace(PLAIN, resample="lag", lag=1))))) > 8


def test_systematic_resampling_leaves_each_class_its_weight() -> None:
    """To within one walker: they are sorted by class first."""
    rng = generator(0)
    n = 1000
    y = torch.randint(3, (n,), generator=rng)
    x = torch.randn(n, 2, generator=rng, dtype=torch.float64)
    walkers = Population.start(x, x[:, 0], x[:0], torch.zeros(1), y)
    walkers = walkers._replace(log_weight=torch.randn(n, generator=rng, dtype=torch.float64))
    before = n * torch.zeros(3, dtype=torch.float64).index_add(0, y, walkers.log_weight.softmax(0))
    for order in ("principal", "energy"):
        after = walkers.resample(torch.tensor([True]), "systematic", order, rng)
        assert after.given is not None
        assert float((after.given.bincount(minlength=3) - before).abs().max()) <= 1
        origin = after.ancestor
        assert torch.equal(after.given, y[origin])
        assert torch.equal(after.x, x[origin])


def test_a_start_without_an_exact_law_is_weighed_for_both() -> None:
    """Sequential Monte Carlo of the sum over classes, then a label from p(y | x)."""
    energy = ClassEnergy(Pair(MEANS, SCALES), 2, shares=SHARES)
    context = context_of(energy, pairs(50, MEANS, 0))
    method = Jarzynski(walkers=8192, populations=16, labels=True)
    state = method.start(context)
    z = method.log_partition(context, state)
    Z = SHARES * SCALES * (2 * torch.pi) ** 0.5
    assert abs(z.value - float(Z.sum().log())) < 4 * z.std_error + 1e-3
    following = state.following
    assert following is not None
    weights = following.by_group(following.log_weight).softmax(-1)
    share = (weights * following.by_group(following.given)).sum(1)
    assert abs(float(share.mean() - Z[1] / Z.sum())) < 4 * float(share.std()) / 4 + 1e-3


# ---- losses on top


class TrueRatio(nn.Module):
    """H(x, y) = log p(x | y) of the data, up to a constant."""

    def __init__(self, mean: Tensor):
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return -0.5 * ((x[:, 0] - self.mean[labels]) / SCALES[labels]).square()  # pyright: ignore


@pytest.mark.parametrize("mixed_up", [False, True])
def test_f_ebm_with_labels_has_the_gradient_of_kl(mixed_up: bool) -> None:
    """With the true ratio, Theorem 3 for KL is the gradient of the likelihood; for labels mixed up it is not."""
    energy = ClassEnergy(Pair(MEANS, SCALES), 2, shares=SHARES)
    method = FDivergence(source=PersistentCD(**KERNEL), f="kl", ratio=TrueRatio(MEANS + 0.2).double())
    made = []
    for seed in range(20):
        data, start = pairs(2000, MEANS + 0.2, 100 + seed), pairs(2000, MEANS, seed)
        ratio = method.companions(energy, start, None, 0)["ratio"]  # pyright: ignore
        context = context_of(energy, start, ratio=ratio)
        if mixed_up:
            data = replace(data, given=data.conditions.roll(1))
        drawn, state, _ = method.negatives(context, method.start(context), data)
        loss, _ = method.loss(context, state, "energy", data, drawn)
        made.append(torch.autograd.grad(loss, energy.network.mu)[0])  # pyright: ignore
    off = scores(made, -SHARES * 0.2 / SCALES**2)
    assert (off > 8) if mixed_up else (off < 4)


def test_f_ebm_adds_the_penalty_of_its_source() -> None:
    """`energy_l2`·(E(x⁺)² + E(x⁻)²), in the energy's loss and not in the ratio's."""
    energy = ClassEnergy(Pair(MEANS, SCALES), 2)
    data = pairs(50, MEANS, 0)
    losses = {}
    for penalty in (0.0, 0.1):
        method = FDivergence(source=PersistentCD(energy_l2=penalty, **KERNEL), f="js")
        context = context_of(energy, data, **method.companions(energy, data, None, 0))  # pyright: ignore
        drawn, state, _ = method.negatives(context, method.start(context), data)
        losses[penalty] = [method.loss(context, state, p, data, drawn)[0] for p in ("ratio", "energy")]
        E_data, E_model = drawn.split(drawn.E)
    added = 0.1 * (E_data.square().mean() + E_model.square().mean())
    assert losses[0.1][0] == losses[0.0][0]
    torch.testing.assert_close(losses[0.1][1] - losses[0.0][1], added)


def test_robust_and_adance_see_the_labels() -> None:
    """At β = 0 and at the start of an interval both are the plain gradient (adance: half of it)."""
    energy = ClassEnergy(Pair(MEANS, SCALES), 2, shares=SHARES)
    data = pairs(200, MEANS + 0.5, 0)
    plain = PersistentCD(**KERNEL)
    expected = None
    for method, factor in ((plain, 1), (Robust(source=plain, beta=0.0), 1), (AdaptiveNCE(source=plain), 0.5)):
        context = context_of(energy, data)
        companions = method.companions(energy, data, context.noise, 0)
        context = replace(context, players={"energy": energy, **companions}, rng=generator(3))
        drawn, _, _ = method.negatives(context, method.start(context), data)
        made = gradient(method, context, data, drawn)
        expected = made if expected is None else expected
        torch.testing.assert_close(made, factor * expected)


# ---- energies by class


def test_an_energy_by_class_sums_to_that_of_x() -> None:
    """exp(−E(x)) = Σ_y exp(−E(x, y)), p(y | x) from the logits, and every way of asking agrees."""
    x = torch.randn(7, 3, generator=generator(0))
    y = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    by_class = ClassEnergy(
        MLP(3, (8,), seed=1, outputs=4), 4, Gaussian(torch.zeros(3), 1.0), zero_start=False
    )
    joint = JointEnergy(MLP(3, (8,), seed=1, outputs=4), output_scale=1.0)
    for energy in (by_class, by_class.powered(3.0), joint):
        every = energy.class_energies(x)
        torch.testing.assert_close(energy(x), -torch.logsumexp(-every, 1))
        torch.testing.assert_close(energy(x, y), every.gather(1, y[:, None])[:, 0])
        torch.testing.assert_close(energy(x, y), OfLabels(energy, y)(x))
        torch.testing.assert_close(energy.given(2)(x), every[:, 2])
        torch.testing.assert_close(energy.logits(x).softmax(1), (-every).softmax(1))
    torch.testing.assert_close(by_class.powered(3.0).class_energies(x), 3 * by_class.class_energies(x))


def test_labels_are_drawn_from_their_law() -> None:
    energy = ClassEnergy(Pair(MEANS, SCALES), 2, shares=SHARES)
    x = torch.full((20_000, 1), 0.2, dtype=torch.float64)
    p = float(energy.logits(x[:1]).detach().softmax(1)[0, 1])
    share = float(draw_labels(energy, x, generator(0)).double().mean())
    assert abs(share - p) < 4 * (p * (1 - p) / len(x)) ** 0.5


# ---- from data to samples


def few() -> tuple[Tensor, Tensor]:
    data = pairs(200, MEANS, 0)
    return data.x.float().expand(-1, 2) + 0.3 * torch.randn(200, 2, generator=generator(1)), data.conditions


@pytest.mark.parametrize(
    "method",
    [
        PersistentCD(walkers=64, batch=32, labels=True),
        ShortRun(walkers=32, steps=2, labels=True),
        Jarzynski(walkers=128, populations=2, labels=True),
        FDivergence(source=PersistentCD(walkers=64, labels=True, energy_l2=0.01)),
        Robust(source=Jarzynski(walkers=128, populations=2, labels=True), beta=0.1),
    ],
    ids=lambda m: m.name,
)
def test_a_run_is_trained_resumed_read_back_and_sampled_by_class(method: Any, tmp_path: Any) -> None:
    x, y = few()
    energy = {"name": "mlp", "hidden": [8]}
    options: dict[str, Any] = {"labels": y, "evaluate": False, "checkpoint_every": 2, "log_every": 1}
    whole = ms.fit(energy, x, method, 4, out=tmp_path / "whole", schedule=None, learning_rate=0.01, **options)
    ms.fit(energy, x, method, 2, out=tmp_path / "parts", learning_rate=0.01, **options)
    parts = ms.fit(energy, x, method, 4, out=tmp_path / "parts", resume=True, learning_rate=0.01, **options)
    read = ms.load_run(tmp_path / "whole")
    for other in (parts, read):
        for name, value in whole.energy.state_dict().items():  # pyright: ignore
            assert torch.equal(value, other.energy.state_dict()[name]), name  # pyright: ignore
    if whole.walkers is None:
        return
    assert read.walkers is not None
    assert torch.equal(read.walkers.labels, whole.walkers.labels)  # pyright: ignore
    drawn = read.sample(10, label=1, steps=2)
    assert drawn.x.shape == (10, 2)
    if "ratio" in read.players:
        assert read.corrected(drawn).log_weight.tolist() == pytest.approx(read.log_ratio(drawn.x, 1).tolist())
        with pytest.raises(InputError, match="labels: give the class of each row"):
            read.log_ratio(drawn.x)
    assert drawn.info["start_ess"] <= int((read.walkers.labels == 1).sum())  # pyright: ignore


def test_modules_of_ones_own_and_what_is_refused() -> None:
    x, y = few()
    method = PersistentCD(walkers=32, labels=True)
    run = ms.fit(nn.Linear(2, 3), x, method, 2, labels=y, evaluate=False)
    assert isinstance(run.energy, ClassEnergy)
    torch.testing.assert_close(run.energy.log_shares.exp()[:2], y.bincount() / 200, atol=0.01, rtol=0)
    with pytest.raises(InputError, match="energy: Sequential is no energy by class"):
        ms.fit(nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), x, method, 2, labels=y)
    with pytest.raises(InputError, match="labels: must be from 0 to 1, got 5"):
        ms.fit(nn.Linear(2, 2), x, method, 2, labels=y + 4 * y)
    with pytest.raises(InputError, match="labels: 'pcd' needs the class of each row"):
        ms.fit("mlp", x, method, 2)
    with pytest.raises(ConfigError, match=r"jem.source: must be one whose chains have no labels"):
        JEM(source=method)
    with pytest.raises(ConfigError, match=r"mixed.sources.0.labels"):
        Mixed(sources=(PersistentCD(labels=True),))
    with pytest.raises(InputError, match="label: there are no walkers of class 2"):
        run.sample(3, label=2)
