"""Runs of p(x | y), from the command line."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import metastable as ms
from metastable.cli.runs import open_run, training_set
from metastable.core.errors import InputError
from metastable.methods import METHODS
from metastable.runs.folder import read_config
from metastable.summary.classifier import caveat

LABELLED = "toy:digits?n=120"


def label_settings() -> dict[str, str]:
    """For every method whose chains can carry labels, the setting that makes them."""
    found = {"mixed": 'method={"name": "mixed", "labels": true, "sources": [{"name": "cd", "labels": true}]}'}
    for name, kind in METHODS.items():
        fields = {f.name for f in dataclasses.fields(kind)}
        if "labels" in fields:
            found.setdefault(name, "method.labels=true")
        elif "source" in fields:
            found.setdefault(name, "method.source.labels=true")
    return {name: words for name, words in found.items() if name not in ("exact", "jem")}  # those refuse


@pytest.mark.parametrize("method", label_settings())
def test_a_dry_run_of_every_method_by_class_begins(method, metastable, tmp_path):
    words = ["train", "--data", LABELLED, "--out", tmp_path / "run", "--dry-run"]
    words += [] if method == "mixed" else ["--method", method]
    result = metastable(*words, "--set", label_settings()[method], "--energy", "mlp")
    assert result.exit_code == 0, result.output
    assert "ClassEnergy" in result.output
    assert "dry run: nothing was written" in result.output


TINY = ["--steps", 3, "--no-progress", "--energy", "mlp", "--set", "energy.hidden=[8]"]


@pytest.fixture(scope="module")
def by_class(metastable, tmp_path_factory):
    """Runs on events of the classes 0 and 2: by f-ebm and by jarzynski."""
    folder = tmp_path_factory.mktemp("by-class")
    train_by_class(metastable, folder, "f-ebm", "method.source.labels=true")
    return train_by_class(metastable, folder, "jarzynski", "method.labels=true")


def train_by_class(metastable, folder, name, setting):
    """A run on events of the classes 0 and 2, in a folder beside its data."""
    rng = np.random.default_rng(0)
    labels = 2 * (rng.random(200) < 0.4)
    np.savez(folder / "rows.npz", x=rng.normal(0, 1, (200, 2)) + labels[:, None], labels=labels)
    words = ["train", "--data", folder / "rows.npz", "--method", name, "--set", setting, *TINY]
    result = metastable(*words, "--out", folder / name)
    assert result.exit_code == 0, result.output
    return folder


def test_a_correction_of_classes_is_asked_for_by_the_option(metastable, refused, by_class, tmp_path):
    words = ("sample", by_class / "f-ebm", "--n", 9, "--corrected", "--steps", 2, "--out", tmp_path / "s.npy")
    line = refused(*words)
    assert "--label" in line
    assert "log_ratio" not in line
    assert metastable(*words, "--label", 2).exit_code == 0
    with pytest.raises(InputError, match="draw walkers of one, label=…"):
        ms.load_run(by_class / "f-ebm").sample(9, steps=2, corrected=True)


def test_a_class_without_a_row_of_training_is_refused(refused, by_class, tmp_path):
    words = ("--label", 1, "--n", 9, "--out", tmp_path / "s.npy")
    line = refused("sample", by_class / "f-ebm", *words)
    assert "label: must be a class that training had rows of, [0, 2], got 1" in line


@pytest.mark.filterwarnings("ignore:.*was altered since")
def test_a_run_knows_its_classes_without_its_rows(metastable, refused, tmp_path):
    folder = train_by_class(metastable, tmp_path, "jarzynski", "method.labels=true") / "jarzynski"
    config, labels = read_config(folder), training_set(open_run(folder)).labels
    assert config["classes"] == 3
    assert config["class_rows"] == labels.bincount().tolist()
    assert sum(config["class_rows"]) == 180  # the others are held out

    words = ("sample", folder, "--n", 9, "--steps", 2, "--out", tmp_path / "s.npy", "--label")
    rows = (tmp_path / "rows.npz").rename(tmp_path / "elsewhere.npz")
    result = metastable(*words, 2)
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "s.npy").shape == (9, 2)
    missing = "label: must be a class that training had rows of, [0, 2], got 1"
    assert missing in refused(*words, 1)
    assert "label: must be the number of a class, from 0 on, got 'oak'" in refused(*words, "oak")

    x = np.load(tmp_path / "s.npy")
    (folder / "config.json").write_text(json.dumps({**config, "class_names": ["ash", "elm", "oak"]}))
    assert metastable(*words, "oak").exit_code == 0
    assert np.array_equal(np.load(tmp_path / "s.npy"), x)
    assert missing in refused(*words, "elm")
    assert "label: must be the number of a class, or one of ash, elm, oak, got 'yew'" in refused(
        *words, "yew"
    )

    del config["class_rows"]  # as older runs were written
    (folder / "config.json").write_text(json.dumps(config))
    assert metastable(*words, 2).exit_code == 0
    rows.rename(tmp_path / "rows.npz")
    assert missing in refused(*words, 1)
    (folder / "config.json").write_text(json.dumps(config | {"class_rows": [1, "two"]}))
    assert "class_rows: must be a list of counts, got [1, 'two']" in refused(*words, 2)


def test_a_run_by_class_can_be_trained_again_from_its_folder(metastable, by_class):
    result = metastable("train", by_class / "jarzynski", "--dry-run")
    assert result.exit_code == 0, result.output


def test_scores_of_classes_that_were_never_compared_have_a_caveat(metastable, by_class, tmp_path):
    """Chains of fixed labels and equal weights learn E(x, y) up to a constant of each class; Jarzynski's do not."""
    for name, doubted in (("f-ebm", True), ("jarzynski", False)):
        result = metastable("evaluate", by_class / name)
        assert result.exit_code == 0, result.output
        assert "as a classifier" in result.output
        words = "Each class has a free constant in E(x, y)"
        assert (words in result.output) is doubted
        assert (words in (by_class / name / "report.html").read_text()) is doubted


def test_a_mixture_of_chains_without_weights_has_the_caveat_too():
    mixed = METHODS["mixed"](sources=(METHODS["cd"](labels=True),), labels=True)
    assert "'mixed'" in str(caveat(mixed))
    assert caveat(METHODS["jem"]()) is caveat(METHODS["pcd"]()) is None
    assert caveat(METHODS["robust"](source=METHODS["jarzynski"](labels=True))) is None
