"""`metastable train`: flags, files, refusals, resuming."""

from __future__ import annotations

import json
import signal
import time

import numpy as np
import pytest

from metastable.cli.settings import preset_names
from metastable.cli.train import PRESETS, next_free

from .conftest import DATA, TINY, start

JARZYNSKI = ["--set", "method.walkers=64"]


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_run_says_what_it_is_worth(metastable, tmp_path):
    out = tmp_path / "run"
    result = metastable("train", "two-modes", "--data", DATA, "--out", out, "--seed", 3, *TINY, *JARZYNSKI)
    assert result.exit_code == 0, result.output
    for words in ("log Z = ", "log-likelihood = ", "mode weights", f"report: {out / 'report.html'}"):
        assert words in result.output
    assert (out / "report.html").is_file()
    config = config_of(out)
    assert config["seed"] == 3
    assert config["held_out"] == 0.1
    assert config["data"]["source"] == DATA
    assert config["trainer"]["steps"] == 5


def test_presets_in_the_help_are_the_presets(metastable):
    assert sorted(PRESETS.split(", ")) == preset_names()


ON_PICTURES = [f"jem-{k}" for k in range(1, 8)]


def test_a_preset_on_pictures_says_where_they_should_be(metastable, monkeypatch, tmp_path):
    monkeypatch.setenv("METASTABLE_DATA", str(tmp_path))
    result = metastable("train", "jem-1", "--dry-run")
    assert result.exit_code == 2
    assert "cifar-10-batches-bin" in result.output


def test_negatives_of_an_update_are_counted():
    from metastable.methods import InterpolatingNCE, Mixed, PersistentCD, RankingNCE, Robust, ShortRun

    assert RankingNCE(negatives_per_datum=7).moving(batch=10, rows=100) == 70
    assert InterpolatingNCE(negatives_per_datum=7, times=3).moving(batch=10, rows=100) == 210 + 20
    assert ShortRun().moving(batch=10, rows=100) == 10
    both = Mixed(sources=(PersistentCD(batch=4), ShortRun()))
    assert (both.moving(batch=10, rows=100), both.stored(batch=10, rows=100)) == (14, 110)
    assert Robust(beta=(0.1, 0.2), source=both).moving(batch=10, rows=100) == 28


def test_memory_of_a_replay_buffer_is_that_of_the_chains_that_move(metastable):
    """Ten thousand walkers are kept, but 64 of them are in a backward pass."""
    result = metastable(
        "train", "jem-1", "--dry-run", "--data", "toy:digits?n=60", "--set", "energy.depth=10"
    )
    assert result.exit_code == 0, result.output
    line = next(line for line in result.output.splitlines() if line.startswith("memory"))
    size, unit = line.split()[2:4]
    assert (unit == "MiB") or (unit == "GiB" and float(size) < 2)


@pytest.mark.parametrize("preset", [name for name in preset_names() if name not in ON_PICTURES])
def test_dry_run_prints_everything_and_writes_nothing(preset, metastable, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = metastable("train", preset, "--dry-run", "--set", "trainer.clip_grad_norm=2.5")
    assert result.exit_code == 0, result.output
    for words in ('"clip_grad_norm": 2.5', "parameters, checked", "memory", f"runs/{preset}-1", "MiB"):
        assert words in result.output
    assert list(tmp_path.iterdir()) == []


def test_dry_run_counts_parameters(metastable):
    result = metastable("train", "--data", DATA, "--dry-run", "--set", "energy.hidden=[8]")
    assert "33 parameters" in result.output  # 2·8 + 8, then 8 + 1
    assert "270 to train on, 30 held out" in result.output


def test_runs_are_numbered(tmp_path):
    assert next_free(tmp_path, "a").name == "a-1"
    (tmp_path / "a-1").mkdir()
    assert next_free(tmp_path, "a").name == "a-2"


def test_a_run_trains_again_from_its_own_config(metastable, run_folder, tmp_path):
    out = tmp_path / "again"
    result = metastable("train", "--config", run_folder / "config.json", "--out", out, "--no-progress")
    assert result.exit_code == 0, result.output
    assert config_of(out) == config_of(run_folder)
    same = [(folder / "metrics.jsonl").read_text().splitlines()[-1] for folder in (out, run_folder)]
    first, second = ({k: v for k, v in json.loads(line).items() if k != "seconds"} for line in same)
    assert first == second


def test_a_toml_file_and_a_run_folder_are_settings_too(metastable, run_folder, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        f'data = "{DATA}"\nmethod = "cd"\n[energy]\nhidden = [4]\n'
        '[trainer]\nsteps = 7\nschedule = "cosine"\n[trainer.optimiser]\nlearning_rate = 0.5\n'
    )
    result = metastable("train", path, "--dry-run", "--set", "method.kernel.name=mala")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.partition("\n\n")[0])
    assert found["method"]["kernel"] == {"name": "mala", "step_size": 0.1}
    assert found["trainer"]["optimiser"]["learning_rate"] == 0.5
    assert found["trainer"]["schedule"]["shape"] == "cosine"
    again = metastable("train", run_folder, "--method", "pcd", "--dry-run").output
    assert json.loads(again.partition("\n\n")[0])["method"]["name"] == "pcd"


