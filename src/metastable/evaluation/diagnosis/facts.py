"""What is known of a run beside its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from metastable.core.errors import InputError
from metastable.core.traits import Traits

WEIGHT_SE = 4.0  # standard errors
COLLAPSE_LEAST_WEIGHT = 0.05  # a data mode below this may be missed by chance
COLLAPSE_KEPT = 0.2  # share of its mass below which a mode is lost
FAR_SHARE = 0.01  # of the samples: what lies that far out is mass that has left, not a tail


@dataclass(frozen=True)
class Facts:
    """What is known beside the log; every field may be left out.

    Attributes:
        method: the training method, or its name; what it says of itself decides which rules apply.
        data_mode_weights: weight of each mode in the data.
        sample_mode_weights: weight of each mode in the model's samples.
        mode_weight_se: standard error of the difference of the two, one number or one for each mode.
        separated: whether gaps of low density lie between the modes.
        held_out_energy_gap: mean energy of held-out data minus that of training data, in nats. As log Z
            cancels, this is exactly how much more likely training data are.
        held_out_energy_gap_se: its standard error.
        sample_std_ratio: RMS standard deviation of the samples over that of the data.
        duplicates: share of walkers that have an identical twin.
        step_size: of the kernel, h.
        steps: updates made; by default the last logged step.
        energy_spread: standard deviation of P·E over data and noise together, in nats.
        negatives_per_datum: K of ranking NCE, whose objective ends at −log(K + 1) where all is matched.
        power: P, where what was learned is exp(−P·E). Energies of the log, which are E, are nats when multiplied
            with it, and so they are judged.
        output_scale: o, where P·E is −o·log Σ e^h of a classifier's logits. Where labels are learned too, the gap
            is judged in units of it, and not at all without it.
        far_share: share of the samples that lie far beyond every datum.
        sample_radius: their median distance from the data's centre, in root mean square distances of the data.
        bare: whether the energy stands on no reference density that holds it.
        rays_down: share of the rays away from the data along which exp(−P·E) has no finite integral.
        log_likelihood: mean log-density of held-out data.
        log_likelihood_se: its standard error, that of log Z included.
        entropy: of the data's law, in nats, in the coordinates of `log_likelihood`.
        entropy_se: its standard error.
        copies: share of the data that are copies of another row.
        dimensions: of an event.
        excess_mass: log of the mass that the density has around the data by importance sampling, at most about 0.
    """

    method: Any = None
    data_mode_weights: Sequence[float] | None = None
    sample_mode_weights: Sequence[float] | None = None
    mode_weight_se: Sequence[float] | float | None = None
    separated: bool | None = None
    held_out_energy_gap: float | None = None
    held_out_energy_gap_se: float | None = None
    sample_std_ratio: float | None = None
    duplicates: float | None = None
    step_size: float | None = None
    steps: int | None = None
    energy_spread: float | None = None
    negatives_per_datum: int | None = None
    power: float = 1.0
    output_scale: float | None = None
    far_share: float | None = None
    sample_radius: float | None = None
    bare: bool = False
    rays_down: float | None = None
    log_likelihood: float | None = None
    log_likelihood_se: float | None = None
    entropy: float | None = None
    entropy_se: float | None = None
    copies: float | None = None
    dimensions: int | None = None
    excess_mass: float | None = None

    def __post_init__(self) -> None:
        if self.data_mode_weights is None or self.sample_mode_weights is None:
            return
        modes, given = len(self.data_mode_weights), len(self.sample_mode_weights)
        errors = self.mode_weight_se
        count = modes if errors is None or isinstance(errors, (int, float)) else len(errors)
        if given != modes or count != modes:
            raise InputError(
                f"sample_mode_weights, mode_weight_se: must have one number for each of the {modes} "
                f"data_mode_weights, got {given} and {count}"
            )

    @property
    def traits(self) -> Traits:
        """What the method says of itself; a method that nobody knows gets every check."""
        return Traits.of(self.method)

    @property
    def weight_differences(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Data weights, sample weights and standard errors of the difference, each `(M,)`."""
        if self.data_mode_weights is None or self.sample_mode_weights is None:
            return None
        data = np.asarray(self.data_mode_weights, float)
        error = np.nan if self.mode_weight_se is None else self.mode_weight_se
        errors = np.broadcast_to(np.asarray(error, float), data.shape)
        return data, np.asarray(self.sample_mode_weights, float), errors

    @property
    def lost_modes(self) -> list[int]:
        """Data modes of substantial weight that kept less than a fifth of it, beyond chance."""
        differences = self.weight_differences
        if differences is None:
            return []
        data, sample, error = differences
        certain = (data - sample > WEIGHT_SE * error) | np.isnan(error)
        lost = (data >= COLLAPSE_LEAST_WEIGHT) & (sample < COLLAPSE_KEPT * data) & certain
        return np.flatnonzero(lost).tolist()

    @property
    def has_left(self) -> bool:
        """Whether mass has left the data for good."""
        return self.far_share is not None and self.far_share > FAR_SHARE

    @property
    def far_from_data(self) -> bool:
        """Whether samples are not where the data are."""
        ratio = self.sample_std_ratio
        return self.has_left or bool(self.lost_modes) or (ratio is not None and not 0.5 <= ratio <= 2)
