"""Any classifier is an energy: p(x, y) from its logits.

W. Grathwohl and others, *Your classifier is secretly an energy based model and you should treat it like one*, ICLR
2020; the output scale as in Appendix M.2 of *Energy-based model training objective robust to inaccurate SGLD
samples*, submission to ICLR 2025.

| symbol | here |
|---|---|
| h(x)[y] | `logits(x)[:, y]` |
| o | `output_scale` |
| f(x) = o·log Σ_y e^{h(x)[y]} | −E(x), `forward(x)` |
| (o − 1)·log Σ_y e^{h(x)[y]} + h(x)[y] | −E(x, y), `forward(x, y)`, (41) |
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.errors import ConfigError, EnergyError, InputError, require_count, require_positive
from metastable.core.labels import integers, within
from metastable.core.protocols import Classifier, Counted, event_shape_of, provides
from metastable.core.types import Bound, bind, precise

OUTPUT_SCALE = 20_000.0
"""o of the paper's runs."""


class JointEnergy(nn.Module):
    """p(x, y) ∝ exp(−E(x, y)) from a classifier's logits h, with E(x, y) = −(o − 1)·log Σ e^h − h[y].

    Summed over classes that is p(x) ∝ exp(o·log Σ e^h), and p(y | x) is the classifier itself, softmax(h), whatever
    o is. The output scale o says how steep log p(x) is for a classifier of a given confidence; the paper's 20,000
    turns the usual chains of a large drift and little noise into Langevin chains at temperature 1. With
    `ULA(step_size=h)` the drift on log Σ e^h is h·o and the noise √(2h): 1 and 0.01 for h = 5·10⁻⁵.

    Args:
        network: any module from `(B, *event)` to logits `(B, C)`, whose rows do not depend on each other: no batch
            normalisation, no dropout.
        output_scale: o.
        classes: C; read off the network's own `classes`, or off its last linear layer, where it is left out.
        event_shape: shape of one event, where the network does not say it.

    >>> energy = JointEnergy(nn.Linear(2, 3), output_scale=10.0)
    >>> x = torch.zeros(5, 2)
    >>> energy(x).shape, energy.log_prob_labels(x).shape, energy.given(1)(x).shape
    (torch.Size([5]), torch.Size([5, 3]), torch.Size([5]))
    """

    def __init__(
        self,
        network: nn.Module,
        output_scale: float = OUTPUT_SCALE,
        classes: int | None = None,
        event_shape: tuple[int, ...] | None = None,
    ):
        super().__init__()
        require_positive("output_scale", output_scale)
        self.network = network
        self.output_scale = float(output_scale)
        self.classes = _classes_of(network) if classes is None else classes
        require_count("classes", self.classes, 2)
        shape = event_shape_of(network) if event_shape is None else event_shape
        if shape is not None:
            self.event_shape = tuple(shape)

    def logits(self, x: Tensor) -> Tensor:
        """h(x), `(B, C)`, in single precision at least: o times a rounding error of bfloat16 is no energy."""
        h = self.network(x)
        _check_logits(h, len(x), self.classes)
        return precise(h)

    def marginal(self, logits: Tensor) -> Tensor:
        """E(x) = −o·log Σ_y e^{h(x)[y]} from the logits, `(B, C)` to `(B,)`."""
        return -self.output_scale * torch.logsumexp(logits, -1)

    def joint(self, logits: Tensor, labels: Tensor) -> Tensor:
        """E(x, y) of (41) from the logits and int64 labels `(B,)`."""
        # −o·LSE − log p(y | x): nothing cancels where o is 1, and at 20,000 the small term is added last
        log_p = torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return self.marginal(logits) - log_p

    def class_energies(self, x: Tensor) -> Tensor:
        """E(x, y) of (41) for every class, `(B, *event)` to `(B, C)`."""
        h = self.logits(x)
        return self.marginal(h)[:, None] - torch.log_softmax(h, -1)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        """E(x), `(B,)`; with labels `given` the joint energy E(x, y), which is one of p(x | y) too.

        Args:
            x: `(B, *event)`; with labels also `(B, K, *event)`, K events for each label, where `event_shape` is
                known.
            given: labels `(B,)`, or one label for all rows.

        Returns:
            `(B,)`, or `(B, K)`.
        """
        if given is None:
            return self.marginal(self.logits(x))
        labels = self.encode(given).to(x.device)
        shape = event_shape_of(self)
        if shape is not None and x.dim() == len(shape) + 2:
            return self.score(x, labels)
        if len(labels) not in (1, len(x)):
            raise InputError(f"given: must be one label for each of {len(x)} rows, got {len(labels)} labels")
        return self.joint(self.logits(x), labels.expand(len(x)))

    def encode(self, given: Any) -> Tensor:
        """Labels as int64 `(B,)`, checked against the classes: what `score` takes."""
        return as_labels(given, self.classes)

    def score(self, x: Tensor, code: Tensor, t: Tensor | None = None) -> Tensor:
        """E(x, y) of K events for each of B labels, `(B, K, *event)` to `(B, K)`; there is no time here."""
        labels = code.to(x.device).expand(len(x)).repeat_interleave(x.shape[1])
        return self.joint(self.logits(x.flatten(0, 1)), labels).view(x.shape[:2])

    def given(self, labels: Any) -> Bound:
        """An energy of p(x | y) for every kernel: one label for all rows, or B labels with equally many rows each.

        >>> digit = JointEnergy(nn.Linear(2, 3)).given([0, 2])
        >>> digit(torch.zeros(6, 2)).shape  # three rows of class 0, then three of class 2
        torch.Size([6])
        """
        home = next((p.device for p in self.parameters()), None)
        return bind(self, self.encode(labels).to(home))

    def powered(self, power: float) -> JointEnergy:
        """The same classifier where p(x) ∝ exp(−`power`·E(x)) was learned: its output scale is `power`·o.

        >>> cold = JointEnergy(nn.Linear(2, 3), output_scale=1.0)  # of chains ULA(1.0, noise=0.01), say
        >>> cold.powered(20_000.0).output_scale
        20000.0
        """
        scaled = copy.copy(self)  # which shares the network
        scaled.output_scale = power * self.output_scale
        return scaled

    def log_prob_labels(self, x: Tensor) -> Tensor:
        """log p(y | x) = log softmax h(x), `(B, C)`."""
        return torch.log_softmax(self.logits(x), -1)


