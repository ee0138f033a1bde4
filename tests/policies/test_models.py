"""The table of models: every one trains by its name, at the paper's numbers of parameters, and acts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from metastable.core import ConfigError
from metastable.core.batch import Batch
from metastable.data import Demonstrations
from metastable.data.demonstrations import Scaling
from metastable.energies import Gaussian
from metastable.experiments.policy_arms import NOISE
from metastable.kernels import ULA, run_chain
from metastable.policies import (
    MODELS,
    PATHS,
    PUSH_T,
    PolicyConfig,
    fit_policy,
    layout_of,
    load_policy,
    policy_model,
)
from metastable.policies.models import Layout, count_parameters, players_of
from metastable.training.config import Adam

over = pytest.mark.parametrize


def shown(**more: np.ndarray) -> Demonstrations:
    rng = np.random.default_rng(0)
    seen = {
        "place": rng.normal(size=(60, 2)),
        "goal": rng.normal(size=(60, 2)),
        "discs": rng.normal(size=(60, 30)),
    }
    return Demonstrations.of({**seen, **more}, rng.normal(size=(60, 2)), [30, 60], noisy=("place",))


SETS = {"goal": 2, "discs": 3}


def test_a_layout_says_where_pack_puts_things():
    images = np.random.default_rng(1).integers(0, 255, (60, 3, 16, 16), dtype=np.uint8)
    demonstrations = shown(camera=images)
    scaling = Scaling.fit(demonstrations)
    windows = demonstrations.windows(3, 4)
    packed, contexts = scaling.pack(windows.contexts()), windows.contexts()
    layout = layout_of(scaling, 3, SETS)
    (start, count, size), (goal, discs) = layout.past[0], layout.tokens
    place = packed[:, start : start + count * size].unflatten(1, (count, size))
    torch.testing.assert_close(
        place, (contexts["place"].float() - scaling.middle["place"]) / scaling.half["place"]
    )
    start, count, size = discs
    first = (contexts["discs"][:, 0].float() - scaling.middle["discs"]) / scaling.half["discs"]
    torch.testing.assert_close(packed[:, start : start + count * size], first)
    assert goal == (6, 1, 2)
    assert layout.pictures is not None
    start, *shape = layout.pictures
    seen = packed[:, start : start + int(np.prod(shape))].unflatten(1, shape)
    torch.testing.assert_close(seen, contexts["camera"].float() / 127.5 - 1)


@over("name", MODELS)
@over("task", ["paths", "push-t"])
def test_parameters_are_as_many_as_the_paper_allows(task, name):
    if task == "paths":
        layout = layout_of(Scaling.fit(shown()), 3, SETS)
        rows, sizes, cap = Batch(torch.randn(8, 20), torch.randn(8, 102)), PATHS, 500_000
    else:
        rng = np.random.default_rng(0)
        images = rng.integers(0, 255, (40, 3, 96, 96), dtype=np.uint8)
        seen = Demonstrations.of(
            {"agent": rng.normal(size=(40, 2)), "image": images}, rng.normal(size=(40, 2)), [40]
        )
        layout = layout_of(Scaling.fit(seen), 2)
        rows, sizes, cap = Batch(torch.randn(2, 32), torch.randn(2, 2 * (2 + 3 * 96 * 96))), PUSH_T, 3_300_000
    number = count_parameters(players_of(policy_model(name, layout, sizes), rows))
    least = 0 if name == "proposal" else 0.6 * cap  # it shares them with an energy
    assert least < number <= 1.01 * cap


TINY = replace(
    PATHS,
    width=8,
    layers=1,
    field_width=8,
    field_layers=1,
    heads=2,
    proposal_width=8,
    proposal_layers=2,
    negatives=2,
    times=2,
    ode=(3, 3),
    training_ode=(3, 3),
    evaluations=6,
    warmup=1,
    batch_size=16,
)


def test_rates_rise_as_long_as_the_papers():
    """Path planning: 5,000 of the energy alone; Push-T: 1,500 main loops of 4 and 2; all models alone 5,000."""
    layout = Layout(2, past=((0, 2, 2),))
    for sizes, energy, proposal in ((PATHS, 5000, 0), (PUSH_T, 3000, 6000), (TINY, 1, 1)):
        options = policy_model("r-nce", layout, sizes).options
        assert (options["schedule"].warmup, options["schedules"]["proposal"].warmup) == (energy, proposal)
        alone = policy_model("flow", layout, sizes).options
        assert (alone["schedule"].warmup, "schedules" in alone) == (1 if sizes is TINY else 5000, False)


@over("name", MODELS)
def test_every_model_trains_acts_and_is_read_back(name, tmp_path):
    demonstrations = shown()
    layout = layout_of(Scaling.fit(demonstrations), 2, SETS)
    made = policy_model(name, layout, TINY)
    if name == "on-flow":
        made.method.update(pretrain=2, reuse=2, pool=16)
    config = PolicyConfig(2, 4, 2, **{"candidates": 3, **made.acting})
    options = {**made.options, "steps": 6, "out": tmp_path / "run"}
    policy = fit_policy(demonstrations, made.energy, made.method, config, **options)
    contexts = demonstrations.windows(2, 4).contexts(slice(0, 3))
    chunk = policy.predict_action_chunk(contexts)
    assert chunk.shape == (3, 4, 2)
    assert bool(chunk.isfinite().all())
    again = load_policy(tmp_path / "run")
    torch.testing.assert_close(again.predict_action_chunk(contexts), chunk, rtol=0, atol=0)


def test_a_given_kernel_moves_chunks_as_algorithm_2_says():
    """ULA with E: y ← y − η∇E + √(2η)ξ, from the proposal's own draws: with hardly any step nothing moves."""
    demonstrations = shown()
    layout = layout_of(Scaling.fit(demonstrations), 2, SETS)
    made = policy_model("r-nce", layout, TINY)
    still = {"name": "ula", "step_size": 1e-14}
    config = PolicyConfig(2, 4, 2, **{**made.acting, "kernel": still, "candidates": 2})
    policy = fit_policy(demonstrations, made.energy, made.method, config, steps=2, **made.options)
    given = policy.scaling.pack(demonstrations.windows(2, 4).contexts(slice(0, 3)))
    drawn = policy.model.draw(given, 2, 0)
    torch.testing.assert_close(policy.model.move(drawn, given, 5, 0), drawn, rtol=0, atol=1e-5)
    policy.model.kernel = replace(policy.model.kernel, step_size=1e-2)
    assert (policy.model.move(drawn, given, 5, 0) - drawn).abs().min() > 1e-4


