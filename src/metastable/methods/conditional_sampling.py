r"""Samples of conditional energies: chains from the proposal, and the three stages of interpolating energies.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive estimation and
interpolating energy models*, TMLR 2024, Algorithms 2 and 4 (equation numbers of this file).

| paper | here |
|---|---|
| y, an event | `y`, `(B, n, *event)` |
| x, a context | `given`, `(B, *context)` |
| 𝓔_θ(x, y), 𝓔_θ(x, y, t) | −E(y \| given), −E(y \| given, t) |
| p_ξ(y \| x) | `proposal` |
| v̂_{t,ξ}(x, y), p_ξ^t | `flow.velocity(y, t, given)`, `flow.sample(n, rng, given, until=t)` |
| t̲ | `t_low` |
| T_mcmc | `steps` in Algorithm 2, `evaluations` (of both stages) in Algorithm 4 |
| η | `eta` |
| ℓ | candidates from which `best_of` takes one |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import ConfigError, InputError, require, require_count
from metastable.core.random import normal_like
from metastable.core.types import Bound, Walkers, bind, energy_and_grad
from metastable.kernels import HMC, MALA, ULA, Kernel, run_chain, warm_up
from metastable.proposals.given import sample_given

WARMUP = 50
"""Steps in which the default kernel finds its step size; their moves are kept, as a longer start."""
PILOTS, CAREFUL = 256, 0.95
"""Walkers with which the default chain of Algorithm 4 finds its step size, and the share of moves that is accepted
then: most, since the SDE takes steps of that length and rejects none."""


def sample_from_proposal(
    energy: Any,
    proposal: Any,
    n: int,
    given: Tensor,
    rng: torch.Generator,
    *,
    kernel: Kernel | None = None,
    steps: int = 100,
    t: float | None = None,
    engine: str = "eager",
) -> Walkers:
    """Algorithm 2: `n` draws of the proposal for each context, then a chain on E(· | given) from each of them.

    Args:
        energy: E(y | given), or E(y | given, t).
        proposal: where chains start; one without contexts starts all of them alike.
        n: chains for each context.
        given: `(B, *context)`.
        rng: of the draws and of the chains.
        kernel: the paper's Langevin step is `ULA(eta)`; by default MALA, whose step size is found by warm-up.
        steps: T_mcmc; 0 gives the proposal's own draws.
        t: the time of an energy that has one; the data are at t = 1.
        engine: `eager` or `compile`.

    Returns:
        Walkers with `x` of shape `(B, n, *event)` and equal weights. `info` has the mean `acceptance` for each
        context, `(B,)`, the `kernel`, and `evaluations`, the gradients that one walker cost.

    >>> from metastable.proposals import Gaussian
    >>> around = lambda y, given: 0.5 * (y - given[:, None]).square().sum(-1)
    >>> given, rng = torch.tensor([[-3.0], [3.0]]), torch.Generator().manual_seed(0)
    >>> walkers = sample_from_proposal(around, Gaussian(torch.zeros(1), 3.0), 400, given, rng, steps=50)
    >>> walkers.x.shape, walkers.x.mean((1, 2)).round().tolist()
    (torch.Size([2, 400, 1]), [-3.0, 3.0])
    """
    require_count("n", n)
    require_count("steps", steps, 0)
    with torch.no_grad():
        y = sample_given(proposal, n, rng, given)  # line 1
    _require_finite(y, "the proposal's draws")
    target = bind(energy, given, t)
    rows, warmup = y.flatten(0, 1), 0
    if kernel is None and steps:
        kernel, state = warm_up(MALA(0.1), target, rows, WARMUP, rng)
        rows, warmup = state.x, WARMUP + 1
    rows, info = _chain(target, rows, kernel, steps, rng, engine)  # lines 2-4
    info["evaluations"] += warmup
    return _walkers(rows, y, info)


def sample_interpolating(
    energy: Any,
    flow: Any,
    n: int,
    given: Tensor,
    rng: torch.Generator,
    *,
    t_low: float = 0.5,
    evaluations: int = 500,
    eta: float | None = None,
    kernel: Kernel | None = None,
    engine: str = "eager",
) -> Walkers:
    """Algorithm 4: the flow to t̲, the SDE (5.7) from there to t = 1, then chains on E(· | given, 1).

    Of the T gradients ∇E that a walker may cost, ⌊t̲T⌋ are the chain's and the rest the SDE's (Appendix B). What the
    chain cannot use, because its kernel's moves cost several, is the SDE's too.

    Args:
        energy: E(y | given, t).
        flow: with `sample(n, rng, given, until=t)` and `velocity(y, t, given)`, such as `InterpolantFlow`.
        n: walkers for each context.
        given: `(B, *context)`.
        rng: of everything random.
        t_low: t̲ in [0, 1), where the flow is left.
        evaluations: T.
        eta: η, in units of the events squared over the flow's time. Where field and energy are exact any η ≥ 0
            gives the same law at t = 1; the more the field is off, the more a larger η lets the energy put right.
            By default η dt is the step size of the chain, so that a step of either puts right as much. The paper
            takes the chain's step size itself, η = 10⁻³, and then the SDE hardly differs from the flow.
        kernel: of the chain; by default Langevin with step size η where that is given, as in the paper, else MALA
            with a step size that a few more walkers find at t = 1. The paper's policies take
            `HMC(step_size=eta, leapfrog=50)`.
        engine: of the chain, `eager` or `compile`.

    Returns:
        Walkers with `x` of shape `(B, n, *event)` and equal weights. `info` has `acceptance` for each context,
        `kernel`, `evaluations` (exactly T), `eta`, and `sde_steps` and `chain_steps`.

    Deviations: the paper names no integrator for (5.7); it is Euler's here, with equal steps.
    """
    require_count("n", n)
    _require_eta(eta or 0)
    target = bind(energy, given, 1.0)
    if kernel is None and eta != 0:  # at η = 0 nothing but the flow moves
        kernel = ULA(eta) if eta else _tuned(target, flow, rng)
    sde_steps, moves = split_evaluations(evaluations, t_low, kernel)
    eta = _langevin_step(kernel) * max(sde_steps, 1) / (1 - t_low) if eta is None else eta
    y = flow.sample(n, rng, given, until=t_low)  # line 1
    y = follow_sde(target, flow, y, rng, t_low=t_low, steps=sde_steps, eta=eta)  # line 2
    rows, info = _chain(target, y.flatten(0, 1), kernel, moves, rng, engine)  # line 3
    info["evaluations"] += sde_steps
    return _walkers(rows, y, info | {"eta": eta, "sde_steps": sde_steps, "chain_steps": moves})


def follow_sde(
    target: Bound, flow: Any, y: Tensor, rng: torch.Generator, *, t_low: float, steps: int, eta: float
) -> Tensor:
    """(5.7): dy = [v̂_t(y) − η∇E(y | given, t)] dt + √(2η) dW from t̲ to 1, by Euler's rule; `(B, n, *event)`.

    With the exact field and energy the law at t is p^t for every η: what the noise spreads, the drift brings back.
    """
    _require_eta(eta)
    dt = (1 - t_low) / max(steps, 1)
    velocity = _velocity(flow, target.given)
    finite_for = torch.zeros(y.shape[:2], dtype=torch.long, device=y.device)
    for k in range(steps):
        t = t_low + k * dt
        grad = energy_and_grad(target.at(t), y.flatten(0, 1)).grad.view(y.shape)
        with torch.no_grad():
            drift = velocity(y, t) - eta * grad
            y = y + dt * drift + math.sqrt(2 * eta * dt) * normal_like(y, rng)
            finite_for += y.isfinite().flatten(2).all(2)
    if bool((finite_for < steps).any()):
        context, _ = (finite_for < steps).nonzero()[0].tolist()
        t = t_low + (1 + int(finite_for[context].min())) * dt
        raise InputError(
            f"eta: the SDE left every finite region at t = {t:.3g} for context {context} (counting from 0); try "
            f"more evaluations or a smaller eta than {eta:g}"
        )
    return y


def split_evaluations(evaluations: int, t_low: float, kernel: Kernel | None) -> tuple[int, int]:
    """(steps of the SDE, moves of the chain) for T gradients: ⌊t̲T⌋ for the chain, the rest for the SDE.

    >>> from metastable.kernels import HMC
    >>> split_evaluations(1000, 0.45, ULA(1e-3)), split_evaluations(1000, 0.45, HMC(leapfrog=50))
    ((550, 450), (599, 8))
    >>> split_evaluations(100, 0.29, ULA(1e-3))
    (71, 29)
    """
    require_count("evaluations", evaluations)
    require(
        isinstance(t_low, (int, float)) and 0 <= t_low < 1,
        "t_low",
        "a time from 0 to 1, and below 1 (at 1 the flow is at its end: use sample_from_proposal)",
        t_low,
    )
    share = math.floor(t_low * evaluations + 1e-9)  # 0.29·100 is a little less than 29
    if share == 0 or kernel is None:
        return evaluations, 0
    first = kernel.evaluations(1)
    moves = (share - (first - kernel.gradients_per_step)) // kernel.gradients_per_step
    if moves < 1:
        raise ConfigError(
            "evaluations",
            f"of {evaluations} only {share} are the chain's, and one move of {kernel.name!r} needs {first}; raise "
            "evaluations, or take a cheaper kernel",
        )
    return evaluations - kernel.evaluations(moves), moves


class Best(NamedTuple):
    """The chosen event of each context, `(B, *event)`, its energy, `(B,)`, and its place among the ℓ, `(B,)`."""

    x: Tensor
    energy: Tensor
    place: Tensor


@torch.no_grad()
def best_of(energy: Any, x: Tensor, given: Tensor, *, t: float | None = None) -> Best:
    """Of ℓ candidates for each context the one of lowest energy: the most likely under the model.

    Args:
        energy: E(x | given), or E(x | given, t).
        x: candidates, `(B, ℓ, *event)`.
        given: `(B, *context)`.
        t: the time of an energy that has one.

    >>> around = lambda y, given: (y - given[:, None]).square().sum(-1)
    >>> best_of(around, torch.tensor([[[0.0], [0.9], [2.0]]]), torch.tensor([[1.0]])).x
    tensor([[0.9000]])
    """
    if len(x) != len(given):
        raise InputError(f"given: must be one for each of the {len(x)} sets of candidates, got {len(given)}")
    E = bind(energy, given, t)(x.flatten(0, 1)).view(x.shape[:2])
    lowest, place = E.min(1)
    if bool(E.isnan().any()):
        raise InputError(
            f"energy: is not a number for a candidate of context {int(E.isnan().any(1).nonzero()[0])}"
        )
    return Best(x[torch.arange(len(x), device=x.device), place], lowest, place)


def sample_conditional(
    players: Mapping[str, Any],
    n: int,
    given: Tensor,
    rng: torch.Generator,
    *,
    steps: int = 100,
    **options: Any,
) -> Walkers:
    """Samples from what a run has: its energy's own draws where that is a density, else chains from its proposal.

    Args:
        players: `energy`, and `proposal` where there is one.
        n: for each context.
        given: `(B, *context)`.
        rng: of everything random.
        steps: of the chains; a density needs none.
        options: of `sample_from_proposal`.
    """
    energy, proposal = players["energy"], players.get("proposal")
    if hasattr(energy, "sample"):
        with torch.no_grad():
            x = sample_given(energy, n, rng, given)
        return _walkers(x.flatten(0, 1), x, {"kernel": None, "evaluations": 0})
    if proposal is None:
        raise InputError(
            "proposal: this model has none that chains could start from; use sample_from_proposal"
        )
    return sample_from_proposal(energy, proposal, n, given, rng, steps=steps, **options)


# ---- pieces


def _chain(
    target: Bound, rows: Tensor, kernel: Kernel | None, steps: int, rng: torch.Generator, engine: str
) -> tuple[Tensor, dict[str, Any]]:
    """`steps` moves of every row, and what they cost and accepted."""
    info: dict[str, Any] = {"kernel": kernel, "evaluations": 0}
    if kernel is None or steps == 0:
        return rows, info
    result = run_chain(kernel, target, kernel.init(target, rows), steps, rng, engine=engine)
    info |= {
        "acceptance": result.info.acceptance.view(len(target.given), -1).mean(1),
        "evaluations": kernel.evaluations(steps),
        "temperature": kernel.temperature,
    }
    return result.state.x, info


def _walkers(rows: Tensor, like: Tensor, info: dict[str, Any]) -> Walkers:
    x = rows.view(like.shape)
    _require_finite(x, f"the chains with {info['kernel']}; try a smaller step_size or MALA:")
    return Walkers(x, torch.zeros(x.shape[:2], dtype=torch.float64, device=x.device), info)


def _tuned(target: Bound, flow: Any, rng: torch.Generator) -> MALA:
    """MALA with a step size that suits E(· | given, 1), found from a few draws of the flow, in their units."""
    with torch.no_grad():
        y = flow.sample(max(4, PILOTS // len(target.given)), rng, target.given)
    _require_finite(y, "the flow's draws")
    first = MALA(0.1 * max(float(y.var(1).mean()), 1e-30))
    return warm_up(first, target, y.flatten(0, 1), 2 * WARMUP, rng, target=CAREFUL)[0]


def _langevin_step(kernel: Kernel | None) -> float:
    """h of the Langevin step that one move, or one leapfrog step, of the kernel is about; 0 without a chain."""
    if kernel is None:
        return 0.0
    if isinstance(kernel, HMC):
        return 0.5 * kernel.step_size**2 / float(torch.as_tensor(kernel.mass).max())
    require(
        isinstance(kernel, (ULA, MALA)), "eta", f"given, since {kernel.name!r} has no step that says it", None
    )
    return float(kernel.step_size)  # pyright: ignore


def _velocity(flow: Any, given: Tensor) -> Callable[[Tensor, float], Tensor]:
    """(y, t) ↦ v̂_t(y | given), its contexts encoded once where the flow can do that."""
    if hasattr(flow, "velocity_given"):
        return flow.velocity_given(given)
    return lambda y, t: flow.velocity(y, t, given)


def _require_eta(eta: float) -> None:
    number = isinstance(eta, (int, float)) and not isinstance(eta, bool)
    require(number and 0 <= eta < math.inf, "eta", "a finite number of at least 0", eta)


def _require_finite(x: Tensor, what: str) -> None:
    lost = ~x.isfinite().flatten(1).all(1)
    if bool(lost.any()):
        raise InputError(
            f"{what} left every finite region for context {int(lost.nonzero()[0])} (counting from 0)"
        )
