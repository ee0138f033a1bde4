"""Independent populations of weighted walkers, each with its own running log Z."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.by_class import of_labels
from metastable.core.errors import require_choice
from metastable.core.precision import unrounded
from metastable.core.resampling import draw_rows
from metastable.core.types import Energy, Walkers, precise
from metastable.core.weights import entropy_fraction, ess_fraction, log_mean_exp, log_mean_exp_and_ess

ORDERS = ("none", "principal", "energy")
MAX_COVARIANCE = 256
"""Dimensions up to which a covariance costs less than going through all positions in every iteration."""


class Population(NamedTuple):
    """G populations of n walkers each, stored flat: row i belongs to population i // n.

    Attributes:
        x: positions, `(G·n, *event)`.
        log_weight: A, raw log-weights since the last resampling, `(G·n,)`, float64.
        energy: U at `x` under the parameters the weights refer to, `(G·n,)`.
        grad: ∇U at `x` under the same parameters, `(G·n, *event)`; empty where it is not kept.
        log_z: log Z as of each population's last resampling, log Z₀ included, `(G,)`, float64.
        resamplings: how often each population was resampled, `(G,)`.
        ancestor: which of the first walkers each one descends from, by its row then, int64 `(G·n,)`.
        past_noise: what the weights of all resamplings so far add to the variance of each log Z, `(G,)`, float64.
        given: the label of each walker, int64 `(G·n,)`, where walkers are of an energy by class. Labels never
            change, and go with their walkers: walkers of all classes are weighed and resampled together, as samples
            of p(x, y), so that averages are right in expectation for classes as for everything else. In order of
            their classes, stratified and systematic resampling leave each class its weight to within one walker.
    """

    x: Tensor
    log_weight: Tensor
    energy: Tensor
    grad: Tensor
    log_z: Tensor
    resamplings: Tensor
    ancestor: Tensor
    past_noise: Tensor
    given: Tensor | None = None

    @classmethod
    def start(
        cls, x: Tensor, energy: Tensor, grad: Tensor, log_z: Tensor, given: Tensor | None = None
    ) -> Population:
        """Walkers of equal weight; `log_z` is `(G,)` and says how many populations there are."""
        A = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        count = torch.zeros(len(log_z), dtype=torch.int64, device=x.device)
        first = torch.arange(len(x), device=x.device)
        noise = torch.zeros_like(log_z.double())
        return cls(x, A, energy, grad, log_z.double(), count, first, noise, given)

    @property
    def groups(self) -> int:
        """G."""
        return len(self.log_z)

    def by_group(self, values: Tensor) -> Tensor:
        """`(G·n, …)` viewed as `(G, n, …)`."""
        return values.view(self.groups, -1, *values.shape[1:])

    def labels_of(self, rows: Tensor | slice | None) -> Tensor | None:
        """Labels of the walkers in `rows`, or of all, where they have any."""
        return self.given if self.given is None or rows is None else self.given[rows]

    def energy_at(self, energy: Energy, rows: Tensor | slice | None = None) -> Energy:
        """E as the walkers in `rows` see it, or all of them: under their labels where they have any."""
        return of_labels(energy, self.labels_of(rows))

    def take(self, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`x`, `log_weight`, `energy` and `grad` of the walkers that move: all, or those in `rows`.

        Gradients are kept of those that move only, and are returned as they are.
        """
        if rows is None:
            return self.x, self.log_weight, self.energy, self.grad
        x, log_weight, energy = (v.index_select(0, rows) for v in (self.x, self.log_weight, self.energy))
        return x, log_weight, energy, self.grad

    def put(
        self, rows: Tensor | None, x: Tensor, log_weight: Tensor, energy: Tensor, grad: Tensor
    ) -> Population:
        """The walkers that `take` gave, where they are now; every other one is untouched."""
        if rows is None:
            return self._replace(x=x, log_weight=log_weight, energy=energy, grad=grad)
        return self._replace(
            x=self.x.index_copy(0, rows, x),
            log_weight=self.log_weight.index_copy(0, rows, log_weight),
            energy=self.energy.index_copy(0, rows, energy),
            grad=grad,
        )

    def reweigh(self, energy: Tensor) -> Population:
        """A += U_k − U_{k+1} where every walker stands; `energy` is U_{k+1} there, `(G·n,)`."""
        return self._replace(log_weight=self.log_weight + (self.energy - energy), energy=energy)

    def caught_up(self, energy: Energy, rows: Tensor | None = None) -> Population:
        """Walkers that stood still for some updates, those in `rows` or all, weighed for all of them at once.

        Their increments add up to U where they were weighed last minus U now.
        """
        x, log_weight, before, _ = self.take(rows)
        with torch.no_grad():
            now = precise(self.energy_at(energy, rows)(x))
        log_weight = log_weight + (before - now)
        if rows is None:
            return self._replace(log_weight=log_weight, energy=now)
        return self._replace(
            log_weight=self.log_weight.index_copy(0, rows, log_weight),
            energy=self.energy.index_copy(0, rows, now),
        )

    def comparable_log_weight(self) -> Tensor:
        """Log-weights that say what walkers count for across populations, `(G·n,)`."""
        return (self.by_group(self.log_weight) + self.log_z[:, None]).flatten()

    def ess(self) -> Tensor:
        """Effective sample size of each population as a fraction, `(G,)`."""
        return ess_fraction(self.by_group(self.log_weight))

    def entropy(self) -> Tensor:
        """exp(entropy of the weights)/n for each population, `(G,)`."""
        return entropy_fraction(self.by_group(self.log_weight))

    def ancestors(self) -> Tensor:
        """Share of the first walkers of each population that have descendants, `(G,)`."""
        living = torch.zeros(len(self.ancestor), dtype=torch.float64, device=self.x.device)
        return self.by_group(living.index_fill(0, self.ancestor, 1.0)).mean(1)

    def noise(self, ess: Tensor | None = None) -> Tensor:
        """The variance of each log Z that its weights predict, `(G,)`: Σ (1/ESS − 1)/n.

        The sum is over the stretches between resamplings, the one that has not ended included, each with the ESS
        (a fraction) that it ended with. Walkers of one population are taken for independent at each stretch's
        start, which those that share an ancestor and do not mix are not: then the variance is larger.
        """
        n = len(self.x) // self.groups
        return self.past_noise + (1 / (self.ess() if ess is None else ess) - 1) / n

    def log_partition(self) -> Tensor:
        """log Z as each population sees it now, `(G,)`: (12), continued through resampling."""
        return self.log_z + log_mean_exp(self.by_group(self.log_weight))

    def log_partition_and_ess(self) -> tuple[Tensor, Tensor]:
        """Both at once, which costs little more than one of them."""
        log_mean, ess = log_mean_exp_and_ess(self.by_group(self.log_weight))
        return self.log_z + log_mean, ess

    def resample(
        self,
        need: Tensor,
        scheme: str,
        order: str,
        rng: torch.Generator,
        known: tuple[Tensor, ...] | None = None,
    ) -> Population:
        """Resample the populations marked in `need` `(G,)` and set their weights to one.

        `known` is what `log_partition_and_ess` says, where that was asked before. log Z moves into `log_z`,
        energies and gradients move with their walkers. On the CPU nothing is done when no population needs it;
        elsewhere the host is not asked, and unmarked rows map to themselves.
        """
        if self.x.device.type == "cpu" and not bool(need.any()):
            return self
        log_z, ess, *_ = self.log_partition_and_ess() if known is None else known
        rows = self._rows(need, scheme, order, rng)
        keep_grad = self.grad.numel() > 0
        return Population(
            x=self.x.index_select(0, rows),  # a quarter of what self.x[rows] costs on the CPU
            log_weight=torch.where(need[:, None], 0.0, self.by_group(self.log_weight)).flatten(),
            energy=self.energy.index_select(0, rows),
            grad=self.grad.index_select(0, rows) if keep_grad else self.grad,
            log_z=torch.where(need, log_z, self.log_z),
            resamplings=self.resamplings + need,
            ancestor=self.ancestor.index_select(0, rows),
            past_noise=torch.where(need, self.noise(ess), self.past_noise),
            given=None if self.given is None else self.given.index_select(0, rows),
        )

    def _rows(self, need: Tensor, scheme: str, order: str, rng: torch.Generator) -> Tensor:
        """The rows that walkers continue from, `(G·n,)`."""
        A = self.by_group(self.log_weight)
        G, n = A.shape
        every = need.device.type != "cpu" or bool(need.all())  # elsewhere asking would make the host wait
        marked = None if every else need.nonzero()[:, 0]
        p = torch.softmax(_take(A, marked), -1)
        drawn = draw_rows(p, n, scheme, rng, self._order(order, p, marked))
        same = torch.arange(n, device=A.device).expand(G, n)
        some = drawn if marked is None else same.index_copy(0, marked, drawn)
        local = torch.where(need[:, None], some, same)
        if G == 1:
            return local[0]
        return (local + n * torch.arange(G, device=A.device)[:, None]).flatten()

    def _order(self, order: str, p: Tensor, marked: Tensor | None) -> Tensor | None:
        """Walkers side by side: class after class, and in each along their main axis or by energy."""
        require_choice("order", order, ORDERS)
        if order == "none":
            return None
        if order == "energy":
            sorted_ = _take(self.by_group(self.energy), marked).argsort(-1)
        else:
            sorted_ = principal_scores(_take(self.by_group(self.x.flatten(1)), marked), p).argsort(-1)
        if self.given is None:
            return sorted_
        labels = _take(self.by_group(self.given), marked).gather(-1, sorted_)
        return sorted_.gather(-1, labels.argsort(dim=-1, stable=True))

    def save(self) -> dict[str, Any]:
        """As a tree of tensors; labels where there are any."""
        tree = self._asdict()
        return tree if self.given is not None else {k: v for k, v in tree.items() if k != "given"}


