"""What a policy is fitted as where nothing is said: sizes, updates and rates, and how it acts."""

from __future__ import annotations

import signal
from itertools import product

import numpy as np
import pytest
import torch

from metastable.core import ConfigError
from metastable.data import Demonstrations
from metastable.methods import Density
from metastable.policies import PolicyConfig, fit_policy, load_policy
from metastable.policies.defaults import ON_FLOW, rate_for, training_for, updates_for
from metastable.training.config import TrainerConfig

WINDOWS = {"context": 1, "prediction": 2, "execute": 1}
FEW = {"name": "ranking-nce", "negatives_per_datum": 2, "reuse": 2, "pool": 8}


def shown(pictures: bool = False) -> Demonstrations:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2))
    beside = {"camera": rng.integers(0, 256, (40, 3, 16, 16), dtype=np.uint8)} if pictures else {}
    return Demonstrations.of({"place": x, **beside}, x[:, :1], [20, 40])


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    return fit_policy(shown(), config=WINDOWS, steps=3, out=tmp_path_factory.mktemp("runs") / "flow")


def test_a_policy_of_demonstrations_alone_is_one_draw_of_a_flow_with_a_falling_rate(flow):
    config = flow.model.run.config
    made = config["energy"]
    assert (made["name"], made["width"], config["units"]) == ("interpolant", 256, "none")
    assert (flow.config.candidates, flow.config.steps, flow.config.warm) == (1, 0, 0)
    trainer = config["trainer"]
    assert (trainer["batch_size"], trainer["optimiser"]["learning_rate"]) == (256, 3e-3)
    assert (trainer["schedule"]["shape"], trainer["schedule"]["final"]) == ("cosine", 0.0)
    assert flow.predict_action_chunk({"place": torch.zeros(2, 1, 2)}).shape == (2, 2, 1)


def test_updates_follow_the_number_of_windows():
    assert [updates_for(n) for n in (1, 20_480, 40_960, 10**6)] == [4000, 4000, 8000, 20_000]


def test_a_policy_on_a_flow_is_an_energy_that_starts_as_it_and_ranks_its_draws(flow, tmp_path):
    policy = fit_policy(shown(), on=flow, steps=3, out=tmp_path / "on")
    config = policy.model.run.config
    assert {key: config["energy"][key] for key in ON_FLOW} == ON_FLOW
    assert (config["method"]["name"], config["method"]["train_proposal"]) == ("ranking-nce", False)
    known = (policy.config.context, policy.config.prediction, policy.config.execute)
    assert known == tuple(WINDOWS.values())
    assert (policy.config.candidates, policy.config.rank, policy.config.steps) == (8, "network", 0)
    seen = {"place": torch.zeros(2, 1, 2)}
    read = load_policy(tmp_path / "on")
    assert torch.equal(read.predict_action_chunk(seen), policy.predict_action_chunk(seen))


def test_what_is_said_goes_before_what_is_not(flow):
    short = {**WINDOWS, "steps": 0}
    assert fit_policy(shown(), config={**short, "candidates": 3}, steps=1).config.candidates == 3
    whole = PolicyConfig(**short)
    assert fit_policy(shown(), config=whole, steps=1).config.candidates == whole.candidates
    trainer = fit_policy(shown(), config=short, steps=1, learning_rate=0.01).model.run.config["trainer"]
    assert trainer["optimiser"]["learning_rate"] == 0.01
    assert trainer["schedule"]["shape"] == "constant", "a rate that is given is held, as fit says"
    trainer = fit_policy(shown(), config=short, steps=1, learning_rate=None).model.run.config["trainer"]
    assert trainer["optimiser"]["learning_rate"] == 3e-3
    timed = fit_policy(shown(), config=short, max_seconds=0.01).model.run.config["trainer"]
    assert (timed["follows"], timed["steps"]) == ("seconds", 4000)
    alone = fit_policy(shown(), config=short, trainer=TrainerConfig(steps=1, batch_size=8), noise=None)
    assert alone.model.run.config["trainer"]["batch_size"] == 8
    same = fit_policy(shown(), config=short, steps=1, trainer=None).model.run.config["trainer"]
    assert same["batch_size"] == 256
    settled = fit_policy(shown(), None, FEW, {"rank": "energy"}, on=flow, steps=1, batch_size=4)
    assert (settled.config.rank, settled.config.prediction) == ("energy", 2)
    known = fit_policy(shown(), {"name": "interpolant", "width": 8}, None, short, steps=1)
    assert known.model.run.config["trainer"]["optimiser"]["learning_rate"] == 1e-3
    for steps in (0, 2.5, "many"):
        with pytest.raises(ConfigError, match=r"trainer\.steps: must be"):
            fit_policy(shown(), config=short, steps=steps)
    with pytest.raises(ConfigError, match=r"policy\.contxt"):
        fit_policy(shown(), config={"contxt": 2}, steps=1)
    with pytest.raises(ConfigError, match=r"policy: must be a table of settings, got 'fast'"):
        fit_policy(shown(), config="fast", steps=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trainer": TrainerConfig(steps=1, data_noise=0.2)}, r"noise: must be None with a trainer that has"),
        ({"trainer": {"steps": 1}}, r"trainer: must be a TrainerConfig; .*, got {'steps': 1}"),
        ({"given": np.zeros((40, 1))}, r"options: must be of fit, but .*, got \['given'\]"),
    ],
)
def test_options_of_fit_that_a_policy_would_not_heed_are_refused(options, said):
    """The noise of a trainer was that of fit_policy, and contexts of one's own stood for what was seen."""
    with pytest.raises(ConfigError, match=said):
        fit_policy(shown(), config=WINDOWS, **options)


