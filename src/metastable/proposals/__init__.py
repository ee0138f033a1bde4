"""Normalised densities that sample and score: references, noise and negative samplers."""

from .basic import Gaussian, Uniform, fit_gaussian

__all__ = ["Gaussian", "Uniform", "fit_gaussian"]
