"""RankingNCE and ImplicitBC on events with contexts: Algorithm 1's loop, proposals, a shared encoder."""

from __future__ import annotations

import copy
import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from conftest import each, mean_and_error, z_limit
from torch import Tensor, nn

import metastable as ms
from metastable.core.batch import Batch
from metastable.core.errors import ConfigError, InputError, UnsupportedError
from metastable.core.random import generator
from metastable.core.units import Coordinates, Units
from metastable.core.waiting import unwatched
from metastable.energies import ConditionalNet
from metastable.evaluation.conditional import log_partition_given
from metastable.methods import ImplicitBC, InterpolatingNCE, RankingNCE
from metastable.methods.base import Context, Nothing
from metastable.proposals import Flow, Gaussian, InterpolantFlow, Uniform, proposal_for, require_support
from metastable.proposals.encoders import Borrowed
from metastable.proposals.generator import Generator
from metastable.proposals.in_units import DensityInDataUnits, density_in_data_units
from metastable.training import SGD, Schedule

over = pytest.mark.parametrize
needs_zuko = pytest.mark.skipif(importlib.util.find_spec("zuko") is None, reason="zuko is not installed")
SMALL_FLOW = {"name": "flow", "layers": 1, "hidden": (8,), "bins": 4}
FEW_STEPS = {"name": "interpolant", "width": 8, "steps": 6, "scored": 4}


def pairs(n: int = 400, seed: int = 0) -> Batch:
    """y ~ N(2x, 0.5²) given x ~ N(0, 1)."""
    rng = torch.Generator().manual_seed(seed)
    given = torch.randn((n, 1), generator=rng)
    return Batch(2 * given + 0.5 * torch.randn((n, 1), generator=rng), given)


class Slope(nn.Module):
    """½(y − θx)²/0.5²."""

    def __init__(self, theta: float = 1.0):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta))

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        return 2 * (x - self.theta * given[:, None]).square().sum(-1)


class Line(nn.Module):
    """N(slope·x, 1) given x, the slope a parameter; draws with gradients."""

    def __init__(self, slope: float = 1.0):
        super().__init__()
        self.event_shape, self.context_shape = (1,), (1,)
        self.slope = nn.Parameter(torch.tensor(slope))

    def rsample(self, n: int, rng: torch.Generator, given: Tensor) -> Tensor:
        return self.slope * given[:, None] + torch.randn((len(given), n, 1), generator=rng)

    def sample(self, n: int, rng: torch.Generator, given: Tensor) -> Tensor:
        return self.rsample(n, rng, given).detach()

    def log_prob(self, x: Tensor, given: Tensor) -> Tensor:
        centre = self.slope * given
        white = x - (centre[:, None] if x.dim() == 3 else centre)
        return -0.5 * (white.square() + math.log(2 * math.pi)).sum(-1)


def fit(energy, method, rows: Batch | None = None, steps: int = 20, **options):
    rows = pairs() if rows is None else rows
    options = {"batch_size": 100, "evaluate": False, "log_every": 1, **options}
    return ms.fit(energy, rows.x, method, given=rows.given, steps=steps, **options)


# ---- proposals


def test_a_proposal_in_the_datas_units_has_its_contexts_and_says_that_it_is_an_estimate():
    x, given = 100 + 7 * pairs().x.double(), 5 * pairs().given.double() - 20
    units = Coordinates(Units.fit(x, "scale"), Units.of_contexts(given))
    p, scale = DensityInDataUnits(Line(2.0), units), float(x.std(correction=0))

    def energy(y: Tensor, c: Tensor) -> Tensor:  # what p is, by hand
        centre = 2 * (c - given.mean(0)) / given.std(0, correction=0)
        return 0.5 * ((y - x.mean(0)) / scale - centre[:, None]).square().sum(-1)

    z = log_partition_given(energy, p, given[:3], draws=64)
    assert z.value.tolist() == pytest.approx(3 * [math.log(scale) + 0.5 * math.log(2 * math.pi)], abs=1e-5)
    with pytest.raises(UnsupportedError, match="biased"):
        log_partition_given(energy, DensityInDataUnits(Generator(1), units), given[:3])


