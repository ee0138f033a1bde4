"""A run: the folder with everything a training produced, and the objects in memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.errors import InputError
from metastable.core.parts import home_of
from metastable.core.powered import powered
from metastable.core.protocols import Classifier, provides
from metastable.core.types import Energy, LogPartition, Proposal, Walkers
from metastable.core.units import Coordinates, Units
from metastable.energies.in_units import in_data_units
from metastable.evaluation.conditional import LogPartitions
from metastable.evaluation.diagnosis import Finding, format_findings
from metastable.evaluation.restoration import Restored, tweedie
from metastable.proposals.in_units import density_in_data_units
from metastable.report import write_report
from metastable.training.records import Row
from metastable.walkers.space import space_of

from .averages import averaged_run
from .folder import trainer_again
from .model import Model, in_units
from .restoring import events_of, restored
from .row_scores import RowScores, row_scores


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
        averages: the averaged weights of every player that learned, by name; `averaged()` is the run with these.
        unaveraged: of a run by `averaged()`, the one that training left.
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
        engine: how updates ran, `chosen`, and the `reason` why not faster; nothing of a run that did not say.
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
    engine: dict[str, str] = field(default_factory=dict)
    coordinates: Coordinates | None = None
    inside: dict[str, nn.Module] = field(default_factory=dict)
    averages: dict[str, Any] = field(default_factory=dict)
    unaveraged: Run | None = None

    def averaged(self) -> Run:
        """The run with the averages of its weights in every player (`ema=…`); the same run where there are none."""
        return averaged_run(self) if self.averages else self

    def outward(self, coordinates: Coordinates | None) -> Run:
        """A run in the units of its training as one in the data's own; log Z is the same number in both."""
        if coordinates is None or coordinates.trivial:
            return self
        energy = in_data_units(self.energy, coordinates, self.power)
        densities = {
            name: density_in_data_units(player, coordinates)
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
    def is_classifier(self) -> bool:
        """Whether the energy is made of a classifier's logits."""
        return provides(self.energy, Classifier)

    @property
    def conditional(self) -> bool:
        """Whether its events are given contexts."""
        return "context_shape" in self.config

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one event."""
        return tuple(self.config["event_shape"])

    @property
    def model(self) -> Model:
        """The density that was learned; `run.log_prob`, `run.sample` and `run.log_partition_given` ask it."""
        shape, context = self.config.get("event_shape"), self.config.get("context_shape")
        return Model(
            energy=self.inside.get("energy", self.energy),
            players=self.inside or self.players,
            method=self.trained_with,
            method_name=self.method,
            power=self.power,
            log_z=self.log_partition,
            walkers=self.walkers,
            event_shape=None if shape is None else tuple(shape),
            context_shape=None if context is None else tuple(context),
            coordinates=self.coordinates,
            seed=self.config.get("seed", 0),
        )

    def _model(self, given: Any) -> Model:
        return self.model if given is None and not self.conditional else self.model.given(given)

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
        return self._model(given).log_prob(x, **options)

    def score(self, x: Any, given: Any = None) -> RowScores:
        """log p of each row, `(B,)`, or its energy where log Z is not trusted; `.kind` says which, `.why` why.

        New rows less likely than 99 % of `x`: `run.score(new).outliers(run.score(x).threshold(0.01))`.
        """
        return row_scores(self._model(given), self.learned_energy, x)

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
        denoise: bool = False,
        **options: Any,
    ) -> Walkers:
        """`n` weighted walkers of the model: weighted sampling that goes on from the run's own walkers, 100 steps.

        See `metastable.continue_sampling`. With `corrected` they are weighted by the learned density ratio too
        and stand for the data instead of the model: `.resampled()` gives data-like samples of equal weight.

        With `label` they are walkers of p(x | label) of a classifier that is an energy model (`jem`): the run's own
        are weighed by p(label | x) and go on there. `.info["start_ess"]` is how many of them that leaves.

        With `denoise` each walker is brought to what it was before the noise of training was put on it, `denoised`.

        A conditional run is given contexts, `(B, *context)`, and returns `n` walkers for each, `(B, n, *event)`:
        chains of 100 steps from the run's proposal (`methods.conditional_sampling`), the three stages of an
        interpolating energy, or a density's own draws. `options` are those of these algorithms: `kernel`, and
        `t_low`, `evaluations` and `eta` of an interpolating energy, which takes no `steps`.
        """
        if label is not None and self.conditional:
            raise InputError("label: this is a conditional run, which has no classes; give contexts, given=…")
        model = self._model(given)
        if corrected and model.contexts is not None:
            raise InputError("given: walkers of contexts take kernel=…, not corrected or step_size")
        walkers = model.sample(n, steps=steps, step_size=step_size, seed=seed, label=label, **options)
        walkers = self.corrected(walkers) if corrected else walkers
        return replace(walkers, x=self.denoised(walkers.x)) if denoise else walkers

    @property
    def data_noise(self) -> float:
        """σ of the noise that the rows had at the update whose weights these are, in the data's units."""
        step = self.steps if self.kept is None else self.kept
        spent = [row.get("seconds", 0.0) for row in self.history if row["step"] <= step]
        return trainer_again(self.config).noise_at(step, spent[-1] if spent else 0.0)

    def denoised(self, x: Any) -> Tensor:
        """E[clean | x] = x − σ²·P·∇E(x) of events `(B, *event)` (Tweedie), σ the noise of training."""
        if self.conditional or not space_of(self.energy).has_volume:
            raise InputError("denoise: only events of real numbers without contexts have noise to take off")
        if self.data_noise == 0:
            raise InputError(
                "denoise: this run was trained without noise on its data (data_noise), so has none"
            )
        x = events_of(self.model, x, "x")
        return tweedie(self.learned_energy, x, self.data_noise)

    def restore(
        self,
        images: Any,
        mask: Any = None,
        *,
        noise: float = 0.0,
        draws: int = 8,
        steps: int = 1000,
        seed: int = 0,
    ) -> Restored:
        """Draws of what events were before part of them was lost or made noisy, `(B, draws, *event)`.

        Args:
            images: events `(B, *event)`, or one of them; a file, an image set or a `Dataset` as `fit` takes them.
            mask: 1 where a number is missing: of one event, of one picture `(H, W)`, or of each event; or the part
                of a picture that is, `left`, `right`, `top`, `bottom` or `centre`. None where all was seen.
            noise: standard deviation of the noise on what was seen. 0 keeps those numbers.
            draws: chains for each event.
            steps: moves of each, by MALA with steps that a warm-up found.
            seed: of every random number.

        Returns:
            `.draws`, their `.mean` and `.spread`, and `.errors(truth)`. Where the run was trained with noise on its
            data, draws are without it (`denoised`).
        """
        return restored(
            self.model,
            self.learned_energy,
            images,
            mask,
            noise=noise,
            data_noise=self.data_noise,
            draws=draws,
            steps=steps,
            seed=seed,
        )

    def log_partition_given(self, given: Any, **options: Any) -> LogPartitions:
        """log Z of each context with its error, by importance sampling from the run's proposal.

        Args:
            given: `(B, *context)`.
            options: of `evaluation.conditional.log_partition_given`: `draws`, `std_error`, `most`, `rng`.
        """
        return self.model.given(given).log_partition(**options)  # pyright: ignore

    @property
    def normalised(self) -> bool:
        """Whether the energy is −log of the density that was learned, so that log Z is 0."""
        return self.model.normalised

    @property
    def _home(self) -> Tensor:
        """A tensor with the dtype and device that the energy works in."""
        return home_of(self.energy)

    def importance_density(self) -> Any:
        """A density to draw from for log Z, in the data's units; see `Model.importance_density`."""
        density = self.model.importance_density()
        return density if self.coordinates is None else density_in_data_units(density, self.coordinates)

    def log_ratio(self, x: Any, labels: Any = None) -> Tensor:
        """The learned log-density ratio log p(x)/q(x) of data to model, `(B,)`, where the method trains one.

        For f-EBM it is H(x) + E(x), which at the optimum is log p/q exactly, log Z included: nothing is left to
        normalise. How near to that it is can be seen from the mean of e^{log_ratio} over the model, which should
        be 1. Where chains carried labels it is that of x and its class, which `labels` says.
        """
        return self.model.log_ratio(x, labels)

    def importance_weights(self, x: Any) -> Tensor:
        """Weights `(B,)`, with sum 1, that turn averages over samples of the model into averages over the data."""
        return self.model.importance_weights(x)

    def corrected(self, walkers: Walkers) -> Walkers:
        """Walkers of the model, weighted by the density ratio so that they stand for the data."""
        by_class = "ratio" in self.players and self.trained_with.needs == "labels"
        if by_class and walkers.labels is None:
            raise InputError(
                "corrected: the ratio of this run is that of a class; draw walkers of one, label=…"
            )
        labels = walkers.labels if by_class else None
        log_ratio = self.log_ratio(walkers.x, labels).to(walkers.log_weight)
        return replace(walkers, log_weight=walkers.log_weight + log_ratio)

    def report(self) -> Path:
        """Write `report.html` into the folder."""
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
            "engine": self.engine,
        }

    def __str__(self) -> str:
        lines = [f"{self.method}: {self.status} after {self.steps} steps, {self.seconds:.1f} s"]
        lines += [self.ended] if self.ended else []
        if self.log_partition is not None:
            lines.append(str(self.log_partition))
        return "\n".join([*lines, format_findings(self.diagnosis)])


def outward_scores(scores: dict[str, Any], log_det: float) -> dict[str, Any]:
    """Scores in the data's units: log-densities change by the Jacobian, everything else stays."""
    shifts = {"log_likelihood": log_det, "cross_entropy": -log_det, "proposal_log_likelihood": log_det}
    return {name: value + shifts[name] if name in shifts else value for name, value in scores.items()}


def _outward_modes(modes: dict[str, Any] | None, units: Units) -> dict[str, Any] | None:
    if modes is None or modes.get("centers") is None:
        return modes
    centers = torch.tensor(modes["centers"], dtype=torch.float64).view(-1, *units.event_shape)
    return {**modes, "centers": units.inverse(centers).flatten(1).tolist()}
