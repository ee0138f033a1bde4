"""InterpolatingNCE with real flows: laws on the way, what is shared and what is evaluated, runs, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_within, mean_and_error, z_limit
from torch import Tensor, nn

import metastable as ms
from metastable.core.batch import Batch
from metastable.core.errors import ConfigError, EnergyError, InputError, UnsupportedError
from metastable.energies import ConditionalNet
from metastable.methods import InterpolatingNCE
from metastable.methods.base import Context, Nothing
from metastable.proposals import Flow, Gaussian, InterpolantFlow
from metastable.proposals.interpolants import interpolant_named

D, K, M = 2, 3, 4
SLOPE, SCALE = 1.5, 0.6
over = pytest.mark.parametrize
FEW_STEPS = {"name": "interpolant", "width": 8, "steps": 6, "scored": 4}


def pairs(n: int, seed: int = 0) -> Batch:
    """y ~ N(1.5·x, 0.6²) given x, in float64."""
    rng = torch.Generator().manual_seed(seed)
    given = torch.randn((n, D), generator=rng, dtype=torch.float64)
    return Batch(SLOPE * given + SCALE * torch.randn((n, D), generator=rng, dtype=torch.float64), given)


def law_at(interpolant: str, t: Tensor) -> tuple[Tensor, Tensor]:
    """I_t given x is N(centre·x, sd²)."""
    a, b = interpolant_named(interpolant).coefficients(t)
    return SLOPE * b, (a.square() + b.square() * SCALE**2).sqrt()


def exact_flow(interpolant: str, **settings) -> InterpolantFlow:
    """The flow whose field is the exact velocity of these pairs."""
    law = interpolant_named(interpolant)

    def velocity(x: Tensor, given: Tensor, t: Tensor) -> Tensor:
        (a, b), (da, db) = law.coefficients(t), law.derivatives(t)
        growth = (a * da + b * db * SCALE**2) / (a.square() + b.square() * SCALE**2)
        centre = SLOPE * given
        return db[..., None] * centre + growth[..., None] * (x - b[..., None] * centre)

    return InterpolantFlow(D, D, field=velocity, interpolant=interpolant, **settings).double()


class Exact(nn.Module):
    """−log of that law at t, normalised."""

    def __init__(self, interpolant: str):
        super().__init__()
        self.interpolant = interpolant
        self.constant = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, given: Tensor, t: Tensor) -> Tensor:
        centre, sd = law_at(self.interpolant, t)
        white = (x - centre[..., None] * given[:, None]) / sd[..., None]
        return 0.5 * white.square().sum(-1) + D * sd.log() + self.constant


def positioned(flow: nn.Module, method: InterpolatingNCE, rows: Batch, energy: nn.Module | None = None):
    energy = energy or nn.Identity()
    players, rng = {"energy": energy, "proposal": flow}, torch.Generator().manual_seed(77)
    context = Context(energy, players, rows.x, Gaussian(torch.zeros(D)), rng, given=rows.given)
    return method.negatives(context, Nothing(), rows)[0], context


# ---- points on the way


@over("interpolant", ["trigonometric", "linear"])
def test_positives_and_negatives_have_the_law_of_their_time(interpolant):
    """Standardised by the exact law at their own time both are N(0, I); by that of another time they are not."""
    rows, flow = pairs(3000), exact_flow(interpolant, steps=60, scored=16)
    points, _ = positioned(flow, InterpolatingNCE(negatives_per_datum=1, times=2), rows)
    centre, sd = (v[..., None] for v in law_at(interpolant, points.t))
    wrong_centre, wrong_sd = (v[..., None] for v in law_at(interpolant, points.t.flip(0, 1)))

    def scores(y: Tensor, centre: Tensor, sd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        white = ((y - centre * rows.given[:, None]) / sd)[:, 0]  # one time for each datum: independent rows
        moments = torch.cat([white, white.square(), white * rows.given], 1)
        truth = torch.tensor([0.0, 0, 1, 1, 0, 0], dtype=torch.float64)
        return (*mean_and_error(moments), truth)

    for y in (points.positives, points.negatives[:, :, 0]):
        mean, error, truth = scores(y, centre, sd)
        assert_within(mean, truth, error)
        mean, error, truth = scores(y, wrong_centre, wrong_sd)
        assert float(((mean - truth).abs() / error).max()) > z_limit(6)


def test_one_set_of_trajectories_serves_all_times_of_a_datum():
    """On an exact Gaussian path a point's standardised place never changes; positives have latents of their own."""
    rows, flow = pairs(20), exact_flow("trigonometric", steps=100, scored=16)
    points, _ = positioned(flow, InterpolatingNCE(negatives_per_datum=K, times=M), rows)
    centre, sd = (v[..., None, None] for v in law_at("trigonometric", points.t))
    white = (points.negatives - centre * rows.given[:, None, None]) / sd
    assert float((white - white[:, :1]).abs().max()) < 2e-3
    positives = (points.positives - centre[..., 0] * rows.given[:, None]) / sd[..., 0]
    assert float((positives - positives[:, :1]).abs().max()) > 0.5