def test_chains_of_path_planning_stay_where_chunks_are_as_narrow_as_their_noise():
    """ULA on a width σ has variance σ²/(1 − h/2σ²) for h < 2σ², and leaves above it, as with the paper's 10⁻⁴."""
    σ, rng = NOISE[1], torch.Generator().manual_seed(0)
    energy = Gaussian(torch.zeros(2).double(), σ**2 * torch.eye(2).double())
    x = σ * torch.randn(4000, 2, generator=rng, dtype=torch.float64)
    h = PATHS.chain["step_size"]
    moved = run_chain(ULA(h), energy, x, PATHS.evaluations, rng).state.x
    assert float(moved.var()) == pytest.approx(σ**2 / (1 - h / (2 * σ**2)), rel=4 * (2 / 8000) ** 0.5)
    assert float(run_chain(ULA(1e-4), energy, x, 20, rng).state.x.std()) > 1e3 * σ


def test_proposals_beside_energies_have_rates_of_their_own():
    made = policy_model("r-nce", layout_of(Scaling.fit(shown()), 3, SETS))
    assert made.options["optimisers"]["proposal"] == Adam(1e-3, weight_decay=1e-4)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"discz": 3}, "sets: unknown value 'discz'"),
        ({"discs": 4}, r"sets\.discs: must be a number that divides its "),
    ],
)
def test_sets_that_are_not_there_or_do_not_divide_are_refused(sets, words):
    with pytest.raises(ConfigError, match=words):
        layout_of(Scaling.fit(shown()), 2, sets)


@pytest.mark.parametrize(("space", "relative"), [((), ""), (("discs", "pen"), "pen")])
def test_nearness_needs_things_in_the_space_of_actions_as_they_are(space, relative):
    rng = np.random.default_rng(0)
    seen = {"pen": rng.normal(size=(20, 2)), "discs": rng.normal(size=(20, 6))}
    scaling = Scaling.fit(Demonstrations.of(seen, rng.normal(size=(20, 2)), space=space, relative=relative))
    with pytest.raises(ConfigError, match="near: must be in the space of the actions"):
        layout_of(scaling, 1, {"discs": 3}, near="discs")


def test_the_tables_of_push_t_say_turns_rates_times_and_moves():
    """Tables 12 and 13: T_samp and T_rnce, rates of models that stand alone, α of the proposal, HMC's budget."""
    layout = Layout(2, past=((0, 2, 2),))
    made = {name: policy_model(name, layout, PUSH_T) for name in ("r-nce", "i-r-nce", "flow", "proposal")}
    method = made["i-r-nce"].method
    assert (method["proposal_steps"], method["energy_steps"]) == (4, 2)
    assert (method["alpha"], method["proposal"]["alpha"], made["flow"].energy["alpha"]) == (2.5, 2.5, 2.0)
    assert made["r-nce"].acting["steps"] * PUSH_T.chain["leapfrog"] == PUSH_T.evaluations
    rates = [made[name].options["optimiser"].learning_rate for name in ("r-nce", "flow", "proposal")]
    assert rates == [2e-4, 2e-4, 1e-3]
    alone = made["proposal"].energy
    assert (alone["steps"], alone["scored"]) == PUSH_T.ode, "of a model that stands alone"
    assert (method["proposal"]["steps"], method["proposal"]["scored"]) == PUSH_T.training_ode
