"""Laws of ranking noise contrast given contexts, and of its interpolating form: (3.7), (4.9) and (5.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from conftest import assert_within, mean_and_error, minimise, z_limit
from torch import Tensor, nn

from metastable.core.batch import Batch
from metastable.energies import ConditionalNet
from metastable.methods import ImplicitBC, InterpolatingNCE, RankingNCE
from metastable.methods.base import Context, Nothing
from metastable.methods.interpolating import Positioned
from metastable.proposals import Gaussian

B, K, D, M = 6, 4, 2, 3
over = pytest.mark.parametrize
LOG_2PI = math.log(2 * math.pi)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_normal(x: Tensor, mean: Tensor, scale: Tensor | float) -> Tensor:
    scale = torch.as_tensor(scale, dtype=x.dtype)
    white = (x - mean) / scale[..., None]
    return -0.5 * white.square().sum(-1) - x.shape[-1] * (scale.log() + 0.5 * LOG_2PI)


class Line(nn.Module):
    """N(slope·x, scale² I) given x, as a proposal; exact, and both numbers are parameters."""

    def __init__(self, slope: float = 2.0, scale: float = 0.7):
        super().__init__()
        self.event_shape, self.context_shape = (D,), (D,)
        self.slope = nn.Parameter(torch.tensor(slope, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.float64))

    def rsample(self, n: int, rng: torch.Generator, given: Tensor) -> Tensor:
        z = torch.randn((len(given), n, D), generator=rng, dtype=torch.float64)
        return self.slope * given[:, None] + self.scale * z

    def sample(self, n: int, rng: torch.Generator, given: Tensor) -> Tensor:
        return self.rsample(n, rng, given).detach()

    def log_prob(self, x: Tensor, given: Tensor) -> Tensor:
        centre = self.slope * given
        return log_normal(x, centre[:, None] if x.dim() == 3 else centre, self.scale)


class Minus(nn.Module):
    """E = −log p of a conditional proposal, plus any function of the context."""

    def __init__(self, proposal: nn.Module, offset=lambda given: 0.0 * given.sum(1)):
        super().__init__()
        self.proposal, self.offset = proposal, offset

    def forward(self, x: Tensor, given: Tensor, t: Tensor | None = None) -> Tensor:
        offset = self.offset(given)
        return -self.proposal.log_prob(x, given) + (offset[:, None] if x.dim() == 3 else offset)


def pairs(n: int = B, slope: float = 2.0, scale: float = 0.7, seed: int = 0) -> Batch:
    given = normal(n, D, seed=seed)
    return Batch(slope * given + scale * normal(n, D, seed=seed + 1), given)


def context_of(energy: nn.Module, proposal: nn.Module, rows: Batch, seed: int = 0) -> Context:
    rng = torch.Generator().manual_seed(10_000 + seed)
    players = {"energy": energy, "proposal": proposal}
    return Context(energy, players, rows.x, Gaussian(torch.zeros(D)), rng, given=rows.given)


def loss_of(method, context: Context, rows: Batch) -> tuple[Tensor, dict]:
    negatives, state, _ = method.negatives(context, Nothing(), rows)
    return method.loss(context, state, "energy", rows, negatives)


# ---- one density for energy, proposal and data


@over("count", [1, 4, 100])
def test_a_proposal_that_is_the_model_leaves_a_fair_guess_for_every_draw(count):
    proposal = Line()
    context, rows = context_of(Minus(proposal, lambda given: 5 * given.sum(1)), proposal, pairs()), pairs()
    loss, metrics = loss_of(RankingNCE(negatives_per_datum=count), context, rows)
    assert loss.item() == pytest.approx(math.log(count + 1), abs=1e-12)
    assert metrics["objective"].item() == pytest.approx(-math.log(count + 1), abs=1e-12)
    assert metrics["ess_negatives"].item() == pytest.approx(1, abs=1e-12)
    uncorrected = loss_of(ImplicitBC(negatives_per_datum=count), context, rows)[0]
    assert abs(uncorrected.item() - math.log(count + 1)) > 1e-3


def test_the_loss_is_the_softmax_of_the_paper():
    """(3.7), written out context by context."""
    proposal, energy, rows = Line(1.5), ConditionalNet(D, D, width=8, depth=3).double(), pairs()
    context = context_of(energy, proposal, rows)
    method = RankingNCE(negatives_per_datum=K)
    negatives, state, _ = method.negatives(context, Nothing(), rows)
    got = method.loss(context, state, "energy", rows, negatives)[0]
    y, total = negatives.x.view(B, K, D), 0.0
    for i in range(B):
        points, given = torch.cat([rows.x[i : i + 1], y[i]]), rows.given[i].expand(K + 1, D)
        total -= torch.log_softmax(-energy(points, given) - proposal.log_prob(points, given), 0)[0] / B
    torch.testing.assert_close(got, total, rtol=0, atol=1e-12)


# ---- who is moved by which loss


def moved(loss: Tensor, module: nn.Module) -> bool:
    gradients = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, retain_graph=True)
    return any(g is not None and bool((g != 0).any()) for g in gradients)


def test_each_loss_moves_its_own_player_and_leaves_the_other_alone():
    proposal, energy, rows = Line(1.5), ConditionalNet(D, D, width=8, depth=3).double(), pairs()
    context, method = context_of(energy, proposal, rows), RankingNCE(negatives_per_datum=K)
    loss, _ = loss_of(method, context, rows)
    assert (moved(loss, energy), moved(loss, proposal)) == (True, False)
    nll, _ = method.loss(context, Nothing(), "proposal", rows, None)
    assert (moved(nll, energy), moved(nll, proposal)) == (False, True)


def offsets(given: Tensor) -> Tensor:
    return 40 * torch.sin(given).sum(1) + 7


class Shifted(nn.Module):
    """Another energy plus c(x); or, as a mutant, c(x) for the first of a context's points only."""

    def __init__(self, energy: nn.Module, only_first: bool = False):
        super().__init__()
        self.energy, self.only_first = energy, only_first

    def forward(self, x: Tensor, given: Tensor, t: Tensor | None = None) -> Tensor:
        E = self.energy(x, given, *(() if t is None else (t,)))
        share = torch.arange(E.shape[1]) == 0 if self.only_first else 1
        return E + offsets(given)[:, None] * share


