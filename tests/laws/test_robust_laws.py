"""The β objective against its equations, term by term, and its samplers against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from conftest import FALSE_ALARM, assert_within, each, mean_and_error, z_limit, z_scores
from torch import Tensor, nn

from metastable.core.random import generator
from metastable.core.types import energy_and_grad, student_t_quantile
from metastable.energies import MLP, GaussianMixture
from metastable.kernels import ULA
from metastable.kernels.compiled import Walk, several
from metastable.methods import Context, ContrastiveDivergence, Jarzynski, PersistentCD, Robust, ShortRun
from metastable.methods.base import Negatives, contrast
from metastable.methods.beta_objective import VARIANTS, robust_loss
from metastable.methods.tempered import tempered
from metastable.proposals import fit_gaussian

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
N, M = 7, 5
BETAS = (0.1, 0.5, 0.9, 1.0, -0.4)
both_kinds = pytest.mark.parametrize(
    "energy", [GaussianMixture(torch.ones(1, 2)), MLP(2, hidden=(4,), seed=0)], ids=["closed", "network"]
)


class Batch(NamedTuple):
    """An energy, data and negatives, and the gradient of f = −E at every single row."""

    energy: nn.Module
    data: Tensor
    x: Tensor
    log_weight: Tensor

    def f(self, x: Tensor) -> Tensor:
        return -self.energy(x).detach()

    def rows(self, x: Tensor) -> Tensor:
        """∇f of each row, `(B, parameters)`, one backward pass for each."""
        made = []
        for row in x:
            parts = torch.autograd.grad(-self.energy(row[None])[0], list(self.energy.parameters()))
            made.append(torch.cat([p.flatten() for p in parts]))
        return torch.stack(made)

    def autograd(self, beta: float, variant: str, weighted: bool) -> Tensor:
        """The gradient that a run would follow, sign reversed."""
        source = PersistentCD(walkers=M)
        method = Robust(source=source, sampling=1.0, weighting=beta, variant=variant)
        context = Context(
            self.energy, {"energy": self.energy}, self.data, fit_gaussian(self.data), generator(0)
        )
        drawn = (Negatives(self.x, self.log_weight if weighted else None),)
        loss, _ = method.loss(context, (), "energy", self.data, drawn)
        return -torch.cat([p.flatten() for p in torch.autograd.grad(loss, list(self.energy.parameters()))])


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = generator(3)
    energy = MLP(2, hidden=(6,), seed=1).double()
    with torch.no_grad():
        for p in energy.parameters():
            p.mul_(3).add_(0.3 * torch.randn(p.shape, generator=rng, dtype=torch.float64))
        energy.head.weight.mul_(4)
    data, x = (1.5 * torch.randn((n, 2), generator=rng, dtype=torch.float64) for n in (N, M))
    return Batch(energy, data, x, torch.randn(M, generator=rng, dtype=torch.float64) - 40.0)


class Terms(NamedTuple):
    """w̃ of data and negatives, and per-row gradients: what the equations are made of."""

    w_data: Tensor
    w_model: Tensor
    g_data: Tensor
    g_model: Tensor


def terms(batch: Batch, beta: float, weighted: bool) -> Terms:
    w_model = torch.exp(beta * batch.f(batch.x))
    if weighted:  # of mean 1
        w_model = w_model * M * torch.softmax(batch.log_weight, 0)
    return Terms(torch.exp(beta * batch.f(batch.data)), w_model, batch.rows(batch.data), batch.rows(batch.x))


def default(t: Terms) -> Tensor:
    """(8): Σ over data one by one, as it is printed."""
    s = t.w_model.sum()
    w, own = t.w_model / s, t.w_data / (t.w_data + s)
    total = torch.zeros_like(t.g_data[0])
    for i in range(len(own)):
        total += (1 - own[i]) * (t.g_data[i] - sum(w[j] * t.g_model[j] for j in range(len(w))))
    return total / len(own)


def no_positive(t: Terms) -> Tensor:
    """(7)."""
    w = t.w_model / t.w_model.sum()
    return t.g_data.mean(0) - w @ t.g_model


def batch_corrected(t: Terms) -> Tensor:
    """(33), with the 1/N that it has lost."""
    own = t.w_data / (t.w_data + t.w_model.sum())
    return (1 - own).mean() * no_positive(t)


def true_objective(t: Terms) -> Tensor:
    """(34) for both parts, averaged; parts are every second row."""
    own = t.w_data / (t.w_data + t.w_model.sum())
    parts = []
    for a, b in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        parts.append((1 - own[b]).mean() * no_positive(t._replace(g_data=t.g_data[a])))
    return (parts[0] + parts[1]) / 2


BY_HAND: dict[str, Callable[[Terms], Tensor]] = dict(
    zip(VARIANTS, (default, no_positive, batch_corrected, true_objective), strict=True)
)


@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_autograd_is_the_equation_term_by_term(batch: Batch, variant: str, beta: float, weighted: bool):
    truth = BY_HAND[variant](terms(batch, beta, weighted))
    assert truth.abs().max() > 1e-3
    torch.testing.assert_close(batch.autograd(beta, variant, weighted), truth, **TOLERANCE)


def _unscaled(t: Terms) -> Tensor:
    return default(t._replace(w_data=torch.zeros_like(t.w_data)))


def _mean_instead_of_sum(t: Terms) -> Tensor:
    own = t.w_data / (t.w_data + t.w_model.mean())
    return ((1 - own)[:, None] * (t.g_data - t.w_model @ t.g_model / t.w_model.sum())).mean(0)


def _all_data_as_negatives(t: Terms) -> Tensor:
    own = t.w_data / (t.w_data.sum() + t.w_model.sum())
    return ((1 - own)[:, None] * (t.g_data - t.w_model @ t.g_model / t.w_model.sum())).mean(0)


def _printed_33(t: Terms) -> Tensor:
    own = t.w_data / (t.w_data + t.w_model.sum())
    return (1 - own).mean() * (t.g_data.sum(0) - t.w_model @ t.g_model / t.w_model.sum())


def _own_half(t: Terms) -> Tensor:
    own = t.w_data / (t.w_data + t.w_model.sum())
    parts = [(1 - own[k::2]).mean() * no_positive(t._replace(g_data=t.g_data[k::2])) for k in (0, 1)]
    return (parts[0] + parts[1]) / 2


MUTANTS = {
    "default, without its factor": ("default", _unscaled),
    "default, a mean for a sum": ("default", _mean_instead_of_sum),
    "default, data share one denominator": ("default", _all_data_as_negatives),
    "default for batch-corrected": ("batch-corrected", default),
    "batch-corrected, as printed": ("batch-corrected", _printed_33),
    "true-objective, scaled by itself": ("true-objective", _own_half),
    "no-positive for default": ("no-positive", default),
}


@pytest.mark.parametrize(("variant", "mutant"), MUTANTS.values(), ids=MUTANTS)
def test_wrong_equations_are_told_apart(batch: Batch, variant: str, mutant: Callable[[Terms], Tensor]):
    wrong = mutant(terms(batch, 0.5, False))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(batch.autograd(0.5, variant, False), wrong, **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("beta", [0.0, 0.5, -0.4])
def test_the_weights_are_those_of_the_gradient(batch: Batch, variant: str, beta: float):
    """What the monitors show is what each row is pulled by."""
    fp, fn = (batch.f(x).requires_grad_() for x in (batch.data, batch.x))
    for log_weight in (None, batch.log_weight):
        loss, weights = robust_loss(fp, fn, beta, log_weight, variant)
        of_data, of_negatives = torch.autograd.grad(loss, [fp, fn])
        torch.testing.assert_close(of_data, -weights.data / N, **TOLERANCE)
        torch.testing.assert_close(of_negatives, weights.data.mean() * weights.negatives, **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("beta", [0.0, 0.5, -0.4, (0.3, 0.8)])
def test_the_loss_of_training_has_the_gradient_of_the_objective(batch: Batch, variant: str, beta):
    fp, fn = (batch.f(x).requires_grad_() for x in (batch.data, batch.x))
    each, grads = torch.tensor(beta, dtype=torch.float64) if isinstance(beta, tuple) else beta, []
    for objective in (True, False):
        rows = (fp.expand(2, -1), fn.expand(2, -1)) if isinstance(beta, tuple) else (fp, fn)
        loss, _ = robust_loss(*rows, each, batch.log_weight, variant, objective=objective)
        grads.append(torch.autograd.grad(loss.sum(), [fp, fn]))
    for of_objective, of_training in zip(*grads, strict=True):
        torch.testing.assert_close(of_training, of_objective, **TOLERANCE)


@pytest.mark.parametrize("beta", [1e-12, -1e-12])
def test_small_beta_is_cd_times_m_over_m_plus_one(batch: Batch, beta: float):
    cd = no_positive(terms(batch, 0.0, False))
    torch.testing.assert_close(batch.autograd(beta, "default", False), M / (M + 1) * cd, **TOLERANCE)
    torch.testing.assert_close(batch.autograd(beta, "no-positive", False), cd, **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
def test_beta_zero_is_exactly_contrastive_divergence(batch: Batch, variant: str, weighted: bool):
    loss, _ = contrast(batch.energy, batch.data, Negatives(batch.x, batch.log_weight if weighted else None))
    truth = torch.autograd.grad(loss, list(batch.energy.parameters()))
    got = batch.autograd(0.0, variant, weighted)
    assert torch.equal(-torch.cat([g.flatten() for g in truth]), got)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("beta", [0.0, (0.1, 0.9, -0.4)], ids=["plain", "robust"])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
def test_models_side_by_side_have_each_its_own_loss(variant: str, beta, weighted: bool):
    """With a dimension for models in front, in which every model may have a β of its own."""
    rng = generator(0)
    fp, fn, log_weight = (torch.randn((3, n), generator=rng, dtype=torch.float64) for n in (5, 4, 4))
    each = torch.tensor(beta, dtype=torch.float64) if beta else 0.0
    losses, weights = robust_loss(fp, fn, each, log_weight if weighted else None, variant)
    for k in range(3):
        own = beta[k] if beta else 0.0
        loss, alone = robust_loss(fp[k], fn[k], own, log_weight[k] if weighted else None, variant)
        torch.testing.assert_close(losses[k], loss, **TOLERANCE)
        torch.testing.assert_close(weights.data[k], alone.data, **TOLERANCE)
        torch.testing.assert_close(weights.negatives[k], alone.negatives, **TOLERANCE)
    assert len(losses.unique()) == 3


class Shifted(nn.Module):
    """E + c."""

    def __init__(self, energy: nn.Module, c: float):
        super().__init__()
        self.energy, self.c = energy, c

    def forward(self, x: Tensor) -> Tensor:
        return self.energy(x) + self.c


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("c", [50.0, -3000.0])
def test_a_constant_in_the_energy_changes_nothing(batch: Batch, variant: str, c: float):
    shifted = batch._replace(energy=Shifted(batch.energy, c))
    for weighted in (False, True):
        torch.testing.assert_close(
            shifted.autograd(0.5, variant, weighted), batch.autograd(0.5, variant, weighted), **TOLERANCE
        )


@pytest.mark.parametrize("variant", VARIANTS)
@each("beta", [0.1, 0.9, -0.5])
@each("fp, fn", [(1e4, -1e4), (-1e4, 1e4), (1e4, 1e4), (-1e4, -1e4)])
def test_large_energies_overflow_nowhere(variant: str, beta: float, fp: float, fn: float):
    """In float32, against the same in float64."""
    made = []
    spread = torch.linspace(-2, 2, 6, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        p, n = ((c + spread).to(dtype).requires_grad_() for c in (fp, fn))
        loss, weights = robust_loss(p, n, beta, None, variant)
        grads = torch.autograd.grad(loss, [p, n])
        made.append([t.double() for t in (loss[None], *grads, *weights)])
        assert all(bool(torch.isfinite(t).all()) for t in made[-1])
    for single, double in zip(*made, strict=True):
        torch.testing.assert_close(single, double, rtol=2e-3, atol=1e-5)


def test_negatives_that_nobody_believes_leave_no_gradient(batch: Batch):
    """The point of (8): f(x⁺) ≫ f(x⁻), and the update vanishes, where (7) and CD go on."""
    fp, fn = torch.linspace(0, 1, 6).requires_grad_(), torch.full((4,), -300.0)
    gone, _ = robust_loss(fp, fn, 0.5)
    assert torch.autograd.grad(gone, fp)[0].abs().max() < 1e-20
    for beta, variant in ((0.5, "no-positive"), (0.0, "default")):
        loss, _ = robust_loss(fp, fn, beta, None, variant)
        torch.testing.assert_close(torch.autograd.grad(loss, fp)[0], torch.full((6,), -1 / 6))


# ---- the samplers


@pytest.mark.parametrize("beta", [0.3, 0.7, -0.5])
def test_weights_turn_samples_of_the_flat_energy_into_the_models(beta: float):
    """E = ½λx², samples of (1 − β)E: the weighted mean of ∂E/∂λ is 1/(2λ). Samples of E itself must fail."""
    lam, count = 1.7, 200_000
    for scale, right in ((1 - beta, True), (1.0, False)):
        x = torch.randn(count, generator=generator(5), dtype=torch.float64) / math.sqrt(scale * lam)
        _, weights = robust_loss(torch.zeros(2, dtype=torch.float64), -0.5 * lam * x**2, beta)
        g = 0.5 * x**2
        mean = weights.negatives @ g
        error = (weights.negatives.square() @ (g - mean).square()).sqrt()
        if right:
            assert_within(mean, 1 / (2 * lam), error)
        else:
            assert z_scores(mean, 1 / (2 * lam), error) > 3 * z_limit()


@both_kinds
def test_tempered_energies_have_tempered_gradients(energy: nn.Module):
    x = torch.randn(9, 2, generator=generator(0))
    context = Context(energy, {"energy": energy}, x, fit_gaussian(x), generator(0))
    seen = tempered(context, 0.3).energy
    E, dE = energy_and_grad(energy, x)
    got = energy_and_grad(seen, x)
    torch.testing.assert_close(got.energy, 0.3 * E)
    torch.testing.assert_close(got.grad, 0.3 * dE)
    torch.testing.assert_close(seen(x), 0.3 * energy(x))
    assert hasattr(seen, "value_and_grad") == hasattr(energy, "value_and_grad")
    assert tempered(context, 1.0) is context


@both_kinds
def test_compiled_chains_keep_their_program_while_beta_moves(energy: nn.Module):
    """One trace for every β: after the first, another one would raise."""
    x, kernel = torch.randn(9, 2, generator=generator(0)), ULA(0.1)
    context = Context(energy, {"energy": energy}, x, fit_gaussian(x), generator(0))
    traced = torch.compile(several, fullgraph=True, dynamic=False, backend="eager")
    for beta in (0.1, 0.2, 0.5):
        with torch._dynamo.config.patch(error_on_recompile=beta > 0.1), torch.no_grad():
            seen = tempered(context, 1 - beta).energy
            state, noise = kernel.init(seen, x), kernel.draw(x, generator(1))
            got, truth = (
                f(kernel, seen, Walk.start(state, False), [noise], torch.tensor(0.1), False).state.x
                for f in (traced, several)
            )
            torch.testing.assert_close(got, truth)


class Width(nn.Module):
    """½λ‖x‖² with λ trained."""

    def __init__(self, lam: float):
        super().__init__()
        self.lam = nn.Parameter(torch.tensor(lam, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.lam * x.square().sum(1)


def gaussian_context(lam: float, rows: int = 400) -> Context:
    energy = Width(lam)
    data = torch.randn(rows, 2, generator=generator(1), dtype=torch.float64)
    return Context(energy, {"energy": energy}, data, fit_gaussian(data), generator(2))


def test_chains_sample_the_flat_energy():
    """Long chains on (1 − β)E have variance 1/((1 − β)λ), here that of ULA: 1/((1 − β)λ(1 − h(1 − β)λ/2))."""
    context, h, beta = gaussian_context(2.0), 0.1, 0.6
    method = Robust(source=ShortRun(walkers=40_000, steps=150, step_size=h), beta=beta)
    (drawn,), _, _ = method.negatives(context, method.start(context), context.data)
    k = (1 - beta) * 2.0
    assert_within(*_pair(drawn.x.square().mean(1), 1 / (k * (1 - h * k / 2))))
    value, error = mean_and_error(drawn.x.square().mean(1))
    assert z_scores(value, 1 / (2.0 * (1 - h)), error) > 3 * z_limit()  # chains on E itself


def _pair(values: Tensor, truth: float) -> tuple[Tensor, float, Tensor]:
    value, error = mean_and_error(values)
    return value, truth, error


class Lagging(Robust):
    """A mutant: walkers follow (1 − β)E at the β of this update, not of the next."""

    def advance(self, context, state):
        seen = self._sampled(context, context.step)
        made = [self.source.advance(c, own) for c, own in zip(seen, state, strict=True)]
        return tuple(own for own, _ in made), {}


@pytest.mark.parametrize("kind", [Robust, Lagging])
def test_weighted_walkers_stay_exact_while_beta_moves(kind: type[Robust]):
    """Jarzynski walkers of (1 − β)E, weighed by e^{−βE}: the mean of x² is 1/λ whatever λ and β do meanwhile."""
    context = gaussian_context(1.0)
    source = Jarzynski(walkers=36_000, held_out=0.89, populations=16, step_size=0.02, resample="never")
    method = kind(source=source, beta=0.8, beta_start=0.0, anneal=4)
    state = method.start(context)
    for lam in (1.1, 1.2):
        negatives, state, _ = method.negatives(context, state, context.data)
        method.loss(context, state, "energy", context.data, negatives)
        with torch.no_grad():
            context.energy.lam.fill_(lam)
        state, _ = method.advance(context, state)
        context.step += 1
    walkers = method.current_walkers(context, state)
    assert walkers is not None
    sizes = walkers.info["populations"]
    groups = list(zip(walkers.x.split(sizes), walkers.log_weight.split(sizes), strict=True))[1:]
    each = torch.stack([torch.softmax(A, 0) @ x.square().mean(1) for x, A in groups])
    value, error = mean_and_error(each)
    limit = student_t_quantile(1 - FALSE_ALARM / 2, len(each) - 1)
    score = float(z_scores(value, 1 / 1.2, error))
    assert (score < limit) if kind is Robust else (score > 1.5 * limit), score


def test_plain_beta_follows_the_source_bit_for_bit():
    """β = 0: the same chains, the same loss, and the same log Z as the source alone."""
    plain = ContrastiveDivergence(steps=3, step_size=0.1)
    results = []
    for method in (plain, Robust(source=plain, beta=0.0)):
        context = gaussian_context(1.5)
        negatives, state, _ = method.negatives(context, method.start(context), context.data)
        loss, metrics = method.loss(context, state, "energy", context.data, negatives)
        results.append((loss, metrics["energy_gap"]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("beta", [None, 0.0, 0.5, (0.2, 0.7)], ids=str)
def test_half_precision_stops_at_the_energies(beta):
    """Under autocast sums over rows stay as they are: in bfloat16 they would be off by parts in a thousand."""
    rng = generator(0)
    energy = Width(1.3).float()
    data, x = (torch.randn((n, 2), generator=rng) for n in (300, 200))
    drawn = Negatives(x, torch.randn(200, generator=rng))
    context = Context(energy, {"energy": energy}, data, fit_gaussian(data), generator(0))
    source = PersistentCD(walkers=200)
    method = source if beta is None else Robust(source=source, beta=beta)
    negatives = drawn if beta is None else (drawn,) * len(method.betas)
    made = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, metrics = method.loss(context, (), "energy", data, negatives)
        made.append([loss, *metrics.values(), *torch.autograd.grad(loss, list(energy.parameters()))])
    for exact, mixed in zip(*made, strict=True):
        torch.testing.assert_close(mixed, exact, rtol=1e-6, atol=1e-7)


def test_several_beta_are_the_average_of_each_on_its_own_negatives(batch: Batch):
    context = Context(
        batch.energy, {"energy": batch.energy}, batch.data, fit_gaussian(batch.data), generator(0)
    )
    method = Robust(source=PersistentCD(walkers=M), beta=(0.2, 0.7))
    other = torch.flip(batch.x, (1,))
    drawn = (Negatives(batch.x), Negatives(other, batch.log_weight))
    loss, _ = method.loss(context, (), "energy", batch.data, drawn)
    parameters = list(batch.energy.parameters())
    first, _ = robust_loss(-batch.energy(batch.data), -batch.energy(batch.x), 0.2)
    second, _ = robust_loss(-batch.energy(batch.data), -batch.energy(other), 0.7, batch.log_weight)
    truth = torch.autograd.grad((first + second) / 2, parameters)
    for got, expected in zip(torch.autograd.grad(loss, parameters), truth, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)
    negatives, _, _ = method.negatives(context, method.start(context), batch.data)
    assert [len(n.x) for n in negatives] == [M, M]


def test_a_chain_with_little_noise_weighs_at_its_own_temperature():
    """App. G: x − ∇E·1 + 0.01ξ samples 20,000·E, and β = 2.5e-5 weighs by exp(−0.5·E)."""
    kernel = ULA(step_size=1.0, noise=0.01)
    method = Robust(source=PersistentCD(kernel=kernel), beta=2.5e-5)
    ((a, b),) = method.powers(0)
    assert a == 1 - 2.5e-5
    assert b == pytest.approx(0.5)
    weighted = replace(method, source=Jarzynski(kernel=kernel))  # its weights undo the noise
    assert weighted.powers(0)[0].weighting == 2.5e-5