@over("interpolant", ["trigonometric", "linear"])
def test_an_exact_energy_beside_a_solved_flow_is_a_fair_guess(interpolant):
    rows, method = pairs(50), InterpolatingNCE(negatives_per_datum=K, times=M)
    energy, flow = Exact(interpolant), exact_flow(interpolant, steps=100, scored=50)
    points, context = positioned(flow, method, rows, energy)
    loss, metrics = method.loss(context, Nothing(), "energy", rows, points)
    assert loss.item() == pytest.approx(math.log(K + 1), abs=2e-3)
    assert metrics["objective"].item() == pytest.approx(-math.log(K + 1), abs=2e-3)
    assert metrics["ess_negatives"].item() == pytest.approx(1, abs=2e-3)
    swapped = points._replace(log_prob=points.log_prob.flip(1))  # densities of other times
    assert abs(method.loss(context, Nothing(), "energy", rows, swapped)[0].item() - math.log(K + 1)) > 0.05


# ---- cost


def test_a_context_is_encoded_once_for_all_times_and_negatives():
    class Counting(nn.Module):
        seen = 0

        def forward(self, given: Tensor) -> Tensor:
            Counting.seen += len(given)
            return given

    rows = pairs(10)
    energy = ConditionalNet(D, D, width=8, depth=3, time=True, encoder=Counting()).double()
    method = InterpolatingNCE(negatives_per_datum=K, times=M)
    points, context = positioned(exact_flow("linear", steps=4, scored=2), method, rows, energy)
    Counting.seen = 0
    method.loss(context, Nothing(), "energy", rows, points)
    assert Counting.seen == 10
    assert method.evaluations(context, 10) == 10 * M * (1 + K)


def test_the_flows_loss_has_as_many_times():
    flow = InterpolatingNCE(times=7, alpha=3.0).companions(
        nn.Identity(), pairs(20), Gaussian(torch.zeros(D)), 0
    )
    assert (flow["proposal"].times, flow["proposal"].alpha, flow["proposal"].steps) == (7, 3.0, 48)
    table = InterpolatingNCE(proposal={"name": "interpolant", "steps": 9, "times": 2})
    flow = table.companions(nn.Identity(), pairs(20), Gaussian(torch.zeros(D)), 0)["proposal"]
    assert (flow.times, flow.steps, flow.scored) == (2, 9, 17)
    seen = []
    own = InterpolantFlow(D, times=3, field=lambda x, given, t: seen.append(t) or 0 * x)
    own.loss(torch.zeros(20, D), rng=torch.Generator().manual_seed(0))
    assert len(seen[-1].unique()) == 60


# ---- runs


@over("given", [True, False])
def test_a_run_and_its_reading_back(given, tmp_path):
    rows = Batch(pairs(300).x.float(), pairs(300).given.float())
    method = InterpolatingNCE(negatives_per_datum=2, times=2, proposal=FEW_STEPS, walkers=512)
    run = ms.fit(
        None,
        rows.x,
        method,
        given=rows.given if given else None,
        steps=4,
        batch_size=50,
        out=tmp_path / "run",
        evaluate=False,
    )
    assert run.energy.time
    assert {"objective", "proposal_loss", "proposal_nll", "energy_gap"} <= set(run.history[-1])
    again = ms.load_run(tmp_path / "run")
    beside = (rows.given,) if given else (None,)
    for t in (None, 0.3):
        torch.testing.assert_close(again.energy(rows.x, *beside, t), run.energy(rows.x, *beside, t))
    if given:
        assert run.log_partition is None
    else:
        assert again.log_partition.value == run.log_partition.value


def test_log_z_without_contexts_is_that_of_the_datas_time():
    """E(·, 1) against its integral over a grid."""
    x = 1 + 0.5 * torch.randn((500, 1), generator=torch.Generator().manual_seed(0))
    flow = {"name": "interpolant", "width": 16, "steps": 20, "scored": 10}
    method = InterpolatingNCE(negatives_per_datum=4, times=2, proposal=flow, walkers=4096)
    run = ms.fit(None, x, method, steps=20, batch_size=100, evaluate=False)
    grid = torch.linspace(-9, 11, 4001)[:, None]
    with torch.no_grad():
        exact, other = (
            torch.logsumexp(-run.energy(grid, None, t), 0) + math.log(20 / 4000) for t in (1.0, 0.2)
        )
    z = run.log_partition
    assert z.std_error < 0.1
    assert (
        abs(z.value - float(exact)) < 1.11 * z_limit() * z.std_error + 0.01
    )  # the ODE has an error of its own
    assert abs(float(exact) - float(other)) > 1e-3


# ---- bad input


def run_with(method, energy=None, given: Tensor | None = None):
    return ms.fit(energy, torch.randn(40, D), method, steps=1, given=given, evaluate=False)


