"""Running chains: the generator is the only randomness, and compiling changes nothing but the speed."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from conftest import each
from torch import Tensor

from metastable.core.errors import ConfigError
from metastable.core.types import energy_and_grad
from metastable.energies import MLP, Banana
from metastable.kernels import HMC, MALA, ULA, Kernel, compiled, run_chain

F64 = torch.float64
ALL = [ULA(0.05), MALA(0.3), HMC(0.3, leapfrog=3)]
over = pytest.mark.parametrize


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Counted:
    """A banana that counts how often it is evaluated."""

    def __init__(self):
        self.calls, self.energy = 0, Banana(2, 1.0)

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.energy(x)


def start(kernel: Kernel, chains: int = 20):
    energy = Banana(2, 1.0)
    return energy, kernel.init(energy, energy.sample(chains, rng(5)).double())


@over("kernel", ALL)
def test_the_same_generator_state_gives_the_same_chain(kernel):
    energy, state = start(kernel)
    before = torch.get_rng_state()
    first, second = (run_chain(kernel, energy, state, 9, rng(1)) for _ in range(2))
    assert torch.equal(first.state.x, second.state.x)
    assert torch.equal(first.info.acceptance, second.info.acceptance)
    assert not torch.equal(first.state.x, run_chain(kernel, energy, state, 9, rng(2)).state.x)
    assert torch.equal(before, torch.get_rng_state())


@over("kernel", ALL)
def test_two_runs_in_a_row_are_one_long_run(kernel):
    energy, state = start(kernel)
    whole = run_chain(kernel, energy, state, 9, rng(1))
    source = rng(1)
    half = run_chain(kernel, energy, state, 4, source)
    rest = run_chain(kernel, energy, half.state, 5, source)
    assert torch.equal(rest.state.x, whole.state.x)
    moved = (4 * half.info.moved + 5 * rest.info.moved) / 9
    assert torch.allclose(moved, whole.info.moved, rtol=1e-12)


@over("kernel", ALL)
def test_the_start_is_not_overwritten(kernel):
    energy, state = start(kernel)
    kept = [part.clone() for part in state]
    run_chain(kernel, energy, state, 3, rng())
    assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))


@over(("kernel", "init", "step"), [(ULA(0.05), 0, 1), (MALA(0.3), 1, 1), (HMC(0.3, leapfrog=3), 1, 3)])
def test_a_step_costs_the_gradients_it_says(kernel, init, step):
    energy = Counted()
    state = kernel.init(energy, torch.zeros(4, 2))
    run_chain(kernel, energy, state, 5, rng())
    assert kernel.gradients_per_step == step
    assert energy.calls == init + 5 * step


@each("kernel", ALL)
@each("steps, record, draws", [(6, 1, 6), (6, 2, 3), (7, 3, 2), (2, 3, 0)])
def test_positions_are_recorded_as_asked(kernel, steps, record, draws):
    energy, state = start(kernel)
    result = run_chain(kernel, energy, state, steps, rng(1), record=record)
    if draws == 0:
        assert result.trace is None
        return
    assert result.trace.shape == (draws, 20, 2)
    for k, position in enumerate(result.trace, 1):
        assert torch.equal(position, run_chain(kernel, energy, state, k * record, rng(1)).state.x)


@over("kernel", ALL)
def test_nothing_is_kept_unless_asked(kernel):
    energy, state = start(kernel)
    assert run_chain(kernel, energy, state, 6, rng()).trace is None


@over("kernel", ALL)
def test_a_step_size_given_overrides_the_kernels(kernel):
    from dataclasses import replace

    energy, state = start(kernel)
    other = run_chain(kernel, energy, state, 3, rng(), step_size=torch.tensor(0.01)).state.x
    assert torch.equal(
        other,
        run_chain(replace(kernel, step_size=torch.tensor(0.01).item()), energy, state, 3, rng()).state.x,
    )


@over(
    ("arguments", "field", "hint"),
    [({"engine": "complie"}, "engine", "did you mean 'compile'"), ({"steps": -1}, "steps", "at least 0")],
)
def test_a_bad_argument_is_named(arguments, field, hint):
    energy, state = start(ALL[0])
    with pytest.raises(ConfigError, match=hint) as raised:
        run_chain(ALL[0], energy, state, **{"steps": 2, "rng": rng(), **arguments})
    assert raised.value.path == field


@pytest.fixture
def fresh_compiler(monkeypatch):
    """Few steps a call, and no code left from or for another test."""
    monkeypatch.setattr(compiled, "UNROLL", 2)
    compiled.compiled_several.cache_clear()
    torch._dynamo.reset()
    yield
    compiled.compiled_several.cache_clear()
    torch._dynamo.reset()


# The default backend generates and builds C++; one kernel through it is enough at every commit.
COMPILED = [
    (ULA(0.05, drift_clip=0.2), None),
    (MALA(0.3), "aot_eager"),
    (HMC(0.3, leapfrog=2, mass=(1.0, 2.0)), "aot_eager"),
]


@over(("kernel", "backend"), COMPILED)
@pytest.mark.filterwarnings("error:engine")
def test_compiled_chains_are_the_eager_ones(kernel, backend, fresh_compiler, monkeypatch):
    if backend is not None:
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    energy = MLP(2, (8,), seed=1).double()
    x = torch.randn((6, 2), generator=rng(3), dtype=F64)

    def both() -> Tensor:
        eager, fast = (
            run_chain(kernel, energy, kernel.init(energy, x), 5, rng(4), engine=engine, slopes=True)
            for engine in ("eager", "compile")
        )
        for a, b in zip(
            (*eager.state, *eager.info[:2], eager.slope),
            (*fast.state, *fast.info[:2], fast.slope),
            strict=True,
        ):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)
        return fast.state.x

    first = both()
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.mul_(2.0)
    assert (both() - first).abs().max() > 1e-3  # the code is kept, the parameters are not


def test_networks_share_code_and_none_is_kept_alive(fresh_compiler, monkeypatch):
    frames: list[object] = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    x = torch.zeros(3, 2, dtype=F64)

    def used_once(seed: int) -> weakref.ref:
        energy = MLP(2, (4,), seed=seed).double()
        kernel = ULA(0.1 + 0.01 * seed)
        run_chain(kernel, energy, kernel.init(energy, x), 2, rng(), engine="compile")
        return weakref.ref(energy)

    networks = [used_once(seed) for seed in range(3)]
    gc.collect()
    assert len(frames) == 1
    assert all(network() is None for network in networks)


def older_compile(model: Any, *, fullgraph: bool = False, dynamic: bool | None = None) -> Any:
    """`torch.compile` as it was before it took a limit of its own."""
    return COMPILE(model, fullgraph=fullgraph, dynamic=dynamic, backend="eager")


COMPILE = torch.compile
SHAPES = (2, 3, 4, 5)


def compiled_for_every_shape() -> None:
    energy, kernel = Banana(2, 1.0), ULA(0.05)
    for chains in SHAPES:
        state = kernel.init(energy, torch.zeros(chains, 2))
        x = run_chain(kernel, energy, state, 1, rng(), engine="compile").state.x
        assert x.shape == (chains, 2)


@over(
    ("make", "limits"),
    [
        (functools.partial(torch.compile, backend="eager"), {"recompile_limit": 2}),
        (older_compile, {"recompile_limit": 2, "accumulated_recompile_limit": 3}),
    ],
)
def test_more_batch_shapes_than_the_compilers_own_limit(make, limits, fresh_compiler, monkeypatch):
    monkeypatch.setattr(torch, "compile", make)
    with torch._dynamo.config.patch(limits), warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled_for_every_shape()
        assert {name: getattr(torch._dynamo.config, name) for name in limits} == limits


def test_without_room_the_compilers_own_limit_is_said_and_the_chain_goes_on(fresh_compiler, monkeypatch):
    """The mutant of the test above."""
    monkeypatch.setattr(torch, "compile", older_compile)
    monkeypatch.setattr(compiled, "_roomy", lambda function: function)
    with torch._dynamo.config.patch(recompile_limit=2), pytest.warns(RuntimeWarning, match="fullgraph"):
        compiled_for_every_shape()


@over("kernel", [ULA(0.05), MALA(0.3)])
def test_slopes_are_averaged_over_the_positions_that_a_chain_moved_from(kernel):
    energy, state = start(kernel)
    result = run_chain(kernel, energy, state, 7, rng(1), slopes=True)
    trace = run_chain(kernel, energy, state, 7, rng(1), record=1).trace
    path = torch.cat([state.x[None], trace[:-1]])
    norms = torch.stack([energy_and_grad(energy, x).grad.norm(dim=1) for x in path])
    torch.testing.assert_close(result.slope, norms.mean(0), rtol=1e-12, atol=0)
    assert run_chain(kernel, energy, state, 7, rng(1)).slope is None