def test_a_flow_in_the_datas_units_tells_what_its_ode_leaves_in_log_z():
    """It hid it: its error was that of the draws alone, and the advice named a `with_steps` that it had not."""
    given = torch.zeros(3, 1, dtype=torch.float64)
    units = Coordinates(Units.fit(100 + 7 * pairs().x.double(), "scale"), None)
    flow = InterpolantFlow(1, 1, width=16, layers=3, steps=4, scored=3, seed=0).double()
    for p in flow.parameters():  # a field that bends
        torch.nn.init.normal_(p, std=0.9, generator=torch.Generator().manual_seed(p.numel()))
    p = density_in_data_units(flow, units)

    def inside(q):
        return log_partition_given(lambda u, c: -fine.log_prob(u, c), q, given, draws=256, rng=generator(0))

    def outside(q):
        energy = lambda x, c: -density_in_data_units(fine, units).log_prob(x, c)  # noqa: E731
        return log_partition_given(energy, q, given, draws=256, rng=generator(0))

    fine = flow.with_steps(256, 257)
    rough, there = inside(flow), outside(p)
    assert rough.coarse.any()
    for name in ("value", "std_error", "coarse"):
        torch.testing.assert_close(vars(there)[name], vars(rough)[name], rtol=1e-6, atol=1e-9)
    exact = outside(p.with_steps(256, 257))
    assert exact.value.abs().max() < 1e-6
    assert exact.std_error.max() < 1e-3 < there.std_error.max()
    assert p.finely().inner.steps == flow.finely().steps
    assert type(density_in_data_units(Line(2.0), units)) is DensityInDataUnits


@over("kind", [RankingNCE, ImplicitBC])
@over("proposal", ["gaussian", "uniform", SMALL_FLOW, FEW_STEPS])
def test_contexts_with_every_proposal(kind, proposal, tmp_path):
    if proposal is SMALL_FLOW and importlib.util.find_spec("zuko") is None:
        pytest.skip("zuko is not installed")
    run = fit(None, kind(negatives_per_datum=3, proposal=proposal), steps=3, out=tmp_path / "run")
    assert isinstance(run.inside["energy"], ConditionalNet)
    assert all(math.isfinite(v) for v in run.history[-1].values())
    assert (run.log_partition, run.walkers) == (None, None)  # of all contexts together there is none
    learns = proposal in (SMALL_FLOW, FEW_STEPS)
    assert ("proposal_loss" in run.history[-1]) == learns
    assert ("proposal_nll" in run.history[-1]) == (kind is RankingNCE)
    again = ms.load_run(tmp_path / "run")
    rows = pairs(5, seed=1)
    torch.testing.assert_close(again.energy(rows.x, rows.given), run.energy(rows.x, rows.given))
    q, p = again.players["proposal"], run.players["proposal"]
    given = (rows.given,) if learns else ()
    torch.testing.assert_close(q.log_prob(rows.x, *given), p.log_prob(rows.x, *given))


def test_the_slope_is_found_with_any_proposal():
    """The energy holds the truth, so the proposal decides the variance only; without correction it is biased."""
    rows = pairs(4000)
    exact = float((rows.x * rows.given).mean() / rows.given.square().mean())  # maximum likelihood
    for proposal in ("gaussian", Line(1.5)):
        method = RankingNCE(negatives_per_datum=16, proposal=proposal, train_proposal=False)
        run = fit(Slope(), method, rows, steps=150, optimiser=SGD(0.05), batch_size=None, log_every=50)
        assert abs(run.energy.theta.item() - exact) < 0.03
    biased = ImplicitBC(negatives_per_datum=16, proposal=Line(1.5), train_proposal=False)
    run = fit(Slope(), biased, rows, steps=150, optimiser=SGD(0.05), batch_size=None, log_every=50)
    assert abs(run.energy.theta.item() - exact) > 0.1


