"""Chunks by recorded chains are those of eager ones, whatever is seen, and are recorded once for all of them."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import metastable as ms
from metastable.core import capture
from metastable.core.batch import Batch
from metastable.core.capture import CaptureError, Replays
from metastable.core.random import generator
from metastable.core.types import Bound, bind, energy_and_grad
from metastable.core.waiting import may_look
from metastable.data import Demonstrations, Scaling
from metastable.energies import ConditionalNet, TransformerEnergy
from metastable.kernels import HMC, ULA, captured, compiled, engine, run_chain, watch
from metastable.methods import interpolating_sde as sde
from metastable.policies import Policy, PolicyConfig, RunActions
from metastable.proposals import InterpolantFlow

SEEN, CHUNKS = 3, 3
FLOW = {"name": "interpolant", "field": "concatsquash", "width": 8, "layers": 2, "steps": 3, "scored": 3}
HOW = {
    "chain": PolicyConfig(1, 4, 2, 2, 40, 0),
    "joined": PolicyConfig(1, 4, 2, 2, 40, 0, freeze=1),
    "kernel": PolicyConfig(1, 4, 2, 2, 40, 0, kernel={"name": "ula", "step_size": 1e-3}),
    "stages": PolicyConfig(
        1, 4, 2, 2, 0, 0, algorithm=4, sampling={"eta": 1e-3, "evaluations": 72},
        kernel={"name": "hmc", "step_size": 1e-2, "leapfrog": 4},
    ),
    "standing": PolicyConfig(1, 4, 2, 2, 0, 0, rank="network", algorithm=4, sampling={"evaluations": 72}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """On the CPU the recorded function is called on the memory that it was recorded with; nothing is recorded."""
    monkeypatch.setattr(captured, "_KNOWN", {})
    monkeypatch.setattr(sde, "_RECORDED", weakref.WeakKeyDictionary())
    monkeypatch.setattr(engine, "STAND_IN", True)
    monkeypatch.setattr(engine, "LEAST", 4)
    monkeypatch.setitem(engine.WHY_NOT, "fused", lambda *_: "left out")


def demonstrations() -> Demonstrations:
    rng = generator(0)
    return Demonstrations.of(torch.rand(40, 3, generator=rng), torch.rand(40, 2, generator=rng), [20, 40])


@pytest.fixture(scope="module")
def runs() -> dict[str, ms.Run]:
    """Energies with a time, without, and with one on their flow, after an update."""
    made = {}
    for kind in ("", "stages", "standing"):
        timed = bool(kind)
        shown = demonstrations()
        data = shown.windows(1, 4).dataset(Scaling.fit(shown))
        method = {
            "name": "interpolating-nce" if timed else "ranking-nce",
            "negatives_per_datum": 3,
            "proposal": FLOW,
        }
        name = "on-proposal" if kind == "standing" else "conditional"
        energy = {"name": name, "width": 8, "depth": 2, "time": timed}
        made[kind] = ms.fit(energy, data, method, 1, batch_size=4, units="none", evaluate=False)
    return made


def policy_of(runs: dict[str, ms.Run], name: str) -> Policy:
    config = HOW[name]
    own = {"kernel": config.kernel, "rank": config.rank, **config.sampling}
    model = RunActions(runs[name if name in runs else ""], config.algorithm, **own)
    scaling = Scaling.fit(demonstrations())
    if config.kernel is None and config.steps:
        model = model.settle(scaling.pack({"state": torch.rand(8, 1, 3, generator=generator(3))}))
    return Policy(model, scaling, config, 5)


def chunks(policy: Policy) -> Tensor:
    """Some chunks, each of what is seen then."""
    rng = generator(9)
    policy.reset(5)
    return torch.stack(
        [policy.predict_action_chunk(torch.rand(SEEN, 1, 3, generator=rng)) for _ in range(CHUNKS)]
    )


def both(runs: dict[str, ms.Run], name: str, monkeypatch) -> tuple[Tensor, Tensor]:
    """Chunks of one policy with recorded chains, and without."""
    policy = policy_of(runs, name)
    recorded = chunks(policy)
    with monkeypatch.context() as m:
        m.setattr(engine, "STAND_IN", False)
        return recorded, chunks(policy)


@pytest.mark.parametrize("name", HOW)
def test_recorded_chunks_are_eager_ones(runs, name, monkeypatch):
    recorded, eager = both(runs, name, monkeypatch)
    assert torch.equal(recorded, eager)
    assert not torch.equal(eager[0], eager[1])


@pytest.mark.parametrize("name", [name for name in HOW if name != "standing"])
def test_a_recording_that_is_not_told_what_is_seen_now_makes_other_chunks(runs, name, monkeypatch):
    run = captured.Loop.run

    def forgets(self, energy, *others):
        return run(self, Bound(energy.energy, *self.parts), *others)

    monkeypatch.setattr(captured.Loop, "run", forgets)
    recorded, eager = both(runs, name, monkeypatch)
    assert torch.equal(recorded[0], eager[0])
    assert not torch.equal(recorded[1:], eager[1:])


@pytest.mark.parametrize("name", ["stages", "standing"])
def test_nor_may_the_steps_of_the_sde_forget_it(runs, name, monkeypatch):
    call, first = Replays.__call__, []

    def forgets(self, function, key, *inputs, generators=()):
        if len(inputs) == 3:  # of the flow, which is recorded on a GPU
            return call(self, function, key, *inputs, generators=generators)
        first.append(inputs[3:])  # behind where walkers are, η and the times
        return call(self, function, key, *inputs[:3], *first[0], generators=generators)

    monkeypatch.setattr(Replays, "__call__", forgets)
    recorded, eager = both(runs, name, monkeypatch)
    assert torch.equal(recorded[0], eager[0])
    assert not torch.equal(recorded[1:], eager[1:])


@pytest.mark.parametrize("name", HOW)
def test_all_chunks_share_one_recording(runs, name, monkeypatch):
    made = []
    monkeypatch.setattr(capture, "_uncached", lambda device: made.append(device) or nullcontext())
    policy = policy_of(runs, name)
    policy.predict_action_chunk(torch.rand(SEEN, 1, 3, generator=generator(1)))
    first = len(made)
    assert first == (
        3 if name == "stages" else 1
    )  # of the SDE's steps, of those left over, and of the chain's
    chunks(policy)
    kinds = 2 if name == "joined" else 1  # the first chunk of an episode has nothing to join
    assert len(made) == kinds * first


@pytest.mark.parametrize("name", ["chain", "stages", "standing"])
def test_networks_are_looked_at_once_a_chunk_and_anew_in_the_next(runs, name, monkeypatch):
    looked, reads = [], watch.reads
    policy = policy_of(runs, name)
    chunks(policy)
    monkeypatch.setattr(watch, "reads", lambda value, *rest: looked.append(id(value)) or reads(value, *rest))
    for _ in range(2):  # another chunk is another look
        looked.clear()
        policy.predict_action_chunk(torch.rand(SEEN, 1, 3, generator=generator(1)))
        assert looked
        assert len(looked) == len(set(looked))


def test_recordings_end_with_their_energy():
    energy = ConditionalNet(2, 1, width=4, depth=2)
    x, given = torch.zeros(4, 2), torch.zeros(2, 1)
    run_chain(ULA(0.1), bind(energy, given), x, 8, generator(0))
    assert len(captured.known_of(energy).loops) == 1
    place, alive = id(energy), weakref.ref(energy)
    del energy
    gc.collect()
    assert alive() is None
    assert place not in captured._KNOWN


def test_many_leapfrog_steps_have_gradients_compiled_alone(monkeypatch):
    """Chains and SDE call one function for value and gradient, wherever `compile` was asked for."""
    calls = []

    def gradient(energy, x):
        calls.append(len(x))
        return energy_and_grad(energy, x)

    monkeypatch.setattr(compiled, "compiled_gradient", lambda: gradient)
    energy = ConditionalNet(2, 1, width=4, depth=2, time=True)
    target, start, kernel = bind(energy, torch.ones(2, 1), 1.0), torch.zeros(2, 3, 2), HMC(0.1, leapfrog=33)
    ends = [
        run_chain(kernel, target, start.flatten(0, 1), 4, generator(1), engine=name).state.x
        for name in ("compile", "eager")
    ]
    assert torch.equal(*ends)
    assert len(calls) == 33 * 5  # four moves, and the one that is recorded
    flow, calls[:] = InterpolantFlow(2, 1, width=4), []
    options = {"t_low": 0.5, "steps": 20, "eta": 0.01}
    ends = [
        sde.follow_sde(target, flow, start, generator(1), **options, engine=name)
        for name in ("compile", "eager")
    ]
    assert torch.equal(*ends)
    assert len(calls) == 2 * sde.stride_of(20)


def test_the_papers_networks_are_recorded():
    """Transformers keep places that are no part of their weights, which a recording must know how to watch."""
    seen = torch.rand(8, 5, generator=generator(0)), torch.rand(8, 8, generator=generator(1))
    energy = TransformerEnergy(
        8, 5, step=2, width=8, layers=1, heads=2, time=True, data=Batch(seen[1], seen[0])
    )
    flow = InterpolantFlow(8, 5, field={"name": "film", "step": 2, "width": 8, "layers": 1})
    target, start = bind(energy, seen[0][:2], 1.0), torch.zeros(2, 3, 8)
    assert engine.choose(HMC(leapfrog=5), target, start.flatten(0, 1), 8).engine == "captured"
    options = {"t_low": 0.5, "steps": 20, "eta": 0.01}
    ends = [
        sde.follow_sde(target, flow, start, generator(1), **options, engine=name)
        for name in ("auto", "eager")
    ]
    assert torch.equal(*ends)
    assert len(sde._RECORDED[energy].replays.recordings) == 1


OPTIONS = {"t_low": 0.5, "steps": 20, "eta": 0.01}


def ends_of(energy: nn.Module, flow: InterpolantFlow) -> tuple[Tensor, Tensor]:
    """Where the SDE ends as it is chosen, and step by step."""
    target = bind(energy, torch.ones(2, 1), 1.0)
    walk = lambda name: sde.follow_sde(  # noqa: E731
        target, flow, torch.zeros(2, 3, 2), generator(1), **OPTIONS, engine=name
    )
    return walk("auto"), walk("eager")


def test_recordings_of_the_sde_are_of_one_precision():
    energy, flow = ConditionalNet(2, 1, width=4, depth=2, time=True), InterpolantFlow(2, 1, width=4)
    plain, _ = ends_of(energy, flow)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, eager = ends_of(energy, flow)
    assert torch.equal(rounded, eager)
    assert not torch.equal(rounded, plain)
    assert len(sde._RECORDED[energy].replays.recordings) == 2


def test_recordings_made_in_inference_mode_serve_outside_of_it():
    energy, flow = ConditionalNet(2, 1, width=4, depth=2, time=True), InterpolantFlow(2, 1, width=4)
    target, x = bind(energy, torch.ones(2, 1), 1.0), torch.zeros(6, 2)
    with torch.inference_mode():
        ends_of(energy, flow)
        run_chain(ULA(0.1), target, x, 8, generator(0))
    assert torch.equal(*ends_of(energy, flow))
    ends = [
        run_chain(ULA(0.1), target, x, 8, generator(0), engine=name).state.x for name in ("auto", "eager")
    ]
    assert torch.equal(*ends)
    assert len(captured.known_of(energy).loops) == 1


class TwoCodes(ConditionalNet):
    """One whose code is more than a tensor."""

    def encode(self, given):
        return super().encode(given), given

    def score(self, x, code, t=None):
        return super().score(x, code[0], t)


def test_codes_that_are_more_than_a_tensor_are_followed_eagerly():
    energy = TwoCodes(2, 1, width=4, depth=2, time=True)
    assert torch.equal(*ends_of(energy, InterpolantFlow(2, 1, width=4)))
    assert energy not in sde._RECORDED


class Dropping(ConditionalNet):
    """A network that draws numbers of its own in training mode."""

    def score(self, x, code, t=None):
        return super().score(nn.functional.dropout(x, 0.5, self.training), code, t)


class DroppingField(nn.Module):
    def forward(self, x, given, t):
        return nn.functional.dropout(x, 0.5, self.training)


def test_every_recording_of_the_sde_is_proved_first():
    """An energy and a flow that begin to draw numbers are recorded as long as they do not."""
    energy = Dropping(2, 1, width=4, depth=2, time=True).eval()
    flow = InterpolantFlow(2, 1, field=DroppingField(), replay=True).eval()
    assert torch.equal(*ends_of(energy, flow))
    made = sde._RECORDED[energy].replays.recordings
    assert len(made) == 1
    energy.train()
    with pytest.warns(RuntimeWarning, match="the energy draws random numbers of its own; it is in training"):
        ends_of(energy, flow)
    energy.eval()
    flow.train()
    with pytest.warns(RuntimeWarning, match="Flow cannot be .* the flow draws random numbers of its own; it"):
        ends_of(energy, flow)
    assert len(made) == 1
    assert torch.equal(*ends_of(energy, flow.eval()))
    assert len(made) == 1


def test_the_sde_without_room_for_a_recording_is_followed_eagerly_for_once(monkeypatch):
    energy, flow = ConditionalNet(2, 1, width=4, depth=2, time=True), InterpolantFlow(2, 1, width=4)

    def full(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as m:
        m.setattr(Replays, "record", full)
        with pytest.warns(RuntimeWarning, match="out of memory"):
            assert torch.equal(*ends_of(energy, flow))
    assert torch.equal(*ends_of(energy, flow))
    assert len(sde._RECORDED[energy].replays.recordings) == 1


def test_generators_of_recordings_are_on_their_device():
    own = sde.Recorded()
    first = own.rng(torch.device("cpu"))
    assert own.rng(torch.device("cpu")) is first
    assert own.rng(torch.device("cpu", 0)) is not first


def test_a_policy_whose_flow_cannot_be_recorded_acts_without(runs, monkeypatch):
    policy = policy_of(runs, "chain")
    expected, draw, tried = chunks(policy), RunActions.draw, []

    def broken(self, *given):
        if not may_look(torch.zeros(1, device="meta")):
            tried.append(given)
            raise CaptureError("replay: it could not be recorded")
        return draw(self, *given)

    monkeypatch.setattr(RunActions, "draw", broken)
    with pytest.warns(RuntimeWarning, match="policy: it acts without recordings: replay: it could not"):
        assert torch.equal(chunks(policy), expected)
    assert len(tried) == 1


@pytest.mark.parametrize("name", HOW)
def test_chunks_are_the_same_in_inference_mode(runs, name):
    expected = chunks(policy_of(runs, name))
    policy = policy_of(runs, name)
    with torch.inference_mode():
        assert torch.equal(chunks(policy), expected)
