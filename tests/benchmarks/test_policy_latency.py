"""The suite `policy` at a size for tests: it times chunks of every kind of model."""

import dataclasses

import pytest

from metastable.benchmarks import policy, policy_training
from metastable.core.errors import ConfigError
from metastable.experiments.policy_arms import FIRST, hurried, median_ms

TINY = dataclasses.replace(
    policy.SMALL,
    width=8,
    field_width=8,
    layers=1,
    field_layers=1,
    proposal_width=8,
    ode=(2, 2),
    evaluations=24,
)


def test_a_chunk_of_each_is_timed():
    models, batches = ("i-r-nce", "cloning"), (1, 2)  # one policy acts in both
    rows = policy.run(only=models, batches=batches, rounds=1, cores=None, sizes=TINY)
    found = {row.metric: row for row in rows}
    for name in models:
        for B in batches:
            assert found[f"ms_a_chunk/{name}/small/batch={B}"].value > 0
    assert all(row.relation is None for row in rows)  # the bar is for the paper's settings, on a GPU


def test_fewer_gradients_take_no_more_steps_of_the_proposal():
    made = policy.new_policy("i-r-nce", TINY, "cpu", 0)
    settings = hurried(made, 20)
    assert settings["sampling"]["evaluations"] == 20
    assert settings["kernel"]["leapfrog"] == 5
    assert settings["ode"] == min(20, TINY.training_ode[0])
    assert hurried(made, 2)["ode"] == 2
    assert hurried(made.acting(ode=3), 20)["ode"] == 3, "what is asked for stays"
    assert policy.shorter(made, 20, 1, 0).value > 0


def test_chunks_are_timed_after_enough_of_them_that_short_chains_are_recorded():
    asked = []
    assert median_ms(asked.append, 3) >= 0
    assert asked == list(range(FIRST + 3))


def test_energies_are_trained_beside_their_flow_and_with_draws_made_anew():
    rows = policy_training.training_rows("cpu", 1, 0, (40, 8, 4), batch_size=8)
    found = {row.metric: row for row in rows}
    rate = {name: found[f"updates_a_second/{name}"].value for name in ("flow", "on-flow", "anew")}
    assert found["update_ratio/on-flow_over_flow"].value == pytest.approx(rate["flow"] / rate["on-flow"])
    assert found["update_ratio/anew_over_on-flow"].value == pytest.approx(rate["on-flow"] / rate["anew"])
    asked = {name: (row.relation, row.target) for name, row in found.items() if row.relation}
    assert asked == {"update_ratio/anew_over_on-flow": (">=", 30)}, "of a GPU the other is asked"


def test_a_model_that_is_none_of_the_suites_is_named():
    with pytest.raises(ConfigError, match=r"only.*'i-rnce'.*i-r-nce"):
        policy.run(only=["i-rnce"])
