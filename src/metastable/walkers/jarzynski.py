"""Weights that follow the parameters: one step of walkers from exp(−U_k) to exp(−U_{k+1}).

D. Carbone, M. Hua, S. Coste, E. Vanden-Eijnden, *Efficient training of energy-based models using Jarzynski
equality*, NeurIPS 2023: Proposition 1, and the lines of Algorithms 1 and 2 that move and weigh walkers; U is our E.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metastable.core.precision import laid_out
from metastable.core.protocols import Sweeping, provides
from metastable.core.random import normal_like
from metastable.core.types import Energy, Walkers, energy_and_grad, precise
from metastable.kernels import ULA, ChainResult, Gibbs, Kernel, run_chain
from metastable.kernels.engine import CompiledEnergy, OneKernel, weighing_energy

from .population import Population

PROBES = 128
"""Walkers that say how far a step of θ went, where unadjusted moves do not say it by the way."""
WATCHED = 1024
"""Walkers whose distances are measured, evenly spaced: a diagnostic does not need a pass over all."""


class Move(NamedTuple):
    """What some walkers of a population did in one update: squared distances and acceptances.

    `shift` is v, the variance of U_{k+1} − U_k over walkers that stood still, `()`, where that is known.
    """

    moved: Tensor
    acceptance: Tensor
    shift: Tensor | None = None


def shift_of(log_weight: Tensor, change: Tensor) -> Tensor:
    """v = Var(U_{k+1} − U_k) under the weights before the step, `()`: twice the KL divergence that θ moved by."""
    p = torch.softmax(log_weight, 0)
    change = change.to(p)
    return torch.dot(p, (change - torch.dot(p, change)).square())


def paced(log_factor: Tensor, shift: Tensor, pace: float) -> Tensor:
    """log of the factor on the learning rate for the next update, by feedback on v.

    v is noisy and skewed: near `pace` the correction is slow and linear in v, so that it is the mean of v which
    settles there. A v far above (e²) or below (e⁻⁴) is made good at once, since v grows with the square of the
    rate: down without limit, and up by a factor e at most.
    """
    off = torch.log(pace / shift.clamp(min=1e-30)).clamp(-20, 20)
    slow, fast = 0.05 * (1 - torch.exp(-off)), (0.5 * off).clamp(max=1.0)
    far = (off < -2) | (off > 4)
    return (log_factor + torch.where(far, fast, slow)).clamp(max=0.0)


def langevin_step(
    kernel: ULA,
    energy: Energy,
    walkers: Population,
    rows: Tensor | None,
    rng: torch.Generator,
    *,
    theta_moved: bool = True,
    probe: bool = False,
    in_turn: bool = False,
) -> tuple[Population, Move]:
    """Algorithm 2, lines 8–15 (Algorithm 1, lines 7–10, when `rows` is None and every walker moves).

    `energy` is U_{k+1}; `walkers` caches U_k and ∇U_k, the latter at `rows` only. Where θ stayed the two are the
    same, and the weight of a step is its own Metropolis–Hastings ratio (Proposition 1 with θ_{k+1} = θ_k). `probe`
    asks for v, which costs a few energies where every walker moves. With `in_turn` walkers that stand still keep U
    and weight of their last turn: see `Population.caught_up`.
    """
    X, A_k, U_k, dU_k = walkers.take(rows)
    X = laid_out(X, energy)
    ξ = normal_like(X, rng)
    Y = kernel.move(X, dU_k, ξ)  # line 9
    U_next, dU_next = energy_and_grad(walkers.energy_at(energy, rows), Y)
    A = A_k + kernel.log_weight_increment(ξ, U_k, dU_k, U_next, dU_next)  # line 10: α_k(X, Y) − α_{k+1}(Y, X)
    v = None
    with torch.no_grad():  # walkers that stand still need no gradient
        if theta_moved and rows is not None and not in_turn:
            U_all = precise(walkers.energy_at(energy)(walkers.x))
            v = shift_of(walkers.log_weight, U_all - walkers.energy) if probe else None
            walkers = walkers.reweigh(U_all)  # line 14
        elif probe:
            n = min(PROBES, len(X))
            some = slice(0, n * (len(X) // n), len(X) // n)
            seen = walkers.energy_at(energy, some if rows is None else rows[some])
            v = shift_of(A_k[some], precise(seen(X[some])) - U_k[some])
    every = max(1, len(X) // WATCHED)
    moved = (Y[::every] - X[::every]).flatten(1).square().sum(1)
    return walkers.put(rows, Y, A, U_next, dU_next), Move(moved, torch.ones_like(moved), v)


def keeps_energy(kernel: Kernel, energy: Energy) -> bool:
    """Whether the chain's state holds E where the walker stands; a Gibbs sweep never needs it."""
    return not (isinstance(kernel, Gibbs) and provides(energy, Sweeping))


