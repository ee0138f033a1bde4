"""The kernels that end an update are the operations that they replace, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from metastable.core import resampling
from metastable.core.weights import log_mean_exp
from metastable.kernels import ChainResult, ChainState, Info, fused
from metastable.kernels.adaptation import follow_acceptance
from metastable.walkers.jarzynski import paced, shift_of
from metastable.walkers.population import Population
from metastable.walkers.settled import Rules, Settled, resampled, told_of

HOME = "cuda" if torch.cuda.is_available() else "cpu"
READY = fused.triton_is_here() and (HOME == "cuda" or fused.interpreted())
pytestmark = pytest.mark.skipif(not READY, reason="needs Triton, with a GPU or TRITON_INTERPRET=1")
RULES = Rules(None, 2, 0.9, 0.65, 0.2, math.log(3.0), 0.03, 1.7)  # pyright: ignore


class Case:
    """Populations after chains, by the kernels and by hand from the same uniforms."""

    def __init__(self, groups: int, n: int, D: int, threshold: float, spread: float, rows: int | None = None):
        rng = torch.Generator().manual_seed(groups + n + D)
        draw = lambda *shape: torch.randn(shape, generator=rng).to(HOME)  # noqa: E731
        total = groups * n
        start = Population.start(draw(total, D), draw(total), draw(0, D), draw(groups).double())
        start = start._replace(
            log_weight=(spread * draw(total)).double(),
            ancestor=torch.randint(total, (total,), generator=rng).to(HOME),
            past_noise=draw(groups).double().abs(),
        )
        U = start.energy + spread * draw(total)
        some = None if rows is None else torch.randperm(total, generator=rng)[:rows].to(HOME)
        count = total if rows is None else rows
        Y, U_new, self.info = draw(count, D), draw(count), Info(draw(count).sigmoid(), draw(count).abs())
        self.uniform = torch.rand(groups, generator=rng, dtype=torch.float64).to(HOME)
        every = torch.arange(total, device=HOME) if some is None else some
        x, after = start.x.index_copy(0, every, Y), U.index_copy(0, every, U_new)
        made = ChainResult(ChainState(x, after, x), self.info, None, None)
        self.got = resampled(start, U, made, threshold, self.uniform)
        self.shift = shift_of(start.log_weight, U - start.energy)
        walkers = start.reweigh(U)
        self.before = walkers.put(some, Y, walkers.take(some)[1], U_new, walkers.grad)
        self.log_z, self.ess = self.before.log_partition_and_ess()
        self.due = self.ess < threshold

    def by_hand(self, monkeypatch) -> Population:
        """Resampled by the operations."""
        given = 1 - self.uniform[:, None]
        marked = lambda p, n, rng: given if len(p) == len(given) else given[self.due]  # noqa: E731
        monkeypatch.setattr(resampling, "_uniform", marked)
        return self.before.resample(self.due, "systematic", "principal", torch.Generator(HOME))


CASES = {
    "one": (1, 100, 2, 0.9, 1.0),
    "some due": (6, 33, 3, 0.35, 1.0),
    "none due": (4, 64, 1, 0.0, 1.0),
    "all due": (2, 20, 8, 1.0, 0.3),
    "more than a chunk": (1, 700, 2, 0.9, 2.0),
    "a few moved": (1, 50, 2, 0.9, 1.0, 7),
}


@pytest.mark.parametrize("name", CASES)
def test_walkers_are_weighed_and_resampled_as_by_hand(name, monkeypatch):
    case = Case(*CASES[name])
    assert name != "some due" or 0 < int(case.due.sum()) < len(case.due)
    want, got = case.by_hand(monkeypatch), case.got.walkers
    for field in ("x", "log_weight", "energy", "ancestor", "resamplings"):
        assert torch.equal(getattr(got, field), getattr(want, field)), field
    for field in ("log_z", "past_noise"):
        torch.testing.assert_close(getattr(got, field), getattr(want, field), rtol=1e-12, atol=1e-12)
    told, expected = case.got.told, torch.stack([case.log_z, case.ess, case.due.double()], 1)
    torch.testing.assert_close(told[:, :3], expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(case.got.living.view(got.groups, -1).double().mean(1), want.ancestors())
    if got.groups == 1:
        seen = torch.stack(
            [case.shift, case.info.acceptance.double().mean(), case.info.moved.double().mean()]
        )
        torch.testing.assert_close(told[0, 4:], seen, rtol=1e-12, atol=1e-12)


def test_equal_weights_keep_every_walker_and_ties_are_told_apart():
    walkers = Population.start(*(torch.zeros(s, device=HOME) for s in ((40, 2), (40,), (0, 2), (1,))))
    ones = torch.ones(40, device=HOME)
    made = ChainResult(ChainState(walkers.x, walkers.energy, walkers.x), Info(ones, ones), None, None)
    uniform = torch.full((1,), 0.3, dtype=torch.float64, device=HOME)
    found = resampled(walkers, walkers.energy, made, 1.1, uniform)
    assert torch.equal(found.walkers.ancestor, walkers.ancestor)
    assert int(found.walkers.resamplings) == 1


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=HOME)


def told(acceptance: float | None = None) -> tuple[Case, Case, Tensor, dict[str, Tensor]]:
    first, read = Case(1, 64, 2, 0.9, 0.3), Case(6, 33, 3, 0.35, 1.0)
    if acceptance is not None:
        first.got.told[0, 5] = acceptance
    return first, read, *told_of(RULES, first.got, read.got, True, number(-1.0), number(-0.5))


def test_metrics_are_those_of_the_operations():
    first, read, upcoming, metrics = told()
    assert torch.equal(upcoming[1:], paced(number(-0.5), first.got.told[0, 4], 0.03)[None])
    after, log_z = read.got.walkers, read.got.told[:, 0]
    noise = after.noise(torch.where(read.due, 1.0, read.ess)).mean().sqrt()
    wanted = {
        "displacement": (2 * first.info.moved.double()).mean().sqrt() / 1.7,
        "ess": first.ess[0],
        "resampled": first.due[0].double(),
        "resamplings": first.got.walkers.resamplings[0].double(),
        "ancestors": after.ancestors().amin(),
        "log_z": log_mean_exp(log_z),
        "log_z_steering": first.log_z[0],
        "log_z_noise": noise,
        "acceptance": first.info.acceptance.double().mean(),
        "pace": first.shift,
        "log_z_se": log_z.std() / math.sqrt(6),
        "log_z_gap": first.log_z[0] - log_mean_exp(log_z),
        "ess_held_out": read.ess.mean(),
        "rate_factor": number(-0.5).exp(),
        "step_size": number(-1.0).exp(),
    }
    assert list(wanted) == list(metrics)
    for name, value in wanted.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("acceptance", [0.0, 0.01, 0.3, 0.65, 0.9, 1.0])
def test_the_next_step_follows_the_acceptance(acceptance):
    upcoming = told(acceptance)[2]
    want = follow_acceptance(number(-1.0), number(acceptance), 0.65, 0.2).clamp(max=RULES.longest)
    torch.testing.assert_close(upcoming[0], want, rtol=1e-6, atol=0)


def test_one_population_tells_no_spread():
    case = Case(1, 64, 2, 0.9, 0.3)
    _, metrics = told_of(RULES._replace(pace=None), case.got, Settled(*case.got), False, None, None)
    assert not {"log_z_se", "log_z_gap", "ess_held_out", "rate_factor", "step_size"} & set(metrics)
    torch.testing.assert_close(metrics["log_z"], case.log_z[0], rtol=1e-12, atol=0)
