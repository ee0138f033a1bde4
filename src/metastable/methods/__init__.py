"""Training methods, one file per algorithm."""

from .adaptive import AdaptiveNCE
from .adversarial import AdversarialContrastive, FlowContrastive
from .base import ChainMethod, Context, Method, Negatives, Objective
from .bregman import Bregman
from .conditional import ConditionalNCE
from .contrastive import ContrastiveDivergence, ExactDraws, PersistentCD, ShortRun
from .density import Density
from .divergences import Divergence, register_divergence
from .fdivergence import FDivergence, rejection_sample
from .interpolating import InterpolatingNCE
from .jarzynski import Jarzynski
from .jem import JEM
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
        JEM,
        AdaptiveNCE,
        FDivergence,
        NCE,
        FlowContrastive,
        AdversarialContrastive,
        RankingNCE,
        ImplicitBC,
        InterpolatingNCE,
        ConditionalNCE,
        ScoreMatching,
        DenoisingScoreMatching,
        SlicedScoreMatching,
        Density,
    )
}

__all__ = [
    "JEM",
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
    "Density",
    "Divergence",
    "ExactDraws",
    "FDivergence",
    "FlowContrastive",
    "ImplicitBC",
    "InterpolatingNCE",
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
