"""Updates that are launched as a whole are the updates that they were recorded from, bit for bit.

On the CPU the recorded function is called again on its own memory, so that everything but the graph is tested:
state that is not written back, a rate or a decision that is still the one of when the update was recorded.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from test_contract import MEMBERS, batch_of, update, with_companions
from torch import nn
from torch.overrides import TorchFunctionMode

from metastable.core.capture import CaptureError
from metastable.core.errors import DivergenceError
from metastable.core.types import energy_and_grad
from metastable.core.waiting import unwatched
from metastable.energies import MLP, Tilted
from metastable.kernels import HMC, MALA, ChainState, fused, run_chain
from metastable.methods import (
    Context,
    ContrastiveDivergence,
    ExactDraws,
    ImplicitBC,
    InterpolatingNCE,
    Jarzynski,
    PersistentCD,
    RankingNCE,
    ShortRun,
)
from metastable.proposals import fit_gaussian
from metastable.training import SGD, Adam, Schedule, TrainerConfig, captured
from metastable.training.captured import Captured, replace_leaves, tensors_of
from metastable.training.engine import Engine, choose_engine
from metastable.training.records import read_jsonl
from metastable.training.scaled import Rates
from metastable.training.trainer import Trainer
from metastable.training.updates import Updates
from metastable.walkers.population import Population

HOST = torch.device("cpu")
DATA = torch.randn((50, 3), generator=torch.Generator().manual_seed(0)) + 1.0
PACED = Jarzynski(walkers=64, populations=4, schedule=((3, 0.99), (7, 1.0)))
ENGINE = Engine("cpu")


def context_of(method) -> Context:
    """A small run of the method, as the contract builds it."""
    energy, noise = Tilted(fit_gaussian(DATA), MLP((3,), hidden=(8,)), zero_start=True), fit_gaussian(DATA)
    energy.sample = noise.sample
    rng = torch.Generator().manual_seed(1)
    return with_companions(method, Context(energy, {"energy": energy}, DATA, noise, rng))


def trainer(method, engine: str, **options) -> Trainer:
    """Of such a run."""
    context = context_of(method)
    folder = options.pop("folder", None)
    settings = {"steps": 10, "log_every": 3, "batch_size": 20, "schedule": Schedule("cosine", warmup=2)}
    config = TrainerConfig(**({**settings, "optimiser": Adam(1e-2)} | options), engine=engine)
    rows = batch_of(method, context)
    return Trainer(
        context.energy,
        context.players,
        rows,
        method,
        config,
        noise=context.noise,
        engine=ENGINE,
        make_context=Context,
        folder=folder,
    )


def left_by(made: Trainer) -> dict[str, list]:
    """Everything that the updates of a training leave behind."""
    made._begin()
    while not made._is_last():
        made._update()
        made._after_update()
    modules = [*made.players.values(), *([] if made.ema is None else [made.ema])]
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in made.recorder.history]
    return {
        "weights": [t for m in modules for t in m.state_dict().values()],
        "optimisers": [v for o in made.optimisers.values() for own in o.state.values() for v in own.values()],
        "state": tensors_of(made.state),
        "rng": [made.context.rng.get_state()],
        "history": [sorted(row.items()) for row in rows],
    }


def equal(a: dict[str, list], b: dict[str, list]) -> bool:
    same = a["history"] == b["history"] or str(a["history"]) == str(b["history"])  # a NaN is not itself
    tensors = [
        torch.equal(x, y)
        for name in ("weights", "optimisers", "state", "rng")
        for x, y in zip(a[name], b[name], strict=True)
        if isinstance(x, torch.Tensor)
    ]
    return same and all(tensors)


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    made = []
    launched = Captured.launched

    def counted(self, recorded, state, planned):
        made.append(len(planned))
        return launched(self, recorded, state, planned)

    monkeypatch.setattr(Captured, "launched", counted)
    return made


@pytest.mark.parametrize("method", MEMBERS.values(), ids=MEMBERS)
def test_launched_updates_are_the_updates(method, launches):
    eager = left_by(trainer(method, "eager", steps=7))
    assert not launches
    assert equal(left_by(trainer(method, "captured", steps=7)), eager)
    assert len(launches) >= 3


@pytest.mark.parametrize("method", [PACED, PersistentCD(walkers=16)], ids=["jarzynski", "pcd"])
def test_rounded_updates_are_the_updates(method, launches, monkeypatch):
    monkeypatch.setitem(globals(), "ENGINE", Engine("cpu", "bf16-mixed"))
    eager = left_by(trainer(method, "eager", steps=7))
    assert equal(left_by(trainer(method, "captured", steps=7)), eager)
    assert len(launches) >= 3


OPTIONS = {
    "average and clip": {"ema": 0.9, "clip_grad_norm": 0.05},
    "noise on the data": {"data_noise": 0.1, "data_noise_final": 0.0},
    "all data": {"batch_size": None},
    "sgd": {"optimiser": SGD(1e-2, momentum=0.5)},
    "an optimiser of one's own": {"optimiser": lambda p: torch.optim.RMSprop(p, lr=1e-2)},
    "float64": {"precision": "64-true"},
    "warm-up to the end": {"schedule": Schedule("linear", warmup=5)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_whatever_the_trainer_is_told(options, launches):
    assert equal(left_by(trainer(PACED, "captured", **options)), left_by(trainer(PACED, "eager", **options)))
    assert len(launches) >= 5


@pytest.mark.parametrize("method", [PACED, PersistentCD(walkers=40, batch=16)], ids=["jarzynski", "pcd"])
def test_resuming_in_between_changes_nothing(method, tmp_path, launches):
    eager = left_by(trainer(method, "eager", checkpoint_every=4, ema=0.9, steps=12))
    left_by(trainer(method, "captured", checkpoint_every=4, ema=0.9, steps=12, folder=tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000012")
    launches.clear()
    again = trainer(method, "captured", checkpoint_every=4, ema=0.9, steps=12, folder=tmp_path)
    again.run(resume=True)
    assert launches
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [3, 4, 6, 8, 9, 12]
    assert all(torch.equal(*pair) for pair in zip(tensors_of(again.state), eager["state"], strict=True))


# ---- several updates in one launch


def all_of(made: Trainer) -> dict[str, list]:
    """What a training leaves that launches several updates wherever it can."""
    update = made._update
    made._update = lambda: update(made._unseen())
    return left_by(made)


@pytest.fixture
def together(monkeypatch) -> None:
    """Launches of several updates however few are left."""
    monkeypatch.setattr("metastable.training.trainer.WORTH", 0)


@pytest.mark.parametrize(
    "name", ["cd", "pcd", "jarzynski, mini-batch", "f-ebm, js on jarzynski", "adance", "ranking-nce"]
)
def test_updates_launched_together_are_the_updates(name, launches, together):
    method, settings = MEMBERS[name], {"steps": 25, "log_every": 4}
    assert equal(
        all_of(trainer(method, "captured", **settings)), left_by(trainer(method, "eager", **settings))
    )
    assert max(launches) >= 3


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_updates_launched_together_whatever_the_trainer_is_told(options, launches, together):
    options = {"steps": 30, "log_every": 5} | options
    eager = left_by(trainer(PACED, "eager", **options))
    assert equal(all_of(trainer(PACED, "captured", **options)), eager)
    assert launches.count(5) >= 3


def test_resuming_between_launches_of_several_changes_nothing(tmp_path, launches, together):
    settings = {"checkpoint_every": 15, "log_every": 6, "ema": 0.9, "steps": 45}
    eager = left_by(trainer(PACED, "eager", **settings))
    trainer(PACED, "captured", **settings, folder=tmp_path).run()
    for step in (30, 45):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")
    launches.clear()
    again = trainer(PACED, "captured", **settings, folder=tmp_path)
    again.run(resume=True)
    assert max(launches) >= 3
    steps = [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert steps == [*range(6, 13, 6), 15, 18, 24, 30, 36, 42, 45]
    assert all(torch.equal(*pair) for pair in zip(tensors_of(again.state), eager["state"], strict=True))


def test_rates_of_the_first_update_for_all_of_a_launch_are_noticed(launches, together, monkeypatch):
    eager = left_by(trainer(PACED, "eager", steps=30))
    monkeypatch.setattr(Updates, "turn_to", lambda self, place: None)
    assert not equal(all_of(trainer(PACED, "captured", steps=30)), eager)
    assert max(launches) == 3


def test_a_metric_that_is_a_parameter_is_read_before_the_next_update_changes_it():
    own, other = torch.ones(2), torch.zeros(1)
    kept = captured.apart({"a": own[0], "b": other}, {own.untyped_storage().data_ptr()})
    own.zero_()
    assert kept["a"] == 1
    assert kept["b"] is other


def test_a_line_that_diverged_stops_training_though_it_is_read_later(tmp_path, launches, together):
    settings = {"steps": 60, "log_every": 5, "checkpoint_every": 20, "energy_limit": 8.0}
    settings |= {"optimiser": SGD(2.0), "schedule": Schedule()}
    errors, rows = [], []
    for engine in ("eager", "captured"):
        (tmp_path / engine).mkdir()
        with pytest.raises(DivergenceError) as error:
            trainer(PersistentCD(walkers=40), engine, folder=tmp_path / engine, **settings).run()
        errors.append((error.value.step, str(error.value).replace(engine, "")))
        rows.append([row["step"] for row in read_jsonl(tmp_path / engine / "metrics.jsonl")])
    assert errors[0] == errors[1]
    assert errors[0][0] == rows[0][-1] == 35
    assert max(launches) == 5
    assert rows[0] == rows[1]


def test_training_that_is_rolled_back_goes_on_as_step_by_step(tmp_path, launches, together):
    settings = {"steps": 60, "log_every": 5, "checkpoint_every": 20, "energy_limit": 8.0}
    settings |= {"optimiser": SGD(2.0), "schedule": Schedule(), "on_divergence": "rollback"}
    found = []
    for engine in ("eager", "captured"):
        (tmp_path / engine).mkdir()
        made = trainer(PersistentCD(walkers=40), engine, folder=tmp_path / engine, **settings)
        made.run()
        assert made.rollbacks
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in made.recorder.history]
        found.append(([*made.players["energy"].state_dict().values()], rows))
    assert all(torch.equal(*pair) for pair in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1] == found[1][1]
    assert max(launches) == 5


def test_few_updates_that_are_left_are_launched_one_by_one(launches):
    all_of(trainer(PACED, "captured", steps=30))
    assert set(launches) == {1}


# ---- nobody waits for a device


class NothingFromTheHost(TorchFunctionMode):
    """Numbers of the host's do not become tensors elsewhere: such a copy cannot be recorded."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        copies = function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
        given = args[1] if function is torch.Tensor.new_tensor else args[0] if copies else None
        if copies and made.device.type == "meta" and not isinstance(given, torch.Tensor):
            raise RuntimeError(f"{given} would be copied from the host")
        return made