@over("kind", ["ranking", "interpolating"])
def test_any_function_of_the_context_added_to_the_energy_changes_nothing(kind):
    """Neither the loss nor its gradient; one that is added to the data's energy alone changes both."""
    timed = kind == "interpolating"
    energy, rows = ConditionalNet(D, D, width=8, depth=3, time=timed).double(), pairs()
    method = InterpolatingNCE(negatives_per_datum=K, times=M) if timed else RankingNCE(negatives_per_datum=K)
    proposal = Path() if timed else Line(1.5)
    weights = [p for name, p in energy.named_parameters() if name != "head.bias"]
    results = []
    for E in (energy, Shifted(energy), Shifted(energy, only_first=True)):
        loss, _ = loss_of(method, context_of(E, proposal, rows), rows)
        results.append((loss.detach(), *torch.autograd.grad(loss, weights)))
    for first, second in zip(*results[:2], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-11)
    assert all(float((a - b).abs().max()) > 1e-4 for a, b in zip(results[0], results[2], strict=True))
    assert max(float(g.abs().max()) for g in results[0][1:]) > 1e-4


# ---- the optimum


class Slope(nn.Module):
    """E = ½|y − θx|²/0.7², which holds the truth at θ = 2."""

    def __init__(self, theta: float = 1.0):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta, dtype=torch.float64))

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        return 0.5 * (x - self.theta * given[:, None]).square().sum(-1) / 0.7**2


