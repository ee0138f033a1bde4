"""What a log says about steps: one set of words for the error of a training that diverged and for its diagnosis.

The metrics that are read, each where a method logs it: `acceptance` (adjusted moves only), `displacement` (of the
data's spread, in one update), `step_size` (only where it tunes itself) and `pace` (v, the variance of U_{k+1} − U_k
over walkers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

REFUSED = 0.1
"""Acceptance below which chains hardly move."""
THROWN = 3.0
"""Of the data's spread in one update: no chain that stays with the data goes as far."""
CRAWLING = 1e-2
"""Of the data's spread in one update."""
HASTY = 1.0
"""v beyond which weights of walkers spread by their own size in one update."""

SHORTER = "Lower step_size, or leave it out, so that it tunes itself"
LONGER = (
    "Raise step_size, or leave it out, so that it tunes itself; or take more chain steps for each update."
)
UNLIKE_WIDTHS = (
    "One step cannot fit directions of such different widths, and no other step_size will: bring the columns "
    "to one scale (units='whiten' or 'scale')"
)


class StepSigns(NamedTuple):
    """What was logged about steps; None for what was not."""

    acceptance: float | None = None
    displacement: float | None = None
    step_size: float | None = None
    pace: float | None = None

    @property
    def tuned(self) -> bool:
        """Whether the step tunes itself; a fixed one is a setting, and is not logged."""
        return self.step_size is not None

    @property
    def chains(self) -> bool:
        """Whether there are chains at all."""
        return self.displacement is not None


def signs_of(rows: Sequence[Mapping[str, Any]]) -> StepSigns:
    """The worst of a few successive rows: the least acceptance, the longest way, the largest v, the last step."""

    def known(name: str) -> list[float]:
        values = [row.get(name) for row in rows]
        return [float(v) for v in values if isinstance(v, (int, float)) and not math.isnan(v)]

    accepted, moved, steps, paces = map(known, ("acceptance", "displacement", "step_size", "pace"))
    return StepSigns(
        min(accepted, default=None),
        max(moved, default=None),
        steps[-1] if steps else None,
        max(paces, default=None),
    )


def why_diverged(signs: StepSigns) -> tuple[str, str]:
    """The likely cause of energies that ran away, empty where nothing points to one, and what to try.

    >>> why_diverged(StepSigns(displacement=40.0))[1][:15]
    'Lower step_size'
    """
    if signs.pace is not None and signs.pace > HASTY:
        return (
            f"One update changed the energies of walkers by a variance of {signs.pace:.2g}: the model moves faster "
            "than its walkers can follow.",
            "Lower the learning rate, or bound the pace (pace=0.03).",
        )
    if signs.chains and not signs.tuned:
        cause = _bad_step(signs)
        if cause is not None:
            return cause
    chains = ", more kernel steps per update" if signs.chains else ""
    return "", f"Try a smaller learning rate, clip_grad_norm=1{chains}, or on_divergence='rollback'."


def _bad_step(signs: StepSigns) -> tuple[str, str] | None:
    moved = signs.displacement or 0.0
    if signs.acceptance is not None and signs.acceptance < REFUSED:
        text = f"Chains accepted {signs.acceptance:.1%} of their proposals: the step is too long for this energy."
        return text, f"{SHORTER}."
    if moved > THROWN:
        text = f"Chains were thrown {moved:.2g} times the data's spread in one update: the step is too long."
        return text, f"{SHORTER}; MALA and HMC refuse such moves."
    if signs.acceptance is None and moved < CRAWLING:
        text = (
            f"Chains move {moved:.2g} of the data's spread in one update, and yet their energies ran away: "
            "the step is too short for the widest direction of the data and too long for the narrowest."
        )
        return text, f"{UNLIKE_WIDTHS}, and leave step_size out."
    return None


def why_slow(signs: StepSigns, diverged: bool) -> str:
    """What to try where chains crawl."""
    if signs.tuned:
        return (
            "The step tunes itself, and what keeps it short is the narrowest direction of the energy, or "
            "its steepest place: bring the columns to one scale (units='whiten'), take more chain steps for "
            "each update, or use kernel=HMC(...)."
        )
    if diverged or (signs.acceptance is not None and signs.acceptance < 0.5):
        return f"{UNLIKE_WIDTHS}; or use kernel=HMC(...)."
    return LONGER


def why_refused(signs: StepSigns) -> str:
    """What to try where hardly a proposal is accepted."""
    if signs.tuned:
        return (
            "The step tunes itself, and the energy grows steeper faster than it can follow: lower the learning "
            "rate, or bound the slope with spectral normalisation (energies.spectral_norm)."
        )
    return f"{SHORTER}: about 0.6 of the proposals should be accepted."
