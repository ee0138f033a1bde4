"""Memory that is not enough is said in words, and energies are given as many rows at once as fit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import metastable as ms
from metastable.cli.guard import explain
from metastable.cli.main import app
from metastable.core import memory
from metastable.core.batch import Batch
from metastable.core.errors import OutOfMemoryError
from metastable.core.memory import in_rows_that_fit, rows_at_once, within_memory
from metastable.core.parts import in_parts
from metastable.core.types import LogPartition, bind, energy_and_grad
from metastable.data import load_array
from metastable.energies import MLP
from metastable.energies.densities import DiffusionConfig, InterpolantConfig
from metastable.kernels import MALA, ULA, run_chain
from metastable.methods import FDivergence, Mixed, PersistentCD, RankingNCE, ShortRun
from metastable.proposals import continuous
from metastable.runs.memory import kept_by_row, seen_alone
from metastable.runs.model import Model
from metastable.runs.plan import make_plan, trainer_of
from metastable.runs.row_scores import row_scores
from metastable.summary.judge import judge
from metastable.training.config import TrainerConfig

over = pytest.mark.parametrize
CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
HOST = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: not enough memory: you tried …"
)
DATA = torch.randn((40, 2), generator=torch.Generator().manual_seed(0))


class Large(nn.Module):
    """A square that does not fit once it is given so many rows, or has been called so often."""

    def __init__(self, rows: int = 10**9, error: BaseException = CUDA, calls: int = 0):
        super().__init__()
        self.scale, self.rows, self.error, self.left = nn.Parameter(torch.ones(2)), rows, error, calls

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if len(x) >= self.rows and self.left < 0:
            raise self.error
        return (self.scale * x).square().sum(1)


def trained(energy: Large, rows: int, method: ms.methods.Method) -> None:
    """Two updates by an energy that fits until training begins."""
    config = TrainerConfig(steps=2, batch_size=10, device="cpu")
    training = trainer_of(make_plan(energy, load_array(DATA), method, config, units="none"))
    energy.rows = rows
    training.run()


@over("error", [CUDA, HOST, MemoryError()], ids=["cuda", "cpu", "python"])
def test_training_says_part_batch_and_settings(error):
    with pytest.raises(OutOfMemoryError) as caught:
        trained(Large(error=error), 30, PersistentCD(walkers=32))
    words = str(caught.value)
    assert words.startswith("negatives: 32 chains of shape (2,) in float32 on cpu did not fit into memory; ")
    assert "lower method.walkers=32 or trainer.batch_size=10" in words
    assert caught.value.__cause__ is error
    assert explain(caught.value) == (words, 2)


@over("moment", ["start", "negatives", "loss", "advance", "log_partition"])
def test_every_moment_is_named(moment, monkeypatch):
    def full(self: Any, *given: Any) -> Any:
        raise HOST

    monkeypatch.setattr(PersistentCD, moment, full)
    with pytest.raises(OutOfMemoryError) as caught:
        trained(Large(), 10**9, PersistentCD(walkers=12))
    assert caught.value.part == {"log_partition": "log Z"}.get(moment, moment)
    assert caught.value.batch == "10 rows of data and 12 negatives of shape (2,) in float32 on cpu"


def test_what_to_lower_is_said_of_sources_too():
    assert PersistentCD().sizes(5, 9) == {"walkers": 9}
    pcd = PersistentCD(walkers=40, batch=16)
    assert FDivergence(source=pcd).sizes(5, 9) == {"source.walkers": 40, "source.batch": 16}
    assert Mixed(sources=(pcd, ShortRun(walkers=8))).sizes(5, 9) == {
        "sources.0.walkers": 40,
        "sources.0.batch": 16,
        "sources.1.walkers": 8,
    }
    assert RankingNCE(negatives_per_datum=3, walkers=64).sizes(5, 9) == {
        "walkers": 64,
        "negatives_per_datum": 3,
    }


def test_other_errors_are_left_as_they_are():
    with pytest.raises(RuntimeError, match=r"^shapes$"), within_memory("here", DATA, {}):
        raise RuntimeError("shapes")
    with pytest.raises(ZeroDivisionError), within_memory("here", DATA, {}):
        raise ZeroDivisionError


@over(
    ("call", "words"),
    [
        (lambda e: ms.sample(e, 50, event_shape=2, steps=3), "sampling: 50 chains.*; lower n=50 "),
        (
            lambda e: ms.log_partition(e, dim=2, walkers=20, populations=2),
            r"log Z: \d+ .*lower walkers=20 or populations=2",
        ),
        (
            lambda e: run_chain(ULA(0.1), e, torch.zeros(50, 2), 4, torch.Generator(), record=2),
            r"chains: 50 chains of shape \(2,\) in float32 on cpu did.*lower chains=50 or steps/record=2 ",
        ),
    ],
)
def test_sampling_and_log_z_say_it(call, words):
    with pytest.raises(OutOfMemoryError, match=words) as caught:
        call(Large(40, calls=1))
    assert caught.value.__cause__ is CUDA


def test_scoring_says_it():
    energy = Large(30)
    model = Model(energy, log_z=LogPartition(0.0, 0.1, 1.0, 1), event_shape=(2,))
    with pytest.raises(OutOfMemoryError, match=r"scoring: 40 rows of shape \(2,\).*lower data=40 rows"):
        row_scores(model, energy, DATA)
    with pytest.raises(OutOfMemoryError, match=r"scoring: 40 rows .*lower x=40 rows"):
        model.log_prob(DATA)


class Measures:
    """A section that does not fit."""

    name = "own"

    def applies(self, judged: Any) -> bool:
        return True

    def measure(self, judged: Any) -> Any:
        raise HOST


def test_evaluation_says_which_section():
    run = SimpleNamespace(walkers=ms.Walkers.equal(DATA))
    judged: Any = SimpleNamespace(run=run, rows=Batch(DATA), x=DATA, found={}, after_training=False)
    words = r"evaluation, own: 40 rows of data of shape \(2,\) .*lower data=40 rows or walkers=40 \(\[enforce"
    with pytest.raises(OutOfMemoryError, match=words):
        judge(judged, [Measures()])


def test_the_command_line_ends_with_status_2(tmp_path, monkeypatch):
    def full(self: Any, *given: Any) -> Any:
        raise HOST

    monkeypatch.setattr(PersistentCD, "negatives", full)
    options = ["--method", "pcd", "--steps", "2", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["train", "two-modes", *options])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "lower method.walkers=4500 or trainer.batch_size=512" in said
    assert "negatives: 512 rows of data and 4500 negatives of shape (2,)" in said


# ---- rows that fit


@pytest.fixture
def little(monkeypatch):
    """A megabyte is free, and everybody asks."""
    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1e6)


def network() -> MLP:
    return MLP(2, (64, 64), seed=1)


def test_rows_that_fit_follow_the_memory(little, monkeypatch):
    energy, x = network(), DATA.repeat(100, 1)
    kept = memory.kept_for_backward(energy, x[:7])
    assert kept >= 4 * (64 + 64)  # what two activations keep of a row, in bytes of float32
    few = rows_at_once(energy, x)
    assert few == int(0.5e6 / (4 * (kept + 16)))
    assert rows_at_once(energy, x, 5) == 5
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1e12)
    assert rows_at_once(energy, x) == len(x)


def test_energies_and_gradients_in_parts_are_those_of_the_whole(little):
    energy, x, seen = network(), DATA.repeat(20, 1), []
    whole, values = energy_and_grad(energy, x), energy(x).detach()
    energy.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    with in_rows_that_fit(energy, x):
        seen.clear()
        parts = energy_and_grad(energy, x)
    most = max(seen)
    assert sum(seen) == len(x) > most
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    seen.clear()
    torch.testing.assert_close(in_parts(energy, x), values, rtol=1e-5, atol=1e-6)
    assert max(seen) == most
    assert torch.equal(energy_and_grad(energy, x).grad, whole.grad)  # outside nothing is parted


def test_rows_that_belong_to_contexts_by_their_order_are_not_parted(little):
    given = torch.tensor([[0.0], [1.0]])
    bound = bind(lambda x, given: (x - given[:, None]).square().sum(-1), given)
    x = DATA.repeat(200, 1)
    assert rows_at_once(lambda rows: 2 * bound(rows), x[:8000]) == 8000
    whole = energy_and_grad(bound, x)
    with in_rows_that_fit(network(), x):
        assert torch.equal(energy_and_grad(bound, x).grad, whole.grad)


def parted_and_whole(ask: Callable[[], Tensor], energy: MLP, monkeypatch) -> tuple[Tensor, Tensor]:
    """What comes out with little memory and with much, where the first has gone through in smaller parts."""
    seen: list[int] = []
    energy.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    made, most = [], []
    for free in (2e4, 1e12):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        seen.clear()
        made.append(ask())
        most.append(max(seen[-10:]))
    assert most[0] < most[1]
    return made[0], made[1]


def test_chains_in_parts_are_those_of_the_whole(little, monkeypatch):
    energy = MLP(2, (16,), seed=1)
    ask = lambda: ms.sample(energy, 100, init=DATA, steps=4, kernel=MALA(0.2)).x  # noqa: E731
    torch.testing.assert_close(*parted_and_whole(ask, energy, monkeypatch), rtol=1e-4, atol=1e-4)


def test_a_path_to_log_z_in_parts_is_that_of_the_whole(little, monkeypatch):
    net = MLP(2, (16,), seed=1)
    energy = ms.energies.on_reference(net, DATA, zero_start=False)

    def ask() -> Tensor:
        z = ms.log_partition(energy, walkers=30, populations=2, refinements=0, kernel=MALA(0.2), steps=1)
        return torch.tensor(z.value)

    torch.testing.assert_close(*parted_and_whole(ask, net, monkeypatch), rtol=0, atol=1e-3)


def test_free_memory_is_known_here():
    assert 1e6 < memory.free_bytes(torch.device("cpu")) < 1e15
    assert memory.free_bytes(torch.device("meta")) == float("inf")


@pytest.mark.parametrize(
    "config", [DiffusionConfig(16, 3, steps=40), InterpolantConfig(width=16, layers=3, steps=9)]
)
@pytest.mark.parametrize("given", [None, torch.randn(50, 1)])
def test_what_an_ode_keeps_is_known_from_few_of_its_steps(config, given, monkeypatch):
    rows, solved = Batch(torch.randn(50, 3), given), []
    energy, solve = config.build(rows, 0), continuous.solve

    def counted(field, x, code, times, *rest):
        solved.append(len(times) - 1)
        return solve(field, x, code, times, *rest)

    monkeypatch.setattr(continuous, "solve", counted)
    kept = kept_by_row(energy, rows)
    whole = memory.kept_for_backward(seen_alone(energy, rows), rows.x[: memory.PROBE])
    assert kept == pytest.approx(whole, rel=0.01)  # contexts are encoded once, not in every step
    assert solved == [min(16, config.steps), config.steps]
