"""Suites at tiny sizes: what they compare is the same thing, and rows say what the claims are. Nothing is timed."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from metastable.benchmarks import (
    SUITES,
    interpolant,
    laws,
    run_suite,
    sampler,
    sampler_gpu,
    scoring,
    step_cost,
    write_rows,
)
from metastable.benchmarks import peers as peer_chains
from metastable.benchmarks.files import torch_of
from metastable.benchmarks.memory import peak_of, returned_by
from metastable.benchmarks.timing import Timings, by_turns, machine, on_cores
from metastable.cli.main import app
from metastable.core import errors
from metastable.core.errors import ConfigError, MetastableError, MissingDependencyError
from metastable.core.types import energy_and_grad
from metastable.kernels import ULA, captured, engine
from metastable.methods import Jarzynski
from metastable.training import captured as launched
from metastable.walkers import anneal

over = pytest.mark.parametrize
TINY_STEPS = {
    "dim": 3,
    "walkers": 64,
    "data": 50,
    "hidden": (8, 8),
    "updates": 2,
    "rounds": 2,
    "warmup": 1,
    "memory_walkers": 64,
    "memory_updates": 1,
}
TINY_CHAINS = {"chains": 6, "hidden": (8, 8), "steps": 2, "rounds": 2, "memory_steps": (1, 2)}


def by_name(rows):
    return {row.metric: row for row in rows}


def test_listing_the_suites_imports_neither_torch_nor_a_suite():
    code = (
        "import sys, metastable.benchmarks as b; "
        "print(*b.SUITES, 'torch' in sys.modules, 'metastable.benchmarks.sampler' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "step-cost",
        "sampler",
        "update",
        "laws",
        "scoring",
        "interpolant",
        "policy",
        "False",
        "False",
    ]


def test_an_unknown_suite_is_named():
    with pytest.raises(ConfigError, match="did you mean 'sampler'"):
        run_suite("sampeler")
    assert set(SUITES) == {"step-cost", "sampler", "update", "laws", "scoring", "interpolant", "policy"}


def test_scoring_gives_the_claim_with_its_target_and_says_what_was_timed():
    tiny = {
        "contexts": 4,
        "candidates": 3,
        "ode_contexts": 2,
        "width": 8,
        "layers": 3,
        "rounds": 1,
        "cores": None,
    }
    rows = by_name(run_suite("scoring", **tiny))
    claims = {name: (row.relation, row.target) for name, row in rows.items() if row.relation}
    sizes = {
        f"parameters/{name}": ("<=", 22_000) for name in ("energy", "diffusion", "diffusion_phi", "flow")
    }
    assert claims == {"speed_ratio/diffusion_ode, timed on 2 of 4 contexts": (">=", 300.0), **sizes}
    assert (rows["heun_steps/diffusion"].value, rows["divergence_times/diffusion"].value) == (512, 64)
    with pytest.raises(ConfigError, match="ode_contexts: must be between 1 and 4, got 9"):
        run_suite("scoring", **{**tiny, "ode_contexts": 9})


def test_scoring_scores_the_same_candidates_with_models_of_one_size():
    models = scoring.build(2, 10, 56, 8, 0)
    x, given = torch.zeros(4, 3, 2), torch.zeros(4, 10)
    with torch.no_grad():
        shapes = {name: tuple(case().shape) for name, case in scoring.scorers(models, x, given, 2).items()}
    assert shapes == {"energy": (4, 3), "diffusion_phi": (4, 3), "diffusion": (2, 3), "flow": (2, 3)}
    sizes = [sum(p.numel() for p in model.parameters()) for model in models.values()]
    assert max(sizes) < 1.05 * min(sizes)


def test_interpolant_gives_the_claims_with_their_targets():
    tiny = {
        "rows": 3,
        "steps": 20,
        "scored": 8,
        "width": 8,
        "layers": 3,
        "training": 2,
        "rounds": 1,
        "cores": None,
    }
    rows = by_name(run_suite("interpolant", dims=(2, 3, 20), **tiny))
    claims = {name: (row.relation, row.target) for name, row in rows.items() if row.relation}
    claims.pop("speed_ratio/recorded", None)  # on a GPU
    close = {f"log_prob_difference/d={d}": ("<=", 0.02) for d in (2, 3, 20)}
    exact = {f"log_prob_error/exact_field/d={d}": ("<=", 0.01) for d in (2, 3, 20)}
    assert claims == {"speed_ratio/d=2": (">=", 3.0), "speed_ratio/d=20": (">=", 6.0), **close, **exact}
    assert rows["speed_ratio/d=3"].value > 0


def test_interpolant_compares_the_same_draws():
    flow = interpolant.InterpolantFlow(2, field="residual", width=8, layers=4, steps=300, scored=301).double()
    torch.nn.init.normal_(flow.field.last.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    found = [flow.sample_and_log_prob(5, torch.Generator().manual_seed(1))]
    for divergence in (interpolant.own, interpolant.by_products):
        rng = torch.Generator().manual_seed(1)
        found.append(interpolant.one_scale(flow, 5, rng, divergence))
    for x, log_prob in found[1:]:
        torch.testing.assert_close(x, found[0][0])
        torch.testing.assert_close(log_prob, found[0][1], rtol=0, atol=1e-4)


@pytest.fixture
def in_process(monkeypatch):
    """The work that would be measured is done here: a process of its own only takes time."""

    def called(work, **arguments) -> float:
        work(**arguments)
        return 1e6

    for suite in (step_cost, sampler):
        monkeypatch.setattr(suite, "peak_of", called)
    monkeypatch.setattr(step_cost, "returned_by", lambda work, **arguments: work(**arguments))


def test_step_cost_gives_the_claims_with_their_targets(in_process):
    rows = by_name(run_suite("step-cost", **TINY_STEPS))
    claims = {name: (row.relation, row.target) for name, row in rows.items() if row.relation}
    assert claims == {
        "step_cost_ratio/mlp": ("<=", 1.10),
        "step_cost_ratio/mixture": ("<=", 1.30),
        "step_cost_ratio/robust": ("<=", 1.02),
        "step_cost_ratio/care": ("<=", 1.03),
        **{f"step_cost_ratio/{name}": ("<=", 1.05) for name in step_cost.CONTRASTS},
        "peak_memory_gb/N=64": ("<=", 1.5),
    }
    assert all(rows[name].value > 0 for name in claims)
    assert rows["machine/torch"].value == torch.__version__
    assert rows["machine/threads"].value == torch.get_num_threads()


@over("name", step_cost.CONTRASTS)
def test_the_loop_by_hand_makes_the_same_update(name):
    x = torch.randn((50, 3), generator=torch.Generator().manual_seed(0))
    method, by_hand = step_cost.CONTRASTS[name]
    ours, theirs = (step_cost.network(x, (8,), 0) for _ in range(2))
    training = step_cost.trainer(ours, x, method, step_cost.Adam(step_cost.LEARNING_RATE), 0)
    training.context.rng.manual_seed(1)
    if "log_partition" in training.players:
        training.players["log_partition"].value.data.zero_()
    before = ours.network.head.weight.clone()
    step_cost.advance(training, 1)
    by_hand(theirs, x, torch.Generator().manual_seed(1))()
    assert not torch.equal(ours.network.head.weight, before)
    assert torch.allclose(ours.network.head.weight, theirs.network.head.weight, rtol=0, atol=1e-6)


def test_step_cost_compares_equal_numbers_of_walkers():
    x = torch.randn((50, 3), generator=torch.Generator().manual_seed(0))
    methods = step_cost.methods(64)
    make = step_cost._energies(x, (8,), 0)["mixture"]
    sizes = {}
    for name, method in methods.items():
        training = make(method)
        step_cost.advance(training, 2)
        assert training.context.step == 2
        sizes[name] = len(method.current_walkers(training.context, training.state))
    assert sizes == {"pcd": 64, "jarzynski": 64, "paper": 64}
    assert methods["jarzynski"].threshold == type(methods["jarzynski"])().threshold


def test_the_beta_objective_is_timed_on_the_chains_of_plain_training():
    methods = step_cost.plain_and_robust(64)
    assert methods["robust"].source == methods["plain"]
    assert methods["robust"].beta == step_cost.BETA != 0
    x = torch.randn((50, 3), generator=torch.Generator().manual_seed(0))
    make = step_cost._energies(x, (8,), 0)["mlp"]
    done = {name: make(method) for name, method in methods.items()}
    for training in done.values():
        step_cost.advance(training, 2)
    assert done["plain"].evaluations == done["robust"].evaluations > 0


def test_care_is_timed_on_the_same_moves():
    methods = step_cost.plain_and_careful(64)
    x = torch.randn((50, 3), generator=torch.Generator().manual_seed(0))
    make = step_cost._energies(x, (8,), 0)["mlp"]
    done = {name: make(method) for name, method in methods.items()}
    for training in done.values():
        step_cost.advance(training, 2)
    assert done["plain"].evaluations == done["care"].evaluations > 0
    assert type(methods["plain"].moves) is type(methods["care"].moves)
    assert methods["care"] == Jarzynski(walkers=64)
    assert "pace" in done["care"].gather.kept
    assert not {"ancestors", "log_z_noise"} & done["plain"].gather.latest.keys()


def test_step_cost_starts_exactly():
    x = torch.randn((50, 3), generator=torch.Generator().manual_seed(0))
    for make in step_cost._energies(x, (8,), 0).values():
        training = make(step_cost.methods(64)["jarzynski"])
        assert bool((training.state.steering.log_weight == 0).all())


@pytest.fixture
def peers():
    pytest.importorskip("torchebm")
    return pytest.importorskip("jax")


@pytest.fixture
def without_compiling(monkeypatch):
    """Compiled chains are tested elsewhere; here they would only take time."""
    monkeypatch.setattr(sampler, "run_chain", _eager(sampler.run_chain))


def _eager(run_chain):
    return lambda *args, engine, **kwargs: run_chain(*args, engine="eager", **kwargs)


def test_the_sampler_suite_gives_the_claims_with_their_targets(peers, without_compiling, in_process):
    rows = by_name(run_suite("sampler", **TINY_CHAINS))
    claims = {name: (row.relation, row.target) for name, row in rows.items() if row.relation}
    assert claims == {
        "speed_ratio/torchebm": (">=", 1.5),
        "speed_ratio/jax": (">=", 1.0),
        "memory_growth_mb/1_to_2_steps": ("<=", 20.0),
    }
    speeds = {name for name in rows if name.startswith("steps_per_second/")}
    cases = ("ula/compile", "ula/eager", "mala/compile", "hmc/compile", "torchebm", "jax")
    assert speeds == {f"steps_per_second/{case}" for case in cases}
    assert rows["machine/jax"].value == peers.__version__


def test_the_jax_network_is_ours(peers):
    net, x = sampler.problem(7, (8, 5), seed=3)
    energy = peer_chains.jax_energy(net)
    own = energy_and_grad(net, x)
    assert np.allclose(energy(peers.numpy.asarray(x.numpy())), own.energy.numpy(), atol=1e-6)
    grad = peers.grad(lambda x: energy(x).sum())(peers.numpy.asarray(x.numpy()))
    assert np.allclose(grad, own.grad.numpy(), atol=1e-6)


@over("peer", [sampler.torchebm_chain, sampler.jax_chain])
def test_peers_make_the_same_step(peers, peer):
    """One step from one point: mean x − h∇E and standard deviation √(2h), to within five standard errors."""
    h, chains = 0.3, 40_000
    net, _ = sampler.problem(1, (8,), seed=1)
    x = torch.full((chains, 2), 0.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        y = torch.from_numpy(np.array(peer(net, x, h)(1)))
    expected = x[0] - h * energy_and_grad(net, x[:1]).grad[0]
    sigma = math.sqrt(2 * h)
    assert bool(((y.mean(0) - expected).abs() < 5 * sigma / math.sqrt(chains)).all())
    assert bool(((y.std(0) / sigma - 1).abs() < 5 / math.sqrt(2 * chains)).all())
    ours = sampler.ours(ULA(h), net, x, "eager")(1)
    assert bool(((y.mean(0) - ours.mean(0)).abs() < 8 * sigma / math.sqrt(chains)).all())


def test_a_missing_peer_names_the_extra(monkeypatch):
    def absent(module: str, extra: str, purpose: str):
        return errors.need("no_such_package" if module == "jax" else "math", extra, purpose)

    monkeypatch.setattr(sampler, "need", absent)
    with pytest.raises(MissingDependencyError, match=r"metastable\[bench\]"):
        run_suite("sampler", **TINY_CHAINS, device="cpu")


def test_turns_are_taken_in_every_direction_from_every_case():
    seen: list[str] = []
    times = by_turns({name: lambda name=name: seen.append(name) for name in "abc"}, 7)
    assert "".join(seen) == "".join(["abc", "cba", "bca", "acb", "cab", "bac", "abc"])
    assert {len(seconds) for seconds in times.seconds.values()} == {7}
    after_itself = [a for a, b in itertools.pairwise(seen) if a == b]
    assert sorted(after_itself) == ["a", "b", "c"]


def test_a_slow_round_does_not_move_the_ratio():
    quiet = Timings({"a": [3.0, 3.0, 3.0], "b": [2.0, 2.0, 2.0]})
    disturbed = Timings({"a": [3.0, 300.0, 3.0], "b": [2.0, 200.0, 2.0]})
    assert quiet.ratio("a", "b") == disturbed.ratio("a", "b") == 1.5


def test_cores_are_given_back():
    threads = torch.get_num_threads()
    with on_cores(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


@pytest.fixture
def importable(monkeypatch):
    """Lets a child process import the work beside this file."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(here)
    return importlib.import_module("child_work")


