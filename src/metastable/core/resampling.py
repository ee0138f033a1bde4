"""Resampling (Appendix A.4 of the Jarzynski paper): rows drawn in proportion to their weights.

Every scheme is unbiased, that is, row i is drawn `n·p_i` times on average; they differ in variance.
All arithmetic stays on the device and batches over leading dimensions, so that many independent
populations are resampled in one call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import InputError, require_choice


def _invert(p: Tensor, u: Tensor) -> Tensor:
    """Rows m with P_{m−1} < u ≤ P_m (38); `p` is `(..., N)`, `u` is `(..., n)` and need not be sorted."""
    cumulative = p.cumsum(-1)
    cumulative = cumulative / cumulative[..., -1:]
    return torch.searchsorted(cumulative, u.contiguous()).clamp(max=p.shape[-1] - 1)


def _uniform(p: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """Uniform on (0, 1]: a zero would draw the first row even where its weight is zero."""
    return 1 - torch.rand((*p.shape[:-1], n), generator=rng, device=p.device, dtype=p.dtype)


def _grid(p: Tensor, n: int) -> Tensor:
    return torch.arange(n, device=p.device, dtype=p.dtype)


def multinomial(p: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """Independent draws: u_n ~ U(0, 1]."""
    return _invert(p, _uniform(p, n, rng))


def stratified(p: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """One draw in each of n strata: u_n ~ U((n−1)/N, n/N]."""
    return _invert(p, (_grid(p, n) + _uniform(p, n, rng)) / n)


def systematic(p: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """One uniform number shifts a regular grid: u_n = u_1 + (n−1)/N."""
    return _invert(p, (_grid(p, n) + _uniform(p, 1, rng)) / n)


def residual(p: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """⌊n·p_i⌋ copies of row i for certain; the rest by systematic draws on the fractional parts.

    Written without data-dependent shapes: the certain copies fill the first places of a regular grid over
    their own counts, and each remaining place draws from the fractions.
    """
    certain = torch.floor(n * p)
    fraction = n * p - certain
    total = certain.sum(-1, keepdim=True)
    place = _grid(p, n).expand(*p.shape[:-1], n)
    copies = torch.searchsorted(certain.cumsum(-1), place.contiguous(), right=True).clamp(max=p.shape[-1] - 1)
    left = (n - total).clamp(min=1)
    shift = _uniform(p, 1, rng)
    u = ((place - total + shift) / left).clamp(0, 1)
    drawn = _invert(torch.where(fraction.sum(-1, keepdim=True) > 0, fraction, p), u)
    return torch.where(place < total, copies, drawn)


SCHEMES: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "multinomial": multinomial,
    "stratified": stratified,
    "systematic": systematic,
    "residual": residual,
}


def require_weights(log_weight: Tensor, name: str = "log_weight") -> None:
    """Refuse log-weights that say nothing about which row to draw: not a number, +inf, or −inf on every row.

    Asks the device, and the host waits for the answer.
    """
    if bool((log_weight.isnan() | (log_weight == torch.inf)).any()):
        bad = int((log_weight.isnan() | (log_weight == torch.inf)).sum())
        raise InputError(
            f"{name}: must be finite or −inf, got {bad} of {log_weight.numel()} that are NaN or +inf"
        )
    if bool((log_weight.amax(-1) == -torch.inf).any()):
        raise InputError(
            f"{name}: all {log_weight.shape[-1]} are −inf: no row has probability, so none can be drawn; look at "
            "the energy where the walkers stand"
        )


def resample_indices(
    log_weight: Tensor,
    n: int | None = None,
    *,
    scheme: str = "systematic",
    rng: torch.Generator,
    order: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """Rows drawn in proportion to exp(`log_weight`), shape `(..., n)`.

    Args:
        log_weight: raw log-weights, `(..., N)`; leading dimensions are independent populations.
        n: how many rows to draw, by default N.
        scheme: `multinomial`, `stratified`, `systematic` or `residual`.
        rng: source of randomness.
        order: a permutation of each population, `(..., N)`. Stratified and systematic draws keep the mass
            of any contiguous block of the order to within a walker or two, so an order that puts modes side
            by side keeps the modes' masses.
        check: refuse weights that cannot be drawn from (`require_weights`). Training does without, because the
            host would wait for the device, and watches its numbers elsewhere.
    """
    if check:
        require_weights(log_weight)
    n = log_weight.shape[-1] if n is None else n
    return draw_rows(torch.softmax(log_weight.double(), -1), n, scheme, rng, order)


def draw_rows(p: Tensor, n: int, scheme: str, rng: torch.Generator, order: Tensor | None = None) -> Tensor:
    """The same from probabilities `p`, `(..., N)`, in float64."""
    require_choice("scheme", scheme, SCHEMES)
    if order is None:
        return SCHEMES[scheme](p, n, rng)
    return order.gather(-1, SCHEMES[scheme](p.gather(-1, order), n, rng))
