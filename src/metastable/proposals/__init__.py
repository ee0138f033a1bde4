"""Normalised densities that sample and score: references, noise and negative samplers."""

from .basic import Gaussian, Uniform, fit_gaussian
from .choose import proposal_for, require_support

__all__ = ["Gaussian", "Uniform", "fit_gaussian", "proposal_for", "require_support"]
