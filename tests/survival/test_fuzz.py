"""Nonsense through the command line: a share of `fuzz.py` at every commit, and every find as a case of its own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import each
from fuzz import DATA, Case, call, fuzz, judge, make_run, npy_header, quick, zip_of

from metastable.api import fit
from metastable.core import room
from metastable.core.errors import InputError
from metastable.core.room import require_room
from metastable.core.units import KINDS
from metastable.data import load_array


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with quick():
        yield make_run(tmp_path_factory.mktemp("run"))


def test_nonsense_is_refused_in_words(run, tmp_path):
    assert fuzz(60, seed=0, place=tmp_path, run=run) == []


@pytest.mark.slow
def test_much_nonsense_is_refused_in_words(run, tmp_path):
    assert fuzz(5000, seed=10_000, place=tmp_path, run=run) == []


def test_the_fuzzer_sees_tracebacks_and_wrong_statuses(monkeypatch, tmp_path):
    def bug(*words: object) -> None:
        raise ZeroDivisionError("a bug")

    words = ("train", "--data", DATA, "--out", str(tmp_path / "run"))
    assert judge(Case.of("right", *words, "--set", "nothing=1")) == ""
    assert "status 2, expected" in judge(Case.of("wrong", *words, "--set", "nothing=1", allowed=(0,)))
    monkeypatch.setattr("metastable.cli.settings.trainer_of", bug)
    assert "ZeroDivisionError" in judge(Case.of("bug", *words))


TINY = ("--steps", "1", "--set", "trainer.batch_size=16", "--no-progress")


@each(
    "words, expected",
    [
        (("--device", "mps"), "'mps' was asked for"),
        (("--device", "cpu:7"), "there is cpu:0 to cpu:0 on this machine, got 'cpu:7'"),
        (("--set", "energy.hidden=3"), "energy.hidden: must be"),
        (("--set", 'energy.hidden=["a"]'), "energy.hidden.0: must be an integer, got 'a'"),
        (("--set", "trainer.optimiser.betas=7"), "betas"),
        (("--set", "trainer.optimiser.betas=[2, 3]"), "betas: must be two numbers of at least 0 and below 1"),
        (("--set", "trainer.optimiser.betas=[0.1]"), "betas: must be a list of 2, got [0.1]"),
        (("--set", "method=[]"), "method.name: unknown value []"),
        (("--set", f"trainer.max_seconds={'9' * 400}"), "trainer.max_seconds: must be a number"),
        (("--set", f"trainer.steps={10**20}"), "trainer.steps: must be an integer of at most 64 bits"),
        (("--set", f"trainer.steps=1{'0' * 5000}"), "trainer.steps: must be an integer"),
        (("--method", ""), "method.name: unknown value ''"),
        (("--method", "density"), "method: 'density' trains a model with loss"),
        (("--data", f"toy:two-modes?n={10**20}"), "EiB of memory"),
        (("--set", f"method.walkers={10**12}"), "walkers would take about"),
        (("--set", "energy.hidden=[10000000, 10000000]"), "weights would take about"),
        (("--set", "method.step_size=1e-300"), "ula.step_size: must be a number from 1e-30 to 1e+30"),
        (("--set", "method.step_size=1e300"), "ula.step_size: must be a number from 1e-30 to 1e+30"),
        (
            ("--method", "pcd", "--set", 'method.kernel={"name": "ula", "noise": 1e-300}'),
            "ula.noise: must be",
        ),
        (("--method", "pcd", "--set", 'method.kernel={"name": "hmc", "mass": 1e40}'), "hmc.mass: must be"),
        (("--method", "nce", "--set", "method.noise_ratio=1e300"), "nce.noise_ratio: must be at most 1e+06"),
        (
            ("--method", "denoising-score-matching", "--set", "method.sigma=1e300"),
            "denoising-score-matching.sigma: must be a number from 1e-30 to 1e+30",
        ),
        (("--method", "f-ebm", "--set", "method.clip_exponent=1e300"), "f-ebm.clip_exponent: must be"),
        (("--method", "robust", "--set", "method.sampling=1e300"), "robust.sampling: must be at most 1e+30"),
        (
            ("--set", 'trainer.optimiser={"name": "sgd", "learning_rate": 1e40}'),
            "optimiser.learning_rate: must be at most 1e+30",
        ),
        (
            ("--set", 'trainer.optimiser={"name": "sgd", "weight_decay": 1e40}'),
            "optimiser.weight_decay: must be at most 1e+30",
        ),
        (("--set", "trainer.data_noise=1e300"), "trainer.data_noise: must be at most 1e+30"),
        (("--data", "toy:two-modes?noise=1e300"), "noise: must be at most 1e+30, got 1e+300"),
        (("--data", "toy:digits?n=40&noise=1e300"), "noise: must be at most 1e+30, got 1e+300"),
        (
            ("--data", "toy:two-modes?noise=1e20", "--units", "none"),
            "data: must be at most 1e+15 in size in the",
        ),
        (
            ("--set", "trainer.data_noise=1e20", "--units", "none"),
            "data with trainer.data_noise: must be at most 1e+15 in size in the units of training",
        ),
        (("--out", "a\0b"), "must have no null character"),
        (
            ("--method", "interpolating-nce", "--energy", "mixture"),
            "'interpolating-nce' needs one with a time",
        ),
    ],
)
def test_what_was_found_before_is_refused_by_name_dry_or_not(words, expected, tmp_path):
    given = {"--data": DATA, "--out": str(tmp_path / "run")}
    options = [word for name, value in given.items() if name not in words for word in (name, value)]
    for dry in ((), ("--dry-run",)):
        status, wrong, said = call(("train", *options, *TINY, *words, *dry))
        assert (status, wrong) == (2, "")
        assert expected in said
        assert not (tmp_path / "run" / "config.json").exists()


@each(
    "text, expected",
    [
        ("[" * 100_000, "is not valid JSON"),
        ('{"method": {"name": ["cd"]}}', "unknown value ['cd']"),
        ('{"data": ["toy:two-modes"]}', "data: give --data"),
        ('{"energy": "os:abort", "data": "toy:two-modes"}', "a file must not name code to run"),
    ],
)
def test_settings_files_of_nonsense_are_refused_by_name(text, expected, tmp_path):
    (tmp_path / "c.json").write_text(text)
    status, wrong, said = call(
        ("train", "--config", str(tmp_path / "c.json"), "--out", str(tmp_path / "run"))
    )
    assert (status, wrong) == (2, "")
    assert expected in said


@each(
    "words, expected",
    [
        (("sample", "--n", "5", "--seed", "9" * 400), "seed: must be an integer of at most 64 bits"),
        (("report", "--out", "a\0b"), "must have no null character"),
    ],
)
def test_other_commands_refuse_what_was_found_before(words, expected, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, wrong, said = call((words[0], str(run), *words[1:]))
    assert (status, wrong) == (2, "")
    assert expected in said


@each(
    "size, expected",
    [
        (1e300, "data: must be at most 1e+150 in size, so that squares are numbers"),
        (1e40, "data: must be at most 1e+15 in size in the units of training, so that squares are numbers"),
    ],
)
def test_rows_whose_squares_are_no_numbers_are_refused_before_anything_is_fitted(
    size, expected, run, tmp_path
):
    rows = np.random.default_rng(0).normal(size=(40, 2)) * size
    np.savetxt(tmp_path / "x.csv", rows, delimiter=",")
    data = ("--data", str(tmp_path / "x.csv"))
    trained = ("train", *data, "--out", str(tmp_path / "run"), "--units", "none", *TINY)
    for words in ((*trained, "--dry-run"), trained, ("evaluate", str(run), *data)):
        status, wrong, said = call(words)
        assert (status, wrong) == (2, "")
        assert (expected if words[0] == "train" else "data: must be at most 1e+15 in size") in said
    with pytest.raises(InputError, match=re.escape(expected)):
        fit(None, rows, units="none", steps=1)


def test_methods_are_not_compared_on_rows_whose_squares_are_no_numbers(tmp_path):
    np.save(tmp_path / "x.npy", 1e300 * np.random.default_rng(0).normal(size=(40, 2)))
    words = ("--methods", "cd,nce", "--budget", "1s", "--out", str(tmp_path / "c"))
    status, wrong, said = call(("compare", "--data", str(tmp_path / "x.npy"), *words))
    assert (status, wrong) == (2, "")
    assert "data: must be at most 1e+150 in size, so that squares are numbers" in said


def test_contexts_whose_squares_are_no_numbers_are_refused(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 2))
    with pytest.raises(InputError, match=r"given: must be at most 1e\+150 in size"):
        fit(None, x, "ranking-nce", given=1e200 * x, steps=1)
    with pytest.raises(InputError, match=r"given: must be at most 1e\+15 in size in the units of training"):
        fit(None, x, "ranking-nce", given=1e20 * x, steps=1, units="none")


def test_one_row_held_out_that_is_far_out_is_refused_dry_or_not(tmp_path):
    rows = np.random.default_rng(0).normal(size=(40, 2))
    held_out = load_array(np.arange(40)).split(0.1, 0)[1].x.long()
    rows[held_out[0]] = 1e30
    np.save(tmp_path / "x.npy", rows)
    for dry in ((), ("--dry-run",)):
        words = ("train", "--data", str(tmp_path / "x.npy"), "--out", str(tmp_path / "run"), *TINY, *dry)
        status, wrong, said = call(words)
        assert (status, wrong) == (2, "")
        assert "data: must be at most 1e+15 in size in the units of training" in said


@each("kind", KINDS)
def test_a_dry_run_says_the_units_of_every_kind(kind, tmp_path):
    words = ("train", "--data", DATA, "--out", str(tmp_path / "run"), *TINY, "--units", kind, "--dry-run")
    assert call(words)[:2] == (0, "")


@each(
    "name, value, expected",
    [
        ("data_noise", {}, "trainer.data_noise: must be a number, got {}"),
        ("data_noise", None, "trainer.data_noise: must not be empty"),
        ("data_noise_final", "x", "trainer.data_noise_final: must be a number, got 'x'"),
        ("data_noise_over", [], "trainer.data_noise_over: must be a number"),
        ("data_noise_over", 0, "trainer.data_noise_over: must be above 0 and at most 1"),
        ("steps", {"a": 1}, "trainer.steps: must be an integer, got {'a': 1}"),
        ("max_seconds", [[]], "trainer.max_seconds: must be a number"),
        ("follows", 3, "trainer.follows: must be a text, got 3"),
        ("augment", [1], "trainer.augment.0: must be a text, got 1"),
    ],
)
def test_trainers_of_nonsense_are_refused_by_name_wherever_settings_are_read(
    name, value, expected, run, tmp_path
):
    shutil.copytree(run, tmp_path / "run", dirs_exist_ok=True)
    settings = json.loads((run / "config.json").read_text())
    settings["trainer"][name] = value
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    for words in (("evaluate",), ("sample", "--n", "5"), ("compare", run, "--out", tmp_path / "c")):
        status, wrong, said = call(tuple(map(str, (words[0], tmp_path / "run", *words[1:]))))
        assert (status, wrong) == (2, "")
        assert f"config.json: {expected}" in said


WEIGHTS = {"data": [0.5, 0.5], "samples": [0.4, 0.6]}


@each(
    "key, value, expected",
    [
        ("modes", {"a": {}}, "modes: must be a table with weights"),
        ("modes", {"data": [1.0]}, "modes: must be a table with weights"),
        ("modes", {"data": [1.0], "samples": [0.5, 0.5]}, "modes: must be a table with weights"),
        ("modes", WEIGHTS | {"centers": [[1, 2], ["x", 2]]}, "modes: must be a table with weights"),
        ("modes", WEIGHTS | {"centers": ""}, "modes: must be a table with weights"),
        ("modes", WEIGHTS | {"centers": []}, "modes: must be a table with weights"),
        ("modes", WEIGHTS | {"std_error": {}}, "modes: must be a table with weights"),
        ("modes", WEIGHTS | {"centers": [[1, 2], [1]]}, "modes.centers: must be places of 2 numbers"),
        ("log_partition", {"value": "x", "std_error": 1.0}, "log_partition: must be a table with numbers"),
        ("log_partition", "", "log_partition: must be a table with numbers"),
        ("scores", {"log_likelihood": -3.0, "log_likelihood_se": [[1]]}, "scores: must be a table in which"),
        (
            "diagnosis",
            [{"name": None, "severity": "note", "text": ""}],
            "diagnosis: must be a list of tables",
        ),
    ],
)
def test_a_summary_of_nonsense_is_refused_by_name_wherever_it_is_read(key, value, expected, run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder, dirs_exist_ok=True)
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["modes"]["data"]) == len(summary["modes"]["samples"]) > 1
    (folder / "summary.json").write_text(json.dumps(summary | {key: value}))
    for words in (("compare", folder, run, "--out", tmp_path / "c"), ("sample", folder, "--n", "5")):
        status, wrong, said = call(tuple(map(str, words)))
        assert (status, wrong) == (2, "")
        assert expected in said


@each(
    "changed, expected",
    [
        ({"x": np.zeros((9, 3))}, "x: must be numbers of shape (n, 2), got 'torch.float64, (9, 3)'"),
        ({"x": np.zeros((0, 2))}, "x: must be numbers of shape (n, 2)"),
        ({"x": np.zeros((9, 2), complex)}, "x: must be numbers of shape (n, 2)"),
        ({"log_weight": np.zeros(5)}, "log_weight: must be 9 numbers, got 'torch.float64, (5,)'"),
        ({"populations": np.array(9)}, "populations: must be how many walkers each has"),
        ({"populations": np.array([-1, 10])}, "populations: must be how many walkers each has"),
        ({"populations": np.array([4, 6])}, "populations: must be how many walkers each has"),
        ({"populations": np.array([4.5])}, "populations: must be how many walkers each has"),
    ],
)
def test_walkers_that_are_none_of_the_run_are_refused_by_name(changed, expected, run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder, dirs_exist_ok=True)
    (folder / "seals.json").unlink()  # which would refuse any change
    kept = {"x": np.zeros((9, 2)), "log_weight": np.zeros(9), "populations": np.array([0])}
    np.savez(folder / "walkers.npz", **(kept | changed))
    status, wrong, said = call(("sample", str(folder), "--n", "5"))
    assert (status, wrong) == (2, "")
    assert f"walkers.npz: {expected}" in said


def test_samples_that_are_none_of_the_run_are_refused_by_name(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for name in ("seals.json", "walkers.npz"):
        (tmp_path / "run" / name).unlink()
    np.save(tmp_path / "run" / "samples.npy", np.zeros((9, 3)))
    status, wrong, said = call(("evaluate", str(tmp_path / "run")))
    assert (status, wrong) == (2, "")
    assert "samples.npy: x: must be numbers of shape (n, 2), got 'torch.float64, (9, 3)'" in said


def test_a_line_of_brackets_without_end_is_left_out_or_refused_by_its_number(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines, deep = path.read_text().splitlines(), "[" * 5000
    for there, status in (([*lines, deep], 0), ([deep, *lines], 2)):
        path.write_text("\n".join(there))
        found, wrong, said = call(("report", str(tmp_path / "run")))
        assert (found, wrong) == (status, "")
        assert ("line 1 is not a JSON object" in said) == (status == 2)


def test_settings_of_a_run_without_the_hash_of_its_rows_are_refused_where_runs_are_compared(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    settings = json.loads((run / "config.json").read_text())
    del settings["data"]["sha256"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    for runs in ((tmp_path / "run", run), (run, tmp_path / "run")):
        status, wrong, said = call(("compare", *map(str, runs), "--out", str(tmp_path / "c")))
        assert (status, wrong) == (2, "")
        assert "config.json: data: must have source and sha256" in said


# ---- hostile files


def test_what_does_not_fit_is_refused_before_it_is_taken(monkeypatch, tmp_path):
    taken: list[int] = []
    monkeypatch.setattr(room, "free_bytes", lambda device="cpu": 1 << 20)
    monkeypatch.setattr(np, "load", lambda *a, **k: taken.append(1))
    require_room("data", "a megabyte", 1 << 20)
    with pytest.raises(
        InputError, match=r"data: two would take about 2.0 MiB of memory, and 1.0 MiB are free"
    ):
        require_room("data", "two", 2 << 20)
    zip_of(tmp_path / "bomb.npz", {"x.npy": npy_header("(1000000, 2)") + bytes(8_000_000)})
    assert (tmp_path / "bomb.npz").stat().st_size < 20_000
    status, wrong, said = call(
        ("train", "--data", str(tmp_path / "bomb.npz"), "--out", str(tmp_path / "run"))
    )
    assert (status, wrong, taken) == (2, "", [])
    assert "1 arrays, unpacked," in said


@each("name", ["x.npy", "x.npz"])
def test_a_header_that_claims_more_than_the_file_holds_is_refused(name, tmp_path):
    lie = npy_header("(500000, 1000)") + bytes(80)
    path: Path = tmp_path / name
    path.write_bytes(lie) if name == "x.npy" else zip_of(path, {"x.npy": lie})
    status, wrong, said = call(("train", "--data", str(path), "--out", str(tmp_path / "run")))
    assert (status, wrong) == (2, "")
    assert "its header claims shape (500000, 1000), 1.9 GiB, and the file holds" in said


def test_the_page_of_a_run_shows_the_text_of_a_script_in_a_name(run, tmp_path):
    attack = "<script>alert(1)</script>"
    rows = np.random.default_rng(0).normal(size=(30, 2))
    np.savetxt(tmp_path / "a<b>.csv", rows, delimiter=",", header=f"{attack},<img src=x>", comments="")
    small = [word for name in ("energy.hidden=[4]", "method.walkers=64") for word in ("--set", name)]
    out = tmp_path / "<b>run"
    status, wrong, said = call(
        ("train", "--data", str(tmp_path / "a<b>.csv"), "--out", str(out), *TINY, *small)
    )
    assert (status, wrong) == (0, ""), said
    page = (out / "report.html").read_text()
    assert "<script>alert" not in page
    assert "<img src=x>" not in page
    assert "a&lt;b&gt;.csv" in page
