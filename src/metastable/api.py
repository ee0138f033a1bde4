"""The public functions: fit, sample, log_partition, continue_sampling, load_run."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from metastable._version import __version__
from metastable.conditional_summary import evaluate_conditional
from metastable.core.configure import build_tagged
from metastable.core.errors import (
    CheckpointError,
    DivergenceError,
    InputError,
    UnsupportedError,
    require_count,
)
from metastable.core.parts import home_of
from metastable.core.random import derive, generator
from metastable.core.types import (
    Bound,
    Energy,
    LogPartition,
    Pairs,
    Proposal,
    Walkers,
    as_shape,
    events,
    is_discrete,
)
from metastable.core.units import Coordinates
from metastable.data import Dataset, load_array
from metastable.data.columns import dequantised
from metastable.energies import check_energy, inside_walls
from metastable.energies.build import ENERGIES
from metastable.evaluation.log_partition import SPREAD
from metastable.evaluation.log_partition import log_partition as estimate_log_partition
from metastable.kernels import MALA, Gibbs, Kernel, run_chain, warm_up
from metastable.methods import Context, Method
from metastable.plan import (
    Plan,
    built,
    check_options,
    make_plan,
    noise_around,
    players_of,
    power_of,
    reloaded,
    resolve_method,
    trainer_config,
    training_rows,
)
from metastable.proposals import Signs
from metastable.run import Run, read_config, read_history, require_run_folder, write_json
from metastable.step_check import Chains, step_check
from metastable.summary import evaluate_run, keep_histograms, load_summary, toy_within
from metastable.training.checkpoints import CheckpointStore, on_device
from metastable.training.config import TrainerConfig
from metastable.training.engine import Engine
from metastable.training.trainer import OnRow, Outcome, Trainer
from metastable.walkers.continuing import continue_walkers

Progress = Callable[[int], Any]

STARTS_AGAIN = 20
"""How often starts of chains are drawn again while some lie where the energy is +inf."""


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
            standard deviation; `whiten`, correlations undone as well; `auto` whitens vectors and leaves images
            alone. Samples, densities and log Z come back in the data's units. An energy of your own still sees
            those: only its chains move in the others, so that a step size means the same for every data set.
        dequantise: spread columns of few values, such as codes, evenly between the midpoints to their neighbours.
        reference: `gaussian` puts the energy, your own too, on a Gaussian fitted to the data (`energies.Tilted`),
            so that exp(−E) has an integral; a built-in energy has one already, which its settings choose.
        smoothing: s, from 0 to below 1: training sees √(1 − s²)·u + s·ξ in whitened units, which keeps mean and
            covariance and blurs everything else, so that few rows are not learnt by heart.
        trainer: all training settings at once, instead of `options`.
        evaluate: compute scores, samples and the diagnosis when training ends.
        progress: show a progress bar, or call this with each row of metrics.
        options: any other field of `TrainerConfig`, e.g. `batch_size=None`, `optimiser=`, `ema=0.999`.

    >>> import metastable as ms
    >>> x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    >>> method = ms.methods.Jarzynski(walkers=256, step_size=0.05)
    >>> run = ms.fit(None, x, method, steps=20, evaluate=False)
    >>> run.log_partition.std_error < 0.1
    True
    """
    dataset = data if isinstance(data, Dataset) else load_array(data)
    if labels is not None or given is not None:
        dataset = dataset.beside(labels=labels, given=given)
    if dequantise:
        dataset = dequantised(dataset, seed)
    method = resolve_method(method)
    check_options(options, method)
    config = trainer_config(trainer, steps, learning_rate, options)
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
    )
    if plan.doubt is not None:
        warnings.warn(plan.doubt, stacklevel=2)
    settings = plan.settings(__version__) | ({"dequantise": True} if dequantise else {})
    folder = None if out is None else Path(out)
    if folder is not None:
        _open_folder(folder, settings, resume)
    trainer_ = _trainer(plan, folder)
    with _shown(progress, trainer_.config.steps or 0, method.name) as on_row:
        trainer_.on_row = on_row
        try:
            outcome = trainer_.run(resume)
        except DivergenceError as error:
            if folder is not None:
                _write_failure(folder, settings, trainer_, plan, error)
            raise
    run = _run_of(trainer_.players, method, outcome, settings, folder)
    return _judged(run, plan, trainer_) if evaluate else run.outward(plan.coordinates)


