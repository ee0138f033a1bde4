"""Are negatives samples of the model? Chains with larger steps at the same temperature say.

Appendix L of *Energy-based model training objective robust to inaccurate SGLD samples*, submission to ICLR 2025,
compares histograms of f = −E over data, over the negatives of training, and over negatives resampled with four
times the step size. A longer step changes nothing about what an exact sampler draws, so a histogram that moves with
the step belongs to the sampler, not to the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from metastable.core.batch import Batch
from metastable.core.parts import energies_of
from metastable.core.random import derive, generator
from metastable.core.resampling import resample_indices
from metastable.core.units import Coordinates
from metastable.kernels import HMC, ULA, Kernel
from metastable.kernels.base import StepKernel
from metastable.methods import Context
from metastable.methods.base import ChainMethod, Metrics, Negatives, Objective
from metastable.methods.contrastive import move
from metastable.methods.jarzynski import Jarzynski, JarzynskiState
from metastable.runs.chains import Chains
from metastable.walkers.starts import random_rows, some_rows

from .section import Judged, Measured

FACTOR = 4.0
"""How much longer the steps are, in h."""
CHAINS = 256
SMALL, AT_ONCE = 200, 64
"""Chains of more dimensions than the first run together as many as the second: what fitted in training fits now."""
LEAST_STEPS = 20
"""Steps of chains that go on from where training left them; one or two at a time would hardly move them."""
DATA = 2000
HISTOGRAMS = (
    "energies_data",
    "energies_negatives",
    "energies_larger_steps",
    "larger_steps",
    "negatives",
    "negatives_step",
)
"""Arrays of a step check in `figures.npz`; the last is the update that they are of, where that is not the end."""

Change = Callable[[ChainMethod, Any], ChainMethod | None]
"""Changes a method with chains, whose state is beside it."""


@dataclass(frozen=True)
class StepCheck:
    """Energies E(x) of three kinds of events, each float64 `(n,)`; not finite where a chain ran away.

    Attributes:
        data: of the data.
        negatives: of the negatives that the method would train with next.
        larger: of negatives from the same chains with `FACTOR` times the step; None where they have no step size.
        x: the negatives themselves, `(n, *event)`.
        steps: how many steps the chains behind `larger` made.
    """

    data: Tensor
    negatives: Tensor
    larger: Tensor | None
    x: Tensor
    steps: int


class Histograms:
    """The three histograms for the page of a run."""

    name = "negatives"

    def applies(self, judged: Judged) -> bool:
        """There must be a page, and chains as training left them."""
        return judged.chains is not None and judged.run.folder is not None and not judged.run.conditional

    def measure(self, judged: Judged) -> Measured:
        """Arrays only."""
        context = replace(judged.chains.context, data=judged.trained_on)  # whose noise may have fallen since
        check = step_check(judged.chains._replace(context=context), seed=judged.seed)
        return Measured(arrays=histograms(check, judged.coordinates, judged.run.power))


def histograms(check: StepCheck | None, coordinates: Coordinates | None, power: float) -> dict[str, Any]:
    """Energies of data, of negatives, and of negatives from longer steps; some of the negatives themselves.

    All where the data are, and as energies are there.
    """
    if check is None:
        return {}
    offset = 0.0 if coordinates is None else coordinates.events.log_det / power
    x = some_rows(check.x if coordinates is None else coordinates.events.inverse(check.x), 64)
    arrays = {
        "energies_data": check.data - offset,
        "energies_negatives": check.negatives - offset,
        "negatives": x,
    }
    if check.larger is not None:
        arrays["energies_larger_steps"] = check.larger - offset
        arrays["larger_steps"] = torch.tensor([check.steps])
    return {name: values.cpu().numpy() for name, values in arrays.items()}


def step_check(chains: Chains, *, seed: int = 0) -> StepCheck | None:
    """The three histograms of a trained method; None where it draws no negatives, or none from chains.

    Chains that begin afresh at every update (from data or noise) are run again with the same number of steps; those
    that persist go on from where they are, for at least `LEAST_STEPS` steps.

    Args:
        chains: method, context and state as training left them; none of them is changed.
        seed: of every random number.
    """
    method = chains.method
    conditional = chains.context.given is not None and method.needs != "labels"
    if conditional or not isinstance(method, (ChainMethod, Objective)):
        return None
    rng = generator(derive(seed, "step-check"), chains.context.data.device)
    context = replace(chains.context, rng=rng, engine="eager")
    x = _draw(_with_source(method, chains.state, _few(context)), context, chains.state)
    if x is None:
        return None
    longer = _with_source(method, chains.state, _longer(context))
    moved = None if longer is None else _draw(longer, context, chains.state)
    return StepCheck(
        data=energies_of(context.energy, context.data[_rows(context, DATA)]),
        negatives=energies_of(context.energy, x),
        larger=None if moved is None else energies_of(context.energy, moved),
        x=x,
        steps=0 if longer is None else _source(longer).steps,
    )


def enlarged(kernel: Kernel, factor: float = FACTOR) -> Kernel | None:
    """The kernel with `factor` times the h, at the same temperature; None where it has no step size.

    Noise that was set apart from h grows with √h, as it does where it is not, and a bound on the drift h∇E with h.
    HMC's ε is √(2h).

    >>> enlarged(ULA(step_size=1.0, noise=0.01))
    ULA(step_size=4.0, noise=0.02, drift_clip=None)
    """
    if not isinstance(kernel, StepKernel):
        return None
    if isinstance(kernel, HMC):
        return replace(kernel, step_size=math.sqrt(factor) * kernel.step_size)
    longer = replace(kernel, step_size=factor * kernel.step_size)
    if not isinstance(longer, ULA):
        return longer
    noise = None if longer.noise is None else math.sqrt(factor) * longer.noise
    clip = None if longer.drift_clip is None else factor * longer.drift_clip
    return replace(longer, noise=noise, drift_clip=clip)


def _source(method: Any) -> ChainMethod:
    return _source(method.source) if isinstance(method, Objective) else method


def _with_source(method: Any, state: Any, change: Change) -> Any:
    """The method with the chains of all its sources changed; None where those of one cannot be."""
    if not method.sources:
        return change(method, state)
    pairs = zip(method.sources, method.source_states(state), strict=True)
    parts = [_with_source(source, own, change) for source, own in pairs]
    return None if None in parts else method.with_sources(parts)


def _at_once(context: Context) -> int:
    return CHAINS if context.data[0].numel() <= SMALL else AT_ONCE


def _few(context: Context) -> Change:
    """The same chains, as many as run together here."""

    def change(source: ChainMethod, state: Any) -> ChainMethod:
        if isinstance(source, Jarzynski):  # its negatives are walkers that stand there already
            return source
        known = {f.name for f in fields(source)} & {"batch", "walkers"}  # one's own method may have neither
        return replace(source, **{min(known): _at_once(context)}) if known else source

    return change


def _longer(context: Context) -> Change:
    """A few of the same chains with longer steps."""

    def change(source: ChainMethod, state: Any) -> ChainMethod | None:
        kernel = None if source.chain_kernel is None else enlarged(source.kernel_now(state))
        if kernel is None:
            return None
        steps = source.fresh_steps or max(source.steps, LEAST_STEPS)
        alone = source.step_size is not None  # a method may read its own step, in the place of a kernel's
        changes: dict[str, Any] = {"step_size": kernel.step_size} if alone else {"kernel": kernel}  # pyright: ignore
        changes |= {"steps": steps}
        if isinstance(source, Jarzynski):
            return _Moving(**{f.name: vars(source)[f.name] for f in fields(source)} | changes)
        return replace(_few(context)(source, state), **changes)  # pyright: ignore

    return change


@dataclass(frozen=True)
class _Moving(Jarzynski):
    """Jarzynski's walkers, moved on under the parameters as they are."""

    def negatives(
        self, context: Context, state: JarzynskiState, batch: Any
    ) -> tuple[Negatives, JarzynskiState, Metrics]:
        """A few of them, with equal weights."""
        walkers = Negatives(state.steering.x, state.steering.log_weight)
        x, metrics = move(self, context, _equal(walkers, _at_once(context), context.rng))
        return Negatives(x), state, metrics


def _rows(context: Context, most: int) -> Tensor:
    n = len(context.data)
    return random_rows(n, min(n, most), context.rng, context.data.device)


def _draw(method: ChainMethod | Objective, context: Context, state: Any) -> Tensor | None:
    """Negatives of as many updates as it takes, of all sets that they have, equally weighted; None without any."""
    n, rounds = _at_once(context), []
    for _ in range(CHAINS // n):
        batch = Batch(context.data, context.given)[_rows(context, n)]
        made = method.negatives(context, state, method.takes(batch))[0]
        rounds += [_equal(part, n, context.rng) for part in method.drawn(made)]
    return torch.cat(rounds) if rounds else None


def _equal(negatives: Negatives, most: int, rng: torch.Generator) -> Tensor:
    n = min(len(negatives.x), most)
    if negatives.log_weight is None:
        return negatives.x[random_rows(len(negatives.x), n, rng, negatives.x.device)]
    return negatives.x[resample_indices(negatives.log_weight, n, scheme="systematic", rng=rng)]
