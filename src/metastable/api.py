"""The public functions: fit, sample, log_partition, continue_sampling, load_run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from metastable._version import __version__
from metastable.core import processes
from metastable.core.errors import CheckpointError, DivergenceError, require
from metastable.core.protocols import output_scale_of
from metastable.core.types import Energy
from metastable.data import Dataset, load_array
from metastable.data.columns import dequantised
from metastable.evaluation.diagnosis import Facts, diagnose
from metastable.evaluation.log_partition import log_partition
from metastable.methods import Method
from metastable.report import write_report
from metastable.runs.averages import averaged_players
from metastable.runs.chains import Chains
from metastable.runs.folder import noise_before, opened, seal_files, write_json
from metastable.runs.load import read_run
from metastable.runs.plan import Plan, make_plan, trainer_of
from metastable.runs.resolve import check_options, power_of, resolve_method, trainer_config
from metastable.runs.rows import as_seen
from metastable.runs.run import Run
from metastable.runs.sampling import continue_sampling, sample
from metastable.summary import judge_training, keep_histograms, load_summary, step_check
from metastable.training.config import TrainerConfig
from metastable.training.progress import TrainingBar
from metastable.training.trainer import OnRow, Outcome, Trainer

__all__ = ["continue_sampling", "fit", "load_run", "log_partition", "sample"]


def fit(
    energy: Energy | nn.Module | str | Mapping[str, Any] | None,
    data: Tensor | np.ndarray | str | Path | Dataset,
    method: Method | str | Mapping[str, Any] = "jarzynski",
    steps: int | None = None,
    *,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    labels: Any = None,
    given: Any = None,
    held_out: float = 0.0,
    learning_rate: float | None = None,
    units: str = "auto",
    dequantise: bool = False,
    reference: str | None = None,
    smoothing: float = 0.0,
    trainer: TrainerConfig | None = None,
    evaluate: bool = True,
    progress: bool | OnRow = False,
    before: Callable[[Run], None] | None = None,
    **options: Any,
) -> Run:
    """Train an energy on data and say what it is worth.

    Args:
        energy: any module or callable `(B, *event) → (B,)` with parameters, the name of a built-in energy
            (`mlp`, `conv`, `mixture`), or `"default"` (None means the same): a network on top of a Gaussian fitted
            to the data, so that the first walkers and log Z₀ are exact. With a method that needs labels (`jem`)
            also a plain classifier `(B, *event) → (B, C)`: the run's energy is then `JointEnergy(classifier)`, of
            the default output scale 20,000, and the classifier its `.network`.
        data: an array or tensor `(n, *event)`, a file, or `toy:NAME`.
        method: a method (`ms.methods.Jarzynski(...)`) or its name.
        steps: updates; by default as many as rows and columns ask for, 2000 at most.
        seed: of every random number.
        out: a folder for metrics, checkpoints, samples and the report; None keeps the run in memory.
        resume: go on from the newest good checkpoint in `out`, if there is one.
        labels: the class of each row, integers `(n,)`, for a method that needs it (`jem`).
        given: the context of each row, `(n, *context)`, for conditional energies E(x | given).
        held_out: share of the rows kept from training, on which scores are then computed. Where the method knows
            log Z while it trains, training ends when their likelihood no longer grows, and the best is kept.
        learning_rate: of the default optimiser, Adam, held constant; by default what rows and columns ask for,
            falling to zero along a cosine. With an `optimiser` of your own the rate is said there.
        units: what training measures events in: `none`, the data's own units; `scale`, every column in its
            standard deviation; `whiten`, correlations undone as well; `common`, all numbers less one mean and in
            one standard deviation; `auto` whitens vectors and leaves images alone, unless their spread is beyond a
            factor of 30 from one: then `common`. Samples, densities and log Z come back in the data's units. An
            energy of your own still sees those: only its chains move in the others, so that a step size means the
            same for every data set.
        dequantise: spread columns of few values, such as codes, evenly between the midpoints to their neighbours.
        reference: `gaussian` puts the energy, your own too, on a Gaussian fitted to the data (`energies.Tilted`),
            so that exp(−E) has an integral; a built-in energy has one already, which its settings choose.
        smoothing: s, from 0 to below 1: training sees √(1 − s²)·u + s·ξ in whitened units, which keeps mean and
            covariance and blurs everything else, so that few rows are not learnt by heart.
        trainer: all training settings at once, instead of `options`.
        evaluate: compute scores and samples when training ends; without it the diagnosis is of the log alone.
        progress: show a progress bar, or call this with each row of metrics.
        before: called with the run as it is before its first update, so that what will be asked of it can be
            refused then.
        options: any other field of `TrainerConfig`, e.g. `batch_size=None`, `optimiser=`, `ema=0.999`.

    >>> import metastable as ms, torch
    >>> x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    >>> method = ms.methods.Jarzynski(walkers=256, step_size=0.05)
    >>> run = ms.fit(None, x, method, steps=20, evaluate=False)
    >>> run.log_partition.std_error < 0.1
    True
    """
    processes.join()
    require(out is not None or not resume, "resume", "given with out=…, the folder of the run", resume)
    dataset = data if isinstance(data, Dataset) else load_array(data)
    if labels is not None or given is not None:
        dataset = dataset.beside(labels=labels, given=given)
    if dequantise:
        dataset = dequantised(dataset, seed)
    method = resolve_method(method)
    check_options(options, method)
    config = trainer_config(trainer, steps, learning_rate, options)
    folder = None if out is None else Path(out).expanduser()
    plan = make_plan(
        energy,
        dataset,
        method,
        config,
        seed=seed,
        held_out=held_out,
        units=units,
        reference=reference,
        smoothing=smoothing,
        noise_before=processes.by_first(lambda: noise_before(folder)) if resume else None,
    )
    if plan.doubt is not None:
        warnings.warn(plan.doubt, stacklevel=2)
    settings = plan.settings(__version__) | ({"dequantise": True} if dequantise else {})
    with processes.together(), ExitStack() as stack:
        settings |= _opened(stack, folder, settings, resume)
        trainer_ = trainer_of(plan, folder, str(settings.get("run", "")))
        if before is not None:
            start = Outcome("planned", 0, 0.0, [], None, None, None, None)
            before(_run_of(trainer_.players, method, start, settings, folder).outward(plan.coordinates))
        shown = progress if processes.is_first() else False
        outcome = _trained(trainer_, plan, settings, resume, shown)
        run = _run_of(trainer_.players, method, outcome, settings, folder)
        if not evaluate:
            return _logged(run.outward(plan.coordinates))
        return _judged(run, plan, Chains(plan.method, trainer_.context, outcome.state), outcome.hurried)


def _opened(stack: ExitStack, folder: Path | None, settings: dict[str, Any], resume: bool) -> dict[str, Any]:
    """The first of all processes opens the run folder, until `stack` ends; returns the run's identity."""
    own = ("seed", "data", "method", "energy", "held_out", "units", "trainer")
    told: dict[str, Any] = {key: settings[key] for key in own} | {"out": str(folder)}
    processes.require_same("fit", told | {"trainer": told["trainer"] | {"device": ""}})

    def work() -> dict[str, Any]:
        stack.enter_context(opened(folder, settings, resume))
        return {"run": settings["run"]} if "run" in settings else {}

    return processes.by_first(work)