def _trainer(plan: Plan, folder: Path | None) -> Trainer:
    held = None if plan.validation is plan.train else plan.validation_rows()
    return Trainer(
        plan.energy,
        players_of(plan),
        plan.rows,
        plan.method,
        plan.trainer,
        noise=plan.noise,
        engine=plan.engine,
        make_context=Context,
        seed=plan.seed,
        folder=folder,
        held_out=held,
        coordinates=plan.coordinates,
        power=plan.power,
    )


def _judged(run: Run, plan: Plan, trainer: Trainer) -> Run:
    """What the run is worth, found in the units of training and told in the data's own."""
    held = plan.validation_rows()
    if run.conditional:
        return evaluate_conditional(run, plan.rows, held, seed=plan.seed, coordinates=plan.coordinates)  # pyright: ignore
    chains = Chains(plan.method, trainer.context, trainer.state)
    toy = None if plan.dataset.toy is None else toy_within(plan.dataset.toy, plan.coordinates)
    return evaluate_run(
        run,
        events(plan.rows),
        events(held),
        toy,
        seed=plan.seed,
        chains=chains,
        coordinates=plan.coordinates,
    )


def _open_folder(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Make the run folder, or check that it is the run that is being resumed."""
    config = folder / "config.json"
    if config.exists():
        if not resume:
            raise InputError(f"out: {folder} already holds a run; give --resume to go on, or another folder")
        before = read_config(folder)
        for key in ("seed", "data", "method", "energy", "held_out", "units"):
            if before.get(key, "none" if key == "units" else None) != settings[key]:
                raise InputError(
                    f"resume: {key} differs from the run in {folder}: it was {before.get(key)!r}, "
                    f"now {settings[key]!r}"
                )
    elif folder.exists() and any(folder.iterdir()):
        raise InputError(f"out: {folder} is not empty and not a run; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(config, settings)


def _write_failure(
    folder: Path, settings: dict[str, Any], trainer: Trainer, plan: Plan, error: DivergenceError
) -> None:
    """A run that diverged still gets a summary, a diagnosis from what it logged, and a look at its negatives."""
    from metastable.evaluation.diagnosis import Facts, diagnose
    from metastable.report import write_report

    method = plan.method
    run = Run(trainer.energy, method.name, trainer.recorder.history, None, None, config=settings)
    run.status, run.folder, run.seconds = "diverged", folder, trainer.seconds
    run.power = power_of(method, trainer.context.step)
    o = getattr(run.learned_energy, "output_scale", None)
    run.diagnosis = diagnose(run.history, Facts(method=method.name, power=run.power, output_scale=o))
    missing = _keep_last_good(folder, trainer, plan)
    write_json(folder / "summary.json", run.summary() | {"message": str(error), "no_negatives": missing})
    write_report(folder)


def _keep_last_good(folder: Path, trainer: Trainer, plan: Plan) -> str:
    """Histograms of negatives at the newest good checkpoint for the report; in words, why there are none."""
    keep_histograms(folder, None, 0)  # none of an earlier training in the same folder
    try:
        with trainer.looking_back() as found:
            if found is None:
                return f"They are drawn from a checkpoint, and {folder / 'checkpoints'} holds none."
            context, state = found
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
        ema=outcome.ema,
        seconds=outcome.seconds,
        power=power_of(method, outcome.step),
        ended=outcome.message,
        kept=outcome.kept,
    )


class _shown:  # noqa: N801
    """A progress bar, a callback, or nothing, as a context."""

    def __init__(self, progress: bool | OnRow, steps: int, name: str):
        self.progress, self.steps, self.name, self.bar = progress, steps, name, None

    def __enter__(self) -> OnRow | None:
        if self.progress is True:
            from metastable.progress import TrainingBar

            self.bar = TrainingBar(self.steps, self.name)
            return self.bar.__enter__()
        return self.progress or None

    def __exit__(self, *details: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__(*details)


def sample(
    energy: Energy,
    n: int,
    *,
    kernel: Kernel | None = None,
    steps: int = 1000,
    init: Tensor | np.ndarray | Proposal | None = None,
    event_shape: int | tuple[int, ...] | None = None,
    warmup: int = 0,
    seed: int = 0,
    engine: str = "eager",
    record: int = 0,
) -> Walkers:
    """`n` chains of `steps` steps, run together.

    Args:
        energy: any callable `(B, *event) → (B,)`.
        n: chains.
        kernel: by default MALA with a warmed-up step size, or Gibbs for a discrete energy.
        steps: steps of each chain.
        init: positions `(m, *event)` to start from (drawn with replacement if m is not n), a proposal, or
            None for a standard normal (random signs for a discrete energy), in which case `event_shape` or the
            energy's own says the shape. Where the energy is +inf no chain can begin: draws are made again,
            positions are refused.
        event_shape: shape of one event, or its dimension.
        warmup: steps of step-size adaptation before the chains proper, whose moves are thrown away.
        seed: of every random number.
        engine: `eager` or `compile`.
        record: keep every `record`-th position in `.trace`, for `.to_arviz()`.

    Returns:
        Walkers with `.x`, equal weights, and `.info`: `acceptance`, `distance` (RMS move of a step), `kernel`
        (with its final step size) and `temperature`, the temperature at which the chain really samples.

    >>> import metastable as ms
    >>> w = ms.sample(ms.energies.DoubleWell(), 100, kernel=ms.kernels.MALA(step_size=0.05), steps=20)
    >>> w.x.shape, w.info["temperature"]
    (torch.Size([100, 1]), 1.0)
    """
    require_count("n", n)
    rng_seed = derive(seed, "sample")
    x = _inside(energy, n, init, event_shape, rng_seed)
    rng = generator(rng_seed, x.device)
    check_energy(energy, x, walls=True)
    if kernel is None and is_discrete(energy):
        kernel = Gibbs()
    elif kernel is None:
        kernel, warmup = MALA(0.1), warmup or 200
    if warmup:
        kernel, state = warm_up(kernel, energy, x, warmup, rng)
    else:
        state = kernel.init(energy, x)
    began = time.perf_counter()
    result = run_chain(kernel, energy, state, steps, rng, engine=engine, record=record)
    if not torch.isfinite(result.state.x).all():
        raise InputError(
            f"kernel.step_size: chains left every finite region with {kernel}; try a smaller step_size, MALA, "
            "or warmup=200"
        )
    info = {
        "acceptance": float(result.info.acceptance.mean()),
        "distance": float(result.info.moved.mean().sqrt()),
        "kernel": kernel,
        "temperature": kernel.temperature,
        "seconds": time.perf_counter() - began,
    }
    return Walkers.equal(result.state.x, info=info, trace=result.trace)


def _inside(energy: Any, n: int, init: Any, event_shape: Any, seed: int) -> Tensor:
    """Starts of chains where the energy is not +inf; draws that fall outside such a region are drawn again."""
    x = _initial(energy, n, init, event_shape, seed)
    inside = inside_walls(energy, x)
    if bool(inside.all()):
        return x
    if not (init is None or isinstance(init, Proposal)):
        raise InputError(
            f"init: the energy is +inf on {int((~inside).sum())} of {len(x)} starts, where no chain can begin; "
            "give positions inside the region where it is finite"
        )
    found = [x[inside]]
    for k in range(STARTS_AGAIN):
        x = _initial(energy, max(n, 512), init, event_shape, derive(seed, "again", k))
        found.append(x[inside_walls(energy, x)])
        if sum(map(len, found)) >= n:
            return torch.cat(found)[:n]
    rows = torch.cat(found)
    if not len(rows):
        drawn = "a standard normal" if init is None else "init"
        raise InputError(
            f"init: the energy is +inf on every draw of {drawn}; give positions where it is finite"
        )
    return rows[torch.arange(n, device=rows.device) % len(rows)]


def _initial(energy: Any, n: int, init: Any, event_shape: Any, seed: int) -> Tensor:
    rng = generator(derive(seed, "init"))
    if init is None:
        shape = event_shape if event_shape is not None else getattr(_module_of(energy), "event_shape", None)
        if shape is None:
            raise InputError("init: give starting positions, or event_shape (an integer or a shape)")
        shape = as_shape(shape)
        if is_discrete(energy):
            return Signs.uniform(shape).sample(n, rng).to(_home(energy))
        return torch.randn((n, *shape), generator=rng).to(_home(energy))
    if isinstance(init, Proposal):
        device = next((b.device for b in getattr(init, "buffers", list)()), torch.device("cpu"))
        return init.sample(n, generator(derive(seed, "init"), device))
    from metastable.data import check_data

    dtype = init.dtype if isinstance(init, Tensor) and init.is_floating_point() else torch.float32
    rows = torch.as_tensor(np.asarray(init) if not isinstance(init, Tensor) else init)
    x = check_data(torch.cat([rows, rows]) if len(rows) == 1 else rows, "init", dtype=dtype)[: len(rows)]
    return x.clone() if len(x) == n else x[torch.randint(len(x), (n,), generator=rng).to(x.device)]


def _home(energy: Any) -> Tensor:
    """A tensor with the dtype and device that the energy works in."""
    return home_of(_module_of(energy))


def _module_of(energy: Any) -> Any:
    """The module behind an energy that is given labels or contexts; any other energy itself."""
    return energy.energy if isinstance(energy, Bound) else energy


def continue_sampling(
    energy: Energy,
    walkers: Walkers,
    n: int,
    *,
    steps: int = 100,
    step_size: float | None = None,
    seed: int = 0,
) -> Walkers:
    """Sampling that goes on from weighted walkers, with as many as you like, and keeps what the weights say.

    `n` walkers are drawn in proportion to the weights, systematically and side by side, so that modes keep their
    masses; then they move by MALA, whose accept step leaves exp(−E) invariant. Their weights are therefore equal
    and stay so. Each walker draws a step size for each move from a range that a warm-up found, short enough for
    the narrowest region and long enough for the widest. A discrete energy's walkers move by Gibbs sweeps.

    Args:
        energy: the model.
        walkers: weighted samples of it, e.g. `run.walkers`.
        n: how many.
        steps: moves of each walker, or Gibbs sweeps.
        step_size: one for all moves instead of the range; a discrete energy has none.
        seed: of every random number.

    Returns:
        Walkers of equal weight. `.ess` is never more than the effective size of `walkers`, which is
        `.info["start_ess"]`: moves that cross between modes are rare, so the masses of modes are known no better
        than they were. `.info` also has `kernel`, `step_sizes` (the range) and `acceptance`.

    >>> import metastable as ms
    >>> energy = ms.energies.GaussianMixture(torch.tensor([[-5.0], [5.0]]), torch.tensor([0.02, 1.0]))
    >>> start = ms.Walkers.equal(energy.sample(1000, torch.Generator().manual_seed(0)))
    >>> w = continue_sampling(energy, start, 4000, steps=20)
    >>> round(w.ess), abs(float((w.x < 0).double().mean() - (start.x < 0).double().mean())) < 0.001
    (1000, True)
    """
    require_count("n", n)
    if walkers.log_weight.dim() > 1:
        raise InputError("walkers: these belong to several contexts; take those of one, walkers.of(i)")
    rng = generator(derive(seed, "continue"), walkers.x.device)
    if not is_discrete(energy):
        return continue_walkers(energy, walkers, n, steps, step_size, rng)
    if step_size is not None:
        raise UnsupportedError(f"step_size: Gibbs sweeps of a discrete energy have none, got {step_size}")
    start = walkers.resampled(n, seed=derive(seed, "resample"))
    moved = run_chain(Gibbs(), energy, Gibbs().init(energy, start.x), steps, rng)
    return Walkers.equal(moved.state.x, info={"kernel": Gibbs(), "start_ess": walkers.ess})


def log_partition(
    energy: Energy,
    dim: int | None = None,
    *,
    event_shape: int | tuple[int, ...] | None = None,
    reference: Proposal | None = None,
    data: Tensor | None = None,
    samples: Tensor | None = None,
    walkers: int = 512,
    populations: int = 16,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    kernel: Kernel | None = None,
    steps: int = 2,
    conditional_ess: float = 0.95,
    spread: float = SPREAD,
    refinements: int = 1,
) -> LogPartition:
    """log Z = log ∫ exp(−E) with a standard error and an interval that covers.

    Sequential Monte Carlo from a fitted reference, in independent populations
    (`metastable.evaluation.log_partition` says how). The energy may be +inf outside a region, which is then the
    region of the integral; one far from the origin needs `data` or a `reference`.

    Args:
        energy: any callable `(B, *event) → (B,)`.
        dim: dimension of an event that is a vector, the same as an `event_shape` of one number.
        event_shape: shape of one event, or its dimension; not needed where the energy or rows say it.
        reference: a normalised density to begin from; without one, a Gaussian fitted to `data` or `samples`, the
            energy's own reference, or what a search from N(0, `spread`²) finds.
        data: rows that the model should find likely, `(n, *event)`: the surest way to reach every mode.
        samples: independent draws of the model, `(n, *event)`, which also give the reverse estimate.
        walkers: in each population.
        populations: independent estimates of Z.
        seed: of every random number.
        dtype: of the walkers; by default that of the energy's parameters, else of the rows or the reference.
        device: likewise.
        kernel: by default short HMC trajectories, or Gibbs for a discrete energy.
        steps: moves at each temperature.
        conditional_ess: share of effective walkers that one change of temperature leaves.
        spread: standard deviation that a search begins from, in the model's units.
        refinements: how often the path may be made finer, at four times the cost, while populations disagree.

    Returns:
        The estimate; its `warnings` say in words what speaks against it.

    >>> import metastable as ms
    >>> z = ms.log_partition(ms.energies.Banana(), seed=0)
    >>> z.interval(0.95)[0] < ms.energies.Banana().log_partition() < z.interval(0.95)[1]
    tensor(True)
    """
    asked = None if event_shape is None else as_shape(event_shape)
    shape = asked or ((dim,) if dim is not None else getattr(energy, "event_shape", None))
    if shape is not None:
        x = _initial(energy, 3, None, shape, seed)
        inside = x if is_discrete(energy) else x[inside_walls(energy, x)]
        if len(inside):  # else the search, or what is given, says where it is finite
            check_energy(energy, inside, walls=True)
    return estimate_log_partition(
        energy,
        dim,
        event_shape=asked,
        reference=reference,
        data=data,
        samples=samples,
        walkers=walkers,
        populations=populations,
        seed=seed,
        dtype=dtype,
        device=device,
        kernel=kernel,
        steps=steps,
        conditional_ess=conditional_ess,
        spread=spread,
        refinements=refinements,
    )


def load_run(
    folder: str | Path,
    energy: nn.Module | None = None,
    *,
    method: Method | None = None,
    device: str = "cpu",
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
    folder = require_run_folder(folder)
    config = read_config(folder)
    method, context, state = _chains_of(folder, config, energy, method, device)
    coordinates = Coordinates.from_json(config.get("coordinates"))
    run = Run(
        energy=context.energy,
        players=dict(context.players),
        method=method.name,
        trained_with=method,
        history=read_history(folder),
        walkers=method.current_walkers(context, state),
        log_partition=method.log_partition(context, state),
        config=config,
        folder=folder,
        power=power_of(method, context.step),
    )
    return load_summary(run.outward(coordinates))


def load_chains(run: Run, train: Dataset) -> Chains:
    """The chains of a run at its newest good checkpoint, as they were in training.

    Args:
        run: from its folder, by `load_run`.
        train: the rows that it was trained on.
    """
    assert run.folder is not None
    home = run._home
    device, trainer = str(home.device), run.config["trainer"]
    own = run.config["energy"]["name"] == "custom"
    energy = run.energy if own else run.within().energy
    method, context, state = _chains_of(run.folder, run.config, energy, run.trained_with, device)
    rows = training_rows(
        train, method, Engine(device, trainer["precision"]), run.coordinates, run.config["seed"]
    )
    x = events(rows)
    given = rows.given if isinstance(rows, Pairs) else None
    context = dataclasses.replace(context, data=x, given=given, noise=noise_around(context.energy, x))
    return Chains(method, context, state)


def _chains_of(
    folder: Path, config: dict[str, Any], energy: Any, method: Method | None, device: str
) -> Chains:
    """Method, modules and state at the newest good checkpoint, in a context without the run's data."""
    checkpoint = CheckpointStore(folder / "checkpoints").load()
    if checkpoint is None:
        raise InputError(f"run: {folder} holds no checkpoint")
    if energy is None:
        energy = _rebuilt_energy(config, folder)
    method = resolve_method(_method_settings(config["method"])) if method is None else method
    energy = cast(nn.Module, reloaded(energy, config, method))
    context = _reread(energy, method, config, checkpoint.weights, device)
    context.step = checkpoint.step
    return Chains(method, context, method.load(on_device(checkpoint.state["method"], context.data.device)))


def _reread(
    energy: nn.Module, method: Method, config: dict[str, Any], weights: Mapping[str, Any], device: str
) -> Context:
    """Every module of a run with its weights, in a context whose data are not the run's, but of their shape."""
    dtype = next(iter(weights["energy"].values())).dtype
    rows = _probe(config, dtype)
    probe = events(rows)
    noise = noise_around(energy, probe)
    players = {
        "energy": energy,
        **method.companions(
            energy, rows if method.needs else probe, noise, derive(config["seed"], "companions")
        ),
    }
    for name, module in players.items():
        try:
            module.to(dtype=dtype).load_state_dict(dict(weights[name]))
        except RuntimeError as error:
            own, words = "energy=" if name == "energy" else "method=", " ".join(str(error).split())
            raise InputError(
                f"run: its {name!r} does not fit the module made for it; pass your own, load_run({own}…): {words}"
            ) from error
        module.to(device).eval()
    rng = generator(derive(config["seed"], "method"), torch.device(device))
    given = rows.given.to(device) if isinstance(rows, Pairs) else None
    return Context(energy, players, probe.to(device), noise.to(device), rng, given=given)


def _method_settings(described: dict[str, Any]) -> dict[str, Any]:
    """Settings that a file can hold: without the empty ones, and without objects of the user's own (`<name>`)."""
    own = {k for k, v in described.items() if isinstance(v, str) and v.startswith("<")}
    return {k: v for k, v in described.items() if v is not None and k not in own}


def _rebuilt_energy(config: dict[str, Any], folder: Path) -> nn.Module:
    if config["energy"]["name"] == "custom":
        raise InputError(
            f"energy: the run in {folder} trained your own {config['energy']['class']}; pass an instance, "
            "load_run(folder, energy=...)"
        )
    settings = build_tagged(ENERGIES, config["energy"], "energy")
    return built(settings, _probe(config), config["seed"])


def _probe(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensor | Pairs:
    """A few rows of the shape of a run's data, with labels or contexts where the run had those."""
    rng = generator(0)
    x = torch.randn((8, *config["event_shape"]), generator=rng).to(dtype)
    if "classes" in config:
        return Pairs(x, (config["classes"] - 1 - torch.arange(8)).clamp(min=0))
    if "context_shape" in config:
        return Pairs(x, torch.randn((8, *config["context_shape"]), generator=rng).to(dtype))
    return x