def test_peak_memory_is_that_of_the_child_alone(importable):
    ours = np.ones(300_000_000, dtype=np.uint8)
    small, large = (peak_of(importable.hold, megabytes=m) for m in (1, 150))
    assert large - small == pytest.approx(149e6, abs=10e6)
    assert small < len(ours)


def test_a_child_that_fails_says_why(importable):
    with pytest.raises(MetastableError, match="out of cheese"):
        peak_of(importable.fail)


def test_a_process_of_its_own_gives_back_what_the_work_returns(importable):
    assert returned_by(importable.double, value=21) == 42


def test_on_a_gpu_every_engine_that_can_run_is_timed(monkeypatch):
    """Here on the CPU, where a recording is the same function on the same memory."""
    monkeypatch.setattr(engine, "STAND_IN", True)
    monkeypatch.setattr(engine, "why_not_captured", lambda *_: None)
    monkeypatch.setitem(engine.WHY_NOT, "captured", lambda *_: None)
    monkeypatch.setitem(engine.WHY_NOT, "compile", lambda *_: "left out")
    sizes = {"mlp/1024": 5, "conv/2": 3}
    rows = by_name(sampler_gpu.run_on(torch.device("cpu"), sizes, 3, 1, 0, lambda: None))
    cases = {f"{kernel}/{name}" for kernel in ("ula", "mala") for name in ("eager", "captured", "auto")}
    for name in sizes:
        timed = {
            row.removeprefix(f"ms_per_step/{name}/") for row in rows if row.startswith(f"ms_per_step/{name}/")
        }
        rounded = {f"{kernel}/captured bf16" for kernel in ("ula", "mala")} if name == "conv/2" else set()
        assert timed - {"torchebm", "jax"} == cases | rounded
        assert rows[f"cost_ratio/{name}/mala_over_ula"].target == 1.5
    claimed = [rows[f"speed_ratio/{name}/ula/eager"].relation for name in sizes]
    assert claimed == [">=", None]
    assert rows["engine/mlp/1024"].value.startswith("captured")


