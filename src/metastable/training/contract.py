"""What the trainer asks of a method, and what it leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from metastable.core.batch import Batch
from metastable.core.types import LogPartition, Walkers

from .engine import Choice
from .records import Row


class TrainableMethod(Protocol):
    """What the trainer needs of a method (`metastable.methods.base.Method` is one)."""

    name: ClassVar[str]

    def takes(self, batch: Batch) -> Any: ...
    def rate(self, player: str) -> float: ...
    def rate_factor(self, state: Any) -> Tensor | None: ...
    def start(self, context: Any) -> Any: ...
    def turns(self, context: Any) -> Any: ...
    def phase(self, context: Any) -> Any: ...
    def updates(self, context: Any, player: str, steps: int) -> int: ...
    def negatives(self, context: Any, state: Any, batch: Any) -> Any: ...
    def loss(self, context: Any, state: Any, player: str, batch: Any, negatives: Any) -> Any: ...
    def advance(self, context: Any, state: Any) -> Any: ...
    def evaluations(self, context: Any, batch: int) -> int | None: ...
    def current_walkers(self, context: Any, state: Any) -> Walkers | None: ...
    def log_partition(self, context: Any, state: Any) -> LogPartition | None: ...
    def save(self, state: Any) -> dict[str, Any]: ...
    def load(self, tree: dict[str, Any]) -> Any: ...


@dataclass
class Outcome:
    """What training left in memory."""

    status: str
    step: int
    seconds: float
    history: list[Row]
    walkers: Walkers | None
    log_partition: LogPartition | None
    ema: nn.Module | None
    state: Any
    message: str = ""
    kept: int | None = None
    refused: list[str] = field(default_factory=list)
    engine: Choice | None = None
    averages: dict[str, dict[str, Tensor]] = field(default_factory=dict)