def _trained(
    trainer: Trainer, plan: Plan, settings: dict[str, Any], resume: bool, progress: bool | OnRow
) -> Outcome:
    """Train; what is left of a run that diverged is written to its folder before the error goes on."""
    with _shown(progress, trainer.config.steps or 0, plan.method.name) as on_row:
        trainer.on_row = on_row
        try:
            return trainer.run(resume)
        except DivergenceError as error:
            folder, met = trainer.folder, error
            if folder is not None:
                processes.by_first(lambda: _write_failure(folder, settings, trainer, plan, met))
            raise


JUDGED = (
    *("scores", "diagnosis", "modes", "contexts", "status", "ended", "log_partition", "walkers"),
    *("log_z_source", "samples_source"),
)
"""What of a run a judge finds or changes."""


def _judged(run: Run, plan: Plan, chains: Chains, hurried: bool) -> Run:
    """What the run is worth, found in the units of training by the first process, and told in the data's own."""
    made: list[Run] = []

    def work() -> dict[str, Any]:
        held, toy = plan.validation_rows(), plan.dataset.toy
        options = {"seed": plan.seed, "chains": chains, "coordinates": plan.coordinates}
        made.append(judge_training(run, plan.rows, held, toy, **options, hurried=hurried))
        return {name: vars(made[0])[name] for name in JUDGED}

    found = processes.by_first(work)
    return made[0] if made else replace(run.outward(plan.coordinates), **found)


