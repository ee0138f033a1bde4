"""The density that a run learned, exp(−P·E)/Z: of events alone, or of events given contexts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from metastable.core.by_class import of_labels
from metastable.core.errors import InputError, options_of, require_options
from metastable.core.memory import within_memory
from metastable.core.method import draws_given
from metastable.core.parts import home_of, in_parts
from metastable.core.powered import powered
from metastable.core.protocols import Classifier, FineDrawing, JointlyScored, is_normalised, provides
from metastable.core.random import derive, generator
from metastable.core.types import LogPartition, Proposal, Walkers
from metastable.core.units import Coordinates, Units
from metastable.core.weights import require_weight
from metastable.evaluation.classifier import given_label
from metastable.evaluation.conditional import (
    ConditionalLogProb,
    LogPartitions,
    conditional_log_prob,
    log_partition_given,
)
from metastable.methods.conditional_sampling import (
    sample_conditional,
    sample_from_proposal,
    sample_interpolating,
)
from metastable.proposals import Gaussian, Uniform
from metastable.proposals.given import finely

from .sampling import continue_sampling


@dataclass(frozen=True)
class Model:
    """A learned density. What goes in and comes out is in the data's units; what it is made of, in training's.

    `model.given(c)` is the density of events given contexts, a model again: its `log_prob` takes an event for each
    context, its `sample` returns `n` for each, and its `log_partition` is one number each.

    Attributes:
        energy: E, as training sees it.
        players: every module of the training by name.
        method: what it was trained with, which may draw for itself.
        method_name: its name.
        power: P.
        log_z: log Z of exp(−P·E), where it is known.
        walkers: weighted samples, in the data's units.
        event_shape: shape of one event; None where any will do.
        context_shape: shape of one context; None where events are given none.
        coordinates: the units of training; None where they are the data's own.
        seed: of the draws that log Z of contexts comes from.
        contexts: those that it is given, in the units of training.
    """

    energy: Any
    players: Mapping[str, Any] = field(default_factory=dict)
    method: Any = None
    method_name: str = ""
    power: float = 1.0
    log_z: LogPartition | None = None
    walkers: Walkers | None = None
    event_shape: tuple[int, ...] | None = None
    context_shape: tuple[int, ...] | None = None
    coordinates: Coordinates | None = None
    seed: int = 0
    contexts: Tensor | None = None

    @property
    def home(self) -> Tensor:
        """A tensor with the dtype and device that the energy works in."""
        return home_of(self.energy)

    @property
    def learned_energy(self) -> Any:
        """P·E, whose exp(−P·E)/Z is this density."""
        return powered(self.energy, self.power)

    @property
    def normalised(self) -> bool:
        """Whether the energy is −log of the density that was learned, so that log Z is 0."""
        return is_normalised(self.energy) and self.power == 1

    def given(self, contexts: Any) -> Model:
        """The density of events given contexts `(B, *context)`."""
        return replace(self, contexts=self.as_contexts(contexts))

    def log_prob(self, x: Any, **options: Any) -> Tensor:
        """Normalised log-density of events `(B, *event)`, `(B,)`, each given its context where there are those."""
        x, log_det = self.enter(x)
        if self.context_shape is not None and self.normalised:
            require_options(options, options_of(conditional_log_prob))
            with torch.no_grad():
                return -self.energy(x, self._bound()) + log_det
        if self.context_shape is not None:
            return self.conditional_log_prob(x, **options).value.to(x.dtype) + log_det
        require_options(options, ())
        if self.log_z is None:
            raise InputError(
                "log_partition: this run has none; metastable.log_partition(run.learned_energy, …) estimates it"
            )
        with within_memory("scoring", x, {"x": f"{len(x)} rows"}):
            return -in_parts(self.learned_energy, x, x.numel()) - self.log_z.value + log_det

    def enter(self, x: Any) -> tuple[Tensor, float]:
        """Events in the units of training, and what a log-density there lacks in the data's own."""
        x = self.as_events(x)
        if self.coordinates is None:
            return x, 0.0
        return self.coordinates.events.forward(x).to(self.home), self.coordinates.events.log_det

    def conditional_log_prob(self, x: Tensor, **options: Any) -> ConditionalLogProb:
        """log p of each event, in the units of training, given its context, with the log Z behind it."""
        require_options(options, options_of(conditional_log_prob))
        given = self._bound()
        options = {"rng": self._draws(given.device), **options}
        return conditional_log_prob(self.energy, self.importance_density(), x, given, **options)

    def log_partition(self, **options: Any) -> LogPartition | LogPartitions | None:
        """log Z, or that of each context with its error, by importance sampling from the run's proposal."""
        if self.context_shape is None:
            require_options(options, ())
            return self.log_z
        given = self._bound()
        require_options(options, options_of(log_partition_given))
        if self.normalised:
            zero = torch.zeros(len(given), dtype=torch.float64)
            return LogPartitions(zero, zero, torch.full_like(zero, torch.inf), zero)
        options = {"rng": self._draws(given.device), **options}
        return log_partition_given(self.energy, self.importance_density(), given, **options)

    def sample(
        self,
        n: int,
        *,
        steps: int | None = None,
        step_size: float | None = None,
        seed: int = 0,
        label: int | None = None,
        **options: Any,
    ) -> Walkers:
        """`n` walkers, or `n` for each context; see `Run.sample`."""
        if label is not None and self.context_shape is not None:
            raise InputError("label: this is a conditional run, which has no classes; give contexts, given=…")
        if self.context_shape is not None:
            if step_size is not None:
                raise InputError("given: walkers of contexts take kernel=…, not corrected or step_size")
            chosen = options if steps is None else {"steps": steps, **options}
            walkers = self._sample_given(n, self._bound(), seed, chosen)
        else:
            if options:
                require_options(options, SAMPLING_OPTIONS)
                raise InputError(f"{next(iter(options))}: only samples of a conditional run take it")
            walkers = self._sample(n, 100 if steps is None else steps, step_size, seed, label)
        return walkers if self.coordinates is None else in_units(walkers, self.coordinates.events)

    @torch.no_grad()
    def sample_and_log_prob(self, n: int, *, seed: int = 0) -> tuple[Tensor, Tensor] | None:
        """The draws of `sample` for each context with their log-densities, `(B, n)`, where one solution has both.

        None of what draws otherwise: of energies that are no density, or whose draws are another's.
        """
        if not (self.normalised and provides(self.energy, JointlyScored)):
            return None
        given = self._bound()
        x, log_prob = self.energy.sample_and_log_prob(n, self._rng_given(seed, given), given)
        if self.coordinates is None:
            return x, log_prob
        units = self.coordinates.events
        return units.inverse(x), log_prob + units.log_det

    def _sample(self, n: int, steps: int, step_size: float | None, seed: int, label: int | None) -> Walkers:
        own = None if self.method is None else self.method.sample
        if own is not None and label is None:  # a density draws for itself
            return own(self.players, n, generator(derive(seed, "sample"), self.home.device))
        if self.walkers is None:
            raise InputError("walkers: this run kept none; use metastable.sample(run.learned_energy, …)")
        energy, start = self.learned_energy, self.walkers
        if self.coordinates is not None:
            start = replace(start, x=self.coordinates.events.forward(start.x).to(self.home))
        if label is not None:
            energy, start = given_label(energy, start, label)
        walkers = continue_sampling(energy, start, n, steps=steps, step_size=step_size, seed=seed)
        of_class = None if label is None else torch.full((n,), label, device=walkers.x.device)
        return replace(walkers, labels=of_class)

    def _sample_given(self, n: int, given: Tensor, seed: int, options: dict[str, Any]) -> Walkers:
        rng = self._rng_given(seed, given)
        players: dict[str, Any] = {"energy": self.energy} | dict(self.players)
        method = self.method
        drawn = None if method is None else method.sample_given(players, n, given, rng, **options)
        if drawn is not None:
            return drawn
        self.refuse_options(options)
        return sample_conditional(players, n, given, rng, **options)

    def _rng_given(self, seed: int, given: Tensor) -> torch.Generator:
        return generator(derive(seed, "sample given"), given.device)

    def refuse_options(self, options: Iterable[str]) -> None:
        """Refuse options that samples given contexts do not take, by name, without drawing any."""
        if draws_given(self.method):
            self.method.refuse_options(options)
        else:
            require_options(options, options_of(sample_from_proposal))

    def log_ratio(self, x: Any, labels: Any = None) -> Tensor:
        """The learned log-density ratio log p(x)/q(x) of data to model, `(B,)`, where the method trains one.

        Of a method with labels it is that of x and its class: `labels` are `(B,)`, or one for all rows.
        """
        ratio = self.players.get("ratio")
        if ratio is None:
            raise InputError(
                f"ratio: a run of {self.method_name!r} learns no density ratio; train with 'f-ebm'"
            )
        x, _ = self.enter(x)
        if (self.method is not None and self.method.needs == "labels") != (labels is not None):
            words = "give the class of each row" if labels is None else "leave them out, the run has none"
            raise InputError(f"labels: {words}: log_ratio(x{', labels' if labels is None else ''})")
        with torch.no_grad():
            if labels is None:
                return ratio(x, self.energy(x))
            given = self.energy.encode(labels).to(x.device).expand(len(x))
            return ratio(x, of_labels(self.energy, given)(x), given)

    def importance_weights(self, x: Any) -> Tensor:
        """Weights `(B,)`, with sum 1, that turn averages over samples of the model into averages over the data."""
        return torch.softmax(require_weight(self.log_ratio(x).double(), "log_ratio"), 0)

    def importance_density(self) -> Any:
        """A density to draw from for log Z: the run's proposal, one beyond its box, or a diffusion's φ itself.

        A continuous flow solves its ODE in more steps than it may have been trained with, see `finely`.
        """
        proposal: Any = self.players.get("proposal", self.own_draws)
        if proposal is None:
            raise InputError(
                f"proposal: a run of {self.method_name!r} has none to estimate log Z of a context from; call "
                "evaluation.conditional.log_partition_given with one of your own"
            )
        if isinstance(proposal, Uniform):  # the energy may have mass beyond the box
            return Gaussian((proposal.low + proposal.high) / 2, (proposal.high - proposal.low) / 3)
        return finely(proposal)

    @property
    def own_draws(self) -> Any:
        """The energy itself where it also draws with a known density, as a diffusion's φ does.

        In as many steps as its weights need, `fine`; what these leave is in the error of log Z.
        """
        own: Any = self.energy if isinstance(self.energy, Proposal) else None
        return own.with_steps(*own.fine) if provides(own, FineDrawing) else own

    def _draws(self, device: torch.device) -> torch.Generator:
        """Random numbers of the run's seed, the same ones at every call, for importance sampling."""
        return generator(derive(self.seed, "importance"), device)

    def _bound(self) -> Tensor:
        """The contexts that it is given."""
        if self.contexts is None:
            raise InputError("given: this is a conditional run; give contexts, given=…")
        return self.contexts

    def as_events(self, x: Any) -> Tensor:
        """Events `(B, *event)` as the energy needs them; of one number each, `(B,)` will do, as for `fit`.

        Rows of any floating point type and on any device are brought to the energy's own: what is made of them is
        there too.
        """
        x = torch.as_tensor(x)
        x = x.to(self.home.device if self.coordinates is not None else self.home)
        if self.event_shape is None:
            return x
        x = x[:, None] if x.dim() == 1 and self.event_shape == (1,) else x
        several = self.context_shape is not None and self.normalised
        if several and tuple(x.shape[2:]) == self.event_shape:
            return x  # several events for each context, of which a density knows what to make
        if tuple(x.shape[1:]) != self.event_shape or x.dim() == 0:
            shape = ", ".join(map(str, ("B", *self.event_shape)))
            raise InputError(f"x: must have shape ({shape}), got {tuple(x.shape)}")
        return x

    def as_contexts(self, given: Any) -> Tensor:
        """Contexts `(B, *context)` as the energy needs them, in the units of training."""
        if given is None:
            raise InputError("given: this is a conditional run; give contexts, given=…")
        if self.context_shape is None:
            hint = "; samples of one class: label=…" if provides(self.energy, Classifier) else ""
            raise InputError(f"given: this run of {self.method_name!r} was trained without contexts{hint}")
        given = torch.as_tensor(given)
        units = None if self.coordinates is None else self.coordinates.given
        given = given.to(self.home.device if units is not None else self.home)
        shape = self.context_shape
        given = given[:, None] if given.dim() == 1 and shape == (1,) else given  # as `fit` takes them
        if tuple(given.shape[1:]) != shape or given.dim() == 0:
            raise InputError(
                f"given: must have shape (B, {', '.join(map(str, shape))}), got {tuple(given.shape)}"
            )
        return given if units is None else units.forward(given).to(self.home)


SAMPLING_OPTIONS = {
    *options_of(Model.sample),
    *options_of(sample_from_proposal),
    *options_of(sample_interpolating),
}


def in_units(walkers: Walkers, units: Units) -> Walkers:
    """Walkers of training's units in the data's own: float64 where those need it."""
    trace = None if walkers.trace is None else units.inverse(walkers.trace)
    return replace(walkers, x=units.inverse(walkers.x), trace=trace)
