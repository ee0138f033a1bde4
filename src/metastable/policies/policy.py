"""A policy: observations in, chunks of actions out."""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metastable._version import __version__
from metastable.api import load_run
from metastable.core.capture import CaptureError
from metastable.core.configure import build
from metastable.core.errors import InputError, require
from metastable.core.random import derive, generator, whole_seed
from metastable.core.waiting import unwatched
from metastable.data.demonstrations import STATE, Scaling, flattened
from metastable.kernels.watch import unchanging
from metastable.methods import Method
from metastable.methods.conditional_chains import require_finite
from metastable.methods.conditional_sampling import best_of, lowest_of
from metastable.runs.folder import NUMBER, TABLE, WHOLE, read_table, reading, write_json
from metastable.runs.load import export_run
from metastable.runs.resolve import resolve_method

from .actions import ActionModel, DrawsWithEnergy, RunActions, nearest
from .config import OF_RUNS, PolicyConfig, actions_of, refuse_others, weights_of
from .environments import Seen

FILE = "policy.json"
JOINED = 16
"""Draws at least, of which those are taken that begin as the last chunk goes on, where a beginning is frozen."""

_SIZE = ("a number above 0", lambda v: v is None or (NUMBER[1](v) and v > 0))
KEPT = {
    **dict.fromkeys(("policy", "scaling"), TABLE),
    **dict.fromkeys(("step_size", "sampler_step"), _SIZE),
    "covariance": ("rows of as many numbers", lambda v: v is None or _is_square(v)),
    "seed": WHOLE,
    "proposal": TABLE,
}
"""What `policy.json` holds."""


def _is_square(rows: Any) -> bool:
    right = isinstance(rows, list) and all(isinstance(row, list) and len(row) == len(rows) for row in rows)
    return right and all(NUMBER[1](value) for row in rows for value in row)


