"""The first walkers must follow the first model: exactly where that can be had, by SMC where it cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from metastable.core.by_class import Summed, draw_labels, of_labels
from metastable.core.processes import joined
from metastable.core.protocols import ExactlyStarted, Normalisable, Sampled, is_enumerable, provides
from metastable.core.types import energy_and_grad, precise
from metastable.core.weights import log_mean_exp
from metastable.walkers.population import Population
from metastable.walkers.smc import smc
from metastable.walkers.space import space_of

from .base import Context


def start_populations(
    context: Context, steering: int, following: int, groups: int, labelled: bool = False
) -> tuple[Population, Population | None]:
    """Walkers of the current model: `steering` in one population, `following` in `groups`.

    Walkers of an energy by class, `labelled`, carry a label each, drawn from p(y | x) as the model has it.

    Exact where the energy says how (`exact_start`, or `sample` with `log_partition`). Otherwise every
    population comes from its own run of sequential Monte Carlo from `context.noise` and carries its own
    log Z₀, so that the spread between populations holds the error of the start for good.
    """
    exact = _exact(context, steering + following)
    if exact is not None:
        x, log_z0 = exact
        first = _population(context, x[:steering], log_z0.expand(1), labelled)
        rest = _population(context, x[steering:], log_z0.expand(groups), labelled) if following else None
        return first, rest
    first = _by_smc(context, steering, 1, labelled)
    return first, _by_smc(context, following, groups, labelled, True) if following else None


def _exact(context: Context, n: int) -> tuple[Tensor, Tensor] | None:
    energy, data = context.energy, context.data
    as_tensor = {"dtype": torch.float64, "device": data.device}
    if provides(energy, ExactlyStarted):
        probe = torch.cat([data[:64], context.noise.sample(64, context.rng).to(data.dtype)])
        density = energy.exact_start(probe)  # pyright: ignore
        if density is not None:
            return density.sample(n, context.rng).to(data.dtype), torch.zeros((), **as_tensor)
    if provides(energy, Sampled, Normalisable) and is_enumerable(energy):
        log_z0 = torch.as_tensor(energy.log_partition()).detach().to(**as_tensor)  # pyright: ignore
        return energy.sample(n, context.rng).detach().to(data.dtype), log_z0  # pyright: ignore
    return None


def _by_smc(context: Context, n: int, groups: int, labelled: bool, following: bool = False) -> Population:
    """Weighted walkers of the first model; their raw log-weights carry each population's own log Z₀."""
    energy = Summed(context.energy) if labelled else context.energy
    start = smc(energy, context.noise, groups, n // groups, context.rng)
    nothing_yet = torch.zeros(groups, dtype=torch.float64, device=context.data.device)
    population = _population(context, start.x.to(context.data.dtype), nothing_yet, labelled)
    log_z0 = log_mean_exp(population.by_group(start.log_weight))
    every = joined(log_z0) if following else log_z0
    noise = every.var().expand(groups) if len(every) > 1 else population.past_noise
    return population._replace(log_weight=start.log_weight, past_noise=noise)


def _population(context: Context, x: Tensor, log_z: Tensor, labelled: bool) -> Population:
    given = draw_labels(context.energy, x, context.rng) if labelled else None
    energy = of_labels(context.energy, given)
    if not space_of(context.energy).has_volume:
        with torch.no_grad():
            return Population.start(x, precise(energy(x)), x[:0], log_z, given)
    U, dU = energy_and_grad(energy, x)
    return Population.start(x, U, dU, log_z, given)
