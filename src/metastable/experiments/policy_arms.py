"""Policies that are compared on a task: what each is made of, and its training in a folder, from where it was left.

Networks are `paper`, the transformers of `policies.models`, or `dense`: the same models from plain dense layers,
which a processor trains in minutes. An arm is a model, or one with other settings: `r-nce-7` has 7 negatives; the
proposal of `r-nce-pretrained` is learned first and then stays, at the noise that the others only end with; the
energies of `on-flow` and `i-on-flow` stand on the flow of the arm `flow`, which stays, `i-on-proposal` on that of
`proposal`, which is smaller; and `i-r-nce-2` is the training of `i-r-nce` under another sampler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from metastable.core.errors import DivergenceError, require, require_choice
from metastable.core.random import derive
from metastable.data.demonstrations import Demonstrations, Scaling
from metastable.methods.ranked import Ranked
from metastable.policies.actions import RunActions
from metastable.policies.fitting import fit_policy
from metastable.policies.models import MODELS, PolicyModel, Sizes, layout_of, policy_model
from metastable.policies.policy import FILE, Policy, PolicyConfig, load_policy
from metastable.runs.folder import write_json
from metastable.training.config import Adam, Schedule

from .base import Bench
from .pieces import refuse_other

NOISE = (0.01, 0.005)
"""σ_pert at first and from half of the training on; beside a proposal that stays, the last (`fit_policy`)."""
SPENT = 0.95
"""Share of its seconds after which a training is over: what was read back knows those of its last line."""
LINES, CHECKPOINTS = 200, 8
"""Lines of the log and checkpoints of a training."""
LEAST_GRADIENTS = 20
"""Of the three stages of an interpolating energy, which need some even where other arms have no chain."""
MADE = "made-with.json"
"""What a training was made with, beside its policy."""
FIRST, WARM = 48, 3.0
"""Chunks before one is timed, or seconds of all but the first: short chains are recorded once some were made."""
LEARNS = (
    *("networks", "width", "layers", "ode", "negatives", "reuse", "pool", "batch", "rate", "warmup", "ema"),
    *("options", "sizes", "pretrain", "train_worlds", "planned", "every", "refine", "mirrored", "centred"),
    *("within", "sight", "near", "precision", "augment", "interpolant", "alpha"),
    *("energy_rate", "training_ode", "energy_rows", "turns"),
)
"""Settings that a training depends on, where an experiment has them; its seconds may grow."""
OF_ENERGIES = (
    *("negatives", "reuse", "pool", "chain", "pretrain", "energy_updates"),
    *("energy_rate", "training_ode", "energy_rows", "turns"),
)
OF_FIELDS = (
    *("field_width", "field_layers", "heads", "reads", "interpolant", "alpha"),
    *("proposal", "proposal_width", "proposal_layers", "proposal_alpha"),
    *("ode", "rates", "weight_decay", "warmup", "batch_size"),
)
"""Settings that densities do not know, and `sizes` that they do."""
DENSE = (
    *("width", "layers", "chain", "units", "interpolant", "alpha", "energy_rate", "training_ode"),
    *("energy_rows", "turns"),
)
"""Settings of dense networks alone."""
SIZES = {
    "negatives": "negatives",
    "reuse": "reuse",
    "pool": "pool",
    "warmup": "warmup",
    "batch": "batch_size",
}
"""Settings that stand in the place of the paper's, where they were given, by their names in `Sizes`."""


@dataclass(frozen=True)
class Arm:
    """One of the policies that are compared.

    Attributes:
        model: of `policies.models`.
        method: settings of its method in the place of the model's own.
        early: whether its proposal learns before the energy, and then stays.
        of: the arm whose training it is, acting by its own model's settings; empty for one of its own.
        on: the arm whose flow its energy stands on.
    """

    model: str
    method: Mapping[str, Any] = field(default_factory=dict)
    early: bool = False
    of: str = ""
    on: str = ""


