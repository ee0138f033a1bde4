"""Policies: conditional models that act, and worlds to act in."""

from metastable.methods.conditional_sampling import Best, best_of

from .actions import ActionModel, RunActions
from .policy import Policy, PolicyConfig, fit_policy, load_policy, policy_of

__all__ = [
    "ActionModel",
    "Best",
    "Policy",
    "PolicyConfig",
    "RunActions",
    "best_of",
    "fit_policy",
    "load_policy",
    "policy_of",
]
