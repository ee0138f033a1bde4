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
| η | `eta`, one for each context unless given |
| ℓ | candidates from which `best_of` takes one |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import ConfigError, InputError, require, require_count
from metastable.core.protocols import JointlyScored, Sampled, provides
from metastable.core.types import Bound, Walkers, bind
from metastable.kernels import HMC, MALA, ULA, Kernel
from metastable.proposals.given import sample_given

from .conditional_chains import checked_walkers, choose_kernel, require_finite, run_chains, said_of_starts
from .conditional_starts import Starts, draw_starts, own_draws, pilot_candidates
from .conditional_tuning import Starter, Tuned
from .draw_pool import OnDensity
from .interpolating_sde import follow_sde, require_eta

SHARE = 0.1
"""Of the variance that noise still has, what a step on an energy on its flow moves by."""
CAREFUL = 0.95
"""Share of moves that the default chain of Algorithm 4 accepts: most, since the SDE takes steps of that length and
rejects none."""


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
    engine: str = "auto",
    candidates: int | None = None,
    tune: bool | None = None,
) -> Walkers:
    """Algorithm 2: `n` draws of the proposal for each context, then a chain on E(· | given) from each of them.

    Chains hardly go from one branch of a density to another. So starts are taken in proportion to exp(−E)/p_ξ among
    `candidates` times as many draws (`conditional_starts`), and each context has a step size of its own
    (`conditional_tuning`).

    Args:
        energy: E(y | given), or E(y | given, t).
        proposal: where chains start; one without contexts starts all of them alike.
        n: chains for each context.
        given: `(B, *context)`.
        rng: of the draws and of the chains.
        kernel: the paper's Langevin step is `ULA(eta)`; by default MALA, with a step size for each context.
        steps: T_mcmc; 0 gives the starts.
        t: the time of an energy that has one; the data are at t = 1.
        engine: how chains run, as `run_chain` takes it.
        candidates: draws of the proposal for each start. By default 32, and at least 1,024 for a context; 4, and at
            least 256, where the proposal solves an ODE, each of whose draws costs as much as some hundred
            energies. 1 starts at the proposal's own draws, as the paper does; so does a proposal whose density is
            an estimate.
        tune: find a step size for each context; by default for the default kernel only, while a kernel that is
            given keeps its own. `HMC(0.1, leapfrog=5)` with `tune=True` takes steps of a length that suits each.

    Returns:
        Walkers with `x` of shape `(B, n, *event)` and equal weights. `info` has, for each context, `(B,)`, the mean
        `acceptance`, the `step_size`, and `start_ess_given`, the effective draws behind its starts; their sum,
        each counted up to n, as `start_ess`; the `kernel`; `warnings` in words; `energy_rows`, every energy that
        was evaluated, for weights, for step sizes and in the chains, and `evaluations`, how many for a walker.

    Deviations: the paper starts at the proposal's own draws (`candidates=1`) and takes one step size for all.

    >>> from metastable.proposals import Gaussian
    >>> around = lambda y, given: 0.5 * (y - given[:, None]).square().sum(-1)
    >>> given, rng = torch.tensor([[-3.0], [3.0]]), torch.Generator().manual_seed(0)
    >>> walkers = sample_from_proposal(around, Gaussian(torch.zeros(1), 3.0), 400, given, rng, steps=50)
    >>> walkers.x.shape, walkers.x.mean((1, 2)).round().tolist()
    (torch.Size([2, 400, 1]), [-3.0, 3.0])
    """
    require_count("n", n)
    require_count("steps", steps, 0)
    if candidates is not None:
        require_count("candidates", candidates)
    target = bind(energy, given, t)
    starts = draw_starts(target, proposal, n, rng, candidates)  # line 1
    require_finite(starts.y, "the proposal's draws")
    chain, tuned = choose_kernel(kernel, tune, target, _weighed_starts(proposal)) if steps else (kernel, None)
    rows, info = run_chains(target, starts.y.flatten(0, 1), chain, steps, rng, engine, tuned)  # lines 2-4
    cost = starts.rows + (0 if tuned is None else tuned.rows)
    return checked_walkers(rows, starts.y, info | said_of_starts(starts), cost)


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
    engine: str = "auto",
    candidates: int = 1,
    tune: bool | None = None,
    anneal: float = 1.0,
) -> Walkers:
    """Algorithm 4: the flow to t̲, the SDE (5.7) from there to t = 1, then chains on E(· | given, 1).

    Of the T gradients ∇E that a walker may cost, ⌊t̲T⌋ are the chain's and the rest the SDE's (Appendix B). What the
    chain cannot use, because its kernel's moves cost several, is the SDE's too, and the SDE pays for the gradient
    that some kernels begin with.

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
            By default η dt is the step size of the chain, so that a step of either puts right as much; each context
            then has its own. The paper takes the chain's step size itself, η = 10⁻³, and then the SDE hardly
            differs from the flow.
        kernel: of the chain; by default Langevin with step size η where that is given, as in the paper, else MALA
            with a step size for each context, which a few more walkers find at t = 1. The paper's policies take
            `HMC(step_size=eta, leapfrog=50)`.
        engine: of the SDE and of the chain, as `run_chain` takes it.
        candidates: draws of the flow at t̲ for each walker, of which one is taken in proportion to
            exp(−E(· | given, t̲))/p_ξ^t̲; 1 takes the flow's own, as the paper does. With more, branches have the
            shares of the energy, not of the flow, for as many draws of the flow with their densities.
        tune: find a step size for each context; by default where neither `kernel` nor `eta` is given.
        anneal: what the chain's step size is multiplied with at its end, towards which it falls; 1 keeps it.

    Returns:
        Walkers with `x` of shape `(B, n, *event)` and equal weights. `info` is that of `sample_from_proposal`, with
        `eta` (a number, or one for each context), `sde_steps` and `chain_steps`. T is what a walker costs in the
        two stages; `evaluations` has what step sizes and candidates cost beside it.

    Deviations: the paper names no integrator for (5.7); it is Euler's here, with equal steps. It has one step size
    for all contexts. An energy on its proposal (`OnProposal`) has no chain, whose energies would each be an ODE
    solved: all of T is the SDE's, with ∇ log p_ξ^t from the flow's velocity. There `eta` is η dt as a share of the
    variance that noise still has at t, below 1 and `SHARE` by default; where flow and data differ the SDE stays a
    little on the side of the flow, by less the more steps and the larger a share it has.
    """
    require_count("n", n)
    require_count("candidates", candidates)
    require_eta(eta or 0)
    require(0 < anneal <= 1, "anneal", "above 0 and at most 1", anneal)
    stands = provides(energy, OnDensity)
    chain = {"kernel": kernel, "tune": tune, "candidates": candidates != 1 and candidates}
    for name, value in {**chain, "anneal": anneal != 1 and anneal}.items() if stands else ():
        require(not value, name, "left out for an energy on its proposal, which has no chain", value)
    require(not stands or (eta or 0) < 1, "eta", "below 1 on a proposal, a share of its noise", eta)
    target, tuned = bind(energy.network if stands else energy, given, 1.0), None
    if kernel is None and eta and not stands:
        kernel = ULA(eta)
    flows = kernel is None and eta == 0  # nothing but the flow moves
    if not (stands or flows):
        kernel, tuned = choose_kernel(kernel, tune, target, _flow_starts(flow), CAREFUL)
    sde_steps, moves = split_evaluations(evaluations, t_low, kernel)
    per_step = max(sde_steps, 1) / (1 - t_low)
    usual = SHARE if stands else _langevin_step(kernel, tuned) * per_step
    rate: float | Tensor = usual if eta is None else eta
    starts = _starts_at(target, flow, n, rng, t_low, candidates)  # line 1
    # line 2
    how = {"steps": sde_steps, "eta": rate, "engine": engine, "stands": stands}
    y = follow_sde(target, flow, starts.y, rng, t_low=t_low, **how)
    rows, info = run_chains(target, y.flatten(0, 1), kernel, moves, rng, engine, tuned, anneal)  # line 3
    cost = sde_steps * rows.shape[0] + starts.rows + (0 if tuned is None else tuned.rows)
    info |= {"eta": rate, "sde_steps": sde_steps, "chain_steps": moves} | said_of_starts(starts)
    return checked_walkers(rows, y, info, cost)


