"""Policies: conditional models that act, and worlds to act in."""

from metastable.methods.conditional_sampling import Best, best_of

from .actions import ActionModel, RunActions
from .environments import Environments, PushT, gym_environments, pusht_pictures, pusht_starts
from .films import Film, film, film_pusht, films_pusht
from .fitting import fit_policy, policy_of
from .intervals import (
    Interval,
    bounded_mean,
    clopper_pearson,
    mean_over_starts,
    paired_difference,
    score_difference,
    score_over_starts,
    t_interval,
)
from .models import MODELS, PATHS, PUSH_T, Layout, PolicyModel, Sizes, layout_of, policy_model
from .path_frames import CentredPolicy, centred, roll_paths
from .path_world import PathWorlds, path_demonstrations, plan_paths, rollout_paths
from .planner import PathPrior, Planner
from .policy import Policy, PolicyConfig, load_policy
from .rollouts import Rollouts, rollout, rollout_pusht

__all__ = [
    "MODELS",
    "PATHS",
    "PUSH_T",
    "ActionModel",
    "Best",
    "CentredPolicy",
    "Environments",
    "Film",
    "Interval",
    "Layout",
    "PathPrior",
    "PathWorlds",
    "Planner",
    "Policy",
    "PolicyConfig",
    "PolicyModel",
    "PushT",
    "Rollouts",
    "RunActions",
    "Sizes",
    "best_of",
    "bounded_mean",
    "centred",
    "clopper_pearson",
    "film",
    "film_pusht",
    "films_pusht",
    "fit_policy",
    "gym_environments",
    "layout_of",
    "load_policy",
    "mean_over_starts",
    "paired_difference",
    "path_demonstrations",
    "plan_paths",
    "policy_model",
    "policy_of",
    "pusht_pictures",
    "pusht_starts",
    "roll_paths",
    "rollout",
    "rollout_paths",
    "rollout_pusht",
    "score_difference",
    "score_over_starts",
    "t_interval",
]