def test_what_has_no_time_is_named():
    method = InterpolatingNCE(proposal=FEW_STEPS)
    with pytest.raises(UnsupportedError, match="needs one with a time"):
        run_with(method, ConditionalNet(D, 1, width=8, depth=3), torch.zeros(40, 1) + torch.randn(40, 1))
    with pytest.raises(
        UnsupportedError, match=r"flow that can be cut at any time.* has no draw_times, no inter"
    ):
        run_with(InterpolatingNCE(proposal=Flow(D, layers=1, hidden=(4,))))


def test_times_outside_the_interval_are_named():
    class Late(InterpolantFlow):
        def draw_times(self, shape, rng):
            return super().draw_times(shape, rng) + 1.0

    with pytest.raises(InputError, match=r"times: must be within \[0, 1\], got 1\.\d+"):
        run_with(InterpolatingNCE(proposal=Late(D, width=4, steps=4)))


@over(
    ("make", "field"),
    [
        (lambda: InterpolatingNCE(times=0), "interpolating-nce.times"),
        (lambda: InterpolatingNCE(alpha=0.0), "interpolating-nce.alpha"),
        (lambda: InterpolatingNCE(shared=True), "interpolating-nce.shared"),
        (lambda: InterpolatingNCE(proposal="flow"), "interpolating-nce.proposal"),
    ],
)
def test_bad_settings_name_field_and_value(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == field


# ---- energies as the documentation describes them


class Plain(nn.Module):
    """E(y | x, t) written as the documentation says: a time for each event, none for t = 1."""

    def __init__(self, context: int = 1):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1 + context + 1, 16), nn.SiLU(), nn.Linear(16, 1))
        self.seen: list[tuple[int, ...]] = []

    def forward(self, y: Tensor, given: Tensor | None = None, t: Tensor | None = None) -> Tensor:
        t = torch.ones(y.shape[:-1]) if t is None else t
        self.seen.append(tuple(t.shape))
        assert t.shape == y.shape[:-1]
        parts = [y, t[..., None]]
        if given is not None:
            parts.append(given if y.dim() == 2 else given[:, None].expand(*y.shape[:2], -1))
        return self.net(torch.cat(parts, -1))[..., 0] + 0.5 * y.square().sum(-1)


def test_a_plain_energy_with_a_time_for_each_event_is_trained_and_sampled_alike():
    rng = torch.Generator().manual_seed(0)
    x = torch.rand((200, 1), generator=rng)
    y = x + 0.2 * torch.randn((200, 1), generator=rng)
    method = InterpolatingNCE(negatives_per_datum=2, times=3, proposal=FEW_STEPS)
    run = ms.fit(Plain(), y, method, given=x, steps=4, batch_size=8, evaluate=False)
    assert (8, 9) in run.energy.seen  # 3 times of a datum, each with two negatives
    run.energy.seen.clear()
    walkers = run.sample(6, given=x[:5], evaluations=20)
    assert walkers.x.shape == (5, 6, 1)
    assert set(run.energy.seen) == {(5, 6), (5, 16)}  # walkers, and pilots
    assert run.log_prob(y[:5], x[:5], draws=64).shape == (5,)
    from metastable.methods.conditional_sampling import best_of, sample_from_proposal

    assert best_of(run.energy, walkers.x, x[:5], t=1.0).x.shape == (5, 1)
    some = sample_from_proposal(run.energy, run.players["proposal"], 6, x[:5], rng, steps=2, t=0.5)
    assert some.x.shape == (5, 6, 1)


def test_a_plain_energy_with_a_time_needs_no_contexts():
    y = torch.randn((200, 1), generator=torch.Generator().manual_seed(0))
    method = InterpolatingNCE(negatives_per_datum=2, times=3, proposal=FEW_STEPS, walkers=256)
    run = ms.fit(Plain(0), y, method, steps=4, batch_size=8, evaluate=False)
    assert run.sample(20, steps=3).x.shape == (20, 1)


def test_an_energy_that_cannot_take_a_time_for_each_event_is_named_before_training():
    class Wrong(Plain):
        def forward(self, y, given, t=None):
            t = torch.ones(len(y)) if t is None else t
            return (y * t.view(-1, 1, 1)).square().sum(-1) + given.sum() * 0

    data = pairs(20)
    with pytest.raises(EnergyError, match=r"on events \(2, 3, 2\) with t \(2, 3\), one time for each event"):
        ms.fit(
            Wrong(), data.x.float(), InterpolatingNCE(proposal=FEW_STEPS), given=data.given.float(), steps=1
        )


def test_a_time_for_each_context_is_what_it_is_for_its_events():
    energy = ConditionalNet(2, 1, width=8, depth=3, time=True)
    x, given, t = torch.randn(3, 4, 2), torch.randn(3, 1), torch.tensor([0.0, 0.3, 1.0])
    expected = energy(x, given, t)
    for shaped in (t[:, None].expand(3, 4), t[:, None].expand(3, 4).clone()):
        assert torch.allclose(energy(x, given, shaped), expected, atol=1e-6)
