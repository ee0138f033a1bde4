"""A run: the folder with everything a training produced, and the objects in memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metastable._version import __version__
from metastable.core.errors import InputError, options_of, refuse_newer, require_options
from metastable.core.parts import home_of
from metastable.core.powered import powered
from metastable.core.random import derive, generator
from metastable.core.types import Energy, LogPartition, Proposal, Walkers
from metastable.core.units import Coordinates, Units
from metastable.core.weights import require_weight
from metastable.energies.in_units import in_data_units
from metastable.evaluation.classifier import given_label
from metastable.evaluation.conditional import LogPartitions, conditional_log_prob, log_partition_given
from metastable.evaluation.diagnosis import Finding
from metastable.evaluation.row_scores import RowScores, row_scores
from metastable.proposals.in_units import DensityInDataUnits
from metastable.training.records import Row, read_jsonl


@dataclass
class Run:
    """What `fit` returns and `load_run` reads back.

    Attributes:
        energy: the trained energy.
        method: the method's name.
        history: one row per line of metrics.
        walkers: weighted samples of the model.
        log_partition: log Z with its error, from the method where it gives one, else from SMC.
        diagnosis: findings in words.
        scores: numbers about the model, e.g. `cross_entropy` on held-out data.
        config: the resolved settings.
        status: `finished`, `interrupted` or `diverged`.
        folder: where it is on disk, if anywhere.
        ema: the averaged energy, where one was asked for. log Z belongs to `energy`, not to it.
        players: every module of the run by name: the energy, and what the method trained or kept beside it.
        trained_with: the method itself, with its settings.
        contexts: of a conditional run, log Z with its error for a few contexts.
        power: P, where what was learned is exp(−P·E)/Z: 1, unless its chains had another temperature (P = 1/T) or
            its method weighed them so. log Z, scores, walkers and the diagnosis are of that density.
        ended: in words, how training ended, where that was before its last step.
        kept: the update whose model was kept, where that is not the last one.
        log_z_source: `training` where log Z is the method's own, `independent` where it comes from sequential Monte
            Carlo, which was surer of itself.
        samples_source: the same of the walkers, which are the method's own unless the two disagreed.
        coordinates: the units that it was trained in; None where they are the data's own. Everything here is in the
            data's units; `within()` is the run in those of its training.
        inside: every module as it was trained, in those units; the same as `players` where there are none.
    """

    energy: Energy
    method: str
    history: list[Row]
    walkers: Walkers | None
    log_partition: LogPartition | None
    diagnosis: list[Finding] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    status: str = "finished"
    folder: Path | None = None
    ema: nn.Module | None = None
    seconds: float = 0.0
    modes: dict[str, Any] | None = None
    players: dict[str, nn.Module] = field(default_factory=dict)
    trained_with: Any = None
    contexts: dict[str, Any] | None = None
    power: float = 1.0
    ended: str = ""
    kept: int | None = None
    log_z_source: str = "training"
    samples_source: str = "training"
    coordinates: Coordinates | None = None
    inside: dict[str, nn.Module] = field(default_factory=dict)

    def outward(self, coordinates: Coordinates | None) -> Run:
        """A run in the units of its training as one in the data's own; log Z is the same number in both."""
        if coordinates is None or coordinates.trivial:
            return self
        energy = in_data_units(self.energy, coordinates, self.power)
        densities = {
            name: DensityInDataUnits(player, coordinates)
            for name, player in self.players.items()
            if name != "energy" and isinstance(player, Proposal)
        }
        ema = None if self.ema is None else in_data_units(self.ema, coordinates, self.power)
        walkers = None if self.walkers is None else in_units(self.walkers, coordinates.events)
        return replace(
            self,
            energy=energy,
            walkers=walkers,
            players={**self.players, **densities, "energy": energy},
            inside=dict(self.players),
            coordinates=coordinates,
            ema=ema,
            scores=outward_scores(self.scores, coordinates.events.log_det),
            modes=_outward_modes(self.modes, coordinates.events),
        )

    def within(self) -> Run:
        """The same run in the units of its training."""
        if self.coordinates is None:
            return self
        walkers = self.walkers
        if walkers is not None:
            u = self.coordinates.events.forward(walkers.x).to(self._home)
            walkers = replace(walkers, x=u)
        inner: Any = self.inside["energy"]
        kept = {"players": dict(self.inside), "inside": {}, "coordinates": None, "ema": None}
        return replace(self, energy=inner, walkers=walkers, **kept)

    @property
    def steps(self) -> int:
        """Updates at the last line of the log."""
        return int(self.history[-1]["step"]) if self.history else 0

    @property
    def kept_history(self) -> list[Row]:
        """Lines of the log up to the model that was kept."""
        return [row for row in self.history if self.kept is None or row["step"] <= self.kept]

    @property
    def learned_energy(self) -> Any:
        """P·E, whose exp(−P·E)/Z is the density that was learned: `energy` itself where P is 1."""
        return powered(self.energy, self.power)

    @property
    def conditional(self) -> bool:
        """Whether its events are given contexts."""
        return "context_shape" in self.config

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one event."""
        return tuple(self.config["event_shape"])

    def log_prob(self, x: Any, given: Any = None, **options: Any) -> Tensor:
        """Normalised log-density of what was learned, −P·E(x) − log Z, `(B,)`; P is `power`, mostly 1.

        Args:
            x: `(B, *event)`, of any type and on any device; the result has the type and the device of the run's
                energy.
            given: the context of each, `(B, *context)`, of a conditional run. log Z is then estimated for every
                distinct context, by importance sampling from the run's proposal; how sure it is,
                `log_partition_given` says.
            options: `draws` or `std_error`, of `evaluation.conditional.log_partition_given`.
        """
        x = self._events(x)
        if self.coordinates is not None:
            u = self.coordinates.events.forward(x).to(self._home)
            c = None if given is None else self._contexts(given)
            return self.within().log_prob(u, c, **options) + self.coordinates.events.log_det
        if given is not None or self.conditional:
            given = self._contexts(given)
            require_options(options, options_of(conditional_log_prob))
            if self.normalised:
                with torch.no_grad():
                    return -self.energy(x, given)  # pyright: ignore
            options = {"rng": self._draws(given.device), **options}
            found = conditional_log_prob(self.energy, self.importance_density(), x, given, **options)
            return found.value.to(x.dtype)
        require_options(options, ())
        if self.log_partition is None:
            raise InputError(
                "log_partition: this run has none; metastable.log_partition(run.learned_energy, …) estimates it"
            )
        with torch.no_grad():
            return -self.learned_energy(x) - self.log_partition.value

    def score(self, x: Any, given: Any = None) -> RowScores:
        """log p of each row, `(B,)`, or its energy where log Z is not trusted; `.kind` says which, `.why` why.

        New rows less likely than 99 % of `x`: `run.score(new).outliers(run.score(x).threshold(0.01))`.
        """
        return row_scores(self, x, given)

    def sample(
        self,
        n: int,
        *,
        steps: int | None = None,
        step_size: float | None = None,
        seed: int = 0,
        corrected: bool = False,
        given: Any = None,
        label: int | None = None,
        **options: Any,
    ) -> Walkers:
        """`n` weighted walkers of the model: weighted sampling that goes on from the run's own walkers, 100 steps.

        See `metastable.continue_sampling`. With `corrected` they are weighted by the learned density ratio too
        and stand for the data instead of the model: `.resampled()` gives data-like samples of equal weight.

        With `label` they are walkers of p(x | label) of a classifier that is an energy model (`jem`): the run's own
        are weighed by p(label | x) and go on there. `.info["start_ess"]` is how many of them that leaves.

        A conditional run is given contexts, `(B, *context)`, and returns `n` walkers for each, `(B, n, *event)`:
        chains of 100 steps from the run's proposal (`methods.conditional_sampling`), the three stages of an
        interpolating energy, or a density's own draws. `options` are those of these algorithms: `kernel`, and
        `t_low`, `evaluations` and `eta` of an interpolating energy, which takes no `steps`.
        """
        from metastable.api import continue_sampling

        if self.coordinates is not None:
            c = None if given is None else self._contexts(given)
            kept = {"steps": steps, "step_size": step_size, "seed": seed, "corrected": corrected}
            drawn = self.within().sample(n, given=c, label=label, **kept, **options)
            return in_units(drawn, self.coordinates.events)
        if label is not None and self.conditional:
            raise InputError("label: this is a conditional run, which has no classes; give contexts, given=…")
        if given is not None or self.conditional:
            if corrected or step_size is not None:
                raise InputError("given: walkers of contexts take kernel=…, not corrected or step_size")
            chosen = options if steps is None else {"steps": steps, **options}
            return self._sample_given(n, self._contexts(given), seed, chosen)
        if options:
            require_options(options, _options_given() | set(options_of(Run.sample)))
            raise InputError(f"{next(iter(options))}: only samples of a conditional run take it")
        own = getattr(self.trained_with, "sample", None)
        if own is not None and label is None:  # a density draws for itself
            return own(self.players, n, generator(derive(seed, "sample"), self._home.device))
        if self.walkers is None:
            raise InputError("walkers: this run kept none; use metastable.sample(run.learned_energy, …)")
        steps = 100 if steps is None else steps
        energy, start = self.learned_energy, self.walkers
        if label is not None:
            energy, start = given_label(energy, start, label)
        walkers = continue_sampling(energy, start, n, steps=steps, step_size=step_size, seed=seed)
        return self.corrected(walkers) if corrected else walkers

    def log_partition_given(self, given: Any, **options: Any) -> LogPartitions:
        """log Z of each context with its error, by importance sampling from the run's proposal.

        Args:
            given: `(B, *context)`.
            options: of `evaluation.conditional.log_partition_given`: `draws`, `std_error`, `most`, `rng`.
        """
        given = self._contexts(given)
        if self.coordinates is not None:
            return self.within().log_partition_given(given, **options)
        require_options(options, options_of(log_partition_given))
        if self.normalised:
            zero = torch.zeros(len(given), dtype=torch.float64)
            return LogPartitions(zero, zero, torch.full_like(zero, torch.inf), zero)
        options = {"rng": self._draws(given.device), **options}
        return log_partition_given(self.energy, self.importance_density(), given, **options)

    def _draws(self, device: torch.device) -> torch.Generator:
        """Random numbers of the run's seed, the same ones at every call, for importance sampling."""
        return generator(derive(self.config.get("seed", 0), "importance"), device)

    def _sample_given(self, n: int, given: Tensor, seed: int, options: dict[str, Any]) -> Walkers:
        from metastable.methods.conditional_sampling import sample_conditional, sample_from_proposal

        rng = generator(derive(seed, "sample given"), given.device)
        players: dict[str, Any] = {"energy": self.energy} | self.players
        own = getattr(self.trained_with, "sample_given", None)
        found = None if own is None else own(players, n, given, rng, **options)
        if found is not None:
            return found
        require_options(options, options_of(sample_from_proposal))
        return sample_conditional(players, n, given, rng, **options)

    @property
    def normalised(self) -> bool:
        """Whether the energy is −log of the density that was learned, so that log Z is 0."""
        return bool(getattr(self.energy, "normalised", False)) and self.power == 1

    @property
    def _home(self) -> Tensor:
        """A tensor with the dtype and device that the energy works in."""
        return home_of(self.energy)

    @property
    def _own_draws(self) -> Any:
        """The energy itself where it also draws with a known density, as a diffusion's φ does.

        In as many steps as its weights need, `fine`; what these leave is in the error of log Z.
        """
        own: Any = self.energy if isinstance(self.energy, Proposal) else None
        return own.with_steps(*own.fine) if hasattr(own, "fine") else own

    def importance_density(self) -> Any:
        """A density to draw from for log Z: the run's proposal, one beyond its box, or a diffusion's φ itself.

        A continuous flow solves its ODE in more steps than it may have been trained with, see `finely`.
        """
        from metastable.proposals import Gaussian, Uniform
        from metastable.proposals.given import finely

        if self.coordinates is not None:
            return DensityInDataUnits(self.within().importance_density(), self.coordinates)
        proposal: Any = self.players.get("proposal", self._own_draws)
        if proposal is None:
            raise InputError(
                f"proposal: a run of {self.method!r} has none to estimate log Z of a context from; call "
                "evaluation.conditional.log_partition_given with one of your own"
            )
        if isinstance(proposal, Uniform):  # the energy may have mass beyond the box
            return Gaussian((proposal.low + proposal.high) / 2, (proposal.high - proposal.low) / 3)
        return finely(proposal)

    def _events(self, x: Any) -> Tensor:
        """Events as the energy needs them, `(B, *event)`; of one number each, `(B,)` will do, as for `fit`.

        Rows of any floating point type and on any device are brought to the energy's own: what is made of them is
        there too.
        """
        x = torch.as_tensor(x)
        x = x.to(self._home.device if self.coordinates is not None else self._home)
        if "event_shape" not in self.config:
            return x
        x = x[:, None] if x.dim() == 1 and self.event_shape == (1,) else x
        if self.conditional and self.normalised and tuple(x.shape[2:]) == self.event_shape:
            return x  # several events for each context, of which a density knows what to make
        if tuple(x.shape[1:]) != self.event_shape or x.dim() == 0:
            shape = ", ".join(map(str, ("B", *self.event_shape)))
            raise InputError(f"x: must have shape ({shape}), got {tuple(x.shape)}")
        return x

    def _contexts(self, given: Any) -> Tensor:
        """Contexts as the energy needs them, `(B, *context)`."""
        if given is None:
            raise InputError("given: this is a conditional run; give contexts, given=…")
        if not self.conditional:
            hint = "; samples of one class: label=…" if hasattr(self.energy, "logits") else ""
            raise InputError(f"given: this run of {self.method!r} was trained without contexts{hint}")
        given = torch.as_tensor(given)
        units = None if self.coordinates is None else self.coordinates.given
        given = given.to(self._home.device if units is not None else self._home)
        shape = tuple(self.config["context_shape"])
        given = given[:, None] if given.dim() == 1 and shape == (1,) else given  # as `fit` takes them
        if tuple(given.shape[1:]) != shape or given.dim() == 0:
            raise InputError(
                f"given: must have shape (B, {', '.join(map(str, shape))}), got {tuple(given.shape)}"
            )
        return given if units is None else units.forward(given).to(self._home)

    def log_ratio(self, x: Any) -> Tensor:
        """The learned log-density ratio log p(x)/q(x) of data to model, `(B,)`, where the method trains one.

        For f-EBM it is H(x) + E(x), which at the optimum is log p/q exactly, log Z included: nothing is left to
        normalise. How near to that it is can be seen from the mean of e^{log_ratio} over the model, which should
        be 1.
        """
        if self.coordinates is not None:
            u = self.coordinates.events.forward(self._events(x))
            return self.within().log_ratio(u.to(self._home))
        ratio = self.players.get("ratio")
        if ratio is None:
            raise InputError(f"ratio: a run of {self.method!r} learns no density ratio; train with 'f-ebm'")
        x = self._events(x)
        with torch.no_grad():
            return ratio(x, self.energy(x))

    def importance_weights(self, x: Any) -> Tensor:
        """Weights `(B,)`, with sum 1, that turn averages over samples of the model into averages over the data."""
        return torch.softmax(require_weight(self.log_ratio(x).double(), "log_ratio"), 0)

    def corrected(self, walkers: Walkers) -> Walkers:
        """Walkers of the model, weighted by the density ratio so that they stand for the data."""
        log_ratio = self.log_ratio(walkers.x).to(walkers.log_weight)
        return replace(walkers, log_weight=walkers.log_weight + log_ratio)

    def report(self) -> Path:
        """Write `report.html` into the folder."""
        from metastable.report import write_report

        if self.folder is None:
            raise InputError("folder: this run was not written to disk; fit with out='runs/name'")
        return write_report(self.folder)

    def summary(self) -> dict[str, Any]:
        """As `summary.json` holds it."""
        z = self.log_partition
        return {
            "status": self.status,
            "message": "",
            "steps": self.steps,
            "seconds": self.seconds,
            "event_shape": list(self.event_shape),
            "method": self.method,
            "power": self.power,
            "log_partition": None if z is None else z.as_json(),
            "cross_entropy": self.scores.get("cross_entropy"),
            "diagnosis": [asdict(f) for f in self.diagnosis],
            "modes": self.modes,
            "contexts": self.contexts,
            "scores": self.scores,
            "ended": self.ended,
            "kept": self.kept,
            "log_z_source": self.log_z_source,
            "samples_source": self.samples_source,
        }

    def __str__(self) -> str:
        from metastable.evaluation.diagnosis import format_findings

        lines = [f"{self.method}: {self.status} after {self.steps} steps, {self.seconds:.1f} s"]
        lines += [self.ended] if self.ended else []
        if self.log_partition is not None:
            lines.append(str(self.log_partition))
        return "\n".join([*lines, format_findings(self.diagnosis)])