ARMS = {name: Arm(name) for name in MODELS} | {
    **{f"r-nce-{K}": Arm("r-nce", {"negatives_per_datum": K}) for K in (7, 31)},
    "r-nce-pretrained": Arm("r-nce", early=True),
    "i-r-nce-2": Arm("i-r-nce-2", of="i-r-nce"),
    **{name: Arm(name, on="flow") for name in ("on-flow", "i-on-flow")},
    "i-on-proposal": Arm("i-on-flow", on="proposal"),
}
STANDING = ("on-flow", "i-on-flow")
"""Models of energies on the flow of another arm."""
RANKED = ("r-nce", "i-r-nce", "i-r-nce-2", "ibc", *STANDING)
"""Models of two players."""


@dataclass(frozen=True)
class Task:
    """What is learned from, and how a policy acts.

    Attributes:
        shown: the demonstrations.
        config: windows, and how chunks are carried out.
        sizes: of the paper's networks.
        padded: see `Demonstrations.windows`.
        sets: observations that stay the same in an episode, see `layout_of`.
        near: that among which actions are places, likewise.
    """

    shown: Demonstrations
    config: PolicyConfig
    sizes: Sizes
    padded: bool = True
    sets: Mapping[str, int] = field(default_factory=dict)
    near: str = ""


def units_of(bench: Bench) -> str:
    """Units that dense models are trained in: an energy on a flow needs those of the demonstrations."""
    return "none" if any(ARMS[name].on for name in bench.arms if name in ARMS) else bench.units


def turns_of(bench: Bench, model: str) -> tuple[int, int] | None:
    """T_samp and T_rnce of a dense `r-nce`; None where the two players share every update."""
    return bench.settings.get("turns") if (model, bench.networks) == ("r-nce", "dense") else None


def dense_model(bench: Bench, name: str) -> PolicyModel:
    """A model of plain dense layers, at the sizes of the scale."""
    (steps, scored), size = bench.ode, {"width": bench.width, "layers": bench.layers}
    ode, along = {"steps": steps, "scored": scored}, {"interpolant": bench.interpolant, "alpha": bench.alpha}
    rate = (bench.settings.get("energy_rate") or bench.rate) if name in RANKED else bench.rate
    options = {"optimiser": Adam(rate), "schedule": Schedule("cosine", warmup=bench.warmup)}
    options |= {"batch_size": bench.batch, "units": units_of(bench), "ema": bench.ema}
    acting: dict[str, Any] = {"steps": 0, "warm": 0}
    if name not in RANKED:
        flow = {"name": "interpolant", "field": "residual", **along, **ode}
        energy = {"flow": flow, "proposal": flow, "cloning": {"name": "regression"}}
        own = energy.get(name, {"name": name, **ode}) | size
        return PolicyModel(own, {"name": "density"}, acting, options)
    timed = name.startswith("i-")
    coarse = dict(zip(ode, bench.settings.get("training_ode") or bench.ode, strict=True))
    proposal = {"name": "interpolant", "field": "residual", **along, **size, **coarse}
    method = {
        "name": {"ibc": "ibc"}.get(name, "interpolating-nce" if timed else "ranking-nce"),
        "negatives_per_datum": bench.negatives,
        "proposal": proposal,
    }
    energy = {"name": "conditional", "width": bench.width, "depth": bench.layers, "time": timed}
    if timed:
        method["times"] = 1
        if name != "i-r-nce-2":
            acting |= {"algorithm": 4, "sampling": {"evaluations": max(bench.chain, LEAST_GRADIENTS)}}
    if name in STANDING or name == "r-nce":
        method |= {"reuse": bench.reuse, "pool": bench.pool}
        method["energy_rows"] = bench.settings.get("energy_rows")
    if name in STANDING:
        return PolicyModel({**energy, "name": "on-proposal"}, method, {**acting, "rank": "network"}, options)
    if turns := turns_of(bench, name):
        method |= {"proposal_steps": turns[0], "energy_steps": turns[1], "proposal_rate": bench.rate / rate}
    return PolicyModel(energy, method, {**acting, "steps": 0 if timed else bench.chain}, options)


