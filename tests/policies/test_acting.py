"""A policy that acts otherwise: by settings that its run is asked with, too, and never by others than it says."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch

from metastable.cli.main import app
from metastable.core import ConfigError, InputError
from metastable.core.random import derive, generator
from metastable.data import Demonstrations, Scaling
from metastable.kernels import ULA
from metastable.policies import Policy, PolicyConfig, RunActions, fit_policy, load_policy
from metastable.policies.config import MOVES
from metastable.report import write_report
from metastable.training.checkpoints import CheckpointStore

FLOW = {"name": "interpolant", "field": "residual", "width": 8, "layers": 3, "steps": 4, "scored": 3}
TIMED = {"name": "conditional", "width": 8, "depth": 2, "time": True}
STAGES = {"name": "interpolating-nce", "negatives_per_datum": 2, "times": 1, "proposal": FLOW}
STANDING = {"name": "ranking-nce", "negatives_per_datum": 2, "reuse": 4, "pool": 16}
HOW = {"steps": 3, "batch_size": 8, "units": "none", "ema": 0.5}
CHAIN = PolicyConfig(1, 2, 1, 3, 2, 1)
SEEN = torch.full((2, 1, 2), 0.3)


def shown() -> Demonstrations:
    x = torch.randn(40, 2, generator=generator(0)).double().numpy()
    return Demonstrations.of(x, x[:, :1], [20, 40])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a flow, an energy on it, and an interpolating energy that was settled for chains."""
    at = tmp_path_factory.mktemp("policies")
    flow = fit_policy(shown(), FLOW, "density", PolicyConfig(1, 2, 1, 3, 0, 0), out=at / "flow", **HOW)
    energy = {"name": "on-proposal", "width": 8, "depth": 2}
    fit_policy(shown(), energy, STANDING, flow.config, on=flow, out=at / "standing", **HOW)
    fit_policy(shown(), TIMED, STAGES, CHAIN, out=at / "stages", **HOW)
    return at


CHANGES = [
    ("flow", {"ode": 2}),
    ("flow", {"averaged": False}),
    ("flow", {"candidates": 1}),
    ("standing", {"rank": "network"}),
    ("standing", {"rank": "weights", "averaged": False, "ode": 2}),
    ("stages", {"kernel": {"name": "ula", "step_size": 0.5}}),
    ("stages", {"algorithm": 4, "steps": 0, "sampling": {"evaluations": 20, "eta": 1e-3}}),
    ("stages", {"averaged": False, "steps": 3}),
]


@pytest.mark.parametrize(("name", "changed"), CHANGES)
def test_a_policy_acts_by_other_settings_as_one_that_is_read_with_them(folder, name, changed):
    policy = load_policy(folder / name)
    before = policy.predict_action_chunk(SEEN)
    made, read = policy.acting(**changed), load_policy(folder / name, **changed)
    chunk = made.predict_action_chunk(SEEN)
    assert torch.equal(chunk, read.predict_action_chunk(SEEN))
    assert not torch.equal(chunk, before), "the setting is one that matters here"
    assert (made.config, made.proposal, made.seed) == (read.config, read.proposal, read.seed)
    for kept in ("step_size", "sampler_step"):
        assert vars(made.model)[kept] == vars(policy.model)[kept]
    assert made.model.covariance is policy.model.covariance
    back = made.acting(**{key: vars(policy.config)[key] for key in changed})
    assert torch.equal(back.predict_action_chunk(SEEN), before)
    policy.reset()
    assert torch.equal(policy.predict_action_chunk(SEEN), before), "it stays as it was"


def test_weights_are_shared(folder):
    policy = load_policy(folder / "flow")
    assert policy.acting(candidates=1).model is policy.model
    assert policy.acting(ode=2).model.run is policy.model.run


