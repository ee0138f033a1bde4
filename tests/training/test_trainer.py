"""The loop: resuming, guarding, averaging, scheduling, recording."""

from __future__ import annotations

import json
import math

import pytest
import torch
from conftest import each
from torch import Tensor, nn

from metastable.api import fit, load_run
from metastable.core.errors import CheckpointError, ConfigError, DivergenceError, InputError
from metastable.data import load_array
from metastable.energies import MLP, Tilted
from metastable.methods import ContrastiveDivergence, Jarzynski, PersistentCD, ShortRun
from metastable.proposals import fit_gaussian
from metastable.runs.plan import make_plan, trainer_of
from metastable.training import SGD, Adam, Schedule, TrainerConfig
from metastable.training.batches import Batches
from metastable.training.patience import Patience
from metastable.training.records import read_jsonl

DATA = torch.randn((200, 2), generator=torch.Generator().manual_seed(0))
WIDE = torch.randn((4000, 2), generator=torch.Generator().manual_seed(1))
METHODS = {
    "cd": ContrastiveDivergence(steps=2),
    "pcd": PersistentCD(walkers=64, batch=32, rejuvenation=0.1),
    "short-run": ShortRun(walkers=32, steps=3),
    "jarzynski": Jarzynski(walkers=64, populations=4),
    "jarzynski-batch": Jarzynski(walkers=64, populations=4, batch=16, steps=2),
}


def small() -> nn.Module:
    return Tilted(fit_gaussian(DATA), MLP(2, hidden=(8,)))


def train(out, steps=20, method=None, **options):
    options = {"log_every": 3, "checkpoint_every": 5, "batch_size": 50, "learning_rate": 1e-3} | options
    return fit(small(), DATA, method or METHODS["jarzynski"], steps, out=out, evaluate=False, **options)


def weights(run) -> Tensor:
    return torch.cat([v.flatten() for v in run.energy.state_dict().values()])


