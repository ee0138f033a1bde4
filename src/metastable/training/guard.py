"""Stops training when its numbers have stopped meaning anything, and says what to try."""

from __future__ import annotations

import math
from dataclasses import dataclass

from metastable.core.errors import DivergenceError

from .records import Row

ENERGIES = ("energy_data", "energy_negatives", "energy_noisy")
WATCHED = (*ENERGIES, "energy_gap", "grad_norm")
ADVICE = (
    "Try a smaller learning rate, a smaller kernel step_size, more kernel steps per update, "
    "clip_grad_norm=1, or on_divergence='rollback'."
)
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

    def error(self, reason: str, step: int, checkpoint: str | None) -> DivergenceError:
        """The error that names the step, the seed, the last good checkpoint and what to try."""
        kept = (
            f"The last good checkpoint is {checkpoint}." if checkpoint else "No checkpoint was written yet."
        )
        return DivergenceError(
            f"training diverged by step {step} (seed {self.seed}): {reason}. {kept} {ADVICE}",
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
