"""A conditional run from data to report: samples, likelihoods, files, and the same after it is read back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import assert_within, drawn, mean_and_error, z_limit
from typer.testing import CliRunner

import metastable as ms
from metastable.cli.main import app
from metastable.core.batch import Batch
from metastable.core.errors import ConfigError, InputError
from metastable.data import Dataset
from metastable.kernels import ULA
from metastable.methods.base import Method, Nothing
from metastable.proposals import InterpolantFlow
from metastable.summary import contexts, judge_again

SD = 0.5


def pairs(n: int = 1000, seed: int = 0) -> Batch:
    """y ~ N(2c, 0.5²) in one dimension, c uniform on [−1, 1]: E log p = −log(0.5 √(2πe))."""
    rng = torch.Generator().manual_seed(seed)
    given = 2 * torch.rand((n, 1), generator=rng) - 1
    return Batch(2 * given + SD * torch.randn((n, 1), generator=rng), given)


SMALL = {"name": "conditional", "width": 32, "depth": 3}
ENTROPY = math.log(SD * math.sqrt(2 * math.pi * math.e))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("conditional") / "run"
    data = pairs()
    method = ms.methods.RankingNCE(negatives_per_datum=8, proposal="gaussian")
    with drawn():
        ms.fit(SMALL, data.x, method, 300, given=data.given, held_out=0.2, out=out, seed=0, batch_size=128)
    return out


@pytest.fixture(scope="module")
def run(folder):
    return ms.load_run(folder)


def test_the_held_out_likelihood_is_near_the_truth(run):
    assert run.conditional
    error = run.scores["log_likelihood_se"]
    assert (
        abs(run.scores["log_likelihood"] + ENTROPY) < z_limit() * error + 0.05
    )  # the model is not the truth
    assert run.scores["proposal_log_likelihood"] < run.scores["log_likelihood"] - 0.3
    assert 0.1 < run.scores["ess_proposal"] < 1
    assert abs(run.scores["energy_distance"]) < 0.05


def test_log_densities_are_normalised_for_each_context(run):
    given = torch.tensor([[-0.8], [0.1], [0.9]])
    z = run.log_partition_given(given, draws=8192)
    assert z.warnings == ()
    y = torch.linspace(-6, 6, 601)[:, None]
    for i, c in enumerate(given):
        log_p = -run.energy(y, c.expand(601, 1)).detach().double() - z.value[i]
        mass = float(torch.trapezoid(log_p.exp(), y[:, 0].double()))
        assert abs(math.log(mass)) < z_limit(3) * float(z.std_error[i])
    assert torch.equal(run.log_prob(y, given[:1].expand(601, 1)), run.log_prob(y, given[:1].expand(601, 1)))


def test_samples_follow_their_context(run):
    given = torch.tensor([[-0.8], [0.9]])
    walkers = run.sample(600, given=given, seed=1)
    assert walkers.x.shape == (2, 600, 1)
    y = torch.linspace(-6, 6, 601, dtype=torch.float64)
    for i, c in enumerate(given):
        weight = torch.softmax(-run.energy(y[:, None].float(), c.expand(601, 1)).detach().double(), 0)
        for power in (1, 2):  # the model's own moments, by quadrature
            mean, error = mean_and_error(walkers.x[i, :, 0].pow(power))
            assert_within(
                mean, weight @ y.pow(power), 1.2 * error
            )  # 150 steps of MALA leave a little of the start
    assert torch.equal(walkers.x, run.sample(600, given=given.numpy(), seed=1).x)
    short = run.sample(5, given=given, steps=3, kernel=ULA(0.01), candidates=1)
    assert short.info["evaluations"] == 3


def test_files_and_report(folder, run):
    summary = json.loads((folder / "summary.json").read_text())
    contexts = summary["contexts"]
    assert np.allclose(
        contexts["log_z"], contexts["log_z_on_grid"], atol=z_limit(4) * max(contexts["log_z_se"])
    )
    assert summary["log_partition"] is None
    arrays = np.load(folder / "figures.npz")
    assert arrays["samples_given"].shape == (4, 500, 1)
    assert len(arrays["data_given"]) == arrays["data_given_counts"].sum()
    page = (folder / "report.html").read_text()
    assert page.count("<h3>Given ") == 4
    for words in ("of each context", "posterior collapse", "by quadrature"):
        assert words in page
    assert run.contexts == contexts


def test_bad_contexts_are_named(run):
    with pytest.raises(InputError, match=r"given: must have shape \(B, 1\), got \(3, 2\)"):
        run.sample(5, given=torch.zeros(3, 2))
    with pytest.raises(InputError, match="conditional run; give contexts"):
        run.sample(5)
    with pytest.raises(InputError, match="conditional run; give contexts"):
        run.log_prob(torch.zeros(3, 1))
    with pytest.raises(InputError, match="one for each of the 3 events, got 2"):
        run.log_prob(torch.zeros(3, 1), torch.zeros(2, 1))
    with pytest.raises(InputError, match="not corrected or step_size"):
        run.sample(5, given=torch.zeros(2, 1), step_size=0.1)


def test_an_unconditional_run_takes_no_contexts():
    x = torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    run = ms.fit(None, x, ms.methods.Jarzynski(walkers=64), steps=2, evaluate=False)
    with pytest.raises(InputError, match="trained without contexts"):
        run.log_prob(x, given=x)
    with pytest.raises(InputError, match="kernel: only samples of a conditional run take it"):
        run.sample(3, kernel=ULA(0.1))


def test_other_pairs_are_scored_and_worse_ones_worse(run):
    data = pairs(300, seed=5)
    right, _ = judge_again(run, Dataset.of(data.x, "pairs", given=data.given))
    wrong, _ = judge_again(run, Dataset.of(data.x, "pairs", given=-data.given))
    assert abs(right["log_likelihood"] - run.scores["log_likelihood"]) < 0.2
    assert wrong["log_likelihood"] < right["log_likelihood"] - 1
    assert wrong["energy_distance"] > right["energy_distance"] + 0.1


def test_a_density_needs_no_estimate_and_draws_itself():
    data = pairs(400)
    flow = InterpolantFlow(1, 1, data=data.x, width=8, steps=10, scored=4)
    run = ms.fit(flow, data.x, "density", steps=5, given=data.given, seed=0)
    assert run.sample(6, given=data.given[:3]).info["evaluations"] == 0
    assert torch.allclose(run.log_prob(data.x, data.given), run.energy.log_prob(data.x, data.given))
    assert float(run.log_partition_given(data.given[:3]).value.abs().max()) == 0
    assert "log_z" not in run.contexts
    assert math.isfinite(run.scores["log_likelihood"])


def test_an_interpolating_run_is_sampled_by_its_three_stages():
    data = pairs(300)
    proposal = {"name": "interpolant", "width": 8, "steps": 10, "scored": 4}
    method = ms.methods.InterpolatingNCE(negatives_per_datum=2, times=1, proposal=proposal)
    run = ms.fit(None, data.x, method, steps=5, given=data.given, seed=0, evaluate=False)
    walkers = run.sample(4, given=data.given[:3], t_low=0.5, evaluations=20)
    assert walkers.x.shape == (3, 4, 1)
    # ten moves of MALA, ⌊0.5·20⌋, cost 11 gradients
    assert (walkers.info["sde_steps"], walkers.info["chain_steps"]) == (9, 10)
    with pytest.raises(ConfigError, match="evaluations=… gradients, not steps"):
        run.sample(4, given=data.given[:3], steps=7)
    with pytest.raises(
        ConfigError,
        match=r"foo: unknown option \(known: anneal, candidates, engine, eta, evaluations, kernel, t_low, tune\)",
    ):
        run.sample(4, given=data.given[:3], foo=1)


@dataclass(frozen=True)
class Regression(Method[Nothing]):
    """A method that has neither proposal nor sampler."""

    name: ClassVar[str] = "regression"
    needs: ClassVar[str] = "given"

    def start(self, context):
        return Nothing()

    def loss(self, context, state, player, batch, negatives):
        return context.energy(batch.x, batch.given).square().mean(), {}


def test_a_run_that_cannot_be_normalised_or_sampled_says_so(tmp_path):
    data = pairs(60)
    run = ms.fit(None, data.x, Regression(), 3, given=data.given, out=tmp_path / "run")
    assert "log_likelihood" not in run.scores
    assert (tmp_path / "run/report.html").is_file()
    with pytest.raises(InputError, match="a run of 'regression' has none to estimate log Z"):
        run.log_prob(data.x, data.given)
    with pytest.raises(InputError, match="none that chains could start from"):
        run.sample(3, given=data.given)


# ---- commands


def call(*words):
    return CliRunner().invoke(app, [str(w) for w in words])


def test_pairs_from_a_file_to_samples_and_scores(tmp_path):
    data = pairs(80)
    np.savez(tmp_path / "pairs.npz", x=data.x.numpy(), given=data.given.numpy())
    out = tmp_path / "run"
    settings = ["--data", tmp_path / "pairs.npz", "--method", "ranking-nce", "--steps", 20, "--out", out]
    settings += ["--set", "energy.width=16", "--set", "energy.depth=2"]
    plan = call("train", *settings, "--dry-run")
    assert "ConditionalNet" in plan.output, plan.output
    assert call("train", *settings).exit_code == 0
    drawn = call("sample", out, "--given", "0.5", "--n", 7, "--out", tmp_path / "s.npy")
    assert drawn.exit_code == 0, drawn.output
    assert np.load(tmp_path / "s.npy").shape == (1, 7, 1)
    call(
        "sample", out, "--given", tmp_path / "pairs.npz", "--n", 2, "--steps", 5, "--out", tmp_path / "s.npy"
    )
    assert np.load(tmp_path / "s.npy").shape == (80, 2, 1)
    scored = call("evaluate", out, "--data", tmp_path / "pairs.npz")
    assert scored.exit_code == 0, scored.output
    assert math.isfinite(json.loads((out / "evaluation.json").read_text())["log_likelihood"])
    refused = call("sample", out, "--out", tmp_path / "s.npy")
    assert refused.exit_code != 0
    np.save(tmp_path / "alone.npy", data.x.numpy())
    assert call("evaluate", out, "--data", tmp_path / "alone.npy").exit_code != 0
    refused = call("evaluate", out, "--data", tmp_path / "pairs.npz", "--ood", tmp_path / "alone.npy")
    assert "ood: needs a run of a classifier" in refused.output


def test_held_out_pairs_may_be_as_many_as_those_trained_on():
    train, other = (Batch(torch.full((4, 1), v), torch.zeros(4, 1)) for v in (0.0, 1.0))
    assert contexts._same(train, Batch(train.x.clone(), train.given.clone()))
    assert not contexts._same(train, other)
    assert not contexts._same(train, train[:2])


def test_contexts_of_one_number_need_no_second_dimension(run):
    column = torch.tensor([[-0.5], [0.5]])
    again = run.sample(3, given=[-0.5, 0.5], steps=2, seed=1).x
    assert torch.equal(again, run.sample(3, given=column, steps=2, seed=1).x)
    with pytest.raises(InputError, match="given: must have shape"):
        run.sample(3, given=[[0.5, 0.5]], steps=2)


def test_an_interpolating_run_is_evaluated_whatever_its_units(tmp_path, monkeypatch):
    for name, few in {"DRAWS_ODE": 2**11, "LEAST_DRAWS": 32, "SHOWN_EVENTS": 50}.items():
        monkeypatch.setattr(contexts, name, few)
    data = pairs(80, seed=1)
    settings = {"steps": 10, "batch_size": 50, "given": data.given}
    method = ms.methods.InterpolatingNCE(
        proposal={"name": "interpolant", "width": 8, "steps": 6, "scored": 4}
    )
    run = ms.fit({**SMALL, "time": True}, 0.005 * data.x, method, out=tmp_path / "small", **settings)
    assert not any(f.name == "sampling-failed" for f in run.diagnosis)
    assert run.scores["energy_distance"] < 1
    assert (tmp_path / "small" / "report.html").exists()


def test_a_training_is_judged_though_its_chains_run_away(tmp_path, monkeypatch):
    def lost(*_, **__):
        raise InputError("eta: the SDE left every finite region at t = 0.7 for context 2")

    monkeypatch.setattr("metastable.runs.run.Run.sample", lost)
    data = pairs(200, seed=1)
    run = ms.fit(None, data.x, ms.methods.RankingNCE(), 5, given=data.given, out=tmp_path / "run")
    (finding,) = [f for f in run.diagnosis if f.name == "sampling-failed"]
    assert "left every finite region at t = 0.7" in finding.text
    assert math.isfinite(run.scores["log_likelihood"])
    assert "energy_distance" not in run.scores
    assert "left every finite region" in (tmp_path / "run" / "report.html").read_text()


def test_log_densities_take_events_of_one_number_as_fit_does(run):
    y, given = torch.linspace(-1, 1, 7), torch.linspace(-1, 1, 7)
    columns = run.log_prob(y[:, None], given[:, None], draws=64)
    assert columns.shape == (7,)
    assert torch.equal(run.log_prob(y, given, draws=64), columns)
    assert torch.equal(run.log_prob(y.numpy(), given.numpy(), draws=64), columns)
    with pytest.raises(InputError, match=r"x: must have shape \(B, 1\), got \(7, 2\)"):
        run.log_prob(torch.zeros(7, 2), given)
    with pytest.raises(InputError, match="one for each of the 7 events, got 3"):
        run.log_prob(y, given[:3])


def test_a_run_without_contexts_takes_them_too():
    x = torch.randn(200, generator=torch.Generator().manual_seed(0))
    run = ms.fit(None, x, ms.methods.Jarzynski(walkers=64), steps=2, evaluate=False)
    assert torch.equal(run.log_prob(x), run.log_prob(x[:, None]))
    assert torch.equal(run.log_prob(x.numpy()), run.log_prob(x))
    with pytest.raises(InputError, match=r"x: must have shape \(B, 1\), got \(200, 3\)"):
        run.log_prob(x[:, None].expand(200, 3))
    with pytest.raises(ConfigError, match=r"foo: unknown option \(known: .*seed.*steps"):
        run.sample(3, foo=1)
    with pytest.raises(ConfigError, match="draws: unknown option"):
        run.log_prob(x, draws=7)


def test_options_that_there_are_not_are_named_with_those_there_are(run):
    given = torch.zeros(2, 1)
    with pytest.raises(
        ConfigError, match=r"foo: unknown option \(known: candidates, engine, kernel, steps, t, tune\)"
    ):
        run.sample(3, given=given, foo=1)
    with pytest.raises(ConfigError, match=r"kernal: unknown option \(did you mean 'kernel'\?\)"):
        run.sample(3, given=given, kernal=ULA(0.1))
    with pytest.raises(ConfigError, match=r"foo: unknown option \(known: draws, most, rng, std_error, t\)"):
        run.log_prob(torch.zeros(2, 1), given, foo=1)
    with pytest.raises(ConfigError, match="foo: unknown option"):
        run.log_partition_given(given, foo=1)