def split_evaluations(evaluations: int, t_low: float, kernel: Kernel | None) -> tuple[int, int]:
    """(steps of the SDE, moves of the chain) for T gradients: ⌊t̲T⌋ for the chain's moves, the rest for the SDE.

    A gradient that a kernel takes before its first move is the SDE's, which keeps one step at least.

    >>> from metastable.kernels import HMC
    >>> split_evaluations(1000, 0.45, ULA(1e-3)), split_evaluations(1000, 0.45, HMC(leapfrog=50))
    ((550, 450), (549, 9))
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
    each, before = kernel.gradients_per_step, kernel.evaluations(1) - kernel.gradients_per_step
    moves = min(share, evaluations - before - 1) // each
    if moves < 1:
        raise ConfigError(
            "evaluations",
            f"of {evaluations} only {share} are the chain's, and one move of {kernel.name!r} needs {each} beside "
            f"{before + 1} of the SDE; raise evaluations, or take a cheaper kernel",
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
    rule = "candidates, (B, ℓ, *event), of at least one"
    several = isinstance(x, Tensor) and x.dim() >= 2 and x.shape[1] > 0
    require(several, "x", rule, tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__)
    if len(x) != len(given):
        raise InputError(f"given: must be one for each of the {len(x)} sets of candidates, got {len(given)}")
    return lowest_of(x, bind(energy, given, t)(x.flatten(0, 1)).view(x.shape[:2]))


def lowest_of(x: Tensor, E: Tensor) -> Best:
    """Of candidates `(B, ℓ, *event)` with energies `(B, ℓ)` the one of lowest energy."""
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
    if provides(energy, Sampled):
        with torch.no_grad():
            x = sample_given(energy, n, rng, given)
        return checked_walkers(x.flatten(0, 1), x, {"kernel": None}, 0)
    if proposal is None:
        raise InputError(
            "proposal: this model has none that chains could start from; use sample_from_proposal"
        )
    return sample_from_proposal(energy, proposal, n, given, rng, steps=steps, **options)


# ---- pieces


def _weighed_starts(proposal: Any) -> Starter:
    def start(target: Bound, n: int, rng: torch.Generator) -> Starts:
        starts = draw_starts(target, proposal, n, rng, pilot_candidates(proposal, n * len(target.given)))
        require_finite(starts.y, "the proposal's draws")
        return starts

    return start


def _flow_starts(flow: Any) -> Starter:
    def start(target: Bound, n: int, rng: torch.Generator) -> Starts:
        with torch.no_grad():
            y = flow.sample(n, rng, target.given)
        require_finite(y, "the flow's draws")
        return own_draws(y)

    return start


class _CutFlow:
    """A flow at t̲ as the proposal that `draw_starts` takes."""

    def __init__(self, flow: Any, t: float):
        self.flow, self.t = flow, t
        self.event_shape, self.context_shape = flow.event_shape, flow.context_shape or ()  # always given one

    def sample(self, n: int, rng: torch.Generator, given: Tensor) -> Tensor:
        return self.flow.sample(n, rng, given, until=self.t)

    def log_prob(self, y: Tensor, given: Tensor) -> Tensor:
        return self.flow.log_prob(y, given, at=self.t)

    def sample_and_log_prob(self, n: int, rng: torch.Generator, given: Tensor) -> tuple[Tensor, Tensor]:
        return self.flow.sample_and_log_prob(n, rng, given, until=self.t)


def _starts_at(
    target: Bound, flow: Any, n: int, rng: torch.Generator, t_low: float, candidates: int
) -> Starts:
    """Walkers of the flow at t̲, weighed there by E(· | given, t̲) where there are several for each."""
    if candidates == 1:
        return own_draws(flow.sample(n, rng, target.given, until=t_low))
    able = provides(flow, JointlyScored)
    require(
        able, "candidates", "1 for a flow without sample_and_log_prob(n, rng, given, until=t)", candidates
    )
    return draw_starts(target.at(t_low), _CutFlow(flow, t_low), n, rng, candidates)


def _langevin_step(kernel: Kernel | None, tuned: Tuned | None) -> Any:
    """h of the Langevin step that one move, or one leapfrog step, of the kernel is about; 0 without a chain.

    One for each context, `(B,)`, where steps were tuned.
    """
    if kernel is None:
        return 0.0
    require(
        isinstance(kernel, (ULA, MALA, HMC)),
        "eta",
        f"given, since {kernel.name!r} has no step that says it",
        None,
    )
    step: Any = kernel.step_size if tuned is None else tuned.step_size  # pyright: ignore
    if isinstance(kernel, HMC):
        return 0.5 * step**2 / kernel.masses[1]
    return step
