"""Scoring candidates for contexts: one pass through an energy beside the ODE of a flow or a diffusion.

A policy that draws candidates and takes the likeliest scores them at every step. An energy does so by one pass of
its network. The log-density of a diffusion or of a continuous flow costs two passes for each step of its ODE, and
divergences beside. All networks here have the same width and depth, and all log-densities their default settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.errors import require, require_count
from metastable.energies import ConditionalNet
from metastable.experiments.base import Row
from metastable.proposals import Diffusion, DiffusionEnergy, InterpolantFlow

from .timing import by_turns, machine, on_cores

TARGET = 300.0
MOST_PARAMETERS = 22_000


def run(
    *,
    contexts: int = 1000,
    candidates: int = 48,
    dim: int = 2,
    context_dim: int = 10,
    width: int = 56,
    layers: int = 8,
    ode_contexts: int = 50,
    rounds: int = 3,
    cores: int | None = 2,
    seed: int = 0,
) -> list[Row]:
    """How many times longer the ODE's log-densities take than the energies of the same candidates.

    The ODEs are timed on `ode_contexts` of the contexts and their time multiplied by what is left out, which the
    rows' names say: all contexts take minutes. What is left out would cost no less, since rows are independent and
    the smaller batch lies in faster memory.

    Args:
        contexts: how many.
        candidates: for each of them.
        dim: of an event.
        context_dim: of a context.
        width: of all networks' layers.
        layers: of all networks, the first and the last included.
        ode_contexts: of the contexts, those that the ODEs are timed on.
        rounds: timings of each case.
        cores: CPUs to use.
        seed: of weights, contexts and candidates.
    """
    require_count("contexts", contexts)
    require(1 <= ode_contexts <= contexts, "ode_contexts", f"between 1 and {contexts}", ode_contexts)
    models = build(dim, context_dim, width, layers, seed)
    rng = torch.Generator().manual_seed(seed)
    x, given = (torch.randn(s, generator=rng) for s in ((contexts, candidates, dim), (contexts, context_dim)))
    with on_cores(cores), torch.no_grad():
        cases = scorers(models, x, given, ode_contexts)
        for name in ("energy", "diffusion_phi"):
            cases[name]()  # warm
        times, facts = by_turns(cases, rounds), machine()
    left_out = contexts / ode_contexts
    part = "" if ode_contexts == contexts else f", timed on {ode_contexts} of {contexts} contexts"
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    diffusion: Any = models["diffusion"]
    return [
        Row(f"speed_ratio/diffusion_ode{part}", left_out * times.ratio("diffusion", "energy"), ">=", TARGET),
        Row(f"speed_ratio/flow_ode{part}", left_out * times.ratio("flow", "energy")),
        Row("speed_ratio/diffusion_phi", times.ratio("diffusion_phi", "energy")),
        Row("seconds/energy", times.median("energy")),
        *(Row(f"seconds/{name}{part}", times.median(name)) for name in ("diffusion", "flow")),
        *(Row(f"parameters/{name}", size, "<=", MOST_PARAMETERS) for name, size in sizes.items()),
        Row("heun_steps/diffusion", diffusion.steps),
        Row("divergence_times/diffusion", diffusion.scored),
        *facts,
    ]


def build(dim: int, context_dim: int, width: int, layers: int, seed: int) -> dict[str, nn.Module]:
    """An energy, and the models whose log-density is an ODE's, of the same width and depth."""
    size: dict[str, Any] = {"width": width, "layers": layers, "seed": seed}
    return {
        "energy": ConditionalNet(dim, context_dim, width, layers, seed=seed),
        "diffusion": Diffusion(dim, context_dim, **size),
        "diffusion_phi": DiffusionEnergy(dim, context_dim, **size),
        "flow": InterpolantFlow(dim, context_dim, field="residual", **size),
    }


def scorers(
    models: dict[str, nn.Module], x: Tensor, given: Tensor, ode_contexts: int
) -> dict[str, Callable[[], Tensor]]:
    """What is timed: scores `(B, K)` of all contexts by an energy, and of `ode_contexts` of them by an ODE."""
    few: Any = (x[:ode_contexts], given[:ode_contexts])
    diffusion: Any = models["diffusion"]
    flow: Any = models["flow"]
    return {
        "energy": lambda: -models["energy"](x, given),
        "diffusion_phi": lambda: -models["diffusion_phi"](x, given),
        "diffusion": lambda: diffusion.log_prob(*few),
        "flow": lambda: flow.log_prob(*few),
    }