def test_changed_data_are_noticed(metastable, run_folder, tmp_path):
    config = config_of(run_folder)
    config["data"]["sha256"] = "0" * 16
    path = tmp_path / "old.json"
    for shift, noticed in (
        (0.01, True),
        (-0.01, False),
    ):  # the second time as another machine would draw them
        config["columns"][0]["mean"] += shift
        path.write_text(json.dumps(config))
        assert ("has changed" in metastable("train", path, "--dry-run").output) is noticed


# ---- refusals


def write(path, array):
    np.save(path, array)
    return path


BAD_ARRAYS = {
    "must be finite": np.array([[0.0, np.nan], [1.0, 2.0]]),
    "NaN or infinite": np.array([[0.0, np.inf], [1.0, 2.0]]),
    "at least 2 rows": np.zeros((0, 2)),
    "at least one number in a row": np.zeros((5, 0)),
    "single number": np.float64(3.0),
    "must hold numbers": np.array([["a", "b"], ["c", "d"]]),
}


@pytest.mark.parametrize("words", BAD_ARRAYS)
def test_bad_arrays_are_refused(words, refused, tmp_path):
    path = write(tmp_path / "x.npy", BAD_ARRAYS[words])
    line = refused("train", "--data", path, "--out", tmp_path / "run")
    assert words in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_two_rows_of_which_one_is_held_out_are_refused(refused, metastable, tmp_path, more):
    path = write(tmp_path / "x.npy", np.eye(2))
    words = (
        "train",
        "--data",
        path,
        "--steps",
        2,
        "--method",
        "pcd",
        "--energy",
        "mlp",
        "--out",
        tmp_path / "r",
    )
    line = refused(*words, *more)
    assert "data: must leave 2 rows to train on, got 1 of 2; --held-out 0 trains on them all" in line
    assert metastable(*words, "--held-out", 0, "--dry-run").exit_code == 0


def test_bad_files_are_refused(refused, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n3,four\n")
    assert "row 3, column 2 ('b'): 'four' is not a number" in refused("train", "--data", path)
    assert "no such file" in refused("train", "--data", tmp_path / "none.npy")
    assert "did you mean 'two-modes'" in refused("train", "--data", "toy:two-mode")
    assert "pickle" in refused("train", "--data", tmp_path / "x.pt")
    assert "data: give --data" in refused("train")


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("method.walker=5", "method.walker: unknown setting (did you mean 'walkers'?)"),
        ("method.step_size=-0.1", "ula.step_size: must be a finite number above 0, got -0.1"),
        ("method.kernel=mla", "method.kernel.name: unknown value 'mla' (did you mean 'mala'?)"),
        ("method.kernel=5", "method.kernel: must have a 'name'"),
        ('method.kernel={"name":"hmc","step":1}', "method.kernel.step: unknown setting"),
        ("method.walkers=many", "method.walkers: must be an integer, got 'many'"),
        ("energy.name=mpl", "energy.name: unknown value 'mpl' (did you mean 'mlp'?)"),
        ("energy.hiden=[8]", "energy.hiden: unknown setting (did you mean 'hidden'?)"),
        ("trainer.optimiser.learning_rate=-1", "optimiser.learning_rate: must be a finite number above 0"),
        ("trainer.optimiser.name=adm", "trainer.optimiser.name: unknown value 'adm' (did you mean 'adam'?)"),
        ("trainer.optimiser.lr=1", "trainer.optimiser.lr: unknown setting"),
        ("trainer.schedule.shap=1", "trainer.schedule.shap: unknown setting (did you mean 'shape'?)"),
        ("trainer.schedule=cosin", "schedule.shape: unknown value 'cosin' (did you mean 'cosine'?)"),
        ("trainer.step=3", "trainer.step: unknown setting (did you mean 'steps'?)"),
        ("trainer.steps=0", "trainer.steps: must be an integer of at least 1, got 0"),
        ("trainer=3", "trainer: must be a table of settings, got 3"),
        ("metod.walkers=3", "metod: unknown setting (did you mean 'method'?)"),
        ("held_out=1", "held_out: must be a share of at least 0 and below 1, got 1"),
        ("seed=zero", "seed: must be an integer, got 'zero'"),
        ("method.walkers", "set: must read NAME=VALUE"),
        ("data=toy:digits?noise=-1", "noise as a finite number above 0"),
    ],
)
def test_bad_settings_are_refused_by_dotted_name(assignment, words, refused):
    assert words in refused("train", "--data", DATA, "--dry-run", "--set", assignment)


