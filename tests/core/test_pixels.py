"""Pictures that stay bytes: the same numbers to the last bit, whatever is done with them."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import metastable as ms
from metastable.core.pixels import Frames, Pixels, in_bytes, table_of
from metastable.data import Dataset
from metastable.energies.network_configs import ShortRunConfig
from metastable.kernels import ULA
from metastable.methods import DenoisingScoreMatching, Jarzynski, Method, PersistentCD
from metastable.proposals.encoders import Standardise
from metastable.runs import rows as rows_room
from metastable.runs.plan import make_plan, trainer_of
from metastable.training.config import TrainerConfig

over = pytest.mark.parametrize
SHAPE = (3, 8, 8)


def pictures(n: int = 40, shape: tuple[int, ...] = SHAPE) -> Tensor:
    codes = torch.randint(256, (n, *shape), generator=torch.Generator().manual_seed(0))
    return codes.float().div_(127.5).sub_(1)


def kept(x: Tensor) -> Pixels:
    found = in_bytes(x)
    assert found is not None
    return Pixels(*found)


@over(
    "read",
    [
        lambda x: x[torch.tensor([3, 0, 3])],
        lambda x: x[5],
        lambda x: x[2:30:4],
        lambda x: x.index_select(0, torch.tensor([1, 2])),
        lambda x: x[x.flatten(1).mean(1) > 0],
        lambda x: x.flatten(1).var(0),
        lambda x: x.amin(0) + x.amax(0),
        lambda x: 2 * x - x.flip(-1),
        lambda x: torch.cat([x, x[:2]]),
        lambda x: x.to(torch.float64),
        lambda x: nn.functional.conv2d(x, torch.ones(1, 3, 3, 3)),
        lambda x: x.new_full((2,), 3.0),
        lambda x: x.clone().add_(1),
    ],
)
def test_whatever_is_read_is_what_the_numbers_give(read):
    x = pictures()
    found = read(kept(x))
    assert type(found) is Tensor
    assert torch.equal(found, read(x))


def test_all_rows_are_read_in_blocks_and_nothing_else_tells_it_from_numbers(monkeypatch):
    monkeypatch.setattr("metastable.core.pixels.BLOCK", 7)
    x = pictures()
    held = kept(x)
    assert torch.equal(held.clone(), x)
    assert held.codes.dtype == torch.uint8
    assert (held.shape, held.dtype, held.device, len(held)) == (x.shape, x.dtype, x.device, len(x))


@over("scale", [(-1.0, 1.0), (0.0, 255.0), (0.0, 1.0)])
def test_bytes_are_found_on_each_scale_and_only_where_all_are(scale):
    codes = torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8)
    x = table_of(*scale)[codes.long()]
    found = in_bytes(x)
    assert found is not None
    assert torch.equal(found[0], codes)
    x[3, 0, 2, 2] += 1e-3
    assert in_bytes(x) is None
    x[3, 0, 2, 2] = float("nan")
    assert in_bytes(x) is None


METHODS = {
    "pcd from data": PersistentCD(walkers=20, batch=8, start_at="data", rejuvenation=0.3, kernel=ULA(0.01)),
    "jarzynski": Jarzynski(walkers=32, populations=2, batch=8),
    "score matching": DenoisingScoreMatching(),
}


@over("method", METHODS.values(), ids=METHODS)
def test_training_on_bytes_is_training_on_their_numbers(method: Method, monkeypatch):
    monkeypatch.setattr(rows_room, "BYTES_ON", ("cpu",))
    found = []
    for large in (0, 10**9):
        monkeypatch.setattr(rows_room, "LARGE", large)
        settings = {"steps": 4, "batch_size": 8, "data_noise": 0.1, "log_every": 1, "evaluate": False}
        network = ShortRunConfig(filters=2, reference="gaussian")
        run = ms.fit(network, pictures(), method, held_out=0.2, augment=("flip",), **settings)
        kept_of = ("energy_data", "energy_gap", "loss", "grad_norm", "displacement")
        lines = [{key: line[key] for key in kept_of if key in line} for line in run.history]
        found.append((lines, [p.detach().clone() for p in run.energy.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@over(
    ("x", "batch", "units", "bytes_stay"),
    [
        (pictures(), 8, "none", True),
        (pictures(), None, "none", False),  # all rows in every update
        (pictures(), 8, "scale", False),  # other numbers than a table has
        (pictures() + 0.001, 8, "none", False),
    ],
)
def test_bytes_stay_on_the_device_where_batches_of_them_are_read(x, batch, units, bytes_stay, monkeypatch):
    plan = ShortRunConfig(filters=2), Dataset.of(x, "mine"), METHODS["pcd from data"]
    trainer = TrainerConfig(steps=1, batch_size=batch)
    assert type(make_plan(*plan, trainer, units=units).rows.x) is Tensor  # the host has them already
    monkeypatch.setattr(rows_room, "BYTES_ON", ("cpu",))
    monkeypatch.setattr(rows_room, "LARGE", 0)
    data = trainer_of(make_plan(*plan, trainer, units=units)).context.data
    assert isinstance(data, Pixels) == bytes_stay


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
def test_sixty_thousand_pictures_train_within_four_gigabytes():
    def trained(x: Tensor) -> None:
        network = ShortRunConfig(filters=2, reference="gaussian")
        method = PersistentCD(walkers=16, batch=8, start_at="data", kernel=ULA(0.01))
        settings = {"steps": 2, "batch_size": 8, "data_noise": 0.03, "evaluate": False}
        ms.fit(network, x, method, augment=("flip",), **settings)

    def peak() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])

    n = 12_000  # some blocks of rows, in which noise is made, and whose memory does not grow
    trained(pictures(20, (3, 32, 32)))  # what a first training takes, whatever its data
    x = pictures(n, (3, 32, 32))
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = peak()
    trained(x)
    taken = 4 * x.numel() + peak() - before
    assert 60_000 / n * taken < 4e9 - 6e8  # beside Python and torch


def test_nothing_is_written_into_bytes():
    held = kept(pictures())
    with pytest.raises(RuntimeError, match="cannot be written to"):
        held.add_(1)


def windows(n: int = 40, numbers: int = 5) -> Frames:
    """Rows of some numbers and of two pictures, each of which two rows show; one pixel never changes."""
    rng = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (n + 6, *SHAPE), generator=rng, dtype=torch.uint8)
    codes[:, 0, 0, 0] = 7
    shown = torch.stack([torch.arange(n), torch.arange(n) + 1], 1)
    return Frames(torch.randn(n, numbers, generator=rng), codes, shown, table_of(-1.0, 1.0))


@over("numbers", [0, 5])
@over(
    "read",
    [
        lambda x: x[torch.tensor([3, 0, 3])],
        lambda x: x[5],
        lambda x: x[2, 7],
        lambda x: x[2:30:4],
        lambda x: x[:, 2:9],
        lambda x: x[torch.tensor([1, 4]), torch.tensor([7, 2])],
        lambda x: x[torch.tensor([[1, 4], [0, 2]])],
        lambda x: x[x > 0],
        lambda x: x.index_select(0, torch.tensor([1, 2])),
        lambda x: x.index_select(1, torch.tensor([1, 2])),
        lambda x: x[x.mean(1) > 0],
        lambda x: x.flatten(1).var(0),
        lambda x: 2 * x - x.flip(-1),
        lambda x: torch.cat([x, x[:2]]),
        lambda x: torch.cat(x.split(7)),
        lambda x: torch.cat(x.split(7, 1), 1),
        lambda x: x.detach().double() + 0,
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: x.clone().add_(1),
    ],
)
def test_whatever_is_read_of_contexts_is_what_their_numbers_give(read, numbers):
    x = windows(numbers=numbers)
    found = read(x)
    assert type(found) is Tensor
    assert torch.equal(found, read(x.plain()))


def test_contexts_stay_as_they_are_where_rows_are_chosen_moved_or_written_down():
    x = windows()
    several = [x.taken(torch.tensor([3, 9])), x.double(), copy.deepcopy(x), pickle.loads(pickle.dumps(x))]
    wanted = [x.plain()[[3, 9]], x.plain().double(), x.plain(), x.plain()]
    for found, numbers in zip(several, wanted, strict=True):
        assert isinstance(found, Frames)
        assert torch.equal(found.plain(), numbers)
    assert all(isinstance(part, Frames) for part in x.split(7))
    assert x.tolist() == x.plain().tolist()


@over(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: x.__setitem__((slice(None), 0), 1.0),
        lambda x: x.__setitem__(x.mean(1) > 0, 1.0),
        lambda x: torch.add(x.plain(), 1, out=x),
        lambda x: torch._foreach_add_([x], 1.0),
    ],
)
@over("make", [windows, lambda: kept(pictures())])
def test_nothing_is_written_into_bytes_silently(make, write):
    x = make()
    before = x.plain()
    with pytest.raises(RuntimeError, match="kept as bytes cannot be written to; clone them first"):
        write(x)
    assert torch.equal(x.plain(), before)
    assert torch.equal(torch.add(x, 1, out=torch.empty_like(before)), before + 1), "what is only read may be"


def test_moments_of_contexts_are_those_of_their_numbers():
    """Pictures count as often as rows show them; rows that were taken have their own."""
    for x in (windows(), windows().taken(torch.tensor([0, 0, 5, 9, 9, 9]))):
        plain = x.plain().double()
        mean, spread = x.moments()
        torch.testing.assert_close(mean.double(), plain.mean(0), rtol=0, atol=1e-6)
        torch.testing.assert_close(spread.double(), plain.std(0), rtol=1e-5, atol=1e-6)
        assert torch.equal(x.varies(), plain.amax(0) > plain.amin(0))
        assert not x.varies().all()
    one, other = Standardise((len(mean),), x), Standardise((len(mean),), x.plain())
    torch.testing.assert_close(one.scale, other.scale, rtol=1e-4, atol=1e-6)
    assert torch.equal(one.scale == 0, other.scale == 0)


def test_moments_of_pictures_alone_come_without_a_warning():
    x = windows()
    alone = Frames(torch.empty(len(x), 0), x.codes, x.shown, x.table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.stack(alone.moments())
    expected = torch.stack(x.moments())[:, x.beside.shape[1] :]
    assert torch.equal(found, expected)