def elsewhere(tree):
    """The same tree on a device whose numbers nobody can see."""
    return replace_leaves(tree, lambda leaf: torch.empty_like(leaf, device="meta"))


def nowhere(context: Context) -> Context:
    """The context with everything on that device, some updates later."""
    for module in {m for top in (*context.players.values(), context.noise) for m in top.modules()}:
        for kept in (module._parameters, module._buffers):
            for name, tensor in kept.items():
                if tensor is not None:
                    moved = torch.empty_like(tensor.detach(), device="meta")
                    learns = isinstance(tensor, nn.Parameter)
                    kept[name] = nn.Parameter(moved, tensor.requires_grad) if learns else moved
    data, given = elsewhere((context.data, context.given))
    return replace(context, data=data, given=given, step=5)


@pytest.mark.parametrize("method", MEMBERS.values(), ids=MEMBERS)
def test_no_update_looks_at_a_number(method):
    context = context_of(method)
    state, _ = update(method, context, method.start(context))
    context, state = nowhere(context), elsewhere(state)
    with unwatched():
        state, _ = update(method, context, state)  # in which constants are copied there, once
        with NothingFromTheHost():
            update(method, context, state)


def test_a_look_is_noticed(monkeypatch):
    context = context_of(PACED)
    state, _ = update(PACED, context, PACED.start(context))
    state, context = elsewhere(state), nowhere(context)
    for word in ("item", "host"):
        looks = lambda self, ess=None, word=word: (  # noqa: E731
            self.x.sum().item() if word == "item" else torch.tensor([1.0], device=self.x.device)
        )
        monkeypatch.setattr(Population, "noise", looks)
        with unwatched(), NothingFromTheHost(), pytest.raises(RuntimeError, match=word):
            update(PACED, context, state)


