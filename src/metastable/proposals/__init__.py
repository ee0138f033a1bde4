"""Normalised densities that sample and score: references, noise and negative samplers."""

from .basic import Gaussian, Uniform, fit_gaussian
from .choose import proposal_for, require_support
from .cnf import InterpolantFlow
from .diffusion import Diffusion
from .diffusion_energy import DiffusionEnergy
from .fields import ConcatSquash, ResidualField, VectorField
from .fitted import fit_reference
from .flows import Flow
from .generator import Generator
from .mixture import Mixture
from .mixture_field import MixtureField
from .nearness import Nearness
from .pictures import PictureEncoder
from .regression import Regression
from .scale_mixture import ScaleMixture
from .signs import Signs, fit_signs
from .tokens import Tokenizer
from .transformer import FilmField, TransformerField

__all__ = [
    "ConcatSquash",
    "Diffusion",
    "DiffusionEnergy",
    "FilmField",
    "Flow",
    "Gaussian",
    "Generator",
    "InterpolantFlow",
    "Mixture",
    "MixtureField",
    "Nearness",
    "PictureEncoder",
    "Regression",
    "ResidualField",
    "ScaleMixture",
    "Signs",
    "Tokenizer",
    "TransformerField",
    "Uniform",
    "VectorField",
    "fit_gaussian",
    "fit_reference",
    "fit_signs",
    "proposal_for",
    "require_support",
]
