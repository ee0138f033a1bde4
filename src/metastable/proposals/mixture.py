"""Mixtures of proposals, with their exact density."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.errors import InputError, require, require_count
from metastable.core.protocols import Reparametrised, is_biased, provides
from metastable.core.types import Proposal


class Mixture(nn.Module):
    """p(x) = Σ_k w_k p_k(x), with log p by logsumexp.

    Args:
        components: proposals over events of one shape.
        weights: positive numbers in the proportions of the w_k, which are fixed; equal by default.

    >>> from metastable.proposals import Gaussian
    >>> q = Mixture([Gaussian(torch.zeros(1)), Gaussian(torch.ones(1))], (1.0, 3.0))
    >>> q.weights.tolist()
    [0.25, 0.75]
    >>> round(q.log_prob(torch.zeros(1, 1)).exp().item(), 4)  # ¼·0.3989 + ¾·0.2420
    0.2812
    """

    weights: Tensor

    def __init__(self, components: Sequence[nn.Module], weights: Sequence[float] | None = None):
        super().__init__()
        require_count("mixture.components", len(components))
        for component in components:
            ok = isinstance(component, nn.Module) and isinstance(component, Proposal)
            require(ok, "mixture.components", "modules with sample, log_prob and event_shape", component)
        shapes = {tuple(c.event_shape) for c in components}  # pyright: ignore
        if len(shapes) > 1:
            raise InputError(f"mixture.components: events have different shapes: {sorted(shapes)}")
        given = torch.ones(len(components)) if weights is None else torch.as_tensor(weights)
        sound = given.shape == (len(components),) and bool((given > 0).all())
        require(sound, "mixture.weights", f"{len(components)} positive numbers", given.tolist())
        self.event_shape = shapes.pop()
        self.components = nn.ModuleList(components)
        self.register_buffer("weights", (given / given.sum()).to(_like(components)))

    @property
    def biased(self) -> bool:
        """Whether the log-density of a component is an estimate."""
        return any(is_biased(c) for c in self.components)

    def log_prob(self, x: Tensor) -> Tensor:
        """Normalised log-density, `(B, *event)` to `(B,)`."""
        return torch.logsumexp(self._log_joint(x), 0)

    def _log_joint(self, x: Tensor) -> Tensor:
        each = torch.stack([c.log_prob(x) for c in self.components])  # pyright: ignore
        return each + self.weights.log()[:, None]

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` independent draws, `(n, *event)`."""
        return self._draw(n, rng, gradients=False)

    def rsample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws through which gradients flow into the components that have `rsample`.

        The weights are fixed, so the choice of component carries no gradient and the pathwise one is whole.
        """
        return self._draw(n, rng, gradients=True)

    # ---- components whose density is an estimate

    @property
    def draws(self) -> int:
        """The fewest latents behind one of them."""
        return min(c.draws for c in self._estimated())

    @torch.no_grad()
    def density_error(self, x: Tensor) -> Tensor:
        """About how far `log_prob` is off, `(B,)`: each component's error, in its share of the density."""
        share = torch.softmax(self._log_joint(x), 0)
        errors = [c.density_error(x) if is_biased(c) else 0 for c in self.components]  # pyright: ignore
        return sum((s * e for s, e in zip(share, errors, strict=True)), torch.zeros_like(share[0]))

    def redraw(self, rng: torch.Generator) -> None:
        """Fresh latents for them."""
        for component in self._estimated():
            component.redraw(rng)

    def _estimated(self) -> list[Any]:
        return [c for c in self.components if is_biased(c)]

    def _draw(self, n: int, rng: torch.Generator, gradients: bool) -> Tensor:
        chosen = torch.multinomial(self.weights, n, replacement=True, generator=rng)
        if chosen.device.type != "cpu":  # the host does not ask how many each of them is to draw
            each = torch.stack([_draws(c, gradients)(n, rng) for c in self.components])
            return each[chosen, torch.arange(n, device=chosen.device)]
        counts = torch.bincount(chosen, minlength=len(self.components)).tolist()
        parts = [_draws(c, gradients)(m, rng) for c, m in zip(self.components, counts, strict=True)]
        return torch.cat(parts)[chosen.argsort(stable=True).argsort()]


def _draws(component: Any, gradients: bool) -> Any:
    return component.rsample if gradients and provides(component, Reparametrised) else component.sample


def _like(components: Sequence[nn.Module]) -> Tensor:
    """A tensor with the dtype and device of the components."""
    tensors = (t for c in components for t in (*c.parameters(), *c.buffers()) if t.is_floating_point())
    return next(tensors, torch.empty(0))
