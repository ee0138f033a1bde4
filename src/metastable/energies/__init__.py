"""Energies: analytic targets with exact log Z, networks, and the check that any callable goes through."""

from metastable.core.check import check_conditional, check_energy, inside_walls

from .analytic import Banana, DoubleWell, Funnel, Gaussian, GaussianMixture, two_modes
from .boltzmann_hidden import HiddenBoltzmannMachine
from .by_class import ClassEnergy
from .conditional import ConditionalNet
from .discrete import RBM, BoltzmannMachine, DiscreteEnergy, Hopfield
from .image_nets import AdaNCENet, FEBMNet, ShortRunNet
from .joint import JointEnergy
from .networks import MLP, ConvNet, Tilted, on_reference, zero_last_layer
from .normalised import AsEnergy, as_energy
from .on_proposal import OnProposal
from .spectral import SpectralNorm, spectral_norm
from .transformer import TransformerEnergy
from .wide_resnet import WideResNet

__all__ = [
    "MLP",
    "RBM",
    "AdaNCENet",
    "AsEnergy",
    "Banana",
    "BoltzmannMachine",
    "ClassEnergy",
    "ConditionalNet",
    "ConvNet",
    "DiscreteEnergy",
    "DoubleWell",
    "FEBMNet",
    "Funnel",
    "Gaussian",
    "GaussianMixture",
    "HiddenBoltzmannMachine",
    "Hopfield",
    "JointEnergy",
    "OnProposal",
    "ShortRunNet",
    "SpectralNorm",
    "Tilted",
    "TransformerEnergy",
    "WideResNet",
    "as_energy",
    "check_conditional",
    "check_energy",
    "inside_walls",
    "on_reference",
    "spectral_norm",
    "two_modes",
    "zero_last_layer",
]