def test_bad_names_are_refused_with_the_nearest(refused, tmp_path):
    assert "did you mean 'jarzynski'" in refused("train", "--data", DATA, "--method", "jarzinski")
    assert "did you mean 'two-modes'" in refused("train", "two-mode")
    assert "device: must be one of" in refused(
        "train", "two-modes", "--device", "gpu", "--out", tmp_path / "a"
    )
    assert "precision" in refused("train", "two-modes", "--precision", "16", "--out", tmp_path / "a")


def test_bad_config_files_are_refused(refused, tmp_path):
    path = tmp_path / "bad.json"
    for text, words in [
        ("{", "not valid JSON"),
        ("[1]", "must hold a table"),
        ('{"steps": 3}', "steps: unknown"),
    ]:
        path.write_text(text)
        assert words in refused("train", path)
    assert "no such file" in refused("train", tmp_path / "none.json")
    assert "not both" in refused("train", "two-modes", "--config", path)
    assert "not a run" in refused("train", tmp_path)
    path.write_text(json.dumps({"data": DATA, "energy": {"name": "custom", "class": "Mine"}}))
    assert "train it from Python" in refused("train", path)


def test_folders_that_cannot_take_a_run_are_refused(refused, run_folder, tmp_path):
    words = ["train", "--data", DATA, *TINY, *JARZYNSKI]
    assert "--resume" in refused(*words, "--out", run_folder)
    (tmp_path / "file").write_text("")
    assert "file" in refused(*words, "--out", tmp_path / "file" / "run")
    assert "not a run" in refused(*words, "--out", tmp_path)


def test_a_full_disk_is_one_line(refused, monkeypatch, tmp_path):
    import errno

    from metastable.training import checkpoints

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_file", full)
    line = refused("train", "--data", DATA, "--out", tmp_path / "run", *TINY, *JARZYNSKI)
    assert "No space left on device" in line


def test_divergence_exits_1_and_names_the_checkpoint(metastable, tmp_path):
    out = tmp_path / "run"
    words = ["--set", "method.step_size=1e12", "--method", "cd"]
    result = metastable("train", "--data", DATA, "--out", out, *TINY, *words)
    assert result.exit_code == 1, result.output
    assert "step-00000000" in result.stderr
    assert "smaller learning rate" in result.stderr
    assert json.loads((out / "summary.json").read_text())["status"] == "diverged"


def test_a_run_that_diverged_has_histograms_and_evaluate_makes_those_that_are_missing(metastable, tmp_path):
    out = tmp_path / "run"
    words = ["--method", "jem", "--data", "toy:digits", "--held-out", "0.2", "--set", "energy.name=joint-mlp"]
    words += ["--set", "trainer.checkpoint_every=2", "--set", "trainer.optimiser.learning_rate=1e6", *TINY]
    words += ["--set", "method.source.name=pcd", "--set", "method.source.walkers=40"]
    words += ["--set", "method.source.step_size=5e-5"]
    assert metastable("train", "--out", out, *words).exit_code == 1

    def stored():
        with np.load(out / "figures.npz") as found:
            return {k: found[k] for k in found.files}

    first = stored()
    assert {"energies_data", "energies_negatives", "energies_larger_steps"} <= set(first)
    assert first["energies_data"].shape == (1438,)  # without the rows that were held out
    page = (out / "report.html").read_text()
    step = int(first["negatives_step"][0])
    assert f"Seen at update {step}, the last good checkpoint; training diverged by update" in page
    (out / "figures.npz").unlink()
    assert metastable("report", out).exit_code == 0
    assert "metastable evaluate draws them from the last good checkpoint" in (out / "report.html").read_text()
    result = metastable("evaluate", out)
    assert result.exit_code == 0, result.output
    again = stored()
    np.testing.assert_array_equal(again["energies_data"], first["energies_data"])
    np.testing.assert_array_equal(again["energies_negatives"], first["energies_negatives"])
    assert f"Seen at update {step}, the last good" in (out / "report.html").read_text()
    before = (out / "figures.npz").read_bytes()
    assert metastable("evaluate", out, "--seed", 3).exit_code == 0
    assert (out / "figures.npz").read_bytes() == before  # what is there is left alone


