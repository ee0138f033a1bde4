"""E(x | y): one network with an energy for every class, on one reference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.batch import Batch, Beside
from metastable.core.errors import InputError, require_count
from metastable.core.protocols import event_shape_of
from metastable.core.types import Bound, Proposal, bind, precise

from .joint import as_labels, classes_of
from .networks import zero_last_layer


class ClassEnergy(nn.Module):
    """p(x, y) ∝ π_y·q(x)·exp(−f(x)[y]): a network f with one output for each class, on a reference q.

    For every class y it is an energy of p(x | y),

        E(x, y) = −log q(x) + f(x)[y] − log π_y,    E(x) = −log Σ_y exp(−E(x, y)),

    where π are the classes' shares of the data. With the last layer of f at zero the model is q for every class,
    and walkers start exactly.

    How much mass classes have in E(x), and so p(y | x), are learned as far as the method can compare them.
    Jarzynski's weights do: walkers of all classes are weighed against each other. Chains whose labels are fixed and
    whose weights are equal (`cd`, `pcd`) learn E(x, y) up to a constant of each class, and are to be asked for one
    class at a time.

    Args:
        network: from `(B, *event)` to `(B, C)`, whose rows do not depend on each other.
        classes: C.
        reference: q, a normalised density; None for the network alone.
        shares: π, `(C,)`, in proportion; equal by default.
        zero_start: set the network's last layer to zero, where there is a reference.
        event_shape: shape of one event, where neither network nor reference say it.

    >>> energy = ClassEnergy(nn.Linear(2, 3), 3)
    >>> x = torch.zeros(5, 2)
    >>> energy(x).shape, energy.class_energies(x).shape, energy.given(1)(x).shape
    (torch.Size([5]), torch.Size([5, 3]), torch.Size([5]))
    """

    log_shares: Tensor

    def __init__(
        self,
        network: nn.Module,
        classes: int,
        reference: nn.Module | None = None,
        shares: Tensor | None = None,
        zero_start: bool = True,
        event_shape: tuple[int, ...] | None = None,
    ):
        super().__init__()
        require_count("classes", classes, 2)
        self.network, self.classes, self.reference = network, classes, reference
        self.power = 1.0
        shape = event_shape or event_shape_of(network) or event_shape_of(reference)
        if shape is not None:
            self.event_shape = tuple(shape)
        pi = torch.ones(classes) if shares is None else shares.cpu().double()
        if pi.shape != (classes,) or not bool((pi > 0).all()):
            raise InputError(f"shares: must be {classes} numbers above 0, got {pi.tolist()}")
        home = next(iter(network.parameters()), torch.empty(0))
        self.register_buffer("log_shares", (pi / pi.sum()).log().to(home.dtype))
        if reference is not None and zero_start:
            zero_last_layer(network)

    def logits(self, x: Tensor) -> Tensor:
        """log π_y − f(x)[y], whose softmax is p(y | x), `(B, C)`, in single precision at least."""
        f = precise(self.network(x))
        if tuple(f.shape) != (len(x), self.classes):
            shape = (len(x), self.classes)
            raise InputError(f"network: must return one energy for each class, {shape}, got {tuple(f.shape)}")
        return self.power * (self.log_shares - f)

    def class_energies(self, x: Tensor) -> Tensor:
        """E(x, y) for every class, `(B, C)`."""
        return self._below(x)[:, None] - self.logits(x)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        """E(x), `(B,)`; with labels `given`, `(B,)` or one for all rows, E(x, y)."""
        if given is None:
            return self._below(x) - torch.logsumexp(self.logits(x), 1)
        return self.score(x[:, None], self.encode(given).to(x.device).expand(len(x)))[:, 0]

    def _below(self, x: Tensor) -> Tensor:
        """−log q(x), `(B,)`; 0 without a reference."""
        if self.reference is None:
            return x.new_zeros(len(x))
        return -self.power * self.reference.log_prob(x)  # pyright: ignore

    def encode(self, given: Any) -> Tensor:
        """Labels as int64 `(B,)`, checked against the classes: what `score` takes."""
        return as_labels(given, self.classes)

    def score(self, x: Tensor, code: Tensor, t: Tensor | None = None) -> Tensor:
        """E(x, y) of K events for each of B labels, `(B, K, *event)` to `(B, K)`; there is no time here."""
        labels = code.to(x.device).expand(len(x)).repeat_interleave(x.shape[1])
        return self.class_energies(x.flatten(0, 1)).gather(1, labels[:, None]).view(x.shape[:2])

    def given(self, labels: Any) -> Bound:
        """An energy of p(x | y) for every kernel: one label for all rows, or B labels with as many rows each."""
        return bind(self, self.encode(labels).to(self.log_shares.device))

    def powered(self, power: float) -> ClassEnergy:
        """The same where exp(−`power`·E(x, y)) was learned; the network is shared."""
        scaled = copy.copy(self)
        scaled.power = power * self.power
        return scaled

    def exact_start(self, probe: Tensor) -> Proposal | None:
        """The density of x that this energy is now, if the network is exactly zero on `probe`; else None."""
        if self.reference is None or self.power != 1:
            return None
        with torch.no_grad():
            is_zero = bool((self.network(probe) == 0).all())
        return self.reference if is_zero else None  # pyright: ignore


def shares_of(rows: Batch, classes: int) -> Tensor | None:
    """The classes' shares of the rows, one without any counted as half a row, `(C,)`; None without labels."""
    if rows.kind is not Beside.LABELS:
        return None
    counts = torch.bincount(rows.conditions.cpu(), minlength=classes)[:classes]
    return counts.double().clamp(min=0.5)


def as_class_energy(model: Any, rows: Batch) -> Any:
    """A module from `(B, *event)` to `(B, C)` as a `ClassEnergy`; anything else as it is."""
    if not isinstance(model, nn.Module) or isinstance(model, ClassEnergy):
        return model
    classes = classes_of(model, rows.x)
    if classes is None:
        return model
    return ClassEnergy(model, classes, shares=shares_of(rows, classes), event_shape=rows.event_shape)