def test_rows_are_written_by_device_and_other_suites_stay(tmp_path):
    write_rows(tmp_path / "bench", {"one": [sampler.Row("a", 1.0)]})
    path = write_rows(tmp_path / "bench", {"two": [sampler.Row("b", 2.0, ">=", 3.0)]})
    held = json.loads(path.read_text())
    assert path.stem == held["device"]
    assert [row["metric"] for rows in held["suites"].values() for row in rows] == ["a", "b"]
    assert held["suites"]["two"][0]["ok"] is False


def test_rows_in_words_are_written(tmp_path):
    rows = [*machine(), sampler.Row("engine/one", "captured"), sampler.Row("b", math.nan)]
    path = write_rows(tmp_path, {"one": rows})
    held = {row["metric"]: row["value"] for row in json.loads(path.read_text())["suites"]["one"]}
    assert held["machine/torch"] == str(torch.__version__)
    assert held["engine/one"] == "captured"
    assert held["b"] is None


def test_rows_of_a_suite_that_was_run_partly_take_the_place_of_their_own(tmp_path):
    write_rows(tmp_path, {"one": [sampler.Row("a", 1.0), sampler.Row("b", 2.0)], "two": []})
    path = write_rows(tmp_path, {"one": [sampler.Row("b", 3.0), sampler.Row("c", 4.0)]}, partly=True)
    held = json.loads(path.read_text())["suites"]
    assert [(row["metric"], row["value"]) for row in held["one"]] == [("a", 1.0), ("b", 3.0), ("c", 4.0)]
    assert held["two"] == []


