"""Checks of numbers on an accelerator: left out where asked, and made now and then in training."""

from __future__ import annotations

import pytest
import torch

import metastable as ms
from metastable.core.waiting import may_look, unwatched
from metastable.training.trainer import LOOK_EVERY

THERE, HERE = torch.empty(0, device="meta"), torch.empty(0)


def test_numbers_on_the_host_are_always_looked_at():
    with unwatched():
        assert may_look(HERE)
        assert not may_look(THERE)
        with unwatched(False):
            assert not may_look(THERE)  # what is outside holds inside
    assert may_look(THERE)
    with unwatched(False):
        assert may_look(THERE)


def test_looks_are_allowed_again_after_an_error():
    with pytest.raises(KeyError), unwatched():
        raise KeyError
    assert may_look(THERE)


def test_training_looks_now_and_then(monkeypatch):
    looked, loss = [], ms.proposals.InterpolantFlow.loss

    def watched(flow, *inputs, **options):
        looked.append(may_look(THERE))
        return loss(flow, *inputs, **options)

    monkeypatch.setattr(ms.proposals.InterpolantFlow, "loss", watched)
    x = torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    ms.fit(ms.proposals.InterpolantFlow(1, width=2), x, "density", steps=LOOK_EVERY + 2, evaluate=False)
    assert [step for step, look in enumerate(looked) if look] == [0, LOOK_EVERY]


def test_players_who_take_turns_are_all_looked_at():
    for proposal_steps in range(1, 12):
        for energy_steps in range(1, 12):
            cycle = proposal_steps + energy_steps
            assert {LOOK_EVERY * k % cycle for k in range(cycle)} == set(range(cycle))