class Policy:
    """Acts in any number of environments at once, in step with one another.

    `reset`, `select_action` and `predict_action_chunk` are what users of LeRobot know. Observations and actions are
    in the demonstrations' units.

    Args:
        model: of chunks given contexts; `RunActions(run)` is the one of a run.
        scaling: of the demonstrations that it was trained on.
        config: how it acts; what of it is the model's of a run must be as that has it, see `acting`.
        seed: of everything random, until `reset` is given another.

    >>> import numpy as np
    >>> from metastable.data import Demonstrations
    >>> from metastable.policies import fit_policy
    >>> steps = np.linspace(0, 1, 40)
    >>> shown = Demonstrations.of(np.stack([steps, -steps], 1), steps, [20, 40])
    >>> policy = fit_policy(shown, "flow", "density", PolicyConfig(1, 4, 2), steps=2)
    >>> policy.select_action(np.zeros((3, 2))).shape
    torch.Size([3, 1])
    """

    def __init__(
        self, model: ActionModel, scaling: Scaling, config: PolicyConfig | None = None, seed: int = 0
    ):
        blind = isinstance(model, RunActions) and model.blind
        self.model, self.scaling, self.config = model, scaling, (config or PolicyConfig()).settled(blind)
        if isinstance(model, RunActions):
            refuse_others(model, self.config)
        self.proposal: dict[str, Any] | None = None  # the table of one that was learned before
        self.records = True  # until something could not be recorded
        self.reset(seed)

    def acting(self, **changed: Any) -> Policy:
        """The same policy by other settings of `PolicyConfig`, weights shared; it begins as after `reset`."""
        config, model = self.config.changed(changed), self.model
        now = vars(self.config)  # a kernel may have stood in `sampling`
        own = {k: v for k, v in vars(config).items() if k in OF_RUNS and (k in changed or v != now[k])}
        if isinstance(model, RunActions):
            for name in ("context", "prediction"):
                known, asked = vars(self.config)[name], vars(config)[name]
                require(asked == known, f"policy.{name}", f"{known}, as trained", asked)
            run = weights_of(model.run, config.averaged)
            model = model.acting(run, **own) if own or run is not model.run else model
            model.refuse_idle(changed)
        else:
            theirs = sorted({*OF_RUNS[1:], "averaged"} & set(changed))
            require(not theirs, "changed", "settings of the policy alone, as its model is no run's", theirs)
        policy = Policy(model, self.scaling, config, self.seed)
        policy.proposal = self.proposal
        return policy

    def reset(self, seed: int | None = None) -> None:
        """Forget what was seen and planned: a new episode begins, in every environment."""
        self.seed = self.seed if seed is None else whole_seed(seed)
        self.seen: deque[dict[str, Tensor]] = deque(maxlen=self.config.context)
        self.planned: deque[Tensor] = deque()
        self.last: Tensor | None = None
        self.calls = 0

    def select_action(self, observation: Any) -> Tensor:
        """The next action of each of B environments, `(B, A)`.

        Args:
            observation: by name, `(B, …)` each, `a.b` for b in a; one array where the demonstrations had one.
        """
        left_out = observation.left_out if isinstance(observation, Seen) else None
        now = self.scaling.known(self._named(observation), left_out=left_out)
        self._check_number(now)
        own = {key: value.clone() for key, value in self.scaling.fitting(now).items()}
        if not self.planned:
            steps = [*self.seen, own][-self.config.context :]
            window = [steps[0]] * (self.config.context - len(steps)) + steps
            contexts = {key: torch.stack([step[key] for step in window], 1) for key in now}
            chunk = self.predict_action_chunk(contexts)
            self.planned.extend(chunk[:, : self.config.execute].unbind(1))
        self.seen.append(own)  # once there is a chunk, so that a call that failed can be made again
        return self.planned.popleft()

    @property
    def looks(self) -> bool:
        """Whether the next observation is one of those that the next chunk is made from."""
        return len(self.planned) < self.config.context

    @torch.inference_mode(False)  # chains need gradients of the energy
    @torch.no_grad()
    def predict_action_chunk(self, contexts: Any) -> Tensor:
        """The next chunk of each of B environments, `(B, N_pred, A)`, given windows `(B, N_ctx, …)` by name.

        Draws ℓ candidates, joins them to the last chunk, moves them by a chain, and takes the one of lowest energy.
        """
        config, seen = self.config, self._windows(contexts)
        given, seed = self.scaling.pack(seen), derive(self.seed, "chunk", self.calls)
        rest = self._rest(seen)
        try:
            # flows are recorded on a GPU; what comes out is looked at
            with unwatched(self.records), unchanging():
                chosen = self._chosen(given, seed, rest)
        except CaptureError as error:
            self.records = False
            warnings.warn(f"policy: it acts without recordings: {error}", RuntimeWarning, stacklevel=2)
            chosen = self._chosen(given, seed, rest)
        known, D = "those of the run that it was trained as", config.prediction * self.actions
        require(chosen.shape[1] == D, "policy.prediction", f"{known}, {chosen.shape[1]} numbers", D)
        chunk = chosen.unflatten(1, (config.prediction, self.actions))
        actions = self.scaling.to_actions(chunk.cpu(), seen)
        require_finite(actions, "the policy's actions")
        self.last, self.calls = chosen, self.calls + 1
        if self.scaling.relative:
            self.before = self.scaling.last_seen(seen)
        return actions

    def _chosen(self, given: Tensor, seed: int, rest: Tensor | None) -> Tensor:
        """The chunk for each context, `(B, D)`, where `rest` is left of the last."""
        config = self.config
        frozen = None if rest is None or not config.freeze else rest[:, : config.freeze * self.actions]
        plainly = frozen is None and config.rank == "energy" and config.candidates > 1
        if plainly and isinstance(self.model, DrawsWithEnergy):
            made = self.model.draw_with_energy(given, config.candidates, seed)
            if made is not None:
                return lowest_of(*made).x
        x = self.model.draw(
            given, config.candidates if frozen is None else max(config.candidates, JOINED), seed
        )
        x = x if frozen is None else nearest(x, frozen.to(x), config.candidates)
        weighted = config.rank == "weights"  # of the proposal's draws: nothing moves them
        if rest is not None and config.warmed and self.model.has_chains and not weighted:
            x = torch.cat([rest[:, None].expand(-1, config.warmed, -1).to(x), x[:, config.warmed :]], 1)
        x = self.model.move(x, given, 0 if weighted else config.steps or 0, seed, frozen)
        if config.candidates == 1:
            return x[:, 0]
        if not weighted:
            return best_of(self.model.energy, x, given).x
        rng = generator(derive(seed, "choose"), x.device)
        waits = x.new_empty(x.shape[:2]).exponential_(generator=rng).log()  # argmin E + log τ: k by exp(−E)
        return best_of(lambda y, contexts: self.model.energy(y, contexts) + waits, x, given).x

    @property
    def actions(self) -> int:
        """A, numbers of one action."""
        return self.scaling.middle["action"].numel()

    def _rest(self, seen: Mapping[str, Tensor]) -> Tensor | None:
        """What is left of the last chunk, its last action repeated, `(B, D)`; None of the first."""
        if self.last is None:
            return None
        chunk = self.last.unflatten(1, (self.config.prediction, self.actions))
        if self.scaling.relative:
            chunk = self.scaling.recounted(chunk, self.before, seen)
        steps = torch.arange(self.config.prediction) + self.config.execute
        return chunk[:, steps.clamp(max=self.config.prediction - 1)].flatten(1)

    def _named(self, observation: Any) -> Mapping[str, Any]:
        """By the demonstrations' names: one array, also where an environment calls it `state`, has the only one."""
        names, named = self.scaling.names, flattened(observation, "observation")
        return {names[0]: named[STATE]} if len(names) == 1 and list(named) == [STATE] else named

    def _windows(self, contexts: Any) -> Mapping[str, Tensor]:
        """Contexts by name, each of as many steps as the policy sees."""
        named = self._named(contexts)
        for key, value in self.scaling.known(named).items():
            n, steps = self.config.context, value.shape[1] if value.dim() > 1 else 0
            shape = ", ".join(map(str, (n, *self.scaling.shape(key))))
            rule = f"windows of policy.context = {n} steps, (B, {shape})"
            require(steps == n, f"observation.{key}", rule, steps)
        found = self.scaling.fitting(named, 2)
        self._check_number(found)
        return found

    def _check_number(self, now: Mapping[str, Tensor]) -> None:
        """Every observation has as many rows as there are environments."""
        before = {"": self.last} if self.last is not None else self.seen[-1] if self.seen else now
        environments = max((len(value) for value in before.values() if value.dim()), default=1)
        rule = f"the {environments} environments{'' if before is now else ' since reset'}"
        for key, value in now.items():
            if value.dim() == 0 or len(value) != environments or not environments:
                got = len(value) if value.dim() else "a number"
                known = rule if environments else "at least one"
                raise InputError(f"observation.{key}: must be of {known}, got {got}")

    def save(self) -> Path:
        """Write `policy.json` into the folder of its run, from where `load_policy` reads it."""
        model = self.model
        if not isinstance(model, RunActions) or model.run.folder is None:
            raise InputError("policy: only that of a run with a folder can be saved; fit with out='…'")
        return self._write(model, model.run.folder)

    def export(self, folder: str | Path) -> Path:
        """Write what it takes to act into a new folder, from where `load_policy` reads it.

        Of the weights it holds those that the policy acts by, and nothing that a training would go on from: a
        quarter and less of what the folder of a training takes.
        """
        model = self.model
        if not isinstance(model, RunActions):
            raise InputError("policy: only that of a run can be exported")
        with export_run(model.run, folder) as part:
            self._write(model, part)
        return Path(folder).expanduser()

    def _write(self, model: RunActions, folder: Path) -> Path:
        told = model.kernel is None or self.config.kernel is not None
        require(told, "policy.kernel", "a table where it is written, such as {'name': 'ula'}", model.kernel)
        covariance = None if model.covariance is None else model.covariance.tolist()
        kept = {"covariance": covariance, "step_size": model.step_size, "scaling": self.scaling.as_json()}
        own = {"proposal": self.proposal, "sampler_step": model.sampler_step}
        kept |= {key: value for key, value in own.items() if value is not None}
        path = folder / FILE
        write_json(path, {"version": __version__, "seed": self.seed, "policy": asdict(self.config), **kept})
        return path


