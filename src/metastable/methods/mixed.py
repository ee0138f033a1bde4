"""Several samplers in one batch: the negatives of chain methods side by side, as one chain method."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from metastable.core.errors import ConfigError, require
from metastable.core.types import LogPartition, Walkers
from metastable.kernels import Kernel

from .base import ChainMethod, Context, Method, Metrics, Negatives, weighed_apart
from .contrastive import PersistentCD, ShortRun

States = tuple[Any, ...]


def default_sources() -> tuple[ChainMethod, ...]:
    """Chains that go on, and chains that begin afresh from noise."""
    return PersistentCD(), ShortRun()


@dataclass(frozen=True)
class Mixed(ChainMethod[States]):
    """The negatives of several chain methods in one batch.

    Each source keeps its own chains, kernel and state. `Mixed` trains with the usual contrast, and is the
    `source` of any method that changes the loss.

    Attributes:
        sources: the chain methods; their step sizes, kernels and steps are their own.
        shares: what each source counts for in averages, in proportion; by default as much as it has negatives.

    >>> mixed = Mixed(sources=(PersistentCD(walkers=100), ShortRun(walkers=20)), shares=(0.5, 0.5))
    >>> [source.name for source in mixed.sources]
    ['pcd', 'short-run']
    """

    sources: tuple[ChainMethod, ...] = field(default_factory=default_sources)  # pyright: ignore
    shares: tuple[float, ...] | None = None

    name: ClassVar[str] = "mixed"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        _check_sources(self.sources, self.labels)
        for setting in ("step_size", "kernel"):
            given = vars(self)[setting]
            require(given is None, f"mixed.{setting}", "left out here and given to the sources", given)
        super().__post_init__()
        if self.shares is not None:
            object.__setattr__(self, "shares", tuple(float(s) for s in self.shares))
            ok = len(self.shares) == len(self.sources) and all(0 < s < math.inf for s in self.shares)
            rule = f"{len(self.sources)} numbers above 0, one for each source"
            require(ok, "mixed.shares", rule, self.shares)

    @cached_property
    def moves(self) -> Kernel:
        """The first source's kernel, where one is to be named."""
        return self.sources[0].moves

    @property
    def chain_kernel(self) -> Kernel | None:  # pyright: ignore
        """That of the first source whose chains move."""
        return next((s.chain_kernel for s in self.sources if s.chain_kernel is not None), None)

    def with_sources(self, sources: Sequence[Method]) -> Method:
        """The same mixture of others."""
        return replace(self, sources=tuple(sources))  # pyright: ignore

    def source_states(self, state: States) -> tuple[Any, ...]:
        """One for each."""
        return state

    def moving(self, batch: int, rows: int) -> int:
        """All sources' together."""
        return sum(source.moving(batch, rows) for source in self.sources)

    def stored(self, batch: int, rows: int) -> int:
        """All sources' together."""
        return sum(source.stored(batch, rows) for source in self.sources)

    @property
    def temperature(self) -> float:
        """That of the sources, which is one."""
        return self.sources[0].temperature

    @property
    def bounded(self) -> bool:
        """Whether every source stays in a bounded set."""
        return all(source.bounded for source in self.sources)

    def phase(self, context: Context) -> Hashable:
        """Those of all sources."""
        return tuple(source.phase(context) for source in self.sources)

    def rate_factor(self, state: States) -> Tensor | None:
        """The least of the sources'."""
        return least([s.rate_factor(own) for s, own in zip(self.sources, state, strict=True)])

    def start(self, context: Context) -> States:
        """Each source's."""
        return tuple(source.start(context) for source in self.sources)

    def negatives(self, context: Context, state: States, batch: Any) -> tuple[Negatives, States, Metrics]:
        """Each source's, one after the other."""
        made = [s.negatives(context, own, batch) for s, own in zip(self.sources, state, strict=True)]
        drawn = [negatives for negatives, _, _ in made]
        x, labels = torch.cat([n.x for n in drawn]), [n.given for n in drawn if n.given is not None]
        log_weight = self._together([n.log_weight for n in drawn], [len(n.x) for n in drawn])
        negatives = Negatives(x, log_weight, given=torch.cat(labels) if labels else None)
        return negatives, tuple(s for _, s, _ in made), mean_metrics([m for _, _, m in made])

    def _together(self, log_weights: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
        """Log-weights under which each source counts for its share; None where all weights are equal."""
        if self.shares is None and all(given is None for given in log_weights):
            return None
        shares = sizes if self.shares is None else self.shares
        device = next((w.device for w in log_weights if w is not None), None)
        parts = []
        for given, size, share in zip(log_weights, sizes, shares, strict=True):
            equal = torch.zeros(size, dtype=torch.float64, device=device)
            parts.append(torch.log_softmax(equal if given is None else given.double(), 0) + math.log(share))
        return torch.cat(parts)

    def advance(self, context: Context, state: States) -> tuple[States, Metrics]:
        """Each source's."""
        made = [s.advance(context, own) for s, own in zip(self.sources, state, strict=True)]
        return tuple(own for own, _ in made), mean_metrics([metrics for _, metrics in made])

    def chains(self, context: Context, batch: int) -> int | None:
        """All sources' together."""
        return _sum(source.chains(context, batch) for source in self.sources)

    def negatives_count(self, context: Context, batch: int) -> int | None:
        """All sources' together."""
        return _sum(source.negatives_count(context, batch) for source in self.sources)

    def evaluations(self, context: Context, batch: int) -> int | None:
        """All sources' together; the data are evaluated once."""
        made = _sum(source.evaluations(context, batch) for source in self.sources)
        return None if made is None else made - (len(self.sources) - 1) * batch

    def current_walkers(self, context: Context, state: States) -> Walkers | None:
        """Those of all sources that hold any, each source with its share."""
        held = [s.current_walkers(context, own) for s, own in zip(self.sources, state, strict=True)]
        kept = [walkers for walkers in held if walkers is not None]
        if len(kept) < len(held) or len(kept) == 1:  # shares are of all sources, or of none
            return kept[0] if kept else None
        log_weight = self._together([w.log_weight for w in kept], [len(w) for w in kept])
        assert log_weight is not None
        labels = [w.labels for w in kept if w.labels is not None]
        return Walkers(
            torch.cat([w.x for w in kept]), log_weight, labels=torch.cat(labels) if labels else None
        )

    def log_partition(self, context: Context, state: States) -> LogPartition | None:
        """That of the first source that gives one."""
        made = (s.log_partition(context, own) for s, own in zip(self.sources, state, strict=True))
        return next((z for z in made if z is not None), None)

    def why_not_shared(self) -> str:
        """Sources that are weighed across processes."""
        return super().why_not_shared() or weighed_apart(self)

    def gathered(self, state: States) -> States:
        """Each source's."""
        return tuple(source.gathered(own) for source, own in zip(self.sources, state, strict=True))

    def own_part(self, state: States) -> States:
        """Each source's."""
        return tuple(source.own_part(own) for source, own in zip(self.sources, state, strict=True))

    def save(self, state: States) -> dict[str, Any]:
        """Each source's, by its place."""
        return save_each(self.sources, state)

    def load(self, tree: dict[str, Any]) -> States:
        """From a checkpoint."""
        return load_each(self.sources, tree)


def _check_sources(sources: tuple[ChainMethod, ...], labels: bool) -> None:
    if not sources:
        raise ConfigError(
            "mixed.sources", "must name at least one chain method: without one there are no negatives"
        )
    for i, source in enumerate(sources):
        require(isinstance(source, ChainMethod), f"mixed.sources.{i}", "a method with chains", source)
        penalty = source.energy_l2
        require(penalty == 0, f"mixed.sources.{i}.energy_l2", "0; give it to the mixture", penalty)
        rule = "as the mixture and all sources have it"
        require(source.labels == labels, f"mixed.sources.{i}.labels", rule, source.labels)
    temperatures = {source.temperature for source in sources}
    if len(temperatures) > 1:
        shown = ", ".join(f"{source.name} {source.temperature:.3g}" for source in sources)
        raise ConfigError(
            "mixed.sources", f"must all sample at one temperature, got {shown}; see noise of the kernel ULA"
        )


def save_each(methods: Sequence[Method], states: States) -> dict[str, Any]:
    """The states of several methods as one tree."""
    return {str(i): m.save(state) for i, (m, state) in enumerate(zip(methods, states, strict=True))}


def load_each(methods: Sequence[Method], tree: dict[str, Any]) -> States:
    """The inverse of `save_each`."""
    return tuple(method.load(tree[str(i)]) for i, method in enumerate(methods))


def mean_metrics(parts: Sequence[Metrics]) -> Metrics:
    """Each metric averaged over the parts that have it.

    >>> mean_metrics([{"ess": torch.tensor(0.5)}, {"ess": torch.tensor(1.0), "moved": torch.tensor(3.0)}])
    {'ess': tensor(0.7500), 'moved': tensor(3.)}
    """
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _mean([part[name] for part in parts if name in part]) for name in names}


def least(factors: Sequence[Tensor | None]) -> Tensor | None:
    """The least of the factors that there are; None where there is none.

    >>> least([torch.tensor(0.5), None, torch.tensor(0.2)])
    tensor(0.2000)
    """
    known = [factor for factor in factors if factor is not None]
    return torch.stack(known).amin() if known else None


def _mean(values: list[Tensor]) -> Tensor:
    return (
        values[0]
        if len(values) == 1
        else torch.stack([v.double() for v in values]).mean().to(values[0].dtype)
    )


def _sum(counts: Any) -> int | None:
    """The sum, or None where one of them is not known."""
    known = list(counts)
    return None if any(count is None for count in known) else sum(known)
