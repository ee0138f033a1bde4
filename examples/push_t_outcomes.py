"""Does it help to know where a chunk leads? Draws of a flow on Push-T, ranked by what they bring about.

Two networks learn from the demonstrations alone. One says where the corners of the block are when a chunk is over.
The other is a value: γ to the power of the steps that are left of an episode, from the agent and the block. The
energy of a chunk is minus the value of where it leads, and the policy takes the lowest of eight draws of the flow.

    metastable reproduce push-t --scale cpu --set arms=flow --out runs/push-t
    python examples/push_t_outcomes.py runs/push-t/training/flow --start-seed 303

`METASTABLE_PUSHT` names the folder of the demonstrations.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from metastable.data import Demonstrations
from metastable.data.demonstration_files import load_pusht, pusht_corners
from metastable.data.demonstrations import Scaling
from metastable.policies.actions import ActionModel
from metastable.policies.environments import pusht_starts
from metastable.policies.policy import Policy, load_policy
from metastable.policies.rollouts import Rollouts, rollout_pusht

GOAL = pusht_corners(torch.tensor([256.0, 256.0, math.pi / 4])).flatten()
DISCOUNT, BATCH, RATE, WARM_UP = 0.985, 256, 1e-3, 100
NOISE, BLUR = 0.005, 0.05
"""On agent and actions as the flow has it, and on all that the value sees (in hundreds of pixels)."""


class Residual(nn.Module):
    """Dense layers with residual connections; dropout, since there are few episodes."""

    def __init__(self, inputs: int, outputs: int, width: int, layers: int, dropout: float):
        super().__init__()

        def layer() -> nn.Module:
            inner = (nn.Linear(width, width), nn.SiLU(), nn.Dropout(dropout), nn.Linear(width, width))
            return nn.Sequential(nn.LayerNorm(width), *inner)

        self.first, self.last = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.inner = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.inner:
            x = x + layer(x)
        return self.last(x)


def seen_by_value(agent: Tensor, block: Tensor) -> Tensor:
    """Agent, block from the agent and block from the goal, `(…, 34)`."""
    near = (block.unflatten(-1, (8, 2)) - agent[..., None, :]).flatten(-2)
    return torch.cat([(agent - 256) / 100, near / 100, (block - GOAL) / 100], -1)


@dataclass(frozen=True)
class ByOutcome:
    """Draws of another model, whose energy is minus the value of where they lead."""

    model: ActionModel
    scaling: Scaling
    outcome: nn.Module
    value: nn.Module
    has_chains: bool = False

    def draw(self, contexts: Tensor, n: int, seed: int) -> Tensor:
        return self.model.draw(contexts, n, seed)

    def move(
        self, x: Tensor, contexts: Tensor, steps: int, seed: int, frozen: Tensor | None = None
    ) -> Tensor:
        return self.model.move(x, contexts, 0, seed, frozen)

    @torch.no_grad()
    def energy(self, x: Tensor, contexts: Tensor) -> Tensor:
        actions = self.scaling.to_actions(x.unflatten(-1, (-1, 2)))
        _, block = unpacked(self.scaling, contexts)
        after = block[:, -1, None] + 20 * self.outcome(seen_by_outcome(self.scaling, contexts, x))
        return -self.value(seen_by_value(actions[..., -1, :], after))[..., 0]


def unpacked(scaling: Scaling, contexts: Tensor) -> tuple[Tensor, Tensor]:
    """Agent `(B, 2, 2)` and block `(B, 2, 16)` of packed contexts, in pixels."""
    agent, block = contexts[:, :4].unflatten(1, (2, 2)), contexts[:, 4:].unflatten(1, (2, 16))
    parts = {"agent": agent, "block": block}
    found = {key: value * scaling.half[key] + scaling.middle[key] for key, value in parts.items()}
    return found["agent"], found["block"]


def seen_by_outcome(scaling: Scaling, contexts: Tensor, x: Tensor) -> Tensor:
    """Context and chunks, all from the agent too, `(B, n, …)`."""
    agent, block = unpacked(scaling, contexts)
    now, corners = agent[:, 1], block[:, 1]
    state = [seen_by_value(now, corners), (corners - 256) / 100]
    state += [(agent[:, 1] - agent[:, 0]) / 10, (block[:, 1] - block[:, 0]) / 10]
    actions = scaling.to_actions(x.unflatten(-1, (-1, 2)))
    chunk = [(actions - now[:, None, None]).flatten(-2) / 100, actions.diff(dim=-2).flatten(-2) / 20]
    return torch.cat([torch.cat(state, 1)[:, None].expand(-1, x.shape[1], -1), *chunk], -1)


def learn(network: nn.Module, rows: int, steps: int, decay: float, loss) -> nn.Module:
    """Steps of AdamW on `loss(rows of a batch)`, the rate falling to zero."""
    optimiser = torch.optim.AdamW(network.parameters(), RATE, weight_decay=decay)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1, step / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
        optimiser.zero_grad()
        loss(torch.randint(rows, (BATCH,))).backward()
        optimiser.step()
    return network.eval()


def learned(shown: Demonstrations, policy: Policy, steps: tuple[int, int], seed: int) -> ByOutcome:
    """Both networks, from the demonstrations of the flow."""
    scaling, config = policy.scaling, policy.config
    windows = shown.windows(config.context, config.prediction)
    last = shown.ends[windows.episode] - 1
    after = (windows.step + config.prediction).minimum(last)  # an episode stays at its end
    block, contexts = shown.observations["block"], scaling.pack(windows.contexts())
    x, change = scaling.scale_actions(windows.chunks()).flatten(1), (block[after] - block) / 20
    state = seen_by_value(shown.observations["agent"], block)
    left = DISCOUNT ** (last - windows.step).float()

    def outcome_loss(rows: Tensor) -> Tensor:
        given, chunk = contexts[rows], x[rows]
        given[:, :4] += NOISE * torch.randn(BATCH, 4)
        chunk = chunk + NOISE * torch.randn_like(chunk)
        found = outcome(seen_by_outcome(scaling, given, chunk[:, None]))[:, 0]
        return nn.functional.smooth_l1_loss(found, change[rows])

    def value_loss(rows: Tensor) -> Tensor:
        blurred = state[rows] + BLUR * torch.randn(BATCH, state.shape[1])
        return nn.functional.mse_loss(value(blurred)[:, 0], left[rows])

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inputs = seen_by_outcome(scaling, contexts[:1], x[:1, None]).shape[-1]
        outcome, value = Residual(inputs, 16, 256, 3, 0.1), Residual(state.shape[1], 1, 128, 2, 0.2)
        learn(outcome, len(x), steps[0], 1e-2, outcome_loss)
        learn(value, len(x), steps[1], 5e-2, value_loss)
    return ByOutcome(policy.model, scaling, outcome, value)


def compare(
    folder: Path,
    starts: int,
    rollouts: int,
    start_seed: int,
    steps: tuple[int, int] = (3000, 4500),
    seed: int = 0,
) -> dict[str, Rollouts]:
    """One draw of the flow, and the best of eight by where they lead, from the same starts."""
    flow = load_policy(folder, candidates=8, steps=0, warm=0, freeze=0, rank="energy")
    model = learned(load_pusht(os.environ["METASTABLE_PUSHT"]), flow, steps, seed)
    ranked = Policy(model, flow.scaling, flow.config)
    one = Policy(flow.model, flow.scaling, replace(flow.config, candidates=1))
    states = pusht_starts(starts, start_seed)
    found = {}
    for name, policy in (("one draw", one), ("best of 8 by outcome", ranked)):
        found[name] = rollout_pusht(policy, states, rollouts=rollouts, seed=seed)
        said = ", ".join(f"{key} {value}" for key, value in found[name].scores().items())
        print(f"{name}: {said}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Ranks draws of a flow on Push-T by where they lead.")
    parser.add_argument("folder", type=Path, help="of the flow's policy")
    for name, value in (("starts", 32), ("rollouts", 2), ("start-seed", 303), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    found = compare(args.folder, args.starts, args.rollouts, args.start_seed, seed=args.seed)
    first, second = found["best of 8 by outcome"], found["one draw"]
    for steps in (200, 300):
        off = first.best(steps).mean(1) - second.best(steps).mean(1)
        error = off.std() / len(off) ** 0.5
        print(f"ahead at {steps}: {off.mean():+.3f} ± {error:.3f} (paired standard error)")


if __name__ == "__main__":
    main()
