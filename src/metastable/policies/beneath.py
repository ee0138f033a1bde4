"""The flow of one policy as the proposal beneath the energy of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from metastable.core.errors import InputError, require
from metastable.data.scaling import ACTION, Scaling
from metastable.proposals.choose import LEARNED
from metastable.proposals.continuous import ContinuousFlow

from .actions import RunActions
from .config import PolicyConfig
from .policy import Policy


def coarser(flow: nn.Module, proposal: Any) -> nn.Module:
    """A flow with the steps that the table of a proposal names; its own where there is none."""
    if not isinstance(flow, ContinuousFlow) or not isinstance(proposal, Mapping):
        return flow
    return flow.with_steps(proposal.get("steps", flow.steps), proposal.get("scored", flow.scored))


def flow_of(on: Policy, config: PolicyConfig, scaling: Scaling) -> tuple[nn.Module, dict[str, Any]]:
    """The flow that a policy was trained as, for one of these settings, and what it was built from."""
    model, own = on.model, on.scaling
    if not isinstance(model, RunActions) or model.run.config["energy"]["name"] not in LEARNED:
        raise InputError(f"on: must be the policy of a run of {' or '.join(LEARNED)}")
    if model.units is not None:
        raise InputError("on: must be trained in the demonstrations' own units; give fit_policy units='none'")
    for name in ("context", "prediction"):
        known, asked = vars(on.config)[name], vars(config)[name]
        require(asked == known, f"policy.{name}", f"{known}, as of the flow", asked)
    known, shapes = ({key: x.shape(key) for key in (*x.names, ACTION)} for x in (own, scaling))
    require(shapes == known, "demonstrations", f"of the shapes of the flow's, {known}", shapes)
    if own.as_json() != scaling.as_json() or own.names != scaling.names:
        rule = f"observations in the same order, {', '.join(own.names)}; give the same"
        raise InputError(f"on: must be trained on demonstrations of the same ranges, with {rule}")
    learned: Any = model.run.model.energy  # as it was trained, however it acts
    return learned.proposal, dict(model.run.config["energy"])
