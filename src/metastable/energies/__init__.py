"""Energies: analytic targets with exact log Z, networks, and the check that any callable goes through."""

from .analytic import Banana, DoubleWell, Funnel, Gaussian, GaussianMixture, two_modes
from .check import check_conditional, check_energy
from .discrete import RBM, BoltzmannMachine, DiscreteEnergy, Hopfield
from .networks import MLP, ConvNet, Tilted, zero_last_layer
from .spectral import SpectralNorm, spectral_norm

__all__ = [
    "MLP",
    "RBM",
    "Banana",
    "BoltzmannMachine",
    "ConvNet",
    "DiscreteEnergy",
    "DoubleWell",
    "Funnel",
    "Gaussian",
    "GaussianMixture",
    "Hopfield",
    "SpectralNorm",
    "Tilted",
    "check_conditional",
    "check_energy",
    "spectral_norm",
    "two_modes",
    "zero_last_layer",
]
