"""The Metropolis-adjusted Langevin algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from metastable.core.types import Energy, energy_and_grad, row_dot

from .base import ChainState, Info, Noise, StepKernel
from .metropolis import accept


@dataclass(frozen=True)
class MALA(StepKernel):
    """A Langevin proposal x′ = x − h∇E(x) + √(2h)ξ, accepted with the Metropolis–Hastings probability.

    log ratio = E(x) − E(x′) + log q(x | x′) − log q(x′ | x), with
    log q(y | x) = −|y − x + h∇E(x)|²/(4h) and the squares expanded so that the large parts cancel exactly:
    log ratio = α(x, x′) − α(x′, x) with α(x, y) = E(x) + ½(y−x)·∇E(x) + ¼h|∇E(x)|².

    Energy and gradient are kept in the state: one gradient a step.
    """

    name: ClassVar[str] = "mala"
    target_acceptance: ClassVar[float] = 0.574

    def init(self, energy: Energy, x: Tensor) -> ChainState:
        """Energies and gradients at `x`."""
        return ChainState(x, *energy_and_grad(energy, x))

    def step(
        self, energy: Energy, state: ChainState, noise: Noise, step_size: Tensor | float
    ) -> tuple[ChainState, Info]:
        """Propose, evaluate, accept or stay."""
        x, h = state.x, step_size
        y = x - h * state.grad + (2 * h) ** 0.5 * noise.normal
        new = ChainState(y, *energy_and_grad(energy, y))
        log_ratio = langevin_alpha(state, y, h) - langevin_alpha(new, x, h)
        return accept(state, new, log_ratio, noise.uniform)


def langevin_alpha(state: ChainState, y: Tensor, h: Tensor | float) -> Tensor:
    """α(x, y) = E(x) + ½(y−x)·∇E(x) + ¼h|∇E(x)|², (6) of the Jarzynski paper, shape `(B,)`."""
    return state.energy + row_dot(0.5 * (y - state.x) + 0.25 * h * state.grad, state.grad)
