"""Engines: every one of them makes the eager chain's moves, and says why it is not a faster one."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softmax

from metastable.core.types import bind
from metastable.energies import MLP, Banana, ConditionalNet, ConvNet, on_reference, spectral_norm
from metastable.kernels import (
    HMC,
    MALA,
    ULA,
    ChainResult,
    Gibbs,
    Kernel,
    MetropolisHastings,
    captured,
    compiled,
    engine,
    run_chain,
)
from metastable.kernels.engine import Choice, choose
from metastable.kernels.watch import UnwatchedError, reads
from metastable.proposals import Gaussian

over = pytest.mark.parametrize
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HERE = ["cpu", pytest.param("cuda", marks=CUDA)]
KERNELS: list[Kernel] = [
    ULA(0.05),
    ULA(0.05, noise=0.1, drift_clip=0.02),
    MALA(0.3),
    HMC(0.3, leapfrog=2),
    MetropolisHastings(0.5),
]
EVENTS = {"mlp": (2,), "tilted": (2,), "convnet": (1, 8, 8), "spectral": (2,)}


def rng(seed: int = 0, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed))


def energy_named(name: str) -> nn.Module:
    if name == "convnet":
        return ConvNet((1, 8, 8), seed=1)
    net = MLP(2, (8, 8), seed=1)
    if name == "tilted":
        return on_reference(net, rows(50, 2), zero_start=False)
    return spectral_norm(net, scale=2.0) if name == "spectral" else net


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """On the CPU the recorded function is called on the memory that it was recorded with."""
    monkeypatch.setattr(engine, "STAND_IN", True)
    monkeypatch.setattr(engine, "LEAST", 4)
    monkeypatch.setattr(captured, "STRIDE", 4)
    monkeypatch.setitem(engine.WHY_NOT, "fused", lambda *_: "left out")


def pair(
    kernel: Kernel, energy: Any, x: Tensor, steps: int, **options: Any
) -> tuple[ChainResult, ChainResult]:
    """The chain by `auto`, which must not be eager, and eagerly; both sources end in the same state."""
    assert choose(kernel, energy, x, steps).engine == "captured", choose(kernel, energy, x, steps)
    sources = [rng(7, x.device.type) for _ in range(2)]
    made = [
        run_chain(kernel, energy, kernel.init(energy, x), steps, source, engine=name, **options)
        for source, name in zip(sources, ("auto", "eager"), strict=True)
    ]
    assert torch.equal(sources[0].get_state(), sources[1].get_state())
    return made[0], made[1]


def assert_same(one: ChainResult, other: ChainResult) -> None:
    ours, theirs = ((*r.state, *r.info[:2], r.trace, r.slope) for r in (one, other))
    for a, b in zip(ours, theirs, strict=True):
        assert a is b is None or torch.equal(a, b)  # pyright: ignore


@over("device", HERE)
@over("name", EVENTS)
@over("kernel", KERNELS, ids=lambda k: k.name)
def test_recorded_chains_are_the_eager_ones_bit_for_bit(kernel, name, device):
    energy, x = energy_named(name).to(device), rows(5, *EVENTS[name]).to(device)
    for steps in (4, 7, 9):  # a whole number of launches, and not
        assert_same(*pair(kernel, energy, x, steps, slopes=True))
    assert not torch.equal(pair(kernel, energy, x, 9)[0].state.x, x)


@over("device", HERE)
@over("record", [1, 2, 3, 5])
def test_positions_are_recorded_between_launches(record, device):
    energy, x = energy_named("tilted").to(device), rows(5, 2).to(device)
    ours, eager = pair(MALA(0.2), energy, x, 11, record=record)
    assert_same(ours, eager)
    assert eager.trace is not None
    assert len(eager.trace) == 11 // record


@over("device", HERE)
@over("shape", [(), (5, 1)])
def test_a_step_size_is_taken_anew_for_every_chain(shape, device):
    energy, x = energy_named("mlp").to(device), rows(5, 2).to(device)
    found = []
    for size in (0.1, 0.3):
        h = torch.full(shape, size, device=device) * torch.linspace(0.5, 1.0, 5, device=device)[:, None]
        h = h if shape else h.mean()
        ours, eager = pair(MALA(0.2), energy, x, 6, step_size=h)
        assert_same(ours, eager)
        found.append(ours.state.x)
    assert not torch.equal(*found)
    assert len(captured.known_of(energy).loops) == 1


@over("device", HERE)
def test_parameters_that_change_are_read_and_those_that_move_are_noticed(device):
    energy, x, kernel = energy_named("mlp").to(device), rows(5, 2).to(device), ULA(0.1)
    first = pair(kernel, energy, x, 8)[0].state.x
    (loop,) = captured.known_of(energy).loops.values()
    other = MLP(2, (8, 8), seed=2)
    energy.load_state_dict(other.state_dict())
    ours, eager = pair(kernel, energy, x, 8)
    assert_same(ours, eager)
    assert not torch.equal(ours.state.x, first)
    assert list(captured.known_of(energy).loops.values()) == [loop]  # the places stayed
    kept = [p.data for p in energy.parameters()]  # so that no place is used again
    for parameter in energy.parameters():
        parameter.data = 2 * parameter.data
    assert_same(*pair(kernel, energy, x, 8))
    assert len(captured.known_of(energy).loops) == 2
    assert len(kept) == 6


class Sharp(nn.Module):
    """A square with a plain number and a closure in it."""

    def __init__(self):
        super().__init__()
        self.sharpness, self.weight = 1.0, nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.sharpness * (self.weight * x).square().sum(1)


@over("device", HERE)
def test_a_plain_number_that_changes_is_noticed(device):
    energy, x = Sharp().to(device), rows(5, 2).to(device)
    first = pair(ULA(0.05), energy, x, 8)[0].state.x
    energy.sharpness = 3.0
    ours, eager = pair(ULA(0.05), energy, x, 8)
    assert_same(ours, eager)
    assert not torch.equal(ours.state.x, first)
    scale = [1.0]
    square = lambda x: scale[0] * energy(x)  # noqa: E731
    assert_same(*pair(ULA(0.05), square, x, 8))
    scale[0] = 2.0
    assert_same(*pair(ULA(0.05), square, x, 8))
    assert [len(captured.known_of(e).loops) for e in (energy, square)] == [2, 2]  # made anew, on the CPU, too


def test_few_recordings_are_kept_and_none_keeps_an_energy_alive():
    energy = energy_named("mlp")
    for chains in range(1, 8):
        pair(ULA(0.1), energy, rows(chains, 2), 8)
    assert len(captured.known_of(energy).loops) == captured.MOST
    alive, place = weakref.ref(energy), id(energy)
    del energy
    gc.collect()
    assert alive() is None
    assert place not in captured._KNOWN


def test_energies_given_contexts_and_discrete_ones():
    net = MLP(3, (8,), seed=0)

    def conditional(x: Tensor, given: Tensor) -> Tensor:
        return net(torch.cat([x, given[:, None].expand(*x.shape[:2], 1)], -1).flatten(0, 1)).view(x.shape[:2])

    given = bind(conditional, rows(2, 1))
    assert_same(*pair(MALA(0.1), given, rows(6, 2), 9))
    units = Units()
    x = rows(6, 4).sign()
    for order in ("fixed", "random"):
        assert_same(*pair(Gibbs(order), units, x, 9))


class Units(nn.Module):
    """Neighbours on a line of ±1."""

    discrete = True

    def forward(self, x: Tensor) -> Tensor:
        return -0.5 * (x[:, 1:] * x[:, :-1]).sum(1)


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.square().sum(1)


class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().sum(1)


class Dropping(Averaging):
    def __init__(self):
        super().__init__()
        self.norm = nn.Dropout(0.5)


def hooked() -> nn.Module:
    net = MLP(2, (4,))
    net.body[0].register_forward_hook(lambda *_: None)
    return net


@over(
    ("make", "words"),
    [
        (Counting, "changes what it reads each time"),
        (Averaging, r"writes to energy.norm.running_mean when it is called; it is in training mode"),
        (Dropping, "draws random numbers of its own; it is in training mode"),
    ],
)
def test_what_an_energy_does_beside_its_value_is_noticed_put_back_and_said_once(make, words):
    made = []
    for name in ("auto", "eager"):
        energy, kernel = make(), ULA(0.1)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as said:
            torch.manual_seed(0)
            warnings.simplefilter("always")
            _, result = (
                run_chain(kernel, energy, kernel.init(energy, rows(5, 2)), 6, rng(1), engine=name)
                for _ in range(2)
            )
        made.append((result.state.x, *energy.buffers()))
        assert len(said) == (name == "auto")
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    energy = make()
    with pytest.warns(RuntimeWarning, match=words):
        run_chain(ULA(0.1), energy, ULA(0.1).init(energy, rows(5, 2)), 6, rng(1))
    assert choose(ULA(0.1), energy, rows(5, 2), 6).engine == "eager"


@over("make", [Averaging, Dropping])
def test_what_was_refused_in_training_mode_is_recorded_in_the_other(make):
    energy, x = make(), rows(5, 2)
    with pytest.warns(RuntimeWarning, match="it is in training mode"):
        run_chain(ULA(0.1), energy, ULA(0.1).init(energy, x), 6, rng(1))
    energy.eval()
    assert choose(ULA(0.1), energy, x, 6).engine == "captured"
    energy.train()
    assert choose(ULA(0.1), energy, x, 6).engine == "eager"


def test_want_of_memory_is_not_remembered(monkeypatch):
    energy, x = MLP(2, (4,)), rows(5, 2)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as m:
        m.setattr(captured, "record", full)
        with pytest.warns(RuntimeWarning, match="out of memory"):
            found = run_chain(ULA(0.1), energy, ULA(0.1).init(energy, x), 6, rng(1)).state.x
    assert choose(ULA(0.1), energy, x, 6).engine == "captured"
    assert torch.equal(run_chain(ULA(0.1), energy, ULA(0.1).init(energy, x), 6, rng(1)).state.x, found)


class Slotted:
    __slots__ = ("value",)

    def __call__(self, x: Tensor) -> Tensor:
        return x.square().sum(1)


@over(
    ("energy", "steps", "asked", "words"),
    [
        (Banana(2, 1.0), 3, "auto", "captured: a chain of 3 steps is done before it is recorded"),
        (hooked(), 50, "captured", r"captured: energy.body.0 \(Linear\) has hooks, which a recording"),
        (Slotted(), 50, "auto", "captured: energy is a Slotted, whose end would not be noticed"),
    ],
)
def test_a_choice_says_why_not_more(energy, steps, asked, words):
    choice = choose(ULA(0.1), energy, rows(5, 2), steps, asked)
    assert any(re.match(words, reason) for reason in choice.reasons), choice


def test_on_the_cpu_auto_is_eager(monkeypatch):
    monkeypatch.setattr(engine, "STAND_IN", False)
    choice = choose(ULA(0.1), Banana(2, 1.0), rows(5, 2), 10_000)
    assert choice.engine == "eager"
    assert "on the CPU a seed keeps its numbers" in str(choice)
    asked = choose(ULA(0.1), Banana(2, 1.0), rows(5, 2), 10_000, "captured")
    assert asked.engine == "eager"
    assert asked.reasons[0].startswith("captured: the chains are on cpu")
    assert choose(ULA(0.1), Banana(2, 1.0), rows(5, 2), 10_000, "eager") == Choice("eager")


def test_an_engine_that_was_asked_for_and_does_not_run_is_said_once(monkeypatch):
    monkeypatch.setattr(engine, "STAND_IN", False)
    monkeypatch.setattr(engine, "_said", set())
    energy, kernel = Banana(2, 1.0), ULA(0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for asked in ("captured", "captured", "auto", "eager"):
            run_chain(kernel, energy, kernel.init(energy, rows(5, 2)), 6, rng(), engine=asked)
    assert [str(w.message)[:55] for w in said] == ["engine: 'captured' was asked for, and it is eager (not "]


def test_a_chain_within_a_recording_is_not_recorded_again():
    from metastable.core.capture import record

    energy, x, made = energy_named("mlp"), rows(5, 2), []

    def update() -> tuple[Tensor, ...]:
        made.append(choose(ULA(0.1), energy, x, 50))
        return ()

    record(update, torch.device("cpu"))
    assert made[0].engine == "eager"
    assert "as a part of something larger" in made[0].reasons[-1]


class Deciding(nn.Module):
    """Looks at a number, which neither a compiled nor a recorded function can."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(1) if x.sum() > 0 else x.abs().sum(1)