def sizes_of(bench: Bench, task: Task, arm: Arm) -> Sizes:
    """Those of the task, with settings that were given in the place of the scale's.

    `ode` is that of a model that stands alone and of a proposal in training; with another `rate` a proposal keeps
    its own as a multiple of the energy's.
    """
    for name in DENSE:
        rule = "left out for networks='paper', which have sizes of their own"
        require(name not in bench.changes, name, rule, bench.changes.get(name))
    own = {SIZES[name]: bench.settings[name] for name in SIZES if name in bench.changes}
    if "ode" in bench.changes:
        own |= {"ode": tuple(bench.ode), "training_ode": tuple(bench.ode)}
    if "rate" in bench.changes:
        rates = task.sizes.rates
        share = bench.rate / rates[0 if arm.model in RANKED else 2]
        own["rates"] = tuple(share * rate for rate in rates)
    return replace(task.sizes, **own)


def model_of(bench: Bench, task: Task, arm: Arm) -> PolicyModel:
    """What is trained for an arm."""
    if bench.networks == "dense":
        made = dense_model(bench, arm.model)
    else:
        layout = layout_of(Scaling.fit(task.shown), task.config.context, task.sets, task.near)
        made = policy_model(arm.model, layout, sizes_of(bench, task, arm))
        made = replace(made, options={**made.options, "ema": bench.ema, **bench.options})
    own = {"train_proposal": False, "pretrain": bench.pretrain} if arm.early else {}
    return replace(made, method={**made.method, **arm.method, **own})


def made_with(bench: Bench, arm: Arm, task: Task | partial[Task]) -> dict[str, Any]:
    """What a training of an arm depends on; demonstrations, where they are there, by their digest."""
    settings = {key: bench.settings[key] for key in LEARNS if key in bench.settings}
    shown = {"demonstrations": task.shown.digest()} if isinstance(task, Task) else {}
    own = {"units": units_of(bench), "updates": updates(bench, arm), "seed": bench.seed} | shown
    return concerning(settings, arm) | own