def test_an_energy_of_all_times_on_a_flow_has_a_time(flow):
    method = {"name": "interpolating-nce", "negatives_per_datum": 2, "reuse": 2, "pool": 8, "times": 2}
    policy = fit_policy(shown(), None, method, on=flow, steps=1, batch_size=4)
    assert policy.model.run.config["energy"]["time"]
    assert policy.predict_action_chunk({"place": torch.zeros(2, 1, 2)}).shape == (2, 2, 1)


def test_a_training_that_was_stopped_says_so():
    def stop(row):
        signal.raise_signal(signal.SIGINT)

    with pytest.warns(RuntimeWarning, match=r"stopped after 10 steps; .* resume=True"):
        fit_policy(shown(), config={**WINDOWS, "steps": 0}, steps=50, progress=stop)


def test_a_method_that_does_not_rank_is_refused_by_its_name(flow):
    with pytest.raises(ConfigError, match=r"method: must be one that ranks, with on=…, got 'density'"):
        fit_policy(shown(), method="density", on=flow, steps=1)


@pytest.mark.parametrize("stands", [False, True])
def test_steps_of_chains_that_move_nothing_are_refused_before_training(flow, stands):
    with pytest.raises(ConfigError, match=r"policy\.steps: must be left out for a density"):
        fit_policy(shown(), config={**WINDOWS, "steps": 500}, on=flow if stands else None, steps=1)


def test_pictures_are_seen_by_a_network_of_pictures():
    short = {**WINDOWS, "steps": 0}  # nothing is settled for chains that could come later
    flow = fit_policy(shown(pictures=True), config=short, steps=1, batch_size=4)
    assert flow.model.run.config["energy"]["field"]["name"] == "transformer"
    assert flow.model.run.config["energy"]["field"]["pictures"] == [2, 1, 3, 16, 16]
    policy = fit_policy(shown(pictures=True), None, FEW, {"steps": 0}, on=flow, steps=1, batch_size=4)
    above = policy.model.run.config["energy"]
    assert above["on_proposal"]
    assert above["inherits"]
    seen = {"place": torch.zeros(2, 1, 2), "camera": torch.zeros(2, 1, 3, 16, 16, dtype=torch.uint8)}
    assert policy.predict_action_chunk(seen).shape == (2, 2, 1)


def test_other_methods_keep_their_own():
    ranked = {"name": "ranking-nce", "negatives_per_datum": 2}
    policy = fit_policy(shown(), None, ranked, WINDOWS, steps=2)
    assert (policy.config.candidates, policy.model.run.config["energy"]["name"]) == (8, "conditional")


def test_an_energy_inherits_from_a_flow_with_its_eyes_alone():
    short = {**WINDOWS, "steps": 0}
    dense = {"name": "interpolant", "width": 8, "steps": 4, "scored": 3}
    flow = fit_policy(shown(pictures=True), dense, None, short, steps=1, batch_size=4)
    policy = fit_policy(shown(pictures=True), None, FEW, {"steps": 0}, on=flow, steps=1, batch_size=4)
    assert not policy.model.run.config["energy"]["inherits"], "which nobody asked for, and was refused"


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        (
            {"method": {**FEW, "proposal": "gaussian"}, "config": {"rank": "network"}},
            "policy.rank: must be 'energy'",
        ),
        ({"method": {**FEW, "proposal": "flow"}, "config": {"ode": 8}}, "policy.ode: must be left out"),
        ({"config": {"sampling": {"eta": 0.1}}}, "eta: unknown option"),
        (
            {"method": FEW, "config": {"algorithm": 4, "sampling": {"evaluations": 5}}},
            "evaluations: unknown option",
        ),
        (
            {
                "method": {**FEW, "name": "interpolating-nce", "proposal": "interpolant"},
                "config": {"algorithm": 4, "sampling": {"t_lo": 0.5}},
            },
            "t_lo: unknown option .did you mean 't_low'",
        ),
    ],
)
def test_what_a_policy_will_not_act_by_is_refused_before_it_is_trained(asked, rule, monkeypatch):
    monkeypatch.setattr("metastable.training.trainer.Trainer.run", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(ConfigError, match=rule):
        fit_policy(shown(), steps=3, **{**asked, "config": {**WINDOWS, **asked["config"]}})


def test_rates_and_updates_follow_what_is_trained():
    flow, above = (training_for(25_650, Density(), stands, 0.1, {}) for stands in (False, True))
    assert (flow["steps"], above["steps"]) == (5009, 2504), "an update of an energy costs more"
    assert [made["schedule"].warmup for made in (flow, above)] == [200, 200]
    assert training_for(25_650, Density(), False, 0.1, {"steps": 50})["schedule"].warmup == 5
    rates = {asked: rate_for(*asked) for asked in product((False, True), repeat=3)}
    assert {asked for asked, rate in rates.items() if rate == 5e-4} == {a for a in rates if a[1]}, (
        "of pictures"
    )
    assert {asked for asked, rate in rates.items() if rate == 3e-3} == {(False, False, False)}
    assert set(rates.values()) == {3e-3, 1e-3, 5e-4}