def slopes(method, groups: int = 40, size: int = 300) -> Tensor:
    """θ̂ on independent data with fixed negatives of a proposal that is wrong."""
    found = []
    for g in range(groups):
        rows, energy = pairs(size, seed=10 * g), Slope()
        context = context_of(energy, Line(1.7, 1.0), rows, seed=g)
        negatives, state, _ = method.negatives(context, Nothing(), rows)
        minimise(_On(method, rows), context, state, negatives, 12)
        found.append(energy.theta.detach())
    return torch.stack(found)


class _On:
    """A method whose batch is always these rows, contexts and all."""

    def __init__(self, method, rows: Batch):
        self.method, self.rows = method, rows

    def loss(self, context, state, player, batch, negatives):
        return self.method.loss(context, state, player, self.rows, negatives)


def test_the_optimum_is_the_truth_and_without_the_correction_it_is_not():
    mean, error = mean_and_error(slopes(RankingNCE(negatives_per_datum=5)))
    assert float(error) < 0.01
    assert_within(mean, 2.0, error)
    mean, error = mean_and_error(slopes(ImplicitBC(negatives_per_datum=5)))
    assert abs(float(mean) - 2.0) > z_limit() * float(error)


# ---- the adversary of Section 4.3.2


def test_the_adversarys_gradient_goes_through_draws_and_densities():
    """Against finite differences of the objective with the same random numbers."""
    rows, energy = pairs(), ConditionalNet(D, D, width=8, depth=3, seed=2).double()
    method = RankingNCE(negatives_per_datum=K, adversarial=True)

    def objective(slope: float) -> Tensor:
        proposal = Line(slope)
        return method.loss(context_of(energy, proposal, rows), Nothing(), "proposal", rows, None)[0]

    proposal = Line(1.5)
    loss = method.loss(context_of(energy, proposal, rows), Nothing(), "proposal", rows, None)[0]
    (got,) = torch.autograd.grad(loss, proposal.slope)
    h = 1e-6
    expected = (objective(1.5 + h) - objective(1.5 - h)) / (2 * h)
    assert got.item() == pytest.approx(expected.item(), rel=1e-6)
    forward = loss_of(method, context_of(energy, Line(1.5), rows), rows)[0]
    assert loss.item() == pytest.approx(
        -forward.item(), abs=1e-12
    )  # a game: one minimises what the other maximises


# ---- times


