"""Where each step of an event lies among the things of its context, such as a path among discs.

A transformer can find out how far a point is from a disc, as can any network that sees both, but only in very many
updates: steps of an event are standardised one by one, those far ahead are wide, and a distance is a product of
what two tokens hold. Here it is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from metastable.core.errors import require, require_positive

REACH = 0.1
"""How near a thing has to be to matter, in units of the events: of `space`, a tenth of the largest action."""
SHARPNESS = 8
"""Of the nearest thing: a thing that is `REACH` / 8 further away counts e times less."""


def require_near(near: Sequence[int] | None, context_shape: Sequence[int] | None) -> None:
    """Refuse things that do not lie within a context."""
    if near is not None:
        numbers = math.prod(context_shape or (0,))
        within = len(near) == 3 and near[0] + near[1] * near[2] <= numbers
        require(
            within, "near", f"start, count and size within the {numbers} numbers of a context", tuple(near)
        )


class Nearness(nn.Module):
    """Of each step of an event: where it is, how near the nearest thing's edge is, and on which side.

    With o the way from a thing's middle to the step, |o| − r the gap to its edge, m the smallest gap, and
    n = o/|o| its direction, a step p has the numbers p/size, tanh(m/reach) and n·(1 − tanh²(m/reach)). The smallest
    is a soft one, which can be differentiated any number of times.

    Args:
        dim: numbers of an event.
        step: of one step, a place.
        things: `(start, count, size)` of numbers of a flattened context, in the units of events: places, and radii
            where `size` is `step` + 1.
        reach: as `REACH`.

    >>> near = Nearness(2, 2, (0, 1, 3))
    >>> near(torch.tensor([[0.3, 0.0]]), torch.tensor([[0.0, 0.0, 0.2]])).shape
    torch.Size([1, 1, 5])
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, dim: int, step: int, things: Sequence[int], reach: float = REACH):
        super().__init__()
        rule = f"start, count and size, which is {step} or {step + 1}"
        ok = len(things) == 3 and things[0] >= 0 and things[1] > 0 and things[2] in (step, step + 1)
        require(ok, "near", rule, tuple(things))
        require_positive("near.reach", reach)
        self.step, self.group, self.reach = step, tuple(things), reach
        self.numbers, self.features = things[1] * things[2], 2 * step + 1
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))

    def stand(self, mean: Tensor, scale: Tensor) -> None:
        """Take standardised events to be (x − mean)/scale."""
        self.mean.copy_(mean)
        self.scale.copy_(scale)

    def join(self, code: Tensor, given: Tensor) -> Tensor:
        """Codes of contexts with the things behind them, `(B, c + count·size)`."""
        start = self.group[0]
        return torch.cat([code, given.flatten(1)[:, start : start + self.numbers].to(code)], 1)

    def forward(self, white: Tensor, things: Tensor) -> Tensor:
        """Standardised events `(…, d)` among things `(…, count·size)` to `(…, P, 2·step + 1)`."""
        p = (self.mean + self.scale * white).unflatten(-1, (-1, self.step))
        each = things.unflatten(-1, self.group[1:])[..., None, :, :]
        way = p[..., None, :] - each[..., : self.step]  # (…, P, count, step)
        distance = (way.square().sum(-1) + 1e-8).sqrt()
        gap = distance - each[..., self.step] if self.group[2] > self.step else distance
        share = torch.softmax(-SHARPNESS / self.reach * gap, -1)
        m = torch.tanh((share * gap).sum(-1, keepdim=True) / self.reach)
        n = (share[..., None] * way / distance[..., None]).sum(-2) * (1 - m.square())
        size = (self.mean.square() + self.scale.square()).mean().sqrt()
        return torch.cat([p / size, m, n], -1)