def reweigh_then_move(
    kernel: Kernel,
    energy: Energy,
    walkers: Population,
    rows: Tensor | None,
    steps: int,
    rng: torch.Generator,
    engine: str,
    step_size: Tensor | None = None,
    probe: bool = False,
    in_turn: bool = False,
) -> tuple[Population, Move]:
    """For a kernel that leaves each model invariant: A += U_k − U_{k+1} where the walker stands, then move.

    Annealed importance sampling along the path of θ; a move that keeps the model does not change a weight. Where
    every walker moves, the energies that weigh them are those that their chains begin with. `step_size`, where it
    is not the kernel's own, must not depend on what happens here; `probe` asks for v. With `in_turn` only those in
    `rows` are weighed.
    """
    known = keeps_energy(kernel, energy)
    own = energy if walkers.given is not None else weighing_energy(kernel, energy, walkers.x, rng, engine)
    made = None
    if isinstance(own, OneKernel) and not in_turn:
        made = launched(own, kernel, walkers, rows, steps, step_size)
    changed = rows if made is None else None
    if made is None:
        X = laid_out(walkers.take(rows)[0], energy)
        if isinstance(own, CompiledEnergy):
            energy, engine = own, "eager"
        moving = walkers.energy_at(energy, rows)
        begin = kernel.init(moving, X)
        with torch.no_grad():
            if in_turn and rows is not None:
                U = walkers.energy.index_copy(0, rows, begin.energy if known else precise(moving(X)))
            else:
                U = begin.energy if known and rows is None else precise(walkers.energy_at(energy)(walkers.x))
        # fused and compiled chains would end with energies of another rounding than those they are weighed with
        engine = "eager" if engine in ("auto", "fused") or walkers.given is not None else engine
        made = U, run_chain(kernel, moving, begin, steps, rng, engine=engine, step_size=step_size)
    U, ((Y, U_new, _), info, *_) = made
    weighed = rows if in_turn and rows is not None else slice(None)
    v = shift_of(walkers.log_weight[weighed], (U - walkers.energy)[weighed]) if probe else None
    walkers = walkers.reweigh(U)
    if not known:
        with torch.no_grad():
            U_new = precise(walkers.energy_at(energy, rows)(Y))
    A = walkers.take(changed)[1]
    return walkers.put(changed, Y, A, U_new, walkers.grad[:0]), Move(steps * info.moved, info.acceptance, v)


def launched(
    energy: OneKernel,
    kernel: Kernel,
    walkers: Population,
    rows: Tensor | None,
    steps: int,
    step_size: Tensor | None,
) -> tuple[Tensor, ChainResult] | None:
    """U_{k+1} where every walker stands, and all walkers after some have moved; None where Triton fails.

    Every energy comes from one compiled kernel, laid out for all walkers whether they move or not: weights are
    exact for the function as it is computed there.
    """
    made = energy.adjusted(kernel, walkers.x, steps if rows is None else 0, step_size)
    if rows is None or made is None:
        return made
    moved = energy.adjusted(kernel, walkers.x, steps, step_size, rows=rows, into=made[1].state)
    return None if moved is None else (made[0], moved[1])


def fixed_parameters(
    kernel: ULA, energy: Energy, x: Tensor, steps: int, rng: torch.Generator, threshold: float = 0.5
) -> Walkers:
    """Sampling that goes on at fixed θ: ULA whose weights remove the bias of h > 0 (end of Section 3.2)."""
    zero = torch.zeros(1, dtype=torch.float64, device=x.device)
    walkers = Population.start(x, *energy_and_grad(energy, x), zero)
    for _ in range(steps):
        walkers, _ = langevin_step(kernel, energy, walkers, None, rng, theta_moved=False)
        walkers = walkers.resample(walkers.ess() < threshold, "systematic", "principal", rng)
    info = {"ess_fraction": float(walkers.ess()[0]), "resamplings": int(walkers.resamplings[0])}
    return Walkers(walkers.x, walkers.log_weight, {**info, "kernel": kernel})