def _logged(run: Run) -> Run:
    """A run that is not judged, with what its log says of it, also in its folder: it has come to its end."""
    K = run.config["method"].get("negatives_per_datum")
    facts = Facts(method=run.trained_with, negatives_per_datum=K, power=run.power)
    run.diagnosis = diagnose(run.kept_history, facts)

    def work() -> None:
        if run.folder is not None:
            write_json(run.folder / "summary.json", run.summary())
            seal_files(run.folder, run.config, "config.json", "metrics.jsonl", "summary.json")

    processes.by_first(work)
    return run


def _write_failure(
    folder: Path, settings: dict[str, Any], trainer: Trainer, plan: Plan, error: DivergenceError
) -> None:
    """A run that diverged still gets a summary, a diagnosis from what it logged, and a look at its negatives."""
    method = plan.method
    run = Run(trainer.energy, method.name, trainer.recorder.history, None, None, config=settings)
    run.status, run.folder, run.seconds = "diverged", folder, trainer.seconds
    run.engine = trainer.choice._asdict()
    run.power = power_of(method, trainer.context.step)
    o = output_scale_of(run.learned_energy)
    run.diagnosis = diagnose(run.history, Facts(method=method, power=run.power, output_scale=o))
    missing = _keep_last_good(folder, trainer, plan)
    write_json(folder / "summary.json", run.summary() | {"message": str(error), "no_negatives": missing})
    seal_files(folder, settings, "metrics.jsonl", "summary.json", "figures.npz")
    write_report(folder)


def _keep_last_good(folder: Path, trainer: Trainer, plan: Plan) -> str:
    """Histograms of negatives at the newest good checkpoint for the report; in words, why there are none."""
    keep_histograms(folder, None, 0)  # none of an earlier training in the same folder
    try:
        with trainer.looking_back() as found:
            if found is None:
                return f"They are drawn from a checkpoint, and {folder / 'checkpoints'} holds none."
            context, state = found
            if plan.seen is not plan.rows:
                noise = plan.trainer.noise_at(context.step, trainer.seconds)  # which may have fallen
                seen = as_seen(plan.rows, noise, plan.coordinates, plan.seed)
                context = replace(context, data=seen.x)
            check = step_check(Chains(plan.method, context, state), seed=plan.seed)
            keep_histograms(folder, check, context.step, plan.coordinates, plan.power)
            return ""
    except CheckpointError as error:  # of which the divergence must not be lost
        return f"No checkpoint can be read: {error}"


def _run_of(
    players: dict[str, nn.Module],
    method: Method,
    outcome: Outcome,
    settings: dict[str, Any],
    folder: Path | None,
) -> Run:
    return Run(
        energy=players["energy"],
        players=players,
        method=method.name,
        trained_with=method,
        history=outcome.history,
        walkers=outcome.walkers,
        log_partition=outcome.log_partition,
        config=settings,
        status=outcome.status,
        folder=folder,
        ema=averaged_players(players, outcome.averages)["energy"] if outcome.averages else outcome.ema,
        averages=outcome.averages,
        seconds=outcome.seconds,
        power=power_of(method, outcome.step),
        ended=outcome.message,
        kept=outcome.kept,
        engine={} if outcome.engine is None else outcome.engine._asdict(),
    )


class _shown:  # noqa: N801
    """A progress bar, a callback, or nothing, as a context."""

    def __init__(self, progress: bool | OnRow, steps: int, name: str):
        self.progress, self.steps, self.name, self.bar = progress, steps, name, None

    def __enter__(self) -> OnRow | None:
        if self.progress is True:
            self.bar = TrainingBar(self.steps, self.name)
            return self.bar.__enter__()
        return self.progress or None

    def __exit__(self, *details: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__(*details)


def load_run(
    folder: str | Path, energy: nn.Module | None = None, *, method: Method | None = None, device: str = "cpu"
) -> Run:
    """A run from its folder.

    Args:
        folder: the run.
        energy: the module to load the weights into; needed when the energy was your own, or the classifier that
            was made one, and made by the library from `config.json` otherwise.
        method: the method as it was trained; needed when it was given modules or functions of your own, made
            from `config.json` otherwise.
        device: where to put it.
    """
    return load_summary(read_run(folder, energy, method=method, device=device))