# ---- what must not go unnoticed


def mutant(monkeypatch, target, name, change) -> bool:
    """Whether a training by a changed trainer is still the eager one."""
    eager = left_by(trainer(PACED, "eager", ema=0.9))
    monkeypatch.setattr(target, name, change)
    return equal(left_by(trainer(PACED, "captured", ema=0.9)), eager)


def test_a_state_that_is_not_written_back_is_noticed(monkeypatch):
    write = captured.write
    forgets = lambda tree, new: None if hasattr(tree, "steering") else write(tree, new)  # noqa: E731
    assert not mutant(monkeypatch, captured, "write", forgets)


def test_a_rate_that_stays_is_noticed(monkeypatch):
    write = Rates.write
    stays = lambda self, place=0: write(self, place) if self.numbers[0][0] is None else None  # noqa: E731
    assert not mutant(monkeypatch, Rates, "write", stays)


def test_a_phase_that_says_too_little_is_noticed(monkeypatch):
    assert not mutant(monkeypatch, Jarzynski, "phase", lambda self, context: None)


def test_a_count_that_stays_is_noticed(monkeypatch):
    assert not mutant(monkeypatch, Updates, "after", lambda self: None)


def test_a_warm_up_that_is_not_undone_is_noticed(monkeypatch):
    assert not mutant(monkeypatch, Updates, "changed", lambda self: [])