def load_policy(
    folder: str | Path, *, energy: nn.Module | None = None, device: str = "cpu", **changed: Any
) -> Policy:
    """The policy of a run, from its folder.

    Args:
        folder: of the run.
        energy: the module to load the weights into; needed where it was your own, see `load_run`.
        device: where to put it.
        changed: settings of `PolicyConfig` to act by instead of those that were saved.
    """
    path = Path(folder).expanduser() / FILE
    if not path.is_file():
        load_run(folder, energy, device=device)  # what is no run at all says so itself
        raise InputError(
            f"run: {folder} holds no {FILE}; make one with metastable.policies.fit_policy(…, out=…), and with "
            "resume=True where its training was cut short"
        )
    kept = read_table(path, KEPT, needed=("policy", "covariance", "step_size", "scaling", "seed"))
    with reading(path):
        scaling = Scaling.from_json(kept["scaling"])
    own = {"averaged": False, **kept["policy"]}  # older files acted by the weights themselves
    saved = build(PolicyConfig, own, "policy")
    for name in {"context", "prediction"} & set(changed):
        known = vars(saved)[name]
        require(changed[name] == known, f"policy.{name}", f"{known}, as trained", changed[name])
    config, proposal = saved.changed(changed), kept.get("proposal")
    method = None if proposal is None else _method_with(path.parent, proposal)
    run = load_run(folder, energy, method=method, device=device)
    covariance = None if kept["covariance"] is None else torch.tensor(kept["covariance"], dtype=torch.float64)
    found = {"step_size": kept["step_size"], "sampler_step": kept.get("sampler_step")}
    acting = actions_of(run, config, covariance=covariance, **found)
    acting.refuse_idle(changed)
    policy = Policy(acting, scaling, config, kept["seed"])
    policy.proposal = proposal
    return policy


def _method_with(folder: Path, proposal: dict[str, Any]) -> Method:
    """The method of a run whose proposal was a module, which is built again; its weights are those of the run."""
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))["method"]
    settings = {key: value for key, value in described.items() if value is not None}
    return resolve_method({**settings, "proposal": proposal})
