"""What a policy is fitted as, for how long, and how it acts, where `fit_policy` is told nothing else.

| | a policy | one `on` another |
|---|---|---|
| model | a flow by interpolants | an energy that starts as that flow |
| learns by | its own loss | ranking data among the flow's draws |
| updates | `updates_for` | half of them, each of which costs more |
| acts by | one draw | the best of 8 of the flow's draws, by how much likelier they are than the flow says |

Pictures are seen by a residual network, and then all is a transformer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from metastable.core.configure import build
from metastable.core.errors import require, require_count
from metastable.data.scaling import Scaling
from metastable.methods import Density, Method
from metastable.training.config import Adam, Schedule

from .actions import IDLE
from .config import PolicyConfig
from .models import PUSH_T, layout_of, policy_model

WIDTH, LAYERS, ODE = 256, 6, (64, 33)
"""Of dense networks; Heun steps and times with a divergence: draws are off by a two-thousandth of their spread,
log-densities by 0.1 nats."""
STRAIGHT: dict[str, Any] = {"interpolant": "linear", "alpha": 1.0}
"""What is done where something is seen is nearly known, and straight paths lead there: docs/results/push-t.md."""
FLOW = {"name": "interpolant", **STRAIGHT, "width": WIDTH, "layers": LAYERS}
FLOW |= {"steps": ODE[0], "scored": ODE[1]}
ON_FLOW = {"name": "on-proposal", "width": WIDTH, "depth": LAYERS}
RANKED = {"name": "ranking-nce", "negatives_per_datum": 7, "reuse": 10, "pool": 16_384}
RANKED |= {"proposal": {"name": "interpolant", "steps": 8, "scored": 5}}  # while it trains
SEEING = replace(PUSH_T, width=64, layers=4, field_width=64, field_layers=4, ode=ODE, **STRAIGHT)
"""Sizes of models that see pictures."""
BATCH, PASSES, FEWEST, MOST = 256, 50, 4000, 20_000
RATE, RATE_OTHERS, RATE_SEEING, WARM_UP = 3e-3, 1e-3, 5e-4, 200


def updates_for(windows: int) -> int:
    """Updates of a flow: 50 passes through all windows, 256 at a time, at least 4,000 and at most 20,000.

    >>> updates_for(500), updates_for(25_650), updates_for(10**6)
    (4000, 5009, 20000)
    """
    return min(max(PASSES * windows // BATCH, FEWEST), MOST)


def method_for(stands: bool) -> Any:
    """The method of a policy; `stands` says that it is one on another."""
    return RANKED if stands else "density"


def energy_for(scaling: Scaling, context: int, method: Method, below: Mapping[str, Any] | None) -> Any:
    """The model; None, which is `fit`'s own, for methods that have a proposal of their own.

    `below` is the table of the flow that it is on; of one with these eyes it inherits what fits.
    """
    if below is None and not isinstance(method, Density):
        return None
    if not scaling.pictures:
        return FLOW if below is None else {**ON_FLOW, "time": method.timed}
    layout = layout_of(scaling, context)
    flow = policy_model("flow", layout, SEEING).energy
    if below is None:
        return flow
    field, eyes = below.get("field"), json.loads(json.dumps(flow["field"]))
    inherits = isinstance(field, Mapping) and eyes.items() <= field.items()
    above = "i-on-flow" if method.timed else "on-flow"
    return policy_model(above, layout, replace(SEEING, inherits=inherits)).energy


def acting_for(
    config: PolicyConfig | Mapping[str, Any] | None, method: Method, below: PolicyConfig | None, own: bool
) -> PolicyConfig:
    """How a policy acts; `below` is how the one acts that it is on, and `own` says that its energy was given.

    A whole `PolicyConfig` may be one for several methods, a table with `steps` that move nothing is a mistake.
    """
    if isinstance(config, PolicyConfig):
        return config
    known: dict[str, Any] = {"candidates": 1} if isinstance(method, Density) else {}
    if below is not None:
        known |= {name: vars(below)[name] for name in ("context", "prediction", "execute")}
        known |= {} if own else {"rank": "network"}
    asked = {} if config is None else config
    made = build(PolicyConfig, {**known, **asked} if isinstance(asked, Mapping) else asked, "policy")
    still = isinstance(method, Density) or (below is not None and not own)
    rule = f"{IDLE}; updates are fit_policy(…, steps=…)"
    require(not (still and made.steps), "policy.steps", rule, made.steps)
    return made


def rate_for(stands: bool, pictures: bool, own: bool) -> float:
    """Adam's rate at first; `own` says that the energy was given, whatever it is."""
    if pictures:
        return RATE_SEEING
    return RATE_OTHERS if stands or own else RATE


def training_for(
    windows: int, method: Method, stands: bool, rate: float, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Options of `fit` for flows and energies on them, beside those that were given.

    With `max_seconds` alone schedules follow the clock, so that they are through when it is.
    """
    if options.get("trainer") is not None or not (stands or isinstance(method, Density)):
        return dict(options)
    asked = options.get("steps")
    steps = updates_for(windows) // (2 if stands else 1) if asked is None else asked
    require_count("trainer.steps", steps)
    known: dict[str, Any] = {"batch_size": BATCH, "units": "none", "progress": sys.stderr.isatty()}
    if options.get("learning_rate") is None and "optimiser" not in options:
        known["optimiser"] = Adam(rate)
        known["schedule"] = Schedule("cosine", warmup=min(WARM_UP, steps // 10))
    if asked is None and options.get("max_seconds") is not None:
        known["follows"] = "seconds"
    return {**known, **options, "steps": steps}
