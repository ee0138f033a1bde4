"""Draws that are used again change the cost, not what is learned; an energy on its proposal starts at chance."""

import copy
import math
import shutil

import pytest
import torch

import metastable as ms
from metastable.core import ConfigError
from metastable.core.batch import Batch
from metastable.core.method import Context, Negatives
from metastable.core.pixels import Frames, table_of
from metastable.energies import ConditionalNet, OnProposal
from metastable.methods.draw_pool import as_kept, drawn_rows, empty_pool, given_of, keep_draws, kept_pool
from metastable.proposals import Gaussian

pytestmark = pytest.mark.filterwarnings("ignore:Along")  # a parabola that starts flat

RNG = torch.Generator().manual_seed(0)
X = 1 + 0.5 * torch.randn(512, 1, generator=RNG)
GIVEN = torch.randn(512, 1, generator=RNG)


class Quadratic(torch.nn.Module):
    """½(x/σ)² + bx: with the proposal N(0, 1) the data N(1, ¼) have σ⁻² = 4 and b = −4."""

    def __init__(self):
        super().__init__()
        self.event_shape = (1,)
        self.curve, self.slope = torch.nn.Parameter(torch.zeros(())), torch.nn.Parameter(torch.zeros(()))

    def start_at_zero(self):
        pass

    def forward(self, x):
        return (0.5 * self.curve * x.square() + self.slope * x).sum(-1)


def context_of(x, given=None):
    return Context(
        lambda x: x.sum(1), {}, x, Gaussian(torch.zeros(1)), torch.Generator().manual_seed(0), given=given
    )


def test_a_pool_of_an_earlier_release_goes_on_behind_its_rows():
    pool = empty_pool(context_of(X), 5, 2, False)
    pool = keep_draws(pool, Batch(X[:3]), Negatives(X[:3].repeat_interleave(2, 0)), None)
    tree = pool._asdict()
    assert torch.equal(kept_pool(tree).written, torch.tensor(3))
    del tree["written"]
    assert torch.equal(kept_pool(tree).written, torch.tensor(3))


def test_rows_are_written_around_and_keep_together():
    pool = empty_pool(context_of(X, GIVEN), 5, 2, True)
    for rows in (slice(0, 3), slice(3, 6)):
        batch = Batch(X[rows], GIVEN[rows])
        drawn = Negatives(X[rows].repeat_interleave(2, 0) + 10, log_prob=X[rows, 0].repeat_interleave(2) + 20)
        pool = keep_draws(pool, batch, drawn, X[rows, 0] + 30)
    order = [5, 1, 2, 3, 4]  # the sixth row stands where the first one was
    assert torch.equal(pool.x, X[order])
    assert torch.equal(pool.given, GIVEN[order])
    assert torch.equal(pool.negatives, X[order][:, None].expand(5, 2, 1) + 10)
    assert torch.equal(pool.log_prob[:, 0], X[order, 0] + 30)
    assert torch.equal(pool.newest(3).x, X[3:6]), "in the order in which they were written"
    rows = drawn_rows(pool.some(64, 2, torch.Generator().manual_seed(0)))
    assert set(rows.batch.x.flatten().tolist()) == set(X[[5, 1]].flatten().tolist()), (
        "of the filled ones only"
    )
    torch.testing.assert_close(rows.negatives.x.view(64, 2, 1), rows.batch.x[:, None].expand(64, 2, 1) + 10)
    torch.testing.assert_close(rows.log_prob, rows.batch.x[:, 0] + 30)


