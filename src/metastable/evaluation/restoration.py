"""Pictures without their noise, and pictures of which part is missing, from a trained energy.

A model of data with noise σ on them gives the clean event by Tweedie's formula, E[clean | x] = x − σ²·∇E(x), for
exp(−E) the density of x. What was not seen of an event is drawn from the model given what was: chains of MALA on
the energy in which those numbers are held, or pulled by a Gaussian likelihood (`core.observed.Observed`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from metastable.core.errors import require, require_choice
from metastable.core.observed import Observed
from metastable.core.parts import in_parts
from metastable.core.random import normal_like
from metastable.core.types import Energy, Walkers, energy_and_grad
from metastable.kernels import MALA
from metastable.walkers.continuing import FIRST_STEP, find_step_range, wander

PARTS = ("left", "right", "top", "bottom", "centre")
"""Masks by name: the half of a picture that is missing, or the middle of half its sides."""
MOST_STARTS = 4096
"""Walkers of the model among which the starts of chains are looked for."""


def tweedie(energy: Energy, x: Tensor, noise: float) -> Tensor:
    """E[clean | x] = x − σ²·∇E(x), `(B, *event)`: for exp(−E) the density of clean events with noise σ on them.

    >>> tweedie(lambda x: x.square().sum(1) / (2 * 1.25), torch.tensor([[1.0]]), 0.5)  # N(0, 1) and noise 1/2
    tensor([[0.8000]])
    """
    return in_parts(lambda part: part - noise**2 * energy_and_grad(energy, part).grad, x)


def mask_named(name: str, shape: tuple[int, ...]) -> Tensor:
    """True where a picture `(…, H, W)` is missing: one of `PARTS`."""
    require_choice("mask", name, PARTS)
    (height, width), all_of = shape[-2:], slice(None)
    places = {
        "left": (all_of, slice(width // 2)),
        "right": (all_of, slice(width // 2, None)),
        "top": (slice(height // 2), all_of),
        "bottom": (slice(height // 2, None), all_of),
        "centre": tuple(slice(side // 4, side // 4 + side // 2) for side in (height, width)),
    }
    missing = torch.zeros(shape, dtype=torch.bool)
    missing[..., *places[name]] = True
    return missing


def class_means(x: Tensor, labels: Tensor, wanted: Tensor) -> Tensor:
    """The mean of all events `x` of a class, for each of the labels `wanted`, `(B, *event)`.

    >>> class_means(torch.tensor([[0.0], [2.0], [5.0]]), torch.tensor([0, 0, 1]), torch.tensor([1, 0])).tolist()
    [[5.0], [1.0]]
    """
    means = {label: x[labels == label].mean(0) for label in wanted.unique().tolist()}
    return torch.stack([means[label] for label in wanted.tolist()])


@dataclass(frozen=True)
class Restored:
    """Draws of what events were before part of them was lost.

    Attributes:
        draws: `(B, draws, *event)`.
        given: what was given, `(B, *event)`; a missing number is what its chain's noise would begin at.
        missing: which numbers were not seen, bool `(B, *event)`.
        noise: standard deviation of the noise on those that were.
        info: of the chains: `acceptance` and `step_sizes`; nothing where all was held and none ran.
    """

    draws: Tensor
    given: Tensor
    missing: Tensor
    noise: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def mean(self) -> Tensor:
        """Of the draws, `(B, *event)`: the best guess in mean squared error, as far as noise of training allows."""
        return self.draws.mean(1)

    @property
    def spread(self) -> Tensor:
        """Standard deviation between the draws, `(B, *event)`.

        Each is the mean of clean events given one with the noise of training, which they spread around.
        """
        return self.draws.std(1) if self.draws.shape[1] > 1 else torch.zeros_like(self.mean)

    def errors(self, truth: Tensor, **guesses: Tensor) -> dict[str, float]:
        """Mean squared errors over the numbers that were not known, of what was given, of a draw and of the mean.

        `guesses` are others to compare with, such as the mean event of each one's class, `(B, *event)`. `variance`
        is that of the draws: a draw of the right law is wrong by as much as the draws differ, twice.
        """
        unknown = self.missing if self.noise == 0 else torch.ones_like(self.missing)
        rule = f"{len(self.given)} events of shape {tuple(self.given.shape[1:])}"
        require(truth.shape == self.given.shape, "truth", rule, tuple(truth.shape))
        truth = truth.to(self.draws)

        def over(squares: Tensor) -> float:
            return float(squares[unknown].double().mean())

        return {
            "given": over((self.given - truth).square()),
            "draw": over((self.draws - truth[:, None]).square().mean(1)),
            "mean": over((self.mean - truth).square()),
            "variance": over(self.spread.square()),
            **{name: over((guess.to(truth) - truth).square()) for name, guess in guesses.items()},
        }


def restore(
    energy: Energy,
    given: Tensor,
    missing: Tensor,
    walkers: Walkers | None,
    *,
    noise: float,
    data_noise: float,
    draws: int,
    steps: int,
    scale: Tensor,
    rng: torch.Generator,
) -> Restored:
    """Draws of the clean event given what was seen of it.

    The model is of events x with noise s on them, what was seen has noise σ. Where σ > s it is x with noise of
    variance σ² − s² more, whose likelihood pulls; else x is what was seen with noise of variance s² − σ² more, and
    is held there. Then x without its noise, `tweedie`, is the clean event: its mean, given x. What was seen with
    σ < s is corrected by σ²·∇E(x) instead, and stays as it is where σ = 0.

    Args:
        energy: E, the model is exp(−E).
        given: events `(B, *event)`.
        missing: which numbers were not seen, bool `(B, *event)`.
        walkers: samples of the model; chains begin at those nearest to what was seen. None begins at noise.
        noise: σ.
        data_noise: s.
        draws: chains for each event.
        steps: moves of each.
        scale: units in which chains move, `(*event)`.
        rng: random numbers.
    """
    given = _filled(given, missing, walkers, rng)
    begin = given.repeat_interleave(draws, 0)
    hidden = missing.repeat_interleave(draws, 0)
    variance = max(noise**2 - data_noise**2, 0.0)
    seen = begin + max(data_noise**2 - noise**2, 0.0) ** 0.5 * normal_like(begin, rng)
    starts = begin if walkers is None else _nearest(given, missing, walkers, draws, scale, rng)
    model = Observed(energy, seen, hidden, scale, variance).to(given.device)
    aside = torch.zeros_like(begin) if variance else normal_like(begin, rng)  # z of the held follow N(0, 1)
    z = torch.where(hidden, (starts - seen) / scale, aside).to(given.dtype)
    info: dict[str, Any] = {}
    if variance or bool(hidden.any()):
        sizes = find_step_range(MALA(FIRST_STEP), model, z, rng)
        state, acceptance = wander(model, MALA().init(model, z), sizes, steps, rng)
        z, info = state.x, {"acceptance": acceptance, "step_sizes": tuple(sizes)}
    x = model.events(z)
    clean = tweedie(energy, x, data_noise) if data_noise else x
    if noise <= data_noise:  # what was seen has less noise than x has, none at all where σ = 0
        share = (noise / data_noise) ** 2 if data_noise else 0.0
        clean = torch.where(hidden, clean, begin - share * (x - clean))
    return Restored(clean.unflatten(0, (-1, draws)), given, missing, noise, info)


def _filled(given: Tensor, missing: Tensor, walkers: Walkers | None, rng: torch.Generator) -> Tensor:
    """What was given; where it is missing normal noise, as wide as the model or what was seen, else of width 1."""
    fresh = normal_like(given, rng)
    if walkers is None:
        seen = given[~missing]
        fresh = seen.mean() + seen.std() * fresh if len(seen) > 1 else fresh
    else:
        x = walkers.resampled(min(len(walkers), MOST_STARTS)).x.to(given)
        fresh = x.mean(0) + x.std(0) * fresh
    return torch.where(missing, fresh, given)


def _nearest(
    given: Tensor, missing: Tensor, walkers: Walkers, draws: int, scale: Tensor, rng: torch.Generator
) -> Tensor:
    """For each event the `draws` walkers nearest to it in what was seen, `(B·draws, *event)`.

    Walkers are drawn by their weights first; where there are fewer than `draws`, they come again.
    """
    seed = int(torch.randint(2**31, (), generator=rng, device=rng.device))
    x = walkers.resampled(min(len(walkers), MOST_STARTS), seed=seed).x.to(given)
    seen = (~missing).flatten(1).to(given)
    a, b = (given / scale).flatten(1) * seen, (x / scale).flatten(1)
    squares = (a * a).sum(1)[:, None] - 2 * a @ b.T + seen @ (b * b).T
    nearest = squares.argsort(1)[:, torch.arange(draws) % len(x)]
    return x[nearest.flatten()]