@pytest.mark.parametrize("name", METHODS)
def test_resuming_is_bit_exact(name, tmp_path):
    options = {"ema": 0.9, "schedule": Schedule("cosine", warmup=3), "clip_grad_norm": 0.5}
    whole = train(tmp_path / "whole", 20, METHODS[name], **options)
    train(tmp_path / "parts", 20, METHODS[name], **options)
    # go back to the middle, as after a kill: later checkpoints never happened
    import shutil

    for step in (15, 20):
        shutil.rmtree(tmp_path / "parts" / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    resumed = train(tmp_path / "parts", 20, METHODS[name], resume=True, **options)
    assert torch.equal(weights(whole), weights(resumed))
    assert torch.equal(*(torch.cat([p.flatten() for p in r.ema.parameters()]) for r in (whole, resumed)))
    if whole.walkers is not None:
        assert torch.equal(whole.walkers.x, resumed.walkers.x)
        assert torch.equal(whole.walkers.log_weight, resumed.walkers.log_weight)
    rows = [read_jsonl(tmp_path / p / "metrics.jsonl") for p in ("whole", "parts")]
    strip = [[{k: v for k, v in r.items() if k != "seconds"} for r in side] for side in rows]
    assert strip[0] == strip[1]


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(tmp_path):
    whole = train(tmp_path / "a", 20)
    train(tmp_path / "b", 20)
    newest = tmp_path / "b" / "checkpoints" / "step-00000020" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    with pytest.warns(RuntimeWarning, match="step-00000020"):
        resumed = train(tmp_path / "b", 20, resume=True)
    assert torch.equal(weights(whole), weights(resumed))


def test_more_steps_continue_a_finished_run(tmp_path):
    train(tmp_path / "a", 10)
    longer = train(tmp_path / "a", 20, resume=True)
    assert torch.equal(weights(longer), weights(train(tmp_path / "b", 20)))


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    train(tmp_path / "a", 5)
    with pytest.raises(InputError, match=r"already holds a run; resume=True \(--resume\), or another folder"):
        train(tmp_path / "a", 5)
    with pytest.raises(InputError, match="method differs"):
        train(tmp_path / "a", 5, METHODS["cd"], resume=True)


def test_a_run_without_a_folder_cannot_be_resumed():
    with pytest.raises(InputError, match=r"resume: must be given with out=…"):
        fit("mlp", torch.randn(8, 2), METHODS["cd"], 2, resume=True)


def test_what_comes_after_a_training_may_be_refused_before_it():
    def refuse(run):
        assert (run.status, run.steps, run.model.event_shape) == ("planned", 0, (2,))
        raise InputError("not this one")

    with pytest.raises(InputError, match="not this one"):
        fit("mlp", torch.randn(8, 2), METHODS["cd"], 2, before=refuse)


class Fragile(nn.Module):
    """Becomes not-a-number (or huge) after some calls of the training loss."""

    def __init__(self, after: int, value: float):
        super().__init__()
        self.inner, self.calls, self.after, self.value = small(), 0, after, value

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:
            self.calls += 1
        bad = self.value if self.calls > self.after else 0.0
        return self.inner(x) + bad


@pytest.mark.parametrize(("value", "words"), [(math.nan, "is nan"), (1e9, "energy_limit")])
def test_guard_stops_and_names_step_seed_checkpoint_and_advice(value, words, tmp_path):
    with pytest.raises(DivergenceError, match=words) as caught:
        fit(
            Fragile(24, value),
            DATA,
            ContrastiveDivergence(steps=1),
            40,
            out=tmp_path / "a",
            log_every=3,
            checkpoint_every=5,
            seed=7,
        )
    message = str(caught.value)
    assert "seed 7" in message
    assert "step-00000010" in message
    assert "learning rate" in message
    assert caught.value.step == 15
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["status"] == "diverged"
    assert (tmp_path / "a" / "report.html").is_file()
    # nothing that is not a number was checkpointed
    good = load_run(tmp_path / "a", energy=Fragile(10**9, 0.0))
    assert all(torch.isfinite(v).all() for v in good.energy.state_dict().values())


class RecoversAfterRollback(Fragile):
    def load_state_dict(self, *args, **kwargs):
        self.after = 10**9
        return super().load_state_dict(*args, **kwargs)


def test_rollback_goes_on_from_the_last_good_checkpoint_at_half_the_rate(tmp_path):
    run = fit(
        RecoversAfterRollback(24, math.nan),
        DATA,
        ContrastiveDivergence(steps=1, step_size=0.05),
        30,
        out=tmp_path / "a",
        log_every=3,
        checkpoint_every=5,
        on_divergence="rollback",
        units="none",
        learning_rate=1e-2,
        evaluate=False,
    )
    assert run.status == "finished"
    steps = [row["step"] for row in run.history]
    assert steps == sorted(set(steps))
    assert run.history[-1]["learning_rate"] == pytest.approx(5e-3)


def test_an_energy_without_parameters_cannot_be_fitted():
    with pytest.raises(InputError, match=r"nn\.Module"):
        fit(lambda x: x.square().sum(1), DATA, "cd", 5)


def test_a_full_disk_while_checkpointing_is_said_and_loses_nothing(tmp_path, monkeypatch):
    import errno

    from metastable.training import checkpoints

    train(tmp_path / "a", 5)
    real = checkpoints.write_file

    def full(path, content):
        if "00000010" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(checkpoints, "write_file", full)
    with pytest.raises(CheckpointError, match="full"):
        train(tmp_path / "a", 20, resume=True)
    monkeypatch.undo()
    assert torch.equal(weights(train(tmp_path / "a", 20, resume=True)), weights(train(tmp_path / "b", 20)))


def test_unknown_trainer_settings_name_the_nearest():
    with pytest.raises(ConfigError, match=r"trainer\.bach_size.*batch_size"):
        fit(None, DATA, "cd", 5, bach_size=3)


def test_any_optimiser_and_schedule(tmp_path):
    run = fit(
        small(),
        DATA,
        "cd",
        6,
        optimiser=lambda p: torch.optim.RMSprop(p, lr=0.01),
        schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1),
        log_every=1,
        out=tmp_path / "a",
        evaluate=False,
    )
    assert [r["learning_rate"] for r in run.history] == pytest.approx([1e-2, 1e-3, 1e-3, 1e-4, 1e-4, 1e-5])


def test_optimisers_step_as_torch_does():
    for config, reference in [
        (Adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
        (SGD(0.01, momentum=0.9), lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)),
    ]:
        ends = []
        for factory in (config, reference):
            x = nn.Parameter(torch.ones(3))
            optimiser = factory([x])
            for _ in range(5):
                optimiser.zero_grad()
                (x**2).sum().backward()
                optimiser.step()
            ends.append(x.detach().clone())
        assert torch.allclose(*ends)


