"""Independent units coded −1 and +1, and the list of all their states."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from metastable.core.errors import InputError, require_positive
from metastable.core.types import row_sum

MOST_UNITS = 22
"""Up to this many units all 2^d states are listed: seconds, and never more than a chunk in memory."""
CHUNK = 1 << 14
"""States that are listed at once."""


class Signs(nn.Module):
    """q(s) = Π_i exp(f_i s_i)/(2 cosh f_i) over s ∈ {−1, +1}^d: independent units with fields f.

    P(s_i = +1) = 1/(1 + exp(−2 f_i)) and E[s_i] = tanh f_i; all fields zero is the uniform distribution.

    Args:
        fields: f, `(*event)`.

    >>> q = Signs.uniform(3)
    >>> round(q.log_prob(torch.ones(1, 3)).item(), 4)  # −3 log 2
    -2.0794
    """

    fields: Tensor
    discrete = True

    def __init__(self, fields: Tensor):
        super().__init__()
        fields = torch.as_tensor(fields)
        if not bool(torch.isfinite(fields).all()):
            raise InputError("fields: must be finite: a unit that never changes has no density elsewhere")
        self.event_shape = tuple(fields.shape)
        self.register_buffer("fields", fields.clone())

    @classmethod
    def uniform(cls, event_shape: int | tuple[int, ...], like: Tensor | None = None) -> Signs:
        """All 2^d states alike, in the dtype and on the device of `like`."""
        like = torch.empty(0) if like is None else like
        return cls(like.new_zeros(event_shape))

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws, `(n, *event)`."""
        f = self.fields
        u = torch.rand((n, *self.event_shape), generator=rng, device=f.device, dtype=f.dtype)
        return signs(u < torch.sigmoid(2 * f), f.dtype)

    def log_prob(self, x: Tensor) -> Tensor:
        """Σ f_i s_i − log 2cosh f_i, `(B,)`; −inf for what is not −1 or +1."""
        log_q = row_sum(x * self.fields) - log_2cosh(self.fields).sum()
        coded = (x.abs() == 1).flatten(1).all(1)
        return torch.where(coded, log_q, torch.full_like(log_q, -math.inf))


def signs(up: Tensor, dtype: torch.dtype) -> Tensor:
    """+1 where `up` holds, −1 elsewhere."""
    return 2 * up.to(dtype) - 1


def log_2cosh(u: Tensor) -> Tensor:
    """log(eᵘ + e⁻ᵘ), which does not overflow and has gradient tanh u."""
    return torch.logaddexp(u, -u)


def fit_signs(x: Tensor, smoothing: float = 1.0) -> Signs:
    """Independent units with the means of `x`, `(n, *event)`; `smoothing` counts of each sign are added."""
    require_positive("smoothing", smoothing)
    up = (x > 0).sum(0) + smoothing
    return Signs((0.5 * torch.log(up / (len(x) + 2 * smoothing - up))).to(x.dtype))


def states(units: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
    """All states of `units` units, `(2^units, units)`; the last unit changes fastest.

    >>> states(2).tolist()
    [[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]
    """
    require_few(units)
    return torch.cat(list(state_chunks(units, dtype, device)))


def state_chunks(
    units: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", size: int = CHUNK
) -> Iterator[Tensor]:
    """The same, `size` at a time."""
    require_few(units)
    bits = 2 ** torch.arange(units - 1, -1, -1, device=device)
    for start in range(0, 2**units, size):
        numbers = torch.arange(start, min(start + size, 2**units), device=device)
        yield signs((numbers[:, None] & bits) > 0, dtype)


def state_numbers(x: Tensor) -> Tensor:
    """The row of each state of `x`, `(B, *event)`, in `states`, `(B,)`."""
    flat = x.flatten(1) > 0
    bits = 2 ** torch.arange(flat.shape[1] - 1, -1, -1, device=x.device)
    return (flat * bits).sum(1)


def require_few(units: int) -> None:
    """Refuse to list more states than can be listed."""
    if units > MOST_UNITS:
        raise InputError(
            f"units: 2^{units} states are too many to list, at most 2^{MOST_UNITS} are; estimate log Z with "
            "metastable.log_partition, which anneals where it cannot enumerate"
        )
