"""What a method says of itself decides which checks it gets; one that says nothing gets them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import metastable as ms
from metastable.core.traits import Traits
from metastable.evaluation.diagnosis import Facts, diagnose
from metastable.methods import ChainMethod, Negatives
from metastable.methods.base import Nothing

OPEN = [{"step": k, "energy_gap": -6.0 + 0.01 * (-1) ** k, "grad_norm": 1.0} for k in range(100)]
"""A gap that never closes."""
X = 3 + 0.1 * torch.randn(200, 1, generator=torch.Generator().manual_seed(0))


class Spring(nn.Module):
    """E(x) = ½(x − m)²."""

    event_shape = (1,)

    def __init__(self):
        super().__init__()
        self.m = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return 0.5 * (x - self.m).square().sum(1)


@dataclass(frozen=True)
class Still(ChainMethod[Nothing]):
    """Negatives far from the data, whatever the energy says: they never become its draws."""

    name: ClassVar[str] = "still"

    def start(self, context):
        return Nothing()

    def negatives(self, context, state, batch):
        return Negatives(torch.full_like(batch, -3.0)), state, {}

    def load(self, tree):
        return Nothing()


@dataclass(frozen=True)
class Fixed(Still):
    """The same, by one who knows that the gap stays open and that weights of modes are not seen."""

    name: ClassVar[str] = "fixed-noise"
    gap_vanishes: ClassVar[bool] = False
    sees_mode_weights: ClassVar[bool] = False


@dataclass(frozen=True)
class Renamed(ms.methods.PersistentCD):
    """A method of the library that sees weights, under the name that it inherits."""

    sees_mode_weights: ClassVar[bool] = True
    mode_weights_advice: ClassVar[str] = "Ask its author."


def found(method, **facts):
    return {finding.name: finding for finding in diagnose(OPEN, Facts(method, **facts))}


def test_a_method_of_ones_own_gets_every_check():
    assert "no-learning" in found(Still())
    assert "no-learning" in found("a name that nobody knows")
    assert "no-learning" not in found(Fixed())
    assert "no-learning" not in found("fixed-noise")  # by the name that its run has


def test_it_says_itself_that_it_is_blind():
    right = {"data_mode_weights": [0.5, 0.5], "sample_mode_weights": [0.5, 0.5], "mode_weight_se": 0.01}
    note = found(Fixed(), separated=True, **right)["mode-weights-unseen"]
    assert "Fixed noise learns from the inside of each mode only" in note.text
    assert note.evidence["method"] == "fixed-noise"
    assert "mode-weights-unseen" not in found(Still(), separated=True, **right)


def test_an_object_counts_for_more_than_its_name():
    wrong = {"data_mode_weights": [0.5, 0.5], "sample_mode_weights": [0.2, 0.8], "mode_weight_se": 0.01}
    own, named = (found(m, separated=True, **wrong)["wrong-mode-weights"] for m in (Renamed(), "pcd"))
    assert own.advice == "Ask its author."
    assert "cannot see" not in own.text
    assert "cannot see" in named.text


def test_a_run_with_a_method_of_ones_own_is_judged():
    run = ms.fit(Spring(), X, Still(), steps=25, log_every=1, learning_rate=1e-6)
    assert "not-converged" in {finding.name for finding in run.diagnosis}  # its gap stays open


@pytest.mark.parametrize("name", sorted(ms.methods.METHODS))
def test_traits_survive_a_file_whatever_else_it_holds(name):
    traits = Traits.of(name)
    assert traits == Traits.of(ms.methods.METHODS[name])
    assert Traits.from_json(vars(traits) | {"something": "newer"}) == traits