# ---- which engine, and what is said where there is none


def test_the_choice_and_its_reason():
    gpu, method = torch.device("cuda"), PersistentCD()
    assert choose_engine("auto", HOST, method, 1000)[:2] == (
        "eager",
        "updates are recorded on cuda devices, not on cpu",
    )
    assert choose_engine("auto", gpu, method, 1000)[:2] == ("captured", "")
    assert choose_engine("auto", gpu, method, 20)[:3] == (
        "eager",
        "20 updates are too few to record one",
        "auto",  # a long chain is worth recording by itself
    )
    assert choose_engine("eager", gpu, method, 1000)[::2] == ("eager", "eager")
    assert choose_engine("compile", gpu, method, 1000).chains == "compile"


def chains_of(wanted, method=None, energy=None, precision="32-true", steps=10_000):
    x = torch.zeros(5, 3)
    energy = Tilted(fit_gaussian(torch.randn(20, 3)), MLP(3, hidden=(8,))) if energy is None else energy
    choice = choose_engine(
        wanted, torch.device("cuda"), method or PersistentCD(), steps, energy, x, precision
    )
    assert choice.chosen == "captured"
    return choice


def test_chains_of_perceptrons_are_fused_in_recorded_updates_and_others_say_why_not(monkeypatch):
    monkeypatch.setattr(fused, "triton_is_here", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert str(chains_of("auto")) == "captured; chains fused"
    assert chains_of("fused", Jarzynski()).chains == "fused"
    assert chains_of("auto", steps=9_999).chains == "eager"
    assert "9999 updates are too few for what compiling" in str(chains_of("auto", steps=9_999))
    assert chains_of("auto", ShortRun(steps=10), steps=1_000).chains == "fused"
    assert chains_of("fused", steps=200).chains == "fused"
    assert chains_of("captured").chains == "eager"  # bit for bit the chains of eager updates
    assert chains_of("auto", ContrastiveDivergence(kernel=HMC(), steps=10), steps=10_000).chains == "fused"
    assert str(chains_of("auto", ExactDraws())) == "captured"
    for settings, words in (
        ({"method": ContrastiveDivergence(kernel=HMC(mass=(1.0, 2.0)))}, "only one mass for all is fused"),
        ({"energy": nn.Linear(3, 1)}, "is no perceptron"),
        ({"precision": "bf16-mixed"}, "the precision is bf16-mixed"),
    ):
        choice = chains_of("auto", **settings)
        assert choice.chains == "eager"
        assert words in str(choice)


def test_fused_chains_that_were_asked_for_and_cannot_be_are_said():
    with pytest.warns(UserWarning, match="not captured, as updates are recorded on cuda devices, not on cpu"):
        asked = trainer(PersistentCD(walkers=16), "fused")
    assert equal(left_by(asked), left_by(trainer(PersistentCD(walkers=16), "eager")))


def launched_eagerly(
    kernel,
    energy,
    state,
    steps,
    rng,
    *,
    step_size=None,
    energies=False,
    first=None,
    rows=None,
    into=None,
    **_,
):
    """What one kernel gives, step by step."""
    if rows is not None:
        state = ChainState(state.x[rows], *state[1:])
        made = launched_eagerly(kernel, energy, state, steps, rng, step_size=step_size)
        after = ChainState(*(old.index_copy(0, rows, new) for old, new in zip(into, made.state, strict=True)))
        return made._replace(state=after)
    state = ChainState(state.x, *energy_and_grad(energy, state.x))
    if first is not None:
        first.copy_(state.energy)
    if not isinstance(kernel, MALA):
        state = state if energies else kernel.init(energy, state.x)
    return run_chain(kernel, energy, state, steps, rng, engine="eager", step_size=step_size)


LAUNCHED = {
    "pcd": PersistentCD(walkers=16),
    "pcd, mala": PersistentCD(walkers=16, kernel=MALA(0.05)),
    "cd": ContrastiveDivergence(),
    "jarzynski": Jarzynski(walkers=32, populations=2),
    "jarzynski, mini-batch": Jarzynski(walkers=32, populations=2, batch=8),
    "jarzynski, ula": Jarzynski(step_size=0.05, walkers=32, populations=2),
    "jarzynski, ula, mini-batch": Jarzynski(step_size=0.05, walkers=32, populations=2, batch=8),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_updates_with_launched_chains_are_those_with_eager_ones_where_the_launch_is(name, monkeypatch):
    method, count = LAUNCHED[name], []

    def counted(*given, **named):
        count.append(named)
        return launched_eagerly(*given, **named)

    monkeypatch.setattr(fused, "why_not", lambda *given, **named: None)
    monkeypatch.setattr(fused, "fused_chain", counted)
    made = trainer(method, "eager")
    made.context.engine = "fused"
    assert equal(left_by(made), left_by(trainer(method, "eager")))
    assert len(count) >= made.config.steps
    weighs = isinstance(method, Jarzynski)
    assert all(named["precision"] == "float32" for named in count)
    assert len({str(named.get("plan")) for named in count}) == 1
    assert all((named.get("plan") is not None) == weighs for named in count)  # one layout for all energies


@dataclass(frozen=True)
class Silent(ContrastiveDivergence):
    """A loss of somebody's own that asks for the step."""

    def loss(self, context, state, player, batch, negatives):
        loss, metrics = super().loss(context, state, player, batch, negatives)
        return loss * (1 + context.step), metrics


@dataclass(frozen=True)
class Said(Silent):
    """The same with its phase."""

    def phase(self, context):
        return super().phase(context), context.step // 4

    def loss(self, context, state, player, batch, negatives):
        loss, metrics = ContrastiveDivergence.loss(self, context, state, player, batch, negatives)
        return loss * (1 + context.step // 4), metrics


def test_a_method_that_does_not_say_its_phase_is_not_recorded(launches):
    with pytest.warns(UserWarning, match="Silent does not say with `phase`"):
        asked = trainer(Silent(), "captured")
    assert equal(left_by(asked), left_by(trainer(Silent(), "eager")))
    assert not launches
    assert equal(left_by(trainer(Said(), "captured", steps=16)), left_by(trainer(Said(), "eager", steps=16)))
    assert launches


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda *given: None)


def counting(module: nn.Module) -> None:
    module.calls, forward = 0, module.forward

    def counted(x):
        module.calls += 1
        return forward(x)

    module.forward = counted


@pytest.mark.parametrize(("does", "words"), [(hooked, "MLP has hooks"), (counting, "it changes MLP.calls")])
def test_what_an_energy_does_in_python_is_not_lost(does, words):
    made, eager = trainer(PACED, "captured"), trainer(PACED, "eager")
    does(made.players["energy"].network)
    does(eager.players["energy"].network)
    with pytest.warns(UserWarning, match=words):
        found = left_by(made)
    assert equal(found, left_by(eager))
    assert vars(made.players["energy"].network).get("calls") == vars(eager.players["energy"].network).get(
        "calls"
    )


def test_what_fails_while_it_is_recorded_goes_on_step_by_step_and_says_so_once(monkeypatch):
    def broken(*given, **named):
        raise CaptureError("could not be recorded as a CUDA graph: somewhere/here.py:3, `x.item()`: waits")

    monkeypatch.setattr(captured, "record", broken)
    made = trainer(PACED, "captured")
    with pytest.warns(UserWarning, match=r"goes on step by step.*here.py:3, `x.item\(\)`") as told:
        found = left_by(made)
    assert len(told) == 1
    assert made.choice.chosen == "eager"
    assert "here.py:3" in made.choice.reason
    assert equal(found, left_by(trainer(PACED, "eager")))


# ---- draws that serve many updates


@pytest.mark.parametrize("trained", [True, False], ids=["moving", "frozen"])
@pytest.mark.parametrize("settings", [{}, {"proposal_steps": 1, "energy_steps": 2}], ids=["1:1", "1:2"])
def test_updates_that_draw_and_those_that_take_are_recorded_apart(trained, settings, launches, together):
    """50 rows are full after three updates of 20; after that one in four draws, and writes over the first ones."""
    flow = {"name": "interpolant", "width": 4, "layers": 2, "steps": 2, "scored": 2}
    method = RankingNCE(3, proposal=flow, reuse=4, pool=50, train_proposal=trained, pretrain=3, **settings)
    options = {"steps": 48, "log_every": 6}
    eager = left_by(trainer(method, "eager", **options))
    made = trainer(method, "captured", **options)
    assert equal(all_of(made), eager)
    phases = {key[0] for keys in made.captured.recordings for key in keys}
    assert {phase[1] for phase in phases if isinstance(phase, tuple)} == {"draws", "takes"}
    assert max(launches) >= 3
    assert int(made.state.written) > 50 + 20


@pytest.mark.parametrize("kind", [ImplicitBC, InterpolatingNCE])
def test_all_who_rank_take_from_a_pool(kind, launches, together):
    flow = {"name": "interpolant", "width": 4, "layers": 2, "steps": 2, "scored": 2}
    own = {"times": 2} if kind is InterpolatingNCE else {}
    method = kind(3, proposal=flow, reuse=4, pool=50, **own)
    options = {"steps": 24, "log_every": 6}
    made = trainer(method, "captured", **options)
    assert equal(all_of(made), left_by(trainer(method, "eager", **options)))
    assert int(made.state.written) == 8 * 20  # updates 0, 1, 2, 4, 8, 12, 16 and 20


def test_a_proposal_that_learns_first_is_annealed_by_the_time_it_stays():
    """Also where schedules follow seconds, of which its updates are a small share."""
    flow = {"name": "interpolant", "width": 4, "layers": 2, "steps": 2, "scored": 2}
    method = RankingNCE(3, proposal=flow, train_proposal=False, pretrain=5)
    own = {"proposal": Schedule("cosine")}
    made = trainer(method, "eager", steps=1000, follows="seconds", max_seconds=1e6, schedules=own)
    made._begin()
    rates = []
    for _ in range(6):
        rates.append(made.optimisers["proposal"].param_groups[0]["lr"])
        made._update()
        made._after_update()
    assert rates[0] == pytest.approx(1e-2)
    assert rates == sorted(rates, reverse=True)
    assert rates[5] == pytest.approx(0.0, abs=1e-12)
    assert made.optimisers["energy"].param_groups[0]["lr"] == pytest.approx(1e-2)
