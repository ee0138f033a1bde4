"""Demonstrations with pictures: how much room a training takes for them, and that it is the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.profiler import ProfilerActivity, profile

from metastable.core.errors import ConfigError
from metastable.core.pixels import Frames
from metastable.core.units import Units
from metastable.data import demonstrations as windows_room
from metastable.data.demonstrations import Demonstrations
from metastable.data.scaling import Scaling
from metastable.policies import Policy, fit_policy
from metastable.runs import rows as rows_room

over = pytest.mark.parametrize


def shown(steps: int, side: int) -> Demonstrations:
    rng = np.random.default_rng(0)
    seen = {
        "camera": rng.integers(0, 256, (steps, 3, side, side), dtype=np.uint8),
        "state": rng.normal(size=(steps, 2)).astype(np.float32),
    }
    return Demonstrations.of(seen, rng.normal(size=(steps, 2)), [steps // 2, steps])


def trained(demonstrations: Demonstrations, units: str, **more: Any) -> Policy:
    config = {"context": 2, "prediction": 4, "execute": 2}
    energy, options = {"name": "interpolant", "steps": 2}, {"units": units, "batch_size": 16}
    return fit_policy(demonstrations, energy, "density", config, steps=2, **options, **more)


def most_taken(demonstrations: Demonstrations, units: str) -> float:
    """Bytes that a training has taken at once for its tensors, as a multiple of its contexts in float32."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        trained(demonstrations, units)
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    packed = 4 * 2 * demonstrations.observations["camera"].numel()
    return float(changes.cumsum(0).max()) / packed


@over(("units", "copies"), [("none", 0.5), ("auto", 2.0)])
def test_pictures_are_held_once_as_bytes_and_once_in_units(units: str, copies: float) -> None:
    """Both pictures of a window as numbers are one copy; each once, as bytes, they are an eighth of it."""
    assert most_taken(shown(4000, 32), units) < copies


def test_a_training_sees_what_it_would_of_contexts_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, with moments of networks that are summed in one order, and without noise."""
    demonstrations, found, kept = shown(60, 16), [], windows_room.Windows._packed
    monkeypatch.setattr(Frames, "moments", lambda self: (self.plain().mean(0), self.plain().std(0)))
    for packed in (kept, lambda self, scaling: kept(self, scaling).plain()):  # pyright: ignore
        monkeypatch.setattr(windows_room.Windows, "_packed", packed)
        run = trained(demonstrations, "none", noise=None).model.run  # pyright: ignore
        found.append([p.detach().clone() for p in run.energy.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@over("units", ["none", "auto"])
def test_contexts_made_in_parts_give_the_same_training(units: str, monkeypatch: pytest.MonkeyPatch) -> None:
    demonstrations, found = shown(60, 4), []
    for numbers in (10**9, 1000):
        for room in (windows_room, rows_room):
            monkeypatch.setattr(room, "NUMBERS", numbers)
        run = trained(demonstrations, units).model.run  # pyright: ignore
        found.append([p.detach().clone() for p in run.energy.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@over("numbers", [1, 300, 10**9])
def test_contexts_are_packed_as_they_are_at_once(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    demonstrations = shown(31, 4)
    windows, scaling = demonstrations.windows(2, 4), Scaling.fit(demonstrations)
    monkeypatch.setattr(windows_room, "NUMBERS", numbers)
    given = windows.dataset(scaling).given
    assert given is not None
    assert torch.equal(given, scaling.pack(windows.contexts()))


def test_units_of_contexts_are_those_of_all_columns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(200, 24, generator=torch.Generator().manual_seed(0)) * torch.arange(24)
    whole = Units.fit(given[:, 1:], "scale")
    monkeypatch.setattr("metastable.core.units.COLUMNS", 8)
    parts = Units.of_contexts(given)
    assert parts.matrix[0] == 0
    for name in ("mean", "matrix", "inverse_matrix"):
        torch.testing.assert_close(vars(parts)[name][1:], vars(whole)[name], rtol=1e-14, atol=1e-15)


def test_pictures_of_a_policy_are_augmented_where_they_lie() -> None:
    """Those of both steps of a window, behind its numbers; without pictures it is refused by its name."""
    seen, config = shown(40, 16), {"context": 2, "prediction": 4, "execute": 2}
    options = {"steps": 2, "batch_size": 16}
    policy = fit_policy(seen, {"name": "interpolant", "steps": 2}, config=config, augment="shift", **options)
    trainer = policy.model.run.config["trainer"]
    assert (trainer["given_augment"], trainer["given_pictures"]) == (["shift"], [4, 2, 3, 16, 16])
    states = Demonstrations.of(np.zeros((9, 2)), np.arange(9.0))
    with pytest.raises(ConfigError, match=r"augment: must be left out for demonstrations without pictures"):
        fit_policy(states, config=config, augment="shift", **options)


def test_an_energy_with_a_pool_of_pictures_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    """Its checkpoint holds them as bytes; a training that was stopped ends as one that was not."""
    seen = shown(60, 16)
    net = {"name": "transformer", "pictures": [4, 2, 3, 16, 16], "past": [[0, 2, 2]], "step": 2, "width": 8}
    energy = net | {"layers": 1, "heads": 2}
    flow = {"name": "interpolant", "steps": 2, "scored": 2}
    method = {"name": "ranking-nce", "proposal": flow, "negatives_per_datum": 2, "reuse": 4, "pool": 16}
    config = {"context": 2, "prediction": 4, "execute": 2, "steps": 0}
    options = {"batch_size": 8, "augment": "shift", "learning_rate": 1e-3, "noise": 0.01}

    def taught(out: str, *steps: int) -> Policy:
        for k in steps:
            policy = fit_policy(
                seen, energy, method, config, out=tmp_path / out, steps=k, resume=True, **options
            )
        return policy

    whole, parts = taught("whole", 7), taught("parts", 4, 7)
    for name, value in whole.model.run.energy.state_dict().items():  # pyright: ignore
        assert torch.equal(value, parts.model.run.energy.state_dict()[name]), name  # pyright: ignore
    with safe_open(tmp_path / "whole" / "checkpoints" / "step-00000007" / "state.safetensors", "pt") as kept:
        seen = [kept.get_tensor(name) for name in kept.keys() if name.endswith("seen")]  # noqa: SIM118
    assert [(x.dtype, tuple(x.shape)) for x in seen] == [(torch.uint8, (16, 2 * 3 * 16 * 16))]