def as_joint(model: Any, example: Tensor) -> Any:
    """A plain classifier as a `JointEnergy` of the default output scale; anything else as it is.

    Args:
        model: a module; a classifier where it maps `(B, *event)` to `(B, C)`, C at least 2.
        example: a few rows of the events it will see.

    >>> type(as_joint(nn.Linear(2, 3), torch.zeros(4, 2))).__name__
    'JointEnergy'
    """
    if not isinstance(model, nn.Module) or provides(model, Classifier):
        return model
    classes = classes_of(model, example)
    if classes is None:
        return model
    return JointEnergy(model, classes=classes, event_shape=tuple(example.shape[1:]))


def classes_of(model: nn.Module, example: Tensor) -> int | None:
    """C of a module from `(B, *event)` to `(B, C)`, C at least 2, tried on a few rows; None of anything else."""
    x = example[:3].to(next(iter(model.parameters()), example))
    try:
        with torch.no_grad():
            h = model(x)
    except Exception:  # what it is, the check of energies says
        return None
    shaped = isinstance(h, Tensor) and h.dim() == 2 and len(h) == len(x) and h.shape[1] >= 2
    return h.shape[1] if shaped else None


def as_labels(labels: Any, classes: int, name: str = "labels") -> Tensor:
    """Labels as int64 `(B,)`, one label as `(1,)`; each from 0 to `classes` − 1, or an error that names it.

    >>> as_labels(2, classes=3)
    tensor([2])
    """
    values = integers(labels, name)
    if values.dim() > 1 or values.numel() == 0:
        raise InputError(f"{name}: must be one label or a row of them, got shape {tuple(values.shape)}")
    return within(values.reshape(-1), classes, name)


def _classes_of(network: nn.Module) -> int:
    if provides(network, Counted) and isinstance(network.classes, int):
        return network.classes
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise ConfigError(
            "classes",
            f"cannot be read off {type(network).__name__}, which has no linear layer; say how many there are",
        )
    return layers[-1].out_features


def _check_logits(h: Any, rows: int, classes: int) -> None:
    if not isinstance(h, Tensor) or not h.is_floating_point():
        kind = h.dtype if isinstance(h, Tensor) else type(h).__name__
        raise EnergyError(f"network: must return floating point logits (B, {classes}), got {kind}")
    if tuple(h.shape) != (rows, classes):
        raise EnergyError(
            f"network: must return one logit for each class, shape ({rows}, {classes}), got {tuple(h.shape)}"
        )