def walkers_of(parts: Sequence[Population]) -> Walkers:
    """All walkers of several populations, with weights that are comparable between them."""
    x = torch.cat([p.x for p in parts])
    log_weight = torch.cat([p.comparable_log_weight() for p in parts])
    labels = [p.given for p in parts if p.given is not None]
    sizes = [len(p.x) // p.groups for p in parts for _ in range(p.groups)]
    info = {"ess_fraction": float(ess_fraction(log_weight)), "populations": sizes}
    return Walkers(x, log_weight, info, labels=torch.cat(labels) if labels else None)


def _take(values: Tensor, marked: Tensor | None) -> Tensor:
    return values if marked is None else values.index_select(0, marked)


def principal_scores(x: Tensor, p: Tensor, iterations: int = 12) -> Tensor:
    """Positions along the direction of largest weighted variance; `x` is `(G, n, D)`, `p` is `(G, n)`.

    Walkers in different modes end up at different ends of such a direction, so that sorting by it puts modes
    side by side before stratified or systematic resampling.
    """
    p = p.to(x.dtype)[..., None]
    with unrounded(x):
        centred = x - p.mT @ x
        weighted = p * centred
        if x.shape[2] <= MAX_COVARIANCE:
            direction = _top_of_covariance(centred.mT @ weighted, iterations)
        else:
            direction = _top_of_positions(centred, weighted, iterations)
        return (centred @ direction)[..., 0]


def _top_of_covariance(covariance: Tensor, iterations: int) -> Tensor:
    """Power iteration, `(G, D, D)` to `(G, D, 1)`, four powers at a time.

    Divided by its trace nothing grows, so that one norm at the end will do.
    """
    variance = covariance.diagonal(dim1=1, dim2=2)
    total = variance.sum(1, keepdim=True).clamp(min=1e-30)[..., None]
    v, covariance = (variance[..., None] / total).sqrt(), covariance / total
    squared = torch.bmm(covariance, covariance)
    fourth = torch.bmm(squared, squared)
    for _ in range(math.ceil(iterations / 4)):
        v = torch.bmm(fourth, v)
    return v / v.norm(dim=1, keepdim=True).clamp(min=1e-30)


def _top_of_positions(centred: Tensor, weighted: Tensor, iterations: int) -> Tensor:
    """The same without forming a covariance, for events of many dimensions.

    Where launches cost more than arithmetic a norm is taken in every fourth iteration, and between them the trace
    keeps v in range.
    """
    variance = (weighted * centred).sum(1)
    v, every = variance.sqrt()[..., None], 1 if centred.device.type == "cpu" else 4
    total = variance.sum(1)[:, None, None].clamp(min=1e-30)
    for i in range(1, iterations + 1):
        v = weighted.mT @ (centred @ v)
        last = i % every == 0 or i == iterations
        v = v / (v.norm(dim=1, keepdim=True).clamp(min=1e-30) if last else total)
    return v