def test_schedule_shapes():
    assert Schedule("linear").factor(5, 10) == 0.5
    assert Schedule("cosine").factor(10, 10) == pytest.approx(0.0)
    assert Schedule("cosine", final=0.1).factor(10, 10) == pytest.approx(0.1)
    assert [Schedule("constant", warmup=4).factor(k, 10) for k in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_ema_is_the_average_of_the_weights(tmp_path):
    seen = []
    energy = small()
    run = fit(
        energy,
        DATA,
        "cd",
        4,
        ema=0.5,
        log_every=1,
        evaluate=False,
        progress=lambda row: seen.append(energy.network.head.weight.detach().clone()),
    )
    average = seen[0]
    for value in seen[1:]:
        average = 0.5 * average + 0.5 * value
    torch.testing.assert_close(run.ema.network.head.weight.detach(), average)


def test_batches_cover_an_epoch_without_repeats():
    batches = Batches(torch.arange(10.0)[:, None], 3, seed=0)
    epoch = torch.cat([batches.at(k).x for k in range(3)]).flatten().tolist()
    assert len(set(epoch)) == 9
    assert torch.equal(batches.at(1).x, Batches(torch.arange(10.0)[:, None], 3, seed=0).at(1).x)


def test_tensorboard_events_are_written(tmp_path):
    train(tmp_path / "a", 6, tensorboard=True)
    assert list((tmp_path / "a" / "tensorboard").glob("events*"))


def test_double_precision_trains_in_double(tmp_path):
    run = train(tmp_path / "a", 5, precision="64-true")
    assert next(run.energy.parameters()).dtype == torch.float64
    assert run.walkers.x.dtype == torch.float64
    assert next(load_run(tmp_path / "a", small()).energy.parameters()).dtype == torch.float64


@each(
    "settings, field",
    [
        ({"steps": 0}, "trainer.steps"),
        ({"batch_size": -1}, "trainer.batch_size"),
        ({"ema": 1.0}, "trainer.ema"),
        ({"precision": "16-mixed"}, None),
        ({"on_divergence": "hope"}, "trainer.on_divergence"),
        ({"clip_grad_norm": 0.0}, "trainer.clip_grad_norm"),
    ],
)
def test_bad_trainer_settings(settings, field):
    if field is None:
        with pytest.raises(ConfigError, match=r"trainer\.precision"):
            fit(None, DATA, "cd", 5, **settings)
        return
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**settings)
    assert caught.value.path == field


@pytest.mark.parametrize("units", ["none", "whiten"])
@pytest.mark.parametrize("noise", [(0.0, None), (1.0, None), (0.2, 1.0), (2.0, 0.5)])
def test_held_out_rows_tell_when_to_end_with_the_noise_of_the_end(noise, units):
    """Normal rows with noise σ are N(0, 1 + σ²): on the way there from a narrow model every look is better."""
    config = TrainerConfig(steps=50, data_noise=noise[0], data_noise_final=noise[1])
    plan = make_plan("mlp", load_array(WIDE), METHODS["jarzynski"], config, units=units, held_out=0.5)
    first, again = (trainer_of(plan).patience for _ in range(2))
    assert first is not None
    assert torch.equal(first.rows, again.rows)
    rows = first.rows if plan.coordinates is None else plan.coordinates.events.inverse(first.rows)
    first.rows = rows.double()
    last = 1 + config.noise_at(50) ** 2
    variances = [*torch.linspace(0.5 * last, 0.9 * last, 20).tolist(), 1.6 * last]
    looks = [
        first.better(lambda x, v=v: x.square().sum(1) / (2 * v), math.log(2 * math.pi * v), k)
        for k, v in enumerate(variances)
    ]
    assert looks == [True] * 20 + [False]


def test_a_score_is_that_of_the_density_with_its_power():
    kept = Patience(DATA, 2.0, 50, 0.2)
    kept.better(lambda x: x.sum(1), 0.5, 7)
    assert kept.scores == [(7, pytest.approx(-2 * DATA.sum(1).mean().item() - 0.5, abs=1e-5))]


def test_scores_of_rows_without_their_noise_are_not_compared_with_those_of_rows_with_it():
    kept = Patience(DATA, 1.0, 50, 0.2)
    assert kept.due(7)
    kept.better(lambda x: x.sum(1), 0.0, 7)
    now, older = kept.save(), {key: value for key, value in kept.save().items() if key != "seen"}
    for tree, noise, scores in ((now, 0.3, kept.scores), (older, 0.0, kept.scores), (older, 0.3, [])):
        new = Patience(DATA, 1.0, 50, 0.2)
        new.load(tree, noise)
        assert (new.scores, new.at, new.looked, new.spent) == (scores, 7, 7, False)


@pytest.mark.parametrize("schedule", ["cosine", {"shape": "cosine"}])
def test_a_schedule_that_is_none_is_named(schedule):
    with pytest.raises(ConfigError, match=r"trainer\.schedule: must be a Schedule, or a function"):
        TrainerConfig(schedule=schedule)
