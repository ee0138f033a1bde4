"""Who learned faster, and who learned more: the five courses that the objective of ranking NCE takes.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive estimation
and interpolating energy models*, TMLR 2024, Section 4.4 and Figure 2. The objective E log q₀ is 0 where every
datum is told from its K negatives, and −log(K + 1) where energy and proposal both are the data's law, since
nothing tells K + 1 draws of one law apart. It lies below where the energy does worse than nothing: its ranking of
data and negatives misleads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

NEAR = 0.05  # nats: how near to −log(K + 1) counts as there
NEAR_SHARE = 0.02  # the same as a share of log(K + 1)
TURN_SHARE = 0.05  # of log(K + 1): a rise or fall that is smaller is none
COLLAPSED = -0.01  # above: a datum's mean weight 1 − q₀ is below a hundredth
CLEAR = 5.0  # standard errors
WINDOWS = 50  # of the log: the length over which the course is smoothed is a fiftieth

COLLAPSE, CAUGHT_UP, BEHIND = "posterior-collapse", "proposal-caught-up", "proposal-behind"
AHEAD, OVERTOOK, MISLEADING, BALANCED = "proposal-ahead", "energy-overtook", "energy-behind", "balanced"


@dataclass(frozen=True)
class Profile:
    """The course of an objective.

    Attributes:
        name: of Figure 2's curves `posterior-collapse`; `proposal-caught-up` and `proposal-behind`, where the
            energy was ahead at first; `proposal-ahead` and `energy-overtook`, where the proposal was. Beside them
            `energy-behind`, which ends below −log(K + 1), `balanced`, which was there all along, and empty for a
            level between that and 0.
        start, peak, end: at first, at its highest, and over the last fifth, in nats.
        level: −log(K + 1).
    """

    name: str
    start: float
    peak: float
    end: float
    level: float


def ranking_profile(objective: np.ndarray, negatives: int, error: float = 0.0) -> Profile:
    """The course of a logged objective, named.

    Args:
        objective: in the order of the log, finite.
        negatives: K.
        error: standard error of a mean over a fifth of the log.

    >>> steps = np.linspace(0, 1, 100)
    >>> ranking_profile(-math.log(8) * (1 - np.exp(-40 * steps)), 7).name  # starts at 0, falls to −log 8
    'proposal-caught-up'
    """
    level = -math.log(negatives + 1)
    n = len(objective)
    width = max(1, n // WINDOWS)
    smooth = np.convolve(objective, np.ones(width) / width, mode="valid")
    end = float(objective[-max(1, n // 5) :].mean())
    noise = error * math.sqrt(max(1, n // 5) / width)  # of the smoothed course
    turn = max(NEAR, -TURN_SHARE * level, CLEAR * noise)
    start, peak = float(smooth[0]), float(smooth.max())
    name = _name(
        end, level, max(NEAR, -NEAR_SHARE * level, CLEAR * error), peak - end > turn, end - start > turn
    )
    return Profile(name, start, peak, end, level)


def _name(end: float, level: float, near: float, fell: bool, rose: bool) -> str:
    if end > COLLAPSED:
        return COLLAPSE
    if end < level - near:
        return MISLEADING
    there = end <= level + near
    if fell:
        return CAUGHT_UP if there else BEHIND
    if rose:
        return AHEAD if there else OVERTOOK
    return BALANCED if there else ""