@needs_zuko
def test_a_conditional_flow_is_normalised_for_each_context_and_learns_them_apart():
    rows = pairs(2000)
    flow = Flow(1, 1, data=rows, layers=2, hidden=(16,), seed=1)
    grid = torch.linspace(-12, 12, 4001)[:, None]
    given = torch.tensor([[-1.5], [0.0], [1.0]])
    flow.fit(rows, 150, batch=256, learning_rate=1e-2)
    with torch.no_grad():
        log_p = flow.log_prob(grid.expand(3, -1, 1), given)
        mean = (log_p.exp() * grid[:, 0]).sum(1) * 24 / 4000
    torch.testing.assert_close(log_p.exp().sum(1) * 24 / 4000, torch.ones(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(mean, 2 * given[:, 0], rtol=0, atol=0.25)
    x, log_prob = flow.sample_and_log_prob(4000, torch.Generator().manual_seed(0), given)
    torch.testing.assert_close(flow.log_prob(x, given), log_prob, rtol=0, atol=1e-3)
    torch.testing.assert_close(flow.log_prob(x[:, 0], given), log_prob[:, 0], rtol=0, atol=1e-3)
    drawn, error = mean_and_error(x[..., 0].T)
    assert bool(((drawn - mean).abs() < z_limit(3) * error + 1e-3).all())
    assert flow.loss(rows.x, rows.given).item() == pytest.approx(
        -flow.log_prob(rows.x, rows.given).mean().item()
    )


def test_negatives_are_drawn_for_the_context_of_their_datum():
    rows, method = pairs(60), RankingNCE(negatives_per_datum=200, proposal=Line(10.0))
    context = Context(
        Slope(), {"proposal": Line(10.0)}, rows.x, Gaussian(torch.zeros(1)), torch.Generator(), 0
    )
    negatives, _, _ = method.negatives(context, Nothing(), rows)
    means, error = mean_and_error(negatives.x.view(60, 200).T - 10 * rows.given[:, 0])
    assert float((means.abs() / error).max()) < z_limit(60)
    assert negatives.log_prob.shape == (12_000,)


# ---- Algorithm 1


def sequence(method: RankingNCE, proposal: nn.Module, updates: int) -> str:
    """Who is stepped in which update: e(nergy), p(roposal) or b(oth)."""
    context = Context(
        Slope(), {"proposal": proposal}, torch.zeros(1, 1), Gaussian(torch.zeros(1)), torch.Generator()
    )
    found = ""
    for context.step in range(updates):
        turns = method.turns(context)
        found += "b" if len(turns) == 2 else turns[0][0]
    return found


@over(
    ("settings", "expected"),
    [
        ({}, "bbbbbbbb"),
        ({"proposal_steps": 2, "energy_steps": 3}, "ppeeeppe"),
        ({"proposal_steps": 3}, "pppepppe"),
        ({"pretrain": 3}, "pppbbbbb"),
        ({"pretrain": 2, "energy_steps": 2}, "pppeepee"),
        ({"pretrain": 3, "train_proposal": False}, "pppeeeee"),
        ({"train_proposal": False}, "eeeeeeee"),
    ],
)
def test_the_order_of_steps(settings, expected):
    assert sequence(RankingNCE(**settings), Line(), 8) == expected
    assert (
        sequence(RankingNCE(**settings), Gaussian(torch.zeros(1)), 8) == "e" * 8
    )  # nothing of it could learn


@over("settings", [{}, {"proposal_steps": 3}, {"pretrain": 4, "energy_steps": 2}])
def test_learning_rates_follow_the_turns_of_each_player(settings):
    """A cosine ends where training ends, whoever had a turn how often."""
    rates: dict[str, list[float]] = {"energy": [], "proposal": []}

    class Watched(torch.optim.SGD):
        player = ""

        def step(self, closure=None):
            rates[self.player].append(self.param_groups[0]["lr"])
            return super().step(closure)

    def named(name: str):
        return lambda parameters: type(name, (Watched,), {"player": name})(parameters, lr=1e-3)

    optimisers = {name: named(name) for name in rates}
    method = RankingNCE(negatives_per_datum=2, proposal=Line(), **settings)
    fit(Slope(), method, steps=16, optimisers=optimisers, schedule=Schedule("cosine"))
    context = Context(
        Slope(), {"proposal": Line()}, torch.zeros(1, 1), Gaussian(torch.zeros(1)), torch.Generator()
    )
    for name, seen in rates.items():
        n = len(seen)
        assert n == method.updates(context, name, 16)
        assert seen == pytest.approx([1e-3 * 0.5 * (1 + math.cos(math.pi * i / n)) for i in range(n)])


def test_in_an_update_of_the_proposal_the_energy_stays_and_nothing_is_evaluated():
    method = RankingNCE(negatives_per_datum=3, proposal=Line(0.0), pretrain=10, train_proposal=False)
    energy = Slope()
    run = fit(energy, method, steps=10, optimiser=SGD(0.1), batch_size=None)
    assert (energy.theta.item(), run.history[-1]["evaluations"]) == (1.0, 0)
    learned = run.players["proposal"].slope.item()
    assert learned > 1.0
    run = fit(energy, method, steps=14, optimiser=SGD(0.1), batch_size=None)
    assert run.players["proposal"].slope.item() == learned  # as it was after ten updates
    assert energy.theta.item() != 1.0
    assert run.history[-1]["evaluations"] == 4 * 400 * 4
    assert "objective" not in run.history[9]
    assert "objective" in run.history[10]


def test_every_step_has_a_batch_of_its_own():
    seen = []

    class Watching(Line):
        def loss(self, x, given, *, rng):
            seen.append(x)
            return -self.log_prob(x, given).mean()

    fit(Slope(), RankingNCE(proposal=Watching(), proposal_steps=3, negatives_per_datum=2), steps=7)
    assert len(seen) == 6  # the proposal's own loss, in updates 0 to 2 and 4 to 6
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_data_noise_can_be_annealed():
    run = fit(Slope(), RankingNCE(negatives_per_datum=2), data_noise=0.3, data_noise_final=0.0)
    assert math.isfinite(run.history[-1]["objective"])


# ---- the adversary


def test_an_adversary_goes_to_the_data_although_nothing_asks_for_likelihood():
    """Where energy and proposal both hold the truth, both end there (Proposition 4.13)."""
    rows = pairs(2000)
    rows = Batch(
        rows.x + 0.5 * math.sqrt(3) * torch.randn(2000, 1, generator=torch.Generator().manual_seed(5)),
        rows.given,
    )

    class Unit(Slope):
        def forward(self, x, given):
            return 0.25 * super().forward(x, given)

    method = RankingNCE(negatives_per_datum=8, proposal=Line(1.0), adversarial=True, proposal_rate=0.5)
    run = fit(Unit(1.5), method, rows, steps=400, optimiser=SGD(0.3), batch_size=None, log_every=50)
    assert abs(run.energy.theta.item() - 2) < 0.1
    assert abs(run.players["proposal"].slope.item() - 2) < 0.1
    assert run.history[-1]["objective"] == pytest.approx(-math.log(9), abs=0.05)
    assert run.history[-1]["evaluations"] == 400 * 2 * 9 * 2000


def test_an_adversary_must_be_able_to_follow_its_draws():
    with pytest.raises(
        ConfigError, match=r"ranking-nce\.adversarial: must be False for a proposal without parameters"
    ):
        fit(Slope(), RankingNCE(adversarial=True), steps=1)
    with pytest.raises(
        ConfigError, match=r"ranking-nce\.adversarial: must be False with train_proposal=False"
    ):
        RankingNCE(adversarial=True, train_proposal=False)


def test_an_adversary_is_pre_trained_by_its_own_loss():
    """Against an energy that has not learned it would run from the data: here to the energy's slope of −3."""
    options = {"steps": 15, "optimiser": SGD(0.1)}
    pre_trained = fit(Slope(-3.0), RankingNCE(proposal=Line(1.0), adversarial=True, pretrain=15), **options)
    plain = fit(Slope(-3.0), RankingNCE(proposal=Line(1.0), pretrain=15), **options)
    slope = pre_trained.players["proposal"].slope
    assert torch.equal(slope, plain.players["proposal"].slope)
    assert abs(slope.item() - 2) < 0.4
    assert pre_trained.energy.theta.item() == -3
    assert pre_trained.history[-1]["evaluations"] == 0


# ---- a shared encoder


class Halves(nn.Module):
    """Contexts of shape (2, 3) to vectors."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.SiLU())

    def forward(self, given: Tensor) -> Tensor:
        return self.body(given)


def many(n: int = 200) -> Batch:
    rng = torch.Generator().manual_seed(3)
    given = torch.randn((n, 2, 3), generator=rng)
    return Batch(given.sum((1, 2))[:, None] + torch.randn((n, 1), generator=rng), given)


@over("proposal", [SMALL_FLOW, FEW_STEPS])
@over("owner", ["energy", "proposal"])
def test_one_encoder_for_both_is_moved_by_its_owner_only(owner, proposal, tmp_path):
    if proposal is SMALL_FLOW and importlib.util.find_spec("zuko") is None:
        pytest.skip("zuko is not installed")
    rows, encoder = many(), Halves()
    before = copy.deepcopy(encoder.state_dict())

    def unmoved():
        return all(torch.equal(v, before[k]) for k, v in encoder.state_dict().items())

    energy = ConditionalNet(1, (2, 3), width=8, depth=3, encoder=encoder, data=rows)
    method = RankingNCE(
        negatives_per_datum=2, proposal=proposal, encoder_owner=owner, pretrain=3, train_proposal=False
    )
    run = fit(energy, method, rows, steps=3)  # only the proposal learns
    assert unmoved() == (owner == "energy")
    before = copy.deepcopy(encoder.state_dict())
    method = RankingNCE(negatives_per_datum=2, proposal=proposal, encoder_owner=owner, train_proposal=False)
    run = fit(energy, method, rows, steps=3, out=tmp_path / "run", ema=0.9)  # only the energy learns
    assert unmoved() == (owner == "proposal")
    holds = {
        name: any(p is encoder.body[1].weight for p in m.parameters()) for name, m in run.players.items()
    }
    assert holds == {"energy": owner == "energy", "proposal": owner == "proposal"}

    fresh = ConditionalNet(1, (2, 3), width=8, depth=3, encoder=Halves(), data=rows)
    again = ms.load_run(tmp_path / "run", fresh)
    torch.testing.assert_close(again.energy(rows.x, rows.given), run.energy(rows.x, rows.given))
    q, p = (r.players["proposal"] for r in (again, run))
    torch.testing.assert_close(q.log_prob(rows.x[:9], rows.given[:9]), p.log_prob(rows.x[:9], rows.given[:9]))


@over("proposal", [SMALL_FLOW, FEW_STEPS])
def test_a_shared_encoder_in_double_precision(proposal):
    if proposal is SMALL_FLOW and importlib.util.find_spec("zuko") is None:
        pytest.skip("zuko is not installed")
    rows = many(60)
    energy = ConditionalNet(1, (2, 3), width=8, depth=3, encoder=Halves(), data=rows)
    method = RankingNCE(negatives_per_datum=2, proposal=proposal, encoder_owner="energy")
    run = fit(energy, method, rows, steps=2, precision="64-true", batch_size=None)
    assert run.players["proposal"].log_prob(rows.x.double(), rows.given.double()).dtype == torch.float64


def test_an_encoder_that_cannot_be_shared_is_named():
    plain = ConditionalNet(1, 1, width=8, depth=3, encoder=lambda given: given)
    with pytest.raises(
        ConfigError, match=r"ranking-nce\.encoder_owner: must be for an energy with an `encoder`"
    ):
        fit(plain, RankingNCE(proposal=FEW_STEPS, encoder_owner="energy"), steps=1)
    with pytest.raises(ConfigError, match="needs a proposal by name, flow or interpolant, got 'gaussian'"):
        fit(plain, RankingNCE(encoder_owner="energy"), steps=1)


def test_a_copy_of_a_borrower_borrows_from_the_same_owner():
    encoder = Halves()
    energy = ConditionalNet(1, (2, 3), width=8, depth=3, encoder=Borrowed(encoder))
    assert copy.deepcopy(energy).encoder.module is encoder


# ---- bad input


class Broken(Gaussian):
    """A proposal whose density breaks at some update."""

    def __init__(self, value: float):
        super().__init__(torch.zeros(1), 3.0)
        self.value, self.asked = value, 0

    def sample_and_log_prob(self, n, rng):
        x, log_prob = super().sample_and_log_prob(n, rng)
        self.asked += 1
        return x, torch.where(torch.arange(n) < 5, self.value, log_prob) if self.asked > 2 else log_prob


@over(("value", "words"), [(-math.inf, "−inf at 5 and NaN at 0"), (math.nan, "−inf at 0 and NaN at 5")])
def test_densities_that_are_zero_or_no_number_are_named_with_their_count(value, words):
    with pytest.raises(
        InputError, match=rf"ranking-nce\.proposal: at update 2 log p_ξ is {words} of 300 negatives"
    ):
        fit(Slope(), RankingNCE(negatives_per_datum=3, proposal=Broken(value)))


@over(
    ("method", "words"),
    [
        (RankingNCE(shared=True), r"ranking-nce\.shared: events with contexts cannot share negatives"),
        (
            RankingNCE(proposal=nn.Linear(1, 1)),
            r"ranking-nce\.proposal: must be one of .* log_prob and event_shape",
        ),
        (
            RankingNCE(proposal=Uniform(torch.zeros(1), torch.ones(1))),
            "data rows lie outside the proposal's support",
        ),
        (
            RankingNCE(proposal=InterpolantFlow(1, 2, width=4)),
            r"contexts of the proposal have shape \(2,\), those",
        ),
    ],
)
def test_proposals_that_do_not_fit_are_named(method, words):
    with pytest.raises(InputError, match=words):
        fit(Slope(), method, steps=1)


def test_a_proposal_with_contexts_needs_data_that_have_some():
    with pytest.raises(InputError, match=r"contexts of the proposal have shape \(1,\), the data have none"):
        ms.fit(None, torch.randn(50, 1), RankingNCE(proposal=Line()), steps=1)


@each(
    "make, field",
    [
        (lambda: RankingNCE(proposal_steps=0), "ranking-nce.proposal_steps"),
        (lambda: RankingNCE(energy_steps=0), "ranking-nce.energy_steps"),
        (lambda: RankingNCE(pretrain=-1), "ranking-nce.pretrain"),
        (lambda: RankingNCE(encoder_owner="both"), "ranking-nce.encoder_owner"),
        (lambda: RankingNCE(proposal={"name": "interpolant", "widht": 8}), "ranking-nce.proposal.widht"),
        (lambda: RankingNCE(proposal={"name": "gaussian", "width": 8}), "ranking-nce.proposal.width"),
        (lambda: RankingNCE(proposal={"width": 8}), "ranking-nce.proposal"),
    ],
)
def test_bad_settings_name_field_and_value(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == field


def test_contexts_of_another_number_than_events():
    with pytest.raises(InputError, match="given"):
        ms.fit(None, torch.zeros(5, 1), RankingNCE(), steps=1, given=torch.zeros(4, 1))
    with pytest.raises(InputError, match="given: must be one for each of the 2 rows of events, got 3"):
        Flow(1, 1, layers=1, hidden=(4,)).log_prob(torch.zeros(2, 1), torch.zeros(3, 1))


def test_contexts_are_not_dropped_by_a_method_that_has_no_use_for_them():
    with pytest.raises(UnsupportedError, match="given: 'cd' does not look at contexts"):
        ms.fit(None, torch.randn(9, 1), "cd", steps=1, given=torch.randn(9, 1))
    with pytest.raises(UnsupportedError, match="given: 'cd' does not look at contexts"):
        ms.fit(None, "toy:pinwheel-given", "cd", steps=1)


TINY_FLOW = {"name": "interpolant", "width": 4, "steps": 4, "scored": 3}
UNWATCHED = {
    "interpolant": RankingNCE(2, TINY_FLOW),
    "adversarial": RankingNCE(2, TINY_FLOW, adversarial=True),
    "ibc": ImplicitBC(2),
    "interpolating": ms.methods.InterpolatingNCE(2, TINY_FLOW, times=2),
}


@pytest.mark.parametrize("method", UNWATCHED.values(), ids=UNWATCHED)
def test_an_update_reads_no_number_back_from_a_device_that_is_not_looked_at(method):
    rows, there = pairs(6), torch.device("meta")  # where nothing can be read
    energy = ConditionalNet(1, rows.given.shape[1:], 4, 2, method.timed, data=rows)
    players = {"energy": energy, **method.companions(energy, rows, None, 0)}
    for player in players.values():
        player.to(there)
    batch = Batch(rows.x.to(there), rows.given.to(there))
    context = Context(energy, players, batch.x, None, torch.Generator(), step=1, given=batch.given)
    with unwatched():
        negatives = method.negatives(context, None, batch)[0]
        for player in method.turns(context):
            method.loss(context, None, player, batch, negatives)[0].backward()


def test_support_is_asked_for_with_contexts():
    rows = pairs(50)
    require_support(proposal_for("gaussian", rows, "proposal"), rows, "proposal")
    with pytest.raises(InputError, match="proposal: 50 of 50 data rows lie outside"):
        require_support(Uniform(torch.tensor([90.0]), torch.tensor([91.0])), rows, "proposal")


@over("kind", [RankingNCE, InterpolatingNCE])
def test_an_energy_may_learn_from_fewer_rows_than_its_proposal(kind):
    rows = many(24)
    energy = ConditionalNet(1, (2, 3), width=8, depth=3, time=kind is InterpolatingNCE, data=rows)
    whole = kind(negatives_per_datum=2, proposal=FEW_STEPS)
    half = replace(whole, energy_rows=12)
    players = {"energy": energy, **whole.companions(energy, rows, None, 0)}

    def losses(method, batch):
        rng = torch.Generator().manual_seed(3)
        context = Context(energy, players, rows.x, None, rng, given=rows.given)
        drawn, _, _ = method.negatives(context, None, batch)
        found = [method.loss(context, None, "energy", batch, drawn)[0]]
        rng.manual_seed(4)
        return [*found, method.loss(context, None, "proposal", batch, drawn)[0]]

    of_half, of_rows, of_all = losses(half, rows), losses(whole, rows[:12]), losses(whole, rows)
    assert torch.equal(of_half[0], of_rows[0])
    assert torch.equal(of_half[1], of_all[1])
    assert not torch.equal(of_half[0], of_all[0])
    context = Context(energy, players, rows.x, None, torch.Generator(), given=rows.given)
    assert half.evaluations(context, 24) == whole.evaluations(context, 12)
    with pytest.raises(ConfigError, match="energy_rows"):
        kind(energy_rows=0)
