"""Energies: analytic targets with exact log Z, networks, and the check that any callable goes through."""

from .analytic import Banana, DoubleWell, Funnel, Gaussian, GaussianMixture, two_modes
from .check import check_energy
from .networks import MLP, ConvNet, Tilted, zero_last_layer

__all__ = [
    "MLP",
    "Banana",
    "ConvNet",
    "DoubleWell",
    "Funnel",
    "Gaussian",
    "GaussianMixture",
    "Tilted",
    "check_energy",
    "two_modes",
    "zero_last_layer",
]