def test_histograms_need_the_rows_of_training(metastable, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "metastable.summary.likelihood.affordable", lambda *_: False
    )  # log Z is not what is tested
    data, other = (np.random.default_rng(k).normal(size=(60, 2)) for k in (0, 1))
    np.save(tmp_path / "data.npy", data)
    np.save(tmp_path / "other.npy", other)
    out = tmp_path / "run"
    words = ["--method", "pcd", "--set", "method.walkers=40", "--set", "method.step_size=1e12", *TINY]
    assert metastable("train", "--data", tmp_path / "data.npy", "--out", out, *words).exit_code == 1
    (out / "figures.npz").unlink()
    (tmp_path / "data.npy").rename(tmp_path / "moved.npy")
    result = metastable("evaluate", out, "--data", tmp_path / "other.npy")
    assert result.exit_code == 0, result.output
    assert "no histograms of negatives, which need the rows of training" in result.output.replace("\n", " ")
    assert not (out / "figures.npz").exists()
    assert metastable("evaluate", out, "--data", tmp_path / "moved.npy").exit_code == 0  # the same rows
    assert (out / "figures.npz").is_file()


def test_debug_shows_the_traceback_and_keeps_the_status(metastable):
    result = metastable("train", "--data", "toy:none", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "error: toy set: unknown name" in result.stderr


# ---- stopping and resuming


def test_resume_needs_a_run(refused, tmp_path):
    assert "--out" in refused("train", "two-modes", "--resume")
    assert "no run to go on with" in refused("train", "--resume", "--out", tmp_path / "none")


def test_resume_refuses_another_method(refused, run_folder):
    line = refused("train", run_folder, "--resume", "--out", run_folder, "--method", "cd")
    assert "resume: method differs" in line


def test_interrupted_training_says_how_to_resume_and_then_finishes(metastable, tmp_path):
    out = tmp_path / "run"
    words = ["--steps", "1000000", "--set", "energy.hidden=[8]", "--set", "trainer.log_every=1"]
    process = start("train", "--data", DATA, "--out", out, *JARZYNSKI, *words)
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").is_file() or not (out / "metrics.jsonl").read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"metastable train --resume --out {out}" in errors
    assert "Traceback" not in errors
    done = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    result = metastable("train", "--resume", "--out", out, "--steps", done + 3, "--no-progress")
    assert result.exit_code == 0, result.output
    assert f"finished after {done + 3} steps" in result.output
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, done + 4))


def test_a_limit_on_seconds_ends_training_well(metastable, tmp_path):
    words = ["--set", "trainer.max_seconds=0.05", "--set", "trainer.steps=1000000"]
    result = metastable("train", "--data", DATA, "--out", tmp_path / "run", *TINY, *JARZYNSKI, *words)
    assert result.exit_code == 0, result.output
    assert "finished after" in result.output
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["seconds"] >= 0.05
    assert (tmp_path / "run" / "checkpoints" / f"step-{row['step']:08d}").is_dir()


def test_an_error_that_nobody_foresaw_is_not_hidden(metastable, monkeypatch):
    from metastable.cli import settings

    def broken(*args):
        raise AssertionError("a bug")

    monkeypatch.setattr(settings, "resolve", broken)
    assert isinstance(metastable("train", "two-modes").exception, AssertionError)


@pytest.mark.parametrize("words", ["flip", "flip,crop", '["flip", "crop"]'])
def test_a_list_of_words_may_be_written_with_commas(words, metastable, refused, tmp_path):
    command = ["train", "--data", "toy:digits?n=60", "--out", tmp_path / "r", "--method", "pcd", "--dry-run"]
    settings = ["--set", f"trainer.augment={words}", "--set", f"method.augment={words}"]
    result = metastable(*command, *settings)
    assert result.exit_code == 0, result.output
    shown = json.loads(result.output[: result.output.index("\n}\n") + 3])
    asked = ["flip", "crop"] if "crop" in words else ["flip"]
    assert shown["trainer"]["augment"] == shown["method"]["augment"] == asked
    assert "trainer.augment.1: unknown value 'turn'" in refused(
        *command, "--set", "trainer.augment=flip,turn"
    )


def test_a_log_without_a_bar_says_that_scoring_has_begun(metastable, tmp_path):
    """Scores of a few updates take far longer than the updates: nobody is to take that for a hang."""
    words = [word for word in (*TINY, *JARZYNSKI) if word != "--no-progress"]
    result = metastable("train", "--data", DATA, "--out", tmp_path / "r", "--method", "jarzynski", *words)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("updates are done; scoring") == 1
    assert "scoring" not in result.stdout
