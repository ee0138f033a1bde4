"""The suite `policy` at a size for tests: it times chunks of every kind of model."""

import dataclasses

from metastable.benchmarks import policy
from metastable.experiments.policy_arms import hurried

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
    models, batches = ("i-r-nce", "cloning"), (2,)
    rows = policy.run(models=models, batches=batches, rounds=1, cores=None, sizes=TINY)
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
