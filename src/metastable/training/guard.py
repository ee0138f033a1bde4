"""Stops training when its numbers have stopped meaning anything, and says what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from metastable.core.errors import DivergenceError
from metastable.core.step_advice import signs_of, why_diverged

from .records import Row

ENERGIES = ("energy_data", "energy_negatives", "energy_noisy")
WATCHED = (*ENERGIES, "energy_gap", "grad_norm")
EXPONENTS = ("exponent_min", "exponent_max")
"""Extremes of the exponents H + E, which a method with a density ratio e^{H+E} logs."""


@dataclass(frozen=True)
class Guard:
    """Looks at each line of metrics.

    Attributes:
        energy_limit: a mean energy beyond ± this has exploded.
        seed: named in the message, so that the failure can be repeated.
    """

    energy_limit: float
    seed: int

    def reason(self, row: Row) -> str | None:
        """What is wrong with this row, or None."""
        for name, value in row.items():
            if not math.isfinite(value) and name in (*WATCHED, "log_z", "ess"):
                return f"{name} is {value}{_exponents(row)}"
        for name in ENERGIES:
            if name in row and abs(row[name]) > self.energy_limit:
                return f"{name} = {row[name]:.3g} is beyond the energy_limit of ±{self.energy_limit:.3g}"
        return None

    def error(
        self, reason: str, step: int, checkpoint: str | None, rows: Sequence[Row] = ()
    ) -> DivergenceError:
        """The error that names step, seed, last good checkpoint, the likely cause and what to try.

        The cause is looked for in the last of `rows`, the bad one at their end; the diagnosis says the same.
        """
        cause, advice = why_diverged(signs_of(rows[-2:]))
        kept = (
            f"The last good checkpoint is {checkpoint}." if checkpoint else "No checkpoint was written yet."
        )
        return DivergenceError(
            f"training diverged by step {step} (seed {self.seed}): {reason}. "
            + " ".join(words for words in (kept, cause, advice) if words),
            step=step,
            checkpoint=checkpoint,
        )


def _exponents(row: Row) -> str:
    """How far H + E or log g went on this line, where a method exponentiates it: what usually overflows."""
    if "log_g_max" in row:
        return (
            f" where |log g|, which is exponentiated, went up to {row['log_g_max']:.4g} (single precision ends at "
            "88, and at half of that for psi='squared'); psi='nce', a shorter interval or a smaller rate avoid that"
        )
    if not all(name in row for name in EXPONENTS):
        return ""
    low, high = (row[name] for name in EXPONENTS)
    return (
        f" where H + E, which is exponentiated, went from {low:.4g} to {high:.4g} (single precision ends at ±88, "
        "and at half of that where the divergence squares the ratio); a bounded divergence (f='js'), a start "
        "nearer to the data or clip_exponent avoid that"
    )
