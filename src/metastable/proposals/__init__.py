"""Normalised densities that sample and score: references, noise and negative samplers."""

from .basic import Gaussian, Uniform, fit_gaussian
from .choose import proposal_for, require_support
from .flows import Flow
from .generator import Generator
from .mixture import Mixture
from .signs import Signs, fit_signs

__all__ = [
    "Flow",
    "Gaussian",
    "Generator",
    "Mixture",
    "Signs",
    "Uniform",
    "fit_gaussian",
    "fit_signs",
    "proposal_for",
    "require_support",
]