def coefficients(t: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cos(0.5 * math.pi * t), torch.sin(0.5 * math.pi * t)


def law_at(t: Tensor, slope: float, scale: float) -> tuple[Tensor, Tensor]:
    """Of I_t given x: N(b·slope·x, a² + b²·scale²), as (b·slope, its standard deviation)."""
    a, b = coefficients(t)
    return b * slope, (a.square() + b.square() * scale**2).sqrt()


class Path(nn.Module):
    """The flow between N(0, I) and N(slope·x, scale²) in closed form: trajectories, densities and interpolants."""

    def __init__(self, slope: float = 2.0, scale: float = 0.7):
        super().__init__()
        self.event_shape, self.context_shape, self.slope, self.scale = (D,), (D,), slope, scale

    def draw_times(self, shape, rng):
        return torch.rand(shape, generator=rng, dtype=torch.float64)

    def interpolate(self, x, times, rng):
        z = torch.randn((*times.shape, D), generator=rng, dtype=torch.float64)
        a, b = coefficients(times)
        return a[..., None] * z + b[..., None] * x[:, None]

    def trajectories(self, k, times, rng, given):
        z = torch.randn((len(given), 1, k, D), generator=rng, dtype=torch.float64)
        centre, sd = law_at(times, self.slope, self.scale)
        x = centre[..., None, None] * given[:, None, None] + sd[..., None, None] * z
        return x, log_normal(
            x, centre[..., None, None] * given[:, None, None], sd[..., None].expand(x.shape[:-1])
        )

    def log_prob(self, x, given, at=1.0):
        t = torch.as_tensor(at, dtype=torch.float64)
        centre, sd = law_at(t, self.slope, self.scale)
        if x.dim() == 2:
            return log_normal(x, centre[..., None] * given, sd.expand(len(x)))
        return log_normal(x, centre[..., None] * given[:, None], sd.expand(x.shape[:2]))


class InTime(nn.Module):
    """The exact time-indexed energy ½|y − b θx|²/s_t², without its constant; θ is a parameter."""

    def __init__(self, theta: float = 2.0, scale: float = 0.7):
        super().__init__()
        self.theta, self.scale = nn.Parameter(torch.tensor(theta, dtype=torch.float64)), scale

    def forward(self, x: Tensor, given: Tensor, t: Tensor) -> Tensor:
        (_, b), (_, sd) = coefficients(t), law_at(t, 1.0, self.scale)
        return 0.5 * (x - self.theta * b[..., None] * given[:, None]).square().sum(-1) / sd.square()


def at_time(points: Positioned, j: int) -> Positioned:
    """Those of one time, for the same contexts."""
    return Positioned(*(value[:, j : j + 1] for value in points[:4]), points.given)


@over("count", [1, 4, 50])
def test_a_flow_that_is_the_model_leaves_a_fair_guess_at_each_time(count):
    rows, method = pairs(), InterpolatingNCE(negatives_per_datum=count, times=M)
    context = context_of(InTime(), Path(), rows)
    negatives, state, _ = method.negatives(context, Nothing(), rows)
    for j in range(M):
        loss, metrics = method.loss(context, state, "energy", rows, at_time(negatives, j))
        assert loss.item() == pytest.approx(math.log(count + 1), abs=1e-12)
        assert metrics["objective"].item() == pytest.approx(-math.log(count + 1), abs=1e-12)
    other = negatives._replace(t=1 - negatives.t)
    assert abs(method.loss(context, state, "energy", rows, other)[0].item() - math.log(count + 1)) > 1e-3


@dataclass(frozen=True)
class Uncorrected(InterpolatingNCE):
    """A mutant: without −log p_ξ^t."""

    def scores(self, E: Tensor, log_prob: Tensor) -> Tensor:
        return -E


def slope_gradients(method, theta: float = 2.0, repeats: int = 300) -> Tensor:
    """∇_θ of the loss for independent batches, against a flow with another slope than the data's."""
    found = []
    for seed in range(repeats):
        rows, energy = pairs(20, seed=3 * seed), InTime(theta)
        loss, _ = loss_of(method, context_of(energy, Path(1.6, 0.9), rows, seed), rows)
        found.append(torch.autograd.grad(loss, energy.theta)[0])
    return torch.stack(found)


def test_the_gradient_vanishes_at_the_truth_for_a_flow_that_is_wrong():
    mean, error = mean_and_error(slope_gradients(InterpolatingNCE(negatives_per_datum=K, times=M)))
    assert float(error) < 0.02
    assert_within(mean, 0.0, error)
    for method, theta in (
        (Uncorrected(negatives_per_datum=K, times=M), 2.0),
        (InterpolatingNCE(times=M), 1.7),
    ):
        mean, error = mean_and_error(slope_gradients(method, theta, 60))
        assert abs(float(mean)) > z_limit() * float(error)


def test_the_loss_at_several_times_is_their_mean():
    rows, method = pairs(), InterpolatingNCE(negatives_per_datum=K, times=M)
    context = context_of(InTime(1.5), Path(1.6, 0.9), rows)
    negatives, state, _ = method.negatives(context, Nothing(), rows)
    each = [method.loss(context, state, "energy", rows, at_time(negatives, j))[0] for j in range(M)]
    whole = method.loss(context, state, "energy", rows, negatives)[0]
    torch.testing.assert_close(whole, torch.stack(each).mean(), rtol=0, atol=1e-12)
