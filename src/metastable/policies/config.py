"""How a policy acts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from metastable.core.configure import build, build_tagged
from metastable.core.errors import require, require_choice, require_count
from metastable.kernels import KERNELS
from metastable.methods import Density, Method
from metastable.methods.conditional_sampling import split_evaluations
from metastable.runs.run import Run

from .actions import IDLE, RANKS, UNSETTLED, RunActions

OF_RUNS = ("rank", "algorithm", "kernel", "ode", "sampling")
"""Settings that the model of a run acts by; `averaged` says by which weights."""
MOVES = 50
"""Of chains that start where nothing is known of what is seen."""
FOUND = ("covariance", "step_size", "sampler_step")
"""What `RunActions.settle` finds."""


@dataclass(frozen=True)
class PolicyConfig:
    """How a policy acts.

    Attributes:
        context: N_ctx, observations that it sees.
        prediction: N_pred, actions of a chunk.
        execute: of which so many are carried out before the next chunk.
        candidates: ℓ, chunks that are drawn, of which that of lowest energy is taken; 1 takes a draw as it is.
        steps: of the chain that moves them on the energy; 0 ranks the proposal's own draws. A density has no chain.
            None is 0, as an energy that is ranked against draws is right among them and may be anything beyond, and
            `MOVES` where these know nothing of what is seen (`uniform`), or where a `kernel` is given.
        warm: how many of the chains start from what is left of the last chunk. None is 1 for proposals that know
            nothing of what is seen, else 0: what is left is no draw, either, and its energy may be anything.
        freeze: actions of the last chunk that the next one begins with, so that the two join. Of 16 draws at least
            those are taken that begin nearest to them.
        rank: by what candidates are ranked: `energy`, or `network`, see `RunActions`; or `weights`: one is drawn by
            how much likelier it is than the proposal says, so that for many candidates it is a draw of the energy,
            at the cost of no density; no chain moves them then. With algorithm 2 alone: those of 4 are weighed.
        algorithm: 2, chains from the proposal's draws, or 4, the stages of an interpolating energy.
        kernel: of the chains, a table; see `RunActions`.
        averaged: whether it acts by the averages of the weights, where training kept them (`ema=…`).
        ode: Heun steps of a flow or diffusion that it draws from; None for those of its training. Fewer are faster.
        sampling: options of `Run.sample` for algorithm 4.
    """

    context: int = 2
    prediction: int = 16
    execute: int = 8
    candidates: int = 8
    steps: int | None = None
    warm: int | None = None
    freeze: int = 0
    rank: str = "energy"
    algorithm: int = 2
    sampling: dict[str, Any] = field(default_factory=dict)
    kernel: dict[str, Any] | None = None
    averaged: bool = True
    ode: int | None = None

    def __post_init__(self) -> None:
        for name in ("context", "prediction", "execute", "candidates"):
            require_count(f"policy.{name}", vars(self)[name])
        for name in ("steps", "warm", "freeze"):
            known = 0 if vars(self)[name] is None and name != "freeze" else vars(self)[name]
            require_count(f"policy.{name}", known, 0)
        require_count("policy.ode", 1 if self.ode is None else self.ode)
        most = self.prediction - self.freeze
        rule = f"at most prediction − freeze = {most}"
        require(self.execute <= most, "policy.execute", rule, self.execute)
        rule = "at most as many as candidates"
        require((self.warm or 0) <= self.candidates, "policy.warm", rule, self.warm)
        require_choice("policy.rank", self.rank, RANKS)
        require(self.algorithm in (2, 4), "policy.algorithm", "2 or 4", self.algorithm)
        twice = self.rank == "weights" and self.algorithm == 4
        rule = "'energy' or 'network' with algorithm 4, whose draws are of the energy and not of its proposal"
        require(not twice, "policy.rank", rule, self.rank)
        # refused now, not when a training has ended
        theirs = {*OF_RUNS, *FOUND, "run", "n", "seed", "given"} & set(self.sampling)
        if theirs == {"kernel"} and self.kernel is None:  # as older files have it
            object.__setattr__(self, "kernel", self.sampling["kernel"])
            kept = {name: value for name, value in self.sampling.items() if name != "kernel"}
            object.__setattr__(self, "sampling", kept)
        else:
            rule = "options of Run.sample alone; a kernel is policy.kernel"
            require(not theirs, "policy.sampling", rule, sorted(theirs))
        kernel = None if self.kernel is None else build_tagged(KERNELS, self.kernel, "policy.kernel")
        if self.algorithm == 4 and {"evaluations", "t_low"} <= set(self.sampling):
            split_evaluations(self.sampling["evaluations"], self.sampling["t_low"], kernel)
        whole = self.kernel is not None and (self.algorithm == 2 if self.steps is None else self.steps > 0)
        rule = "0 with a kernel, which moves whole chunks"
        require(not (whole and self.freeze), "policy.freeze", rule, self.freeze)

    def refuse_for(self, method: Method) -> None:
        """Refuse what a density would not act by, before it is trained."""
        if isinstance(method, Density):
            rule = "'energy' for a density, which has no proposal below it"
            require(self.rank == "energy", "policy.rank", rule, self.rank)
            require(self.kernel is None, "policy.kernel", IDLE, self.kernel)

    def settled(self, blind: bool) -> PolicyConfig:
        """With numbers in the place of None; of a model whose draws, if `blind`, know nothing of what is seen.

        Those of algorithm 4 are of the energy already.
        """
        blind = blind and self.algorithm == 2
        moves = MOVES if self.algorithm == 2 and (blind or self.kernel is not None) else 0
        steps = moves if self.steps is None else self.steps
        return replace(self, steps=steps, warm=int(blind) if self.warm is None else self.warm)

    def changed(self, settings: Mapping[str, Any]) -> PolicyConfig:
        """With other settings; a kernel that is given where no chain moved is one of `MOVES` steps.

        So is that of the stages of algorithm 4 where algorithm 2 takes it over.
        """
        asked = {**vars(self), **settings}
        given = settings.get("kernel") is not None or (self.algorithm, asked["algorithm"]) == (4, 2)
        moves = {"steps": None} if given and asked["kernel"] is not None and not self.steps else {}
        return build(PolicyConfig, {**asked, **moves, **settings}, "policy")

    @property
    def warmed(self) -> int:
        """Candidates that go on from the last chunk; one draw at least is a new one."""
        return min(self.warm or 0, self.candidates - 1)


def weights_of(run: Run, averaged: bool) -> Run:
    """The run with the weights to act by; of one that was exported there may be no others."""
    only = run.config.get("exported")
    known = only is None or averaged == only
    require(known, "policy.averaged", f"{only}, as the weights that were exported", averaged)
    return run.averaged() if averaged else run.unaveraged or run


def actions_of(run: Run, config: PolicyConfig, **found: Any) -> RunActions:
    """The model of a run as settings say, with what `RunActions.settle` found."""
    how: dict[str, Any] = {name: vars(config)[name] for name in OF_RUNS if name != "sampling"}
    return RunActions(weights_of(run, config.averaged), **how, **found, **config.sampling)


def refuse_others(model: RunActions, config: PolicyConfig) -> None:
    """Refuse settings that a model does not act by; a kernel that was no table is the model's own matter."""
    for name, own in model.how.items():
        asked = vars(config)[name]
        table = name != "kernel" or own is None or isinstance(own, Mapping)
        same = (
            asked == own if table else asked is None or build_tagged(KERNELS, asked, "policy.kernel") == own
        )
        rule = f"{own!r}, by which its model acts; policy.acting({name}=…) is one that acts by another"
        require(same, f"policy.{name}", rule, asked)
    known = not config.freeze or model.covariance is not None  # told now, not at the second chunk
    require(known, "policy.freeze", f"0 without the actions' covariance, {UNSETTLED}", config.freeze)
    left = config.averaged and bool(model.run.averages)
    rule = (
        "False for RunActions(run), which acts by what training left; RunActions(run.averaged()) by averages"
    )
    require(not left, "policy.averaged", rule, True)
    rule = (
        "True, as these weights are averages; policy.acting(averaged=False) acts by those that training left"
    )
    require(config.averaged or model.run.unaveraged is None, "policy.averaged", rule, False)
