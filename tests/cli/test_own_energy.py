"""A module of one's own, named on the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import metastable as ms
from metastable.cli.own import own_energy
from metastable.core.errors import ConfigError, InputError

OWN = """
import torch

number = 3

class Bowl(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return 0.5 * (x * self.log_scale.exp()).square().sum(1)

def make():
    return Bowl()

def other():
    return torch.nn.Linear(2, 1)

def five():
    return 5

def wants(width):
    return Bowl()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a module in it, and rows."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_bowl.py").write_text(OWN)
    (folder / "my_broken.py").write_text("import nothing_of_the_kind\n")
    (folder / "my_mistake.py").write_text("1 / 0\n")
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(80, 2)))
    return folder


@pytest.fixture(scope="module")
def own_run(metastable, home):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        words = ["--energy", "my_bowl:make", "--steps", 3, "--no-progress", "--set", "method.walkers=64"]
        result = metastable("train", "--data", "x.npy", "--out", "run", *words, "--learning-rate", 0.5)
        assert result.exit_code == 0, result.output
    return home / "run"


@pytest.fixture
def inside(home, own_run, monkeypatch):
    monkeypatch.chdir(home)
    return own_run


def test_it_is_trained_and_recorded_as_one_s_own(inside):
    config = json.loads((inside / "config.json").read_text())
    assert config["energy"] == {"name": "custom", "class": "Bowl"}
    assert config["trainer"]["optimiser"]["learning_rate"] == 0.5
    moved = ms.load_run(inside, own_energy("my_bowl:make")).energy.state_dict()
    assert any(float(value.abs().max()) > 0 for name, value in moved.items() if "log_scale" in name)


def test_it_is_sampled_evaluated_and_scored_by_its_name(metastable, inside, tmp_path):
    name = ["--energy", "my_bowl:make"]
    result = metastable("sample", inside, "--n", 5, "--steps", 2, "--out", tmp_path / "s.npy", *name)
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "s.npy").shape == (5, 2)
    result = metastable("score", inside, "--data", "x.npy", "--out", tmp_path / "s.npz", *name)
    assert result.exit_code == 0, result.output
    result = metastable("evaluate", inside, "--out", tmp_path / "e.json", *name)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "e.json").read_text())["rows"] == 8


def test_training_goes_on_by_its_name(metastable, refused, inside):
    words = ["train", "--resume", "--out", inside, "--no-progress", "--steps", 4]
    assert "energy.name: was Bowl of your own; name a function that makes it" in refused(*words)
    result = metastable(*words, "--energy", "my_bowl:make")
    assert result.exit_code == 0, result.output
    assert "after 4 steps" in result.output


def test_a_run_of_one_s_own_asks_for_the_name_and_others_do_not(refused, inside, run_folder, tmp_path):
    line = refused("sample", inside, "--out", tmp_path / "s.npy")
    assert "trained your own Bowl; name a function that makes it, --energy module:factory" in line
    line = refused("sample", run_folder, "--out", tmp_path / "s.npy", "--energy", "my_bowl:make")
    assert "has the built-in 'mlp'; leave --energy out" in line


def test_weights_of_another_module_do_not_fit(refused, inside, tmp_path):
    line = refused("sample", inside, "--out", tmp_path / "s.npy", "--energy", "my_bowl:other")
    assert "its 'energy' does not fit" in line
    assert "log_scale" in line


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_bowl", "energy: must be a name such as module:factory, got 'my_bowl'"),
        ("my_bowl:", "must be a name such as module:factory"),
        ("my_bowls:make", "energy: no module 'my_bowls' in "),
        ("my_broken:make", "energy: my_broken needs the module 'nothing_of_the_kind', which is not there"),
        ("my_mistake:make", "energy: importing my_mistake raised ZeroDivisionError: division by zero"),
        ("my_bowl:mak", r"energy: the module 'my_bowl' has no 'mak' \(did you mean 'make'\?\)"),
        ("my_bowl:number", "must be a function or a class that makes the module, got 3"),
        ("my_bowl:wants", "energy: my_bowl:wants.. is called without arguments, and raised TypeError"),
        ("my_bowl:five", "energy: my_bowl:five.. must return an nn.Module, got int"),
    ],
)
def test_a_name_that_makes_no_module_is_refused(name, message, home, monkeypatch):
    monkeypatch.chdir(home)
    with pytest.raises((InputError, ConfigError), match=message):
        own_energy(name)


def test_a_class_will_do_too(home, monkeypatch):
    monkeypatch.chdir(home)
    assert isinstance(own_energy("my_bowl:Bowl"), torch.nn.Module)


def test_the_path_of_python_is_left_as_it_was(home, monkeypatch):
    import sys

    monkeypatch.chdir(home)
    before = list(sys.path)
    own_energy("my_bowl:make")
    assert sys.path == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--set", "trainer.learning_rate=1"],
            "trainer.learning_rate: the rate is the optimiser's: --learning-rate",
        ),
        (["--set", "trainer.lr=1"], "trainer.lr: the rate is the optimiser's: --learning-rate"),
        (["--learning-rate", "-1"], "optimiser.learning_rate: must be a finite number above 0, got -1.0"),
        (["--energy", "mpl"], "energy.name: unknown value 'mpl' (did you mean 'mlp'?)"),
    ],
)
def test_one_way_to_say_the_rate_and_the_energy(words, line, refused):
    assert line in refused("train", "--data", "toy:two-modes?n=50", "--dry-run", *words)


def test_the_default_energy_has_a_name(metastable):
    words = ["train", "--data", "toy:two-modes?n=50", "--dry-run"]
    assert metastable(*words, "--energy", "default").output == metastable(*words).output