def test_suites_keep_the_version_of_torch_that_they_were_measured_with(tmp_path, monkeypatch):
    rows = [sampler.Row("a", 1.0)]
    path = write_rows(tmp_path, {"one": rows, "two": rows, "three": rows})
    older = json.loads(path.read_text())
    del older["torch_of"]  # as files of before have it
    path.write_text(json.dumps(older | {"torch": "1.0"}))
    monkeypatch.setattr(torch, "__version__", "9.9")
    write_rows(tmp_path, {"two": rows})
    write_rows(tmp_path, {"three": [sampler.Row("b", 1.0)]}, partly=True)
    held = json.loads(path.read_text())
    assert [torch_of(held, name) for name in ("one", "two", "three")] == ["1.0", "9.9", "1.0 and 9.9"]


@pytest.mark.parametrize("words", [["--suite", "update"], []])
def test_only_is_for_suites_that_have_parts(words):
    result = CliRunner().invoke(app, ["bench", *words, "--only", "mlp/1024"])
    assert result.exit_code == 2
    assert "only" in result.output


def test_a_problem_that_a_device_does_not_have_is_named():
    with pytest.raises(ConfigError, match=r"only.*mlp/1025"):
        run_suite("sampler", only=["mlp/1025"], device="cpu")


def test_the_update_suite_times_the_demo_on_a_cpu_and_says_what_it_costs():
    rows = by_name(run_suite("update", walkers=64, updates=2, eager_updates=2, rounds=1, device="cpu"))
    jarzynski, pcd = (rows[f"update_ms/demo/{name}/eager"].value for name in ("jarzynski", "pcd"))
    assert rows["cost_ratio/demo/jarzynski_over_pcd"].value == pytest.approx(jarzynski / pcd)
    assert not any("captured" in name or "images" in name for name in rows)


