"""What an update of an energy costs beside one of its flow, for policies as `fit_policy` makes them.

An energy is ranked against draws of its flow. Where every update solves the flow's ODE anew, for draws and for
their densities, that is nearly all that it does. By default draws are kept and serve ten updates, they are solved
in few steps, and an energy that has the flow's density in it needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from metastable.core.random import generator
from metastable.data.demonstrations import Demonstrations
from metastable.experiments.base import Row
from metastable.experiments.policy_arms import run_of
from metastable.policies.defaults import ON_FLOW, RANKED
from metastable.policies.fitting import fit_policy
from metastable.policies.policy import Policy

from .timing import Timings

MORE, LONGER = 30.0, 3.0
"""On a CPU, how many times more updates a second there are at least where draws are kept; on a GPU, how many times
as long as one of its flow an update of an energy takes at most."""
ANEW = {
    "energy": ON_FLOW | {"name": "conditional"},
    "method": {**RANKED, "reuse": 1, "proposal": "interpolant"},
}
"""An energy without the density, draws and densities in every update by as many steps as the flow acts by."""
UPDATES, ON_A_GPU = (200, 200, 4), (2000, 1000, 12)
"""Of a flow, of an energy on it, and of one whose draws are made anew: the last half of them is timed."""
EPISODES, LONG = 40, 125


def training_rows(
    device: str, rounds: int, seed: int, updates: Sequence[int] = (), **options: Any
) -> list[Row]:
    """Updates a second, and ratios of them within each round; `options` of `fit_policy`."""
    gpu, spent = device == "cuda", {"flow": [], "on-flow": [], "anew": []}
    flows, kept, anew = updates or (ON_A_GPU if gpu else UPDATES)
    for k in range(rounds):
        how: dict[str, Any] = {"seed": seed + k, "device": device, **options}
        flow = fitted(flows, **how)
        each = {
            "flow": flow,
            "on-flow": fitted(kept, on=flow, **how),
            "anew": fitted(anew, on=flow, **ANEW, **how),
        }
        for name, policy in each.items():
            spent[name].append(seconds_an_update(policy))
    times = Timings(spent)
    longer, more = (("<=", LONGER), (None, None)) if gpu else ((None, None), (">=", MORE))
    return [
        *(Row(f"updates_a_second/{name}", 1 / times.median(name)) for name in spent),
        Row("update_ratio/on-flow_over_flow", times.ratio("on-flow", "flow"), *longer),
        Row("update_ratio/anew_over_on-flow", times.ratio("anew", "on-flow"), *more),
    ]


def fitted(updates: int, **how: Any) -> Policy:
    """A policy of random numbers of Push-T's shapes, or one `on` it."""
    rng, n = generator(0), EPISODES * LONG
    seen = {"agent": torch.rand(n, 2, generator=rng), "block": torch.rand(n, 16, generator=rng)}
    ends = torch.arange(LONG, n + 1, LONG)
    shown = Demonstrations.of(seen, torch.rand(n, 2, generator=rng), ends, noisy=("agent",))
    return fit_policy(shown, steps=updates, log_every=max(1, updates // 4), progress=False, **how)


def seconds_an_update(policy: Policy) -> float:
    """Of the last half of its training."""
    history = run_of(policy).history
    middle, last = next(row for row in history if 2 * row["step"] >= history[-1]["step"]), history[-1]
    return (last["seconds"] - middle["seconds"]) / (last["step"] - middle["step"])