def test_what_the_compiler_does_not_take_is_said_with_its_line():
    energy, kernel, x = Deciding(), ULA(0.1), rows(5, 2)
    with pytest.warns(RuntimeWarning, match=r"Deciding cannot be compiled: .*if x.sum\(\) > 0"):
        ours = run_chain(kernel, energy, kernel.init(energy, x), 11, rng(), engine="compile")
    assert_same(ours, run_chain(kernel, energy, kernel.init(energy, x), 11, rng(), engine="eager"))
    fallen = choose(kernel, energy, x, 11, "compile")
    assert fallen.engine == "captured"
    assert fallen.reasons[0].startswith("compile: ")


@CUDA
def test_what_a_graph_does_not_take_is_said_with_its_line():
    energy, kernel, x = Deciding(), ULA(0.1), rows(5, 2).cuda()
    with pytest.warns(RuntimeWarning, match=r"Deciding cannot be recorded as a CUDA graph: .*x.sum\(\) > 0"):
        ours = run_chain(kernel, energy, kernel.init(energy, x), 11, rng(0, "cuda"))
    assert_same(ours, run_chain(kernel, energy, kernel.init(energy, x), 11, rng(0, "cuda"), engine="eager"))
    assert torch.randn(3, device="cuda").isfinite().all()  # torch's own generator is free again