@pytest.mark.parametrize(("name", "changed"), [c for c in CHANGES if "candidates" not in c[1]])
def test_settings_that_the_model_does_not_act_by_are_refused(folder, name, changed):
    policy = load_policy(folder / name)
    config = replace(policy.config, **changed)
    with pytest.raises(ConfigError, match=r"policy\.\w+: must be .*policy\.acting\("):
        Policy(policy.model, policy.scaling, config)
    made = policy.acting(**changed)
    with pytest.raises(ConfigError, match=r"policy\.\w+: must be "):
        Policy(made.model, made.scaling, policy.config)
    assert Policy(made.model, made.scaling, config).config == config


def test_windows_are_those_of_the_training(folder):
    """Words were those of the run, `given: must have shape (B, 2), got (2, 4)`, and came with the first chunk."""
    policy = load_policy(folder / "flow")
    for acting in (policy.acting, lambda **changed: load_policy(folder / "flow", **changed)):
        with pytest.raises(ConfigError, match=r"policy\.context: must be 1, as trained, got 2"):
            acting(context=2)
        with pytest.raises(ConfigError, match=r"policy\.prediction: must be 2, as trained, got 3"):
            acting(prediction=3)


def test_weights_are_those_that_the_settings_say(folder):
    run = load_policy(folder / "flow").model.run
    scaling, config = Scaling.fit(shown()), PolicyConfig(1, 2, 1, 3, 0, 0)
    with pytest.raises(ConfigError, match=r"policy\.averaged: must be False for RunActions\(run\)"):
        Policy(RunActions(run.unaveraged), scaling, config)
    with pytest.raises(ConfigError, match=r"policy\.averaged: must be True, as these weights are averages"):
        Policy(RunActions(run), scaling, replace(config, averaged=False))


def test_a_kernel_that_is_no_table_stays(folder):
    read = load_policy(folder / "stages")
    kernel, found = ULA(0.5), (read.model.covariance, read.model.step_size)
    own = Policy(RunActions(read.model.run, 2, *found, kernel=kernel), read.scaling, CHAIN)
    assert own.acting(candidates=2, ode=2).model.kernel is kernel
    table = {"name": "ula", "step_size": 0.5}
    chunk = own.predict_action_chunk(SEEN)
    assert torch.equal(chunk, read.acting(kernel=table).predict_action_chunk(SEEN))
    assert Policy(own.model, own.scaling, replace(CHAIN, kernel=table)).model is own.model
    with pytest.raises(ConfigError, match=r"policy\.kernel: must be ULA"):
        Policy(own.model, own.scaling, replace(CHAIN, kernel={"name": "mala"}))


EXPORTED = [("flow", {}), ("flow", {"averaged": False}), ("standing", {"rank": "network"}), ("stages", {})]


@pytest.mark.parametrize(("name", "changed"), EXPORTED)
def test_an_exported_policy_acts_to_the_bit_and_holds_its_weights_alone(folder, tmp_path, name, changed):
    policy = load_policy(folder / name, **changed)
    at = policy.export(tmp_path / "lean")
    again = load_policy(at)
    assert (again.config, again.seed, again.proposal) == (policy.config, policy.seed, policy.proposal)
    for _ in range(3):
        assert torch.equal(again.predict_action_chunk(SEEN), policy.predict_action_chunk(SEEN))
    assert (again.model.run.steps, again.model.run.history) == (3, policy.model.run.history)
    held = CheckpointStore(at / "checkpoints").load()
    assert (set(held.weights), held.state) == (set(policy.model.run.players), {"method": {}})
    faster = {"ode": 2, "candidates": 1, "warm": 0}
    chunks = [made.acting(**faster).predict_action_chunk(SEEN) for made in (again, policy)]
    assert torch.equal(*chunks)
    other = not policy.config.averaged
    for ask in (lambda: load_policy(at, averaged=other), lambda: again.acting(averaged=other)):
        with pytest.raises(ConfigError, match=rf"policy\.averaged: must be {not other}, as .* exported"):
            ask()
    twice = again.export(tmp_path / "twice")
    assert torch.equal(*(load_policy(each).predict_action_chunk(SEEN) for each in (twice, at)))
    with pytest.raises(ConfigError, match=r"policy\.averaged"):
        load_policy(twice, averaged=other)


