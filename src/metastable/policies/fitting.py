"""Training a model of chunks given contexts, and making it a policy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from metastable.api import fit
from metastable.core.errors import require
from metastable.data.demonstrations import Demonstrations, Scaling
from metastable.methods.ranked import Ranked
from metastable.proposals.continuous import ContinuousFlow
from metastable.runs.folder import NUMBER
from metastable.runs.resolve import resolve_method
from metastable.runs.run import Run
from metastable.training.config import TrainerConfig

from .beneath import coarser, flow_of
from .config import PolicyConfig, actions_of
from .defaults import acting_for, energy_for, method_for, rate_for, training_for
from .policy import Policy


def fit_policy(
    demonstrations: Demonstrations,
    energy: Any = None,
    method: Any = None,
    config: PolicyConfig | Mapping[str, Any] | None = None,
    *,
    padded: bool = True,
    noise: tuple[float, float] | float | None = (0.01, 0.005),
    augment: str | Sequence[str] = (),
    on: Policy | None = None,
    seed: int = 0,
    **options: Any,
) -> Policy:
    """Train a model of chunks given contexts, and make it a policy.

    Args:
        demonstrations: to learn from.
        energy: as `metastable.fit` takes it; by default a flow learned by interpolants, in 64 Heun steps, and with
            `on` an energy that starts as that flow.
        method: likewise: `density` for flows and diffusions, `ranking-nce`, `interpolating-nce` or `ibc`; by
            default `density`, and with `on` `ranking-nce`.
        config: how the policy acts, or a table of it; its windows are what is trained on. What a table leaves out
            is that of `PolicyConfig`, but a flow or diffusion takes one draw, and what is `on` another has its
            windows.
        padded: whether windows reach beyond the ends of their episode, see `Demonstrations.windows`.
        noise: σ_pert at first, and from half of the training on, on chunks and on what of the contexts may be
            noised; one number for both, None for none. Beside a proposal that stays it is the last throughout, for
            data of another noise than it has learned differ from its draws by that alone.
        augment: ways in which the pictures of every update are changed at random, such as `shift`, alike in all
            of a window; see `TrainerConfig.augment`.
        on: a policy whose flow becomes the proposal of a ranking method, and stays as it is: it was trained by
            `density` with `units="none"`, on demonstrations of the same ranges. What is trained on a flow is read
            back by `load_policy`: the run's own settings name the flow's class alone. Where the method's `proposal`
            is a table with `steps` and `scored`, draws of training are solved in so many, and those of acting in
            the flow's own.
        seed: of everything random.
        options: of `metastable.fit`; `out` keeps the run and the policy in a folder. Flows, diffusions and what is
            `on` one train by default for as many updates as `defaults.updates_for` says, with a rate that falls
            to zero, in the demonstrations' units.
    """
    rule = "Demonstrations, which Demonstrations.of(observations, actions, ends) and load_episodes(file) make"
    require(isinstance(demonstrations, Demonstrations), "demonstrations", rule, type(demonstrations).__name__)
    require(on is None or isinstance(on, Policy), "on", "a policy, which load_policy(folder) reads", on)
    theirs = sorted({"data", "given", "labels", "before"} & set(options))
    require(not theirs, "options", "of fit, but for those that a policy's training has of its own", theirs)
    method, own = resolve_method(method_for(on is not None) if method is None else method), energy is not None
    require(on is None or isinstance(method, Ranked), "method", "one that ranks, with on=…", method.name)
    config = acting_for(config, method, None if on is None else on.config, own)
    config.refuse_for(method)
    scaling = Scaling.fit(demonstrations, config.prediction)
    flow, table = (None, None) if on is None else flow_of(on, config, scaling)
    data = demonstrations.windows(config.context, config.prediction, padded=padded).dataset(scaling)
    energy = energy if own else energy_for(scaling, config.context, method, table)
    rate = rate_for(on is not None, bool(scaling.pictures), own)
    options = training_for(len(data), method, on is not None, rate, options)
    stays = on is not None or (isinstance(method, Ranked) and not method.train_proposal)
    trainer = options.get("trainer")
    twice = noise is not None and isinstance(trainer, TrainerConfig) and trainer.data_noise > 0
    require(not twice, "noise", "None with a trainer that has its own data_noise", noise)
    assert data.given is not None
    options = {**_noised(noise, scaling.noised(config.context, data.given), stays), **options}
    if augment:
        at = scaling.pictures_at(config.context)
        require(bool(at), "augment", "left out for demonstrations without pictures", augment)
        options = {"given_augment": augment, "given_pictures": at, "units": "none", **options}
    if flow is not None:
        units = options.setdefault("units", "none")
        require(units == "none", "units", "'none' with on=…, as its flow was trained", units)
        assert isinstance(method, Ranked)  # told above
        method = replace(method, proposal=coarser(flow, method.proposal), train_proposal=False, pretrain=0)

    def before(run: Run) -> None:  # what it will not act by is refused before an hour of training
        actions_of(run, config).refuse_options()

    run = fit(energy, data, method, seed=seed, before=before, **{"evaluate": False, **options})
    if run.status == "interrupted":
        text = f"policy: stopped after {run.steps} steps; with out=… and resume=True the same call goes on"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    for found in run.diagnosis:
        if found.severity != "note":
            warnings.warn(f"policy: {found.text} {found.advice}", RuntimeWarning, stacklevel=2)
    if isinstance(flow, ContinuousFlow):
        drawn: Any = run.players["proposal"]
        drawn.steps, drawn.scored = flow.steps, flow.scored
    return policy_of(run, scaling, data.given, config, seed, table)


def _noised(
    noise: tuple[float, float] | float | None, given: tuple[float, ...], stays: bool
) -> dict[str, Any]:
    """Options of `fit` for σ_pert, `given` on contexts; beside a proposal that `stays` the last throughout."""
    if noise is None:
        return {}
    each = (noise, noise) if isinstance(noise, (int, float)) else noise
    two = isinstance(each, (tuple, list)) and len(each) == 2 and all(map(NUMBER[1], each))
    require(two, "noise", "a number, two of them, at first and at last, or None", noise)
    falls = {"data_noise": each[stays], "data_noise_final": each[1], "data_noise_over": 0.5}
    return {**falls, "given_noise": given}


def policy_of(
    run: Run,
    scaling: Scaling,
    contexts: Tensor,
    config: PolicyConfig | None = None,
    seed: int = 0,
    proposal: dict[str, Any] | None = None,
) -> Policy:
    """A run as a policy, settled on some of its contexts `(n, c)`, and saved where the run has a folder.

    Where nothing is frozen and no chain of its own moves draws, there is nothing to settle.
    """
    config = config or PolicyConfig()
    acting = actions_of(run, config)
    chains = acting.has_chains and config.steps != 0 and config.kernel is None  # None: there can be one later
    if chains or config.freeze or acting.tunes:
        acting = acting.settle(contexts, seed, chains)
    policy = Policy(acting, scaling, config, seed)
    policy.proposal = proposal
    if run.folder is not None:
        policy.save()
    return policy
