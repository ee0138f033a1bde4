"""Normalised densities that sample and score: references, noise and negative samplers."""

from .basic import Gaussian, Uniform, fit_gaussian
from .choose import proposal_for, require_support
from .cnf import InterpolantFlow
from .diffusion import Diffusion, DiffusionEnergy
from .fields import ConcatSquash, MixtureField, ResidualField, VectorField
from .flows import Flow
from .generator import Generator
from .mixture import Mixture
from .signs import Signs, fit_signs

__all__ = [
    "ConcatSquash",
    "Diffusion",
    "DiffusionEnergy",
    "Flow",
    "Gaussian",
    "Generator",
    "InterpolantFlow",
    "Mixture",
    "MixtureField",
    "ResidualField",
    "Signs",
    "Uniform",
    "VectorField",
    "fit_gaussian",
    "fit_signs",
    "proposal_for",
    "require_support",
]
