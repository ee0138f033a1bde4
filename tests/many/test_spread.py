"""A population on several processes is weighed, resampled and learned from as it is on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group import on

from metastable.core import processes
from metastable.core.method import Negatives
from metastable.methods.base import contrast
from metastable.walkers.population import Population
from metastable.walkers.spread import Spread, share_of, some_of, spread, whole_of

N, REPEATS = 61, 25
SCHEMES = ("systematic", "stratified", "residual", "multinomial")


def population(n: int = N, groups: int = 1, slope: float = 3.0) -> Population:
    """Walkers in order, of weights that fall along them, so that those of the first process weigh most."""
    rng = torch.Generator().manual_seed(0)
    x = torch.arange(n, dtype=torch.float32)[:, None].repeat(1, 2)
    walkers = Population.start(x, x.sum(1), x + 0.5, torch.zeros(groups))
    noise = torch.randn(n, generator=rng, dtype=torch.float64)
    log_weight = -slope * torch.arange(n) / n + 0.5 * noise
    first = torch.randint(n // groups, (n,), generator=rng).sort().values
    if groups > 1:
        first = first % (n // groups) + torch.arange(groups).repeat_interleave(n // groups) * (n // groups)
    return walkers._replace(log_weight=log_weight, ancestor=first)


def numbers(walkers: Population) -> list[float]:
    read = (walkers.log_partition, walkers.ess, walkers.entropy, walkers.ancestors, walkers.noise)
    return [float(one()) for one in read]


def read_and_resampled() -> dict[str, Any]:
    """Numbers of a spread population, how often each walker goes on, and what that sends."""
    whole = population()
    own, told = spread(whole), {"numbers": numbers(spread(whole)), "rows": []}
    rng = torch.Generator().manual_seed(100 + processes.rank())
    told["copies"] = {}
    for scheme in SCHEMES:
        copies = torch.zeros(REPEATS, N, dtype=torch.int64)
        for k in range(REPEATS):
            made = own.resample(torch.ones(1, dtype=torch.bool), scheme, "energy", rng)
            assert isinstance(made, Spread) or not processes.is_many()
            assert torch.equal(made.grad, made.x + 0.5)  # all of a walker goes with it
            assert torch.equal(made.energy, made.x.sum(1))
            assert len(made.x) == len(own.x)
            assert not made.log_weight.any()
            copies[k] = torch.bincount(processes.joined(made.x[:, 0].long(), N), minlength=N)
        told["copies"][scheme] = copies
        told["log_z"] = float(made.log_partition())
    return told


@pytest.mark.parametrize("count", [2, 3])
def test_a_spread_population_is_read_and_resampled_as_a_whole(count):
    whole, every = population(), on(count, read_and_resampled)
    p = torch.softmax(whole.log_weight, 0)
    for told in every:
        assert told["numbers"] == pytest.approx(numbers(whole), abs=1e-12)
        assert told["log_z"] == pytest.approx(float(whole.log_partition()), abs=1e-12)
        for scheme, copies in told["copies"].items():
            assert torch.equal(copies, every[0]["copies"][scheme])
            assert (copies.sum(1) == N).all()
            error = ((copies.double().mean(0) - N * p) / (N * p * (1 - p) / REPEATS).sqrt()).abs().max()
            assert error < 5  # of independent draws; those of all other schemes vary less
            low, high = (N * p).floor().long(), (N * p).ceil().long()
            if scheme == "systematic":
                assert ((copies == low) | (copies == high)).all()
            if scheme == "residual":
                assert (copies >= low).all()


def heard_once() -> list[bool]:
    """What one message says is what would be asked for again, to the last bit, before a resampling and after."""
    own, rng = spread(population()), torch.Generator().manual_seed(processes.rank())
    assert isinstance(own, Spread)
    other, need = rng.clone_state(), torch.ones(1, dtype=torch.bool)
    accepted, once = torch.tensor(float(processes.rank())), rng.clone_state()
    torch.rand((), generator=once, dtype=torch.float64)  # all that a resampling draws
    totals, before = own.totals(rng, accepted), processes.messages.copy()
    made = own.resample(need, "systematic", "energy", rng, totals)
    assert isinstance(made, Spread)
    silent = processes.messages["numbers"] == before["numbers"]
    asked = own.resample(need, "systematic", "energy", other)
    pairs = [
        (totals.share, share_of(own.log_weight)),
        (totals.resampled.share, share_of(made.log_weight)),
        (totals.log_z, own.log_partition()),
        (totals.resampled.log_z, made.log_partition()),
        (totals.ess, own.ess()),
        (made.noise(totals.resampled.ess, totals), made.noise()),
        (made.ancestors(totals), made.ancestors()),
        (totals.means, torch.tensor([(processes.count() - 1) / 2]).double()),
        (rng.get_state(), other.get_state()),
        (rng.get_state(), once.get_state()),
        *zip(made[:-1], asked[:-1], strict=True),
    ]
    return [silent, *(torch.equal(a, b) for a, b in pairs)]


@pytest.mark.parametrize("count", [2, 3])
def test_what_one_message_has_said_need_not_be_asked_again(count):
    assert all(all(told) for told in on(count, heard_once))


def gradients() -> list[float]:
    """Of the loss on a part of data and walkers, averaged over processes."""
    theta = torch.tensor([0.3, -0.2], requires_grad=True)
    own, data = spread(population(60)), torch.linspace(-1, 2, 24)[:, None].repeat(1, 2)
    rows = data[processes.rank() :: processes.count()]
    negatives = Negatives(own.x / 30, own.log_weight, share=share_of(own.log_weight))
    loss, _ = contrast(lambda x: (x.square() * theta).sum(1), rows, negatives)
    loss.backward()
    processes.average_gradients([theta])
    assert theta.grad is not None
    return theta.grad.tolist()


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_are_those_of_all_walkers_and_all_rows(count):
    alone = gradients()
    assert all(one == pytest.approx(alone, rel=1e-5) for one in on(count, gradients))


def traffic() -> tuple[int, int, float, float]:
    """Walkers that had to move, bytes of each, and what this process sent for a resampling."""
    n = 4000
    own = spread(population(n, slope=1.0))
    known, before = own.log_partition_and_ess(), processes.sent.copy()
    rng = torch.Generator().manual_seed(processes.rank())
    made = own.resample(torch.ones(1, dtype=torch.bool), "systematic", "principal", rng, known)
    sent = processes.sent - before
    p = torch.softmax(population(n, slope=1.0).log_weight, 0)
    weight = float(p[processes.own_rows(n)].sum())
    width = sum(value[:1].nbytes for value in (made.x, made.energy, made.grad, made.ancestor))
    return round(max(0.0, weight * n - len(own.x))), width, sent["walkers"], sum(sent.values())


@pytest.mark.parametrize("count", [2, 3])
def test_only_walkers_that_must_move_are_sent(count):
    told = on(count, traffic)
    least = sum(must for must, _, _, _ in told) * told[0][1]
    assert least > 300 * told[0][1]
    assert sum(sent for _, _, sent, _ in told) <= 1.01 * least
    assert sum(every for _, _, _, every in told) <= 1.2 * least


def there_and_back() -> bool:
    """Walkers that are shared out and gathered again are as they were."""
    one, several = population(), population(60, groups=5)
    pairs = [(one, whole_of(spread(one))), (several, whole_of(some_of(several)))]
    return all(torch.equal(a, b) for old, new in pairs for a, b in zip(old[:-1], new[:-1], strict=True))


def whole_populations() -> tuple[int, list[float], list[float]]:
    """Of five held-out populations, those of this process, and what each of them says by itself."""
    several = population(60, groups=5)
    own, mine = some_of(several), processes.own_rows(5)
    assert own.x.shape[0] == 12 * own.groups
    assert int(own.ancestor.min()) >= 0
    assert int(own.ancestor.max()) < len(own.x)  # their ancestors are there, too
    return own.groups, own.log_partition().tolist(), several.log_partition()[mine].tolist()


def test_a_held_out_population_is_whole_in_one_process():
    told = on(3, whole_populations)
    assert [groups for groups, _, _ in told] == [2, 2, 1]
    assert all(own == expected and len(own) == groups for groups, own, expected in told)


def test_gathering_undoes_sharing():
    assert on(3, there_and_back) == [True] * 3