@pytest.mark.parametrize("name", ["flow", "standing"])
def test_policies_are_sent_to_other_processes(folder, name):
    policy = load_policy(folder / name)
    sent = pickle.loads(pickle.dumps(policy))
    assert torch.equal(sent.predict_action_chunk(SEEN), policy.predict_action_chunk(SEEN))


def test_folders_may_be_of_the_home(tmp_path, monkeypatch):
    """A training made a folder that is called ~, and was not read from where it was said to be."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    policy = fit_policy(shown(), FLOW, "density", CHAIN, out="~/runs/mine", **HOW)
    for at in ("~/runs/mine", policy.export("~/runs/lean"), tmp_path / "runs" / "lean"):
        assert torch.equal(load_policy(at).predict_action_chunk(SEEN), policy.predict_action_chunk(SEEN))
        policy.reset()
    with pytest.raises(SystemExit):
        app(["report", "~/runs/mine", "--out=~/page.html"])
    assert (tmp_path / "page.html").is_file()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_was_exported_is_not_trained_on_and_takes_no_other_place(folder, tmp_path):
    at = load_policy(folder / "flow").export(tmp_path / "lean")
    before = {path: path.read_bytes() for path in at.rglob("*") if path.is_file()}
    config = PolicyConfig(1, 2, 1, 3, 0, 0)
    with pytest.raises(
        InputError, match=r"resume: .*lean holds exported weights alone; go on where they were"
    ):
        fit_policy(shown(), FLOW, "density", config, out=at, resume=True, **{**HOW, "steps": 5})
    with pytest.raises(ConfigError, match=r"folder: must be a new or an empty one, got .*lean'"):
        load_policy(folder / "flow").export(at)
    assert {path: path.read_bytes() for path in at.rglob("*") if path.is_file()} == before
    flow = load_policy(at)
    energy = {"name": "on-proposal", "width": 8, "depth": 2}
    assert fit_policy(shown(), energy, STANDING, config, on=flow, **HOW).model.run.steps == 3


@pytest.mark.parametrize("method", ["ranking-nce", "ibc"])
def test_a_policy_that_was_kept_in_memory_can_be_exported(tmp_path, method):
    how = {"steps": 2, "batch_size": 8}
    policy = fit_policy(shown(), None, {"name": method}, CHAIN, **how)
    with pytest.raises(InputError, match="only that of a run with a folder can be saved"):
        policy.save()
    again = load_policy(policy.export(tmp_path / "lean"))
    assert torch.equal(again.predict_action_chunk(SEEN), policy.predict_action_chunk(SEEN))
    with pytest.raises(InputError, match="only that of a run can be exported"):
        Policy(Still(), policy.scaling, CHAIN).export(tmp_path / "still")


def test_an_export_that_was_cut_leaves_nothing_by_its_name(folder, tmp_path, monkeypatch):
    policy, at = load_policy(folder / "flow"), tmp_path / "lean"
    monkeypatch.setattr(Policy, "_write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy.export(at)
    monkeypatch.undo()
    assert not at.exists()
    assert list(tmp_path.iterdir()) == []
    load_policy(policy.export(at))
    assert [path.name for path in tmp_path.iterdir()] == ["lean"]
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    policy.export(tmp_path / "link")
    assert torch.equal(
        *(load_policy(tmp_path / name).predict_action_chunk(SEEN) for name in ("here", "lean"))
    )
    assert CheckpointStore(at / "checkpoints").load().step == 3
    changed = (at / "config.json").read_text().replace('"seed": 0', '"seed": 1')
    (at / "config.json").write_text(changed)
    with pytest.warns(RuntimeWarning, match=r"config\.json: was altered since the run wrote it"):
        load_policy(at)


def test_where_there_are_no_averages_an_exported_policy_has_all_weights(tmp_path):
    policy = fit_policy(shown(), FLOW, "density", PolicyConfig(1, 2, 1, 3, 0, 0), steps=2, batch_size=8)
    at = policy.export(tmp_path / "lean")
    chunks = [load_policy(at, averaged=each).predict_action_chunk(SEEN) for each in (True, False)]
    assert torch.equal(*chunks)


def test_a_kernel_among_the_options_of_sampling_is_the_policys(folder):
    table, options = {"name": "ula", "step_size": 0.01}, {"evaluations": 20}
    config = replace(CHAIN, algorithm=4, sampling={**options, "kernel": table})
    assert (config.kernel, config.sampling) == (table, options)
    asked = {"algorithm": 4, "steps": 0}
    chunks = [
        load_policy(folder / "stages", **asked, **how).predict_action_chunk(SEEN)
        for how in ({"sampling": {**options, "kernel": table}}, {"sampling": options, "kernel": table})
    ]
    assert torch.equal(*chunks)
    made = load_policy(folder / "stages").acting(**asked, sampling={**options, "kernel": table})
    assert torch.equal(made.predict_action_chunk(SEEN), chunks[0])
    for wrong in ({"rank": "energy"}, {"kernel": table, "covariance": 1}, {"run": 1}, {"seed": 1}):
        with pytest.raises(ConfigError, match=r"policy\.sampling: must be options of Run\.sample alone"):
            PolicyConfig(sampling=wrong)
    with pytest.raises(ConfigError, match=r"policy\.sampling: .* a kernel is policy\.kernel"):
        PolicyConfig(kernel=table, sampling={"kernel": table})


def test_files_with_a_kernel_among_the_options_of_sampling_take_other_settings(folder, tmp_path):
    table, other = ({"name": "ula", "step_size": step} for step in (0.01, 0.5))
    at = load_policy(folder / "stages", algorithm=4, steps=0).export(tmp_path / "old")
    kept = json.loads((at / "policy.json").read_text())
    kept["policy"] |= {"sampling": {"evaluations": 20, "kernel": table}}
    del kept["policy"]["kernel"]
    (at / "policy.json").write_text(json.dumps(kept))
    assert load_policy(at).config.kernel == table
    assert load_policy(at, kernel=other).config.kernel == other
    changed = load_policy(at, sampling={"evaluations": 30}).config
    assert (changed.kernel, changed.sampling) == (table, {"evaluations": 30})


def test_a_kernel_that_is_no_table_is_not_written(folder, tmp_path):
    read = load_policy(folder / "stages")
    found = (read.model.covariance, read.model.step_size)
    own = Policy(RunActions(read.model.run, 2, *found, kernel=ULA(0.5)), read.scaling, CHAIN)
    with pytest.raises(ConfigError, match=r"policy\.kernel: must be a table where it is written"):
        own.export(tmp_path / "lean")
    assert list(tmp_path.iterdir()) == []
    table = {"name": "ula", "step_size": 0.5}
    named = Policy(own.model, own.scaling, replace(CHAIN, kernel=table))
    chunks = [each.predict_action_chunk(SEEN) for each in (load_policy(named.export(tmp_path / "lean")), own)]
    assert torch.equal(*chunks)


class Still:
    """Any model of chunks."""

    has_chains = False

    def draw(self, contexts, n, seed):
        return torch.zeros(len(contexts), n, 2)

    def energy(self, x, contexts):
        return torch.zeros(x.shape[:2])

    def move(self, x, contexts, steps, seed, frozen=None):
        return x


def test_a_model_that_is_no_runs_has_its_own():
    policy = Policy(Still(), Scaling.fit(shown()), CHAIN)
    made = policy.acting(candidates=2, rank="weights")
    assert (made.model is policy.model, made.config.candidates, made.config.rank) == (True, 2, "weights")
    for changed in ({"ode": 2}, {"kernel": None}, {"averaged": False}):
        with pytest.raises(ConfigError, match=f"changed: .* as its model is no run's, got .*{min(changed)}"):
            policy.acting(**changed)
    with pytest.raises(ConfigError, match=r"policy\.candidate: unknown setting .*candidates"):
        policy.acting(candidate=2)


def test_draws_are_moved_by_default_where_nothing_else_finds_what_is_likely():
    quick = {"steps": 2, "batch_size": 8}
    config = {"context": 1, "prediction": 2, "execute": 1, "candidates": 3}
    blind = fit_policy(shown(), {"name": "conditional", "width": 8, "depth": 2}, "ibc", config, **quick)
    assert (blind.config.steps, blind.config.warm) == (MOVES, 1)
    ranked = {"name": "ranking-nce", "negatives_per_datum": 2, "proposal": FLOW}
    learned = fit_policy(shown(), {"name": "conditional", "width": 8, "depth": 2}, ranked, config, **quick)
    assert (learned.config.steps, learned.config.warm) == (0, 0)
    learned.predict_action_chunk(SEEN)
    drawn = learned.model.draw(learned.scaling.pack({"state": SEEN}), 3, derive(0, "chunk", 0))
    assert any(torch.equal(learned.last[0], draw) for draw in drawn[0]), "it is one of the proposal's draws"
    chained = learned.acting(steps=4)  # its steps were found when it was fitted
    assert (chained.config.steps, chained.config.warm) == (4, 0)
    assert torch.isfinite(chained.predict_action_chunk(SEEN)).all()
    ula = {"name": "ula", "step_size": 1e-4}
    assert learned.acting(kernel=ula).config.steps == MOVES, "a kernel that would move nothing is none"
    assert learned.acting(kernel=ula, steps=3).config.steps == 3
    stages = PolicyConfig(kernel=ula, algorithm=4).settled(False)
    blind = PolicyConfig(algorithm=4).settled(True)
    assert (blind.steps, blind.warm) == (0, 0), "its own sampler has moved them"
    assert stages.steps == 0, "there it is the stages' own"
    assert stages.changed({"algorithm": 2}).settled(False).steps == MOVES
    assert stages.changed({"algorithm": 2, "steps": 0}).settled(False).steps == 0
    assert stages.changed({"candidates": 2}).settled(False).steps == 0


def test_a_kernel_of_the_stages_leaves_room_for_frozen_actions():
    ula = {"name": "ula", "step_size": 1e-4}
    assert PolicyConfig(kernel=ula, algorithm=4, freeze=2).freeze == 2
    with pytest.raises(ConfigError, match=r"policy\.freeze: must be 0 with a kernel"):
        PolicyConfig(kernel=ula, freeze=2)


@pytest.mark.parametrize("name", ["steps", "warm", "freeze"])
@pytest.mark.parametrize("value", [False, "", []])
def test_only_none_stands_for_what_is_settled_later(name, value):
    with pytest.raises(ConfigError, match=rf"policy\.{name}: must be an integer of at least 0"):
        PolicyConfig(**{name: value})
    with pytest.raises(ConfigError, match=r"policy\.freeze: must be an integer of at least 0, got None"):
        PolicyConfig(freeze=None)


def test_draws_of_the_energy_are_not_weighed_once_more(folder):
    """The chance of each was p²/q: what Algorithm 4 draws is of p already, and was weighed by p/q."""
    on = {"name": "on-proposal", "width": 8, "depth": 2, "time": True}
    flow = load_policy(folder / "flow")
    stages = {"name": "interpolating-nce", "negatives_per_datum": 2, "times": 1}
    policy = fit_policy(shown(), on, stages, flow.config, on=flow, **HOW)
    assert torch.isfinite(policy.acting(algorithm=4).predict_action_chunk(SEEN)).all()
    assert torch.isfinite(policy.acting(rank="weights").predict_action_chunk(SEEN)).all()
    with pytest.raises(ConfigError, match=r"policy\.rank: must be 'energy' or 'network' with algorithm 4"):
        policy.acting(algorithm=4, rank="weights")


def test_chains_that_nothing_would_move_by_are_refused(folder):
    """A flow was rolled out with `--chain 50`, or with a kernel, and nothing of it was done."""
    ula = {"name": "ula", "step_size": 1e-4}
    for name in ("flow", "standing"):
        policy = load_policy(folder / name)
        for ask in (policy.acting, lambda n=name, **changed: load_policy(folder / n, **changed)):
            for changed in ({"steps": 5}, {"kernel": ula}):
                with pytest.raises(ConfigError, match=r"policy\.\w+: must be left out for a density, and"):
                    ask(**changed)
            assert ask(steps=0, kernel=None).config.steps == 0


def test_what_a_density_does_not_act_by_is_refused_before_it_is_trained(tmp_path):
    """It trained, and what it had learned was lost where no folder held it."""
    table = {"context": 1, "prediction": 2, "execute": 1}
    for own in ({"rank": "network"}, {"rank": "weights"}, {"kernel": {"name": "ula", "step_size": 1e-4}}):
        with pytest.raises(ConfigError, match=r"policy\.(rank|kernel): must be .* a density"):
            fit_policy(shown(), FLOW, "density", table | own, steps=2, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_flow_that_ranks_has_draws_of_its_own_and_no_step(tmp_path):
    """Algorithm 4 looked for the step size of chains that there are none of: KeyError, once it was trained."""
    config = PolicyConfig(1, 2, 1, 3, algorithm=4)
    method = {"name": "ranking-nce", "negatives_per_datum": 2}
    policy = fit_policy(shown(), FLOW, method, config, out=tmp_path / "run", **HOW)
    chunk = policy.predict_action_chunk(SEEN)
    assert torch.equal(load_policy(tmp_path / "run").predict_action_chunk(SEEN), chunk)


def test_what_an_energy_stands_on_is_a_policy_and_no_folder(folder):
    on = {"name": "on-proposal", "width": 8, "depth": 2}
    for other in (folder / "flow", str(folder / "flow"), load_policy(folder / "flow").model.run):
        with pytest.raises(ConfigError, match=r"on: must be a policy, which load_policy\(folder\) reads"):
            fit_policy(shown(), on, STANDING, on=other, **HOW)


@pytest.mark.parametrize("units", ["none", "scale"])
@pytest.mark.parametrize(
    "energy", [FLOW | {"steps": 64, "scored": 65}, {"name": "diffusion", "steps": 64, "scored": 65}]
)
def test_draws_of_a_density_come_with_their_energies(energy, units):
    """Ranked by the ODE backwards they cost as many steps once more."""
    how = HOW | {"units": units, "steps": 200, "batch_size": 32}
    policy = fit_policy(shown(), energy, "density", PolicyConfig(1, 2, 1, 8, 0, 0), **how)
    given = policy.scaling.pack({"state": SEEN})
    x, E = policy.model.draw_with_energy(given, 8, 3)
    assert torch.equal(x, policy.model.draw(given, 8, 3)), "the draws are the same to the bit"
    backwards = policy.model.energy(x, given)
    off = (E - backwards) - (E - backwards).mean(1, keepdim=True)
    assert off.abs().max() < 0.01 * backwards.std()
    chosen = policy._chosen(given, 3, None)
    rows = torch.arange(2)
    assert torch.equal(chosen, x[rows, backwards.argmin(1)])
    asked = []
    policy.model.energy = lambda *_: asked.append(1)  # nobody solves the ODE once more
    assert torch.equal(policy._chosen(given, 3, None), chosen)
    assert not asked


def test_the_page_of_a_policys_training_names_what_was_demonstrated(tmp_path):
    """It called scaled numbers `column 1` and said that they were in their own units."""
    x = torch.randn(40, 2, generator=generator(0)).double().numpy()
    demonstrations = Demonstrations.of({"arm": x}, 500 + 500 * x[:, :1].clip(-1, 1), [20, 40])
    fit_policy(demonstrations, FLOW, "density", PolicyConfig(1, 2, 1), out=tmp_path / "run", **HOW)
    page = write_report(tmp_path / "run").read_text()
    assert "own units" not in page
    for name in ("arm[0]", "arm[1]", "action"):
        assert f"<td>{name}</td>" in page
    row = page[page.index("<td>action</td>") :]
    low, high = (float(part.split('"')[0]) for part in row.split('title="')[1:3])
    assert (low, high) == pytest.approx((0, 1000), abs=1)
    assert "metastable rollout" in page
