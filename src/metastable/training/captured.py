"""Whole updates recorded and launched at once, one recording for each kind of update.

An update that is recorded reads and writes memory that stays where it is: parameters, what optimisers keep, the
rates of learning, the rows of the batch, and the leaves of the method's state, into which its new state is copied.
What Python decides from the number of the update is the method's `phase`; updates of one phase are recorded once.
Between two launches everything lies in ordinary tensors, for guards, checkpoints and whoever else looks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metastable.core.capture import WARM, CaptureError, Recording, aside, record

from .records import Line
from .updates import Turns, Updates

MOST = 16
"""Recordings that are kept; updates of yet another kind are made step by step."""
LEAST_TOGETHER, TOGETHER = 3, 10
"""Updates in one launch, where there are several."""
MOST_TOGETHER = 8
"""Recordings of several updates that are kept."""
MOST_SEEN = 4096
"""Kinds of updates that are remembered as seen: a schedule may make every update one of its own."""


class Recorded(NamedTuple):
    """A recording, the names of its metrics, and what it was made from, whose memory it goes on using."""

    recording: Recording
    names: tuple[tuple[tuple[str, bool], ...], ...]
    made_from: Any


class Planned(NamedTuple):
    """What is known of an update before it: its number, its rows, and whose turns it has."""

    step: int
    batch: Any
    turns: Turns


class Captured:
    """Updates that are launched as a whole from the second of their kind on.

    The first of a kind is made step by step, in which optimisers and methods set up what they keep. Several updates
    are launched together from the second time on that they follow each other, where each was recorded before.
    """

    def __init__(self, updates: Updates, rng: torch.Generator, device: torch.device):
        self.updates, self.rng, self.device = updates, rng, device
        self.forget()

    def forget(self) -> None:
        """Drop all recordings, as when a checkpoint has put other memory in the place of what they use."""
        self.recordings: dict[Hashable, Recorded] = {}
        self.seen: set[Hashable] = set()
        self.kinds: dict[Hashable, int] = {}
        self.states: dict[int, Any] = {}
        self.batches: dict[tuple[int, ...], list[Any]] = {}
        self.state, self.kind = None, -1

    def prepared(self, context: Any, state: Any, planned: Sequence[Planned]) -> Recorded | None:
        """The recording of these updates in a row; None where they are still to be made in smaller steps.

        Raises:
            CaptureError: they cannot be recorded; everything is as it was before.
        """
        self.kind = self.kind if state is self.state else self._kind_of(state)
        keys = self._keys(replace(context), planned)
        key, several = tuple(keys), len(keys) > 1
        if key in self.recordings:
            return self.recordings[key]
        if several and not all((one,) in self.recordings for one in keys):
            return None
        made = sum(len(known) > 1 for known in self.recordings)  # pyright: ignore
        full = made >= MOST_TOGETHER if several else len(self.recordings) - made >= MOST
        if key not in self.seen or full:
            if len(self.seen) >= MOST_SEEN:
                self.seen.clear()
            self.seen.add(key)
            return None
        own = (context.data, context.given)
        batches = replace_leaves(
            [one.batch for one in planned], lambda x: x if any(x is y for y in own) else x.clone()
        )
        self.batches.setdefault(self._rows_of(planned), batches)
        self._bring(state, planned)
        self.recordings[key] = self._record(context, planned)
        return self.recordings[key]

    def launched(self, recorded: Recorded, state: Any, planned: Sequence[Planned]) -> tuple[Any, list[Line]]:
        """The state after these updates, and their metrics."""
        self._bring(state, planned)
        values = [value.clone() for value in recorded.recording.replay()]
        return self.state, [Line(*line) for line in zip(recorded.names, values, strict=True)]

    def _keys(self, context: Any, planned: Sequence[Planned]) -> list[Hashable]:
        """Of each update all that those of one recording share."""
        keys, first = [], self.updates.first_average
        for step, batch, turns in planned:
            context.step = step
            keys.append((self.updates.method.phase(context), turns, first, self.kind, self._kind_of(batch)))
        return keys

    def _rows_of(self, planned: Sequence[Planned]) -> tuple[int, ...]:
        """The kinds of the batches."""
        return tuple(self._kind_of(one.batch) for one in planned)

    def _kind_of(self, tree: Any) -> int:
        """A short name for what trees of one kind share."""
        return self.kinds.setdefault(shape_of(tree), len(self.kinds))

    def _bring(self, state: Any, planned: Sequence[Planned]) -> None:
        """State and batches into the memory that recordings use; all data, which stay, are used where they are."""
        if self.kind not in self.states:
            self.states[self.kind] = copied(state)
        elif state is not self.states[self.kind]:
            write(self.states[self.kind], state)
        self.state = self.states[self.kind]
        write(self.batches[self._rows_of(planned)], [one.batch for one in planned])

    def _record(self, context: Any, planned: Sequence[Planned]) -> Recorded:
        state, kind, names = self.state, self.kind, []
        # the numbers of these updates, for as long as the recording is used
        told = [
            (replace(context, step=one.step), batch, one.turns)
            for one, batch in zip(planned, self.batches[self._rows_of(planned)], strict=True)
        ]
        places = {t.untyped_storage().data_ptr() for t in (*self.updates.changed(), *tensors_of(state))}

        def update() -> tuple[Tensor, ...]:
            new, lines, held, join = state, [], [], lambda: None
            try:
                for place, one in enumerate(told):
                    self.updates.turn_to(place)
                    new, averaged, latest = self.updates(one[0], new, *one[1:])
                    if self._kind_of(new) != kind:
                        raise CaptureError(
                            "cannot be recorded: the method's state changes its shape each time"
                        )
                    # what is read beside the next update is held until that is done, and what that changes copied
                    held += [apart(averaged, places), apart(latest, places)]
                    with aside(self.device) as join:
                        lines.append(Line.of(*held[-2:]))
            finally:
                self.updates.turn_to(0)
            join()
            write(state, new)
            joined = Line.joined(lines) if len(lines) > 1 else lines
            names[:] = [line.names for line in joined]
            return tuple(line.values for line in joined)

        parts = [m for player in self.updates.players.values() for m in player.modules()]
        require_no_hooks(parts)
        before = [plain_values(part) for part in parts]
        changes = [*self.updates.changed(), *tensors_of(state)]
        others = next(iter(self.recordings.values()), None)
        graph = None if others is None else others.recording.graph
        pool = None if graph is None else graph.pool()
        warm = WARM if len(planned) == 1 else 0  # each was made on the same stream before
        recording = record(update, self.device, changes=changes, generators=[self.rng], pool=pool, warm=warm)
        require_unchanged(parts, before)
        return Recorded(recording, tuple(names), update)


def apart(metrics: Mapping[str, Tensor], places: set[int]) -> dict[str, Tensor]:
    """The same, with copies of what lies in memory that updates change."""
    return {k: v.clone() if v.untyped_storage().data_ptr() in places else v for k, v in metrics.items()}


def require_no_hooks(parts: Sequence[nn.Module]) -> None:
    """Hooks are Python, which a recording does not call."""
    for part in parts:
        if part._forward_hooks or part._forward_pre_hooks:
            who = type(part).__name__
            raise CaptureError(f"cannot be recorded: {who} has hooks, which would not be called")


def require_unchanged(parts: Sequence[nn.Module], before: Sequence[dict[str, Any]]) -> None:
    """Numbers and words are as they were `before`; where they are not, they are put back."""
    for part, old in zip(parts, before, strict=True):
        new = plain_values(part)
        if new != old:
            vars(part).update(old)
            name = next(key for key in {**new, **old} if new.get(key) != old.get(key))
            what = f"{type(part).__name__}.{name}"
            raise CaptureError(f"cannot be recorded: it changes {what}, which is no tensor")


def plain_values(module: nn.Module) -> dict[str, Any]:
    """Numbers and words that a module keeps, which a recording would not change."""
    return {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}


# ---- trees: tuples, lists, dictionaries and dataclasses of tensors and plain values


def _children(tree: Any) -> list[Any] | None:
    if isinstance(tree, (tuple, list)):
        return list(tree)
    if isinstance(tree, dict):
        return list(tree.values())
    if is_dataclass(tree):
        return [vars(tree)[field.name] for field in fields(tree)]
    return None


def leaves_of(tree: Any) -> Iterator[Any]:
    """What is no container, in order."""
    inside = _children(tree)
    if inside is None:
        yield tree
        return
    for child in inside:
        yield from leaves_of(child)


def tensors_of(tree: Any) -> list[Tensor]:
    """Its tensors, in order."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def shape_of(tree: Any) -> Hashable:
    """All that is the same in trees of one kind: containers, shapes of tensors, and plain values."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype, tree.device
    inside = _children(tree)
    if inside is None:
        return tree
    names = tuple(tree) if isinstance(tree, dict) else ()
    return type(tree), names, *map(shape_of, inside)


def replace_leaves(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with other tensors."""
    if isinstance(tree, Tensor):
        return change(tree)
    inside = _children(tree)
    if inside is None:
        return tree
    inside = [replace_leaves(child, change) for child in inside]
    if isinstance(tree, dict):
        return dict(zip(tree, inside, strict=True))
    if isinstance(tree, (tuple, list)):
        return type(tree)(inside) if type(tree) in (tuple, list) else type(tree)(*inside)
    return replace(tree, **{field.name: x for field, x in zip(fields(tree), inside, strict=True)})


def copied(tree: Any) -> Any:
    """The same tree in memory of its own."""
    return replace_leaves(tree, lambda leaf: leaf.detach().clone())


@torch.no_grad()
def write(tree: Any, new: Any) -> None:
    """The tensors of `new` into the memory of those of `tree`, a tree of the same kind, all at once."""
    pairs = [(own, x) for own, x in zip(tensors_of(tree), tensors_of(new), strict=True) if own.numel()]
    places = {own.untyped_storage().data_ptr() for own, _ in pairs}
    # a leaf that lies in another one's memory is taken out of it first
    moved = [
        (own, x.clone() if x.untyped_storage().data_ptr() in places else x)
        for own, x in pairs
        if x.data_ptr() != own.data_ptr() or x.stride() != own.stride()
    ]
    for kind in dict.fromkeys(own.dtype for own, _ in moved):
        same = [pair for pair in moved if pair[0].dtype == kind]
        torch._foreach_copy_([own for own, _ in same], [x.detach() for _, x in same])