def concerning(settings: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
    """Those of the settings that matter to an arm: a density has neither negatives nor an energy's sizes."""
    if arm.model in RANKED:
        return dict(settings)
    sizes = {k: v for k, v in settings.get("sizes", {}).items() if k in OF_FIELDS}
    return {k: v for k, v in settings.items() if k not in OF_ENERGIES} | {"sizes": sizes}


def refuse_another(folder: Path, bench: Bench, arm: Arm, task: Task | partial[Task]) -> None:
    """Refuse a training of other settings, another seed or other demonstrations."""
    if (folder / MADE).is_file():
        kept = json.loads((folder / MADE).read_text(encoding="utf-8"))
        refuse_other(folder / MADE, concerning(kept, arm), made_with(bench, arm, task))


def trained(bench: Bench, task: Task | partial[Task], name: str) -> Policy | None:
    """The policy of an arm, trained to its end; None where it diverged, or was interrupted.

    What lies finished in `training/` is read, wherever it was trained, and refused where it was made with other
    settings. The task may be something that makes it, from settings and seed alone: it is then not needed.
    """
    require_choice("arms", name, ARMS)
    folder, arm = bench.folder / "training" / name, ARMS[name]
    if arm.of:
        return sampled_otherwise(bench, task, arm)
    refuse_another(folder, bench, arm, task)
    if (folder / FILE).is_file():
        policy = load_policy(folder, device=bench.device)
        if finished(bench, policy, arm):
            return policy
    flow = trained(bench, task, arm.on) if arm.on else None
    if arm.on and flow is None:
        return None
    task = task if isinstance(task, Task) else task()
    refuse_another(folder, bench, arm, task)
    try:
        policy = learn(bench, task, arm, folder, flow)
    except DivergenceError as error:
        bench.say(f"{name}: {error}")
        return None
    run = run_of(policy)
    bench.say(f"{name}: {run.steps} updates in {run.seconds:.0f} s, {parameters(policy)} parameters")
    return policy if finished(bench, policy, arm) else None


def sampled_otherwise(bench: Bench, task: Task | partial[Task], arm: Arm) -> Policy | None:
    """The training of another arm, acting by the settings of this one's model."""
    policy = trained(bench, task, arm.of)
    if policy is None:
        return None
    acting = model_of(bench, task if isinstance(task, Task) else task(), arm).acting
    return policy.acting(**{"algorithm": 2, "kernel": None, "sampling": {}, **acting})


def learn(bench: Bench, task: Task, arm: Arm, folder: Path, flow: Policy | None) -> Policy:
    """The training of an arm in a folder, from where it was left."""
    model, steps = model_of(bench, task, arm), updates(bench, arm)
    config = replace(task.config, **{"candidates": bench.candidates, **model.acting})
    made = made_with(bench, arm, task)  # now, as it takes seconds, in which a finished training would lack it
    lines = {"log_every": max(1, steps // LINES), "checkpoint_every": max(1, steps // CHECKPOINTS), "keep": 1}
    clock = {"max_seconds": bench.seconds, "follows": "seconds" if bench.seconds else "steps"}
    budget = {
        "steps": steps,
        "progress": False,
        "device": bench.device,
        "precision": bench.precision,
        **clock,
        **lines,
    }
    policy = fit_policy(
        task.shown,
        model.energy,
        model.method,
        config,
        padded=task.padded,
        noise=NOISE,
        augment=bench.settings.get("augment", ()),
        on=flow,
        seed=derive(bench.seed, "policy") % 2**31,
        out=folder,
        resume=True,
        **{**model.options, **budget},
    )
    write_json(folder / MADE, made)
    return policy


def updates(bench: Bench, arm: Arm) -> int:
    """How many an arm has at most: those of energies cost more, and turns of a proposal come beside them."""
    if arm.model not in RANKED:
        return bench.density_updates
    if arm.early:
        return bench.pretrain + bench.energy_updates
    turns = turns_of(bench, arm.model) or (0, 1)
    return bench.energy_updates + turns[0] * bench.energy_updates // turns[1]


def run_of(policy: Policy) -> Any:
    """The training behind a policy."""
    assert isinstance(policy.model, RunActions)
    return policy.model.run


def as_asked(bench: Bench, policy: Policy, arm: str) -> Policy:
    """A policy with `acts` of its arm in the place of what it was saved with."""
    asked = bench.acts.get(arm, {})
    sampling = {**policy.config.sampling, **asked.get("sampling", {})}
    return policy.acting(**{**asked, "sampling": sampling}) if asked else policy


def hurried(policy: Policy, gradients: int) -> dict[str, Any]:
    """To act by: so many gradients of an interpolating energy, and no more steps of its proposal's ODE."""
    config, kernel = policy.config, policy.config.kernel
    steps = config.ode or run_of(policy).model.players["proposal"].steps
    settings = {"sampling": {**config.sampling, "evaluations": gradients}, "ode": min(gradients, steps)}
    if kernel is not None and "leapfrog" in kernel:  # so that a move still fits
        leapfrog = max(1, min(kernel["leapfrog"], gradients // 4))
        settings["kernel"] = {**kernel, "leapfrog": leapfrog}
    return settings


def median_ms(chunk: Callable[[int], object], times: int, least: int = 1) -> float:
    """Milliseconds of a chunk, which is told its number: the median of so many after the first, at `least` some."""

    def one(k: int) -> float:
        begun = perf_counter()
        chunk(k)
        return perf_counter() - begun

    k, spent = 0, 0.0
    while k < least or (k < FIRST and spent < WARM):
        seconds = one(k)
        k, spent = k + 1, spent + (seconds if k else 0)  # the first compiles what it needs
    return 1e3 * float(np.median([one(k + more) for more in range(times)]))


def finished(bench: Bench, policy: Policy, arm: Arm) -> bool:
    """Whether its updates or its seconds are spent."""
    run = run_of(policy)
    spent = bench.seconds is not None and run.seconds >= SPENT * bench.seconds
    return spent or run.steps >= updates(bench, arm)


def parameters(policy: Policy) -> int:
    """Numbers that its training moved, those that players share once: a flow below an energy is another arm's."""
    run, method = run_of(policy), run_of(policy).trained_with
    stays = isinstance(method, Ranked) and not (method.train_proposal or method.pretrain)
    players = [player for name, player in run.players.items() if not (stays and name == "proposal")]
    return sum({id(p): p.numel() for player in players for p in player.parameters()}.values())
