"""Markov kernels: pure functions over tuples of tensors."""

from .adaptation import follow_acceptance, unadjusted_target, warm_up
from .base import ChainResult, ChainState, Info, Kernel, Noise, StepKernel
from .chain import run_chain
from .general import Flips, Independent, MetropolisHastings, RandomWalk
from .gibbs import Gibbs
from .hmc import HMC
from .mala import MALA
from .ula import ULA

KERNELS: dict[str, type[Kernel]] = {k.name: k for k in (ULA, MALA, HMC, Gibbs, MetropolisHastings)}

__all__ = [
    "HMC",
    "KERNELS",
    "MALA",
    "ULA",
    "ChainResult",
    "ChainState",
    "Flips",
    "Gibbs",
    "Independent",
    "Info",
    "Kernel",
    "MetropolisHastings",
    "Noise",
    "RandomWalk",
    "StepKernel",
    "follow_acceptance",
    "run_chain",
    "unadjusted_target",
    "warm_up",
]
