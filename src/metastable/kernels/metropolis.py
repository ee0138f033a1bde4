"""The accept step that every adjusted kernel shares."""

from __future__ import annotations

import torch
from torch import Tensor

from metastable.core.types import per_row, row_dot

from .base import ChainState, Info


def accept(old: ChainState, new: ChainState, log_ratio: Tensor, uniform: Tensor) -> tuple[ChainState, Info]:
    """Take `new` with probability min(1, exp(log_ratio)), row by row; a non-finite ratio is a rejection.

    A proposal that left the region where the energy is finite has probability zero, and saying so here keeps
    the chain valid where a NaN would not.
    """
    log_ratio = torch.where(torch.isfinite(log_ratio), log_ratio, torch.full_like(log_ratio, -torch.inf))
    probability = torch.exp(log_ratio.clamp(max=0))
    taken = uniform < probability
    wide = per_row(taken, old.x)
    state = ChainState(
        torch.where(wide, new.x, old.x),
        torch.where(taken, new.energy, old.energy),
        torch.where(wide, new.grad, old.grad) if old.grad.numel() else old.grad,
    )
    displacement = state.x - old.x
    return state, Info(probability, row_dot(displacement, displacement))