@over("kernel", [ULA(0.05), MALA(0.2)])
def test_compiled_steps_are_recorded_in_whole_calls(kernel, monkeypatch):
    monkeypatch.setattr(engine, "loop_of", recorded_whole)
    monkeypatch.setattr(captured, "compiled_for", lambda _: compiled.several)
    monkeypatch.setattr(compiled, "UNROLL", 2)
    energy, x = energy_named("tilted"), rows(6, 2)
    assert choose(kernel, energy, x, 9, "compile") == Choice("compile", (), True)
    made = [
        run_chain(kernel, energy, kernel.init(energy, x), 9, rng(1), engine=name)
        for name in ("compile", "eager")
    ]
    assert_same(*made)


def recorded_whole(*arguments: Any) -> captured.Loop:
    loop = captured.loop_of(*arguments)
    assert (loop.per_call, loop.count) == (2, 4)
    return loop


@CUDA
@over("kernel", [ULA(0.05), MALA(0.2)])
def test_compiled_steps_can_be_recorded_too(kernel):
    energy, x = energy_named("tilted").cuda(), rows(64, 2).cuda()
    assert choose(kernel, energy, x, 40, "compile") == Choice("compile", (), True)
    made = [
        run_chain(kernel, energy, kernel.init(energy, x), 20, rng(1, "cuda"), engine=name)
        for name in ("compile", "eager")
    ]
    torch.testing.assert_close(made[0].state.x, made[1].state.x, rtol=1e-4, atol=1e-4)


