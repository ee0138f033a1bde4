"""Papers as data. An experiment's module is imported when it is asked for, so that listing them is quick."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Experiment

TITLES: dict[str, str] = {
    "jarzynski-gmm": "Two modes in 50 dimensions: Jarzynski, PCD and CD (Fig. 1, 6, 7)",
    "jarzynski-collapse": "Mode collapse as a differential equation, and PCD's oscillations (Fig. 8, 14)",
    "jarzynski-resampling": "Two modes in 50 dimensions: whether, when and how to resample (Fig. 9, 10)",
    "jarzynski-minibatch": (
        "Two modes in 50 dimensions by mini-batches of walkers: Algorithm 2, PCD and CD (Fig. 1)"
    ),
    "jarzynski-published": (
        "Algorithm 1 as printed, sorted, and with held-out walkers, for every threshold (Fig. 6, 7)"
    ),
    "jarzynski-mnist": (
        "Three digits at 4/7, 2/7 and 1/7: who keeps their weights, and at which noise (Fig. 2-4, 11, 12)"
    ),
    "cifar10": "CIFAR-10 over minutes of one GPU: PCD, with augmentation, and Jarzynski (Table 1, Fig. 5, 13)",
    "cifar10-divergences": (
        "CIFAR-10 by class: four divergences and contrastive divergence at equal minutes (Table 1, G.1, G.6)"
    ),
    "cifar10-adance": (
        "CIFAR-10 with self-adapting NCE: FID against the interval, and where chains begin (Table 5.2)"
    ),
    "nce-bias": "The optimum of R-NCE and of IBC under a Gaussian proposal (Fig. 1)",
    "rnce-variance": "The variance of ranking NCE, and the χ² law of its divergence (Theorems 4.10, 4.12)",
    "rnce-learned": (
        "R-NCE whose proposal learns: its law, its Fisher distance and the adversary (Theorems 4.10, 4.17-4.21)"
    ),
    "rnce-hutchinson": "A Hutchinson estimate of the divergence breaks the ranking (footnote 6)",
    "rnce-profiles": "Who learns faster, energy or proposal: five courses of the R-NCE objective (Fig. 2)",
    "rnce-2d": "Conditional densities in the plane: R-NCE beside flows, diffusions and IBC (Tables 1 and 2)",
    "rnce-2d-paper": (
        "Conditional densities in the plane with the paper's turns, rates and sizes beside ours (Tables 2 and 8)"
    ),
    "path-planning": "Policies that walk around discs: R-NCE beside flows, diffusions and IBC (Fig. 4, Tables 3-5)",
    "push-t": (
        "Policies that push a T to its place: energies and diffusions from human demonstrations (Tables 6, 7)"
    ),
    "lasa": "Policies that write: human motions continued from their start, and two ways kept apart (LASA)",
    "febm-1d": "A Gaussian for data that are not: nine divergences and their density ratios (Fig. 1-4, Table 5)",
    "febm-stability": (
        "Local stability of f-EBM in one dimension, and why E must be slower than H (Theorems 4 and 5)"
    ),
    "febm-restoring": (
        "Digits without noise and half digits filled in, by four divergences and CD (Section 6.2, G.3, G.4)"
    ),
    "robust-toy": "Eight modes and four circles from chains that do not arrive: β and its variants (Fig. 2, 5-11)",
    "robust-readings": (
        "What the β paper leaves open: readings of Figure 6, and ring masses at the fixed point (App. I)"
    ),
    "jem-stability": (
        "A classifier that is a density: plain training diverges, with β it does not (Fig. 3, 16, 20, 24)"
    ),
    "jem-scale": "Where a JEM's output scale belongs: nowhere, on the energy, or on the logits (App. M.2)",
    "jem-ood": "A classifier of digits that knows what is no digit: MNIST inside, Fashion-MNIST outside",
    "jem-cifar10": (
        "CIFAR-10: seven scenarios of a classifier that is a density, with and without β (Table 2, Fig. 12–16)"
    ),
    "log-partition-coverage": "log Z of four targets: how often the 95 % interval covers the truth",
    "right-by-default": (
        "Default settings on data nobody prepared: units, scales, mode weights, contexts, log Z, tables"
    ),
    "rbm-exact": "Boltzmann machines against enumeration: Gibbs, annealed log Z, CD and PCD, pattern completion",
    "score-blind": "What scores cannot see: the weights of separated modes",
    "bregman-psi": (
        "Which Ψ: the variance of Bregman ratio matching against theory, and networks (Chapters 4 and 6)"
    ),
    "adance-background": (
        "Hidden units of a Boltzmann machine against enumeration, and HMC with a full mass matrix (Chapter 2)"
    ),
    "adance-interval": "Self-adapting NCE on a pinwheel: quality and Var(log g) against the interval K (Table 5.2)",
    "adance-stability": "Digits: rejuvenation and spectral normalisation in self-adapting NCE (Fig. 3.1–3.3)",
    "adance-mnist": "MNIST with the thesis's settings: rejuvenation and spectral normalisation (Fig. 3.1–3.3)",
    "adance-chains": "Short-run against converged chains in self-adapting NCE, for every interval (Section 5.3)",
}
"""Title of every experiment by its name; it is repeated here so that nothing need be imported."""

MODULES = {"log-partition-coverage": "log_partition"}
"""Of experiments whose module has another name than they have themselves."""


class _Experiments(Mapping[str, "Experiment"]):
    """Experiments by name, each imported at its first use."""

    def __getitem__(self, name: str) -> Experiment:
        if name not in TITLES:
            raise KeyError(name)
        module = MODULES.get(name, name.replace("-", "_"))
        return importlib.import_module(f"{__name__}.{module}").EXPERIMENT

    def __contains__(self, name: object) -> bool:
        return name in TITLES

    def __iter__(self) -> Iterator[str]:
        return iter(TITLES)

    def __len__(self) -> int:
        return len(TITLES)


EXPERIMENTS: Mapping[str, Experiment] = _Experiments()

__all__ = ["EXPERIMENTS", "TITLES"]
