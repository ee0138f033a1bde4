"""Training methods, one file per algorithm."""

from .adaptive import AdaptiveNCE
from .adversarial import AdversarialContrastive, FlowContrastive
from .base import ChainMethod, Context, Method, Negatives, Objective
from .bregman import Bregman
from .conditional import ConditionalNCE
from .contrastive import ContrastiveDivergence, ExactDraws, PersistentCD, ShortRun
from .divergences import Divergence, register_divergence
from .fdivergence import FDivergence, rejection_sample
from .jarzynski import Jarzynski
from .mixed import Mixed
from .nce import NCE
from .ranking import ImplicitBC, RankingNCE
from .robust import Robust, robust_loss
from .score import DenoisingScoreMatching, ScoreMatching, SlicedScoreMatching

METHODS: dict[str, type[Method]] = {
    m.name: m
    for m in (
        ContrastiveDivergence,
        PersistentCD,
        ShortRun,
        ExactDraws,
        Jarzynski,
        Mixed,
        Robust,
        AdaptiveNCE,
        FDivergence,
        NCE,
        FlowContrastive,
        AdversarialContrastive,
        RankingNCE,
        ImplicitBC,
        ConditionalNCE,
        ScoreMatching,
        DenoisingScoreMatching,
        SlicedScoreMatching,
    )
}

__all__ = [
    "METHODS",
    "NCE",
    "AdaptiveNCE",
    "AdversarialContrastive",
    "Bregman",
    "ChainMethod",
    "ConditionalNCE",
    "Context",
    "ContrastiveDivergence",
    "DenoisingScoreMatching",
    "Divergence",
    "ExactDraws",
    "FDivergence",
    "FlowContrastive",
    "ImplicitBC",
    "Jarzynski",
    "Method",
    "Mixed",
    "Negatives",
    "Objective",
    "PersistentCD",
    "RankingNCE",
    "Robust",
    "ScoreMatching",
    "ShortRun",
    "SlicedScoreMatching",
    "register_divergence",
    "rejection_sample",
    "robust_loss",
]