@CUDA
def test_a_long_chain_takes_the_memory_of_a_short_one():
    energy, x = MLP(2, (64, 64)).cuda(), rows(4096, 2).cuda()
    peaks = []
    for steps in (32, 32, 1024):
        torch.cuda.reset_peak_memory_stats()
        pair(ULA(0.01), energy, x, steps)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[2] == peaks[1]


def test_reads_finds_tensors_in_functions_and_numbers_elsewhere_by_value():
    weight = torch.ones(2)
    found = reads(lambda x: (weight * x).sum(1), torch.device("cpu"))
    assert [id(t) for t in found.tensors.values()] == [id(weight)]
    elsewhere = [reads(torch.full((2,), v), torch.device("meta")).key for v in (1.0, 1.0, 2.0)]
    assert elsewhere[0] == elsewhere[1] != elsewhere[2]
    with pytest.raises(UnwatchedError, match="is a Generator"):
        reads({"rng": rng()}, torch.device("cpu"))


SHARPNESS = 1.0


def test_globals_that_a_function_names_are_watched_and_those_of_libraries_are_not(monkeypatch):
    by_global = lambda x: SHARPNESS * nn.functional.silu(x).sum(1) + softmax(x, 1).sum(1)  # noqa: E731
    first = reads(by_global, torch.device("cpu")).key
    assert reads(by_global, torch.device("cpu")).key == first
    monkeypatch.setitem(globals(), "SHARPNESS", 2.0)
    assert reads(by_global, torch.device("cpu")).key != first


def test_a_proposal_of_a_kernel_is_watched_too():
    proposal = Gaussian(torch.zeros(2), torch.ones(2))
    keys = []
    for _ in range(2):
        keys.append(reads(MetropolisHastings(proposal), torch.device("cpu")).key)
        for tensor in (*proposal.parameters(), *proposal.buffers()):
            tensor.data = tensor.data + 1
    assert keys[0] != keys[1]


def test_short_chains_of_a_bound_energy_are_recorded_once_they_are_many():
    energy, x = ConditionalNet(2, 1, width=4, depth=2).eval(), rows(6, 2)
    target = bind(energy, torch.zeros(2, 1))
    assert [choose(ULA(0.1), target, x, 1).engine for _ in range(5)] == ["eager"] * 3 + ["captured"] * 2
    assert choose(ULA(0.1), target, x, 2).engine == "eager"  # another chain
    energy.train()
    assert {choose(ULA(0.1), target, x, 1).engine for _ in range(9)} == {"eager"}
    plain = energy_named("mlp").eval()
    assert {choose(ULA(0.1), plain, x, 1).engine for _ in range(9)} == {"eager"}
    walk = MetropolisHastings({"name": "random-walk", "scale": 0.5})  # which has no hash
    target = bind(energy.eval(), torch.zeros(2, 1))
    assert choose(walk, target, x, 2).engine == "eager"
