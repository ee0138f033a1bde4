"""Checks an arbitrary callable once, and names what is wrong with it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.batch import Batch
from metastable.core.errors import EnergyError, InputError
from metastable.core.protocols import ClosedForm, has_time, provides
from metastable.core.types import Bound, Energy, bind, is_discrete


def check_energy(energy: Any, example: Tensor, *, walls: bool = False) -> Energy:
    """Evaluate `energy` on a few rows and raise `EnergyError` with the reason if it is not one.

    Args:
        energy: what should map `(B, *event)` to `(B,)`.
        example: at least one row of the events it will see, `(B, *event)`.
        walls: it may be constant on these rows, as one that is +inf outside a region and 0 inside is.

    Returns:
        The same object, now known to be callable, one value per row, finite, differentiable in x, and with
        each row's energy independent of the other rows. An energy over units coded −1 and +1 (`discrete`) need
        not be differentiable, but every row of `example` must be so coded.
    """
    _check(energy.first() if isinstance(energy, Bound) else energy, example, walls)
    return energy


def inside_walls(energy: Any, x: Tensor) -> Tensor:
    """Rows on which the energy is not +inf, `(B,)`: where a density may be; all of them for one of contexts."""
    if isinstance(energy, Bound) or is_discrete(energy):
        return torch.ones(len(x), dtype=torch.bool, device=x.device)
    _check_kind(energy)
    with torch.no_grad():
        values = _call(energy, x)
    _check_shape(values, x)
    return values != torch.inf


def _check(energy: Any, example: Tensor, walls: bool) -> None:
    _check_kind(energy)
    if not isinstance(example, Tensor) or not example.is_floating_point() or example.shape[:1] in ((), (0,)):
        raise InputError(
            f"example: must be a floating point tensor (B, *event) with B ≥ 1, got {_describe(example)}"
        )
    x = torch.cat([example[:3]] * 3)[:3].detach().clone()
    if isinstance(energy, nn.Module):
        _check_placement(energy, x)
    discrete = is_discrete(energy)
    if discrete:
        require_signs(example, "data")
    with torch.enable_grad():
        y = x.requires_grad_(True)
        values = _call(energy, y)
        _check_values(values, y)
        if not discrete and not (walls and bool((values == values[0]).all())):
            _check_own_gradient(energy, x.detach(), values.detach(), _check_gradient(values, y))
    _check_rows(energy, x.detach(), values.detach())


def require_signs(x: Tensor, field: str) -> None:
    """Refuse values other than −1 and +1, and say how bits are recoded."""
    wrong = x.abs() != 1
    if bool(wrong.any()):
        bits = bool(((x == 0) | (x == 1)).all())
        advice = "recode bits with 2*x − 1" if bits else "threshold it first"
        found = ", ".join(f"{v:g}" for v in x[wrong].unique()[:3].tolist())
        raise InputError(
            f"{field}: a discrete energy is over units coded −1 and +1, got values such as {found}; {advice}"
        )


def check_conditional(energy: Any, example: Batch, name: str = "") -> Any:
    """Like `check_energy`, for a conditional energy E(x | given) and events with their contexts.

    It must take events `(B, K, *event)`, K for each of the contexts `(B, *context)`, and return `(B, K)`. One with
    a time `t` must take one for each event too, `(B, K)`. Errors call it by its `name`, else by its class.
    """
    _check_kind(energy)
    try:
        _signature(energy).bind_partial("events", "contexts")
    except TypeError as error:
        raise EnergyError(
            f"energy: must take events and their contexts, (x, given), which {name or type(energy).__name__} does "
            "not; take one that does, such as 'conditional', or 'flow' for method 'density', or leave given out"
        ) from error
    few = example[:2]
    x = torch.stack([few.x.detach()] * 3, 1)
    # which checks that there is one value for each event
    _call(bind(energy, few.conditions), x.flatten(0, 1))
    if _has_time(energy):
        _call_at_a_time(bind(energy, few.conditions, 0.5), x)
    check_energy(bind(energy, few.conditions[:1]), few.x[:1])
    return energy


def _check_kind(energy: Any) -> None:
    if isinstance(energy, type):
        raise EnergyError(f"energy: got the class {energy.__name__}; pass an instance, {energy.__name__}(…)")
    if not callable(energy):
        raise EnergyError(f"energy: must be callable, (B, *event) → (B,), got {type(energy).__name__}")


def _has_time(energy: Any) -> bool:
    """Whether it says so, or takes a `t`."""
    says = has_time(energy)
    if says is not None:
        return bool(says)
    return "t" in _signature(energy).parameters


def _signature(energy: Any) -> inspect.Signature:
    return inspect.signature(getattr(energy, "forward", energy))


def _call_at_a_time(energy: Bound, x: Tensor) -> None:
    try:
        energy(x.flatten(0, 1))
    except Exception as error:
        raise EnergyError(
            f"energy: raised {type(error).__name__} on events {tuple(x.shape)} with t {tuple(x.shape[:2])}, one "
            f"time for each event: {error}"
        ) from error


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _call(energy: Energy, x: Tensor) -> Any:
    try:
        return energy(x)
    except EnergyError:
        raise
    except Exception as error:
        raise EnergyError(
            f"energy: raised {type(error).__name__} on a batch of shape {tuple(x.shape)}: {error}"
        ) from error


def _check_placement(energy: nn.Module, x: Tensor) -> None:
    for name, parameter in energy.named_parameters():
        if parameter.device != x.device:
            raise EnergyError(f"energy: parameter {name!r} is on {parameter.device}, the data on {x.device}")
        return


def _check_shape(values: Any, x: Tensor) -> None:
    B = x.shape[0]
    if not isinstance(values, Tensor):
        raise EnergyError(f"energy: must return a torch.Tensor of shape (B,), got {type(values).__name__}")
    if values.dim() == 0:
        raise EnergyError(
            "energy: returned a scalar; it must return one energy per row, shape (B,): "
            "do not take a mean or sum over the batch"
        )
    if tuple(values.shape) == (B, 1):
        raise EnergyError(
            f"energy: returned shape ({B}, 1) for {B} rows; it must be ({B},): add .squeeze(-1)"
        )
    if tuple(values.shape) != (B,):
        raise EnergyError(
            f"energy: returned shape {tuple(values.shape)} for input {tuple(x.shape)}; it must be ({B},)"
        )
    if not values.is_floating_point():
        raise EnergyError(f"energy: must return floating point numbers, got {values.dtype}")


def _check_values(values: Any, x: Tensor) -> None:
    _check_shape(values, x)
    bad = ~torch.isfinite(values)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise EnergyError(f"energy: must be finite on the data, got {values[row].item()} on row {row}")


def _check_gradient(values: Tensor, x: Tensor) -> Tensor:
    if not values.requires_grad:
        raise EnergyError(
            "energy: its output does not depend on x through differentiable operations "
            "(a detach(), .item(), numpy call or torch.no_grad() inside?)"
        )
    (grad,) = torch.autograd.grad(values.sum(), x, allow_unused=True)
    if grad is None:
        raise EnergyError("energy: its output does not depend on x (no gradient reaches the input)")
    if not torch.isfinite(grad).all():
        raise EnergyError("energy: its gradient in x is not finite on the data (sqrt or log at zero?)")
    return grad


def _check_own_gradient(energy: Any, x: Tensor, values: Tensor, grad: Tensor) -> None:
    """What an energy's own `value_and_grad` says must be what automatic differentiation of it says."""
    own = energy.value_and_grad if provides(energy, ClosedForm) else None
    if own is None:
        return
    try:
        with torch.no_grad():
            found = own(x)
    except Exception as error:  # one that stands in other units may stumble over what is inside it
        raise EnergyError(
            "energy.value_and_grad: must return energies (B,) and gradients (B, *event); raised "
            f"{type(error).__name__} on a batch of shape {tuple(x.shape)}: {error}"
        ) from error
    if not isinstance(found, tuple) or len(found) != 2:
        raise EnergyError(
            "energy.value_and_grad: must return a pair, energies (B,) and gradients (B, *event), got "
            f"{_describe(found)}"
        )
    for what, mine, known in zip(("energies", "gradients"), found, (values, grad), strict=True):
        if not isinstance(mine, Tensor) or mine.shape != known.shape:
            raise EnergyError(
                f"energy.value_and_grad: {what} must have shape {tuple(known.shape)} for input {tuple(x.shape)}, "
                f"got {_describe(mine)}"
            )
        off = float((mine - known).abs().max())
        if not off <= 1e-2 * (1 + float(known.abs().max())):
            raise EnergyError(
                f"energy.value_and_grad: {what} must be those of the energy itself, by automatic "
                f"differentiation; off by {off:.3g} on the data"
            )


def _check_rows(energy: Energy, x: Tensor, values: Tensor) -> None:
    scale = 1e-3 * (1 + values.abs().max())
    for row, value in zip(x.split(1), values, strict=True):
        alone = _call_alone(energy, row)[0]
        if (alone - value).abs() > scale:
            raise EnergyError(
                "energy: the energy of a row changes with the other rows of its batch "
                f"({value.item():.6g} in a batch of 3, {alone.item():.6g} alone): "
                "remove BatchNorm and dropout, or put the module in eval mode"
            )


def _call_alone(energy: Energy, row: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            alone = energy(row)
    except Exception as error:
        raise EnergyError(
            f"energy: takes a batch of 3 rows, but on one row alone raised {type(error).__name__}: {error}; "
            "remove BatchNorm, or put the module in eval mode"
        ) from error
    if tuple(alone.shape) != (1,):
        raise EnergyError(
            f"energy: returned shape {tuple(alone.shape)} for a batch of one row; it must be (1,): "
            "use .squeeze(-1), which keeps the batch, not .squeeze()"
        )
    return alone
