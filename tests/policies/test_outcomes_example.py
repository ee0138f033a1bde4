"""The example that ranks chunks by where they lead, in a world where the block goes along with the agent."""

import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from metastable.data import Demonstrations, Scaling
from metastable.data.demonstration_files import pusht_corners
from metastable.policies import PolicyConfig

LENGTH = 40
GRIP = torch.tensor([-40.0, 0.0])
"""The agent from the block that it carries."""


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).resolve().parents[2] / "examples" / "push_t_outcomes.py"
    spec = importlib.util.spec_from_file_location("push_t_outcomes_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def corners(at):
    """Corners of a block that is turned as the goal is."""
    return pusht_corners(torch.cat([at, torch.full((len(at), 1), math.pi / 4)], 1)).flatten(1)


def carried(episodes: int = 60) -> Demonstrations:
    """Blocks that are carried to the goal on a straight line from anywhere about it."""
    first = 200 * torch.rand(episodes, 1, 2, generator=torch.Generator().manual_seed(0)) - 100
    at = (256 + first * torch.linspace(1, 0, LENGTH + 1)[:, None]).float()
    now, then = at[:, :-1].flatten(0, 1), at[:, 1:].flatten(0, 1)
    seen = {"agent": now + GRIP, "block": corners(now)}
    return Demonstrations.of(seen, then + GRIP, [LENGTH * (k + 1) for k in range(episodes)])


def test_chunks_that_lead_to_the_goal_have_the_lower_energy(example):
    shown = carried()
    scaling = Scaling.fit(shown)
    policy = SimpleNamespace(model=None, scaling=scaling, config=PolicyConfig())
    model = example.learned(shown, policy, (150, 150), seed=0)
    away = 60 * torch.stack([a := torch.arange(8) * math.pi / 4, a + math.pi / 2]).cos().T  # all around it
    block = 256 + away
    contexts = {"agent": (block + GRIP)[:, None].expand(-1, 2, -1)}
    contexts["block"] = corners(block)[:, None].expand(-1, 2, -1)
    share = torch.arange(1, 17)[:, None] / LENGTH
    ways = torch.stack([block[:, None] + GRIP - sign * share * away[:, None] for sign in (1, 0, -1)], 1)
    E = model.energy(scaling.scale_actions(ways).flatten(2), scaling.pack(contexts))
    assert E.shape == (8, 3)
    assert (E.diff(dim=1) > 0).all(), E  # to the goal, staying, away from it