TINY_LAWS = {
    "chains": 4,
    "rows": 20,
    "updates": 4,
    "methods": ("cd",),
    "compiled": False,
    "device": "cpu",
}


@pytest.fixture
def recorded_here(monkeypatch):
    """On the CPU a recording is the same function on the same memory; two kernels and an energy will do."""
    monkeypatch.setattr(engine, "STAND_IN", True)
    monkeypatch.setattr(anneal, "STAND_IN", True)
    monkeypatch.setattr(laws, "STEPS", 6)
    monkeypatch.setattr(laws, "KERNELS", {name: laws.KERNELS[name] for name in ("ula", "mala")})
    some = laws.energies(torch.device("cpu"))["mlp on a Gaussian"]
    monkeypatch.setattr(laws, "energies", lambda device: {"mlp on a Gaussian": some})


def test_laws_hold_every_engine_to_eager(recorded_here):
    rows = by_name(run_suite("laws", **TINY_LAWS))
    held = {name for name, row in rows.items() if row.relation}
    chains = {f"law/captured/{kernel}/mlp on a Gaussian" for kernel in ("ula", "mala")}
    assert held == chains | {"law/update/cd", "law/log_z"}
    assert all(rows[name].value == 0.0 for name in held)


def test_laws_notice_an_engine_that_differs(recorded_here, monkeypatch):
    monkeypatch.setattr(launched, "write", lambda tree, new: None)  # batches and states stay as they were
    run = captured.Loop.run
    shifted = lambda self, energy, walk, h, *rest: run(self, energy, walk, 1.01 * h, *rest)  # noqa: E731
    monkeypatch.setattr(captured.Loop, "run", shifted)
    rows = by_name(run_suite("laws", **TINY_LAWS))
    broken = {name for name, row in rows.items() if not row.ok}
    chains = {f"law/captured/{kernel}/mlp on a Gaussian" for kernel in ("ula", "mala")}
    assert broken == chains | {"law/update/cd"}


def test_an_update_that_was_not_recorded_breaks_its_law(monkeypatch):
    monkeypatch.setattr(laws.METHODS["cd"], "not_recorded", "it looks at numbers")
    (law, words) = laws.launched_updates("cd", 20, 2, torch.device("cpu"))
    assert not law.ok
    assert "it looks at numbers" in words.value
