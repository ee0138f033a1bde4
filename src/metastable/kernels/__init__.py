"""Markov kernels: pure functions over tuples of tensors."""

from .adaptation import warm_up
from .base import ChainState, Info, Kernel, Noise
from .chain import ChainResult, run_chain
from .hmc import HMC
from .mala import MALA
from .ula import ULA

KERNELS: dict[str, type[Kernel]] = {k.name: k for k in (ULA, MALA, HMC)}

__all__ = [
    "HMC",
    "KERNELS",
    "MALA",
    "ULA",
    "ChainResult",
    "ChainState",
    "Info",
    "Kernel",
    "Noise",
    "run_chain",
    "warm_up",
]