def in_units(walkers: Walkers, units: Units) -> Walkers:
    """Walkers of training's units in the data's own: float64 where those need it."""
    trace = None if walkers.trace is None else units.inverse(walkers.trace)
    return replace(walkers, x=units.inverse(walkers.x), trace=trace)


def outward_scores(scores: dict[str, Any], log_det: float) -> dict[str, Any]:
    """Scores in the data's units: log-densities change by the Jacobian, everything else stays."""
    shifts = {"log_likelihood": log_det, "cross_entropy": -log_det, "proposal_log_likelihood": log_det}
    return {name: value + shifts[name] if name in shifts else value for name, value in scores.items()}


def _outward_modes(modes: dict[str, Any] | None, units: Units) -> dict[str, Any] | None:
    if modes is None or modes.get("centers") is None:
        return modes
    centers = torch.tensor(modes["centers"], dtype=torch.float64).view(-1, *units.event_shape)
    return {**modes, "centers": units.inverse(centers).flatten(1).tolist()}


def _options_given() -> set[str]:
    """Options of the algorithms that sample conditional runs."""
    from metastable.methods.conditional_sampling import sample_from_proposal, sample_interpolating

    return {name for way in (sample_from_proposal, sample_interpolating) for name in options_of(way)}


def require_run_folder(folder: str | Path) -> Path:
    """The folder, if it is a run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"run: no such folder: {folder}")
    if not (folder / "config.json").is_file() or not (folder / "checkpoints").is_dir():
        raise InputError(
            f"run: {folder} is not a run (it should hold config.json, metrics.jsonl and checkpoints/)"
        )
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved settings of a run."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{folder / 'config.json'}: is not valid JSON: {error}") from error
    refuse_newer(folder / "config.json", found.get("version"), __version__)
    return found


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run, empty where it has none yet."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def read_history(folder: Path) -> list[Row]:
    """The metrics of a run."""
    path = folder / "metrics.jsonl"
    return read_jsonl(path) if path.is_file() else []


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(value, indent=2, default=_plain) + "\n")
    partial.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return str(value)