def test_pictures_that_contexts_end_with_are_kept_as_bytes():
    """A quarter of the room of their numbers, which come back but for their last bit, or as the nearest byte."""
    codes = torch.randint(256, (9, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    shown = torch.stack([torch.arange(8), torch.arange(8) + 1], 1)
    given = Frames(GIVEN[:8], codes, shown, table_of(-1.0, 1.0))
    pool = empty_pool(context_of(X[:8], given), 5, 2, False)
    assert (pool.given.shape, pool.seen.shape, pool.seen.dtype) == ((5, 1), (5, 32), torch.uint8)
    for rows in (slice(0, 3), slice(3, 6)):
        pool = keep_draws(pool, Batch(X[rows], given[rows]), Negatives(X[rows].repeat_interleave(2, 0)), None)
    found = drawn_rows(pool).batch.given
    torch.testing.assert_close(found, given[[5, 1, 2, 3, 4]], rtol=0, atol=2e-7)
    moved = given[:3] + torch.tensor([0.0] + 32 * [0.4 / 127.5])
    torch.testing.assert_close(as_kept(pool, Batch(X[:3], moved)).given, given[:3], rtol=0, atol=2e-7)
    pool = keep_draws(pool, Batch(X[:3], moved), Negatives(X[:3].repeat_interleave(2, 0)), None)
    torch.testing.assert_close(given_of(pool.newest(3)), given[:3], rtol=0, atol=2e-7)
    tree = pool._asdict()
    assert torch.equal(kept_pool(tree).seen, pool.seen)
    del tree["seen"]
    assert kept_pool(tree).seen.shape == (5, 0)


@pytest.mark.parametrize("reuse", [1, 5])
@pytest.mark.parametrize("kind", [ms.methods.RankingNCE, ms.methods.ImplicitBC])
def test_what_is_learned_is_the_same(kind, reuse):
    """By R-NCE the data, by IBC their ratio to the proposal."""
    method = kind(16, proposal=Gaussian(torch.zeros(1)), reuse=reuse, pool=2048)
    run = ms.fit(
        Quadratic(), X, method, 250, batch_size=256, learning_rate=0.1, evaluate=False, log_every=250
    )
    curve = 4 if kind is ms.methods.RankingNCE else 4 - 1
    assert run.energy.curve.item() == pytest.approx(curve, rel=0.15)
    assert run.energy.slope.item() == pytest.approx(-4, rel=0.15)


def test_draws_may_be_made_for_more_rows_than_an_update_learns_from():
    """Solves are as rare with a quarter of the uses, and the objective is as right."""
    options = {"batch_size": 256, "learning_rate": 0.1, "evaluate": False, "log_every": 250}
    own = {"proposal": Gaussian(torch.zeros(1)), "energy_rows": 64, "pool": 2048}
    each = ms.methods.RankingNCE(16, reuse=8, **own)
    whole = ms.methods.RankingNCE(16, reuse=2, draw_rows=256, **own)
    assert [method.refills(256).every for method in (each, whole)] == [8, 8]
    assert [method.refills(256).filling for method in (each, whole)] == [32, 8]
    drawn, points = [], type(whole).points
    object.__setattr__(whole, "points", lambda c, rows: drawn.append(len(rows)) or points(whole, c, rows))
    run = ms.fit(Quadratic(), X, whole, 250, **options)
    assert drawn == [256] * (8 + 31), "eight to fill it, and then one in eight"
    assert run.energy.curve.item() == pytest.approx(4, rel=0.2)
    assert run.energy.slope.item() == pytest.approx(-4, rel=0.2)


def test_rows_drawn_at_once_are_refused_where_every_update_draws():
    with pytest.raises(ConfigError, match=r"ranking-nce\.draw_rows: must be left out with reuse=1"):
        ms.methods.RankingNCE(16, draw_rows=256)
    with pytest.raises(ConfigError, match=r"ranking-nce\.draw_rows"):
        ms.methods.RankingNCE(16, draw_rows=0, reuse=2)


@pytest.mark.parametrize("given", [None, GIVEN], ids=["plain", "given"])
def test_points_at_every_time_keep_together_with_their_densities(given):
    """Rows that are taken are those that were drawn, for the flow as it was: the objective is as right."""
    flow = ms.proposals.InterpolantFlow(1, None if given is None else 1, width=4, steps=8, scored=9)
    with torch.no_grad():
        for p in flow.parameters():
            p += 0.3 * torch.randn(p.shape, generator=RNG)
    method = ms.methods.InterpolatingNCE(3, proposal=flow, times=2, reuse=4, pool=50, train_proposal=False)
    energy = lambda x, given, t: x.square().sum(-1)  # noqa: E731
    context = Context(
        energy, {"proposal": flow}, X, flow, torch.Generator().manual_seed(0), given=given, batch=20
    )
    state, drawn, counts = method.start(context), method.points, []
    method_points = lambda *given: counts.append(1) or drawn(*given)  # noqa: E731
    object.__setattr__(method, "points", method_points)
    for step in range(12):
        context.step = step
        rows = Batch(X, given)[20 * step : 20 * step + 20]
        taken, state, _ = method.negatives(context, state, rows)
        assert taken.t.shape == (20, 2)
        both = torch.cat([taken.positives[:, :, None], taken.negatives], 2).flatten(1, 2)
        t = taken.t[..., None].expand(20, 2, 4).flatten(1)
        with torch.no_grad():
            flat = both.flatten(0, 1) if given is None else both
            at = t.flatten() if given is None else t
            expected = flow.log_prob(flat, taken.given, at=at).view(20, 2, 4)
        torch.testing.assert_close(taken.log_prob, expected, atol=0.05, rtol=0)
        loss, metrics = method.loss(context, state, "energy", rows, taken)
        assert loss.isfinite()
        assert metrics["proposal_nll"].isfinite()
    assert len(counts) == 3 + 2, "three to fill it, and then one in four"


def test_an_energy_on_its_proposal_learns_the_difference():
    method = ms.methods.RankingNCE(16, proposal=Gaussian(torch.zeros(1)), reuse=5, pool=2048)
    run = ms.fit(
        OnProposal(Quadratic()),
        X,
        method,
        250,
        batch_size=256,
        learning_rate=0.1,
        evaluate=False,
        log_every=250,
    )
    network = run.energy.network
    assert network.curve.item() == pytest.approx(4 - 1, rel=0.15)
    assert network.slope.item() == pytest.approx(-4, rel=0.15)
    x = torch.tensor([[0.3]])
    normal = 0.5 * 0.09 + 0.5 * math.log(2 * math.pi)
    assert run.energy(x).item() == pytest.approx(network(x).item() + normal, abs=1e-4)


def test_it_starts_at_chance_whatever_the_proposal(tmp_path):
    method = {"name": "ranking-nce", "negatives_per_datum": 4, "proposal": "flow", "pretrain": 3}
    method |= {"train_proposal": False, "reuse": 3, "pool": 64}
    options = {"steps": 9, "batch_size": 32, "log_every": 1, "evaluate": False, "checkpoint_every": 3}
    data = ms.data.Dataset.of(torch.cat([X, -X], 1), "mine", given=GIVEN)
    run = ms.fit("on-proposal", data, method, **options, out=tmp_path / "whole")
    first = next(row for row in run.history if "objective" in row)
    assert first["objective"] == pytest.approx(-math.log(5), abs=1e-6)
    again = ms.load_run(tmp_path / "whole")
    x, c = torch.cat([X, -X], 1)[:5], GIVEN[:5]
    assert torch.equal(run.energy(x, c), again.energy(x, c))
    shutil.rmtree(tmp_path / "whole" / "checkpoints" / "step-00000009")  # as after a kill
    resumed = ms.fit("on-proposal", data, method, **options, out=tmp_path / "whole", resume=True)
    assert torch.equal(run.energy(x, c), resumed.energy(x, c)), "the pool is kept too"


def test_a_copy_stands_on_the_same_proposal():
    energy = OnProposal(ConditionalNet(2, 1, width=8, depth=2))
    flow = ms.proposals.Flow(2, context_shape=1, layers=1, hidden=(4,))
    energy.attach(flow)
    twin = copy.deepcopy(energy)
    assert twin.beneath[0] is flow
    assert twin.network is not energy.network
    assert "beneath" not in "".join(energy.state_dict()), "its weights are the method's"
    x, c = torch.randn(3, 4, 2), torch.randn(3, 1)
    torch.testing.assert_close(energy(x, c), -flow.log_prob(x, c))
    torch.testing.assert_close(energy(x[:, 0], c), energy(x, c)[:, 0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reuse": 0}, "ranking-nce.reuse"),
        ({"reuse": 2, "shared": True}, "draws are of one update"),
        ({"pool": 0}, "pool"),
    ],
)
def test_settings_that_do_not_fit(settings, words):
    with pytest.raises(ConfigError, match=words):
        ms.methods.RankingNCE(**settings)


def test_an_energy_on_a_moving_proposal_cannot_use_draws_again():
    method = {"name": "ranking-nce", "proposal": "flow", "reuse": 2}
    with pytest.raises(ConfigError, match="set train_proposal=False and pretrain"):
        ms.fit("on-proposal", X.repeat(1, 2), method, steps=2, given=GIVEN, evaluate=False)


def test_turns_of_the_energy_are_counted():
    flow = ms.proposals.Flow(1, layers=1, hidden=(4,))
    for settings in ({}, {"proposal_steps": 2, "energy_steps": 3}, {"train_proposal": False}):
        method = ms.methods.RankingNCE(proposal=flow, pretrain=4, **settings)
        context = Context(lambda x: x, {"proposal": flow}, X, flow, torch.Generator())
        for step in range(4, 20):
            context.step = step
            if "energy" in method.turns(context):
                assert method.energy_updates(context) == method.updates(context, "energy", step)
